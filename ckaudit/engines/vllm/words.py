"""What a release says, as a report quotes it."""

from __future__ import annotations

import re

_QUOTED = re.compile(r"named '([^']+)'|weight '([^']+)'")
MOST = 400
"""Characters of a message; some list every parameter of the model."""


def message(error: BaseException) -> str:
    """The loader's own words, on one line; of pydantic's only what was raised inside, without the dump of the arguments around it."""
    inner = [e["msg"] for e in error.errors()] if hasattr(error, "errors") and hasattr(error, "error_count") else []
    text = "; ".join(inner).replace("Value error, ", "") or f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= MOST else text[: MOST - 1] + "…"


def looked_up(error: BaseException) -> str | None:
    """The name that the loader did not find: what a KeyError names, or the first quoted name of the message."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return error.args[0]
    quoted = _QUOTED.search(str(error))
    return next((g for g in quoted.groups() if g), None) if quoted else None

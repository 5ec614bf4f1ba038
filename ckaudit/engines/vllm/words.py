"""What a release says, as a report quotes it."""

from __future__ import annotations

MOST = 400
"""Characters of a message; some list every parameter of the model."""


def message(error: BaseException) -> str:
    """The loader's own words, on one line; of pydantic's only what was raised inside, without the dump of the arguments around it."""
    inner = [e["msg"] for e in error.errors()] if hasattr(error, "errors") and hasattr(error, "error_count") else []
    text = "; ".join(inner).replace("Value error, ", "") or f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= MOST else text[: MOST - 1] + "…"

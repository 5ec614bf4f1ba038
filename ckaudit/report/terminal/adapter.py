"""What an adapter is, and how much of it binds in each engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ckaudit.report.terminal.layout import many, safe

_WORDS = {
    "absent": "not in the base",
    "untargeted": "not targeted",
    "converted": "taken for experts",
    "form": "of a form that is dropped",
    "open": "not judged",
}


def adapter(found: dict[str, Any]) -> Iterator[RenderableType]:
    """One line on the adapter, one line an engine, and an empty one."""
    facts = [f"adapter  {safe(found['method'])} ({found['dialect']})"]
    if found["rank"] is not None:
        facts.append(f"r {found['rank']}")
    facts.append(many(found["modules"], "module"))
    if found["replaced"]:
        facts.append(f"{found['replaced']:,} replaced")
    yield Text(" · ".join(facts), style="bold")
    if found["base"] is not None:
        yield Text(f"  on {safe(found['base'])}")
    for engine in found["engines"]:
        line = Text(
            f"  {engine['bound']:,} of {many(found['modules'], 'module')} bind  ",
            style="" if engine["bound"] else "bold red",
        )
        line.append(safe(engine["id"]), style="not bold default")
        rest = [f"{engine[key]:,} {word}" for key, word in _WORDS.items() if engine[key]]
        yield line.append("".join(f" · {r}" for r in rest), style="not bold dim default")
    yield ""

"""What is wrong with a rule book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from ckaudit.findings import FailOn, Finding, Skip, fails
from ckaudit.report.terminal.findings import listing, unjudged
from ckaudit.report.terminal.layout import counts, ending, many, safe, text


def render(
    book: str,
    names: int,
    findings: Sequence[Finding],
    skips: Sequence[Skip],
    *,
    fail_on: FailOn = "error",
    width: int = 100,
    colour: bool = False,
) -> str:
    """The findings about the rule book `book`, tried on so many names."""
    head = Text(safe(book), style="bold").append(f"  tried on {many(names, 'name')}", style="not bold dim")
    n = Counter(f.severity for f in findings)
    total = counts(n["error"], n["warning"], n["note"], len(skips))
    parts = [
        head,
        *listing(findings, {}, frozenset(), verbose=False),
        *unjudged(skips, {}),
        "",
        ending(total, int(fails(findings, fail_on)), fail_on, width),
    ]
    return text(parts, width=width, colour=colour)

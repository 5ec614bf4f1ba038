"""Two checkpoints side by side: what they have in common, and every way in which they differ with the rule that explains it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ckaudit.changes import Change, Diff
from ckaudit.checks.differences import CHECK_OF
from ckaudit.findings import Report
from ckaudit.report.terminal.layout import SEVERITIES, about, folded, grid, many, prose, size


def sides(report: Report) -> Iterator[RenderableType]:
    """A and B in numbers, a line or two each."""
    for side, target in (("A", report.source), ("B", report.target)):
        if target is not None:
            head, figures = about(target)
            yield Text.assemble((f"{side}  ", "bold cyan"), head)
            yield Padding(figures, (0, 0, 0, 3))


def diff(found: Diff, report: Report, *, quiet: bool, verbose: bool) -> Iterator[RenderableType]:
    """The `diff` section of a report: the answer in one line, then a row for each change. With `quiet` no findings follow."""
    yield _answer(found, report)
    if not found.changes:
        return
    table = grid("", "A", "B", "bytes", "")
    for column in table.columns[:4]:
        column.justify = "left" if column is table.columns[0] else "right"
        column.no_wrap = True
    for change in found.changes:
        one, other = len(set(change.old)), len(set(change.new))
        counts = f"{one:,}" if one else "", f"{other:,}" if other else ""
        table.add_row(_kind(change), *counts, _bytes(change), _why(change, quiet=quiet, verbose=verbose))
    yield Padding(table, (0, 0, 0, 2))


def _answer(found: Diff, report: Report) -> Text:
    left = sum(c.rule is None for c in found.changes)
    if not found.changes:
        line = Text(f"✓ identical{', as far as could be read' if found.unjudged else ''}", style="bold green")
    elif left or found.roundtrip:
        mark, style = SEVERITIES[report.worst or "note"]
        said = f"{many(left, 'difference')} not explained" if left else "not identical"
        line = Text(f"{mark} {said}", style=style)
    else:
        line = Text("✓ every difference is explained", style="bold green")
    total = report.source.tensors if report.source is not None else 0
    same = f"  {found.identical:,} of {many(total, 'tensor')} of A unchanged"
    if found.identical_bytes:
        same += f", {size(found.identical_bytes)}"
    return line.append(same, style="not bold default")


def _kind(change: Change) -> Text:
    return Text(change.kind, style="green" if change.rule is not None else "bold red")


def _why(change: Change, *, quiet: bool, verbose: bool) -> Text:
    """The rule that explains a change, or the finding that tells of it."""
    if change.rule is None:
        said = Text(CHECK_OF[change.kind].id, style="bold red")
        return said.append(f"  {prose(change.text).plain}", style="not bold default") if quiet else said
    said = prose(change.text)
    if change.engines:
        said.append(f"  (loads: {', '.join(change.engines)})", style="dim")
    if verbose:
        said.append("\n").append_text(folded(change.new or change.old, verbose=True))
    return said


def _bytes(change: Change) -> str:
    before, after = size(change.old_bytes), size(change.new_bytes)
    if change.old_bytes and change.new_bytes and before != after:
        return f"{before} → {after}"
    return before if change.old_bytes else after if change.new_bytes else ""

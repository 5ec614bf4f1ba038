"""What is quantised, for the terminal: on disk, in the config and in each engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ckaudit.findings import Quantised
from ckaudit.report.terminal.layout import safe

_FEW = 6
"""Rows that are shown; the rest is counted."""


def quantisation(rows: Sequence[Quantised], *, verbose: bool) -> Iterator[RenderableType]:
    """Two lines for modules that are alike: how they are quantised, and their paths; a few rows, or all if `verbose`."""
    if not rows:
        return
    yield ""
    yield Text("quantised modules", style="bold")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    shown = rows if verbose else rows[:_FEW]
    for row in shown:
        built = "".join(f" · {safe(engine)}: {safe(made)}" for engine, made in row.built.items())
        more = f" and {len(row.modules) - 1} more kinds" if len(row.modules) > 1 else ""
        how = Text(f"on disk: {safe(row.on_disk)} · config: {safe(row.declared)}{built}")
        table.add_row(Text(f"  {row.count:,}"), how)
        table.add_row("", Text(f"{safe(row.modules[0])}{more}", style="dim"))
    yield table
    if len(rows) > len(shown):
        yield Text(f"  and {len(rows) - len(shown)} rows more (--verbose shows all)", style="dim")

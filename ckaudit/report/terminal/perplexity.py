"""The perplexity of a target, what it was compared with, the rows that moved and the faults that were planted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ckaudit.report.terminal.layout import grid, label, many, safe

SHOWN = 8
"""Rows of the table of moved rows, unless all are asked for."""


def perplexity(section: dict[str, Any], *, verbose: bool) -> Iterator[RenderableType]:
    """The `perplexity` section of a report."""
    score, compared = section["score"], section["comparison"]
    line = Text("perplexity ", style="bold")
    line.append(_number(score["perplexity"]), style="bold cyan" if score["perplexity"] is not None else "bold red")
    line.append(
        f"  {safe(score['side'])} · {many(len(score['rows']), 'row')} · {many(score['tokens'], 'token')}", style="dim"
    )
    line.append(f" · {score['seconds']:.1f} s", style="dim")
    yield line
    settings = score["settings"]
    yield Text(
        "  " + " · ".join(f"{k} {safe(str(v))}" for k, v in settings.items() if v not in (None, False)), style="dim"
    )
    if compared is not None:
        yield ""
        yield from _comparison(compared, section["reference"]["side"], verbose=verbose)
    if section["faults"]:
        yield ""
        yield from _faults(section["faults"])


def _comparison(compared: dict[str, Any], reference: str, *, verbose: bool) -> Iterator[RenderableType]:
    relative, tolerance = compared["relative"], compared["tolerance"]
    within = relative is not None and abs(relative) <= tolerance
    line = Text("✓ " if within else "✗ ", style="bold green" if within else "bold red")
    line.append(_percent(relative), style="bold")
    line.append(f" against {_number(compared['reference'])} of {safe(reference)}, tolerance {tolerance:.2%}")
    if compared["noise"] is not None:
        low, high = compared["interval"]
        line.append(f", noise ±{compared['noise']:.2%} (95 %: {low:+.2%} to {high:+.2%})", style="dim")
    yield line
    if compared["tolerance_reason"]:
        yield Text(f"  tolerance: {safe(compared['tolerance_reason'])}", style="dim")
    moved = [m for m in compared["moved"] if m["relative"] is None or m["relative"]]
    shown = moved if verbose else moved[:SHOWN]
    if not shown:
        return
    table = grid("row", "reference", "candidate", "moved")
    for row in shown:
        table.add_row(safe(row["id"]), _number(row["reference"]), _number(row["candidate"]), _percent(row["relative"]))
    yield table
    if len(shown) < len(moved):
        yield label(f"… and {len(moved) - len(shown):,} more rows (--verbose shows all)")


def _faults(faults: list[dict[str, Any]]) -> Iterator[RenderableType]:
    table = grid("planted fault", "moves perplexity", "seen")
    for fault in faults:
        if fault["not_applicable"]:
            seen = Text(f"not here: {safe(fault['not_applicable'])}", style="dim")
        else:
            seen = Text("✓ seen", style="green") if fault["seen"] else Text("✗ hidden", style="bold red")
        table.add_row(safe(fault["fault"]), "" if fault["not_applicable"] else _percent(fault["relative"]), seen)
    yield table


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _percent(value: float | None) -> str:
    return "not finite" if value is None else f"{value:+.2%}"

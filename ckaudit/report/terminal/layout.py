"""Words, numbers and boxes that the views of the terminal report share. Text from a checkpoint passes through `safe` or `prose`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ckaudit.findings import Check, Target
from ckaudit.naming import fold, printable
from ckaudit.plan import Verdict

FEW = 6
"""Lines of folded names that a finding shows, and lines of a loader's message, unless all are asked for."""

VERDICTS: dict[Verdict, tuple[str, str, str]] = {
    "loads": ("✓", "loads", "bold green"),
    "loads_with_loss": ("!", "loads with loss", "bold yellow"),
    "fails": ("✗", "fails", "bold red"),
    "not_judged": ("?", "not judged", "bold magenta"),
}
"""Mark, words and style."""

SEVERITIES = {"error": ("✗", "bold red"), "warning": ("!", "bold yellow"), "note": ("·", "bold cyan")}
"""Mark and style."""


def text(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
    """`parts` one below the other, without trailing blanks."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        emoji=False,
        no_color=False,
        legacy_windows=False,
    )
    for part in parts:
        asis = isinstance(part, Text) and bool(part.no_wrap)  # print() forgets what a Text says of its own wrapping
        console.print(part, crop=False, no_wrap=asis, overflow="ignore" if asis else None)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def about(target: Target) -> tuple[Text, Text]:
    """A checkpoint in two lines: which it is, and its numbers."""
    head = Text(safe(target.name), style="bold")
    if target.revision:
        head.append(f" @ {safe(target.revision[:12])}", style="dim")
    if kind := ", ".join(target.architectures) or target.model_type or "":
        head.append(f"  {safe(kind)}", style="cyan")
    figures = [many(target.tensors, "tensor")]
    if target.parameters is not None:
        figures.append(f"{short(target.parameters)} parameters")
    if target.bytes is not None:
        figures.append(size(target.bytes))
    figures.append(many(target.shards, "shard"))
    dtypes = sorted(target.dtypes.items())
    figures += [f"{safe(d)} {n:,}" if len(dtypes) > 1 else safe(d) for d, n in dtypes]
    return head, Text(" · ".join(figures), style="dim")


def grid(*headings: str) -> Table:
    """A borderless table whose text wraps inside its column."""
    table = Table(
        box=None, show_header=bool(headings), show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim"
    )
    for i in range(max(len(headings), 3) if headings else 3):
        table.add_column(headings[i] if i < len(headings) else "", overflow="fold")
    return table


def catalogue(checks: Iterable[Check]) -> Table:
    """Every check with its usual severity."""
    table = grid("check", "usually", "what it finds")
    for check in checks:
        table.add_row(
            Text(check.id, style="bold"), Text(check.severity, style=SEVERITIES[check.severity][1]), prose(check.title)
        )
    return table


def label(words: str) -> Text:
    return Text(words, style="dim", no_wrap=True)


def folded(names: Sequence[str], *, verbose: bool) -> Text:
    lines = fold(names)
    shown = lines if verbose or len(lines) <= FEW else lines[: FEW - 1]
    body = Text("\n".join(shown), overflow="fold")
    if len(shown) < len(lines):
        body.append(f"\n… and {len(lines) - len(shown):,} more lines (--verbose shows all)", style="dim")
    return body


def clip(said: str, *, verbose: bool) -> Text:
    """A program's own words: the first lines that say something, each escaped."""
    lines = [line for line in said.split("\n") if line.strip()]
    shown = lines if verbose or len(lines) <= FEW else [*lines[: FEW - 1], "…"]
    return Text("\n").join(prose(line) for line in shown)


def safe(value: str) -> str:
    return printable(value)


def prose(value: str, style: str = "") -> Text:
    """A sentence that may hold names: escaped, but a backslash that is there stays one."""
    return Text(printable(value).replace(r"\\", "\\"), style, overflow="fold")


def counts(errors: int, warnings: int, notes: int, skips: int) -> Text:
    """`1 error · 0 warnings · 0 notes · 2 not judged`, what is zero dimmed."""
    line = Text()
    for count, severity in ((errors, "error"), (warnings, "warning"), (notes, "note")):
        line.append(many(count, severity), style=SEVERITIES[severity][1] if count else "dim").append(" · ", style="dim")
    return line.append(f"{skips:,} not judged", style="bold magenta" if skips else "dim")


_EXITS = {
    0: "nothing at or above",
    1: "findings at or above",
    2: "the load was stopped",
    3: "something asked for could not be judged",
}


def ending(line: Text, code: int, fail_on: str, width: int) -> Text:
    """`line` with the exit code and what it means, on a line of its own where both do not fit."""
    meaning = _EXITS[code] if code in (2, 3) else f"{_EXITS[code]} {fail_on}"
    if code == 0 and fail_on == "never":
        meaning = "findings never fail"
    told = f"exit {code}: {meaning}"
    fits = line.cell_len + 2 + len(told) <= width
    return line.append(f"  {told}" if fits else f"\n{told}", style="dim")


def many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def short(count: int) -> str:
    """1300659440 -> `1.30 B`."""
    for limit, unit in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}" if count < 100 * limit else f"{count / limit:,.0f}{unit}"
    return f"{count:,}"


def size(count: int) -> str:
    """Bytes in decimal units, as the Hub shows them: 2601318880 -> `2.6 GB`."""
    for limit, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return many(count, "byte")

"""Report -> text for a person: verdicts first, then findings with cause and cure, worst first.

Everything that comes from a checkpoint is escaped (`naming.printable`) and is laid out as `rich.text.Text`, which reads no markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ckaudit.findings import Report
from ckaudit.report.terminal.adapter import adapter
from ckaudit.report.terminal.diff import diff, sides
from ckaudit.report.terminal.findings import findings, skips
from ckaudit.report.terminal.layout import about, counts, ending, text
from ckaudit.report.terminal.load import load
from ckaudit.report.terminal.perplexity import perplexity
from ckaudit.report.terminal.quantisation import quantisation
from ckaudit.report.terminal.verdicts import details, every_name, verdicts


def render(
    report: Report,
    *,
    width: int = 100,
    colour: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    names: bool = False,
) -> str:
    """The report as text of at most `width` columns, with ANSI colours if `colour`.

    `quiet` keeps the verdicts and the summary; `verbose` adds every name, what is lost by design, what else an engine noticed, rule tables
    and environments; `names` every tensor with its fate.
    """
    return text(_report(report, width, quiet=quiet, verbose=verbose, names=names), width=width, colour=colour)


def _report(report: Report, width: int, *, quiet: bool, verbose: bool, names: bool) -> Iterator[RenderableType]:
    if not quiet:
        yield from about(report.target)
        yield ""
    if report.adapter is not None:
        yield from adapter(report.adapter)
    yield from verdicts(report, width, verbose=verbose)
    if not quiet:
        yield from quantisation(report.quantisation, verbose=verbose)
        yield from findings(report, verbose=verbose)
        yield from skips(report, verbose=verbose)
        if verbose:
            for plan in report.plans:
                yield from details(plan)
    if names:
        for plan in report.plans:
            yield from every_name(plan)
    yield ""
    yield _summary(report, width)


def render_load(
    report: Report,
    layers: Iterable[Any],
    *,
    width: int = 100,
    colour: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> str:
    """The report of `ckaudit load` as text: verdicts, the load, the forward pass, a chart of `layers`, then findings."""
    parts: list[RenderableType] = [] if quiet else [*about(report.target), ""]
    parts += verdicts(report, width, verbose=verbose)
    if report.load is not None:
        parts += ["", *load(report.load, report.forward, () if quiet else layers, verbose=verbose)]
    if not quiet:
        parts += [*findings(report, verbose=verbose), *skips(report, verbose=verbose)]
    return text([*parts, "", _summary(report, width)], width=width, colour=colour)


def render_perplexity(
    report: Report, *, width: int = 100, colour: bool = False, quiet: bool = False, verbose: bool = False
) -> str:
    """The report of `ckaudit ppl` as text: the number first, what it was compared with, then findings."""
    assert report.perplexity is not None
    parts: list[RenderableType] = [] if quiet else [*about(report.target), ""]
    parts += perplexity(report.perplexity, verbose=verbose)
    if not quiet:
        parts += [*findings(report, verbose=verbose), *skips(report, verbose=verbose)]
    return text([*parts, "", _summary(report, width)], width=width, colour=colour)


def render_diff(
    report: Report, *, width: int = 100, colour: bool = False, quiet: bool = False, verbose: bool = False
) -> str:
    """The report of `ckaudit diff` as text: both sides, what differs and why, then findings."""
    parts: list[RenderableType] = [] if quiet else [*sides(report), ""]
    if report.diff is not None:
        parts += diff(report.diff, report, quiet=quiet, verbose=verbose)
    if not quiet:
        parts += [*findings(report, verbose=verbose), *skips(report, verbose=verbose)]
    return text([*parts, "", _summary(report, width)], width=width, colour=colour)


def _summary(report: Report, width: int) -> Text:
    s = report.summary
    line = counts(s.errors, s.warnings, s.notes, s.skips)
    if s.suppressed:
        line.append(f" · {s.suppressed:,} suppressed", style="dim")
    return ending(line, report.exit_code, report.fail_on, width)

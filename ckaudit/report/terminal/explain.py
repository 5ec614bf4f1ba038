"""One name's way through every rule, per engine."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ckaudit.findings import Report
from ckaudit.plan import NameFate, Parameter, Plan
from ckaudit.report.terminal.findings import chain, findings
from ckaudit.report.terminal.layout import VERDICTS, clip, folded, grid, label, prose, safe, text


def about(report: Report, name: str) -> Report:
    """`report` with the findings that name `name` alone."""
    return msgspec.structs.replace(report, findings=tuple(f for f in report.findings if name in f.names))


def all_names(report: Report) -> list[str]:
    """Every tensor and every parameter that the report knows."""
    named = {n.name: None for p in report.plans for n in p.names} | dict.fromkeys(report.sizes)
    return [*named, *{p.name: None for plan in report.plans for p in plan.parameters if p.name not in named}]


def known(report: Report, name: str) -> bool:
    """Whether `name` is a tensor of the checkpoint or a parameter of an engine's model."""
    return name in all_names(report)


def render(report: Report, name: str, *, width: int = 100, colour: bool = False) -> str:
    """What every engine does with the tensor, or how it fills the parameter, called `name`."""
    return text(_parts(report, name), width=width, colour=colour)


def _parts(report: Report, name: str) -> Iterator[RenderableType]:
    yield Text(safe(name), style="bold", overflow="fold")
    for plan in report.plans:
        yield ""
        mark, word, style = VERDICTS[plan.verdict]
        release = f" {plan.release}" if plan.release and plan.release not in plan.id else ""
        yield Text(f"{mark} ", style=style).append(safe(plan.id + release), style="bold default").append(f"  {word}")
        if plan.not_judged is not None:
            yield Padding(clip(plan.not_judged, verbose=False), (0, 0, 0, 2))
        parameters = {p.name: p for p in plan.parameters}
        fate = next((n for n in plan.names if n.name == name), None)
        if fate is not None:
            yield Padding(_tensor(fate, parameters), (0, 0, 0, 2))
        elif name in parameters:
            yield Padding(_parameter(parameters[name], plan), (0, 0, 0, 2))
        elif plan.not_judged is None:
            yield Padding(Text("unknown to this engine", style="dim"), (0, 0, 0, 2))
    yield from findings(report, verbose=True)


def _tensor(fate: NameFate, parameters: dict[str, Parameter]) -> RenderableType:
    table = grid()
    table.add_row(label("way"), chain(fate) if fate.chain else Text("no rule changes the name", style="dim"))
    table.add_row(
        label("fate"), Text(fate.fate.replace("_", " "), style="bold green" if fate.fate == "loaded" else "bold red")
    )
    if fate.by_design:
        table.add_row(label("by design"), prose(fate.by_design))
    if fate.into is not None:
        into = Text(safe(fate.into), overflow="fold")
        if fate.shard is not None:
            into.append(f"  (part {safe(fate.shard)})", style="dim")
        table.add_row(label("into"), into)
    if fate.also:
        table.add_row(label("also"), folded(fate.also, verbose=False))
    if fate.read is not None:
        table.add_row(
            label("read"), Text(f"{fate.read:.4g} of its elements" if fate.read < 1 else "all of its elements")
        )
    if fate.into in parameters:
        table.add_row(label("which is"), _coverage(parameters[fate.into]))
    return table


def _parameter(parameter: Parameter, plan: Plan) -> RenderableType:
    table = grid()
    table.add_row(
        label("is"),
        Text(f"a {'buffer' if parameter.buffer else 'parameter'} of {safe(plan.architecture or 'the model')}"),
    )
    table.add_row(label("written"), _coverage(parameter))
    if parameter.sources:
        table.add_row(label("from"), folded(parameter.sources, verbose=False))
    if parameter.by_design:
        table.add_row(label("by design"), prose(parameter.by_design))
    return table


def _coverage(parameter: Parameter) -> Text:
    words = {"full": "fully written", "partial": "partly written", "none": "not written", "unknown": "not observed"}
    found = Text(words[parameter.coverage])
    if parameter.coverage == "partial" and parameter.share is not None:
        found.append(f" ({parameter.share:.1%})")
    if parameter.shape is not None:
        found.append(f"  {safe(parameter.dtype or '')} {list(parameter.shape)}", style="dim")
    return found

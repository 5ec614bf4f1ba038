"""Findings with cause and cure, and what was not judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckaudit.findings import Finding, Report, Skip
from ckaudit.plan import NameFate, Plan, Step
from ckaudit.report.terminal.layout import SEVERITIES, clip, folded, grid, label, many, prose, safe, size


def findings(report: Report, *, verbose: bool) -> Iterator[RenderableType]:
    """Every standing finding, and with `verbose` the suppressed ones."""
    plans = {p.id: p for p in report.plans}
    first = {f.names[0] for f in report.findings if f.names}
    tensors = first & report.sizes.keys()
    if first != tensors:  # of an index without shards no size is known
        tensors |= {n.name for p in report.plans for n in p.names if n.name in first}
    yield from listing(report.findings if verbose else report.standing, plans, tensors, verbose=verbose)


def listing(
    found: Sequence[Finding], plans: Mapping[str, Plan], tensors: Set[str], *, verbose: bool
) -> Iterator[RenderableType]:
    """Findings one below the other; `plans` by engine id and the names of `tensors` say more of them."""
    for engines, finding in _same_cause(found):
        yield ""
        yield from _finding(finding, engines, plans, tensors, verbose=verbose)


def _same_cause(findings: Sequence[Finding]) -> list[tuple[list[str], Finding]]:
    """Findings that differ in their engine alone, told once with all engines."""
    groups: dict[object, tuple[list[str], Finding]] = {}
    for f in findings:
        key = (f.check, f.severity, f.blame, f.names, f.wanted, f.found, f.message, f.mend, f.suppressed_by)
        engines, _ = groups.setdefault(key, ([], f))
        if f.engine is not None:
            engines.append(f.engine)
    return list(groups.values())


def _finding(
    finding: Finding, engines: Sequence[str], plans: Mapping[str, Plan], tensors: Set[str], *, verbose: bool
) -> Iterator[RenderableType]:
    mark, style = SEVERITIES[finding.severity]
    head = Text(f"{mark} {finding.check} {safe(finding.title)}", style=style)
    where = [safe(e) for e in engines]
    head.append("  " + " · ".join([*where, f"blame: {finding.blame}"]), style="not bold dim default")
    yield head
    if finding.message:
        yield Padding(prose(finding.message), (0, 0, 0, 2))
    table = grid()
    if finding.names:
        table.add_row(label(_amount(finding, plans, tensors)), folded(finding.names, verbose=verbose))
    for word, value in (("wanted", finding.wanted), ("found", finding.found)):
        if value:
            table.add_row(label(word), prose(value))
    if plan := plans.get(finding.engine or ""):
        example = _example(finding, plan)
        if example is not None:
            table.add_row(label("rules"), chain(example))
    if finding.mend:
        table.add_row(label("mend"), prose(finding.mend, "green"))
    if finding.suppressed_by:
        table.add_row(label("suppressed"), prose(finding.suppressed_by))
    yield Padding(table, (0, 0, 0, 2))


def _amount(finding: Finding, plans: Mapping[str, Plan], tensors: Set[str]) -> str:
    """`4 tensors, 1.2 MB`: how much is concerned, told by what the names are."""
    first = finding.names[0]
    plan = plans.get(finding.engine or "")
    if first in tensors:
        word = "tensor"
    elif plan is not None and any(p.name == first for p in plan.parameters):
        word = "parameter"
    else:
        word = "name" if finding.engine else "file" if first.endswith((".safetensors", ".json")) else "name"
    amount = many(finding.count or len(finding.names), word)
    return f"{amount}\n{size(finding.bytes)}" if finding.bytes else amount


def _example(finding: Finding, plan: Plan) -> NameFate | None:
    """The first of the finding's tensors that rules renamed on its way, where renaming is what the finding is about."""
    if finding.check[:3] not in ("CK2", "CK7"):
        return None
    wanted = set(finding.names)
    return next((n for n in plan.names if n.chain and n.name in wanted), None)


def chain(fate: NameFate) -> Table:
    """One name's way through the rules, a step a line, each with the rule that took it."""
    table = Table.grid(padding=(0, 1))
    table.add_row("", Text(safe(fate.name), overflow="fold"))
    for step in fate.chain:
        after = Text("(dropped)" if step.after is None else safe(step.after), style="bold", overflow="fold")
        table.add_row("→", after.append(f"  ({_rule(step)})", style="not bold dim"))
    return table


def _rule(step: Step) -> str:
    shard = f", shard {safe(step.shard)}" if step.shard is not None else ""
    return f"{safe(step.rule)} '{prose(step.key).plain}' in {safe(step.at) or 'the model'}{shard}"


def skips(report: Report, *, verbose: bool = False) -> Iterator[RenderableType]:
    """What was not judged: the reason, then the checks that it leaves open. Where there is no tensor at all, that is reason enough."""
    if len(report.skips) > 1 and not report.target.tensors and not verbose:
        yield ""
        yield Text("? not judged", style="bold magenta")
        line = Text("no tensor could be read", overflow="fold")
        yield Padding(
            line.append(f"  {many(len(report.skips), 'check')} (--verbose lists them)", style="dim"), (0, 0, 0, 2)
        )
        return
    yield from unjudged(report.skips, {p.id: p.not_judged for p in report.plans})


def unjudged(skipped: Sequence[Skip], told: Mapping[str, str | None]) -> Iterator[RenderableType]:
    """The skips by reason; one that is `told` with its engine's verdict is not told again."""
    reasons: dict[tuple[str | None, str], list[str]] = {}
    for skip in skipped:
        reasons.setdefault((skip.engine, skip.reason), []).append(skip.check)
    if reasons:
        yield ""
        yield Text("? not judged", style="bold magenta")
    lines: dict[tuple[str, str], list[str]] = {}
    for (engine, reason), checks in reasons.items():
        known = engine is not None and told.get(engine) == reason
        engines = lines.setdefault(("" if known else reason, ranges(checks)), [])
        engines += [engine] if engine is not None else []
    for (reason, ids), engines in lines.items():
        line = Text(overflow="fold")
        if engines:
            line.append(f"{', '.join(map(safe, engines))}: ", style="dim")
        line.append_text(clip(reason, verbose=False) if reason else Text("no verdict, see above"))
        yield Padding(line.append(f"  {ids}", style="dim"), (0, 0, 0, 2))


def ranges(ids: Iterable[str]) -> str:
    """Check ids in order, runs of three or more by their ends: `CK101–CK114 CK116`."""
    runs: list[list[str]] = []
    for check in sorted(set(ids)):
        follows = runs and runs[-1][-1][:2] == check[:2] == "CK" and int(check[2:]) == int(runs[-1][-1][2:]) + 1
        if follows:
            runs[-1].append(check)
        else:
            runs.append([check])
    return " ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else " ".join(r) for r in runs)

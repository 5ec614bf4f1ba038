"""The verdict of each engine: one line that says it, and the facts behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from packaging.version import InvalidVersion, Version
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ckaudit.findings import Report, tally
from ckaudit.plan import Plan
from ckaudit.report.terminal.layout import VERDICTS, clip, folded, grid, label, many, prose, safe, size

_SEPARATOR = " · "


def verdicts(report: Report, width: int, *, verbose: bool) -> Iterator[RenderableType]:
    heads = [_head(p, report) for p in report.plans]
    facts = [_facts(p, report) for p in report.plans]
    column = max((h.cell_len for h in heads), default=0) + 2
    beside = all(column + len(_SEPARATOR.join(f)) <= width for f in facts)
    for plan, head, fact in zip(report.plans, heads, facts, strict=True):
        if beside:
            head.pad_right(column - head.cell_len)
            yield head.append(_SEPARATOR.join(fact), style="not bold dim default")
        else:
            yield head
            yield from (Padding(Text(line, style="dim"), (0, 0, 0, 4)) for line in _lines(fact, width - 4))
        for verb, said in (("raises", plan.error), ("because", plan.not_judged)):
            if said:
                yield Padding(
                    Text().append(f"{verb}: ", style="dim").append_text(clip(said, verbose=verbose)), (0, 0, 0, 4)
                )
        yield from _ranks(plan)
        yield from _draft(plan, verbose=verbose)
    broken = sorted({f.check for f in report.standing if f.severity == "error" and f.check.startswith("CK1")})
    if broken and any(p.verdict in ("loads", "loads_with_loss") for p in report.plans):
        yield Text(
            f"  by names and shapes alone: the files themselves are faulty, see {' '.join(broken)}", style="bold yellow"
        )
    yield from _matrix(report)
    if not report.plans:
        yield Text("? not judged: no engine was run", style="bold magenta")


def _matrix(report: Report) -> Iterator[RenderableType]:
    """Of several releases of one engine: where it goes wrong, and where it is right again."""
    groups: dict[str, dict[Version, bool]] = {}
    for plan in report.plans:
        if plan.release is not None and plan.verdict != "not_judged":
            with suppress(InvalidVersion):
                groups.setdefault(plan.id.partition("==")[0], {})[Version(plan.release)] = plan.verdict == "loads"
    for engine, releases in groups.items():
        bad = sorted(v for v, loads in releases.items() if not loads)
        good = sorted(v for v, loads in releases.items() if loads and bad and v > bad[-1])
        if len(releases) > 1 and bad:
            since = (
                f"first bad release {bad[0]}"
                if bad[0] > min(releases)
                else f"bad from the first release asked, {bad[0]}"
            )
            until = f"good again from {good[0]}" if good else f"still bad in {bad[-1]}"
            yield Text(f"  {safe(engine)}: {since}, {until}", style="bold")


def _head(plan: Plan, report: Report) -> Text:
    mark, word, style = VERDICTS[plan.verdict]
    widest = max(len(VERDICTS[p.verdict][1]) for p in report.plans)
    head = Text(f"{mark} {word:<{widest}}  ", style=style)
    known = plan.release and plan.release not in plan.id
    head.append(safe(f"{plan.id} {plan.release}" if known else plan.id), style="not bold default")
    if plan.method == "rules":
        head.append("  provisional", style="not bold dim default")
    return head


def _lines(facts: Sequence[str], width: int) -> list[str]:
    """The facts in lines that break between them, not inside."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(_SEPARATOR) + len(fact) <= width:
            lines[-1] += _SEPARATOR + fact
        else:
            lines.append(fact)
    return lines


def _facts(plan: Plan, report: Report) -> list[str]:
    n = tally(plan, report.sizes)
    facts = []
    if plan.names:
        facts.append(f"{n.loaded:,} of {many(len(plan.names), 'tensor')}")
        counts = {"dropped": n.dropped, "ignored": n.ignored, "unmatched": n.unmatched, "not reached": n.not_reached}
        facts += [f"{count:,} {word}" for word, count in counts.items() if count]
        if n.by_design:
            facts.append(f"{n.by_design:,} left by design")
    if n.parameters:
        facts.append(f"{n.full:,} of {many(n.parameters, 'parameter')} full")
        gaps = Counter(p.coverage for p in plan.parameters if p.by_design is None)
        words = {"partly written": gaps["partial"], "not written": gaps["none"], "not observed": n.unknown}
        facts += [f"{count:,} {word}" for word, count in words.items() if count]
        if n.unwritten_by_design:
            facts.append(f"{n.unwritten_by_design:,} unwritten by design")
    if n.bytes_lost and plan.verdict != "not_judged":
        facts.append(f"{size(n.bytes_lost)} lost")
    return facts


def _ranks(plan: Plan) -> Iterator[RenderableType]:
    """The layouts over several ranks that were asked for, one a row."""
    if not plan.tp:
        return
    plain = all(row.get("pp", 1) == 1 and not row.get("ep") for row in plan.tp)
    table = grid("tp" if plain else "ranks", "verdict", "per rank", "")
    for row in plan.tp:
        _, word, style = VERDICTS[row["verdict"]]
        rank, lost = row.get("bytes_per_rank"), row.get("lost") or ()
        said = row.get("error") or (f"{many(len(lost), 'name')} on no rank, such as {lost[0]}" if lost else "")
        layout = (
            str(row["size"]) if plain else f"tp {row['size']} · pp {row.get('pp', 1)}{' · ep' if row.get('ep') else ''}"
        )
        table.add_row(layout, Text(word, style=style), size(rank) if rank else "", prose(said))
    yield Padding(table, (0, 0, 0, 4))


def _draft(plan: Plan, *, verbose: bool) -> Iterator[RenderableType]:
    """The draft model, and how much of each of its layers is there."""
    if plan.draft is None:
        return
    _, word, style = VERDICTS[plan.draft.verdict]
    line = (
        Text("draft: ", style="dim")
        .append(safe(plan.draft.architecture), style="not dim")
        .append(" ")
        .append(word, style=style)
    )
    for state in ("complete", "partial", "dropped"):
        paths = [layer.path for layer in plan.draft.layers if layer.state == state]
        if paths:
            line.append(f"{_SEPARATOR}{state}: ").append(folded(paths, verbose=verbose))
    yield Padding(line, (0, 0, 0, 4))
    if plan.draft.error:
        yield Padding(Text("raises: ", style="dim").append_text(clip(plan.draft.error, verbose=verbose)), (0, 0, 0, 6))


def details(plan: Plan) -> Iterator[RenderableType]:
    """What only --verbose shows of one engine: by-design losses, what else it noticed, rules with their hits, the environment."""
    yield ""
    yield Text(safe(plan.id), style="bold underline")
    reasons: dict[tuple[str, str], list[str]] = {}
    for n in plan.names:
        if n.by_design is not None:
            reasons.setdefault(("tensor", n.by_design), []).append(n.name)
    for p in plan.parameters:
        if p.by_design is not None and p.coverage != "full":
            reasons.setdefault(("parameter", p.by_design), []).append(p.name)
    if reasons:
        table = grid("by design", "", "")
        for (word, why), names in reasons.items():
            table.add_row(Text(many(len(names), word)), prose(why), folded(names, verbose=True))
        yield Padding(table, (0, 0, 0, 2))
    if plan.notes:
        table = grid("noticed", "", "")
        for note in plan.notes:
            table.add_row(Text(safe(note.kind)), prose(note.text), folded(note.names, verbose=True))
        yield Padding(table, (0, 0, 0, 2))
    if plan.rules:
        table = grid("hits", "rule", "from", "to", "in", "source")
        for rule in plan.rules:
            style = "" if rule.hits else "yellow"
            cells = (
                rule.rule,
                rule.key,
                "(dropped)" if rule.to is None else rule.to,
                rule.at or "the model",
                rule.source,
            )
            table.add_row(Text(f"{rule.hits:,}", style=style), *(prose(c, style) for c in cells))
        yield Padding(table, (0, 0, 0, 2))
    facts = {"architecture": plan.architecture, **plan.environment, **{k: str(v) for k, v in plan.options.items()}}
    table = grid()
    for key, value in facts.items():
        if value:
            table.add_row(label(safe(key)), Text(safe(str(value)), overflow="fold"))
    yield Padding(table, (0, 0, 0, 2))


def every_name(plan: Plan) -> Iterator[RenderableType]:
    """Each tensor on a line of its own, which is never wrapped: its fate, its name, and where it went."""
    yield ""
    yield Text(safe(plan.id), style="bold underline")
    lines = []
    for n in plan.names:
        into = "" if n.into is None or n.into == n.name else f" → {safe(n.into)}"
        part = f" ({safe(n.shard)})" if n.shard is not None else ""
        why = f"  {prose(n.by_design).plain}" if n.by_design is not None else ""
        lines.append(f"  {n.fate.replace('_', ' '):<11}  {safe(n.name)}{into}{part}{why}")
    yield Text("\n".join(lines), no_wrap=True, overflow="ignore")

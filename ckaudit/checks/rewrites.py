"""CK201, CK202, CK208, CK217, CK221: names that an engine's own rules spoil, told step by step from the trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from ckaudit.checks.case import Case
from ckaudit.checks.facts import shape
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable
from ckaudit.plan import NameFate, Step

CASCADE = Check("CK201", "cascading substitution", "error")
NEVER = Check("CK202", "rule that can never fire where it sits", "error")
TWICE = Check("CK208", "rule applied to its own result", "error")
SPOILS = Check("CK217", "rule that spoils a right name", "error")
FORGOTTEN = Check("CK221", "declared fused, and no rule fuses it", "error")
CHECKS = (CASCADE, NEVER, TWICE, SPOILS, FORGOTTEN)


def spoiled(case: Case) -> Iterator[Finding]:
    """Strays that were right on the way: at one step the name was a parameter's, and a rule then changed it again.

    The rule fired on what another rule had just written (CK201), on its own result (CK208, or CK201 for a name that came fused), or on a
    name that it was not made for, often in the middle of a word (CK217). Without a parameter to compare with (a rule book that lists
    none) only a cascade into the middle of a word is told.
    """
    groups: dict[tuple[str, str, str], list[tuple[NameFate, int]]] = defaultdict(list)
    targets = {p.name for p in case.plan.parameters}
    for fate in case.strays.values():
        if (found := _spoiling(fate.chain, targets)) is not None:
            check, step = found
            groups[check.id, fate.chain[step].rule, fate.chain[step].key].append((fate, step))
    for (check_id, *_), members in groups.items():
        yield _told(case, next(c for c in CHECKS if c.id == check_id), members)


def _spoiling(chain: tuple[Step, ...], targets: set[str]) -> tuple[Check, int] | None:
    """The check and the step that spoiled a name: it was right just before, else it would have been at the end without that step."""
    return _step(chain, targets, _before) or _step(chain, targets, _without)


def _step(
    chain: tuple[Step, ...], targets: set[str], right: Callable[[tuple[Step, ...], int], str]
) -> tuple[Check, int] | None:
    for i, step in enumerate(chain):
        if step.after is None or step.after == step.before:
            continue
        before = chain[i - 1] if i and chain[i - 1].at == step.at and chain[i - 1].after == step.before else None
        cascades = before is not None and _overlaps(before, step)
        if right(chain, i) in targets:
            if any((s.rule, s.key) == (step.rule, step.key) for s in chain[:i]):
                return TWICE, i
            return (CASCADE if cascades or _own_result(step) else SPOILS), i
        if cascades and not targets and _inside_word(step):
            return CASCADE, i
    return None


def _told(case: Case, check: Check, members: list[tuple[NameFate, int]]) -> Finding:
    names = [fate.name for fate, _ in members]
    fate, i = _example(members)
    step = fate.chain[i]
    first = next((j for j in range(i) if fate.chain[j].at == step.at), i)
    texts = [fate.chain[first].before, *(s.after or "" for s in fate.chain[first : i + 1])]
    way = " -> ".join(f"`{printable(t)}`" for t in texts)
    where = f" in `{printable(step.at)}`" if step.at else ""
    key = printable(step.key)
    cause = {
        CASCADE.id: f"the rule `{key}` fires on what `{printable(fate.chain[i - 1].key)}` wrote"
        if i > first
        else f"the rule `{key}` fires on a name that already has its result",
        TWICE.id: f"the rule `{key}` is applied to its own result",
        SPOILS.id: f"the rule `{key}` matches inside a longer word"
        if _inside_word(step)
        else f"the rule `{key}` is not for this name, which a parameter has as it was",
    }[check.id]
    shards = {s.shard for f, j in members for s in f.chain[:j] if s.shard} - {step.shard}
    lost = (
        f"; shard id {' and '.join(sorted(shards))} {'becomes' if len(shards) == 1 else 'become'} {step.shard}"
        if shards and step.shard
        else ""
    )
    right = {way(f.chain, j) for f, j in members for way in (_before, _without)}
    instead = case.use_instead(names)
    mend = f"{instead}; or l" if instead else "L"
    mend += (
        "et the engine apply its rules once."
        if check == TWICE
        else f"et the engine's rule match whole path segments (`.{key.strip('.')}.`) and stop at the first that fires."
    )
    finding = case.finding(
        check, f"{way}{where}: {cause}{lost}.", names=names, blame="engine", mend=mend,
        wanted=printable(step.before), found=printable(step.after or ""),
    )  # fmt: skip
    case.take(names, right)
    return finding


def _example(members: list[tuple[NameFate, int]]) -> tuple[NameFate, int]:
    """A weight to show, the same one on every run: of the last kind by name, in the first layer."""
    weights = [m for m in members if m[0].name.endswith("weight")] or members
    last = max(shape(f.name) for f, _ in weights)
    return next(m for m in weights if shape(m[0].name) == last)


def _before(chain: tuple[Step, ...], i: int) -> str:
    """The name as it was before a step."""
    return _full(chain[i].at, chain[i].before)


def _without(chain: tuple[Step, ...], i: int) -> str:
    """The name as it would be without a step, once the later ones of the same mapper had fired."""
    step = chain[i]
    rest = step.before
    for later in chain[i + 1 :]:
        if later.at != step.at or later.after is None or later.rule == "regex":
            break
        start, stop = _span(later)
        key, tail = later.before[start:stop], len(later.before) - stop
        to = later.after[start : len(later.after) - tail]
        fires = {"prefix": rest.startswith(key), "suffix": rest.endswith(key)}.get(later.rule, key in rest)
        if fires:
            at = rest.rfind(key) if later.rule == "suffix" else rest.find(key)
            rest = rest[:at] + to + rest[at + len(key) :]
    return _full(step.at, rest)


def _full(at: str, local: str) -> str:
    return f"{at}.{local}" if at else local


def _span(step: Step) -> tuple[int, int]:
    """Where in the text before it the rule matched."""
    if step.rule == "regex":
        try:
            match = re.search(step.key, step.before)
        except re.error:
            match = None
        return match.span() if match else (0, 0)
    start = step.before.rfind(step.key) if step.rule == "suffix" else step.before.find(step.key)
    return (start, start + len(step.key)) if start >= 0 else (0, 0)


def _written(step: Step) -> tuple[int, int]:
    """What part of the text after it the rule wrote."""
    before, after = step.before, step.after or ""
    shortest = min(len(before), len(after))
    start = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    tail = next((i for i in range(shortest - start) if before[-1 - i] != after[-1 - i]), shortest - start)
    return start, len(after) - tail


def _overlaps(first: Step, second: Step) -> bool:
    """Whether `second` matched text that `first` had written."""
    (a, b), (start, stop) = _written(first), _span(second)
    return start < b and a < stop


def _inside_word(step: Step) -> bool:
    """Whether the match begins or ends in the middle of an identifier."""
    start, stop = _span(step)
    return bool(re.search(r"\w\Z", step.before[:start]) and step.before[start : start + 1] != ".") or bool(
        re.match(r"\w", step.before[stop:]) and step.before[stop - 1 : stop] != "."
    )


def _own_result(step: Step) -> bool:
    """Whether the rule fired on a name that already read as the rule would write it (`up_proj` in `gate_up_proj`)."""
    start, stop = _span(step)
    after = step.after or ""
    written = after[start : len(after) - (len(step.before) - stop)]
    return written != step.key and step.key in written and written in step.before


def never_fires(case: Case) -> Iterator[Finding]:
    """A rule whose key begins with a dot, on a submodule whose loader sees names without their parent path.

    There the segment the rule is for comes first and has no dot before it, so the rule has no hit although names of its kind arrive.
    """
    idle = [r for r in case.plan.rules if r.hits == 0 and r.at and r.key.startswith(".") and len(r.key) > 1]
    by_at: dict[str, list[str]] = defaultdict(list)
    for rule in idle:
        by_at[rule.at].append(rule.key)
    groups: dict[tuple[str, ...], tuple[set[str], set[str], str]] = {}
    for at, keys in by_at.items():
        local = {n: (f.into or n).rpartition(f"{at}.")[2] for n, f in case.strays.items() if f"{at}." in (f.into or n)}
        hit = {key: {n for n, rest in local.items() if f".{rest}".startswith(key)} for key in keys}
        used = tuple(sorted(key for key in keys if hit[key]))
        if used:
            names, gaps, _ = groups.setdefault(used, (set(), set(), at))
            names |= set().union(*(hit[key] for key in used))
            gaps |= {g for g in case.gaps if g.startswith(f"{at}.")}
    for keys_used, (names, gaps, at) in groups.items():
        shown = ", ".join(f"`{printable(k)}`" for k in keys_used)
        instead = case.use_instead(names)
        mend = f"{instead}; or p" if instead else "P"
        yield case.finding(
            NEVER,
            f"The rules {shown} sit on `{printable(at)}`, whose loader sees names without that path: nothing there begins with a dot, "
            "so they never fire.",
            names=names, blame="engine", mend=mend + "ut the rules on the model, where names are whole.",
            wanted=f"{keys_used[0]} in a whole name", found=f"{keys_used[0][1:]} at the beginning of a stripped one",
        )  # fmt: skip
        case.take(names, gaps)


def forgotten(case: Case) -> Iterator[Finding]:
    """Strays that a class declares to be parts of a fused module which stands where they were looked up, and that no rule put there."""
    for note in case.plan.notes:
        names = [n for n in note.names if n in case.strays] if note.kind == "packed-unmapped" else []
        if not names:
            continue
        places = {(case.strays[n].into or n).rpartition(".")[0] for n in names}
        gaps = [g for g in case.gaps if any(_beside(g, place) for place in places)]
        instead = case.use_instead(names)
        mend = f"{instead}; or l" if instead else "L"
        yield case.finding(
            FORGOTTEN, f"{note.text}: `{printable(case.strays[names[0]].into or names[0])}` finds no parameter.", names=names,
            blame="engine", wanted="a rule for every declared part", found="none there",
            mend=f"{mend}et the engine's mapper fuse what packed_modules_mapping declares.",
        )  # fmt: skip
        case.take(names, gaps)


def _beside(parameter: str, place: str) -> bool:
    """Whether a parameter's module and a place, or what holds that, have one parent."""
    parent = parameter.rpartition(".")[0].rpartition(".")[0]
    return parent in (place, place.rpartition(".")[0])

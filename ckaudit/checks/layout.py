"""CK210, CK211, CK212, CK220: numbered stacks with gaps, experts stored twice or in another layout."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from ckaudit.checks.case import Case, many, on_files
from ckaudit.checks.facts import LAYER_KEYS, Facts, Stack, shape
from ckaudit.findings import Check, Finding
from ckaudit.naming import fold, printable

LAYER_GAP = Check("CK210", "layers that are not there", "error")
EXPERT_GAP = Check("CK211", "experts that are not there", "error")
EXPERTS_TWICE = Check("CK212", "experts stored both one by one and fused", "error")
EXPERTS_OTHERWISE = Check("CK220", "experts in a layout that the engine does not read", "error")
CHECKS = (LAYER_GAP, EXPERT_GAP, EXPERTS_TWICE, EXPERTS_OTHERWISE)

_SOURCE = "Take the layers from the source of this checkpoint"
_EXPERTS = re.compile(r"(.*(?:^|\.)(?:local_)?experts)\.")
_NUMBERED = re.compile(r"^(.*?)\.([0-9]{1,6})\.")


def numbers(indices: Iterable[int]) -> str:
    """`0..3,7`: how a set of numbers is told."""
    folded = fold(f"{i}." for i in indices)
    return folded[0].rstrip(".").strip("{}") if len(folded) == 1 else ", ".join(folded)


def layer_holes(facts: Facts) -> Iterator[Finding]:
    """A stack of layers whose numbers have a hole: whatever the config says, a layer was lost."""
    for path, stack in facts.layers.items():
        holes = stack.holes
        if _from_one(facts, stack):
            yield on_files(
                facts, LAYER_GAP, f"`{printable(path)}` is numbered from 1: its layers are {numbers(stack.indices)}.",
                [f"{path}.{i}" for i in stack.indices], mend="Number the layers from 0.", wanted=f"{path}.0", found=f"{path}.1",
            )  # fmt: skip
            continue
        if not holes or len(holes) >= len(stack.numbers) or _regular(stack):
            continue
        yield on_files(
            facts, LAYER_GAP,
            f"`{printable(path)}` has layers {numbers(stack.indices)}; layers {numbers(holes)} are not in the checkpoint.",
            [f"{path}.{i}" for i in holes], mend="Take the layers from the source of this checkpoint: a part of it was lost.",
            wanted=f"{path}.{{{numbers(range(max(stack.numbers) + 1))}}}", found=f"{path}.{{{numbers(stack.indices)}}}",
        )  # fmt: skip


def _from_one(facts: Facts, stack: Stack) -> bool:
    """Whether a stack of as many layers as the config counts begins with 1."""
    count = len(stack.numbers)
    return stack.indices == list(range(1, count + 1)) and count in facts.values(LAYER_KEYS).values()


def numbered_from_one(case: Case) -> Iterator[Finding]:
    """Takes the first layer of the engine's model, which nothing fills, and the last of the files, where those are numbered from 1."""
    for path, stack in case.facts.layers.items():
        if _from_one(case.facts, stack):
            last, first = f"{path}.{len(stack.numbers)}.", f".{path.rpartition('.')[2]}.0."
            case.take(
                [n for n in case.strays if n.startswith(last)],
                [g for g in case.gaps if first in f".{g}"],
                because=LAYER_GAP.id,
            )
    return iter(())


def _regular(stack: Stack) -> bool:
    """Whether the numbers go up in equal steps: modules that alternate with others without weights."""
    indices = stack.indices
    return len({b - a for a, b in pairwise(indices)}) == 1


def layers_lost(case: Case) -> Iterator[Finding]:
    """Whole layers of the engine's model of which no parameter was written, beside others that were."""
    own = {
        re.sub(r".*\.", "", n.rpartition(".")[0]) + n[n.rfind(".") :]
        for f in case.on_files
        if f.check == LAYER_GAP.id
        for n in f.names
    }
    for path, (lost, kept) in _whole(case.gaps, (p.name for p in case.plan.parameters)).items():
        if not kept:
            continue
        parameters = [p for i in lost for p in lost[i]]
        told = {i for i in lost if f"{path.rpartition('.')[2]}.{i}" in own}
        new = sorted(lost.keys() - told)
        if new:
            size = len(kept) + len(lost)
            key = next((k for k, v in case.facts.values(LAYER_KEYS).items() if v == size), None)
            says = f"; the config says {key}: {size}" if key else ""
            yield case.finding(
                LAYER_GAP, f"No tensor fills layer{'s' if len(new) > 1 else ''} {numbers(new)} of `{printable(path)}`; "
                f"{numbers(kept)} {'are' if len(kept) > 1 else 'is'} there{says}.",
                parameters=[p for i in new for p in lost[i]],
                mend=f"{_SOURCE}, or set {key} to {len(kept)} if it was cut on purpose." if key else f"{_SOURCE}.",
                wanted=f"layers {numbers(range(size))}", found=f"layers {numbers(kept)}",
            )  # fmt: skip
        filled = set(parameters)
        case.take([n for n, f in case.strays.items() if f.into in filled], filled, LAYER_GAP.id if told else "")


def _whole(some: Iterable[str], every: Iterable[str]) -> dict[str, tuple[dict[int, list[str]], list[int]]]:
    """Stack path -> (numbers all of whose members are in `some`, with them; the other numbers)."""
    chosen = set(some)
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in every:
        if match := _NUMBERED.match(name):
            stacks[match[1]][int(match[2])].append(name)
    out = {}
    for path, members in stacks.items():
        whole = {i: names for i, names in members.items() if chosen.issuperset(names)}
        if whole:
            out[path] = whole, sorted(members.keys() - whole.keys())
    return out


def expert_holes(facts: Facts) -> Iterator[Finding]:
    """Experts that are missing, whole or in part, among numbered ones. Loaders that stack experts sort the numbers and never check them."""
    for place, stacks in facts.experts.items():
        whole: list[str] = []
        usual = Counter(tuple(s.indices) for s in stacks.values()).most_common(1)[0][0]
        full = set(range(max(max(usual) + 1, len(usual))))
        for path, stack in stacks.items():
            if max(stack.numbers) < 100_000:
                whole += [f"{path}.{i}" for i in sorted((full | set(range(max(stack.numbers)))) - stack.numbers)]
        parts = [] if stacks.uniform else [name for stack in stacks.values() for name in _incomplete(stack)]
        if whole or parts:
            told = " and ".join(
                t
                for t in (
                    many(len(whole), "expert") if whole else "",
                    f"parts of {f'{len(parts)} more' if whole else many(len(parts), 'expert')}" if parts else "",
                )
                if t
            )
            yield on_files(
                facts, EXPERT_GAP, f"{told} not there in `{printable(place)}`, whose stacks mostly hold experts {numbers(usual)}.",
                whole + parts,
                mend="Take them from the source of this checkpoint; if experts were pruned, number the rest from 0 in every layer.",
                wanted=numbers(sorted(full)), found=numbers(_odd(stacks, full)),
            )  # fmt: skip


def _odd(stacks: Mapping[str, Stack], full: set[int]) -> list[int]:
    """The numbers of the first stack that is not full, or of any."""
    return next((s.indices for s in stacks.values() if s.numbers != full), sorted(full))


def _incomplete(stack: Stack) -> Iterator[str]:
    """Modules (`gate_proj`) that most experts of a stack have and some lack."""
    parts = {i: {rest.split(".", 1)[0] for rest in rests} for i, rests in stack.members.items()}
    if len({frozenset(p) for p in parts.values()}) == 1:
        return
    counts = Counter(part for found in parts.values() for part in found)
    usual = {part for part, n in counts.items() if 2 * n > len(parts)}
    for i, found in sorted(parts.items()):
        yield from (f"{stack.path}.{i}.{part}" for part in sorted(usual - found))


def experts_lost(case: Case) -> Iterator[Finding]:
    """Takes the losses that a gap among the experts explains: every tensor and parameter of the stacks it stands in."""
    paths = {
        re.split(r"\.[0-9]+(?:\.[^.]+)?$", n)[0] for f in case.on_files if f.check == EXPERT_GAP.id for n in f.names
    }
    if paths:
        inside = [f for f in case.plan.names if any(True for _ in _prefixes(f.name, paths))]
        filled = {f.into for f in inside if f.into} | {a for f in inside for a in f.also}
        known = {match[1] for p in filled if (match := _EXPERTS.match(p))} | paths
        gaps = [g for g in case.gaps if (match := _EXPERTS.match(g)) and match[1] in known]
        case.take([f.name for f in inside], {*filled, *gaps}, EXPERT_GAP.id)
    return iter(())


def _prefixes(name: str, paths: set[str]) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        if name[:at] in paths:
            yield name[:at]
        at = name.find(".", at + 1)


_ENGINES_OWN = re.compile(r"\.experts\.(w13|w2)_")
"""How vLLM and SGLang call experts that they have stacked; no model's files do."""


def experts_otherwise(case: Case) -> Iterator[Finding]:
    """Experts one by one for an engine that has them fused, or the other way round: strays and gaps in the same stacks of experts."""
    strays, gaps = _by_experts((f.into or n, n) for n, f in case.strays.items()), _by_experts((g, g) for g in case.gaps)
    both = sorted(strays.keys() & gaps.keys())
    if both:
        names, parameters = [n for p in both for n in strays[p]], [g for p in both for g in gaps[p]]
        stored, wanted = names[0], parameters[0]
        own = all(_ENGINES_OWN.search(n) for n in names)
        yield case.finding(
            EXPERTS_OTHERWISE,
            f"{many(len(names), 'expert tensor')} in a layout that this engine does not read, in {many(len(both), 'module')}: "
            f"`{printable(stored)}` is stored, `{printable(wanted)}` is asked for.",
            names=names, blame="checkpoint" if own else "engine", wanted=printable(wanted), found=printable(stored),
            mend="Save the experts as the model's own files name them: these are names from inside an engine."
            if own
            else "Use a release that reads this layout, or convert the experts (transformers saves the original one by default).",
        )  # fmt: skip
        case.take(names, parameters)


def _by_experts(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second of each pair by the path of the stack of experts in the first."""
    found: dict[str, list[str]] = defaultdict(list)
    for known, name in names:
        if match := _EXPERTS.match(known):
            found[match[1]].append(name)
    return found


_PROJECTION = re.compile(r"(?<![a-z])(gate|up|down|w1|w2|w3|w13|fc1|fc2|input|output|linear)(?![a-z])")


def experts_twice(facts: Facts) -> Iterator[Finding]:
    """Experts one by one and, beside them, fused over all experts: a loader takes one set and drops the other without a word."""
    fused: dict[str, list[str]] = defaultdict(list)
    for path, stacks in facts.experts.items():
        depth = path.count(".") + 1
        for text, names in facts.shapes.items():
            rest = text[len(path) + 1 :] if text.startswith(f"{path}.") else "#"
            if rest[0] != "#" and ("proj" in rest or re.match(r"w[0-9]", rest)):
                for name in names:
                    if (owner := ".".join(name.split(".")[:depth])) in stacks:
                        fused[owner].append(name)
    both: list[str] = []
    for path, names in fused.items():
        members = facts.experts[shape(path)][path].members
        single = {m for rests in members.values() for r in rests for m in _PROJECTION.findall(r.replace("_", " "))}
        both += [n for n in names if single & set(_PROJECTION.findall(n[len(path) :].replace("_", " ")))]
    if both:
        where = {n.rpartition(".")[0] for n in both}
        yield on_files(
            facts, EXPERTS_TWICE,
            f"{len(both)} fused expert tensors stand beside the same experts one by one (in {many(len(where), 'module')}).", both,
            mend="Keep one of the two sets.", wanted="one layout in a module", found=f"{printable(both[0])} and numbered experts",
        )  # fmt: skip


def experts_twice_here(case: Case) -> Iterator[Finding]:
    """Takes what `experts_twice` explains: the set that this engine dropped."""
    twice = {n.rpartition(".")[0] for f in case.on_files if f.check == EXPERTS_TWICE.id for n in f.names}
    if twice:
        inside = [f for f in case.plan.names if any(True for _ in _prefixes(f.name, twice))]
        case.take([f.name for f in inside], {f.into for f in inside if f.into}, EXPERTS_TWICE.id)
    return iter(())

"""Weights that are stored in another layout: parts fused into one tensor, experts stacked, and the reverse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import combinations, permutations, takewhile

import msgspec

from ckaudit.changes import Rule
from ckaudit.diff.units import Unit
from ckaudit.naming import printable

Named = Mapping[str, tuple[Unit, tuple[str, ...]]]
"""Name -> (unit, the renames that led from the unit's own name to this one)."""

_MOST = 12
"""Modules of one parent that are tried as parts of one tensor."""
_ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "w13": "gate_up_proj", "w31": "up_gate_proj"}
"""What the numbered projections of Mixtral, InternLM and Llama's first release are called elsewhere."""


class Relaid(msgspec.Struct, frozen=True):
    """Groups (units of many, the unit that holds them all), in one layout."""

    rule: Rule
    parts: str
    """What is together, in words: "`q_proj`, `k_proj`, `v_proj`"."""
    whole: str
    renames: tuple[str, ...]
    """The renames that this layout comes with."""
    groups: tuple[tuple[tuple[Unit, ...], Unit], ...]


class Part(msgspec.Struct, frozen=True, gc=False):
    """One module's tensor, or those of all experts together (`shape` then begins with their number)."""

    units: tuple[Unit, ...]
    shape: tuple[int, ...] | None
    renames: tuple[str, ...]


def relaid(many: Named, one: Named) -> Iterator[Relaid]:
    """What of `many` is, several tensors together, one tensor of `one`: with shapes that add up, or where none is known, by names."""
    wholes: dict[tuple[str, str], dict[str, Part]] = defaultdict(dict)
    for name, (unit, renames) in one.items():
        parent, module, leaf = _site(name)
        wholes[parent, leaf][module] = Part((unit,), unit.shape, renames)
    parts: dict[tuple[str, str], dict[str, Part]] = defaultdict(dict)
    experts: dict[tuple[str, str], dict[str, dict[int, tuple[Unit, tuple[str, ...]]]]] = {}
    for name, (unit, renames) in many.items():
        parent, module, leaf = _site(name)
        if (parent, leaf) in wholes:
            parts[parent, leaf][module] = Part((unit,), unit.shape, renames)
        path, _, number = parent.rpartition(".")
        if number.isdecimal() and len(number) < 7 and (path, leaf) in wholes:
            stack = experts.setdefault((path, leaf), {})
            stack.setdefault(module, {})[int(number)] = unit, renames
    yield from _grouped("fused", parts, wholes)
    stacks = {site: {m: s for m, found in modules.items() if (s := _stack(found))} for site, modules in experts.items()}
    yield from _grouped("stacked", stacks, wholes)


def _site(name: str) -> tuple[str, str, str]:
    """Parent path, module and leaf of a tensor: `a.q_proj.bias` and `a.q_proj_bias` -> (`a`, `q_proj`, `bias`), else a weight."""
    parent, _, last = name.rpartition(".")
    if last in ("weight", "bias"):
        parent, _, module = parent.rpartition(".")
        return parent, module, last
    for leaf in ("weight", "bias"):
        if last.endswith(f"_{leaf}"):
            return parent, last.removesuffix(f"_{leaf}"), leaf
    return parent, last, "weight"


def _stack(members: Mapping[int, tuple[Unit, tuple[str, ...]]]) -> Part | None:
    """One module of all experts, where none is missing and all are alike."""
    if sorted(members) != list(range(len(members))):
        return None
    first, renames = members[0]
    if any(u.shape != first.shape for u, _ in members.values()):
        return None
    shape = None if first.shape is None else (len(members), *first.shape)
    return Part(tuple(members[i][0] for i in range(len(members))), shape, renames)


def _grouped(
    rule: Rule, parts: Mapping[tuple[str, str], dict[str, Part]], wholes: Mapping[tuple[str, str], dict[str, Part]]
) -> Iterator[Relaid]:
    """What was found at each place, told once for all places of one kind."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[tuple[tuple[Unit, ...], Unit]]] = defaultdict(list)
    for site, modules in parts.items():
        for names, whole in _matches(modules, wholes[site], stacked=rule == "stacked"):
            found = wholes[site][whole]
            used = [modules[n] for n in names]
            text = ", ".join(f"`{printable(n)}`" for n in names)
            if rule == "stacked":
                text = f"{len(used[0].units)} experts' {text}"
            renames = tuple(dict.fromkeys(t for p in (*used, found) for t in p.renames))
            members = tuple(u for p in used for u in p.units), found.units[0]
            groups[text, f"`{printable(whole)}`", renames].append(members)
    for (text, whole, renames), found_here in groups.items():
        yield Relaid(rule, text, whole, renames, tuple(found_here))


def _matches(
    parts: dict[str, Part], wholes: dict[str, Part], *, stacked: bool
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of parts and the name of the whole that they make; each part in one whole only."""
    left = dict(parts)
    for whole, target in wholes.items():
        named = _candidates(tuple(sorted(left)), whole, stacked) if len(left) <= _MOST else ()
        every = (tuple(left),) if len(wholes) == 1 and len(left) > 1 else ()
        for names in named:
            if _adds_up([left[n].shape for n in names], target.shape, stacked=stacked) is not False:
                break
        else:
            names = next((e for e in every if _adds_up([left[n].shape for n in e], target.shape, stacked=stacked)), ())
        if names:
            yield names, whole
            for name in names:
                del left[name]


@lru_cache(maxsize=1024)
def _candidates(parts: tuple[str, ...], whole: str, stacked: bool) -> tuple[tuple[str, ...], ...]:
    """The sets of parts whose names make up the whole's (`q_proj`, `k_proj`, `v_proj`: `qkv_proj`), in its order, the largest first."""
    found: list[tuple[str, ...]] = []
    for size in range(min(4, len(parts)), 0 if stacked else 1, -1):
        for chosen in combinations(parts, size):
            order = _spelt([_ROLES.get(n, n) for n in chosen], _ROLES.get(whole, whole).lower())
            if order is not None:
                found.append(tuple(chosen[i] for i in order))
    return tuple(found)


def _spelt(parts: list[str], whole: str) -> tuple[int, ...] | None:
    """The order in which the words that the parts do not share spell the whole; None when they do not."""
    parts = [p.lower() for p in parts]
    if len(parts) == 1:
        return (0,) if parts[0] == whole else None
    head = _beginning(parts)
    tail = _beginning([p[len(head) :][::-1] for p in parts])[::-1]
    stems = [p[len(head) : len(p) - len(tail)] for p in parts]
    if whole == tail.strip("_"):
        return tuple(range(len(parts)))  # `q_conv1d`, `k_conv1d`, `v_conv1d` -> `conv1d`
    core = whole.removeprefix(head).removesuffix(tail)
    for order in permutations(range(len(stems))):
        words = [stems[i] for i in order]
        if core in ("".join(words), "_".join(words), "_and_".join(words)):
            return order
    return None


def _beginning(words: list[str]) -> str:
    """The letters with which all of them begin."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*words, strict=False))
    return "".join(letters[0] for letters in alike)


def _adds_up(parts: list[tuple[int, ...] | None], whole: tuple[int, ...] | None, *, stacked: bool) -> bool | None:
    """Whether `parts` laid side by side along one axis have the shape `whole`; None when a shape is unknown.

    Stacked experts may be stored transposed, and so may a bias-free fused weight of a Conv1D.
    """
    shapes = [s for s in parts if s is not None]
    if whole is None or len(shapes) < len(parts):
        return None
    if len({len(s) for s in (*shapes, whole)}) > 1:
        return False
    ways = [shapes]
    if len(whole) == 2 + stacked:
        ways.append([(*s[:-2], s[-1], s[-2]) for s in shapes])
    return any(_along(way, whole, axis) for way in ways for axis in range(int(stacked), len(whole)))


def _along(shapes: list[tuple[int, ...]], whole: tuple[int, ...], axis: int) -> bool:
    """Whether shapes that are equal but for `axis` sum up to `whole` along it."""
    rest = {(s[:axis], s[axis + 1 :]) for s in shapes}
    return rest == {(whole[:axis], whole[axis + 1 :])} and sum(s[axis] for s in shapes) == whole[axis]

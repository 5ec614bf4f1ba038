"""CK222: projections that are one tensor on disk and several in the engine (`qkv_proj`; `q_proj`, `k_proj`, `v_proj`), or the reverse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckaudit.checks.case import Case, many
from ckaudit.findings import Check, Finding
from ckaudit.naming import fold, natural_key, printable

JOINED = Check("CK222", "projections fused on one side and split on the other", "error")
CHECKS = (JOINED,)

Shape = tuple[int, ...]
Place = tuple[str, str]
"""Path of the parent module and what follows the module in the name: (`layers.3.self_attn`, `weight`)."""


def joined(case: Case) -> Iterator[Finding]:
    """Strays and gaps beside each other whose rows add up: one layout against another, told once for all layers."""
    tensors = case.facts.checkpoint.tensors
    stored = _placed((f.into or n, n, tensors[n].shape) for n, f in case.strays.items() if n in tensors)
    lacking = _placed((g, g, p.shape) for g, p in case.gaps.items() if p.coverage == "none")
    groups: dict[tuple[bool, tuple[str, ...], tuple[str, ...]], list[Place]] = defaultdict(list)
    for place in sorted(stored.keys() & lacking.keys(), key=lambda p: natural_key(p[0])):
        here, there = stored[place], lacking[place]
        if _add_up(here, there) or _add_up(there, here):
            groups[len(here) > len(there), tuple(here), tuple(there)].append(place)
    for (split, ours, theirs), places in sorted(groups.items()):
        names = [name for place in places for name, _ in stored[place].values()]
        parameters = [name for place in places for name, _ in lacking[place].values()]
        elsewhere = case.loads_elsewhere(names)
        way = (
            f"Concatenate their rows in the order that the class wants ({', '.join(map(printable, theirs))})"
            if split
            else "Split their rows, in the order in which they were joined: headers cannot tell that"
        )
        yield case.finding(
            JOINED, f"{many(len(names), 'tensor')} ({_listed(ours)}) are {'split' if split else 'fused'} where this class has "
            f"{_listed(theirs)}, in {many(len(places), 'module')}: {', '.join(f'`{line}`' for line in fold(names)[:2])}.",
            names=names, blame="engine" if elsewhere else "checkpoint", wanted=printable(parameters[0]), found=printable(names[0]),
            mend=f"Use {elsewhere.id}, which loads them." if elsewhere else f"{way}; or save with the class that will load them.",
        )  # fmt: skip
        case.take(names, parameters)


def _placed(names: Iterable[tuple[str, str, Shape | None]]) -> dict[Place, dict[str, tuple[str, Shape | None]]]:
    """By place and module: the second of each, and its shape; the first is the name as the engine knows it."""
    found: dict[Place, dict[str, tuple[str, Shape | None]]] = defaultdict(dict)
    for known, name, shape in names:
        module, _, leaf = known.rpartition(".")
        parent, _, last = module.rpartition(".")
        if parent:
            found[parent, leaf][last] = name, shape
    return found


def _add_up(many_: Mapping[str, tuple[str, Shape | None]], one: Mapping[str, tuple[str, Shape | None]]) -> bool:
    """Whether the rows of several are those of one, and everything else is alike."""
    if len(one) != 1 or len(many_) < 2:
        return False
    ((_, whole),) = one.values()
    shapes = [s for _, s in many_.values()]
    if not whole or not all(shapes):
        return False
    known = [s for s in shapes if s]
    return {s[1:] for s in known} == {whole[1:]} and sum(s[0] for s in known) == whole[0]


def _listed(modules: Iterable[str]) -> str:
    return ", ".join(f"`{printable(m)}`" for m in modules)

"""What a release's classes declare of fused modules (`packed_modules_mapping`), against what its loaders did.

Quantisation by module and LoRA go by the declaration, weights by the rules of the loader. Where the two part, one of them was forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckaudit.plan import NameFate, Note, Plan

UNMAPPED, UNDECLARED = "packed-unmapped", "packed-undeclared"


class Declared(NamedTuple):
    """The declaration of one module's class: fused module -> the modules that it is made of."""

    at: str
    owner: str
    parts: Mapping[str, tuple[str, ...]]


def declared(model: Any) -> tuple[Declared, ...]:
    """The declarations of a model and of the modules in it, outermost first."""
    out = []
    for path, module in model.named_modules():
        held = getattr(type(module), "packed_modules_mapping", None)
        if isinstance(held, dict) and held:
            parts = {str(fused): tuple(map(str, made_of)) for fused, made_of in held.items()}
            out.append(Declared(path, type(module).__name__, parts))
    return tuple(out)


def notes(plan: Plan, model: Iterable[Declared]) -> Iterator[Note]:
    """What is declared as fused and no rule fuses though its parts are there; what a rule fuses and nothing declares."""
    held = list(model)
    gaps = {
        p.name.rpartition(".")[0] for p in plan.parameters if p.coverage in ("none", "partial") and p.by_design is None
    }
    forgotten: dict[tuple[str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    silent: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    if plan.not_judged is not None or not any(n.fate == "loaded" for n in plan.names):
        return  # no rule was asked
    for name in plan.names:
        if name.fate in ("unmatched", "ignored"):
            for owner, fused, parts in _unmapped(name, held, gaps):
                forgotten[owner, fused, parts].append(name.name)
        elif name.fate == "loaded" and (pair := _fused(name)) is not None and held:
            fused, part = pair
            over = [d for d in held if _holds(d.at, name.into or "")]
            known = {f: parts for d in over for f, parts in d.parts.items()}
            if over and (fused in known or len(over[-1].parts) > 0) and part not in known.get(fused, ()):
                silent[over[-1].owner, fused, part].append(name.name)
    for (owner, fused, parts), names in forgotten.items():
        text = f"{owner} declares that {fused} is made of {' and '.join(parts)}, and no rule of its loader does that"
        yield Note(UNMAPPED, text, tuple(names))
    for (owner, fused, part), names in silent.items():
        yield Note(
            UNDECLARED,
            f"the loader puts {part} into {fused}, and packed_modules_mapping of {owner} does not say so",
            tuple(names),
        )


def _unmapped(name: NameFate, model: list[Declared], gaps: set[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Declarations by which a stray belongs into a fused module that stands beside it and is not (wholly) written. One that is made of
    itself alone is stored as it is, and needs no rule."""
    if name.by_design is not None:
        return
    sought = name.into or name.name
    for path in (sought, sought.rpartition(".")[0]):  # a loader may have missed the module before it came to the leaf
        beside, _, part = path.rpartition(".")
        for known in model:
            for fused, parts in known.parts.items():
                place = f"{beside}.{fused}" if beside else fused
                there = (g for g in gaps if g == place or g.endswith(f".{place}"))
                if part in parts and part != fused and any(_holds(known.at, g) for g in there):
                    yield known.owner, fused, parts


def _fused(name: NameFate) -> tuple[str, str] | None:
    """(fused module, part) where a stacked rule put a tensor into a module of another name; experts have declarations of their own."""
    steps = [s for s in name.chain if s.rule == "stacked" and s.after]
    if not steps or name.into is None or "expert" in (name.shard or ""):
        return None
    part, fused = (text.rpartition(".")[0].rpartition(".")[2] for text in (steps[0].before, name.into))
    return (fused, part) if fused != part else None


def _holds(path: str, name: str) -> bool:
    return not path or name.startswith(f"{path}.")

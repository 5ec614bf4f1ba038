"""One fault at a time in the checkpoint of an architecture, and what a loader that meets it must be seen to do.

Where a fault is put is chosen from what the release did with the whole checkpoint: `alone`, a matrix that is a parameter by itself, and
`part`, one of several that a parameter is made of, both in the last layer. What is expected holds of any loader, by reasoning:

- what no tensor fills is unwritten: the parameter is `none` (or `partial`, where other parts of it are there), and only that one is;
- a tensor that no parameter takes is not `loaded`; one that does not fit raises, or is read or fills in part;
- a tensor of another kind of number is cast (`copy_`);
- so the verdict is `fails`, or `loads_with_loss` where the release says nothing; never `loads`, and never `not_judged`;
- nothing else is lost: no tensor but the spoiled one, its parameter's other parts, and what the release sets aside with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckaudit import checks
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.findings import Finding
from ckaudit.plan import NameFate, Plan
from tests.helpers import DictSource, data_size, header
from tests.vllm.architectures import Made

TOLD = {
    "drop alone": {"CK204"}, "half a fused tensor": {"CK205", "CK211"}, "rename": {"CK203", "CK209"}, "duplicate": {"CK207"},
    "reshape alone": {"CK301", "CK401"}, "reshape part": {"CK301", "CK401", "CK205"}, "widen alone": {"CK303", "CK301", "CK401"},
    "widen part": {"CK301", "CK401"}, "kind of dtype alone": {"CK302"}, "kind of dtype part": {"CK302"}, "prefix": {"CK209"},
}  # fmt: skip
"""The checks that a mutation may be told by. A tensor that is too wide is cut by some loaders, one too narrow fills a part in few."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]


class Place(NamedTuple):
    """A tensor, and the parameter that it goes into."""

    name: str
    parameter: str


class Mutation(NamedTuple):
    """A spoiled checkpoint: `names` are the tensors, and `parameters` those of the model, that may be lost by it."""

    kind: str
    tensors: Tensors
    names: frozenset[str]
    parameters: frozenset[str]


def source(made: Made, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Checkpoint:
    """The checkpoint with these tensors, read as a target is; its file has no data."""
    entries = {name: (dtype, list(shape)) for name, (dtype, shape) in tensors.items()}
    head = header(entries, {"format": "pt"})
    files = {name: text.encode() for name, text in made.files.items()} | {"model.safetensors": head}
    return read_checkpoint(
        DictSource(files, name=made.architecture, sizes={"model.safetensors": len(head) + data_size(entries)})
    )


def places(plan: Plan, tensors: Tensors) -> dict[str, Place]:
    """`alone` and `part`, as far as the architecture has them: the last by name of those in a numbered layer."""
    sources = {p.name: p.sources for p in plan.parameters}
    whole = [
        f for f in plan.names
        if f.fate == "loaded" and f.read == 1.0 and f.into is not None and not f.also and len(tensors[f.name][1]) == 2
        and min(tensors[f.name][1]) > 7 and re.search(r"\.\d+\.", f.name)
    ]  # fmt: skip
    found: dict[str, Place] = {}
    for fate in whole:
        assert fate.into is not None
        kinds = {tensors[s][1][-1] for s in sources[fate.into]}
        kind = "alone" if len(sources[fate.into]) == 1 else "part" if len(kinds) == 1 else None
        if kind is not None and fate.name.endswith("weight"):
            found[kind] = Place(fate.name, fate.into)
    return found


def mutations(plan: Plan, tensors: Tensors) -> list[Mutation]:
    """Every mutation that the architecture has a place for."""
    made: list[Mutation] = []
    found = places(plan, tensors)
    sources = {p.name: p.sources for p in plan.parameters}
    for where, place in found.items():
        parts = frozenset(sources[place.parameter])

        def add(kind: str, changed: Tensors, *more: str, place: Place = place, parts: frozenset[str] = parts) -> None:
            made.append(Mutation(kind, changed, parts | {place.name, *more}, frozenset({place.parameter})))

        dtype, shape = tensors[place.name]
        rest = {n: t for n, t in tensors.items() if n != place.name}
        add(f"drop {where}" if where == "alone" else "half a fused tensor", rest)
        if where == "alone":
            wrong = place.name.removesuffix("weight") + "wieght"
            add("rename", {wrong if n == place.name else n: t for n, t in tensors.items()}, wrong)
        add(f"reshape {where}", rest | {place.name: (dtype, (shape[0] - 1, *shape[1:]))})
        add(f"widen {where}", rest | {place.name: (dtype, (*shape[:-1], 2 * shape[-1]))})
        add(f"kind of dtype {where}", rest | {place.name: ("I8", shape)})
        if where == "part":
            fused = _fused(place)
            shapes = [tensors[n][1] for n in parts]
            rows = sum(s[0] for s in shapes)
            if fused is not None and fused not in tensors and len(parts) < 5:
                add("duplicate", tensors | {fused: (dtype, (rows, *shape[1:]))}, fused)
    everything = frozenset(p.name for p in plan.parameters)
    moved = {f"wrapper.{n}": t for n, t in tensors.items()}
    made.append(Mutation("prefix", moved, frozenset(moved), everything))
    return made


def _fused(place: Place) -> str | None:
    """The name that the fused tensor would have in the checkpoint: the last module as the engine calls it."""
    module, _, leaf = place.name.rpartition(".")
    own = place.parameter.rpartition(".")[0].rpartition(".")[2]
    stem = module.rpartition(".")[0]
    return f"{stem}.{own}.{leaf}" if stem and not own.isdecimal() and "expert" not in own else None


def disagreement(mutation: Mutation, whole: Plan, plan: Plan) -> str | None:
    """What is not as it must be; None where all is."""
    if plan.verdict in ("not_judged", "loads"):
        return f"{plan.verdict}: {plan.not_judged or 'nothing lost'}"
    lost = _lost(plan) - _lost(whole)
    gaps = _gaps(plan) - _gaps(whole)
    collided = {n for c in plan.collisions for n in (c.kept, *c.lost)}
    cast = {n for m in plan.mismatches if m.kind == "dtype" for n in m.names}
    if extra := (lost | cast | collided) - mutation.names:
        return f"{len(extra)} more tensors lost: {sorted(extra)[0]}"
    if extra := gaps - mutation.parameters:
        return f"{len(extra)} more parameters lack: {sorted(extra)[0]}"
    if not (lost | gaps | cast | collided):
        return "nothing lost is named"
    return None


def misreported(mutation: Mutation, errors: Sequence[Finding]) -> str | None:
    """What is wrong with the errors that the audit tells of it: it must name the place, once."""
    if not errors:
        return "no error is told"
    if wrong := sorted({f.check for f in errors} - TOLD[mutation.kind]):
        return f"told as {', '.join(wrong)}"
    if any(f.blame == "engine" for f in errors):
        return "the engine is blamed"
    place = mutation.names | mutation.parameters
    named = {n for f in errors for n in f.names}
    if not any(n in place or any(p.startswith(f"{n}.") for p in place) for n in named):
        return f"the place is not named: {errors[0].check} {sorted(named)[:1]}"
    several = len(errors) > 1 and mutation.kind != "prefix"  # parts of a model may need a prefix each
    return f"told more than once: {', '.join(f.check for f in errors)}" if several else None


def _lost(plan: Plan) -> set[str]:
    return {n.name for n in plan.names if _is_lost(n)}


def _is_lost(fate: NameFate) -> bool:
    return fate.by_design is None and (fate.fate != "loaded" or (fate.read is not None and fate.read < 1))


def _gaps(plan: Plan) -> set[str]:
    return {p.name for p in plan.parameters if p.coverage in ("none", "partial") and p.by_design is None}


Planner = Callable[[Checkpoint], Plan]


class Row(NamedTuple):
    architecture: str
    kind: str
    verdict: str
    told: tuple[str, ...]
    """The checks whose errors are told."""
    wrong: str | None


def judge(made: Made, planned: Planner) -> list[Row]:
    """Every mutation of one architecture; a single row `whole` where the checkpoint itself is not judged, or fails."""
    checkpoint = source(made, made.tensors)
    whole = planned(checkpoint)
    if whole.verdict in ("fails", "not_judged"):
        return [Row(made.architecture, "whole", whole.verdict, (), whole.not_judged or whole.error)]
    before = {(f.check, f.names) for f in checks.run(checkpoint, [whole])[0]}
    rows = []
    for mutation in mutations(whole, made.tensors):
        checkpoint = source(made, mutation.tensors)
        plan = planned(checkpoint)
        findings = checks.run(checkpoint, [plan])[0]
        errors = [f for f in findings if f.severity == "error" and (f.check, f.names) not in before]
        wrong = disagreement(mutation, whole, plan) or misreported(mutation, errors)
        rows.append(Row(made.architecture, mutation.kind, plan.verdict, tuple(f.check for f in errors), wrong))
    return rows

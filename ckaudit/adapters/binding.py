"""An adapter laid on a base: for every module that it adapts, where it lands in one piece of software, or why it does not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from ckaudit.adapters import Adapter, Unit, files, peft, vllm
from ckaudit.adapters.base import Base
from ckaudit.adapters.outcome import Outcome as Outcome
from ckaudit.adapters.outcome import State
from ckaudit.adapters.shapes import Fault, alone, on_base, replaced
from ckaudit.adapters.surface import Surface, of_checkpoint, of_fused, of_plan, union
from ckaudit.naming import printable
from ckaudit.plan import NameFate, Plan

Kind = Literal["peft", "vllm", "names"]
BY_NAME = "base-names"
"""Id of the plan that goes by the names in the base's files, where no engine knows the base."""


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter in one piece of software: `plan` in the shape that reports know, `outcomes` and `surface` for the checks."""

    plan: Plan
    kind: Kind
    surface: Surface = Surface({})
    outcomes: tuple[Outcome, ...] = ()
    faults: tuple[Fault, ...] = ()
    """Factors that do not fit the modules that they bind to."""
    of_base: Plan | None = None

    @property
    def bound(self) -> int:
        """How many modules bind."""
        return sum(o.state == "bound" for o in self.outcomes)


def bind(adapter: Adapter, base: Base, plan: Plan) -> Binding:
    """`adapter` on the model that the engine of `plan` makes of the base."""
    kind: Kind = "peft" if plan.engine == "transformers" else "vllm"
    reason = plan.not_judged or ("the engine names no parameter of the base" if not plan.parameters else None)
    reason = f"of the base: {reason}" if reason else None
    if kind != "vllm" or not vllm.refused(adapter.config, plan):
        reason = reason or nothing_to_bind(adapter)
    if reason is not None:
        empty = Plan(
            id=plan.id,
            engine=plan.engine,
            release=plan.release,
            method=plan.method,
            not_judged=reason,
        )
        return Binding(plan=empty, kind=kind, of_base=plan)
    if kind == "peft":
        surface = of_plan(plan)
        names = peft.Names(plan, (base.checkpoint.config or {}).get("model_type"))
        paths = ((u, u.path if surface.holds(u.path) else names.path(u.path)) for u in adapter.modules)
        outcomes = tuple(peft.look(adapter, base, surface, unit, path) for unit, path in paths)
    else:
        surface = of_fused(plan, base.checkpoint)
        outcomes = tuple(map(vllm.Look(adapter, base, plan, surface).look, adapter.modules))
    return _told(adapter, plan, kind, surface, outcomes, plan)


def bind_by_name(adapter: Adapter, base: Base) -> Binding:
    """`adapter` on the names in the files of the base."""
    whole = {"": base.checkpoint} if base.checkpoint.tensors else {}
    parts = {**whole, **base.components}
    surfaces = {name: of_checkpoint(c, files.diffusion_root(c)) for name, c in parts.items()}
    plan = Plan(id=BY_NAME, engine=BY_NAME, release=None, method="rules")
    why = nothing_to_bind(adapter)
    if why is None and not any(s.modules for s in surfaces.values()):
        why = f"of the base: {base.checkpoint.unaudited or 'no tensor name of it can be read'}"
    if why is not None:
        return Binding(plan=replace(plan, not_judged=why), kind="names")
    outcomes = tuple(files.look(adapter, base, surfaces, unit) for unit in adapter.modules)
    surface = union(surfaces)
    return _told(adapter, plan, "names", surface, outcomes)


def nothing_to_bind(adapter: Adapter) -> str | None:
    """Why an adapter has no tensor of a module of the base; None where it has one."""
    if not adapter.checkpoint.tensors:
        return adapter.checkpoint.unaudited
    if adapter.modules or adapter.replaced:
        return None
    return f"an adapter of the method {printable(adapter.method)}, of which no tensor belongs to a module of the base that is known"


def _told(
    adapter: Adapter, plan: Plan, kind: Kind, surface: Surface, outcomes: tuple[Outcome, ...], of_base: Plan | None = None
) -> Binding:  # fmt: skip
    faults = (*on_base(adapter, _weights(surface, outcomes, kind)), *replaced(adapter, surface))
    told = _plan(adapter, plan, surface, outcomes, kind)
    wrong = [*alone(adapter), *faults] if kind == "peft" and told.error is None else []
    if wrong:
        told = replace(told, error=f"predicted: RuntimeError: size mismatch for {wrong[0].names[0]}")
    return Binding(plan=told, kind=kind, surface=surface, outcomes=outcomes, faults=faults, of_base=of_base)


def _weights(
    surface: Surface, outcomes: tuple[Outcome, ...], kind: Kind
) -> Iterator[tuple[Unit, tuple[int, ...], bool]]:
    """The shape of the weight that each bound unit adapts; a fused module's own says nothing of its parts."""
    for o in outcomes:
        key = o.into if kind == "names" else o.looked
        weight = surface.modules.get(key) if key is not None and o.state == "bound" else None
        if key is not None and weight is not None:
            yield o.unit, weight, key in surface.biased


def _plan(adapter: Adapter, plan: Plan, surface: Surface, outcomes: tuple[Outcome, ...], kind: Kind) -> Plan:
    fates = {name: _fate(name, o) for o in outcomes for name in o.unit.names}
    raised = [o.raises for o in outcomes if o.raises]
    whole: list[str] = []
    if kind == "vllm":
        whole = vllm.unread(adapter, plan)
        refused = (f"ValueError: {text}" for text in vllm.refused(adapter.config, plan))
        raised = [*refused, *raised, *(f"ValueError: {name} is unsupported LoRA weight" for name in whole)]
    for unit in adapter.units:
        for part in unit.parts if not unit.adapts else ():
            held = (kind == "vllm" and part.name not in whole) or surface.holds(unit.path) or part.role == "shared"
            why = None if held else head_of_task(adapter)
            fates[part.name] = NameFate(part.name, "loaded" if held else "unmatched", unit.path, by_design=why)
    for name in adapter.unknown:
        fates[name] = NameFate(name, "unmatched", name)
    if kind == "peft":
        lacking = [f"KeyError: {name!r}" for name in peft.unsaved(adapter, surface)]
        raised = [r for r in (peft.refused(adapter.config), *raised, *lacking) if r]
    error = f"predicted: {raised[0]}" if raised else None
    names = tuple(fates[n] for n in adapter.checkpoint.tensors)
    return Plan(
        id=plan.id, engine=plan.engine, release=plan.release, method=plan.method, options=plan.options,
        environment=plan.environment, architecture=plan.architecture, names=names, error=error,
    )  # fmt: skip


def head_of_task(adapter: Adapter) -> str | None:
    """Why a module that is replaced need not be in the class that the base's config names; None where nothing says so."""
    task = (adapter.config or {}).get("task_type")
    if task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"):
        return f"head for {task}: the base has to be loaded as the class for that task"
    return None


def _fate(name: str, outcome: Outcome) -> NameFate:
    why = outcome.why if outcome.state == "open" else None
    return NameFate(name, outcome.fate, outcome.into or outcome.looked, by_design=why, chain=outcome.chain)


# ----- what would bind -----


def expected(binding: Binding, base: Base) -> list[str]:
    """Paths under which an adapter would find modules of this base."""
    if binding.kind == "vllm":
        return list(of_checkpoint(base.checkpoint).modules)
    return list(binding.surface.modules)


def would_bind(binding: Binding, path: str) -> bool:
    """Whether a module of this path binds."""
    if binding.kind != "vllm" or binding.of_base is None:
        return binding.surface.holds(path)
    looked, _, complaint = vllm.path(f"{path}.lora_A.weight", vllm.renames(binding.of_base))
    return not complaint and looked is not None and binding.surface.holds(looked)


# ----- all of it -----


def bind_all(adapter: Adapter, base: Base, plans: Sequence[Plan]) -> list[Binding]:
    """`adapter` in every engine, and by the names in the base's files where no engine knows the base."""
    bindings = [bind(adapter, base, plan) for plan in plans]
    if all(b.plan.not_judged is not None for b in bindings):
        bindings.append(bind_by_name(adapter, base))
    return bindings


def summary(adapter: Adapter, base: Base | None, bindings: Sequence[Binding]) -> dict[str, Any]:
    """The adapter in numbers, and how much of it binds in each engine: plain data for reports."""
    engines = []
    for b in bindings:
        if b.plan.not_judged is None:
            states = Counter(o.state for o in b.outcomes)
            engines.append({"id": b.plan.id, **{state: states[state] for state in get_args(State)}})
    return {
        "dialect": adapter.dialect,
        "method": adapter.method,
        "rank": adapter.rank,
        "base_named": adapter.base,
        "base": base.checkpoint.name if base is not None else None,
        "base_revision": base.checkpoint.revision if base is not None else None,
        "modules": len(adapter.modules),
        "replaced": len(adapter.replaced),
        "engines": engines,
    }

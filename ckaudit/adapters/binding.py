"""An adapter laid on a base: for every module that it adapts, where it lands in one piece of software, or why it does not. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from ckaudit.adapters import Adapter, Unit, peft, vllm
from ckaudit.adapters.base import Base, kind_of
from ckaudit.adapters.shapes import FUSED, Fault, alone, on_base
from ckaudit.adapters.surface import Surface, of_checkpoint, of_fused, of_plan, union
from ckaudit.checkpoint import Checkpoint
from ckaudit.plan import NameFate, Plan, Step

Kind = Literal["peft", "vllm", "names"]
State = Literal["bound", "absent", "untargeted", "converted", "form", "open"]
"""bound · absent: no such module · untargeted: `target_modules` does not name it · converted: its target is taken for one of the
experts · form: the software has no place for adapters of this form · open: not known."""

BY_NAME = "base-names"
"""Id of the plan that goes by the names in the base's files, where no engine knows the base."""


class Outcome(msgspec.Struct, frozen=True):
    """One module of the adapter in one piece of software."""

    unit: Unit
    state: State
    looked: str
    """The path that was looked for."""
    into: str | None = None
    chain: tuple[Step, ...] = ()
    raises: str = ""
    """What the software says, where it does not pass over this in silence."""
    why: str = ""

    @property
    def fate(self) -> Literal["loaded", "unmatched", "ignored"]:
        """The fate of its tensors, in the words of plans."""
        if self.state == "bound":
            return "loaded"
        return "ignored" if self.state in ("untargeted", "converted", "form", "open") else "unmatched"


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
    if reason is not None:
        empty = Plan(
            id=plan.id,
            engine=plan.engine,
            release=plan.release,
            method=plan.method,
            not_judged=f"of the base: {reason}",
        )
        return Binding(plan=empty, kind=kind, of_base=plan)
    if kind == "peft":
        surface = of_plan(plan)
        names = peft.Names(plan, (base.checkpoint.config or {}).get("model_type"))
        paths = ((u, u.path if surface.holds(u.path) else names.path(u.path)) for u in adapter.modules)
        outcomes = tuple(_in_peft(adapter, base, surface, unit, path) for unit, path in paths)
    else:
        surface = of_fused(plan, base.checkpoint)
        outcomes = tuple(_In(adapter, base, plan, surface).look(unit) for unit in adapter.modules)
    return _told(adapter, plan, kind, surface, outcomes, plan)


def bind_by_name(adapter: Adapter, base: Base) -> Binding:
    """`adapter` on the names in the files of the base."""
    whole = {"": base.checkpoint} if base.checkpoint.tensors else {}
    parts = base.components or whole
    surfaces = {name: of_checkpoint(c, _diffusion_root(c)) for name, c in parts.items()}
    plan = Plan(id=BY_NAME, engine=BY_NAME, release=None, method="rules")
    if not any(s.modules for s in surfaces.values()):
        why = base.checkpoint.unaudited or "no tensor name of the base can be read"
        return Binding(plan=replace(plan, not_judged=f"of the base: {why}"), kind="names")
    outcomes = tuple(_by_name(adapter, base, surfaces, unit) for unit in adapter.modules)
    surface = union(surfaces)
    return _told(adapter, plan, "names", surface, outcomes)


def _told(
    adapter: Adapter, plan: Plan, kind: Kind, surface: Surface, outcomes: tuple[Outcome, ...], of_base: Plan | None = None
) -> Binding:  # fmt: skip
    faults = tuple(on_base(adapter, _weights(surface, outcomes)))
    told = _plan(adapter, plan, surface, outcomes, kind)
    wrong = [*alone(adapter), *faults] if kind == "peft" and told.error is None else []
    if wrong:
        told = replace(told, error=f"predicted: RuntimeError: size mismatch for {wrong[0].names[0]}")
    return Binding(plan=told, kind=kind, surface=surface, outcomes=outcomes, faults=faults, of_base=of_base)


def _weights(surface: Surface, outcomes: tuple[Outcome, ...]) -> Iterator[tuple[Unit, tuple[int, ...], bool]]:
    for o in outcomes:
        key = next((k for k in (o.looked, o.into) if k is not None and k in surface.modules), None)
        weight = surface.modules[key] if key is not None and o.state == "bound" else None
        if key is not None and weight is not None:
            yield o.unit, weight, key in surface.biased


def _plan(adapter: Adapter, plan: Plan, surface: Surface, outcomes: tuple[Outcome, ...], kind: Kind) -> Plan:
    fates = {name: _fate(name, o) for o in outcomes for name in o.unit.names}
    raised = [o.raises for o in outcomes if o.raises]
    if kind == "vllm":
        raised = [*(f"ValueError: {text}" for text in vllm.refused(adapter.config, plan)), *raised]
    for unit in adapter.units:
        for part in unit.parts if not unit.adapts else ():
            held = surface.holds(unit.path) or kind == "vllm"
            why = None if held else head_of_task(adapter)
            fates[part.name] = NameFate(part.name, "loaded" if held else "unmatched", unit.path, by_design=why)
    for name in adapter.unknown:
        fates[name] = NameFate(name, "unmatched", name)
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


# ----- PEFT -----

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<leaf>[^.]+)")


def _in_peft(adapter: Adapter, base: Base, surface: Surface, unit: Unit, path: str) -> Outcome:
    leaf = path.rpartition(".")[2]
    family = peft.family((base.checkpoint.config or {}).get("model_type"))
    fused = f"{path.removesuffix('.base_layer')}.{'gate_up_proj' if leaf == 'base_layer' else 'down_proj'}"
    if FUSED.fullmatch(path) and fused in surface.parameters:
        return Outcome(unit, "bound", path, fused)
    if (match := _EXPERT.fullmatch(path)) and f"{match['experts']}.{family.get(match['leaf'])}" in surface.parameters:
        return Outcome(unit, "bound", path, f"{match['experts']}.{family[match['leaf']]}")
    if not surface.holds(path):
        return Outcome(unit, "absent", path)
    targeted = peft.targets(adapter.config, path)
    if targeted is False:
        return Outcome(unit, "untargeted", path)
    if targeted and leaf in family and "experts" not in path.split("."):
        taken = any(p.endswith(f"experts.{family[leaf]}") for p in surface.parameters)
        if taken or leaf != "gate":
            return Outcome(unit, "converted", path, why=f"PEFT takes its target `{leaf}` for `experts.{family[leaf]}`")
    return Outcome(unit, "bound", path, path)


# ----- vLLM -----


class _In:
    """One vLLM release with its rules, ready to look modules up."""

    def __init__(self, adapter: Adapter, base: Base, plan: Plan, surface: Surface) -> None:
        self.adapter, self.plan, self.surface = adapter, plan, surface
        self.renames = vllm.renames(plan)
        self.leaves = {m.rpartition(".")[2] for m in surface.modules}
        named = (base.checkpoint.config or {}).get("architectures")
        self.fused = vllm.takes_fused(plan, named if isinstance(named, list) else ())

    def look(self, unit: Unit) -> Outcome:
        chain: tuple[Step, ...] = ()
        looked, complaint = unit.path, ""
        for part in unit.parts:
            path, steps, said = vllm.path(part.name, self.renames)
            complaint = complaint or said
            if path is not None:
                looked, chain = path, steps
        if complaint:
            return Outcome(unit, "form", looked, chain=chain, raises=complaint)
        if FUSED.fullmatch(looked) and unit.of("A", "B"):
            return self._fused(unit, looked, chain)
        held = self.surface.holds(looked)
        found = looked if held else vllm.text_names(looked, self.surface.modules, self.plan)
        if found is not None:
            return Outcome(unit, "bound", looked, self.surface.into.get(found, found), chain)
        leaf = looked.rpartition(".")[2]
        said = "" if leaf in self.leaves else f"ValueError: expected target modules, but received {looked}."
        return Outcome(unit, "absent", looked, chain=chain, raises=said)

    def _fused(self, unit: Unit, looked: str, chain: tuple[Step, ...]) -> Outcome:
        experts = looked.removesuffix(".base_layer")
        there = self.surface.holds(experts) or vllm.text_names(experts, self.surface.modules, self.plan) is not None
        if self.fused and there:
            return Outcome(unit, "bound", looked, experts, chain)
        said = (
            f"ValueError: LoRA adapter contains fused 3D MoE weights for {experts!r}, but the model uses a 2D MoE LoRA wrapper."
            if vllm.refuses_fused(self.plan) and not self.fused
            else ""
        )
        return Outcome(unit, "form" if not self.fused else "absent", looked, chain=chain, raises=said)


# ----- names alone -----

_ORIGINAL = re.compile(
    r"(diffusion_model[._])?(input_blocks|middle_block|output_blocks|double_blocks|single_blocks|joint_blocks)[._]"
)
_DIFFUSION = "model.diffusion_model."


def _diffusion_root(checkpoint: Checkpoint) -> str:
    """What a file of a whole pipeline in the layout of its authors puts before the names of the denoiser."""
    return _DIFFUSION if any(n.startswith(_DIFFUSION) for n in checkpoint.tensors) else ""


def _by_name(adapter: Adapter, base: Base, surfaces: dict[str, Surface], unit: Unit) -> Outcome:
    path = unit.path
    places = [(name, s) for name, s in surfaces.items() if _serves(unit, name, kind_of(base.checkpoint))]
    look: Callable[[Surface, str], str | None] = (
        (lambda s, m: s.flat.get(m)) if unit.parts[0].flat else (lambda s, m: m if s.holds(m) else None)
    )
    for name, surface in places:
        # A component's own name may be part of its paths too: both spellings are looked for.
        for spelling in (unit.module, unit.path, unit.module.removeprefix("diffusion_model.")):
            found = look(surface, spelling)
            if found is not None:
                return Outcome(unit, "bound", path, f"{name}.{found}" if name else found)
    ours = any(_ORIGINAL.match(m) for s in surfaces.values() for m in s.modules)
    if (_ORIGINAL.match(unit.module) or adapter.dialect == "xlabs") and not ours:
        why = "named as its authors' own code names modules; diffusers converts such adapters, which is not judged"
        return Outcome(unit, "open", path, why=why)
    return Outcome(unit, "absent", path)


def _serves(unit: Unit, place: str, kind: str | None) -> bool:
    """Whether `unit` belongs into the base's component `place` (`""`: the base is one component, of this kind)."""
    wanted = [unit.component]
    if unit.parts[0].flat and unit.component == "unet":
        wanted.append("transformer")  # kohya calls every denoiser so
    if not unit.component or place:
        return not unit.component or place in wanted
    return kind is None or any(w.startswith(kind) for w in wanted)


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

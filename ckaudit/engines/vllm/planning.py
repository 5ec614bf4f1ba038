"""What the loads of one checkpoint showed, as a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines.vllm import packing
from ckaudit.engines.vllm.attempt import Attempt, Raised
from ckaudit.engines.vllm.coverage import ParameterCoverage
from ckaudit.engines.vllm.design import DRAFT, name_by_design, parameter_by_design
from ckaudit.engines.vllm.faults import Fault, Story
from ckaudit.engines.vllm.files import SAFETENSORS
from ckaudit.engines.vllm.words import looked_up, message
from ckaudit.naming import numbered_as
from ckaudit.naming import shape as family
from ckaudit.plan import Collision, Draft, Failure, Fate, Mismatch, NameFate, Note, Parameter, Plan, Unjudged


def fill(plan: Plan, story: Story, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> Plan:
    """`plan` with what was seen."""
    story = story._replace(faults=tuple(_placed(fault, story) for fault in story.faults))
    last = story.last
    errors = [fault.raised for fault in story.faults]
    if last.raised is not None and last.raised.excuse is None:
        errors.append(last.raised)
    not_judged = plan.not_judged
    if last.raised is not None and last.raised.excuse is not None and not story.faults:
        not_judged = last.raised.excuse
    parameters = tuple(
        p
        for p in (_parameter(n, c, last, config) for n, c in last.result.parameters.items())
        if not (p.buffer and p.coverage == "none" and p.by_design)  # what no checkpoint is asked for is not worth a row
    )
    seen = msgspec.structs.replace(
        plan,
        architecture=last.architecture,
        not_judged=not_judged,
        error=message(errors[0].error) if errors else None,
        failures=tuple(_failures(story)),
        names=tuple(_names(story, tensors, config)),
        parameters=parameters,
        collisions=_collisions(last, config),
        mismatches=(*_shape_mismatches(story), *_casts(last, config)),
        rules=last.rules.hits(plan.release, [step for fault in story.faults for step in fault.chain]),
        notes=tuple(_notes(story)),
        unjudged=_unjudged(story, config),
    )
    return msgspec.structs.replace(seen, notes=(*seen.notes, *packing.notes(seen, last.packed)))


def _failures(story: Story) -> list[Failure]:
    out = [Failure(message(f.raised.error), (*f.names, *f.assumed), f.raised.parameter) for f in story.faults]
    raised = story.last.raised
    if raised is not None and raised.excuse is None and not story.faults:
        out.append(Failure(message(raised.error), raised.names, raised.parameter))
    return out


def _names(story: Story, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> list[NameFate]:
    aside = {name: fault for fault in story.faults for name in (*fault.names, *fault.assumed)}
    lost = {name: parameter for parameter, c in story.last.result.parameters.items() for x in c.lost for name in x.lost}
    # A name may be in two files (two copies of the weights): what counts is the one that the release reads.
    once = {t.name: t for t in sorted(tensors, key=lambda t: t.shard in story.last.opened)}
    order = dict.fromkeys(t.name for t in tensors)
    return [_name(once[n], story.last, aside.get(n), lost, config) for n in order]


def _name(
    tensor: TensorSpec, last: Attempt, fault: Fault | None, lost: Mapping[str, str], config: Mapping[str, Any]
) -> NameFate:
    name = tensor.name
    chain = tuple(last.rules.chains.get(name, ()))
    if fault is not None and name in fault.names:
        chain = fault.chain
    shard = last.shards.get(name) or next((s.shard for s in reversed(chain) if s.shard), None)
    if fault is not None:
        fate: Fate = "not_reached" if is_shape_fault(fault.raised) else "unmatched"
        return NameFate(name, fate, _looked_up(fault, name), shard=shard, read=0.0, chain=chain)
    coverage = last.result.tensors.get(name)
    if coverage is None:
        reached = last.raised is None or last.raised.finished
        fate = "ignored" if reached else "not_reached"
        reason = name_by_design(name, config) if reached else None
        if reached and last.opened and tensor.shard not in last.opened:
            reason = f"in a file that this release passes over: it reads {', '.join(last.opened[:3])}"
        return NameFate(name, fate, read=0.0, by_design=reason, chain=chain)
    if coverage.into and (coverage.read is None or coverage.read > 0):
        share = None if coverage.read is None else coverage.read / max(coverage.elements, 1)
        return NameFate(name, "loaded", coverage.into[0], coverage.into[1:], shard, share, chain=chain)
    if coverage.elements == 0:
        return NameFate(name, "loaded", read=1.0, chain=chain)
    if name in last.looked_at:
        return NameFate(name, "loaded", read=1.0, chain=chain)
    if name in last.rules.dropped:
        return NameFate(name, "dropped", read=0.0, by_design=name_by_design(name, config), chain=chain)
    reason = name_by_design(name, config, coverage.elements if name in lost else 0)
    return NameFate(name, "ignored", lost.get(name), shard=shard, read=0.0, by_design=reason, chain=chain)


def _looked_up(fault: Fault, name: str) -> str | None:
    """The name that was looked up: what a KeyError names, or the first quoted name of the message; the parameter of a shape fault. None
    where the message names but a module that is not there, as the beginning of the name."""
    if is_shape_fault(fault.raised):
        return fault.raised.parameter
    if name not in fault.names:
        return None
    text, at = looked_up(fault.raised.error), fault.raised.at
    if not text or name.startswith(f"{text}."):
        return None
    return f"{at}.{text}" if at and not text.startswith(f"{at}.") else text


def _placed(fault: Fault, story: Story) -> Fault:
    """`fault`, with the parameter where torch raised before the loader took it in hand (a view, a split of a tensor that does not fit): the
    one of the same name, or where a sibling of the tensor went."""
    raised, layout = fault.raised, story.last.layout
    if raised.parameter is not None or not fault.names or not isinstance(raised.error, RuntimeError | IndexError):
        return fault
    name = fault.names[0]
    found = name if name in layout else None
    for sibling, seen in story.last.result.tensors.items() if found is None else ():
        if seen.into and family(sibling) == family(name):
            found = numbered_as(seen.into[0], sibling, name)
            break
    return fault._replace(raised=raised._replace(parameter=found)) if found in layout else fault


def is_shape_fault(raised: Raised) -> bool:
    """Whether the loader had the parameter in hand and the tensor did not fit."""
    return raised.parameter is not None and isinstance(
        raised.error, AssertionError | RuntimeError | ValueError | IndexError
    )


def _shape_mismatches(story: Story) -> list[Mismatch]:
    out = []
    for fault in story.faults:
        parameter = fault.raised.parameter
        if parameter is None or not is_shape_fault(fault.raised):
            continue
        wanted = _wanted_shape(fault, parameter, story)
        out.append(Mismatch("shape", parameter, (*fault.names, *fault.assumed), "" if wanted is None else str(list(wanted)),
                            _found_shape(fault, story)))  # fmt: skip
    return out


def _wanted_shape(fault: Fault, parameter: str, story: Story) -> tuple[int, ...] | None:
    """The shape of a sibling that went whole into a parameter of the same size; else of what the loader was about to write."""
    layout = story.last.layout
    whole = layout[parameter][0] if parameter in layout else None
    kind = family(fault.names[0]) if fault.names else ""
    for name, seen in story.last.result.tensors.items():
        fits = seen.into and seen.read == seen.elements and seen.into[0] in layout and layout[seen.into[0]][0] == whole
        if fits and family(name) == kind:
            return story.shapes[name]
    return fault.raised.wanted or whole


def _found_shape(fault: Fault, story: Story) -> str:
    shape = story.shapes.get(fault.names[0]) if fault.names else None
    return str(list(shape)) if shape is not None else ""


def _parameter(name: str, seen: ParameterCoverage, last: Attempt, config: Mapping[str, Any]) -> Parameter:
    shape, dtype, buffer = last.layout.get(name, ((), "", False))
    whole = max(seen.elements, 1)
    if seen.unknown and seen.loaded < seen.elements:
        coverage, share = "unknown", None
    elif seen.loaded >= seen.elements:
        coverage, share = "full", 1.0
    else:
        coverage, share = ("partial" if seen.loaded else "none"), seen.loaded / whole
    reason = None
    if coverage in ("partial", "none"):
        reason = parameter_by_design(name, seen, buffer, name in last.zeros, config)
    return Parameter(name, coverage, tuple(shape), SAFETENSORS.get(dtype, dtype), share, seen.sources, reason, buffer)  # type: ignore[arg-type]


def _collisions(last: Attempt, config: Mapping[str, Any]) -> tuple[Collision, ...]:
    out: dict[Collision, None] = {}
    for name, coverage in last.result.parameters.items():
        for lost in coverage.lost:
            gone = tuple(n for n in lost.lost if not name_by_design(n, config, last.result.tensors[n].elements))
            if lost.kept and gone:
                out[Collision(name, lost.kept[-1], gone)] = None
    return tuple(out)


def _unjudged(story: Story, config: Mapping[str, Any]) -> tuple[Unjudged, ...]:
    last, out = story.last, []
    if story.stopped:
        out.append(Unjudged("faults", f"whether there are further faults: {story.stopped}"))
    gone = {n for c in last.result.parameters.values() for x in c.lost for n in x.lost}
    shared = [
        n for n in gone if (name_by_design(n, config, last.result.tensors[n].elements) or "").startswith("shared")
    ]
    if shared:
        reason = f"whether the scales of fused shards are equal is in the data ({len(shared)} stand behind another)"
        out.append(Unjudged("values", reason))
    return tuple(out)


def _casts(last: Attempt, config: Mapping[str, Any]) -> list[Mismatch]:
    def text(dtype: str) -> str:
        return SAFETENSORS.get(dtype, dtype)

    return [
        Mismatch("dtype", name, (source,), text(to), text(was))
        for name, coverage in last.result.parameters.items()
        for source, was, to in coverage.casts
        if name_by_design(source, config) is None  # metadata may be held in any type
    ]


def _notes(story: Story) -> list[Note]:
    last = story.last
    notes = []
    if last.claimed is not None:
        full = {n for n, c in last.result.parameters.items() if c.loaded >= c.elements}
        none = {
            n
            for n, c in last.result.parameters.items()
            if c.elements and not c.loaded and not c.constant and not c.unknown
        }
        parameters = {n for n, (_, _, buffer) in last.layout.items() if not buffer}
        unclaimed = sorted((full & parameters) - last.claimed)
        if unclaimed:
            notes.append(
                Note(
                    "claims-too-little",
                    "the loader does not say that it loaded these, though every element was written",
                    tuple(unclaimed),
                )
            )
        invented = sorted(none & last.claimed)
        if invented:
            notes.append(
                Note(
                    "claims-too-much",
                    "the loader says that it loaded these, though nothing was written",
                    tuple(invented),
                )
            )
    wide = {s: n for n, c in last.result.parameters.items() for s in c.broadcast}
    if wide:
        notes.append(Note("broadcast", "one tensor was spread over more elements than it has", tuple(sorted(wide))))
    if last.looked_at:
        notes.append(
            Note("values", "the loader looked at the values of these, so their bytes were read", last.looked_at)
        )
    assumed = tuple(n for f in story.faults for n in f.assumed)
    if assumed:
        notes.append(Note("assumed", "set aside with a sibling that the loader refused, not tried one by one", assumed))
    raised = last.raised
    if raised is not None and story.faults and raised.excuse is None:
        notes.append(Note("afterwards", f"without the tensors set aside: {message(raised.error)}"))
    return notes


def with_draft(plan: Plan, draft: Draft | None) -> Plan:
    """`plan` with what its draft model does: what that one alone reads is by design no business of the main model."""
    reads = {name for layer in draft.layers for name in layer.names} if draft else set()
    if draft is None or not (reads or any((n.by_design or "").startswith(DRAFT) for n in plan.names)):
        return plan  # nothing of one is stored
    reason = f"{DRAFT}{draft.architecture} reads it"
    names = tuple(
        msgspec.structs.replace(n, by_design=reason) if n.name in reads and n.fate in ("ignored", "dropped") else n
        for n in plan.names
    )
    return msgspec.structs.replace(plan, names=names, draft=draft)

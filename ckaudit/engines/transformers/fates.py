"""Record -> Plan: the fate of every checkpoint tensor and the coverage of every parameter, from what was seen of the load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ckaudit.engines import Job
from ckaudit.engines.transformers import remarks
from ckaudit.engines.transformers.observe import Group, Record
from ckaudit.engines.transformers.tensors import dtype_name
from ckaudit.errors import in_one_line
from ckaudit.plan import Collision, Failure, Mismatch, NameFate, Parameter, Plan, RuleHit, Unjudged


def tell(
    job: Job,
    chosen: Any,
    view: View,
    failure: Exception | None,
    stops: list[tuple[Exception, Failure]],
    aside: dict[str, NameFate],
) -> Plan:
    """What the loads of one job did: `view` is of the last one, which raised `failure`; the earlier ones stopped at what is `aside`."""
    record = view.record
    names = tuple(aside.get(spec.name) or view.fate(spec.name) for spec in job.tensors)
    first = stops[0][0] if stops else failure
    last = view.stop(failure)
    return Plan(
        id="transformers",
        engine="transformers",
        release=None,
        method="live",
        architecture=chosen.cls.__name__,
        error=None if first is None else in_one_line(first),
        failures=(*(stop for _, stop in stops), *view.conversion_failures(), *([] if last is None else [last])),
        names=names,
        parameters=tuple(view.parameter(name) for name in record.expected),
        collisions=view.collisions(),
        mismatches=(*view.shape_mismatches(), *remarks.kind_mismatches(view)),
        rules=tuple(
            RuleHit(rule=r.kind, key=" | ".join(r.sources), to=" | ".join(r.targets), at=r.at, hits=r.hits)
            for r in record.rules
        ),
        notes=remarks.notes(job, chosen, view, names),
        unjudged=_unjudged(job, view),
    )


class View:
    """A Record with the look-ups that the plan is made from."""

    def __init__(self, record: Record) -> None:
        self.record = record
        info = record.info
        self.unexpected: set[str] = set(info.unexpected_keys) if info is not None else set()
        self.missing: set[str] = set(info.missing_keys) if info is not None else set()
        self.mismatched: dict[str, tuple[Any, Any]] = (
            {n: (f, w) for n, f, w in info.mismatched_keys} if info is not None else {}
        )
        self.group_of = {source: group for group in record.groups for source, _ in group.sources}
        self.shards = {source: shard for group in record.groups for source, shard in _shards(group)}
        self.pattern_of = {source: pattern for group in record.groups for source, pattern in group.sources}
        self.target_of = {source: target for target, got in record.collected.items() for source, _ in got}
        self.sources_of = {target: names for g in record.groups for target, (names, _) in g.outputs.items()}
        self.unknown = {target for group in record.groups if group.unknown for target in group.targets}
        self._outputs_of: dict[str, list[tuple[str, int]]] = {}
        for group in record.groups:
            for target, (names, size) in group.outputs.items():
                for name in names:
                    self._outputs_of.setdefault(name, []).append((target, size))

    def accepted(self, target: str) -> bool:
        """Whether the loader put a tensor into `target` and let it stay."""
        return target in self.record.written and target not in self.mismatched

    def fate(self, name: str) -> NameFate:
        chain = tuple(self.record.chains.get(name, ()))
        target = self.target_of.get(name)
        if name not in self.record.renamed:
            return NameFate(name=name, fate="not_reached", read=0.0)
        if target is None:
            return self._stray(name, self.record.renamed[name], chain)
        group = self.group_of.get(name)
        if group is None or group.error:
            return NameFate(name=name, fate="not_reached", into=target, read=0.0, chain=chain)
        shard = self.shards.get(name)
        if group.unknown:
            return NameFate(name=name, fate="loaded", into=target, shard=shard, chain=chain)
        reached = self._outputs_of.get(name, [])
        if not reached:
            by_value = group.by_value and self.pattern_of[name] in group.patterns
            return NameFate(
                name=name,
                fate="loaded" if by_value else "ignored",
                into=target,
                read=None if by_value else 0.0,
                chain=chain,
            )
        kept = [(t, size) for t, size in reached if self.accepted(t)]
        if not kept:
            if all(t in self.record.unset for t, _ in reached):
                return self._stray(name, reached[0][0], chain)
            return NameFate(name=name, fate="not_reached", into=reached[0][0], shard=shard, read=0.0, chain=chain)
        own = self.record.fed.state[name].numel()
        read = 1.0 if own == 0 else min(1.0, sum(size for _, size in kept) / own)
        if name in self.record.fed.shapeless:
            read = None
        also = tuple(t for t, _ in kept[1:])
        return NameFate(
            name=name, fate="loaded", into=kept[0][0], also=also, shard=None if also else shard, read=read, chain=chain
        )

    def _stray(self, name: str, renamed: str, chain: Any) -> NameFate:
        """A tensor for which the model has no place: in the loader's list of unexpected ones, or passed over on purpose."""
        config = getattr(self.record.model, "config", None)
        if renamed in self.unexpected or self.record.info is None:
            why = remarks.stray_by_design(renamed, config)
            return NameFate(name=name, fate="unmatched", into=renamed, read=0.0, by_design=why, chain=chain)
        why = remarks.ignored_because(self.record.model, renamed)
        return NameFate(name=name, fate="ignored", into=renamed, read=0.0, by_design=why, chain=chain)

    def parameter(self, name: str) -> Parameter:
        ref = self.record.expected[name]
        facts: dict[str, Any] = {"name": name, "buffer": name in self.record.buffers}
        if hasattr(ref, "shape"):  # a module's extra state may be anything
            facts |= {"shape": tuple(ref.shape), "dtype": dtype_name(ref.dtype)}
        if self.accepted(name):
            return Parameter(**facts, coverage="full", share=1.0, sources=self.sources_of.get(name, ()))
        if name in self.unknown:
            return Parameter(**facts, coverage="unknown")
        reason = None
        if self.record.info is not None and name not in self.missing and name not in self.mismatched:
            if name in self.record.raw_missing:
                reason = remarks.missing_because(self.record.model, name)
            elif name in self.record.tied:
                reason = f"tied to {self.record.tied[name]}"
            elif name in self.record.tied.values():
                reason = f"tied to {next(t for t, s in self.record.tied.items() if s == name)}"
            else:
                reason = "shares its module with one that was loaded"
        sources = self.sources_of.get(name, ()) if name in self.mismatched else ()
        return Parameter(**facts, coverage="none", share=0.0, sources=sources, by_design=reason)

    def collisions(self) -> tuple[Collision, ...]:
        """Tensors that were collected for a parameter and passed over there in silence, since another one won."""
        out = []
        for group in self.record.groups:
            if group.error or group.unknown:
                continue
            used = dict.fromkeys(n for names, _ in group.outputs.values() for n in names)
            lost = tuple(
                name for name, pattern in group.sources
                if name not in used and not (group.by_value and pattern in group.patterns)
            )  # fmt: skip
            if lost and used:
                out.append(Collision(parameter=group.target, kept=next(iter(used)), lost=lost))
        return tuple(out)

    def shape_mismatches(self) -> tuple[Mismatch, ...]:
        return tuple(
            Mismatch(
                kind="shape",
                parameter=name,
                names=self.sources_of.get(name, ()),
                wanted=_shape(wanted),
                found=_shape(found),
            )
            for name, (found, wanted) in sorted(self.mismatched.items())
        )

    def conversion_failures(self) -> tuple[Failure, ...]:
        """The loader's own words for each conversion that raised, its traceback left out."""
        errors = {} if self.record.info is None else self.record.info.conversion_errors
        return tuple(
            Failure(
                message=_last_words(text),
                names=tuple(n for n, _ in self.record.collected.get(target, ())),
                parameter=target,
            )
            for target, text in errors.items()
        )

    def stop(self, failure: Exception | None) -> Failure | None:
        """The exception as a failure, if it is one that the loader did not collect: with the tensors of the conversion it stopped in."""
        info = self.record.info
        if failure is None or (info is not None and (info.conversion_errors or info.mismatched_keys)):
            return None
        group = self.record.groups[-1] if self.record.groups and self.record.stage == "convert" else None
        names = () if group is None else tuple(name for name, _ in group.sources)
        return Failure(message=in_one_line(failure), names=names, parameter=None if group is None else group.target)


def _last_words(text: str) -> str:
    """`traceback + message + "Error: … on tensors destined for …"` -> the last two, as one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("Error")), len(lines) - 1)
    return "; ".join(lines[max(0, at - 1) :])


def _shape(size: Any) -> str:
    return str(list(size))


def _shards(group: Group) -> Iterator[tuple[str, str]]:
    """(checkpoint name, which part of a fused parameter it is): its place in the stack, the projection, or both."""
    if not group.converter:
        return
    counts = Counter(pattern for _, pattern in group.sources)
    words = {pattern: _distinct(pattern, group.patterns) if len(group.patterns) > 1 else "" for pattern in counts}
    place: Counter[str] = Counter()
    for name, pattern in group.sources:
        slot = ""
        if "*" in pattern or counts[pattern] > 1:
            slot = f"expert {place[pattern]}" if "expert" in pattern else str(place[pattern])
        place[pattern] += 1
        if shard := f"{slot} {words[pattern]}".strip():
            yield name, shard


def _distinct(pattern: str, patterns: list[str]) -> str:
    """The dotted part of `pattern` that its fellows do not have: `q_proj` of `attn.q_proj.weight`."""
    words = [set(re.split(r"\\?\.", p.strip("^$"))) for p in patterns if p != pattern]
    return ".".join(
        w for w in re.split(r"\\?\.", pattern.strip("^$")) if w and not all(w in others for others in words)
    )


def _unjudged(job: Job, view: View) -> tuple[Unjudged, ...]:
    out = []
    if view.record.fed.shapeless:
        reason = "no shard header was read: shapes and dtypes are taken to be what the model expects"
        if view.unknown:
            reason += f"; of {len(view.unknown)} converted parameters not even that is known"
        out.append(Unjudged(topic="shapes", reason=reason))
    odd = sorted(view.record.fed.odd)
    if odd:
        kinds = sorted({str(view.record.fed.specs[name].dtype) for name in odd})
        out.append(
            Unjudged(
                topic="dtypes", reason=f"torch has no tensor for {len(odd)} of {len(job.tensors)} ({', '.join(kinds)})"
            )
        )
    if view.record.fed.shapeless or not remarks.tied_pairs(view):
        return tuple(out)
    reason = "both tensors of a tied pair are stored; whether they are equal is in the data: if not, transformers unties them"
    return (*out, Unjudged(topic="tied", reason=reason))

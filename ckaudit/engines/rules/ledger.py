"""What was written where: the parts of every parameter, who wrote them, and what did not fit."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ckaudit.checkpoint import TensorSpec
from ckaudit.mapper import ShardId
from ckaudit.plan import Collision, Coverage, Mismatch, Parameter
from ckaudit.rulebook.model import Model, Spec

WHOLE = "*"


class Ledger:
    """Takes one tensor after another, in the order the engine loads them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parts: dict[str, dict[str, str]] = {}
        """Parameter -> part (a shard id, or `WHOLE`) -> the tensor that was written into it last."""
        self.sources: dict[str, list[str]] = {}
        self.lost: dict[tuple[str, str], list[str]] = {}

    def parts_of(self, spec: Spec, shards: tuple[ShardId, ...]) -> list[str] | None:
        """The parts that a tensor with these shard ids is written into; None when the parameter has no such part."""
        if not spec.shards:
            return [WHOLE]
        if not shards:
            return list(spec.shards)
        flat = [str(i) for s in shards for i in (s if isinstance(s, tuple) else (s,))]
        return flat if all(i in spec.shards for i in flat) else None

    def misfit(self, spec: Spec, parts: list[str], tensor: TensorSpec) -> Mismatch | None:
        """The mismatch of a tensor whose shape is not what its place needs; None when it fits or either shape is unknown."""
        wanted = spec.tensor
        if wanted is None or tensor.shape is None:
            return None
        if spec.shards:
            wanted = (sum(spec.shards[p] for p in dict.fromkeys(parts)), *wanted[1:])
        if wanted == tensor.shape or prod(wanted) == prod(tensor.shape) == 1:
            return None
        return Mismatch("shape", spec.name, (tensor.name,), str(list(wanted)), str(list(tensor.shape)))

    def write(self, spec: Spec, parts: Iterable[str], name: str) -> None:
        """Notes that `name` was written into `parts`; what stood there is lost."""
        held = self.parts.setdefault(spec.name, {})
        for part in parts:
            if (earlier := held.get(part)) is not None and earlier != name:
                lost = self.lost.setdefault((spec.name, name), [])
                if earlier not in lost:
                    lost.append(earlier)
            held[part] = name
        self.sources.setdefault(spec.name, []).append(name)

    def collisions(self) -> tuple[Collision, ...]:
        """Every tensor that was written over another, by the one that won."""
        return tuple(Collision(parameter, kept, tuple(lost)) for (parameter, kept), lost in self.lost.items())

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter with its coverage; of buffers only those that a tensor was written into."""
        return tuple(
            self._parameter(spec)
            for spec in self.model.parameters.values()
            if not spec.buffer or spec.name in self.parts
        )

    def _parameter(self, spec: Spec) -> Parameter:
        written = self.parts.get(spec.name, {})
        rows = spec.shards or {WHOLE: 1}
        total, done = sum(rows.values()), sum(rows[p] for p in written)
        coverage: Coverage = "full" if len(written) == len(rows) else "partial" if written else "none"
        share = 1.0 if coverage == "full" else done / total if total else None
        return Parameter(
            name=spec.name,
            coverage=coverage,
            shape=spec.shape,
            dtype=spec.dtype,
            share=share,
            sources=tuple(self.sources.get(spec.name, ())),
            by_design=spec.by_design if coverage != "full" else None,
            buffer=spec.buffer,
        )

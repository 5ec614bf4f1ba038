"""Shapes of the tensors of an index that came without headers: what the engine's own parameters want.

An index has names alone. A tensor of an unlikely shape is offered to the release's loader under each name; the loader refuses it with the
place in hand that it was to fill, and the shape of that place is the shape that the checkpoint must have where one tensor fills one place.
Nothing of a shape can be wrong then, so none is checked; names, rules and completeness are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines.transformers.tensors import torch_dtype
from ckaudit.engines.vllm.attempt import Attempt, Raised, build, default_dtype, ending, held
from ckaudit.engines.vllm.files import SAFETENSORS
from ckaudit.engines.vllm.provenance import Provenance
from ckaudit.naming import shape as family
from ckaudit.plan import NameFate, Plan, Unjudged

UNLIKELY = (199_999, 199_967)
"""Sizes that no weight has, larger than what any loader cuts out of one."""

_BLANK = ((1,), "BF16")
"""What the header of a laid out file says of a tensor that nothing is known of; no loader reads it there."""

_TRIES = 6
_ROUNDS = 20


Layout = Mapping[str, tuple[tuple[int, ...], str, bool]]


class Known(NamedTuple):
    """A shape and a safetensors dtype that the engine wants."""

    shape: tuple[int, ...]
    dtype: str


class Shapes:
    """The shapes of one checkpoint's tensors as far as they are known. `unknown`: names whose place is known and whose shape is not."""

    def __init__(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> None:
        self._kinds: dict[str, Known] = {}
        self._own: dict[str, Known] = {}
        self._sizes = sorted({v for v in _numbers(config) if v > 1}, reverse=True)
        self._names = dict.fromkeys(t.name for t in tensors if t.shape is None)
        self._refused: set[str] = set()
        self._tried: dict[str, set[tuple[int, ...]]] = {}
        self.unknown: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there is a tensor whose shape is not on record."""
        return bool(self._names)

    @staticmethod
    def blank(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The tensors as a file can be laid out with them."""
        shape, dtype = _BLANK
        return [t if t.shape is not None else msgspec.structs.replace(t, shape=shape, dtype=dtype) for t in tensors]

    def dress(self, tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The tensors with a shape and a dtype each."""
        return [self._dressed(t) for t in tensors]

    def _dressed(self, tensor: TensorSpec) -> TensorSpec:
        if tensor.name not in self._names:
            return tensor
        known = self._own.get(tensor.name) or self._kinds.get(family(tensor.name)) or Known(UNLIKELY, "BF16")
        return msgspec.structs.replace(tensor, shape=known.shape, dtype=known.dtype)

    def probe(self, config: Any) -> None:
        """Ask the model of `config`, one name of each family. Raises what construction raises."""
        observer = Provenance()
        model = build(config, observer, config.model_config)
        layout = {}
        for name, tensor, buffer in held(model):
            observer.watch(name, tensor)
            layout[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), buffer)
        paths = {id(m): path for path, m in model.named_modules()}
        probe = _Probe(model, observer, paths, config.model_config.dtype)
        for name in {family(n): n for n in reversed(list(self._names))}.values():
            known = Known(UNLIKELY, "BF16")
            for _ in range(_TRIES):
                raised = probe.offer(name, known)
                better = self._better(name, known, raised, layout) if raised is not None else None
                if better is None:
                    break
                known = better
            self._kinds[family(name)] = known
            if raised is not None and (raised.parameter is not None or _namesake(name, layout) is not None):
                self._refused.add(family(name))

    def _better(self, name: str, known: Known, raised: Raised, layout: Layout) -> Known | None:
        """What to offer after a refusal: the shape of the place in hand; then the whole of the parameter of that name; then one whose first
        size is a number of the config (a vocabulary is padded in the engine). None where the error is not about a shape, or nothing is
        left to try."""
        parameter = raised.parameter or _namesake(name, layout)
        if parameter is None or parameter not in layout:
            return None
        whole, torch_dtype, _ = layout[parameter]
        dtype = SAFETENSORS.get(torch_dtype, "BF16")
        tried = self._tried.setdefault(name, {UNLIKELY})
        smaller = [(n, *known.shape[1:]) for n in self._sizes if known.shape and n < known.shape[0]][:1]
        for shape in (raised.wanted, whole, *smaller):
            if shape is not None and shape not in tried:
                tried.add(shape)
                return Known(shape, dtype)
        return None

    def load(self, tensors: Sequence[TensorSpec], run: Callable[[Sequence[TensorSpec]], Attempt]) -> Attempt:
        """A load whose shape faults are answered by the shape that was wanted, tensor by tensor (layers may differ)."""
        for _ in range(_ROUNDS):
            seen = run(self.dress(tensors))
            raised = seen.raised
            name = raised.names[0] if raised is not None and raised.names else None
            if raised is None or name not in self._names:
                return seen
            known = self._dressed(TensorSpec(name, "", None, None, None))
            better = self._better(name, Known(known.shape or (), known.dtype or ""), raised, seen.layout)
            if better is None:
                if raised.parameter is not None or family(name) in self._refused:
                    self.unknown.add(name)
                return seen
            self._own[name] = better
        return seen

    def told(self, plan: Plan) -> Plan:
        """`plan` with what an index cannot tell: nothing about shapes and dtypes is judged, and nothing at all where one is not known."""
        stuck = [n for n in plan.names if n.name in self.unknown and n.fate != "loaded"]
        if stuck and plan.not_judged is None:
            reason = (
                f"only an index was read, and the shape that {stuck[0].name} must have is not to be had from the engine"
            )
            return msgspec.structs.replace(plan, not_judged=reason)
        return msgspec.structs.replace(
            plan,
            names=tuple(self._whole(n) for n in plan.names),
            mismatches=tuple(m for m in plan.mismatches if not self._names.keys() & set(m.names)),
            unjudged=(
                *plan.unjudged,
                Unjudged("shapes", "only an index was read: each tensor was given the shape that its place wants"),
                Unjudged("dtypes", "only an index was read: each tensor was given the dtype that its place wants"),
            ),
        )

    def _whole(self, name: NameFate) -> NameFate:
        """How much of a tensor was read says nothing where its shape was made up."""
        partly = name.name in self._names and name.fate == "loaded" and name.read != 1
        return msgspec.structs.replace(name, read=None) if partly else name


class _Probe(NamedTuple):
    model: Any
    observer: Provenance
    paths: Mapping[int, str]
    dtype: torch.dtype

    def offer(self, name: str, known: Known) -> Raised | None:
        """How the loader refuses one tensor; None if it does not."""
        try:
            with default_dtype(self.dtype), torch.no_grad(), self.observer:
                self.model.load_weights(iter([(name, self.observer.give(name, known.shape, torch_dtype(known.dtype)))]))
        except Exception as error:  # noqa: BLE001  (a refusal is the answer)
            return ending(error, self.observer, self.paths, started=True, finished=False)
        return None


def _numbers(value: Any) -> list[int]:
    """Every whole number of a config, at any depth."""
    if isinstance(value, dict):
        return [n for v in value.values() for n in _numbers(v)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def _namesake(name: str, layout: Layout) -> str | None:
    """The parameter whose name ends as a tensor's does, for the most parts, module and leaf at least."""
    parts = name.split(".")
    for start in range(len(parts) - 1):
        tail = ".".join(parts[start:])
        found = next((p for p in layout if p == tail or p.endswith(f".{tail}")), None)
        if found is not None:
            return found
    return None

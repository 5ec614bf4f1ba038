"""What came of a load: how much of each parameter was written, and how much of each checkpoint tensor lives in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ckaudit.engines.vllm.cutting import union_bytes
from ckaudit.engines.vllm.record import Record
from ckaudit.engines.vllm.storages import Storages, joint
from ckaudit.engines.vllm.strided import Inexpressible, Piece
from ckaudit.engines.vllm.trace import Leaf, Lost, Tally, Tracer


class ParameterCoverage(NamedTuple):
    """How the elements of one parameter came about. `unknown` elements may or may not hold checkpoint data."""

    elements: int
    loaded: int
    constant: int
    unknown: int
    sources: tuple[str, ...]
    lost: tuple[Lost, ...]
    casts: tuple[tuple[str, str, str], ...]
    """Checkpoint tensor, its dtype, and the dtype of another kind that it became."""
    broadcast: tuple[str, ...]
    """Checkpoint tensors that filled more elements than they have."""


class TensorCoverage(NamedTuple):
    """How much of one checkpoint tensor lives in the model: `read` elements of `elements`, None when that cannot be told."""

    elements: int
    read: int | None
    into: tuple[str, ...]


class Result(NamedTuple):
    parameters: dict[str, ParameterCoverage]
    tensors: dict[str, TensorCoverage]


class Held(NamedTuple):
    """What a model holds after loading: parameters and buffers by name, and what is held beside a parameter, under its name, which counts
    for the checkpoint tensors alone."""

    model: Iterable[tuple[str, torch.Tensor]]
    beside: Iterable[tuple[str, torch.Tensor]] = ()


def cover(
    held: Held,
    tensors: Mapping[str, torch.Tensor],
    former: Mapping[str, Sequence[Record]],
    storages: Storages,
    tracer: Tracer,
) -> Result:
    """Coverage of every parameter that the model now holds, and of every checkpoint tensor in `tensors`.

    `former`: the storages that a parameter had earlier, by name.
    """
    book = _Book(tensors, former, storages, tracer)
    parameters = {name: book.parameter(name, tensor) for name, tensor in held.model}
    for name, tensor in held.beside:
        book.parameter(name, tensor)
    return Result(parameters, {name: book.tensor(name, tensor) for name, tensor in tensors.items()})


class _Book:
    """What is read of each checkpoint tensor, gathered parameter by parameter."""

    def __init__(self, tensors: Iterable[str], former: Mapping[str, Sequence[Record]], storages: Storages,
                 tracer: Tracer) -> None:  # fmt: skip
        self._former, self._storages, self._tracer = former, storages, tracer
        self._reads: dict[str, list[Piece] | None] = {name: [] for name in tensors}
        self._into: dict[str, dict[str, None]] = {name: {} for name in self._reads}

    def parameter(self, name: str, tensor: torch.Tensor) -> ParameterCoverage:
        record, item = self._storages.of(tensor), tensor.element_size()
        tally = Tally()
        order: dict[str, None] = {}
        casts: dict[tuple[str, str, str], None] = {}
        broadcast: dict[str, None] = {}
        try:
            for leaf in self._leaves(record, tensor):
                tally.add(leaf)
                if leaf.record is None or leaf.record.kind != "tensor":
                    continue
                source = leaf.record.name
                order[source] = None
                self._note_read(source, name, leaf)
                if leaf.cast:
                    casts[(source, *leaf.cast)] = None
                if leaf.broadcast:
                    broadcast[source] = None
            loaded, constant = tally.bytes("tensor") // item, tally.bytes("constant") // item
            unsure = tally.known_bytes(("tensor", "unknown")) // item - loaded if "unknown" in tally.places else 0
            lost = tuple(self._lost(name, record))
        except Inexpressible:
            return self._untold(name, tensor, record)
        return ParameterCoverage(tensor.numel(), loaded, min(constant, tensor.numel() - loaded), unsure, tuple(order), lost,
                                 tuple(casts), tuple(broadcast))  # fmt: skip

    def _leaves(self, record: Record, tensor: torch.Tensor) -> Iterable[Leaf]:
        piece = joint((tensor, tensor))
        return self._tracer.leaves(record, len(record.log), piece) if all(piece.sizes) else ()

    def _note_read(self, source: str, parameter: str, leaf: Leaf) -> None:
        self._into.setdefault(source, {})[parameter] = None
        held = self._reads.setdefault(source, [])
        if leaf.read is None:
            self._reads[source] = None
        elif held is not None:
            held.append(leaf.read)

    def _untold(self, name: str, tensor: torch.Tensor, record: Record) -> ParameterCoverage:
        """Of a parameter that the algebra has no answer for: what may be in it."""
        names = self._tracer.names(record, len(record.log))
        for source in names:
            self._reads[source] = None
            self._into.setdefault(source, {})[name] = None
        return ParameterCoverage(tensor.numel(), 0, 0, tensor.numel(), names, (), (), ())

    def _lost(self, name: str, record: Record) -> Iterable[Lost]:
        yield from self._tracer.lost(record)
        kept = self._tracer.names(record, len(record.log))
        for former in self._former.get(name, []):
            gone = tuple(n for n in self._tracer.names(former, len(former.log)) if n not in kept)
            if former is not record and gone:
                yield Lost(gone, kept)

    def tensor(self, name: str, tensor: torch.Tensor) -> TensorCoverage:
        places = self._reads[name]
        read = None if places is None else _elements(places, tensor)
        return TensorCoverage(tensor.numel(), read, tuple(self._into[name]))


def _elements(places: list[Piece], tensor: torch.Tensor) -> int | None:
    """Elements of a checkpoint tensor in the union of the places read; None if that cannot be told."""
    item: int = tensor.element_size()
    if len(places) == 1:
        return places[0].elements * places[0].at[0].item // item
    try:
        return union_bytes(places) // item
    except Inexpressible:
        return None

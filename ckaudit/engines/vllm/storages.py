"""Which storage a tensor lies in, and where in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckaudit.engines.vllm.record import Kind, Record
from ckaudit.engines.vllm.strided import Address, Piece, tidy


class Storages:
    """The records of all storages, found by a tensor that lies in one."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._records

    def of(self, tensor: torch.Tensor) -> Record:
        """The record of a tensor's storage; one never seen before was made by the engine and holds constants."""
        found = self._records.get(tensor.untyped_storage()._cdata)
        return found if found is not None else self.make("constant", "", tensor)

    def known(self, tensor: torch.Tensor) -> Record | None:
        """The record of a tensor's storage, if it was seen before."""
        return self._records.get(tensor.untyped_storage()._cdata)

    def make(self, kind: Kind, name: str, tensor: torch.Tensor) -> Record:
        """A record for a storage that is new (its address may have been another's)."""
        storage = tensor.untyped_storage()
        record = Record(kind, name, storage.nbytes(), str(tensor.dtype).removeprefix("torch."), storage)
        self._records[storage._cdata] = record
        return record


def address(tensor: torch.Tensor) -> Address:
    """Where the elements of a tensor lie in its storage."""
    item = tensor.element_size()
    return Address(tensor.storage_offset() * item, tuple(s * item for s in tensor.stride()), item)


def joint(tensors: Sequence[torch.Tensor]) -> Piece:
    """One box over tensors of the same shape with the address of each, tidied by the first."""
    first = tensors[0]
    count = first.numel()
    if count > 1 and all(t.is_contiguous() for t in tensors):  # what `tidy` would come to
        return Piece(
            (count,),
            tuple(Address(t.storage_offset() * n, (n,), n) for t, n in ((t, t.element_size()) for t in tensors)),
        )
    return tidy(Piece(tuple(first.shape), tuple(address(t) for t in tensors)))

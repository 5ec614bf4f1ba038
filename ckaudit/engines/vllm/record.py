"""What happened to one storage: an append-only list of writes. Plain values, no torch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ckaudit.engines.vllm.strided import Address, Piece

Kind = Literal["tensor", "parameter", "constant", "unwritten"]
"""What a storage holds where nothing was written: a checkpoint tensor's own data, a parameter's initial value, constants that the
engine made (`torch.zeros`), or nothing yet (`torch.empty`)."""

Mode = Literal["copy", "mixed", "moved", "unknown"]
"""How a write's elements depend on its sources: one by one · each on all of them (a sum, a matmul) · each on some of them, in an order
that is not followed (a flip) · some elements only, which ones depends on data (a mask)."""


class Source(NamedTuple):
    """Where a write read from: the storage, how many of its writes had happened by then, and the view that was read."""

    record: Record
    upto: int
    sizes: tuple[int, ...]
    at: Address


class Write(NamedTuple):
    """One write. For the mode `copy`, `piece.at` is the place written and then one place for each source, element by element."""

    mode: Mode
    piece: Piece
    sources: tuple[Source, ...]
    cast: tuple[str, str] | None
    """The dtypes read and written, where they are of different kinds."""


class Record:
    """One storage and its log. `name` is a checkpoint tensor's name, or a parameter's."""

    __slots__ = ("dtype", "kind", "log", "name", "nbytes", "storage")

    def __init__(self, kind: Kind, name: str, nbytes: int, dtype: str, storage: Any = None) -> None:
        self.kind: Kind = kind
        self.name = name
        self.nbytes = nbytes
        self.dtype = dtype
        self.storage = storage  # held, so that its address is not given to another storage
        self.log: list[Write] = []

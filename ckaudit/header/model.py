"""What a safetensors header says, as values, and the numbers of the format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

# Bits per element. Source: safetensors `Dtype` (tensor.rs, 0.6 and newer).
DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip

MAX_HEADER = 100_000_000
"""Bytes. safetensors refuses a longer header (`MAX_HEADER_SIZE`)."""

MAX_SIZE = 2**64 - 1
"""The largest number that readers can hold (Rust `usize`)."""

MAX_DEFECTS = 100_000
"""Defects listed per file; one more says that there are others. A hostile header could hold millions."""

if TYPE_CHECKING:
    Dtype = str
    Size = int
else:  # what the typed decode accepts; it hands out the one string object of each dtype, which saves 25 MB on a large header
    Dtype = Literal[tuple(DTYPE_BITS)]
    Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorInfo(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One tensor as its header declares it: safetensors dtype name, shape, and data offsets in bytes.

    An unknown dtype keeps its spelling.
    """

    dtype: Dtype
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]

    @property
    def nbytes(self) -> int:
        """Bytes of data that the offsets span."""
        return self.data_offsets[1] - self.data_offsets[0]


class Defect(msgspec.Struct, frozen=True):
    """One thing wrong with a file, as a fact: `code` says which kind (see `checks.container`), `name` the tensor, if one."""

    code: str
    name: str | None = None
    wanted: str = ""
    found: str = ""


class Header(msgspec.Struct, frozen=True):
    """What one safetensors header says, and everything that is wrong with it.

    `tensors` is in file order and holds every entry that could be understood, so that an audit of names can go on.
    `length` is the header's own length in bytes (the 8-byte prefix excluded).
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    length: int
    defects: tuple[Defect, ...] = ()

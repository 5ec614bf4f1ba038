"""What a safetensors header says, as values, and the numbers of the format."""

from __future__ import annotations

import msgspec

# Bits per element. Source: safetensors `Dtype` (tensor.rs, 0.6 and newer).
DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Those that a model computes in."""
TORCH_DTYPES: dict[str, str] = {
    "F4": "float4_e2m1fn_x2", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64",
    "I64": "int64", "U64": "uint64", "C64": "complex64",
}  # fmt: skip
"""What torch calls them, as safetensors' own binding has it (`safetensors/torch.py`, `_TYPES`). Floats of six bits are not there."""

MAX_HEADER = 100_000_000
"""Bytes. safetensors refuses a longer header (`MAX_HEADER_SIZE`)."""

MAX_SIZE = 2**64 - 1
"""The largest number that readers can hold (Rust `usize`)."""

MAX_DEFECTS = 100_000
"""Defects listed per file, however long; one more says that there are others. A hostile header could hold millions."""


def most_defects(length: int) -> int:
    """Defects that are listed of a text of so many bytes. A real entry is longer than 100 bytes, so none of its faults is left out."""
    return min(MAX_DEFECTS, 1000 + length // 100)


MAX_FIELD = 65_536
"""Bytes. A longer dtype, shape or place is none: real ones have twenty."""

MAX_PAIRS = 10_000
"""Pairs of metadata that are looked at; real files have ten."""


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor as its header declares it: safetensors dtype name, shape, and where its data begins and ends, in bytes.

    An unknown dtype keeps its spelling. Equal shapes of one header are one object, and so are the end of a tensor and the beginning of
    the next: of half a million tensors that leaves half the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def data_offsets(self) -> tuple[int, int]:
        """Beginning and end, as the format has them."""
        return self.begin, self.end

    @property
    def nbytes(self) -> int:
        """Bytes of data that the offsets span."""
        return self.end - self.begin


class Defect(msgspec.Struct, frozen=True, gc=False):
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

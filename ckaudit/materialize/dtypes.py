"""safetensors dtype names as torch knows them."""

from __future__ import annotations

import torch

# Source: safetensors python binding, `torch.py` `_TYPES` (0.6 and newer). A dtype that this torch lacks is handed over as raw bytes.
DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""dtypes of which a byte does not hold a whole number of single elements."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name; uint8 for one that torch does not have (`F6_E2M3`)."""
    found = getattr(torch, DTYPE_NAMES.get(name, "uint8"), torch.uint8)
    return found if isinstance(found, torch.dtype) else torch.uint8


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the torch tensor: two F4 elements share a byte, so that its last dimension is halved; F6 is flat bytes."""
    if name == "F4" and shape:
        return (*shape[:-1], shape[-1] // 2)
    if name in PACKED:
        return (-1,)
    return shape

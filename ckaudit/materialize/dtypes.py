"""safetensors dtype names as torch knows them."""

from __future__ import annotations

import torch

from ckaudit.header import TORCH_DTYPES

PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""dtypes of which a byte does not hold a whole number of single elements."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name; uint8 for one that torch does not have (`F6_E2M3`)."""
    found = getattr(torch, TORCH_DTYPES.get(name, "uint8"), torch.uint8)
    return found if isinstance(found, torch.dtype) else torch.uint8


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the torch tensor: two F4 elements share a byte, so that its last dimension is halved; F6 is flat bytes."""
    if name == "F4" and shape:
        return (*shape[:-1], shape[-1] // 2)
    if name in PACKED:
        return (-1,)
    return shape

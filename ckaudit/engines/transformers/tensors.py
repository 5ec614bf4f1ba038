"""Checkpoint tensors as the loader meets them: a shape and a dtype on the meta device, and the name that they came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ckaudit.checkpoint import TensorSpec
from ckaudit.header import TORCH_DTYPES

_NAMES = {getattr(torch, name): code for code, name in TORCH_DTYPES.items() if hasattr(torch, name)}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; torch's own where safetensors has none."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype that safetensors reads `name` as; None where it has none (six-bit floats, an unknown code)."""
    return getattr(torch, TORCH_DTYPES.get(name or "", ""), None)


class Fed:
    """The state dict that is fed to the loader, and which of its tensors are stand-ins for something unknown."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.state: dict[str, Any] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.shapeless: set[str] = set()
        """Names whose shape nobody knows: an index lists them, no header was read."""
        self.odd: set[str] = set()
        """Names whose dtype torch has no word for, or whose shape no tensor can have."""
        for spec in specs:
            self.specs[spec.name] = spec
            self.state[spec.name] = tag(self._meta(spec), (spec.name,))

    def _meta(self, spec: TensorSpec) -> Any:
        if spec.shape is None:
            self.shapeless.add(spec.name)
            return torch.empty((), dtype=torch_dtype(spec.dtype) or torch.bfloat16, device="meta")
        dtype, shape = torch_dtype(spec.dtype), spec.shape
        if dtype is None:
            self.odd.add(spec.name)
        elif spec.dtype == "F4":  # two to a byte: torch counts bytes in the last dimension, the header counts elements
            shape = (*shape[:-1], shape[-1] // 2) if shape else shape
        try:
            return torch.empty(shape, dtype=dtype or torch.uint8, device="meta")
        except (RuntimeError, TypeError, ValueError):  # more elements than an index can count, a negative size
            self.odd.add(spec.name)
            return torch.empty((), dtype=torch.uint8, device="meta")


def tag(tensor: Any, names: tuple[str, ...]) -> Any:
    """`tensor`, marked as made from the checkpoint tensors `names`."""
    tensor._ckaudit_names = names
    return tensor


def tags(tensor: Any) -> tuple[str, ...]:
    """The checkpoint tensors that `tensor` was made from, as far as they were followed."""
    return getattr(tensor, "_ckaudit_names", ())

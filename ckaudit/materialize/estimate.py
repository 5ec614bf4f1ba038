"""How much memory a load takes, from headers alone, and whether there is enough. Pure; whoever asks knows what is free."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import msgspec

from ckaudit.errors import CkauditError
from ckaudit.header import DTYPE_BITS, FLOATS
from ckaudit.materialize.layout import Stored

# What a quantised checkpoint becomes where the device has no kernels for it: elements per stored element, and bits of each.
# Facts: transformers 5.24 `quantizers/quantizer_finegrained_fp8.py` and `quantizer_mxfp4.py` (`dequantize` without a GPU that can).
_DEQUANTIZED = {"fp8": {"F8_E4M3": (1, 16)}, "mxfp4": {"U8": (2, 16)}}
_FORWARD = 256 << 20
"""Bytes. Activations, logits and library workspaces of one short forward pass."""
_AHEAD = 1 << 30
"""Bytes that run ahead of a loader that makes other tensors of what it reads, at least: enough to keep the readers busy."""


class Estimate(msgspec.Struct, frozen=True):
    """Bytes of device memory: `steady` for the model, `peak` while it is made and run once. An estimate, from headers."""

    steady: int
    peak: int
    read: int
    """Bytes of the files."""
    free: int | None = None
    casts: bool = False
    """Whether tensors are changed on the way, so that both forms are there for a moment."""
    ahead: int = 0
    """Bytes that wait on the device, as read, for the loader to change them; 0 where nothing is changed."""


def estimate(
    tensors: Iterable[Stored], dtype: str | None, quantization: dict[str, Any] | None, *, device: str
) -> Estimate:
    """`dtype`: the safetensors dtype name that the model gets (None: as stored). `device`: `cpu` or `cuda`.

    On a CPU tensors that stay as they are live in the page cache, which needs no free memory.
    """
    method = str((quantization or {}).get("quant_method", "")) if device == "cpu" else ""
    changes = _DEQUANTIZED.get(method, {})
    steady = read = largest = owned = 0
    casts = False
    for tensor in tensors:
        elements = prod(tensor.shape)
        size: int | None = None
        if tensor.dtype in changes:
            factor, bits = changes[tensor.dtype]
            size = elements * factor * bits // 8
        elif dtype is not None and tensor.dtype in FLOATS and dtype in FLOATS and tensor.dtype != dtype:
            size = elements * DTYPE_BITS[dtype] // 8
        if size is None:
            size = tensor.nbytes
        else:  # also where both dtypes are of one size
            casts = True
            largest = max(largest, tensor.nbytes)
            owned += size
        steady += size
        read += tensor.nbytes
    held = owned if device == "cpu" else steady
    ahead = max(_AHEAD, read // 20) if casts and device != "cpu" else 0
    peak = held + largest + min(ahead, read) + _FORWARD
    return Estimate(steady=steady, peak=peak, read=read, casts=casts, ahead=ahead)


def require(wanted: Estimate, free: int, device: str) -> Estimate:
    """`wanted` with what is free. Raises CkauditError where that is too little."""
    if wanted.peak > free:
        raise CkauditError(
            f"The load needs about {gigabytes(wanted.peak)} on {device} ({gigabytes(wanted.steady)} once loaded), "
            f"and {gigabytes(free)} are free.",
            "Free memory, spread it with --devices N, try some of it with --shards N, or use --device cpu.",
        )
    return msgspec.structs.replace(wanted, free=free)


def gigabytes(size: int) -> str:
    """A size in GB (10^9 bytes) for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

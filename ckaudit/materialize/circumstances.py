"""Exceptions that say something about the machine, and nothing about the checkpoint that was loaded on it."""

from __future__ import annotations

import re

_LOST = ("device-side assert", "CUDA error", "device lost", "unspecified launch failure", "NCCL error", "HIP error")
# Source: torch `c10/core/impl/alloc_cpu.cpp`: the CPU's allocator raises a plain RuntimeError.
_NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory", "CUDA out of memory")
_NO_KERNEL = re.compile(r"(not implemented for '|[Uu]nsupported dtype )(Half|BFloat16|Float8|ComplexHalf)")
"""An operation that this device has not for a dtype (torch `AT_DISPATCH`, MKL's FFT)."""


_NEEDS = re.compile(
    r"(GPU|CUDA|XPU|accelerator) (is|are) (required|needed)|requires? (a |an )?(\w+ )?(GPU|CUDA)|only supported on (a )?GPU"
    r"|No (GPU|CUDA)|compute capability",
    re.IGNORECASE,
)
"""How quantisers of transformers say that they cannot run here (`quantizers/quantizer_*.py`, `validate_environment`)."""


def wants_device(error: BaseException) -> bool:
    """Whether a loader says that it needs a device that is not this one."""
    return isinstance(error, RuntimeError | ValueError) and bool(_NEEDS.search(str(error)))


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a device or of the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in _NO_MEMORY)


def device_lost(error: BaseException) -> bool:
    """Whether the device or the way to it broke down."""
    return any(sign in str(error) for sign in _LOST)


def no_kernel(error: BaseException) -> bool:
    """Whether the device cannot compute in the dtype that the model is in."""
    return isinstance(error, RuntimeError) and bool(_NO_KERNEL.search(str(error)))

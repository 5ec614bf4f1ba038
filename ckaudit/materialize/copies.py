"""From a read buffer in host memory to a device: by the CUDA driver where there is one, else by torch, one after another.

`Tensor.copy_` is not used for the former: with twelve threads at it a copy of 4 MiB costs 60 µs of Python and locks, a call of the driver
5 µs, which is 27 against 52 GB/s from the page cache to an H200 (docs/performance.md).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

_PAGE = 4096
_OK = 0


class Copies(Protocol):
    """One thread's copies, from buffers that it reads into in turn."""

    buffers: int
    """How many buffers to read into in turn."""

    def pin(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer, or one like it, as copies want it."""
        ...

    def free(self, turn: int) -> None:
        """Wait until the copies from buffer number `turn` are done."""
        ...

    def after(self, event: Any) -> None:
        """Let no later copy begin before `event`."""
        ...

    def copy(self, target: torch.Tensor, offset: int, buffer: torch.Tensor, start: int, nbytes: int) -> None:
        """`nbytes` from `start` of a pinned `buffer` to `offset` of `target` (both flat uint8)."""
        ...

    def done(self, turn: int) -> Any:
        """The event behind all copies so far, the last of them from buffer number `turn`; None where they are done."""
        ...

    def close(self) -> None:
        """Wait for every copy; let the buffers go."""
        ...


def copies_to(device: torch.device) -> Copies:
    """The quickest copies to `device`. For the thread that calls."""
    if device.type == "cuda" and _driver() is not None:
        return DriverCopies(device)
    return PlainCopies()


class PlainCopies:
    """Copies that are done when `copy` returns; for every device."""

    buffers = 1

    def pin(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer as it is."""
        return buffer

    def free(self, turn: int) -> None:
        """Nothing to wait for."""

    def after(self, event: Any) -> None:
        """Wait for `event` at once."""
        event.synchronize()

    def copy(self, target: torch.Tensor, offset: int, buffer: torch.Tensor, start: int, nbytes: int) -> None:
        """Copy and wait."""
        target[offset : offset + nbytes].copy_(buffer[start : start + nbytes])

    def done(self, turn: int) -> Any:  # noqa: ARG002
        """Nothing is under way."""
        return None

    def close(self) -> None:
        """Nothing to let go."""


class DriverCopies:
    """Copies on a CUDA stream of their own, behind the reads. Raises RuntimeError with the driver's words."""

    buffers = 2

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread: the driver takes the context that is current
        self._stream = torch.cuda.Stream(device)
        self._events = [torch.cuda.Event() for _ in range(self.buffers)]
        for event in self._events:
            event.record(self._stream)  # a handle of its own from here on
        self._handles = [event.cuda_event for event in self._events]
        self._on = self._stream.cuda_stream
        self._pinned: list[torch.Tensor] = []
        driver = _driver()
        assert driver is not None
        self._driver = driver

    def pin(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer, pinned where it lies; where CUDA refuses, another from torch's pinned memory.

        Touched by the thread that will use it, then registered: on an H200 host eight readers pin 256 MiB in 33 ms that way, where torch's
        own pinned allocator takes 120 to 150 ms, one request after another.
        """
        buffer.numpy()[::_PAGE] = 0
        if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == _OK:
            self._pinned.append(buffer)
            return buffer
        return torch.empty(buffer.numel(), dtype=torch.uint8, pin_memory=True)

    def free(self, turn: int) -> None:
        """Wait until the copies from buffer number `turn` are done."""
        if self._driver.at_once.cuEventQuery(self._handles[turn]) != _OK:
            self._check(self._driver.waiting.cuEventSynchronize(self._handles[turn]))

    def after(self, event: Any) -> None:
        """Let no later copy begin before `event`."""
        self._check(self._driver.at_once.cuStreamWaitEvent(self._on, event.cuda_event, 0))

    def copy(self, target: torch.Tensor, offset: int, buffer: torch.Tensor, start: int, nbytes: int) -> None:
        """Begin a copy."""
        into, out_of = target.data_ptr() + offset, buffer.data_ptr() + start
        self._check(self._driver.at_once.cuMemcpyHtoDAsync_v2(into, out_of, nbytes, self._on))

    def done(self, turn: int) -> Any:
        """The event of buffer number `turn`, which is recorded anew with its next copies: who waits late waits for those as well."""
        self._check(self._driver.at_once.cuEventRecord(self._handles[turn], self._on))
        return self._events[turn]

    def close(self) -> None:
        """Wait for every copy; unpin."""
        self._stream.synchronize()
        for buffer in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._pinned = []

    def _check(self, result: int) -> None:
        if result == _OK:
            return
        text = ctypes.c_char_p()
        self._driver.at_once.cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} ({result})")


class _Driver(NamedTuple):
    """The CUDA driver's library, twice."""

    waiting: ctypes.CDLL
    """Calls let other threads run."""
    at_once: ctypes.PyDLL
    """Calls keep the interpreter: they take a few microseconds, to get it back from a dozen readers can take a hundred."""


@cache
def _driver() -> _Driver | None:
    """The driver, or None. torch's streams and events are the driver's own handles.

    Source: CUDA Driver API 13.0, sections 6.13 (memory), 6.18 (streams), 6.19 (events); `cuda.h` for the types.
    """
    name = "nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1"
    try:
        driver = _Driver(ctypes.CDLL(name), ctypes.PyDLL(name))
        driver.waiting.cuEventSynchronize.argtypes = [ctypes.c_void_p]
        for function, types in _AT_ONCE.items():
            getattr(driver.at_once, function).argtypes = types
    except (OSError, AttributeError):
        return None
    return driver


_AT_ONCE: dict[str, list[Any]] = {
    "cuMemcpyHtoDAsync_v2": [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
    "cuEventRecord": [ctypes.c_void_p, ctypes.c_void_p],
    "cuEventQuery": [ctypes.c_void_p],
    "cuStreamWaitEvent": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}

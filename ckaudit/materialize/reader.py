"""One reader thread's tools: two buffers, open files, and a stream on which copies to the device run behind the reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch

from ckaudit.errors import SourceError
from ckaudit.materialize.layout import Chunk, Layout

Access = Literal["buffered", "ahead", "direct"]
"""How files are read: through the page cache; the same with the kernel told to read ahead; or past it (O_DIRECT)."""

PAGE = 4096
"""Bytes. What O_DIRECT wants offsets, lengths and addresses to be multiples of, on every common file system."""


class Reader:
    """Reads chunks into two buffers in turn, pinned where the device is a GPU. One per thread; a context manager."""

    def __init__(self, files: Sequence[str], device: torch.device, size: int, access: Access = "buffered") -> None:
        self._files, self._device, self._access = files, device, access
        self._cuda = device.type == "cuda"
        self._handles: dict[int, int] = {}
        self._room = size + (2 * PAGE if access == "direct" else 0)
        self._buffers: list[torch.Tensor | None] = [None] * (2 if self._cuda else 1)
        self._registered: list[torch.Tensor] = []
        self._events: list[Any] = [None, None]
        self._turn = 0
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        for buffer in self._registered:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        for handle in self._handles.values():
            os.close(handle)

    def read(self, chunk: Chunk, layout: Layout) -> list[torch.Tensor]:
        """The bytes of each piece of `chunk`, as slices of a buffer that the next read but one reuses. Raises SourceError."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()
        buffer = self._buffers[self._turn]
        if buffer is None:
            buffer = self._buffers[self._turn] = self._new_buffer()
        starts: list[int] = []
        runs = list(_runs(chunk, layout))
        for shard, start, length, into, pieces in runs:
            # A direct read needs whole pages: only a chunk that is one run has room for them.
            direct = self._access == "direct" and len(runs) == 1
            lead = self._fill(buffer, shard, start, length, into, direct)
            starts += [into + lead + p for p in pieces]
        return [buffer[s : s + p.nbytes] for s, p in zip(starts, chunk.pieces, strict=True)]

    def _new_buffer(self) -> torch.Tensor:
        buffer = _buffer(self._room)
        if not self._cuda:
            return buffer
        if _pinned(buffer):
            self._registered.append(buffer)
            return buffer
        return torch.empty(self._room, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def copying(self, after: Any) -> Iterator[Any]:
        """Copies made inside run on the reader's own stream, not before event `after`. Yields the event that ends them, or None."""
        if self._stream is None:
            yield None
            return
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield event
            event.record(self._stream)
        self._events[self._turn] = event

    def _fill(self, buffer: torch.Tensor, shard: int, start: int, length: int, into: int, direct: bool) -> int:
        """Read `length` bytes at `start` into the buffer at `into`; returns by how much they stand further on (O_DIRECT)."""
        lead = start % PAGE if direct else 0
        view = memoryview(buffer.numpy())
        want = lead + length
        room = -(-want // PAGE) * PAGE if direct else want
        done = 0
        handle = self._open(shard, direct)
        while done < want:
            try:
                got = os.preadv(handle, [view[into + done : into + room]], start - lead + done)
            except OSError as error:
                raise SourceError(
                    f"Cannot read {self._files[shard]!r}: {error.strerror}.",
                    "Check the disk and the file's permissions.",
                ) from error
            if not got:
                raise cut_short(self._files[shard], os.fstat(handle).st_size, start + length)
            done += got
            if done < want and direct and done % PAGE:  # the last page of a file is a short one
                raise cut_short(self._files[shard], os.fstat(handle).st_size, start + length)
        return lead

    def _open(self, shard: int, direct: bool) -> int:
        key = -1 - shard if direct else shard
        if key not in self._handles:
            try:
                self._handles[key] = os.open(self._files[shard], os.O_RDONLY | (os.O_DIRECT if direct else 0))
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # a file system without direct reads, such as tmpfs
                    self._access = "buffered"
                    return self._open(shard, False)
                raise SourceError(f"Cannot open {self._files[shard]!r}: {error.strerror}.") from error
            if self._access == "ahead":
                os.posix_fadvise(self._handles[key], 0, 0, os.POSIX_FADV_WILLNEED)
        return self._handles[key]


def cut_short(path: str, size: int, stop: int) -> SourceError:
    """The error for a file that ends at byte `size`, although a tensor in it ends at byte `stop`."""
    return SourceError(
        f"{path!r} ends at byte {size:,}, inside a tensor that ends at byte {stop:,}.",
        "Download the file again; `ckaudit names` lists the tensors that are cut.",
    )


def cached_share(path: str, samples: int = 64) -> float:
    """About how much of a file is in the page cache, 0 to 1, from `samples` reads that refuse to wait (1.0 where unknown)."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    size = os.path.getsize(path)
    if nowait is None or not size:
        return 1.0
    hits = 0
    buffer = bytearray(1)
    handle = os.open(path, os.O_RDONLY)
    try:
        for i in range(samples):
            try:
                hits += os.preadv(handle, [buffer], size * i // samples, nowait) == 1
            except BlockingIOError:
                continue
            except OSError:  # a file system that does not know the flag
                return 1.0
    finally:
        os.close(handle)
    return hits / samples


def _runs(chunk: Chunk, layout: Layout) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Pieces that follow each other in one file, as one read: (shard, file offset, bytes, buffer offset, piece offsets in it)."""
    pieces = chunk.pieces
    begin = 0
    for end in range(1, len(pieces) + 1):
        if end < len(pieces) and _follows(pieces[end - 1], pieces[end], layout):
            continue
        first, last = pieces[begin], pieces[end - 1]
        tensor = layout.tensors[first.tensor]
        length = last.into + last.nbytes - first.into
        yield (
            tensor.shard,
            tensor.start + first.at,
            length,
            first.into,
            [p.into - first.into for p in pieces[begin:end]],
        )
        begin = end


def _follows(one: Any, other: Any, layout: Layout) -> bool:
    a, b = layout.tensors[one.tensor], layout.tensors[other.tensor]
    return bool(a.shard == b.shard and a.start + one.at + one.nbytes == b.start + other.at)


def _buffer(size: int) -> torch.Tensor:
    """`size` bytes that start on a page."""
    raw = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + size]


def _pinned(buffer: torch.Tensor) -> bool:
    """Pin the buffer where it lies; False where CUDA refuses.

    Touched by the thread that will use it, then registered: on an H200 host eight readers pin 256 MiB in 33 ms that way, where torch's own
    pinned allocator takes 120 to 150 ms, one request after another.
    """
    buffer.numpy()[::PAGE] = 0
    return not int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))

"""One reader thread's tools: buffers, open files, and copies to the device that run behind the reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from ckaudit.errors import SourceError
from ckaudit.materialize.copies import copies_to
from ckaudit.materialize.layout import Run, Window

Access = Literal["buffered", "ahead", "direct"]
"""How files are read: through the page cache; the same with the kernel told to read ahead; or past it (O_DIRECT)."""

CHECK_FILE = "Check the disk and the file's permissions."
PAGE = 4096
"""Bytes. What O_DIRECT wants offsets, lengths and addresses to be multiples of, on every common file system."""


class Reader:
    """Reads windows of up to `size` bytes into buffers in turn and sends them on. One per thread; a context manager."""

    def __init__(self, files: Sequence[str], device: torch.device, size: int, access: Access = "buffered") -> None:
        self._files, self._access = files, access
        self._handles: dict[int, int] = {}
        self._room = size + (2 * PAGE if access == "direct" else 0)
        self.copies = copies_to(device)
        self._buffers: list[tuple[torch.Tensor, memoryview] | None] = [None] * self.copies.buffers
        self._turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.copies.close()
        for handle in self._handles.values():
            os.close(handle)

    def move(self, window: Window, blocks: Mapping[int, torch.Tensor]) -> Any:
        """Read a window and send its pieces to their allocations; returns the event behind them, None where they are there.

        `blocks`: allocations (flat uint8) by number. Raises SourceError, RuntimeError where the device refuses.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        known = self._buffers[self._turn]
        if known is None:
            buffer = self.copies.pin(_buffer(self._room))
            known = self._buffers[self._turn] = buffer, memoryview(buffer.numpy())
        else:
            self.copies.free(self._turn)
        buffer, view = known
        for run in window:
            # A direct read needs whole pages: only a window that is one run has room for them.
            lead = self._fill(view, run, self._access == "direct" and len(window) == 1)
            for piece in run.pieces:
                self.copies.copy(blocks[piece.arena], piece.to, buffer, lead + piece.into, piece.nbytes)
        return self.copies.done(self._turn)

    def _fill(self, view: memoryview, run: Run, direct: bool) -> int:
        """Read a run into its place in the buffer; returns by how much it stands further on (O_DIRECT)."""
        shard, start, into = run.shard, run.start, run.into
        lead = start % PAGE if direct else 0
        want = lead + run.nbytes
        room = -(-want // PAGE) * PAGE if direct else want
        done = 0
        handle = self._open(shard, direct)
        while done < want:
            try:
                got = os.preadv(handle, [view[into + done : into + room]], start - lead + done)
            except OSError as error:
                raise SourceError(
                    f"Cannot read {self._files[shard]!r}: {error.strerror}.",
                    CHECK_FILE,
                ) from error
            if not got:
                raise cut_short(self._files[shard], os.fstat(handle).st_size, start + run.nbytes)
            done += got
            if done < want and direct and done % PAGE:  # the last page of a file is a short one
                raise cut_short(self._files[shard], os.fstat(handle).st_size, start + run.nbytes)
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
                raise SourceError(f"Cannot open {self._files[shard]!r}: {error.strerror}.", CHECK_FILE) from error
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


def _buffer(size: int) -> torch.Tensor:
    """`size` bytes that start on a page."""
    raw = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + size]

"""Tensor data from files to a device: reader threads fill pinned buffers that stream to the device while the next ones fill.

Every tensor arrives once, in an allocation of its own or beside those it will be joined with (see `layout`), in the order in which the
loader asks for it; whoever asks early waits. Without CUDA the buffers are plain memory and copies are synchronous.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ckaudit.errors import CkauditError
from ckaudit.materialize.dtypes import torch_dtype, torch_shape
from ckaudit.materialize.layout import Chunk, Layout
from ckaudit.materialize.reader import Access, Reader

READERS = 8
UNBOUNDED = 1 << 62
_LARGE = 1 << 20
"""Bytes. torch's allocator serves larger requests from blocks that it splits, smaller ones from a pool of their own."""
_RESERVE_MARGIN = 1 << 30
"""Bytes of device memory that are left to others when the stream reserves its own at once."""

Ready = Callable[[int, torch.Tensor, Sequence[Any]], None]
"""Told of a finished allocation: its index, its bytes (flat uint8), and the CUDA events behind which they are there."""


class DeviceStream:
    """The tensors of a layout, streamed to `device` by `readers` threads; a context manager that ends them.

    `ahead` bounds the bytes that run ahead of the loader: no bound where it keeps tensors as they are, few where it makes others of them.
    `moved` is told the size of each chunk that went over.
    """

    def __init__(
        self,
        layout: Layout,
        files: Sequence[str],
        device: torch.device,
        *,
        readers: int = READERS,
        access: Access = "buffered",
        ahead: int = UNBOUNDED,
        ready: Ready | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self._layout, self._files, self._device, self._access = layout, files, device, access
        self._ahead, self._ready, self._moved = ahead, ready, moved
        self._cuda = device.type == "cuda"
        self._condition = threading.Condition()
        self._next = self._wanted = self._taken = 0
        self._blocks: list[torch.Tensor | None] = [None] * len(layout.arenas)
        self._events: list[list[Any]] = [[] for _ in layout.arenas]
        self._unawaited: list[list[Any]] = [[] for _ in layout.arenas]
        """Events that the loader's stream has not been made to wait for yet: each once, not once a tensor of its allocation."""
        self._unread = [a.nbytes for a in layout.arenas]
        self._untaken = [len(a.members) for a in layout.arenas]
        self._missing = [t.nbytes for t in layout.tensors]
        self._gone = [False] * len(layout.tensors)
        self._last_chunk = _last_chunks(layout)
        self._size = max((c.nbytes for c in layout.chunks), default=0)
        self._error: BaseException | None = None
        self._closed = False
        self._started = 0.0
        self.seconds = 0.0
        """From the start of the threads to the last chunk that went over."""
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(max(1, readers))]

    def __enter__(self) -> Self:
        if self._cuda:
            _reserve(self._layout, self._device)
        self._started = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; what nobody took is freed."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._blocks, self._events = [], []

    def join(self) -> None:
        """Wait until every byte has arrived. Raises what reading raised."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def take(self, index: int) -> torch.Tensor:
        """The tensor `layout.tensors[index]`, its bytes as in the file; waits for it, hands the stream's reference over, works once.

        Raises what reading raised.
        """
        tensor = self._layout.tensors[index]
        arena, offset = self._layout.home[index]
        with self._condition:
            self._wanted = max(self._wanted, self._last_chunk[index])
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._missing[index] or self._error is not None or self._closed)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise CkauditError(f"The tensor {tensor.name!r} was asked for after the stream had ended.")
            if self._gone[index]:
                raise CkauditError(f"The tensor {tensor.name!r} was asked for twice.")
            self._gone[index] = True
            block = self._block(arena)
            events, self._unawaited[arena] = self._unawaited[arena], []
            self._taken += tensor.nbytes
            self._untaken[arena] -= 1
            if not self._untaken[arena]:
                self._blocks[arena], self._events[arena] = None, []
            self._condition.notify_all()
        if events:
            current = torch.cuda.current_stream(self._device)
            for event in events:
                current.wait_event(event)
        data = block if block.numel() == tensor.nbytes else block[offset : offset + tensor.nbytes]
        return data.view(torch_dtype(tensor.dtype)).view(torch_shape(tensor.dtype, tensor.shape))

    def _work(self) -> None:
        """One reader thread."""
        try:
            with Reader(self._files, self._device, self._size, self._access) as reader:
                while (chunk := self._claim()) is not None:
                    self._move(chunk, reader)
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits for a tensor)
            with self._condition:
                self._error = self._error or error
                self._condition.notify_all()

    def _claim(self) -> Chunk | None:
        """The next chunk, once the loader is near enough to it; None when there is none."""
        with self._condition:
            self._condition.wait_for(lambda: self._over() or self._near())
            if self._over():
                return None
            self._next += 1
            return self._layout.chunks[self._next - 1]

    def _over(self) -> bool:
        return self._closed or self._error is not None or self._next >= len(self._layout.chunks)

    def _near(self) -> bool:
        # Whoever waits for a tensor is served, however far it is: a loader may ask in another order than it announced.
        return self._next <= self._wanted or self._layout.chunks[self._next].before < self._taken + self._ahead

    def _move(self, chunk: Chunk, reader: Reader) -> None:
        targets, allocated = self._targets(chunk)
        sources = reader.read(chunk, self._layout)
        with reader.copying(allocated) as event:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        finished: list[tuple[int, torch.Tensor, Sequence[Any]]] = []
        with self._condition:
            for piece in chunk.pieces:
                arena = self._layout.home[piece.tensor][0]
                self._missing[piece.tensor] -= piece.nbytes
                self._unread[arena] -= piece.nbytes
                if event is not None and (not self._events[arena] or self._events[arena][-1] is not event):
                    self._events[arena].append(event)
                    self._unawaited[arena].append(event)
                if not self._unread[arena] and self._ready is not None:
                    finished.append((arena, self._block(arena), tuple(self._events[arena])))
            self.seconds = time.perf_counter() - self._started
            self._condition.notify_all()
        if self._moved is not None:
            self._moved(chunk.nbytes)
        if self._ready is not None:
            for arena, block, events in finished:
                self._ready(arena, block, events)

    def _targets(self, chunk: Chunk) -> tuple[list[torch.Tensor], Any]:
        """Room for each piece, and an event that a copy must wait for: the memory may still be read by work of the default stream."""
        with self._condition:
            targets = []
            for piece in chunk.pieces:
                arena, offset = self._layout.home[piece.tensor]
                start = offset + piece.at
                targets.append(self._block(arena)[start : start + piece.nbytes])
            if not self._cuda:
                return targets, None
            event = torch.cuda.Event()
            event.record(torch.cuda.default_stream(self._device))
            return targets, event

    def _block(self, arena: int) -> torch.Tensor:
        block = self._blocks[arena]
        if block is None:
            block = torch.empty(self._layout.arenas[arena].nbytes, dtype=torch.uint8, device=self._device)
            self._blocks[arena] = block
        return block


def _last_chunks(layout: Layout) -> list[int]:
    """Of each tensor the number of the chunk that completes it."""
    last = [0] * len(layout.tensors)
    for number, chunk in enumerate(layout.chunks):
        for piece in chunk.pieces:
            last[piece.tensor] = number
    return last


def _reserve(layout: Layout, device: torch.device) -> None:
    """Get the memory for all large allocations in one call, and give it to torch's allocator to split: many calls are slow."""
    wanted = sum(-(-a.nbytes // 512) * 512 for a in layout.arenas if a.nbytes > _LARGE)
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if idle < wanted < free - _RESERVE_MARGIN:
        torch.empty(wanted, dtype=torch.uint8, device=device)

"""Tensor data from files to a device: reader threads fill pinned buffers that stream to the device while the next ones fill.

Every tensor arrives once, in an allocation of its own or beside those it will be joined with (see `layout`), in the order in which the
loader asks for it; whoever asks early waits. Without CUDA the buffers are plain memory and copies are synchronous.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from traceback import clear_frames
from types import TracebackType
from typing import Any, Self

import torch

from ckaudit.errors import CkauditError
from ckaudit.materialize.dtypes import torch_dtype, torch_shape
from ckaudit.materialize.layout import Chunk, Layout
from ckaudit.materialize.reader import Access, Reader

READERS = 12
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
    `calm` is called before each tensor is handed over, and returns when the loader may have it. `moved` is told the size of each chunk
    that went over.
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
        calm: Callable[[], object] | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self._layout, self._files, self._device, self._access = layout, files, device, access
        self._ahead, self._ready, self._calm, self._moved = ahead, ready, calm, moved
        self._cuda = device.type == "cuda"
        self._condition = threading.Condition()
        self._next = self._wanted = self._taken = 0
        self._blocks: list[torch.Tensor | None] = [None] * len(layout.arenas)
        self._events: list[list[Any]] = [[] for _ in layout.arenas]
        self._unawaited: list[list[Any]] = [[] for _ in layout.arenas]
        """Events that the loader's stream has not been made to wait for yet: each once, not once a tensor of its allocation."""
        self._born: list[Any] = [None] * len(layout.arenas)
        """Events that a copy must wait for: the memory of an allocation may still be read by earlier work of the default stream."""
        self._asked: int | None = None
        """The tensor that `take` waits for."""
        self._unread = [a.nbytes for a in layout.arenas]
        self._untaken = [len(a.members) for a in layout.arenas]
        self._missing = [t.nbytes for t in layout.tensors]
        self._gone = [False] * len(layout.tensors)
        self._last_chunk = _last_chunks(layout)
        self._room = max((w[-1].into + w[-1].nbytes for c in layout.chunks for w in c.windows), default=0)
        self._error: BaseException | None = None
        self._closed = False
        self._started = 0.0
        self.seconds = 0.0
        """From the start of the threads to the last chunk that went over."""
        count = max(1, min(readers, len(layout.chunks)))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]

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
        if self._calm is not None:
            self._calm()
        tensor = self._layout.tensors[index]
        arena, offset = self._layout.home[index]
        with self._condition:
            if self._missing[index]:
                self._asked, self._wanted = index, max(self._wanted, self._last_chunk[index])
                self._condition.notify_all()
                self._condition.wait_for(lambda: not self._missing[index] or self._error is not None or self._closed)
                self._asked = None
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
            if self._ahead < UNBOUNDED:
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
            with Reader(self._files, self._device, self._room, self._access) as reader:
                while (chunk := self._claim()) is not None:
                    self._move(chunk, reader)
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits for a tensor)
            clear_frames(error.__traceback__)  # what its callers had in hand must not live as long as the error
            with self._condition:
                self._error = self._error or error
                self._condition.notify_all()

    def _claim(self) -> Chunk | None:
        """The next chunk, once the loader is near enough to it; None when there is none."""
        with self._condition:
            while not self._over() and not self._near():
                self._condition.wait()
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
        blocks = self._room_for(chunk, reader)
        event = None
        for window in chunk.windows:
            event = reader.move(window, blocks)
        finished = self._arrived(chunk, event)
        if self._moved is not None:
            self._moved(chunk.nbytes)
        if self._ready is not None:
            for arena, behind in finished:
                self._ready(arena, blocks[arena], behind)

    def _room_for(self, chunk: Chunk, reader: Reader) -> dict[int, torch.Tensor]:
        """The allocations that the chunk fills, by number; made where there are none yet."""
        with self._condition:
            blocks = {arena: self._block(arena) for arena in chunk.arenas}
        for arena in blocks:
            event = self._born[arena]
            if event is not None:
                reader.copies.after(event)
        return blocks

    def _arrived(self, chunk: Chunk, event: Any) -> list[tuple[int, Sequence[Any]]]:
        """Note that a chunk's copies are under way, the last behind `event`. Returns the allocations that are full by now."""
        finished: list[tuple[int, Sequence[Any]]] = []
        with self._condition:  # short: whoever loses the interpreter in here holds up every reader
            for tensor, nbytes in chunk.tensors.items():
                self._missing[tensor] -= nbytes
            for arena, nbytes in chunk.arenas.items():
                self._unread[arena] -= nbytes
                if event is not None:
                    for kept in (self._events[arena], self._unawaited[arena]):
                        if event not in kept:
                            kept.append(event)
                if not self._unread[arena]:
                    finished.append((arena, tuple(self._events[arena])))
            self.seconds = time.perf_counter() - self._started
            if self._asked is not None and not self._missing[self._asked]:
                self._condition.notify_all()
        return finished

    def _block(self, arena: int) -> torch.Tensor:
        block = self._blocks[arena]
        if block is None:
            block = torch.empty(self._layout.arenas[arena].nbytes, dtype=torch.uint8, device=self._device)
            self._blocks[arena] = block
            if self._cuda:
                self._born[arena] = event = torch.cuda.Event()
                event.record(torch.cuda.default_stream(self._device))
        return block


def _last_chunks(layout: Layout) -> list[int]:
    """Of each tensor the number of the chunk that completes it."""
    last = [0] * len(layout.tensors)
    for number, chunk in enumerate(layout.chunks):
        for tensor in chunk.tensors:
            last[tensor] = number
    return last


def _reserve(layout: Layout, device: torch.device) -> None:
    """Get the memory for all large allocations in one call, and give it to torch's allocator to split: many calls are slow."""
    wanted = sum(-(-a.nbytes // 512) * 512 for a in layout.arenas if a.nbytes > _LARGE)
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if idle < wanted < free - _RESERVE_MARGIN:
        torch.empty(wanted, dtype=torch.uint8, device=device)

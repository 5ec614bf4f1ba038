"""The health of every tensor while it is on the device: one row of reductions per allocation, no wait until all are read.

Tensors of one kind that lie side by side (the experts of a layer) are reduced together. The few whose rows cannot settle the matter (NaN or
Inf to count, a mean that drowns the deviation) are read once more from their file, exactly.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ckaudit.checks.observed import TensorStats
from ckaudit.header import TORCH_DTYPES
from ckaudit.materialize.dtypes import torch_dtype
from ckaudit.materialize.layout import Arena, Layout, Stored
from ckaudit.materialize.moments import Part, exact, merged, parts_of, unsettled
from ckaudit.materialize.reductions import SMALL, Rows, blocks

_PAUSE = 0.005
"""Seconds between two looks at what has arrived: each takes the interpreter from the readers."""
_LOOKS = 8
"""Waiting allocations that are looked at each time, until some are found that nobody holds."""
_TOGETHER = 256
"""Tensors of one dtype and size that are reduced at once, at most."""
_APART = 8 << 20
"""Bytes of a tensor whose reductions on a GPU take longer than their launches."""
_BATCH = 32 << 20
"""Bytes that are copied side by side to be reduced at once, at most; twice as many wait for others of their kind."""

_Told = tuple[int, torch.Tensor, Sequence[Any]]
"""A finished allocation: its number, its bytes (flat uint8), and the CUDA events behind which they are there."""


class Scan:
    """Takes finished allocations in any thread (`ready`), and tells about every tensor at the end (`finish`). A context manager.

    On a GPU a thread and a stream of its own reduce them, when everything has arrived: before that each call would take the interpreter
    from the readers. Memory that nobody else holds any more (the loader made something else of it, another dtype say) is reduced and let
    go on the way, and the loader waits meanwhile (`calm`): else it would fill the device faster than it is emptied.
    Tensors too small to be worth launches of their own wait for others of their kind.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._rows: list[Rows] = []
        self._kinds: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
        """By dtype and bytes: the tensors that wait to be reduced together, by number."""
        self._waiting = 0
        """Their bytes."""
        self._apart = SMALL if device.type == "cpu" else _APART
        self._told: deque[_Told] = deque()
        self._over = threading.Event()
        self._calm = threading.Event()
        self._calm.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True) if device.type == "cuda" else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()

    def ready(self, arena: int, block: torch.Tensor, events: Sequence[Any]) -> None:
        """Reduce one allocation (flat uint8) behind `events`; on a GPU it returns at once."""
        if self._thread is not None:
            self._told.append((arena, block.detach(), events))  # a tensor of our own: other holders can be counted
        else:
            self._reduce(self._layout.arenas[arena], block)

    def calm(self) -> None:
        """Return once no memory waits to be let go. For the loader, before it makes more."""
        self._calm.wait()

    def finish(self, reread: Callable[[Stored], torch.Tensor]) -> tuple[TensorStats, ...]:
        """After the context: what was found, in the order of the layout. Raises what reducing raised.

        `reread` gives a tensor's bytes (flat uint8, on the CPU) once more.
        """
        if self._error is not None:
            raise self._error
        self._flush_all()
        parts: dict[int, list[Part]] = {}
        for rows, part in parts_of(self._rows):
            for member, moments in zip(rows.members, part, strict=True):
                parts.setdefault(member, []).append(moments)
        stats = []
        for index, tensor in enumerate(self._layout.tensors):
            found = merged(tensor, parts.get(index, []))
            stats.append(exact(tensor, reread(tensor)) if unsettled(found) else found)
        return tuple(stats)

    def _work(self) -> None:
        """The thread."""
        waiting: deque[_Told] = deque()
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                while not self._over.wait(_PAUSE):
                    _drain(self._told, waiting)
                    if gone := _let_go_of(waiting):
                        self._calm.clear()
                        self._reduce_all(gone, stream)
                        self._calm.set()
                for arena, block, _ in (
                    *waiting,
                    *self._told,
                ):  # all is there, and nothing is freed until this thread ends
                    self._reduce(self._layout.arenas[arena], block)
                self._flush_all()
            stream.synchronize()
        except BaseException as error:  # noqa: BLE001  (raised again by `finish`)
            self._error = error
        finally:
            self._calm.set()

    def _reduce_all(self, told: deque[_Told], stream: Any) -> None:
        """Reduce these allocations on a CUDA stream, and let each go."""
        while told:
            arena, block, events = told.popleft()
            for event in events:
                stream.wait_event(event)
            self._reduce(self._layout.arenas[arena], block)
            block.record_stream(stream)
        self._flush_all()

    def _reduce(self, arena: Arena, block: torch.Tensor) -> None:
        if len(arena.members) == 1:
            self._reduce_one(arena.members[0][0], block)
            return
        for members in _alike(arena, self._layout.tensors):
            first = self._layout.tensors[members[0][0]]
            start = members[0][1]
            flat = block[start : start + first.nbytes * len(members)].view(len(members), first.nbytes)
            if len(members) > 1:
                self._rows += blocks(tuple(m for m, _ in members), first.dtype, flat)
            else:
                self._reduce_one(members[0][0], flat[0])

    def _reduce_one(self, number: int, flat: torch.Tensor) -> None:
        tensor = self._layout.tensors[number]
        if tensor.nbytes > self._apart:
            self._rows += blocks((number,), tensor.dtype, flat.view(1, -1))
        elif tensor.nbytes:
            self._wait(number, tensor, flat)

    def _wait(self, number: int, tensor: Stored, flat: torch.Tensor) -> None:
        """Reduce a tensor together with others of its kind, once there are enough."""
        kind = tensor.dtype, tensor.nbytes
        waiting = self._kinds.setdefault(kind, [])
        waiting.append((number, flat))
        self._waiting += tensor.nbytes
        if len(waiting) >= _TOGETHER or len(waiting) * tensor.nbytes >= _BATCH:
            self._flush(*kind)
        elif self._waiting > 2 * _BATCH:
            self._flush_all()

    def _flush_all(self) -> None:
        for kind in list(self._kinds):
            self._flush(*kind)

    def _flush(self, dtype: str, nbytes: int) -> None:
        """Reduce the waiting tensors of one kind, as rows of one matrix."""
        waiting = self._kinds.pop((dtype, nbytes))
        self._waiting -= nbytes * len(waiting)
        self._rows += blocks(tuple(m for m, _ in waiting), dtype, torch.stack([flat for _, flat in waiting]))


def _drain(source: deque[_Told], into: deque[_Told]) -> None:
    while source:
        into.append(source.popleft())


def _let_go_of(waiting: deque[_Told]) -> deque[_Told]:
    """Take those out whose memory nobody else holds any more: of the next few, and where there are any, of all."""
    gone: deque[_Told] = deque()
    looks = min(_LOOKS, len(waiting))
    while looks:
        oldest = waiting.popleft()
        looks -= 1
        if not _let_go(oldest[1]):
            waiting.append(oldest)
            continue
        if not gone:
            looks = len(waiting)
        gone.append(oldest)
    return gone


def _let_go(block: torch.Tensor) -> bool:
    """Whether nobody but the caller holds the memory of `block`; True where this torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = block.untyped_storage()
    return count is None or count(storage._cdata) <= 2  # `block` and `storage`


def _alike(arena: Arena, tensors: Sequence[Stored]) -> Iterator[list[tuple[int, int]]]:
    """Runs of members of one dtype and size that follow each other without a gap: rows of one matrix."""
    run: list[tuple[int, int]] = []
    for member in arena.members:
        tensor = tensors[member[0]]
        if not tensor.nbytes:
            continue
        if run:
            last, offset = run[-1]
            previous = tensors[last]
            if (previous.dtype, previous.nbytes) != (tensor.dtype, tensor.nbytes) or offset + previous.nbytes != member[
                1
            ]:
                yield run
                run = []
        run.append(member)
    if run:
        yield run


def of_parameters(model: Any) -> tuple[TensorStats, ...]:
    """The same for what a model holds, where its loader read for itself: names are the model's, and shards are this process's part."""
    held: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        local = _local(parameter)
        if not local.is_meta and local.nbytes:
            held[local.device][name] = local.contiguous()
    return tuple(found for device, tensors in held.items() for found in _of_device(device, tensors))


def _of_device(device: torch.device, held: dict[str, torch.Tensor]) -> tuple[TensorStats, ...]:
    names = {dtype: name for name in TORCH_DTYPES if (dtype := torch_dtype(name)) is not torch.uint8 or name == "U8"}
    stored = tuple(Stored(name, 0, names[t.dtype], tuple(t.shape), 0, t.nbytes) for name, t in held.items())
    arenas = tuple(Arena(tensor.nbytes, ((index, 0),)) for index, tensor in enumerate(stored))
    scan = Scan(Layout(stored, arenas, (), tuple((index, 0) for index in range(len(stored)))), device)
    with scan:
        for index, tensor in enumerate(held.values()):
            scan.ready(index, tensor.flatten().view(torch.uint8), ())
    return scan.finish(lambda tensor: held[tensor.name].flatten().view(torch.uint8).cpu())


def held_bytes(model: Any) -> int:
    """Bytes of memory behind the parameters of `model` in this process, shared memory once."""
    storages = {}
    for parameter in model.parameters():
        local = _local(parameter)
        if not local.is_meta:
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def _local(parameter: Any) -> torch.Tensor:
    """A parameter's tensor, of a distributed one this process's part."""
    return parameter.data.to_local() if hasattr(parameter.data, "to_local") else parameter.data

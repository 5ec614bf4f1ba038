"""The health of every tensor while it is on the device: one row of reductions per allocation, no wait until all are read.

Tensors of one kind that lie side by side (the experts of a layer) are reduced together. The few whose rows cannot settle the matter (NaN or
Inf to count, a mean that drowns the deviation) are read once more from their file, exactly.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ckaudit.checks.observed import TensorStats
from ckaudit.materialize.dtypes import DTYPE_NAMES, torch_dtype
from ckaudit.materialize.layout import Arena, Layout, Stored
from ckaudit.materialize.reductions import CPU_BLOCK, SMALL, Rows, blocks, decoded, digest_of

_TOGETHER = 256
"""Small tensors of one dtype and size that are reduced at once."""
_LOOKS = 8
"""Waiting allocations that are looked at each time another arrives."""
_DROWNED = 1e4
"""mean² / variance from which float32 sums of squares say little about the deviation."""


_Told = tuple[int, torch.Tensor, Sequence[Any]]
"""A finished allocation: its number, its bytes (flat uint8), and the CUDA events behind which they are there."""


class Scan:
    """Takes finished allocations in any thread (`ready`), and tells about every tensor at the end (`finish`). A context manager.

    On a GPU a thread and a stream of its own reduce them, when everything has arrived: before that each call would take the interpreter
    from the readers. Memory that nobody else holds any more (the loader made something else of it) is reduced and let go on the way.
    Tensors too small to be worth a launch wait for others of their kind.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._rows: list[Rows] = []
        self._small: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
        self._queue: SimpleQueue[_Told | None] = SimpleQueue()
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
            self._queue.put(None)
            self._thread.join()

    def ready(self, arena: int, block: torch.Tensor, events: Sequence[Any]) -> None:
        """Reduce one allocation (flat uint8) behind `events`; on a GPU it returns at once."""
        if self._thread is not None:
            self._queue.put((arena, block.detach(), events))  # a tensor of our own: other holders can be counted
        else:
            self._reduce(self._layout.arenas[arena], block)

    def finish(self, reread: Callable[[Stored], torch.Tensor]) -> tuple[TensorStats, ...]:
        """After the context: what was found, in the order of the layout. Raises what reducing raised.

        `reread` gives a tensor's bytes (flat uint8, on the CPU) once more.
        """
        if self._error is not None:
            raise self._error
        self._flush_all()
        parts: dict[int, list[_Part]] = {}
        for rows, part in _parts(self._rows):
            for member, moments in zip(rows.members, part, strict=True):
                parts.setdefault(member, []).append(moments)
        stats = []
        for index, tensor in enumerate(self._layout.tensors):
            found = _merge(tensor, parts.get(index, []))
            stats.append(exact(tensor, reread(tensor)) if _unsettled(found) else found)
        return tuple(stats)

    def _work(self) -> None:
        """The thread."""
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                for arena, block, events in _in_good_time(iter(self._queue.get, None)):
                    for event in events:
                        stream.wait_event(event)
                    self._reduce(self._layout.arenas[arena], block)
                    block.record_stream(stream)
                self._flush_all()
            stream.synchronize()
        except BaseException as error:  # noqa: BLE001  (raised again by `finish`)
            self._error = error

    def _reduce(self, arena: Arena, block: torch.Tensor) -> None:
        for members in _alike(arena, self._layout.tensors):
            first = self._layout.tensors[members[0][0]]
            start = members[0][1]
            flat = block[start : start + first.nbytes * len(members)].view(len(members), first.nbytes)
            if len(members) > 1 or first.nbytes > SMALL:
                self._rows += blocks(tuple(m for m, _ in members), first.dtype, flat)
                continue
            waiting = self._small.setdefault((first.dtype, first.nbytes), [])
            waiting.append((members[0][0], flat[0]))
            if len(waiting) >= _TOGETHER:
                self._flush(first.dtype, first.nbytes)

    def _flush_all(self) -> None:
        for kind in list(self._small):
            self._flush(*kind)

    def _flush(self, dtype: str, nbytes: int) -> None:
        """Reduce the small tensors of one kind, as rows of one matrix."""
        waiting = self._small.pop((dtype, nbytes))
        self._rows += blocks(tuple(m for m, _ in waiting), dtype, torch.stack([flat for _, flat in waiting]))


def _in_good_time(told: Iterable[_Told]) -> Iterator[_Told]:
    """The same allocations: those that nobody else holds as soon as that is seen, all others at the end."""
    waiting: deque[_Told] = deque()
    for one in told:
        waiting.append(one)
        for _ in range(min(_LOOKS, len(waiting))):
            oldest = waiting.popleft()
            if _let_go(oldest[1]):
                yield oldest
            else:
                waiting.append(oldest)
    yield from waiting


def _let_go(block: torch.Tensor) -> bool:
    """Whether nobody but the caller holds the memory of `block`; True where this torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = block.untyped_storage()
    return count is None or count(storage._cdata) <= 2  # `block` and `storage`


def exact(tensor: Stored, data: torch.Tensor) -> TensorStats:
    """Statistics of one tensor from its bytes (flat uint8, on the CPU), in float64 over its finite elements, with NaN and Inf counted."""
    nan = inf = nonzero = count = 0
    low, high, mean, m2, quad = math.inf, -math.inf, 0.0, 0.0, 0.0
    seen = 0
    for block in decoded(tensor.dtype, data.view(1, -1), CPU_BLOCK):
        values = block.double().flatten()
        count += values.numel()
        finite = values[torch.isfinite(values)]
        nan += int(torch.isnan(values).sum())
        inf += int(torch.isinf(values).sum())
        nonzero += int(torch.count_nonzero(values))
        if not finite.numel():
            continue
        low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        quad += float((finite**4).sum())
        n, average, spread = finite.numel(), float(finite.mean()), float(finite.var(correction=0)) * finite.numel()
        m2 += spread + (average - mean) ** 2 * seen * n / (seen + n)
        mean += (average - mean) * n / (seen + n)
        seen += n
    std = math.sqrt(m2 / seen) if seen else 0.0
    return TensorStats(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        count=count,
        nan=nan,
        inf=inf,
        zeros=count - nonzero,
        low=low if seen else 0.0,
        high=high if seen else 0.0,
        mean=mean,
        std=std,
        kurtosis=_kurtosis(quad / seen if seen else 0.0, mean, std),
        digest=digest_of(data.view(1, -1)).tolist()[0],
    )


class _Part(NamedTuple):
    """The moments of one block of a tensor."""

    elements: int
    low: float
    high: float
    mean: float
    variance: float
    quad: float
    """The sum of 4th powers."""
    nonzero: float
    digest: int


def _parts(every: Sequence[Rows]) -> Iterator[tuple[Rows, list[_Part]]]:
    """The blocks' reductions as numbers. One copy from the device for all: a wait for each would take longer than its reductions."""
    if not every:
        return
    columns = [[getattr(rows, name) for rows in every] for name in Rows._fields[3:-1]]
    table = torch.stack([torch.cat(column).double() for column in columns], dim=1).tolist()
    cells = zip(table, torch.cat([rows.digest for rows in every]).tolist(), strict=True)
    for rows in every:
        parts = []
        for (low, high, total, square, fourth, nonzero), digest in islice(cells, len(rows.members)):
            mean, variance = total, square
            if not rows.centred:
                mean = total / rows.elements
                variance = max(square * square / rows.elements - mean * mean, 0.0)
            quad = fourth * fourth * fourth * fourth
            parts.append(_Part(rows.elements, low, high, mean, variance, quad, nonzero, digest))
        yield rows, parts


def _merge(tensor: Stored, parts: Sequence[_Part]) -> TensorStats:
    """The blocks of one tensor as one."""
    if len(parts) == 1:
        count, low, high, mean, variance, quad, nonzero, digest = parts[0]
    else:
        count = sum(p.elements for p in parts)
        lows, highs = [p.low for p in parts], [p.high for p in parts]
        bad = any(map(math.isnan, lows))  # whatever min() makes of NaN depends on where it stands
        low, high = (math.nan, math.nan) if bad else (min(lows, default=0.0), max(highs, default=0.0))
        mean = sum(p.elements * p.mean for p in parts) / count if count else 0.0
        variance = sum(p.elements * (p.variance + (p.mean - mean) ** 2) for p in parts) / count if count else 0.0
        quad, nonzero = sum(p.quad for p in parts), sum(p.nonzero for p in parts)
        digest = _signed(sum(p.digest for p in parts))
    std = math.sqrt(variance) if variance >= 0 else math.nan
    return TensorStats(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        count=count,
        zeros=count - round(nonzero) if nonzero == nonzero else 0,
        low=low,
        high=high,
        mean=mean,
        std=std,
        kurtosis=_kurtosis(quad / count if count else 0.0, mean, std),
        digest=digest,
    )


def _unsettled(found: TensorStats) -> bool:
    """Whether sums on the device are not enough: something is not finite, or the mean drowns the deviation."""
    if not (math.isfinite(found.low) and math.isfinite(found.high) and math.isfinite(found.std)):
        return True
    return found.low != found.high and found.count > SMALL and found.mean**2 > _DROWNED * found.std**2


def _kurtosis(quad: float, mean: float, std: float) -> float | None:
    """The 4th standardised moment: 3 for a normal distribution, 1.8 for a uniform one; None where the mean is not small beside it."""
    if not std or not math.isfinite(quad) or abs(mean) > 0.05 * std or std**4 == 0:
        return None
    return quad / std**4


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


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def of_parameters(model: Any) -> tuple[TensorStats, ...]:
    """The same for what a model holds, where its loader read for itself: names are the model's, and shards are this process's part."""
    held = {}
    for name, parameter in model.named_parameters():
        local = _local(parameter)
        if not local.is_meta:
            held[name] = local.contiguous()
    names = {dtype: name for name in DTYPE_NAMES if (dtype := torch_dtype(name)) is not torch.uint8 or name == "U8"}
    stored = [
        Stored(name, 0, names[value.dtype], tuple(value.shape), 0, value.nbytes)
        for name, value in held.items()
        if value.nbytes
    ]
    stats: list[TensorStats] = []
    for tensor in stored:
        flat = held[tensor.name].flatten().view(torch.uint8)
        layout = Layout((tensor,), (Arena(tensor.nbytes, ((0, 0),)),), (), ((0, 0),))
        with Scan(layout, flat.device) as scan:
            scan.ready(0, flat, ())
        stats += scan.finish(lambda t: held[t.name].flatten().view(torch.uint8).cpu())
    return tuple(stats)


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

"""The health of every tensor while it is on the device: one row of reductions per allocation, no wait until all are read.

Tensors of one kind that lie side by side (the experts of a layer) are reduced together. The few whose rows cannot settle the matter (NaN or
Inf to count, a mean that drowns the deviation) are read once more from their file, exactly.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ckaudit.checks.observed import TensorStats
from ckaudit.materialize.dtypes import DTYPE_NAMES, torch_dtype
from ckaudit.materialize.layout import Arena, Layout, Stored

_NATIVE = frozenset({"F64", "F32", "F16", "BF16"})
"""Reduced as they are; everything else is decoded block by block."""
_WIDE = frozenset(
    {"F64", "F8_E8M0", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F6_E2M3", "F6_E3M2"}
)
"""Decoded to float64: a power of two up to 2^127, or an integer, must not lose what is looked for."""
_BLOCK = 1 << 26
"""Elements of a tensor reduced at once: few enough for float32 sums."""
_DECODED_BLOCK = 1 << 23
"""Elements decoded at once: the copy costs no memory to speak of."""
_CPU_BLOCK = 1 << 20
"""On a CPU: a block that stays in the cache while it is reduced six times."""
_SMALL = 1 << 16
_TOGETHER = 256
"""Small tensors of one dtype and size that are reduced at once."""
# E2M1 by nibble. Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXACT = 1 << 24
"""Elements that float32 can count one by one."""
_DROWNED = 1e4
"""mean² / variance from which float32 sums of squares say little about the deviation."""


class _Rows(NamedTuple):
    """Reductions of one block, on the device: tensors `members`, `count` elements of each, and an element per tensor in everything else."""

    members: tuple[int, ...]
    elements: int
    centred: bool
    """Whether mean and variance stand in place of sum and 2-norm."""
    low: Any
    high: Any
    total: Any
    square: Any
    """The 2-norm."""
    fourth: Any
    """The 4-norm."""
    nonzero: Any
    digest: Any
    """int64: the sum of the bytes as 64-bit words, which no order of adding changes."""


class Scan:
    """Takes finished allocations in any thread (`ready`), and tells about every tensor at the end (`finish`). A context manager.

    On a GPU a thread and a stream of its own reduce them: readers go on reading. Tensors too small to be worth a launch wait for others of
    their kind.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._rows: list[_Rows] = []
        self._small: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
        self._queue: SimpleQueue[tuple[int, torch.Tensor, Sequence[Any]] | None] = SimpleQueue()
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
            self._queue.put((arena, block, events))
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
                while (told := self._queue.get()) is not None:
                    arena, block, events = told
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
            if len(members) > 1 or first.nbytes > _SMALL:
                self._rows += _blocks(tuple(m for m, _ in members), first.dtype, flat)
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
        self._rows += _blocks(tuple(m for m, _ in waiting), dtype, torch.stack([flat for _, flat in waiting]))


def exact(tensor: Stored, data: torch.Tensor) -> TensorStats:
    """Statistics of one tensor from its bytes (flat uint8, on the CPU), in float64 over its finite elements, with NaN and Inf counted."""
    nan = inf = nonzero = count = 0
    low, high, mean, m2, quad = math.inf, -math.inf, 0.0, 0.0, 0.0
    seen = 0
    for block in _decoded(tensor.dtype, data.view(1, -1), _CPU_BLOCK):
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
        digest=_digest(data.view(1, -1)).tolist()[0],
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


def _parts(every: Sequence[_Rows]) -> Iterator[tuple[_Rows, list[_Part]]]:
    """The blocks' reductions as numbers. One copy from the device for all: a wait for each would take longer than its reductions."""
    if not every:
        return
    columns = [[getattr(rows, name) for rows in every] for name in _Rows._fields[3:-1]]
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
    return found.low != found.high and found.count > _SMALL and found.mean**2 > _DROWNED * found.std**2


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


def _blocks(members: tuple[int, ...], dtype: str, flat: torch.Tensor) -> Iterator[_Rows]:
    """The reductions of the rows of `flat` (tensors, bytes), block by block."""
    if flat.device.type != "cpu" and dtype in _NATIVE:
        size = _BLOCK  # of each row: nothing is copied
    else:
        size = max(1, (_CPU_BLOCK if flat.device.type == "cpu" else _DECODED_BLOCK) // flat.shape[0])
    digest: Any = _digest(flat)
    for values in _decoded(dtype, flat, size):
        yield _reductions(members, values, digest)
        digest = torch.zeros_like(digest)  # counted with the first block alone


def _reductions(members: tuple[int, ...], x: torch.Tensor, digest: Any) -> _Rows:
    """Of each row of `x`, without a copy of it and in as few calls as torch allows: with readers at work each waits for the interpreter."""
    n = x.shape[1]
    centred = n <= _SMALL
    if x.device.type == "cpu" or centred:
        x = x if x.dtype == torch.float64 else x.float()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    low, high = torch.aminmax(x, dim=1)
    if centred:
        square, total = torch.var_mean(x, dim=1, correction=0)
    else:
        total = torch.sum(x, dim=1, dtype=wide)
        square = torch.linalg.vector_norm(x, 2, dim=1, dtype=wide)
    fourth = torch.linalg.vector_norm(x, 4, dim=1, dtype=wide)
    return _Rows(members, n, centred, low, high, total, square, fourth, _nonzero(x, wide), digest)


def _nonzero(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """How many elements of each row are not zero, exactly."""
    n = x.shape[1]
    cuts = -(-n // _EXACT)
    if cuts == 1:
        return torch.linalg.vector_norm(x, 0, dim=1, dtype=wide)
    if n % cuts == 0:
        return torch.linalg.vector_norm(x.unflatten(1, (cuts, -1)), 0, dim=2, dtype=wide).double().sum(dim=1)
    return torch.stack([_nonzero(part, wide) for part in x.split(_EXACT, dim=1)]).double().sum(dim=0)


def _decoded(dtype: str, flat: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The rows of `flat` as numbers, `size` elements of each row at a time: views of native floats, else decoded copies."""
    if dtype == "F4":
        table = torch.tensor(_E2M1, device=flat.device)
        for part in flat.split(max(1, size // 2), dim=1):
            yield torch.stack([table[(part & 15).long()], table[(part >> 4).long()]], dim=2).flatten(1)
        return
    values = flat.view(torch_dtype(dtype))
    if dtype == "C64":
        values = torch.view_as_real(values).flatten(1)
    for part in values.split(size, dim=1):
        yield (
            part if dtype in _NATIVE or dtype == "C64" else part.to(torch.float64 if dtype in _WIDE else torch.float32)
        )


def _digest(flat: torch.Tensor) -> Any:
    """The bytes of each row as 64-bit words, added up modulo 2^64; bytes beyond the last whole word are left to an exact comparison."""
    words = flat.shape[1] // 8
    if not words:
        return torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    if flat.shape[0] == 1:  # on its own: a row's stride, which a view must divide, may be odd
        return flat[0, : words * 8].view(torch.int64).sum(dim=0, keepdim=True)
    if flat.shape[1] % 8:
        flat = flat[:, : words * 8].contiguous()
    return flat.view(torch.int64).sum(dim=1)


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

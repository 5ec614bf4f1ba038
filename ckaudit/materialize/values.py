"""The health of every tensor while it is on the device: one row of reductions per allocation, no wait until all are read.

Tensors of one kind that lie side by side (the experts of a layer) are reduced together. The few whose rows cannot settle the matter (NaN or
Inf to count, a mean that drowns the deviation) are read once more from their file, exactly.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
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
_DECODED_BLOCK = 1 << 23
"""Elements reduced at once: few enough for float32 sums, and for a decoded copy that costs no memory to speak of."""
_CPU_BLOCK = 1 << 20
"""On a CPU: a block that stays in the cache while it is reduced six times."""
_SMALL = 1 << 16
# E2M1 by nibble. Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_DROWNED = 1e4
"""mean² / variance from which float32 sums of squares say little about the deviation."""


class _Rows(msgspec.Struct, frozen=True):
    """Reductions of one block: tensors `members`, `count` elements of each, and per tensor the values of `columns` (on the device)."""

    members: tuple[int, ...]
    count: int
    floats: Any
    """float32 or float64, (6, len(members)): low, high, mean, variance, 4th power sum, elements that are not zero."""
    digest: Any
    """int64, (len(members),): the sum of the bytes as 64-bit words, which no order of adding changes."""


class Scan:
    """Takes finished allocations in any thread (`ready`), and tells about every tensor at the end (`finish`)."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._lock = threading.Lock()
        self._rows: list[_Rows] = []

    def ready(self, arena: int, block: torch.Tensor, events: Sequence[Any]) -> None:
        """Reduce one allocation (flat uint8) behind `events`; returns before the device has done it."""
        if self._stream is None:
            rows = self._reduce(self._layout.arenas[arena], block)
        else:
            with torch.cuda.stream(self._stream):
                for event in events:
                    self._stream.wait_event(event)
                rows = self._reduce(self._layout.arenas[arena], block)
                block.record_stream(self._stream)
        with self._lock:
            self._rows += rows

    def finish(self, reread: Callable[[Stored], torch.Tensor]) -> tuple[TensorStats, ...]:
        """What was found, in the order of the layout. `reread` gives a tensor's bytes (flat uint8, on the CPU) once more."""
        if self._stream is not None:
            self._stream.synchronize()
        parts: dict[int, list[tuple[int, list[float], int]]] = {}
        if self._rows:  # everything in one copy each: a wait for each allocation would take longer than its reductions
            floats = torch.cat([rows.floats.double() for rows in self._rows], dim=1).t().tolist()
            digests = torch.cat([rows.digest for rows in self._rows]).tolist()
            told = ((member, rows.count) for rows in self._rows for member in rows.members)
            for (member, count), moments, digest in zip(told, floats, digests, strict=True):
                parts.setdefault(member, []).append((count, moments, digest))
        stats = []
        for index, tensor in enumerate(self._layout.tensors):
            found = _merge(tensor, parts.get(index, []))
            stats.append(exact(tensor, reread(tensor)) if _unsettled(found) else found)
        return tuple(stats)

    def _reduce(self, arena: Arena, block: torch.Tensor) -> list[_Rows]:
        rows: list[_Rows] = []
        for members in _alike(arena, self._layout.tensors):
            first = self._layout.tensors[members[0][0]]
            start = members[0][1]
            flat = block[start : start + first.nbytes * len(members)].view(len(members), first.nbytes)
            for count, floats, digest in _blocks(first.dtype, flat):
                rows.append(_Rows(tuple(m for m, _ in members), count, floats, digest))
        return rows


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


def _merge(tensor: Stored, parts: Sequence[tuple[int, list[float], int]]) -> TensorStats:
    """The blocks of one tensor as one."""
    if len(parts) == 1:
        count, (low, high, mean, variance, quad, nonzero), digest = parts[0]
    else:
        count = sum(n for n, _, _ in parts)
        lows, highs = [row[0] for _, row, _ in parts], [row[1] for _, row, _ in parts]
        bad = any(map(math.isnan, lows))  # whatever min() makes of NaN depends on where it stands
        low, high = (math.nan, math.nan) if bad else (min(lows, default=0.0), max(highs, default=0.0))
        mean = sum(n * row[2] for n, row, _ in parts) / count if count else 0.0
        variance = sum(n * (row[3] + (row[2] - mean) ** 2) for n, row, _ in parts) / count if count else 0.0
        quad, nonzero = sum(row[4] for _, row, _ in parts), sum(row[5] for _, row, _ in parts)
        digest = _signed(sum(d for _, _, d in parts))
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


def _blocks(dtype: str, flat: torch.Tensor) -> Iterator[tuple[int, Any, Any]]:
    """(elements per row, float reductions, digest) of the rows of `flat` (tensors, bytes), block by block."""
    size = _CPU_BLOCK if flat.device.type == "cpu" else _BLOCK if dtype in _NATIVE else _DECODED_BLOCK
    digest: Any = _digest(flat)
    for values in _decoded(dtype, flat, max(1, size // flat.shape[0])):
        yield values.shape[1], _moments(values), digest
        digest = torch.zeros_like(digest)  # counted with the first block alone


def _moments(x: torch.Tensor) -> Any:
    """(6, rows): low, high, mean, variance, 4th power sum, elements that are not zero, of each row of `x`, without a copy of it."""
    n = x.shape[1]
    if x.device.type == "cpu" or n <= _SMALL:
        x = x if x.dtype == torch.float64 else x.float()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    low, high = torch.aminmax(x, dim=1)
    if n <= _SMALL:
        variance, mean = torch.var_mean(x, dim=1, correction=0)
    else:
        mean = x.sum(dim=1, dtype=wide) / n
        variance = (torch.linalg.vector_norm(x, 2, dim=1, dtype=wide) ** 2 / n - mean**2).clamp_min_(0)
    quad = torch.linalg.vector_norm(x, 4, dim=1, dtype=wide) ** 4
    nonzero = torch.linalg.vector_norm(x, 0, dim=1, dtype=wide)
    return torch.stack([low.to(wide), high.to(wide), mean.to(wide), variance.to(wide), quad, nonzero])


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
        scan = Scan(layout, flat.device)
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

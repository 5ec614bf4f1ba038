"""From reductions to the statistics of a tensor: the blocks of one are put together, and what sums cannot settle is computed exactly."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from ckaudit.checks.observed import TensorStats
from ckaudit.materialize.layout import Stored
from ckaudit.materialize.reductions import CPU_BLOCK, SMALL, Rows, decoded, digest_of

_DROWNED = 1e4
"""mean² / variance from which float32 sums of squares say little about the deviation."""


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
        m2 += spread + _square(average - mean) * seen * n / (seen + n)
        mean += (average - mean) * n / (seen + n)
        seen += n
    mean, std = _held(mean), _held(math.sqrt(m2 / seen) if seen and m2 == m2 else sys.float_info.max if seen else 0.0)
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
        kurtosis_count=seen,
        digest=digest_of(data.view(1, -1)).tolist()[0],
    )


class Part(NamedTuple):
    """The moments of one block of a tensor."""

    elements: int
    low: float
    high: float
    mean: float
    variance: float
    tail: int
    quad: float
    """The sum of the 4th powers of so many elements."""
    nonzero: float
    digest: int


def parts_of(every: Sequence[Rows]) -> Iterator[tuple[Rows, list[Part]]]:
    """The blocks' reductions as numbers. One copy from the device for all: a wait for each would take longer than its reductions."""
    if not every:
        return
    columns = [[getattr(rows, name) for rows in every] for name in Rows._fields[4:-1]]
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
            parts.append(Part(rows.elements, low, high, mean, variance, rows.tail, quad, nonzero, digest))
        yield rows, parts


def merged(tensor: Stored, parts: Sequence[Part]) -> TensorStats:
    """The blocks of one tensor as one."""
    if len(parts) == 1:
        count, low, high, mean, variance, tail, quad, nonzero, digest = parts[0]
    else:
        count = sum(p.elements for p in parts)
        lows, highs = [p.low for p in parts], [p.high for p in parts]
        bad = any(map(math.isnan, lows))  # whatever min() makes of NaN depends on where it stands
        low, high = (math.nan, math.nan) if bad else (min(lows, default=0.0), max(highs, default=0.0))
        mean = sum(p.elements * p.mean for p in parts) / count if count else 0.0
        variance = sum(p.elements * (p.variance + _square(p.mean - mean)) for p in parts) / count if count else 0.0
        tail, quad, nonzero = sum(p.tail for p in parts), sum(p.quad for p in parts), sum(p.nonzero for p in parts)
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
        kurtosis=_kurtosis(quad / tail if tail else 0.0, mean, std),
        kurtosis_count=tail,
        digest=digest,
    )


def unsettled(found: TensorStats) -> bool:
    """Whether sums on the device are not enough: something is not finite, or the mean drowns the deviation."""
    if not (math.isfinite(found.low) and math.isfinite(found.high) and math.isfinite(found.std)):
        return True
    return found.low != found.high and found.count > SMALL and _square(found.mean) > _DROWNED * _square(found.std)


def _kurtosis(quad: float, mean: float, std: float) -> float | None:
    """The 4th standardised moment: 3 for a normal distribution, 1.8 for a uniform one; None where the mean is not small beside it."""
    if not std or not math.isfinite(quad) or abs(mean) > 0.05 * std or not 0 < _square(_square(std)) < math.inf:
        return None
    return quad / _square(_square(std))


def _square(value: float) -> float:
    """Inf where `**` would raise."""
    return value * value


def _held(value: float) -> float:
    """The largest number for Inf: what squares of numbers past 1e154 add up to has no better name, and JSON no Inf."""
    return max(-sys.float_info.max, min(value, sys.float_info.max))


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)

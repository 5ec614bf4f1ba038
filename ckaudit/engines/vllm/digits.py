"""Addresses of a strided box as digits of one mixed-radix number.

Views of dense tensors have strides that divide one another (a chain): there a view is a box of digits, and so are its cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckaudit.engines.vllm.strided import MOST_BOXES, Address, Inexpressible, Piece


class Digits(NamedTuple):
    """A box in digit space: a range per level, and every other address as a linear function of the digits."""

    ranges: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, tuple[int, ...]], ...]


def _ranges(low: int, high: int, radices: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The numbers low..high-1 as boxes of digits with these radices (the first is unbounded)."""
    if len(radices) == 1:
        return [[(low, high)]]
    unit = prod(radices[1:])
    (first, head), (last, tail) = divmod(low, unit), divmod(high, unit)
    if first == last:
        return [[(first, first + 1), *rest] for rest in _ranges(head, tail, radices[1:])]
    boxes = []
    if head:
        boxes += [[(first, first + 1), *rest] for rest in _ranges(head, unit, radices[1:])]
        first += 1
    if first < last:
        boxes.append([(first, last), *((0, radix) for radix in radices[1:])])
    if tail:
        boxes += [[(last, last + 1), *rest] for rest in _ranges(0, tail, radices[1:])]
    return boxes


class _Group(NamedTuple):
    """The digits that one dimension of a piece (or, with dim -1, a constant part of its offset) ranges over."""

    dim: int
    levels: range
    size: int
    unit: int
    capacity: int | None


def _groups(sizes: Sequence[int], strides: Sequence[int], chain: Sequence[int]) -> list[_Group]:
    """Which levels of the chain each dimension spans, coarsest first; the last group is a constant when no dimension is that fine."""
    out = []
    start = 0
    for dim, (n, stride) in enumerate(zip(sizes, strides, strict=True)):
        stop = chain.index(stride) + 1
        out.append(_Group(dim, range(start, stop), n, stride, chain[start - 1] // stride if start else None))
        start = stop
    if start < len(chain):
        out.append(_Group(-1, range(start, len(chain)), 1, chain[-1], chain[start - 1] // chain[-1] if start else None))
    return out


def digits(piece: Piece, key: int, base: int, chain: Sequence[int]) -> list[Digits]:
    """The piece as boxes in the digit space of `chain`, its address `key` taken relative to `base`."""
    sizes, at = piece
    groups = _groups(sizes, at[key].strides, chain)
    offset = at[key].offset - base
    others = [a for i, a in enumerate(at) if i != key]
    done: list[tuple[int, list[tuple[int, int]], tuple[tuple[int, tuple[int, ...]], ...]]] = [
        (0, [], tuple((a.offset, ()) for a in others))
    ]
    for group in reversed(groups):
        radices = [1 if level == 0 else chain[level - 1] // chain[level] for level in group.levels]
        grown = []
        for carry, ranges, linear in done:
            start = offset // group.unit + carry
            if group.capacity is not None:
                start = (offset // group.unit) % group.capacity + carry
            for low, high, zero, out in _carried(start, group.size, group.capacity):
                for box in _ranges(low, high, radices):
                    weights = tuple(
                        (const - zero * w, (*(w * (chain[level] // group.unit) for level in group.levels), *rest))
                        for (const, rest), w in (
                            (f, a.strides[group.dim] if group.dim >= 0 else 0)
                            for f, a in zip(linear, others, strict=True)
                        )
                    )
                    grown.append((out, box + ranges, weights))
        done = grown
        if len(done) > MOST_BOXES:
            raise Inexpressible
    return [Digits(tuple(ranges), linear) for _, ranges, linear in done]


def _carried(start: int, size: int, capacity: int | None) -> Iterator[tuple[int, int, int, int]]:
    """The numbers start..start+size-1 below `capacity`, wrapped: (low, high, value of the first element, carry)."""
    if capacity is None or start + size <= capacity:
        yield start, start + size, start, 0
    elif start >= capacity:
        yield start - capacity, start + size - capacity, start - capacity, 1
    else:
        yield start, capacity, start, 0
        yield 0, start + size - capacity, start - capacity, 1


def rebuild(ranges: Sequence[tuple[int, int]], keyed: Address, linear: Iterable[tuple[int, tuple[int, ...]]],
             items: Iterable[int], key: int) -> Piece:  # fmt: skip
    """A box of digits as a piece again, address `key` back in its place."""
    sizes = tuple(high - low for low, high in ranges)
    lows = tuple(low for low, _ in ranges)
    at = [
        Address(const + sum(lo * w for lo, w in zip(lows, weights, strict=True)), weights, item)
        for (const, weights), item in zip(linear, items, strict=True)
    ]
    offset = keyed.offset + sum(lo * s for lo, s in zip(lows, keyed.strides, strict=True))
    at.insert(key, Address(offset, keyed.strides, keyed.item))
    return Piece(sizes, tuple(at))


def chain_of(a: Sequence[int], b: Sequence[int], item: int) -> list[int] | tuple[int, int]:
    """The strides of both, falling, if each divides the one before; else the first pair that does not."""
    out = sorted({*a, *b, item}, reverse=True)
    for up, down in pairwise(out):
        if up % down:
            return up, down
    return out

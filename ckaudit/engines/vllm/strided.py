"""Exact algebra on strided views: which bytes two views share, without listing the bytes. Pure integers, no torch.

A `Piece` is a box of elements (`sizes`) with one affine address per storage that it touches: element `i` lies at
`offset + sum(i[d] * strides[d])` bytes. A copy of a view into a parameter is a piece with two addresses, the place written and
the place read, so cutting a piece by one address cuts the other with it. Views of dense tensors have strides that divide one
another, so addresses can be split into digits of one mixed-radix number: there, a view is a box, and so are its cuts.
What is not such a chain is unrolled along its shorter dimension; what would need too many boxes raises `Inexpressible`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

MOST_BOXES = 20_000
"""Boxes that one cut may need; past that the answer is "unknown" rather than slow."""


class Inexpressible(Exception):  # noqa: N818  (an answer, not an error)
    """The views do not fit the algebra (they overlap themselves, or need too many boxes): the answer is unknown."""


class Address(NamedTuple):
    """Where the elements of a box lie in one storage: `offset` and `strides` in bytes, `item` bytes an element."""

    offset: int
    strides: tuple[int, ...]
    item: int


class Piece(NamedTuple):
    """A box of `sizes` elements and where they lie in each storage concerned."""

    sizes: tuple[int, ...]
    at: tuple[Address, ...]

    @property
    def elements(self) -> int:
        """Elements of the box (an element that is broadcast counts as often as it is used)."""
        return prod(self.sizes)


def tidy(piece: Piece, key: int = 0) -> Piece:
    """The same piece, its dimensions sorted by falling stride of address `key`, those of one element dropped, neighbours merged."""
    sizes, at = piece
    if len(sizes) == 1 and sizes[0] != 1:
        return piece
    order = [d for d in range(len(sizes)) if sizes[d] != 1]
    order.sort(key=lambda d: -at[key].strides[d])
    merged: list[int] = []
    columns: list[list[int]] = []
    for d in order:
        column = [a.strides[d] for a in at]
        if columns and all(up == down * sizes[d] for up, down in zip(columns[-1], column, strict=True)):
            merged[-1] *= sizes[d]
            columns[-1] = column
        else:
            merged.append(sizes[d])
            columns.append(column)
    rows = [tuple(column[a] for column in columns) for a in range(len(at))]
    return Piece(tuple(merged), tuple(Address(a.offset, rows[i], a.item) for i, a in enumerate(at)))


def span(sizes: tuple[int, ...], at: Address) -> tuple[int, int]:
    """First byte, and one past the last byte, of a box in one storage."""
    return at.offset, at.offset + sum((n - 1) * s for n, s in zip(sizes, at.strides, strict=True)) + at.item


def injective(piece: Piece, key: int = 0) -> bool:
    """Whether no byte of storage `key` is touched by two elements (as far as sorted strides can tell)."""
    sizes, at = tidy(piece, key)
    reach = at[key].item
    for n, stride in zip(reversed(sizes), reversed(at[key].strides), strict=True):
        if stride < reach:
            return False
        reach += (n - 1) * stride
    return True


def _split_items(piece: Piece, key: int, item: int) -> Piece:
    """The same piece with every element of storage `key` cut into parts of `item` bytes (a uint8 view of float32, say)."""
    old = piece.at[key].item
    if old == item:
        return piece
    if old % item:
        raise Inexpressible
    at = []
    for i, a in enumerate(piece.at):
        same = i == key or a.item == old
        at.append(Address(a.offset, (*a.strides, item if same else 0), item if same else a.item))
    return Piece((*piece.sizes, old // item), tuple(at))


class _Digits(NamedTuple):
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


def _digits(piece: Piece, key: int, base: int, chain: Sequence[int]) -> list[_Digits]:
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
    return [_Digits(tuple(ranges), linear) for _, ranges, linear in done]


def _carried(start: int, size: int, capacity: int | None) -> Iterator[tuple[int, int, int, int]]:
    """The numbers start..start+size-1 below `capacity`, wrapped: (low, high, value of the first element, carry)."""
    if capacity is None or start + size <= capacity:
        yield start, start + size, start, 0
    elif start >= capacity:
        yield start - capacity, start + size - capacity, start - capacity, 1
    else:
        yield start, capacity, start, 0
        yield 0, start + size - capacity, start - capacity, 1


def _rebuild(ranges: Sequence[tuple[int, int]], keyed: Address, linear: Iterable[tuple[int, tuple[int, ...]]],
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


def _chain(a: Sequence[int], b: Sequence[int], item: int) -> list[int] | tuple[int, int]:
    """The strides of both, falling, if each divides the one before; else the first pair that does not."""
    out = sorted({*a, *b, item}, reverse=True)
    for up, down in pairwise(out):
        if up % down:
            return up, down
    return out


def _unroll(piece: Piece, key: int, stride: int) -> Iterator[Piece]:
    """One piece for each index of the dimension with this stride in address `key`."""
    d = piece.at[key].strides.index(stride)
    sizes = piece.sizes[:d] + piece.sizes[d + 1 :]
    for i in range(piece.sizes[d]):
        yield Piece(
            sizes,
            tuple(Address(x.offset + i * x.strides[d], x.strides[:d] + x.strides[d + 1 :], x.item) for x in piece.at),
        )


def _held(piece: Piece, key: int) -> tuple[Piece, tuple[int, ...]]:
    """The dimensions that move in address `key`, and the indices of those that do not (a broadcast)."""
    still = tuple(d for d, s in enumerate(piece.at[key].strides) if s == 0 and piece.sizes[d] != 1)
    if not still:
        return piece, ()
    keep = [d for d in range(len(piece.sizes)) if d not in still]
    at = tuple(Address(a.offset, tuple(a.strides[d] for d in keep), a.item) for a in piece.at)
    return Piece(tuple(piece.sizes[d] for d in keep), at), still


def _restore(piece: Piece, key: int, original: Piece, still: tuple[int, ...]) -> Piece:
    """Give a cut piece back the broadcast dimensions of `original`."""
    if not still:
        return piece
    sizes = (*piece.sizes, *(original.sizes[d] for d in still))
    at = tuple(
        Address(a.offset, (*a.strides, *(o.strides[d] for d in still)), a.item)
        for a, o in zip(piece.at, original.at, strict=True)
    )
    del key
    return Piece(sizes, at)


class Cut(NamedTuple):
    """What two pieces share of one storage: `both` carries the addresses of the first and then those of the second (without its
    key), `rest` is what is left of the first."""

    both: list[Piece]
    rest: list[Piece]


def cut(a: Piece, key_a: int, b: Piece, key_b: int) -> Cut:
    """Cut `a` by `b` where their addresses `key_a` and `key_b` lie in one storage. `b` must be injective in `key_b`.

    Raises Inexpressible.
    """
    (a_low, a_high), (b_low, b_high) = span(a.sizes, a.at[key_a]), span(b.sizes, b.at[key_b])
    if a_high <= b_low or b_high <= a_low:
        return Cut([], [a])
    item = min(a.at[key_a].item, b.at[key_b].item)
    whole = _split_items(a, key_a, item)
    moving, still = _held(whole, key_a)
    moving, other = tidy(moving, key_a), tidy(_split_items(b, key_b, item), key_b)
    if not (injective(moving, key_a) and injective(other, key_b)):
        raise Inexpressible
    found = _cut(moving, key_a, other, key_b, [MOST_BOXES])
    wider = _carry(whole, b.at, key_b)
    return Cut(
        [tidy(_restore(p, key_a, wider, still), key_a) for p in found.both],
        [tidy(_restore(p, key_a, whole, still), key_a) for p in found.rest] if found.both else [a],
    )


def _carry(a: Piece, at_b: Sequence[Address], key_b: int) -> Piece:
    """`a` with the further addresses of `b`, which stand still along every dimension of `a` that is held."""
    nothing = tuple(0 for _ in a.sizes)
    return Piece(a.sizes, (*a.at, *(Address(0, nothing, x.item) for i, x in enumerate(at_b) if i != key_b)))


def _cut(a: Piece, key_a: int, b: Piece, key_b: int, budget: list[int]) -> Cut:
    chain = _chain(a.at[key_a].strides, b.at[key_b].strides, a.at[key_a].item)
    if isinstance(chain, tuple):
        return _cut_unrolled(a, key_a, b, key_b, chain, budget)
    base = min(a.at[key_a].offset, b.at[key_b].offset)
    if (a.at[key_a].offset - b.at[key_b].offset) % chain[-1]:
        raise Inexpressible
    boxes_a, boxes_b = _digits(a, key_a, base, chain), _digits(b, key_b, base, chain)
    keyed = Address(base, tuple(chain), a.at[key_a].item)
    items_a = [x.item for i, x in enumerate(a.at) if i != key_a]
    items_b = [x.item for i, x in enumerate(b.at) if i != key_b]
    both, rest = [], []
    for box in boxes_a:
        left = [box.ranges]
        for other in boxes_b:
            shared = _overlap(box.ranges, other.ranges)
            if shared is None:
                continue
            both.append(_rebuild(shared, keyed, (*box.others, *other.others), (*items_a, *items_b), key_a))
            left = [part for old in left for part in _minus(old, shared)]
        rest += [_rebuild(ranges, keyed, box.others, items_a, key_a) for ranges in left]
        budget[0] -= 1 + len(left)
        if budget[0] < 0:
            raise Inexpressible
    return Cut(both, rest)


def _cut_unrolled(a: Piece, key_a: int, b: Piece, key_b: int, pair: tuple[int, int], budget: list[int]) -> Cut:
    """Cut when two strides do not divide: the dimension with fewer elements among those two is taken one index at a time."""
    choices = [
        (piece.sizes[piece.at[key].strides.index(stride)], first, stride)
        for piece, key, first in ((a, key_a, True), (b, key_b, False))
        for stride in pair
        if stride in piece.at[key].strides
    ]
    n, first, stride = min(choices)
    budget[0] -= n
    if budget[0] < 0:
        raise Inexpressible
    if first:
        cuts = [_cut(part, key_a, b, key_b, budget) for part in _unroll(a, key_a, stride)]
        return Cut([p for c in cuts for p in c.both], [p for c in cuts for p in c.rest])
    both: list[Piece] = []
    left = [a]
    for part in _unroll(b, key_b, stride):
        remaining: list[Piece] = []
        for piece in left:
            tidied = tidy(piece, key_a)
            found = _cut(tidied, key_a, part, key_b, budget)
            both += found.both
            remaining += found.rest
        left = remaining
    return Cut(both, left)


def _overlap(
    a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...] | None:  # fmt: skip
    out = []
    for (la, ha), (lb, hb) in zip(a, b, strict=True):
        low, high = max(la, lb), min(ha, hb)
        if low >= high:
            return None
        out.append((low, high))
    return tuple(out)


def _minus(
    a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]
) -> Iterator[tuple[tuple[int, int], ...]]:  # fmt: skip
    """Box `a` without box `b`, as disjoint boxes."""
    shared = _overlap(a, b)
    if shared is None:
        yield a
        return
    for level, ((low, high), (cut_low, cut_high)) in enumerate(zip(a, shared, strict=True)):
        if low < cut_low:
            yield (*shared[:level], (low, cut_low), *a[level + 1 :])
        if cut_high < high:
            yield (*shared[:level], (cut_high, high), *a[level + 1 :])


def flat(piece: Piece, key: int) -> Piece:
    """The place of `piece` in storage `key` alone, each byte once: its broadcast dimensions are left out."""
    a = piece.at[key]
    keep = [d for d, s in enumerate(a.strides) if s != 0]
    place = Piece(tuple(piece.sizes[d] for d in keep), (Address(a.offset, tuple(a.strides[d] for d in keep), a.item),))
    return tidy(place)


def union_bytes(places: Iterable[Piece]) -> int:
    """Bytes of one storage that at least one of the (one-address) places touches. Raises Inexpressible."""
    return sum(p.elements * p.at[0].item for p in disjoint(places))


def disjoint(places: Iterable[Piece]) -> list[Piece]:
    """The same bytes, each in one place only. Raises Inexpressible."""
    out: list[Piece] = []
    high = 0  # one past the last byte of `out`, whose pieces are sorted by their first byte
    for place in sorted(set(map(tidy, places)), key=lambda p: p.at[0].offset):
        left = [place]
        if place.at[0].offset < high:
            for old in out:
                left = [part for piece in left for part in cut(piece, 0, old, 0).rest]
                if not left:
                    break
        out += left
        high = max([high, *(span(p.sizes, p.at[0])[1] for p in left)])
    return out

"""Exact cuts of strided views: which bytes two views share, without listing the bytes.

Where strides divide one another a cut is a matter of digits. What is not such a chain is unrolled along its shorter dimension; what would
need too many boxes raises `Inexpressible`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckaudit.engines.vllm.apart import apart
from ckaudit.engines.vllm.digits import chain_of, digits, rebuild
from ckaudit.engines.vllm.strided import MOST_BOXES, Address, Inexpressible, Piece, injective, span, tidy


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
        [tidy(_restore(p, wider, still), key_a) for p in found.both],
        [tidy(_restore(p, whole, still), key_a) for p in found.rest] if found.both else [a],
    )


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


def _held(piece: Piece, key: int) -> tuple[Piece, tuple[int, ...]]:
    """The dimensions that move in address `key`, and the indices of those that do not (a broadcast)."""
    still = tuple(d for d, s in enumerate(piece.at[key].strides) if s == 0 and piece.sizes[d] != 1)
    if not still:
        return piece, ()
    keep = [d for d in range(len(piece.sizes)) if d not in still]
    at = tuple(Address(a.offset, tuple(a.strides[d] for d in keep), a.item) for a in piece.at)
    return Piece(tuple(piece.sizes[d] for d in keep), at), still


def _restore(piece: Piece, original: Piece, still: tuple[int, ...]) -> Piece:
    """Give a cut piece back the broadcast dimensions of `original`."""
    if not still:
        return piece
    sizes = (*piece.sizes, *(original.sizes[d] for d in still))
    at = tuple(
        Address(a.offset, (*a.strides, *(o.strides[d] for d in still)), a.item)
        for a, o in zip(piece.at, original.at, strict=True)
    )
    return Piece(sizes, at)


def _carry(a: Piece, at_b: Sequence[Address], key_b: int) -> Piece:
    """`a` with the further addresses of `b`, which stand still along every dimension of `a` that is held."""
    nothing = tuple(0 for _ in a.sizes)
    return Piece(a.sizes, (*a.at, *(Address(0, nothing, x.item) for i, x in enumerate(at_b) if i != key_b)))


def _cut(a: Piece, key_a: int, b: Piece, key_b: int, budget: list[int]) -> Cut:
    chain = chain_of(a.at[key_a].strides, b.at[key_b].strides, a.at[key_a].item)
    if isinstance(chain, tuple):
        return _cut_unrolled(a, key_a, b, key_b, chain, budget)
    base = min(a.at[key_a].offset, b.at[key_b].offset)
    if (a.at[key_a].offset - b.at[key_b].offset) % chain[-1]:
        raise Inexpressible
    boxes_a, boxes_b = digits(a, key_a, base, chain), digits(b, key_b, base, chain)
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
            both.append(rebuild(shared, keyed, (*box.others, *other.others), (*items_a, *items_b), key_a))
            left = [part for old in left for part in _minus(old, shared)]
        rest += [rebuild(ranges, keyed, box.others, items_a, key_a) for ranges in left]
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


def _unroll(piece: Piece, key: int, stride: int) -> Iterator[Piece]:
    """One piece for each index of the dimension with this stride in address `key`."""
    d = piece.at[key].strides.index(stride)
    sizes = piece.sizes[:d] + piece.sizes[d + 1 :]
    for i in range(piece.sizes[d]):
        yield Piece(
            sizes,
            tuple(Address(x.offset + i * x.strides[d], x.strides[:d] + x.strides[d + 1 :], x.item) for x in piece.at),
        )


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


def union_bytes(places: Iterable[Piece]) -> int:
    """Bytes of one storage that at least one of the (one-address) places touches. Raises Inexpressible."""
    return sum(p.elements * p.at[0].item for p in disjoint(places))


def disjoint(places: Iterable[Piece]) -> list[Piece]:
    """The same bytes, each in one place only. Raises Inexpressible."""
    held = sorted(set(map(tidy, places)), key=lambda p: p.at[0].offset)
    out: list[Piece] = []
    for group in apart(held):
        kept: list[Piece] = []
        for i in group:
            left = [held[i]]
            for old in kept:
                left = [part for piece in left for part in cut(piece, 0, old, 0).rest]
                if not left:
                    break
            kept += left
        out += kept
    return out

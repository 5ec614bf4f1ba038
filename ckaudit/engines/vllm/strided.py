"""Strided views as plain integers: boxes of elements, and where they lie in a storage. No torch.

A `Piece` is a box of elements (`sizes`) with one affine address per storage that it touches: element `i` lies at
`offset + sum(i[d] * strides[d])` bytes. A copy of a view into a parameter is a piece with two addresses, the place written and
the place read, so cutting a piece by one address (`cutting`) cuts the other with it.
"""

from __future__ import annotations

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


def flat(piece: Piece, key: int) -> Piece:
    """The place of `piece` in storage `key` alone, each byte once: its broadcast dimensions are left out."""
    a = piece.at[key]
    keep = [d for d, s in enumerate(a.strides) if s != 0]
    place = Piece(tuple(piece.sizes[d] for d in keep), (Address(a.offset, tuple(a.strides[d] for d in keep), a.item),))
    return tidy(place)

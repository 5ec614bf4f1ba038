"""Places of one storage in groups that share no byte, so that only neighbours are ever cut by one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckaudit.engines.vllm.digits import chain_of, digits
from ckaudit.engines.vllm.strided import Inexpressible, Piece, span

_FEW = 4
"""Pairs among so few are looked at one by one sooner than sorted."""


class _Box(NamedTuple):
    ranges: tuple[tuple[int, int], ...]
    owner: int


def apart(places: Sequence[Piece]) -> list[list[int]]:
    """Groups of indices, each ascending: places of two groups share no byte. Places are tidied; only their first address counts."""
    spans = [_Box((span(p.sizes, p.at[0]),), i) for i, p in enumerate(places) if p.elements]
    out = []
    for group in _sweep(spans, 0):
        members = sorted(box.owner for box in group)
        out += _finer(places, members) if len(members) > _FEW else [members]
    return out


def _sweep(boxes: Iterable[_Box], level: int) -> list[list[_Box]]:
    """Boxes in groups whose ranges of one level touch, one group behind the other."""
    out: list[list[_Box]] = []
    high = None
    for box in sorted(boxes, key=lambda b: b.ranges[level]):
        low, stop = box.ranges[level]
        if high is None or low >= high:
            out.append([])
            high = stop
        out[-1].append(box)
        high = max(high, stop)
    return out


def _finer(places: Sequence[Piece], members: list[int]) -> list[list[int]]:
    """The groups among places whose spans touch (the columns of a matrix): by the digits of their addresses, level by level."""
    boxes = _boxes([(i, places[i]) for i in members])
    if boxes is None:
        return [members]
    left, final = [boxes], []
    while left:
        group = left.pop()
        parts = next((p for level in range(len(group[0].ranges)) if len(p := _sweep(group, level)) > 1), None)
        if parts is None:
            final.append({box.owner for box in group})
        else:
            left += parts
    return _joined(final)


def _boxes(members: list[tuple[int, Piece]]) -> list[_Box] | None:
    """All places as boxes of the digits of one chain; None where their strides are none, or where that takes many boxes."""
    items = {p.at[0].item for _, p in members}
    strides = {s for _, p in members for s in p.at[0].strides}
    base = min(p.at[0].offset for _, p in members)
    if len(items) > 1 or 0 in strides:
        return None
    chain = chain_of(tuple(strides), (), *items)
    if isinstance(chain, tuple) or any((p.at[0].offset - base) % chain[-1] for _, p in members):
        return None
    out = []
    for i, piece in members:
        try:
            found = digits(Piece(piece.sizes, piece.at[:1]), 0, base, chain)
        except Inexpressible:
            return None
        out += [_Box(d.ranges, i) for d in found]
        if len(out) > 8 * len(members):
            return None
    return out


def _joined(groups: list[set[int]]) -> list[list[int]]:
    """Groups that have a member in common, as one."""
    home: dict[int, set[int]] = {}
    for group in groups:
        whole = set(group)
        for i in group:
            whole |= home.get(i, set())
        for i in whole:
            home[i] = whole
    return [sorted(group) for group in {id(g): g for g in home.values()}.values()]

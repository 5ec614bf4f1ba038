"""From the logs of writes to coverage: which bytes of which checkpoint tensor live in which part of a parameter at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckaudit.engines.vllm.apart import apart
from ckaudit.engines.vllm.cutting import cut, union_bytes
from ckaudit.engines.vllm.record import Kind, Record, Source, Write
from ckaudit.engines.vllm.strided import Piece, flat, span


class Leaf(NamedTuple):
    """Where a part of a place comes from in the end. `place` is that part; `read` the view of the checkpoint tensor `record` read for it
    (None: which part was read is not known)."""

    kind: Kind | str
    record: Record | None
    place: Piece
    read: Piece | None
    cast: tuple[str, str] | None
    broadcast: bool
    shared: bool
    """Whether other leaves may lie on the same place (a sum of two tensors)."""


class Lost(NamedTuple):
    """A write that a later one overwrote, in part or whole: the names that were there and the names there now."""

    lost: tuple[str, ...]
    kept: tuple[str, ...]


class Live(NamedTuple):
    """The writes of one storage that still show, disjoint; those of which only some unknown part does; and what was overwritten."""

    pieces: list[tuple[Piece, Write]]
    unsure: list[tuple[Piece, Write]]
    overwritten: list[tuple[Write, Write]]


class Tracer:
    """Resolves records; caches by (record, number of writes), so that a scratch buffer read often is resolved once."""

    def __init__(self) -> None:
        self._live: dict[tuple[int, int], Live] = {}
        self._names: dict[tuple[int, int], tuple[str, ...]] = {}

    def live(self, record: Record, upto: int) -> Live:
        """What of the first `upto` writes of a storage still shows. Raises Inexpressible."""
        key = (id(record), upto)
        if key not in self._live:
            self._live[key] = _overlay(record.log[:upto])
        return self._live[key]

    def names(self, record: Record, upto: int) -> tuple[str, ...]:
        """Every checkpoint tensor that anything in the storage may depend on, in the order of the writes."""
        key = (id(record), upto)
        if key not in self._names:
            out = dict.fromkeys([record.name] if record.kind == "tensor" else [])
            for write in record.log[:upto]:
                out.update(dict.fromkeys(self.names_of(write)))
            self._names[key] = tuple(out)
        return self._names[key]

    def names_of(self, write: Write) -> tuple[str, ...]:
        """Every checkpoint tensor that one write may depend on."""
        return tuple(dict.fromkeys(n for s in write.sources for n in self.names(s.record, s.upto)))

    def leaves(self, record: Record, upto: int, piece: Piece, cast: tuple[str, str] | None = None) -> Iterator[Leaf]:
        """Where every element of `piece` comes from. `piece.at` is the place to be explained and the view of `record` that is there.

        Raises Inexpressible.
        """
        if not record.log[:upto]:
            yield self._own(record, piece, cast)
            return
        live = self.live(record, upto)
        left = [piece]
        if _itself(piece) and not live.unsure and _filled(live) == _bytes(piece):
            for there, write in live.pieces:  # the whole of a storage that writes fill: nothing to cut
                yield from self._through(Piece(there.sizes, (there.at[0], *there.at)), write, cast)
            return
        for there, write in live.pieces:
            remaining: list[Piece] = []
            for part in left:
                found = cut(part, 1, there, 0)
                remaining += found.rest
                for both in found.both:
                    yield from self._through(both, write, cast)
            left = remaining
            if not left:
                break
        for part in left:
            yield self._own(record, part, cast)
        for there, write in live.unsure:
            for both in cut(piece, 1, there, 0).both:
                yield from self._unsure(both, write)

    def _own(self, record: Record, piece: Piece, cast: tuple[str, str] | None) -> Leaf:
        place, read = Piece(piece.sizes, piece.at[:1]), Piece(piece.sizes, piece.at[1:2])
        broadcast = any(s == 0 and n > 1 for n, s in zip(piece.sizes, piece.at[1].strides, strict=True))
        return Leaf(record.kind, record, place, flat(read, 0), cast, broadcast, False)

    def _through(self, both: Piece, write: Write, cast: tuple[str, str] | None) -> Iterator[Leaf]:
        """The leaves of a part of one write: `both.at` is the place to be explained, the place written, and the places read."""
        cast = cast or write.cast
        if not write.sources:
            yield Leaf("constant", None, Piece(both.sizes, both.at[:1]), None, None, False, False)
        elif write.mode == "copy":
            for i, source in enumerate(write.sources):
                part = Piece(both.sizes, (both.at[0], both.at[2 + i]))
                for leaf in self.leaves(source.record, source.upto, part, cast):
                    yield leaf._replace(shared=True) if len(write.sources) > 1 else leaf
        else:
            whole = write.mode == "mixed" or both.elements == write.piece.elements
            place = Piece(both.sizes, both.at[:1])
            for source in write.sources:
                view = Piece(source.sizes, (source.at, source.at))
                for leaf in self.leaves(source.record, source.upto, view, cast):
                    yield leaf._replace(place=place, read=leaf.read if whole else None, broadcast=False, shared=True)

    def _unsure(self, both: Piece, write: Write) -> Iterator[Leaf]:
        place = Piece(both.sizes, both.at[:1])
        yield Leaf("unknown", None, place, None, None, False, True)
        for source in write.sources:
            for name_record in self._roots(source):
                yield Leaf("unknown", name_record, place, None, None, False, True)

    def _roots(self, source: Source) -> Iterator[Record]:
        if source.record.kind == "tensor":
            yield source.record
        for write in source.record.log[: source.upto]:
            for deeper in write.sources:
                yield from self._roots(deeper)

    def lost(self, record: Record) -> list[Lost]:
        """Checkpoint tensors whose write into this storage was overwritten by something that does not hold them."""
        out: dict[Lost, None] = {}
        for old, new in self.live(record, len(record.log)).overwritten:
            kept = self.names_of(new)
            gone = tuple(n for n in self.names_of(old) if n not in kept)
            if gone:
                out[Lost(gone, kept)] = None
        return list(out)


def _itself(piece: Piece) -> bool:
    """Whether a piece explains a dense run of bytes by itself, from the first byte of its storage on."""
    place, view = piece.at
    return place == view and place.offset == 0 and len(piece.sizes) == 1 and place.strides[0] == place.item


def _filled(live: Live) -> int:
    """Bytes from the first of a storage on that its writes fill without a gap; -1 if there is a gap before the last of them."""
    end = max((span(p.sizes, p.at[0])[1] for p, _ in live.pieces), default=0)
    return end if sum(_bytes(p) for p, _ in live.pieces) == end else -1


def _bytes(piece: Piece) -> int:
    return piece.elements * piece.at[0].item


def _overlay(log: list[Write]) -> Live:
    """Lay the writes over one another, in groups of those that may touch, so that separate writes cost nothing."""
    live = Live([], [], [])
    for group in apart([w.piece for w in log]):
        _overlay_group([log[i] for i in group], live)
    return live


def _overlay_group(log: list[Write], live: Live) -> None:
    pieces: list[tuple[Piece, Write]] = []
    unsure: list[tuple[Piece, Write]] = []
    for write in log:
        if write.mode == "unknown":
            unsure.append((write.piece, write))
            continue
        for held in (pieces, unsure) if pieces or unsure else ():
            kept = []
            for old, by in held:
                found = cut(old, 0, write.piece, 0)
                if found.both and held is pieces:
                    live.overwritten.append((by, write))
                kept += [(rest, by) for rest in found.rest]
            held[:] = kept
        pieces.append((write.piece, write))
    live.pieces.extend(pieces)
    live.unsure.extend(unsure)


class Tally:
    """Reads and places gathered from leaves, turned into numbers of elements."""

    def __init__(self) -> None:
        self.places: dict[str, list[Piece]] = {}
        self.shared = False

    def add(self, leaf: Leaf) -> None:
        self.places.setdefault(leaf.kind, []).append(flat(leaf.place, 0) if leaf.shared else leaf.place)
        self.shared = self.shared or leaf.shared

    def bytes(self, kind: str) -> int:
        """Bytes of the place that leaves of this kind explain."""
        places = self.places.get(kind, [])
        if self.shared:
            return union_bytes(places)
        return sum(p.elements * p.at[0].item for p in places)

    def known_bytes(self, kinds: Iterable[str]) -> int:
        """Bytes of the place that leaves of any of these kinds explain, each byte once."""
        return union_bytes(p for kind in kinds for p in (flat(q, 0) for q in self.places.get(kind, [])))

"""Where every tensor of a checkpoint goes in memory, and in which pieces it is read. Pure: no torch, no I/O.

Tensors that the loader will join (the experts of a layer, q, k and v) get one allocation, in the order in which they will be joined, so
that joining needs no copy. A wrong guess costs that copy and nothing else: what the loader does with a tensor is never assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

ALIGNMENT = 512
"""Bytes. What torch's caching allocator rounds to; more than any kernel asks for."""
CHUNK = 32 << 20
"""Bytes that a reader claims at once: few enough that all have work to the end, so many that claiming costs nothing."""
WINDOW = 4 << 20
"""Bytes that are read before they go on: they are still in the processor's cache then, which doubles the rate (see docs/performance.md)."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One tensor in its file: `shard` indexes the list of files, `start` and `stop` are bytes from the start of that file."""

    name: str
    shard: int
    dtype: str
    """A safetensors dtype name (`BF16`)."""
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start


class Arena(msgspec.Struct, frozen=True):
    """One allocation: `members` are (index of the tensor, offset in bytes), in the order of their offsets."""

    nbytes: int
    members: tuple[tuple[int, int], ...]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one tensor: `into` counts from the start of the window, `to` from the start of the allocation `arena`."""

    tensor: int
    into: int
    nbytes: int
    arena: int
    to: int


class Run(msgspec.Struct, frozen=True):
    """Pieces that follow each other in one file: one read of `nbytes` at `start` (bytes from the start of the file)."""

    shard: int
    start: int
    nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def into(self) -> int:
        """Where it begins in its window."""
        return self.pieces[0].into


Window = tuple[Run, ...]
"""What a read buffer holds."""


class Chunk(msgspec.Struct, frozen=True):
    """What a reader claims at once. `before` is the number of bytes of all chunks before it."""

    windows: tuple[Window, ...]
    nbytes: int
    before: int
    tensors: dict[int, int]
    """Bytes by tensor."""
    arenas: dict[int, int]
    """Bytes by allocation."""


class Layout(msgspec.Struct, frozen=True):
    """Tensors in the order in which the loader will ask for them, their allocations, and the chunks to read."""

    tensors: tuple[Stored, ...]
    arenas: tuple[Arena, ...]
    chunks: tuple[Chunk, ...]
    home: tuple[tuple[int, int], ...]
    """Of each tensor: its arena and its offset there in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(t.nbytes for t in self.tensors)


def plan(
    tensors: Iterable[Stored],
    order: Callable[[str], Any],
    joins: Sequence[Sequence[str]] = (),
    chunk: int = CHUNK,
    window: int = WINDOW,
) -> Layout:
    """The layout of `tensors`, read in `order`. `joins`: source patterns of the loader's converters, `*` for an index."""
    ordered = tuple(sorted(tensors, key=lambda t: order(t.name)))
    arenas = _arenas(ordered, joins)
    home = [(0, 0)] * len(ordered)
    for index, arena in enumerate(arenas):
        for tensor, offset in arena.members:
            home[tensor] = (index, offset)
    return Layout(ordered, arenas, tuple(_chunks(ordered, home, chunk, window)), tuple(home))


def _arenas(tensors: Sequence[Stored], joins: Sequence[Sequence[str]]) -> tuple[Arena, ...]:
    arenas: list[Arena] = []
    placed: set[int] = set()
    for group in _groups(tensors, joins):
        offset = 0
        members = []
        for tensor in group:
            members.append((tensor, offset))
            offset += tensors[tensor].nbytes
        arenas.append(Arena(offset, tuple(members)))
        placed.update(group)
    arenas += [Arena(t.nbytes, ((i, 0),)) for i, t in enumerate(tensors) if i not in placed]
    return tuple(arenas)


def _groups(tensors: Sequence[Stored], joins: Sequence[Sequence[str]]) -> list[list[int]]:
    """Indices of tensors that one converter joins, ordered by (expert, pattern). A tensor is in one group at most."""
    found: dict[tuple[int, str], dict[tuple[int, int], int]] = {}
    rules = [
        (number, place, _as_regex(pattern))
        for number, patterns in enumerate(joins)
        for place, pattern in enumerate(patterns)
    ]
    for index, tensor in enumerate(tensors):
        for number, place, regex in rules:
            match = regex.search(tensor.name)
            if match is not None:
                expert = int(match.group(1)) if regex.groups else 0
                found.setdefault((number, tensor.name[: match.start()]), {})[expert, place] = index
                break
    return [group for cells in found.values() if (group := _joinable(tensors, cells))]


def _joinable(tensors: Sequence[Stored], cells: dict[tuple[int, int], int]) -> list[int]:
    """The group in joining order, or nothing where its members do not fit together as one block."""
    group = [cells[key] for key in sorted(cells)]
    first = tensors[group[0]]
    places = {place for _, place in cells}
    full_grid = len(cells) == len({expert for expert, _ in cells}) * len(places)
    alike = all(tensors[i].dtype == first.dtype and tensors[i].shape[1:] == first.shape[1:] for i in group)
    even = len({tensors[i].nbytes for i in group}) == 1 or len(group) == len(places)
    aligned = all(tensors[i].nbytes % 16 == 0 for i in group)
    return group if len(group) > 1 and full_grid and alike and even and aligned else []


def _as_regex(pattern: str) -> re.Pattern[str]:
    """A converter's source pattern as an expression on checkpoint names: `*` is an index, everything else stands for itself.

    Renamings run before converters, so that of the path before an index only the last part is sure to stand in the file.
    """
    start, star, end = pattern.replace("\\", "").removeprefix("^").removesuffix("$").partition("*")
    if star:
        start = start.rstrip(".").rpartition(".")[2] + "."
    index = r"(\d+)" if star else ""
    return re.compile(r"(?<![^.])" + re.escape(start.lstrip(".")) + index + re.escape(end) + r"(?:\.weight)?$")


def _chunks(tensors: Sequence[Stored], home: Sequence[tuple[int, int]], size: int, window: int) -> Iterator[Chunk]:
    """Tensors one after another, packed into windows and these into chunks of about `size` bytes; a long tensor is cut."""
    window = min(window, size)
    windows: list[Window] = []
    before = held = 0
    for runs in _windows(tensors, home, window):
        windows.append(runs)
        held += runs[-1].into + runs[-1].nbytes
        if held + window > size:
            yield _chunk(windows, held, before)
            before, held, windows = before + held, 0, []
    if windows:
        yield _chunk(windows, held, before)


def _chunk(windows: Sequence[Window], nbytes: int, before: int) -> Chunk:
    by_tensor: dict[int, int] = {}
    by_arena: dict[int, int] = {}
    for piece in (p for runs in windows for run in runs for p in run.pieces):
        by_tensor[piece.tensor] = by_tensor.get(piece.tensor, 0) + piece.nbytes
        by_arena[piece.arena] = by_arena.get(piece.arena, 0) + piece.nbytes
    return Chunk(tuple(windows), nbytes, before, by_tensor, by_arena)


def _windows(tensors: Sequence[Stored], home: Sequence[tuple[int, int]], size: int) -> Iterator[Window]:
    runs: list[Run] = []
    pieces: list[Piece] = []
    shard = start = stop = fill = (
        0  # of the run in hand: its file, where it begins and ends there; and how full the window is
    )
    for index, tensor in enumerate(tensors):
        arena, offset = home[index]
        at = 0
        while at < tensor.nbytes:
            if pieces and (tensor.shard, tensor.start + at) != (shard, stop):
                runs.append(Run(shard, start, stop - start, tuple(pieces)))
                pieces = []
            if not pieces:
                shard, start, stop = tensor.shard, tensor.start + at, tensor.start + at
            take = min(size - fill, tensor.nbytes - at)
            pieces.append(Piece(index, fill, take, arena, offset + at))
            fill, at, stop = fill + take, at + take, stop + take
            if fill == size:
                yield (*runs, Run(shard, start, stop - start, tuple(pieces)))
                runs, pieces, fill = [], [], 0
    if pieces:
        yield (*runs, Run(shard, start, stop - start, tuple(pieces)))

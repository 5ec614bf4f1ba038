"""The text of a sound header: typed decodes of one piece after another, so that memory holds the result and little else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ckaudit import jsonscan
from ckaudit.header.model import DTYPE_BITS, MAX_PAIRS, TensorInfo

if TYPE_CHECKING:
    Dtype = str
    Size = int
else:  # what the typed decode accepts; it hands out the one string object of each dtype
    Dtype = Literal[tuple(DTYPE_BITS)]
    Size = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One tensor as the format writes it."""

    dtype: Dtype
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


MINUS_ZERO = re.compile(rb"[\[,][ \t\n\r]*-0")
"""A number that decoders take for 0, and readers of the format refuse."""

_PIECE = 1 << 18
"""Bytes of a header that are decoded at once. What a decode builds is ten times its text before it is made small."""
_LONGEST = 1 << 19
"""Bytes. A longer piece has an entry as no model has it; what a decode would make of that is not bounded."""
_METADATA_KEY = b'"__metadata__"'
_METADATA_MEMBER = re.compile(
    _METADATA_KEY + rb"[ \t\n\r]*+:[ \t\n\r]*+(" + jsonscan.FLAT + rb")[ \t\n\r]*+(,?)", re.DOTALL
)
_BETWEEN = re.compile(rb'\}[ \t\n\r]*+,[ \t\n\r]*+"')
_WS = b" \t\n\r"

_ENTRIES = msgspec.json.Decoder(dict[str, Entry])
_METADATA = msgspec.json.Decoder(dict[str, str])


def decode(data: bytes, length: int) -> tuple[dict[str, TensorInfo], dict[str, str]] | None:
    """The tensors and metadata of the header of `length` bytes behind the first 8 of `data`; None when its text may have a fault.

    The decoder keeps the last of two equal names and fields. But each entry has five strings, so a piece that holds more strings than
    five for each name it was left with has something in it twice.
    """
    start, stop = 9, 8 + length - _blanks(data, 8 + length)
    if data[8:9] != b"{" or stop < 10 or data[stop - 1 : stop] != b"}":
        return None
    found = _metadata(data, start, stop - 1)
    if found is None:
        return None
    metadata, spans = found
    tensors: dict[str, TensorInfo] = {}
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    count = last = 0
    for piece in (piece for span in spans for piece in _pieces(data, *span)):
        if len(piece) > _LONGEST or (b"-0" in piece and MINUS_ZERO.search(piece)):
            return None
        try:
            entries = _ENTRIES.decode(piece)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if jsonscan.count_strings(piece) != 5 * len(entries):
            return None
        count += len(entries)
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            if begin == last:
                begin = last  # the same number, and the same object
            tensors[name] = TensorInfo(entry.dtype, shapes.setdefault(entry.shape, entry.shape), begin, end)
            last = end
    return (tensors, metadata) if count == len(tensors) and "__metadata__" not in tensors else None


def _blanks(data: bytes, stop: int) -> int:
    """White space before `stop`; padding is a few bytes."""
    tail = data[max(9, stop - 4096) : stop]
    return len(tail) - len(tail.rstrip(_WS))


def _metadata(data: bytes, start: int, stop: int) -> tuple[dict[str, str], list[tuple[int, int]]] | None:
    """The `__metadata__` among the members between `start` and `stop`, and where the members before and after it lie.

    None when it is not a plain one.
    """
    key = data.find(_METADATA_KEY, start, stop)
    if key < 0:
        return {}, [(start, stop)]
    member = _METADATA_MEMBER.match(data, key, stop)
    before = data[max(start, key - 64) : key].rstrip(_WS)
    if member is None or (before and not re.search(rb"\}\s*,$", before)) or (before == b"" and key - start > 64):
        return None
    raw, comma = member.groups()
    follows = data[member.end() : min(stop, member.end() + 64)].lstrip(_WS)
    if raw.count(b'"') > 8 * MAX_PAIRS or (comma == b",") != follows.startswith(b'"'):
        return None
    try:
        metadata = _METADATA.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if jsonscan.count_strings(raw) != 2 * len(metadata):
        return None
    ahead = data.rfind(b",", start, key) if before else start
    return metadata, [(start, ahead), (member.end(), stop)]


def _pieces(data: bytes, start: int, stop: int) -> Iterator[bytes]:
    """The members between `start` and `stop` as objects of some thousand each, cut where one entry ends and the next begins.

    Such a place inside a string, or deeper inside, leaves two pieces that are no JSON.
    """
    view = memoryview(data)
    while start < stop:
        cut = _BETWEEN.search(data, start + _PIECE, stop)
        end, after = (cut.start() + 1, cut.end() - 1) if cut else (stop, stop)
        yield b"".join((b"{", view[start:end], b"}"))
        start = after

"""bytes -> Header: a strict reading of a safetensors header. Pure, no I/O, never raises on bad bytes.

Format (https://github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian length N of the header, then N bytes of JSON
`{"NAME": {"dtype": "F16", "shape": [1, 16], "data_offsets": [BEGIN, END]}, "__metadata__": {"k": "v"}}`,
then the data; offsets are relative to the first byte of data.

Two paths give the same result on a sound header. The fast one (`text`) is typed decodes of large pieces; whatever it cannot vouch for
goes to the slow one (`diagnosis`), which takes the header member by member, names each fault, and keeps every entry that can be
understood. Both stay within four times the header's length, its own bytes included, unless every tensor has a shape of its own.

Whatever safetensors 0.8 rejects is a defect here. Stricter than it, on purpose: a repeated tensor or metadata name (it takes the last),
an entry that is not an object or whose dtype is not a string (its JSON library allows both), fields that the format does not have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ckaudit import sniff
from ckaudit.header.model import DTYPE_BITS as DTYPE_BITS
from ckaudit.header.model import FLOATS as FLOATS
from ckaudit.header.model import MAX_DEFECTS as MAX_DEFECTS
from ckaudit.header.model import MAX_HEADER as MAX_HEADER
from ckaudit.header.model import TORCH_DTYPES as TORCH_DTYPES
from ckaudit.header.model import Defect as Defect
from ckaudit.header.model import Header as Header
from ckaudit.header.model import TensorInfo as TensorInfo
from ckaudit.header.model import most_defects as most_defects
from ckaudit.header.places import misplaced
from ckaudit.header.text import decode


def declared_length(prefix: bytes) -> int | None:
    """The header length N in bytes that the first 8 bytes of a file declare; None when there are fewer than 8."""
    return int.from_bytes(prefix[:8], "little") if len(prefix) >= 8 else None


def needed(start: bytes, file_size: int | None) -> int:
    """How many bytes of a file that begins with `start` `parse` wants to see; no more than it has, where its size is known.

    0 when more would not help: `start` is no header, or one so long that nobody could read it.
    """
    length = declared_length(start)
    if length is None or sniff.foreign(start, file_size) is not None or length > 2 * MAX_HEADER:
        return 0
    return 8 + length if file_size is None else min(8 + length, file_size)


def parse(data: bytes, file_size: int | None) -> Header:
    """The header of a file from its first bytes, the 8-byte prefix included, at least the 8 + N of them that the file has.

    `file_size` in bytes is what offsets are held against; None when unknown (then nothing is said of truncated data).
    Never raises: what is wrong is in `defects`. Bytes that are no header at all give no tensors and one defect.
    """
    length = declared_length(data)
    kind = sniff.foreign(data, file_size)
    if length is None or kind is not None:
        return Header({}, {}, 0, (Defect("not-safetensors", None, "a safetensors file", kind or "too few bytes"),))
    whole = 8 + length <= len(data)
    present = len(data) if file_size is None else file_size
    most = most_defects(min(length, len(data)))
    defects: list[Defect] = []
    if 8 + length > present:
        defects.append(Defect("header-truncated", None, f"{length} bytes of header", f"{present - 8} bytes"))
    elif length > MAX_HEADER:
        defects.append(Defect("header-over-cap", None, f"at most {MAX_HEADER} bytes", f"{length} bytes"))
    elif not whole:
        defects.append(
            Defect("header-truncated", None, f"{length} bytes of header", f"{len(data) - 8} bytes could be read")
        )
    with without_collector():
        sound = decode(data, length) if whole else None
        if sound is not None:
            tensors, metadata = sound
            complete = True
        else:
            from ckaudit.header.diagnosis import diagnose

            tensors, metadata, faults = diagnose(data, 8, min(8 + length, len(data)), whole=whole)
            defects += faults
            complete = whole and all(d.code in ("metadata", "metadata-length", "extra-field", "dtype") for d in faults)
        data_size = None if file_size is None or not whole else file_size - 8 - length
        defects += misplaced(tensors, data_size, complete=complete, most=most)
    return Header(tensors, metadata, length, _capped(defects, most))


@contextmanager
def without_collector() -> Iterator[None]:
    """Garbage collection off: half a million small tuples make it walk them again and again, for a third of the time, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _capped(defects: list[Defect], most: int) -> tuple[Defect, ...]:
    if len(defects) <= most:
        return tuple(defects)
    return (*defects[:most], Defect("more-defects", None, "", f"more than {most} defects"))

"""bytes -> Header: a strict reading of a safetensors header. Pure, no I/O, never raises on bad bytes.

Format (https://github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian length N of the header, then N bytes of JSON
`{"NAME": {"dtype": "F16", "shape": [1, 16], "data_offsets": [BEGIN, END]}, "__metadata__": {"k": "v"}}`,
then the data; offsets are relative to the first byte of data.

Two paths give the same result on a sound header. The fast one is a typed decode of the whole; whatever it cannot vouch for goes to
the slow one, which takes the header member by member, names each fault, and keeps every entry that can be understood.

Whatever safetensors 0.8 rejects is a defect here. Stricter than it, on purpose: a repeated tensor or metadata name (it takes the last),
an entry that is not an object or whose dtype is not a string (its JSON library allows both), fields that the format does not have.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ckaudit import jsonscan, sniff

# Bits per element. Source: safetensors `Dtype` (tensor.rs, 0.6 and newer).
DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip

MAX_HEADER = 100_000_000
"""Bytes. safetensors refuses a longer header (`MAX_HEADER_SIZE`)."""

MAX_DEFECTS = 100_000
"""Defects listed per file; one more says that there are others. A hostile header could hold millions."""

if TYPE_CHECKING:
    Dtype = str
    Size = int
else:  # what the typed decode accepts; it hands out the one string object of each dtype, which saves 25 MB on a large header
    Dtype = Literal[tuple(DTYPE_BITS)]
    Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorInfo(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One tensor as its header declares it: safetensors dtype name, shape, and data offsets in bytes.

    An unknown dtype keeps its spelling.
    """

    dtype: Dtype
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]

    @property
    def nbytes(self) -> int:
        """Bytes of data that the offsets span."""
        return self.data_offsets[1] - self.data_offsets[0]


class Defect(msgspec.Struct, frozen=True):
    """One thing wrong with a file, as a fact: `code` says which kind (see `checks.container`), `name` the tensor, if one."""

    code: str
    name: str | None = None
    wanted: str = ""
    found: str = ""


class Header(msgspec.Struct, frozen=True):
    """What one safetensors header says, and everything that is wrong with it.

    `tensors` is in file order and holds every entry that could be understood, so that an audit of names can go on.
    `length` is the header's own length in bytes (the 8-byte prefix excluded).
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    length: int
    defects: tuple[Defect, ...] = ()


_HEADER = msgspec.json.Decoder(dict[str, TensorInfo])
_ENTRY = msgspec.json.Decoder(TensorInfo)
_METADATA = msgspec.json.Decoder(dict[str, str])
_STR = msgspec.json.Decoder(str)
_SIZES = msgspec.json.Decoder(tuple[Size, ...])
_METADATA_MEMBER = re.compile(
    rb'"__metadata__"[ \t\n\r]*+:[ \t\n\r]*+(' + jsonscan.FLAT + rb")[ \t\n\r]*+,?", re.DOTALL
)
_MINUS_ZERO = re.compile(rb"[\[,][ \t\n\r]*-0")
_MAX_SIZE = 2**64 - 1


def declared_length(prefix: bytes) -> int | None:
    """The header length N in bytes that the first 8 bytes of a file declare; None when there are fewer than 8."""
    return int.from_bytes(prefix[:8], "little") if len(prefix) >= 8 else None


def parse(data: bytes, file_size: int | None) -> Header:
    """The header of a file from its first bytes, the 8-byte prefix included, at least the 8 + N of them that the file has.

    `file_size` in bytes is what offsets are held against; None when unknown (then nothing is said of truncated data).
    Never raises: what is wrong is in `defects`. Bytes that are no header at all give no tensors and one defect.
    """
    length = declared_length(data)
    kind = sniff.foreign(data, file_size)
    if length is None or kind is not None:
        return Header(
            {}, {}, 0, (Defect("not-safetensors", wanted="a safetensors file", found=kind or "too few bytes"),)
        )
    defects: list[Defect] = []
    if length > MAX_HEADER:
        defects.append(Defect("header-over-cap", wanted=f"at most {MAX_HEADER} bytes", found=f"{length} bytes"))
    whole = 8 + length <= len(data)
    if not whole:
        present = len(data) if file_size is None else file_size
        defects.append(Defect("header-truncated", wanted=f"{length} bytes of header", found=f"{present - 8} bytes"))
    with _no_garbage_collection():
        sound = _decode(data, length) if whole else None
        if sound is not None:
            tensors, metadata = sound
            complete = True
        else:
            tensors, metadata, faults = _diagnose(data[8 : 8 + length], whole=whole)
            defects += faults
            complete = whole and all(d.code in ("metadata", "extra-field", "dtype") for d in faults)
        data_size = None if file_size is None or not whole else file_size - 8 - length
        defects += _layout(tensors, data_size, complete=complete)
    return Header(tensors, metadata, length, _capped(defects))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Half a million small tuples make the collector walk them again and again, for a third of the time, and none of them is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _capped(defects: list[Defect]) -> tuple[Defect, ...]:
    if len(defects) <= MAX_DEFECTS:
        return tuple(defects)
    return (*defects[:MAX_DEFECTS], Defect("more-defects", wanted="", found=f"more than {MAX_DEFECTS} defects"))


def _decode(data: bytes, length: int) -> tuple[dict[str, TensorInfo], dict[str, str]] | None:
    """The tensors and metadata of a header without a fault in its text, in one typed decode; None when it may have one.

    The decoder keeps the last of two equal names and fields. But each entry has five strings, so a header that holds
    more strings than five for each name it was left with has something in it twice.
    """
    text = bytearray(memoryview(data)[8 : 8 + length])
    if b"-0" in text and _MINUS_ZERO.search(text):
        return None
    metadata = _cut_metadata(text)
    if metadata is None:
        return None
    try:
        tensors = _HEADER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if jsonscan.count_strings(text) != 5 * len(tensors) or "__metadata__" in tensors:
        return None
    return tensors, metadata


def _cut_metadata(text: bytearray) -> dict[str, str] | None:
    """The `__metadata__` of a header, replaced by spaces in `text`; None when it is not a plain one."""
    start = text.find(b'"__metadata__"')
    if start < 0:
        return {}
    member = _METADATA_MEMBER.match(text, start)
    before = bytes(text[max(0, start - 64) : start]).rstrip()
    if member is None or not (before == b"{" or re.search(rb"\}\s*,$", before)):
        return None
    raw, stop = member.group(1), member.end()
    try:
        metadata = _METADATA.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if jsonscan.count_strings(raw) != 2 * len(metadata):
        return None
    if before != b"{" and text[stop - 1] != ord(","):  # the last member: the comma before it goes too
        start = text.rfind(b",", 0, start)
    text[start:stop] = b" " * (stop - start)
    return metadata


def _diagnose(text: bytes, *, whole: bool) -> tuple[dict[str, TensorInfo], dict[str, str], list[Defect]]:
    """The same member by member: what can be understood, and what is wrong with the rest."""
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    defects: list[Defect] = []
    try:
        for member in jsonscan.members(text):
            name = _text(member.key)
            if name is None:
                defects.append(Defect("name", wanted="UTF-8 text", found=jsonscan.excerpt(member.key)))
            elif name == "__metadata__":
                if metadata is not None:
                    defects.append(Defect("metadata", "__metadata__", "one __metadata__", "another one"))
                metadata, faults = _metadata(member.value)
                defects += faults
            else:
                info, faults = _entry(name, member.value)
                if name in tensors:
                    same = info == tensors[name]
                    found = "a second entry, " + ("equal to" if same else "unlike") + " the first"
                    faults.append(Defect("duplicate-name", name, "each name once", found))
                if info is not None:
                    tensors[name] = info
                defects += faults
            if len(defects) > MAX_DEFECTS:
                break
    except jsonscan.Broken as broken:
        if whole:
            found = f"{broken.reason} at byte {8 + broken.at}: {jsonscan.excerpt(text[broken.at : broken.at + 40])}"
            defects.append(Defect("header-json", wanted="a JSON object", found=found))
    return tensors, metadata or {}, defects


def _metadata(raw: bytes) -> tuple[dict[str, str], list[Defect]]:
    """The pairs of `__metadata__` that are text, and a defect for each one that is not."""
    if raw == b"null":  # stock readers take it for none
        return {}, []
    metadata: dict[str, str] = {}
    defects: list[Defect] = []
    try:
        for member in jsonscan.members(raw):
            key, value = _text(member.key), _text(member.value)
            if key is None or value is None:
                found = f"{jsonscan.excerpt(member.key)}: {jsonscan.excerpt(member.value)}"
                defects.append(Defect("metadata", "__metadata__", "an object of strings", found))
                continue
            if key in metadata:
                defects.append(Defect("duplicate-metadata", key, "each key once", "a second one"))
            metadata[key] = value
            if len(defects) > MAX_DEFECTS:
                break
    except jsonscan.Broken:
        defects.append(Defect("metadata", "__metadata__", "an object of strings", jsonscan.excerpt(raw)))
    return metadata, defects


def _entry(name: str, raw: bytes) -> tuple[TensorInfo | None, list[Defect]]:
    """One tensor entry, or as much of it as makes one, and what is wrong with it."""
    if raw.count(b'"') == 8 and not _MINUS_ZERO.search(raw):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _ENTRY.decode(raw), []
    fields: dict[str, bytes] = {}
    defects: list[Defect] = []
    try:
        for member in jsonscan.members(raw):
            field = _text(member.key) or "?"
            if field in fields:
                defects.append(Defect("entry", name, f"{field} once", "twice"))
            elif field not in ("dtype", "shape", "data_offsets"):
                defects.append(Defect("extra-field", name, "dtype, shape, data_offsets", jsonscan.excerpt(member.key)))
            fields[field] = member.value
            if len(defects) > 8:
                break
    except jsonscan.Broken:
        return None, [Defect("entry", name, "an object of dtype, shape and data_offsets", jsonscan.excerpt(raw))]
    dtype = _text(fields.get("dtype", b""))
    shape = _sizes(fields.get("shape", b""))
    offsets = _sizes(fields.get("data_offsets", b""))
    if dtype is None:
        defects.append(Defect("entry", name, "a dtype", jsonscan.excerpt(fields.get("dtype", b"none"))))
    elif dtype not in DTYPE_BITS:
        defects.append(Defect("dtype", name, "a dtype of the format", jsonscan.excerpt(dtype.encode())))
    if shape is None:
        defects.append(
            Defect("entry", name, "a shape of whole numbers", jsonscan.excerpt(fields.get("shape", b"none")))
        )
    if offsets is None or len(offsets) != 2:
        defects.append(Defect("entry", name, "two data_offsets", jsonscan.excerpt(fields.get("data_offsets", b"none"))))
        return None, defects
    if dtype is None or shape is None:
        return None, defects
    return TensorInfo(dtype, shape, (offsets[0], offsets[1])), defects


def _text(raw: bytes) -> str | None:
    try:
        return _STR.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _sizes(raw: bytes) -> tuple[int, ...] | None:
    try:
        sizes = _SIZES.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if b"-" in raw or any(size > _MAX_SIZE for size in sizes) else sizes


def _layout(tensors: dict[str, TensorInfo], data_size: int | None, *, complete: bool) -> list[Defect]:
    """What is wrong with sizes and places. `complete`: every tensor of the file is in `tensors`, so that a gap is a gap."""
    at = 0
    bits = DTYPE_BITS
    for info in tensors.values():
        begin, end = info.data_offsets
        if begin != at or prod(info.shape) * bits.get(info.dtype, 0) != (end - begin) * 8 or begin == end:
            break
        at = end
    else:
        if at == data_size or (data_size is None and at <= _MAX_SIZE):
            return []
    return [*_sizes_wrong(tensors), *_places_wrong(tensors, data_size, complete=complete)]


def _sizes_wrong(tensors: dict[str, TensorInfo]) -> Iterator[Defect]:
    for name, info in tensors.items():
        begin, end = info.data_offsets
        if end < begin:
            yield Defect("offsets", name, "data_offsets in order", f"[{begin}, {end}]")
            continue
        if info.dtype not in DTYPE_BITS:
            continue
        bits = _checked_bits(info)
        what = f"{info.dtype} {list(info.shape)}"
        if bits is None:
            yield Defect("overflow", name, "fewer than 2**64 bits", what)
        elif bits % 8:
            yield Defect("sub-byte", name, "a whole number of bytes", f"{what} is {bits} bits")
        elif bits // 8 != end - begin:
            yield Defect("shape", name, f"{bits // 8} bytes for {what}", f"{end - begin} bytes")


def _checked_bits(info: TensorInfo) -> int | None:
    """Bits that the shape needs; None where the 64-bit product that readers take, dimension after dimension, overflows."""
    elements = 1
    for dim in info.shape:
        elements *= dim
        if max(elements, dim) > _MAX_SIZE:
            return None
    bits = elements * DTYPE_BITS[info.dtype]
    return None if bits > _MAX_SIZE else bits


def _places_wrong(tensors: dict[str, TensorInfo], data_size: int | None, *, complete: bool) -> Iterator[Defect]:
    at, last = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = info.data_offsets
        if end < begin:
            complete = False
            continue
        if begin < at:
            yield Defect("overlap", name, f"to begin at {at} or later, after {last}", f"begins at {begin}")
        elif begin > at and complete:
            yield Defect(
                "hole", name, f"to begin at {at}", f"begins at {begin}: {begin - at} bytes belong to no tensor"
            )
        if end > at:
            at, last = end, name
    if data_size is not None and at > data_size:
        yield Defect(
            "data-truncated", None, f"{at} bytes of data", f"{max(data_size, 0)} bytes: {at - data_size} are missing"
        )
    elif data_size is not None and at < data_size and complete:
        yield Defect(
            "trailing-bytes", None, f"{at} bytes of data", f"{data_size} bytes: {data_size - at} belong to no tensor"
        )
    elif data_size is None and at > _MAX_SIZE:
        yield Defect("overflow", last, "offsets below 2**64", str(at))

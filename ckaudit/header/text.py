"""The text of a header: one typed decode of the whole, or, where that cannot vouch for it, member by member with a name for each fault."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

from ckaudit import jsonscan
from ckaudit.header.model import DTYPE_BITS, MAX_DEFECTS, MAX_SIZE, Defect, Size, TensorInfo

_HEADER = msgspec.json.Decoder(dict[str, TensorInfo])
_ENTRY = msgspec.json.Decoder(TensorInfo)
_METADATA = msgspec.json.Decoder(dict[str, str])
_STR = msgspec.json.Decoder(str)
_SIZES = msgspec.json.Decoder(tuple[Size, ...])
_METADATA_MEMBER = re.compile(
    rb'"__metadata__"[ \t\n\r]*+:[ \t\n\r]*+(' + jsonscan.FLAT + rb")[ \t\n\r]*+,?", re.DOTALL
)
_MINUS_ZERO = re.compile(rb"[\[,][ \t\n\r]*-0")


def decode(data: bytes, length: int) -> tuple[dict[str, TensorInfo], dict[str, str]] | None:
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


def diagnose(text: bytes, *, whole: bool) -> tuple[dict[str, TensorInfo], dict[str, str], list[Defect]]:
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
                    faults.append(Defect("duplicate-name", name, "each name once", _twice(tensors[name], info)))
                if info is not None:
                    tensors[name] = info
                defects += faults
            if len(defects) > MAX_DEFECTS:
                break
    except jsonscan.Broken as broken:
        if whole and not any(d.code == "header-json" for d in defects):
            found = f"{broken.reason} at byte {8 + broken.at}: {jsonscan.excerpt(text[broken.at : broken.at + 40])}"
            defects.append(Defect("header-json", wanted="a JSON object", found=found))
    return tensors, metadata or {}, defects


def _twice(first: TensorInfo, second: TensorInfo | None) -> str:
    if second is None or first == second:
        return "a second entry" + (", equal to the first" if second else "")
    one, other = (f"{i.dtype} {list(i.shape)} at {list(i.data_offsets)}" for i in (first, second))
    return f"first {one}, then {other}"


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
        code = "header-json" if raw.startswith(b"{") else "entry"
        return None, [Defect(code, name, "an object of dtype, shape and data_offsets", jsonscan.excerpt(raw))]
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
    return None if b"-" in raw or any(size > MAX_SIZE for size in sizes) else sizes

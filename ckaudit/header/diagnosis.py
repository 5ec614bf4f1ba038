"""The text of a header that is not sound: member by member, what can be understood, and a name for each fault of the rest."""

from __future__ import annotations

import sys
from contextlib import suppress

import msgspec
from msgspec import UNSET, UnsetType

from ckaudit import jsonscan
from ckaudit.header.model import DTYPE_BITS, MAX_FIELD, MAX_PAIRS, MAX_SIZE, Defect, TensorInfo, most_defects
from ckaudit.header.text import MINUS_ZERO, Entry, Size

_KEYS = ("dtype", "shape", "data_offsets")
_FEW = 8
"""Fields too many of one entry that are named."""


class _Loose(msgspec.Struct, gc=False):
    """The fields of an entry as text, whatever else is in it."""

    dtype: msgspec.Raw | UnsetType = UNSET
    shape: msgspec.Raw | UnsetType = UNSET
    data_offsets: msgspec.Raw | UnsetType = UNSET


_ENTRY = msgspec.json.Decoder(Entry)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LOOSE = msgspec.json.Decoder(_Loose)
_STR = msgspec.json.Decoder(str)
_SIZES = msgspec.json.Decoder(tuple[Size, ...])

Shapes = dict[tuple[int, ...], tuple[int, ...]]


def diagnose(
    data: bytes, start: int, stop: int, *, whole: bool
) -> tuple[dict[str, TensorInfo], dict[str, str], list[Defect]]:
    """Tensors, metadata and faults of the header between `start` and `stop`; `whole`: its declared end is there."""
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    defects: list[Defect] = []
    shapes: Shapes = {}
    most = most_defects(stop - start)
    try:
        for member in jsonscan.members(data, start, stop):
            name = _text(member.key)
            if name is None:
                defects.append(Defect("name", wanted="UTF-8 text", found=jsonscan.excerpt(member.key)))
            elif name == "__metadata__":
                if metadata is not None:
                    defects.append(Defect("metadata", "__metadata__", "one __metadata__", "another one"))
                metadata, faults = _metadata(member.value)
                defects += faults
            else:
                info, faults = _entry(name, member.value, shapes)
                if name in tensors:
                    faults = [*faults, Defect("duplicate-name", name, "each name once", _twice(tensors[name], info))]
                if info is not None:
                    tensors[name] = info
                defects += faults
            if len(defects) > most:
                break
    except jsonscan.Broken as broken:
        if whole and not any(d.code == "header-json" for d in defects):
            found = (
                f"{broken.reason} at byte {broken.at}: {jsonscan.excerpt(data[broken.at : min(stop, broken.at + 40)])}"
            )
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
        for count, member in enumerate(jsonscan.members(raw)):
            if count == MAX_PAIRS:
                defects.append(Defect("metadata-length", "__metadata__", f"at most {MAX_PAIRS} pairs", "more"))
                break
            key, value = _text(member.key), _text(member.value)
            if key is None or value is None:
                found = f"{jsonscan.excerpt(member.key)}: {jsonscan.excerpt(member.value)}"
                defects.append(Defect("metadata", "__metadata__", "an object of strings", found))
                continue
            if key in metadata:
                defects.append(Defect("duplicate-metadata", key, "each key once", "a second one"))
            metadata[key] = value
    except jsonscan.Broken:
        defects.append(Defect("metadata", "__metadata__", "an object of strings", jsonscan.excerpt(raw)))
    return metadata, defects


def _entry(name: str, raw: bytes, shapes: Shapes) -> tuple[TensorInfo | None, list[Defect]]:
    """One tensor entry, or as much of it as makes one, and what is wrong with it."""
    if len(raw) <= MAX_FIELD and raw.count(b'"') == 8 and not MINUS_ZERO.search(raw):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            entry = _ENTRY.decode(raw)
            return TensorInfo(entry.dtype, shapes.setdefault(entry.shape, entry.shape), *entry.data_offsets), []
    try:
        fields, defects = _fields(name, raw)
    except jsonscan.Broken:
        code = "header-json" if raw.startswith(b"{") else "entry"
        return None, [Defect(code, name, "an object of dtype, shape and data_offsets", jsonscan.excerpt(raw))]
    texts = [fields.get(key, b"none") for key in _KEYS]
    dtype = _text(texts[0]) if len(texts[0]) <= MAX_FIELD else None
    shape, offsets = _sizes(texts[1]), _sizes(texts[2])
    if dtype is None:
        defects.append(Defect("entry", name, "a dtype", jsonscan.excerpt(texts[0])))
    elif dtype not in DTYPE_BITS:
        defects.append(Defect("dtype", name, "a dtype of the format", jsonscan.excerpt(dtype.encode())))
    if shape is None:
        defects.append(Defect("entry", name, "a shape of whole numbers", jsonscan.excerpt(texts[1])))
    if offsets is None or len(offsets) != 2:
        defects.append(Defect("entry", name, "two data_offsets", jsonscan.excerpt(texts[2])))
        return None, defects
    if dtype is None or shape is None:
        return None, defects
    return TensorInfo(sys.intern(dtype), shapes.setdefault(shape, shape), *offsets), defects


def _fields(name: str, raw: bytes) -> tuple[dict[str, bytes], list[Defect]]:
    """The three fields of an entry, as far as they are there, and what is wrong with the set of its fields. Raises jsonscan.Broken."""
    if (plain := _plain_fields(raw)) is not None:
        return plain, [_extra(name, f'"{key}"'.encode()) for key in plain if key not in _KEYS][: _FEW + 1]
    fields: dict[str, bytes] = {}
    defects: list[Defect] = []
    for member in jsonscan.members(raw):
        field = _text(member.key)
        if field in fields:
            defects.append(Defect("entry", name, f"{field} once", "twice"))
        elif field in _KEYS:
            fields[field] = member.value
        else:
            defects.append(_extra(name, member.key))
        if len(defects) > _FEW:
            break
    if not any(d.code == "extra-field" for d in defects):
        return fields, defects
    try:  # what is passed over has to be JSON too; and the three may come after more of it than is worth a look
        loose = _LOOSE.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise jsonscan.Broken(0, "a field that is no JSON") from None
    return {key: bytes(found) for key in _KEYS if (found := getattr(loose, key)) is not UNSET}, defects


def _plain_fields(raw: bytes) -> dict[str, bytes] | None:
    """Every field of an entry of usual length; None where one may be there twice: that leaves more quotes than the fields account for."""
    if len(raw) > MAX_FIELD or b"\\" in raw:
        return None
    try:
        fields = {key: bytes(value) for key, value in _FIELDS.decode(raw).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    quotes = 2 * len(fields) + sum(value.count(b'"') for value in fields.values())
    return fields if raw.count(b'"') == quotes else None


def _extra(name: str, key: bytes) -> Defect:
    return Defect("extra-field", name, "dtype, shape, data_offsets", jsonscan.excerpt(key))


def _text(raw: bytes) -> str | None:
    try:
        return _STR.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _sizes(raw: bytes) -> tuple[int, ...] | None:
    try:
        sizes = _SIZES.decode(raw) if len(raw) <= MAX_FIELD else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if sizes is None or b"-" in raw or any(size > MAX_SIZE for size in sizes) else sizes

"""bytes -> Index: a strict reading of a `*.safetensors.index.json`. Pure, no I/O, never raises on bad bytes.

Format, as transformers, diffusers and vLLM read it: `{"metadata": {"total_size": BYTES}, "weight_map": {"NAME": "FILE"}}`.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import msgspec

from ckaudit import jsonscan, sniff
from ckaudit.header import Defect, most_defects

_CONFLICT = re.compile(rb"^(<{7} |={7}\r?$|>{7} )", re.MULTILINE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_WEIGHT_MAP = re.compile(rb'"weight_map"\s*:\s*(?=\{)')
_MAX_METADATA = 1_000_000
_TOO_LARGE = 2**63
_STR = msgspec.json.Decoder(str)
_MAP = msgspec.json.Decoder(dict[str, str])


class Index(msgspec.Struct, frozen=True):
    """The `*.safetensors.index.json` that says which tensor lives in which shard.

    `weight_map` holds every entry that names a plain file; the others are defects, since nothing outside the folder is ever read.
    """

    path: str
    weight_map: dict[str, str]
    total_size: int | None
    metadata: dict[str, Any]
    defects: tuple[Defect, ...] = ()

    @property
    def broken(self) -> frozenset[str]:
        """Tensor names whose entries name no file that can be read."""
        return frozenset(d.name for d in self.defects if d.name and d.code in ("index-form", "shard-name"))


def parse(path: str, data: bytes) -> Index:
    """The index in `data`, and everything that is wrong with it. `path` is only carried along."""
    defects: list[Defect] = []
    if data.startswith(b"\xef\xbb\xbf"):
        defects.append(Defect("index-json", None, "JSON", "a byte order mark before it"))
        data = data[3:]
    fields: dict[str, bytes] = {}
    at = None
    try:
        for member in jsonscan.members(data):
            key = _text(member.key)
            if key in fields:
                defects.append(Defect("index-twice", key, f"{key} once", "twice"))
            if key is not None:
                fields[key] = member.value
            if key == "weight_map":
                at = member.at
    except jsonscan.Broken as broken:
        defects.append(_not_json(data, broken.at, broken.reason))
        mark = _WEIGHT_MAP.search(data)
        at = mark.end() if mark else None
        fields.pop("weight_map", None)
    weight_map, faults = _weight_map(data, at, fields.get("weight_map"))
    metadata, more = _metadata(fields.get("metadata"))
    cut = any(fault.code == "index-json" for fault in defects)  # then what lacks is told by that alone
    defects += [fault for fault in (*faults, *more) if not cut or fault.code in ("index-duplicate", "shard-name")]
    total = metadata.get("total_size")
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if isinstance(total, bool) or not isinstance(total, int) or abs(total) >= _TOO_LARGE:
        if total is not None:
            defects.append(Defect("total-size", None, "total_size as a whole number", str(total)[:60]))
        total = None
    return Index(path, weight_map, total, metadata, tuple(defects))


def conflict(data: bytes) -> str | None:
    """Where git left a conflict in what should be JSON; None where it did not."""
    mark = _CONFLICT.search(data)
    if mark is None:
        return None
    line = data.count(b"\n", 0, mark.start()) + 1
    return f"a merge conflict that was never resolved, marker on line {line}"


def _not_json(data: bytes, at: int, reason: str) -> Defect:
    line = data.count(b"\n", 0, at) + 1
    return Defect(
        "index-json", None, "JSON", conflict(data) or sniff.not_json(data) or f"{reason} at byte {at}, line {line}"
    )


def _weight_map(data: bytes, at: int | None, raw: bytes | None) -> tuple[dict[str, str], list[Defect]]:
    """The pairs of the object at `at`, whole as `raw` or, where the index breaks, as far as it goes."""
    if at is None:
        return {}, [Defect("index-form", "weight_map", "an object of tensor names and files", "none")]
    names, defects = _string_pairs(data, at, raw)
    if not names and not defects:
        defects.append(Defect("index-empty", "weight_map", "tensor names", "an empty weight_map"))
    # `./x` is `x` to every loader that joins paths.
    names = {name: file.removeprefix("./") for name, file in names.items()}
    plain = {file: not_plain(file) for file in set(names.values())}
    for name, file in names.items():
        reason = plain[file]
        if reason is not None:
            defects.append(Defect("shard-name", name, "a plain file name", f"{file[:200]!r}: {reason}"))
    if any(plain.values()):
        names = {name: file for name, file in names.items() if plain[file] is None}
    return names, defects


def _string_pairs(data: bytes, at: int, raw: bytes | None) -> tuple[dict[str, str], list[Defect]]:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pairs = _MAP.decode(raw or b"")
        if jsonscan.count_strings(raw or b"") == 2 * len(pairs):
            return pairs, []
    names: dict[str, str] = {}
    defects: list[Defect] = []
    if data[at : at + 1] != b"{":
        return {}, [Defect("index-form", "weight_map", "an object of names and files", jsonscan.excerpt(raw or b""))]
    try:
        for member in jsonscan.members(data if raw is None else raw, at if raw is None else 0):
            key, value = _text(member.key), _text(member.value)
            if key is None or value is None:
                found = f"{jsonscan.excerpt(member.key)}: {jsonscan.excerpt(member.value)}"
                defects.append(Defect("index-form", key, "a tensor name and a file name", found))
            else:
                if key in names:
                    found = f"{names[key]} and {value}" if names[key] != value else "twice"
                    defects.append(Defect("index-duplicate", key, "each name once", found))
                names[key] = value
            if len(defects) > most_defects(len(data)):
                break
    except jsonscan.Broken as broken:
        defects.append(_not_json(data, broken.at + (0 if raw is None else at), broken.reason))
    return names, defects


def _metadata(raw: bytes | None) -> tuple[dict[str, Any], list[Defect]]:
    if raw is None:
        return {}, [Defect("index-metadata", "metadata", "an object", "none")]
    try:
        metadata = json.loads(raw.decode("utf-8")) if len(raw) <= _MAX_METADATA else None  # as loaders do: NaN passes
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        return {}, [Defect("index-metadata", "metadata", "an object", jsonscan.excerpt(raw))]
    return metadata, []


def _text(raw: bytes) -> str | None:
    try:
        return _STR.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def not_plain(file: str) -> str | None:
    """Why `file` is no name of a file in the same folder; None when it is one."""
    if not file or file in (".", ".."):
        return "no name"
    if _URL.match(file):
        return "a URL"
    if "\\" in file:
        return "a backslash"
    if file.startswith("/") or re.match(r"[A-Za-z]:", file):
        return "an absolute path"
    if ".." in file.split("/"):
        return "leaves the folder"
    if not file.isprintable():
        return "control or invisible characters"
    if len(file) > 255:
        return "longer than a file name can be"
    if not file.endswith(".safetensors"):
        return "not a .safetensors file"
    return None

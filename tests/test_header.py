"""The header parser: what it accepts, and by which name it calls each fault."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from helpers import Entries, data_size, encode, header, header_json, safetensors_file
from safetensors import SafetensorError, deserialize

from ckaudit.header import (
    DTYPE_BITS,
    MAX_HEADER,
    Defect,
    TensorInfo,
    declared_length,
    most_defects,
    needed,
    parse,
    text,
)
from ckaudit.header.text import decode

ONE: Entries = {"a": ("F32", [1])}
TWO: Entries = {"a": ("F32", [2]), "b": ("BF16", [2, 2])}
F32 = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def codes(data: bytes, size: int | None = -1) -> list[str]:
    return [d.code for d in parse(data, len(data) if size == -1 else size).defects]


def accepted(data: bytes) -> bool:
    """Whether the safetensors library takes the file."""
    try:
        deserialize(data)
    except SafetensorError:
        return False
    return True


def spoiled(change: dict[str, Any], entries: Entries = ONE) -> bytes:
    """A file whose entry `a` has these fields instead; None takes one out."""
    document = header_json(entries)
    document["a"] = {k: v for k, v in (document["a"] | change).items() if v is not ...}
    return encode(document) + bytes(data_size(entries))


def test_a_sound_header() -> None:
    data = safetensors_file({"a.weight": ("BF16", [2, 3]), "a.bias": ("F32", [])}, {"format": "pt"})
    found = parse(data, len(data))
    assert found.defects == ()
    assert found.metadata == {"format": "pt"}
    assert found.tensors == {
        "a.weight": TensorInfo("BF16", (2, 3), 0, 12),
        "a.bias": TensorInfo("F32", (), 12, 16),
    }
    assert list(found.tensors) == ["a.weight", "a.bias"]
    assert found.length == len(data) - 8 - 16
    assert found.tensors["a.weight"].nbytes == 12


SOUND = {
    "no tensors": encode("{}"),
    "metadata alone": encode('{"__metadata__":{"crc":"12"}}'),
    "zero elements, at the end": header({"a": ("F32", [1]), "scaled_fp8": ("F8_E4M3", [0])}) + bytes(4),
    "zero elements, in the middle": header({"a": ("F32", [1]), "e": ("F32", [4, 0]), "b": ("U8", [1])}) + bytes(5),
    "zero elements and a huge dimension": encode('{"a":{"dtype":"F64","shape":[18446744073709551615,0],"data_offsets":[0,0]}}'),
    "no dimension": safetensors_file({"a": ("I64", [])}),
    "sub-byte, whole bytes": safetensors_file({"a": ("F4", [2, 3]), "b": ("F6_E2M3", [4]), "c": ("F6_E3M2", [8])}),
    "metadata last": encode('{"a":' + F32 + ',"__metadata__":{"format":"pt"}}') + bytes(4),
    "metadata in the middle": encode(
        '{"a":' + F32 + ' , "__metadata__":{"k":"v\\n,{}"} ,"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}'
    ) + bytes(5),
    "metadata null": encode('{"__metadata__":null,"a":' + F32 + "}") + bytes(4),
    "metadata that holds its own name": encode('{"__metadata__":{"__metadata__":"\\"__metadata__\\":{}"},"a":' + F32 + "}") + bytes(4),
    "header in another order than the data": encode(
        '{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":' + F32 + "}"
    ) + bytes(8),
    "white space inside and after": encode('{ "a" :\n{"dtype" : "F32",\t"shape":[ 1 ],"data_offsets":[0 , 4]}\r\n}  \n') + bytes(4),
    "white space before": encode(' {"a":' + F32 + "}") + bytes(4),
    "fields in another order": encode('{"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}') + bytes(4),
    "names with escapes": encode('{"\\u0061\\n\\ud83d\\ude00\\"":{"\\u0064type":"F32","shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    "a name of control characters, escaped": encode('{"\\u0000\\u001b[31m":' + F32 + "}") + bytes(4),
    "a name that ends like an entry": encode('{"},":' + F32 + ',"b},":{"dtype":"U8","shape":[],"data_offsets":[4,5]}}') + bytes(5),
    "a name that is empty": encode('{"":' + F32 + "}") + bytes(4),
    "a name with minus zero in it": encode('{"block-01,-0":' + F32 + "}") + bytes(4),
    "a length that spells a pickle": encode('{"__metadata__":{"pad":"' + "x" * (0x0280 - 27) + '"}}'),
}  # fmt: skip


@pytest.mark.parametrize("data", SOUND.values(), ids=SOUND)
def test_sound_headers_have_no_defect_and_load(data: bytes) -> None:
    assert accepted(data)
    assert parse(data, len(data)).defects == ()
    assert set(parse(data, len(data)).tensors) == {name for name, _ in deserialize(data)}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format(dtype: str) -> None:
    data = safetensors_file({"a": (dtype, [8, 4])})
    assert accepted(data)
    assert codes(data) == []


def _long(count: int) -> bytes:
    return encode({f"t{i}": {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i in range(count)}) + bytes(
        count
    )


REJECTED: dict[str, tuple[bytes, str, str | None]] = {
    # what is wrong: file, code, tensor. The library rejects each of them.
    "no end": (encode('{"a":' + F32) + bytes(4), "header-json", None),
    "no comma": (encode('{"a":' + F32 + ' "b":' + F32 + "}") + bytes(4), "header-json", None),
    "a comma too many": (encode('{"a":' + F32 + ",}") + bytes(4), "header-json", None),
    "two documents": (encode('{"a":' + F32 + "}{}") + bytes(4), "header-json", None),
    "padded with NUL": (encode('{"a":' + F32 + "}\0\0") + bytes(4), "header-json", None),
    "a key that is no string": (encode("{a:" + F32 + "}") + bytes(4), "header-json", None),
    "raw control character in a name": (encode('{"a\nb":' + F32 + "}") + bytes(4), "header-json", None),
    "brackets without end": (encode('{"a":' + "[" * 100_000), "header-json", None),
    "bad UTF-8": (encode(b'{"\xff":' + F32.encode() + b"}") + bytes(4), "name", None),
    "UTF-8 of a surrogate": (encode(b'{"\xed\xa0\x80":' + F32.encode() + b"}") + bytes(4), "name", None),
    "lone surrogate": (encode('{"\\ud800":' + F32 + "}") + bytes(4), "name", None),
    "unknown dtype": (spoiled({"dtype": "F9"}), "dtype", "a"),
    "dtype in torch's words": (spoiled({"dtype": "torch.float32"}), "dtype", "a"),
    "dtype null": (spoiled({"dtype": None}), "entry", "a"),
    "no dtype": (spoiled({"dtype": ...}), "entry", "a"),
    "no shape": (spoiled({"shape": ...}), "entry", "a"),
    "shape null": (spoiled({"shape": None}), "entry", "a"),
    "shape an object": (spoiled({"shape": {}}), "entry", "a"),
    "shape of fractions": (spoiled({"shape": [1.0]}), "entry", "a"),
    "shape of text": (spoiled({"shape": ["1"]}), "entry", "a"),
    "shape of truth": (spoiled({"shape": [True]}), "entry", "a"),
    "negative shape": (spoiled({"shape": [-1]}), "entry", "a"),
    "two negative dimensions": (spoiled({"shape": [-1, -1]}), "entry", "a"),
    "dimension beyond 64 bits": (spoiled({"shape": [2**64, 0], "data_offsets": [0, 0]}, {"a": ("U8", [0])}), "overflow", "a"),
    "no offsets": (spoiled({"data_offsets": ...}), "entry", "a"),
    "one offset": (spoiled({"data_offsets": [4]}), "entry", "a"),
    "three offsets": (spoiled({"data_offsets": [0, 4, 4]}), "entry", "a"),
    "negative offset": (spoiled({"data_offsets": [-4, 0]}), "entry", "a"),
    "offset minus zero": (encode('{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}') + bytes(4), "entry", "a"),
    "offset 4e0": (encode('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4e0]}}') + bytes(4), "entry", "a"),
    "leading zero": (encode('{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}') + bytes(4), "entry", "a"),
    "a field twice": (encode('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}') + bytes(4), "entry", "a"),
    "an entry that is a number": (encode('{"a":1}'), "entry", "a"),
    "an entry that is null": (encode('{"a":null}'), "entry", "a"),
    "offsets backwards": (spoiled({"data_offsets": [4, 0]}), "offsets", "a"),
    "product beyond 64 bits": (spoiled({"shape": [2**63, 2, 0], "data_offsets": [0, 0]}, {"a": ("U8", [0])}), "overflow", "a"),
    "too few bytes for the shape": (spoiled({"shape": [1000, 1000]}), "shape", "a"),
    "too many bytes for the shape": (spoiled({"dtype": "U8"}), "shape", "a"),
    "zero elements, some bytes": (spoiled({"shape": [0]}), "shape", "a"),
    "F4 on half a byte": (spoiled({"dtype": "F4", "shape": [7]}), "sub-byte", "a"),
    "F6 on half a byte": (spoiled({"dtype": "F6_E2M3", "shape": [5]}), "sub-byte", "a"),
    "first offset not 0": (spoiled({"data_offsets": [4, 8]}) + bytes(4), "hole", "a"),
    "a hole": (encode(header_json(TWO) | {"b": {"dtype": "U8", "shape": [7], "data_offsets": [9, 16]}}) + bytes(16), "hole", "b"),
    "an overlap": (encode(header_json(TWO) | {"b": {"dtype": "U8", "shape": [12], "data_offsets": [4, 16]}}) + bytes(16), "overlap", "b"),
    "the same place twice": (encode('{"a":' + F32 + ',"b":' + F32 + "}") + bytes(4), "overlap", "b"),
    "cut": (safetensors_file(TWO)[:-1], "data-truncated", None),
    "cut to the header": (header(TWO), "data-truncated", None),
    "cut in the header": (safetensors_file(TWO)[:60], "header-truncated", None),
    "a byte too many": (safetensors_file(TWO) + b"x", "trailing-bytes", None),
    "bytes behind no tensors": (encode("{}") + b"x", "trailing-bytes", None),
    "a field more that is no JSON": (encode('{"a":' + F32[:-1] + ',"x":nope}}') + bytes(4), "header-json", "a"),
    "a comma after the metadata": (encode('{"__metadata__":{},}'), "header-json", None),
    "no comma after the metadata": (encode('{"__metadata__":{}"a":' + F32 + "}") + bytes(4), "header-json", None),
    "metadata of numbers": (encode('{"__metadata__":{"a":1},"a":' + F32 + "}") + bytes(4), "metadata", "__metadata__"),
    "metadata nested": (encode('{"__metadata__":{"a":{"b":"c"}},"a":' + F32 + "}") + bytes(4), "metadata", "__metadata__"),
    "metadata a list": (encode('{"__metadata__":[],"a":' + F32 + "}") + bytes(4), "metadata", "__metadata__"),
    "metadata twice": (encode('{"__metadata__":{"a":"b"},"__metadata__":{},"a":' + F32 + "}") + bytes(4), "metadata", "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "code", "name"), REJECTED.values(), ids=REJECTED)
def test_what_the_library_rejects_has_one_defect(data: bytes, code: str, name: str | None) -> None:
    assert not accepted(data)
    found = parse(data, len(data)).defects
    assert [(d.code, d.name) for d in found] == [(code, name)]


STRICTER: dict[str, tuple[bytes, str, str]] = {
    # What the library takes, though nobody can mean it.
    "a name twice, equal": (encode('{"a":' + F32 + ',"a":' + F32 + "}") + bytes(4), "duplicate-name", "a"),
    "a name twice, unlike": (
        encode('{"a":' + F32 + ',"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}}') + bytes(4), "duplicate-name", "a",
    ),
    "a name twice, spelt two ways": (encode('{"a":' + F32 + ',"\\u0061":' + F32 + "}") + bytes(4), "duplicate-name", "a"),
    "a metadata key twice": (
        encode('{"__metadata__":{"k":"v","k":"w"},"a":' + F32 + "}") + bytes(4), "duplicate-metadata", "k",
    ),
    "a field more": (spoiled({"strides": [1]}), "extra-field", "a"),
    "an object as a field more": (spoiled({"__metadata__": {}}), "extra-field", "a"),
    "an entry as a list": (encode('{"a":["F32",[1],[0,4]]}') + bytes(4), "entry", "a"),
    "dtype as an object": (spoiled({"dtype": {"F32": None}}), "entry", "a"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "code", "name"), STRICTER.values(), ids=STRICTER)
def test_where_it_is_stricter_than_the_library(data: bytes, code: str, name: str) -> None:
    assert accepted(data)
    found = parse(data, len(data)).defects
    assert [(d.code, d.name) for d in found] == [(code, name)]


def test_a_twice_named_tensor_is_read_as_readers_read_it() -> None:
    data = STRICTER["a name twice, unlike"][0]
    ((_, stock),) = deserialize(data)
    assert parse(data, len(data)).tensors["a"].dtype == stock["dtype"]


def test_what_can_be_understood_is_kept() -> None:
    document = header_json({"a": ("F32", [1]), "b": ("F32", [1]), "c": ("F32", [1]), "d": ("F32", [1])})
    document["b"]["shape"] = None
    document["c"]["dtype"] = "F9"
    data = encode(document) + bytes(16)
    found = parse(data, len(data))
    assert list(found.tensors) == ["a", "c", "d"]
    assert found.tensors["c"].dtype == "F9"
    # The place of `b` is not known to be empty, so it is not called a hole.
    assert [(d.code, d.name) for d in found.defects] == [("entry", "b"), ("dtype", "c")]


def test_names_before_the_break_are_kept() -> None:
    data = encode('{"a":' + F32 + ',"b":{"dtype":"F32","sha')
    found = parse(data, len(data))
    assert list(found.tensors) == ["a"]
    assert [d.code for d in found.defects] == ["header-json", "data-truncated"]
    cut = safetensors_file({f"layers.{i}.weight": ("F32", [1]) for i in range(50)})[:1000]
    assert 5 < len(parse(cut, len(cut)).tensors) < 50


def test_the_size_of_the_file_decides_about_its_end() -> None:
    data = header(TWO)
    assert codes(data, len(data) + 16) == []
    assert codes(data, len(data) + 15) == ["data-truncated"]
    assert codes(data, len(data) + 17) == ["trailing-bytes"]
    assert codes(data, None) == []


def test_the_number_of_missing_bytes_is_told() -> None:
    data = safetensors_file(TWO)
    (defect,) = parse(data, len(data) - 3).defects
    assert defect == Defect("data-truncated", None, "16 bytes of data", "13 bytes: 3 are missing")


def test_offsets_without_a_file_size_stay_below_64_bits() -> None:
    data = encode('{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}')
    assert codes(data, None) == ["overflow"]  # 2**64-1 bytes are more than 2**64 bits


def test_a_header_over_the_cap_is_still_read() -> None:
    text = b'{"a":' + F32.encode() + b"}"
    data = encode(text + b" " * (MAX_HEADER + 1 - len(text))) + bytes(4)
    assert not accepted(data)
    found = parse(data, len(data))
    assert [d.code for d in found.defects] == ["header-over-cap"]
    assert list(found.tensors) == ["a"]
    assert codes(encode(text + b" " * (MAX_HEADER - len(text))) + bytes(4)) == []


def test_a_length_beyond_the_file_is_no_reason_to_read_on() -> None:
    data = (2**39).to_bytes(8, "little") + b'{"a":' + F32.encode() + b"}" + bytes(4)
    assert codes(data) == ["header-truncated"]
    assert needed(data, len(data)) <= len(data)


def test_how_much_is_needed() -> None:
    data = safetensors_file(TWO)
    length = declared_length(data)
    assert length is not None
    assert needed(data[:20], len(data)) == 8 + length
    assert needed(data[:20], None) == 8 + length
    assert needed(data[:20], 30) == 30
    assert needed(b"version https://git-lfs.github.com/spec/v1\n", 134) == 0
    assert declared_length(b"1234567") is None


def test_defects_are_counted_to_a_limit() -> None:
    many = encode("{" + ",".join(f'"{i}":0' for i in range(100_050)) + "}")
    found = parse(many, len(many))
    assert len(found.defects) == most_defects(found.length) + 1
    assert found.defects[-1].code == "more-defects"


def test_fast_and_slow_path_agree() -> None:
    data = _long(300)
    length = declared_length(data)
    assert length is not None
    fast = decode(data, length)
    assert fast is not None, "a sound header must take the fast path"
    # A field that readers ignore sends the header down the slow path.
    text = data[8 : 8 + length].decode().rstrip()
    slow = encode(text[:-2] + ',"x":0}}') + bytes(300)
    found = parse(slow, len(slow))
    assert [d.code for d in found.defects] == ["extra-field"]
    assert found.tensors == fast[0]


def test_entries_are_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header is cut between any two of its entries, and a name that reads like such a place changes nothing."""
    monkeypatch.setattr(text, "_PIECE", 1)
    for data in (_long(30), *SOUND.values()):
        length = declared_length(data)
        assert length is not None
        found, whole = parse(data, len(data)), json.loads(data[8 : 8 + length])
        whole.pop("__metadata__", None)
        assert found.defects == ()
        assert {n: (t.dtype, list(t.shape), list(t.data_offsets)) for n, t in found.tensors.items()} == {
            n: (t["dtype"], t["shape"], t["data_offsets"]) for n, t in whole.items()
        }
    assert decode(_long(30), len(_long(30)) - 38) is not None, "thirty pieces are no reason for the slow path"
    twice = encode('{"a":' + F32 + ',"b":' + F32.replace("0,4", "4,8") + ',"a":' + F32 + "}") + bytes(8)
    assert "duplicate-name" in codes(twice), "also where the two are in different pieces"


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    parse(safetensors_file(TWO), None)
    assert gc.isenabled()
    gc.disable()
    try:
        parse(safetensors_file(TWO), None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_helpers_make_what_the_library_reads() -> None:
    found = dict(deserialize(safetensors_file({"a": ("BF16", [2, 3])}, {"format": "pt"})))
    assert found["a"]["shape"] == [2, 3]
    assert found["a"]["dtype"] == "BF16"
    assert json.loads(header(TWO)[8:])["b"]["data_offsets"] == [8, 16]

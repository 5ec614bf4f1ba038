"""The index parser: what it keeps and what it reports."""

from __future__ import annotations

import json

import pytest
from helpers import index_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckaudit.index import not_plain, parse

MAP = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def codes(data: bytes | str) -> list[str]:
    return [d.code for d in parse("i.json", data if isinstance(data, bytes) else data.encode()).defects]


def test_a_sound_index() -> None:
    found = parse("model.safetensors.index.json", index_file(MAP, 16))
    assert found.weight_map == MAP
    assert found.total_size == 16
    assert found.metadata == {"total_size": 16}
    assert found.defects == ()


@pytest.mark.parametrize(
    "data",
    [
        index_file(MAP, 16).replace(b"\n", b"\r\n"),
        index_file(MAP, None),  # no total_size: as mflux writes
        index_file(MAP, 16, total_parameters=8, quantization_level="4"),
        json.dumps({"_note": "x", "weight_map": MAP, "metadata": {"total_size": 16.0}}).encode(),
        index_file({'a\\b\n"c': "model.safetensors"}, 1),
    ],
)
def test_what_is_harmless(data: bytes) -> None:
    found = parse("i.json", data)
    assert found.defects == ()
    assert len(found.weight_map) in (1, 2)


def test_a_fraction_without_fraction_is_a_size() -> None:
    assert (
        parse("i.json", json.dumps({"metadata": {"total_size": 2.5e9}, "weight_map": MAP}).encode()).total_size
        == 2_500_000_000
    )


@pytest.mark.parametrize("size", ["16", True, 1.5, [1], 10**400, float("nan"), float("-inf")])
def test_total_size_of_the_wrong_kind(size: object) -> None:
    found = parse("i.json", json.dumps({"metadata": {"total_size": size}, "weight_map": MAP}).encode())
    assert [d.code for d in found.defects] == ["total-size"]
    assert found.total_size is None


def test_a_merge_conflict_is_called_one_and_read_to_the_mark() -> None:
    one, other = index_file(MAP, 16), index_file({"c": "model.safetensors"}, 8)
    for data in (
        one + b"\n=======\n" + other,
        b"<<<<<<< HEAD\n" + one + b"\n=======\n" + other + b"\n>>>>>>> 3b1c622 (fix)\n",
        one.replace(b'"b"', b'\n<<<<<<< HEAD\n"b"'),
    ):
        found = parse("i.json", data)
        assert [d.code for d in found.defects][:1] == ["index-json"]
        assert "merge conflict" in found.defects[0].found
        assert len(found.defects) == 1
        assert found.weight_map.items() <= MAP.items()
        assert "a" in found.weight_map


def test_a_line_of_equals_signs_inside_a_string_is_no_conflict() -> None:
    data = index_file({"=======": "model.safetensors"}, 1)
    assert codes(data) == []
    broken = data.replace(b'"weight_map"', b'"weight_map')
    assert "merge" not in parse("i.json", broken).defects[0].found


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "LFS pointer"),
        (b"<html><body>404", "HTML"),
        (index_file(MAP, 16)[:-20], "line"),
        (b"\xef\xbb\xbf" + index_file(MAP, 16), "byte order mark"),
        (index_file(MAP, 16) + b"}", "follows"),
    ],
)
def test_what_is_not_json(data: bytes, found: str) -> None:
    index = parse("i.json", data)
    assert index.defects[0].code == "index-json"
    assert found in index.defects[0].found


def test_what_stands_before_a_break_is_kept() -> None:
    assert parse("i.json", b"\xef\xbb\xbf" + index_file(MAP, 16)).weight_map == MAP
    assert parse("i.json", index_file(MAP, 16) + b"}").weight_map == MAP
    assert parse("i.json", index_file(MAP, 16)[:-20]).weight_map == {"a": MAP["a"]}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ('{"metadata": {}}', "index-form"),
        ('{"metadata": {}, "weight_map": []}', "index-form"),
        ('{"metadata": {}, "weight_map": {"a": 1}}', "index-form"),
        ('{"metadata": {}, "weight_map": {"a": null}}', "index-form"),
        ('{"metadata": {}, "weight_map": {}}', "index-empty"),
        ('{"weight_map": {"a": "m.safetensors"}}', "index-metadata"),
        ('{"metadata": null, "weight_map": {"a": "m.safetensors"}}', "index-metadata"),
        ('{"metadata": {}, "weight_map": {"a": "m.safetensors"}, "weight_map": {"b": "n.safetensors"}}', "index-twice"),
        ('{"metadata": {}, "weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}', "index-duplicate"),
        ('{"metadata": {}, "weight_map": {"\\ud800": "m.safetensors"}}', "index-form"),
        ("[]", "index-json"),
    ],
)
def test_one_fault_has_one_defect(data: str, code: str) -> None:
    assert codes(data)[:1] == [code]


def test_of_two_entries_the_last_counts_as_for_every_json_reader() -> None:
    text = '{"metadata": {}, "weight_map": {"a": "m.safetensors", "b": "m.safetensors", "a": "n.safetensors"}}'
    found = parse("i.json", text.encode())
    assert found.weight_map == json.loads(text)["weight_map"]
    assert [(d.name, d.found) for d in found.defects] == [("a", "m.safetensors and n.safetensors")]


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors", "a/../../x.safetensors", "/etc/x.safetensors", "C:x.safetensors", "C:\\x.safetensors", "..\\x.safetensors",
        "https://host/x.safetensors", "file:///x.safetensors", "", "..", "x\n.safetensors", "x\x1b[2J.safetensors", "x\0.safetensors",
        "x\u202e.safetensors", "model.bin", "a" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_what_is_no_plain_file_is_never_a_shard(file: str) -> None:
    assert not_plain(file) is not None
    found = parse("i.json", index_file({"a": file, "b": "model.safetensors"}, 1))
    assert found.weight_map == {"b": "model.safetensors"}
    assert [(d.code, d.name) for d in found.defects] == [("shard-name", "a")]


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "model-00001-of-micro.safetensors",
        "model..x.safetensors",
        "übung.safetensors",
        "a/x.safetensors",
    ],
)
def test_plain_files(file: str) -> None:
    assert not_plain(file) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(lambda t: ('{"weight_map":{' + t + "}}").encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_data(data: bytes) -> None:
    found = parse("i.json", data)
    assert found.defects or found.weight_map


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
        st.sampled_from(["a.safetensors", "b.safetensors"]),
        min_size=1,
    )
)
def test_what_json_reads_is_read(weight_map: dict[str, str]) -> None:
    found = parse("i.json", index_file(weight_map, 5))
    assert found.weight_map == weight_map
    assert found.defects == ()


def test_a_shard_named_by_its_own_folder_is_the_shard() -> None:
    """`os.path.join(folder, "./x")` opens x: the real loader does, so no finding may say otherwise."""
    index = parse(
        "i.json", b'{"metadata": {"total_size": 4}, "weight_map": {"a": "./model-00001-of-00001.safetensors"}}'
    )
    assert index.weight_map == {"a": "model-00001-of-00001.safetensors"}
    assert not index.defects

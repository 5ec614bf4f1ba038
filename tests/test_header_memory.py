"""How much memory a header takes: for many tensors, and for headers that nobody wrote in good faith."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from helpers import encode

from ckaudit.header import Header, most_defects, parse

LIMIT = 4
"""Times the length of the header, its own bytes included."""
A_PIECE = 3_000_000
"""Bytes that one piece of the text becomes while it is decoded, whatever the header's length."""


def experts(count: int) -> str:
    """`count` tensors as a mixture of experts names them."""
    names = (
        f"model.layers.{i // 1152}.mlp.experts.{i // 3 % 384}.{('gate', 'up', 'down')[i % 3]}_proj.weight"
        for i in range(count)
    )
    entries = (
        f'"{name}":{{"dtype":"BF16","shape":[64,128],"data_offsets":[{16384 * i},{16384 * (i + 1)}]}}' for i, name in enumerate(names)
    )  # fmt: skip
    return '{"__metadata__":{"format":"pt"},' + ",".join(entries) + "}"


def entries(count: int, *, name: str = "t%d", dtype: str = "U8", more: str = "") -> str:
    """`count` entries as short as they get."""
    row = f'"{name}":{{"dtype":"{dtype}","shape":[1],"data_offsets":[%d,%d]{more}}}'
    return "{" + ",".join(row % (i, i, i + 1) for i in range(count)) + "}"


def weighed(text: str) -> tuple[Header, float]:
    """What is read, and the peak of memory on the way, the header's bytes included, as a multiple of them."""
    data = encode(text)
    del text
    tracemalloc.start()
    try:
        found = parse(data, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return found, 1 + max(0, peak - A_PIECE) / len(data)


def test_many_tensors_take_no_more_than_four_times_their_header() -> None:
    found, times = weighed(experts(200_000))
    assert found.defects == ()
    assert len(found.tensors) == 200_000
    assert times < LIMIT


SOUND = {
    "names of six letters": lambda: entries(50_000),
    "names in escapes": lambda: entries(50_000, name=r"\u0074%d"),
    "one long name": lambda: entries(1, name="x" * 4_000_000 + "%d"),
    "a long text in the metadata": lambda: '{"__metadata__":{"notes":"' + "x" * 4_000_000 + '"}}',
}


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_unusual_headers(text: Callable[[], str]) -> None:
    found, times = weighed(text())
    assert found.defects == ()
    assert times < LIMIT


ENTRY = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
HOSTILE = {
    "a field more in each entry": (lambda: entries(10_000, more=',"x":1'), "extra-field", 10_000),
    "a nested field more in each entry": (lambda: entries(10_000, more=',"x":{"y":[{"z":[]}]}'), "extra-field", 10_000),
    "a million fields more in one": (
        lambda: '{"a":{' + "".join(f'"x{i}":1,' for i in range(400_000)) + ENTRY + "}}", "extra-field", 9,
    ),
    "a long field more": (lambda: '{"a":{' + ENTRY + ',"x":"' + "y" * 4_000_000 + '"}}', "extra-field", 1),
    "an array more": (lambda: '{"a":{' + ENTRY + ',"x":[' + "1," * 2_000_000 + "1]}}", "extra-field", 1),
    "entries that are arrays": (lambda: "{" + ",".join(f'"{i}":[]' for i in range(20_000)) + "}", "entry", 20_000),
    "an array of arrays": (lambda: '{"a":[' + "[]," * 1_000_000 + "[]]}", "header-json", 1),
    "arrays in arrays": (lambda: '{"a":' + "[" * 2_000_000 + "]" * 2_000_000 + "}", "header-json", 1),
    "a number of four million digits": (lambda: '{"a":{' + ENTRY.replace("[1]", f"[{'1' * 4_000_000}]") + "}}", "entry", 1),
    "two million dimensions": (lambda: '{"a":{' + ENTRY.replace("[1]", f"[{'1,' * 2_000_000}1]") + "}}", "entry", 1),
    "a long dtype": (lambda: '{"a":{' + ENTRY.replace("F32", "F" * 4_000_000) + "}}", "entry", 1),
    "unknown dtypes": (lambda: entries(10_000, dtype="Q8"), "dtype", 10_000),
    "pairs of metadata": (
        lambda: '{"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(200_000)) + "}}", "metadata-length", 1,
    ),
    "numbers in the metadata": (
        lambda: '{"__metadata__":{' + ",".join(f'"{i:x}":1' for i in range(200_000)) + "}}", "metadata", 10_000,
    ),
    "one name for all": (lambda: "{" + ",".join('"a":{' + ENTRY + "}" for _ in range(20_000)) + "}", "duplicate-name", 19_999),
}  # fmt: skip


@pytest.mark.parametrize(("text", "code", "count"), HOSTILE.values(), ids=HOSTILE)
def test_bombs(text: Callable[[], str], code: str, count: int) -> None:
    found, times = weighed(text())
    listed = min(count, most_defects(found.length))
    assert [d.code for d in found.defects].count(code) == listed
    assert [d.code for d in found.defects].count("more-defects") == int(listed < count)
    assert times < LIMIT


def test_what_follows_many_fields_more_is_still_read() -> None:
    """The library takes such an entry, so it is one, wherever its three fields stand among others."""
    found = parse(encode('{"a":{' + "".join(f'"x{i}":[1],' for i in range(50)) + ENTRY + "}}"), None)
    assert {d.code for d in found.defects} == {"extra-field"}
    assert found.tensors["a"].data_offsets == (0, 4)

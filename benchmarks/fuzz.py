"""Coverage-guided fuzzing of the header and the index parser: no input may raise, hang, or be judged otherwise than by safetensors.

Needs atheris (`pip install atheris`), which the test suite does not. `python benchmarks/fuzz.py -runs=1000000` starts from a few sound
files; other arguments are libFuzzer's: `-max_len=`, `-timeout=` (seconds for one input), `-rss_limit_mb=`, a folder to keep inputs in.
An input that fails is written to `crash-*`, and given as an argument it is run alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckaudit"]):
    from ckaudit import index
    from ckaudit.header import parse

from safetensors import SafetensorError, deserialize

STRICTER = {"duplicate-name", "duplicate-metadata", "extra-field"}
"""What the library takes and the parser reports on purpose; `entry` too, where an entry is a list or a dtype an object."""

WORDS = (
    '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"F32"', '"F4"', '"BF16"', "[]", "[0,4]", "{}", "null", "-0", "1e1", "true",
    '"weight_map"', '"metadata"', '"total_size"', "model.safetensors", "../", "\\\\u0061", "\\\\ud800", "18446744073709551616",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Sound inputs, by kind (their first byte): a header's text, a whole file, an index."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    texts = [
        json.dumps({"a": entry}),
        json.dumps(
            {"__metadata__": {"format": "pt"}, "a": entry, "b\n": entry | {"data_offsets": [4, 8]}},
            separators=(",", ":"),
        ),
        json.dumps({"a": {"dtype": "F4", "shape": [2, 0], "data_offsets": [0, 0]}, "__metadata__": {}}),
    ]
    whole = [len(t).to_bytes(8, "little") + t.encode() + bytes(8) for t in texts]
    indexes = [json.dumps({"metadata": {"total_size": 4}, "weight_map": {"a": "model-00001-of-00002.safetensors"}})]
    return (
        [b"\0\4" + t.encode() for t in texts] + [b"\1\0" + w for w in whole] + [b"\2\0" + i.encode() for i in indexes]
    )


def test_one(data: bytes) -> None:
    if len(data) < 2:
        return
    kind, amount, text = data[0] % 3, data[1], data[2:]
    if kind == 2:
        found = index.parse("model.safetensors.index.json", text)
        assert all(index.not_plain(file) is None for file in found.weight_map.values())
        return
    file = text if kind == 1 else len(text).to_bytes(8, "little") + text + bytes(amount)
    header = parse(file, len(file))
    codes = {d.code for d in header.defects}
    for name in header.tensors:
        name.encode()  # no lone surrogate gets through
    try:
        stock = {name: (t["dtype"], t["shape"]) for name, t in deserialize(file)}
    except SafetensorError:
        assert codes - STRICTER, "the library refuses this, and no defect says why"
        return
    if codes <= STRICTER:
        assert {n: (t.dtype, list(t.shape)) for n, t in header.tensors.items()} == stock
    else:
        assert codes - STRICTER == {"entry"}, codes
        assert any(mark in d.found for d in header.defects for mark in "[{")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "seeds")
        start.mkdir()
        for number, seed in enumerate(seeds()):
            (start / str(number)).write_bytes(seed)
        words = Path(folder, "words")
        words.write_text("".join(f'"{w.replace(chr(34), chr(92) + chr(34))}"\n' for w in WORDS))
        given = sys.argv[1:]
        alone = any(Path(a).is_file() for a in given)
        defaults = [] if alone else ["-max_len=400", "-timeout=10", f"-dict={words}"]
        atheris.Setup([sys.argv[0], *defaults, *given, *([] if alone else [str(start)])], test_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Coverage-guided fuzzing of the header and the index parser: no input may raise, hang, or be judged otherwise than by safetensors.

Needs atheris (`pip install atheris`), which the test suite does not. `python benchmarks/fuzz.py -runs=1000000` starts from a few sound
files; other arguments are libFuzzer's: `-max_len=`, `-timeout=` (seconds for one input), `-rss_limit_mb=`, a folder to keep inputs in.
An input that fails is written to `crash-*`, and given as an argument it is run alone.

The last line is a record of the run as JSON: inputs, seconds, crashes, the slowest input, and the worst memory in multiples of the input.
Memory is measured of every 10,000th input, its entries repeated until they are 2 MB: of 400 bytes a constant would be all there is to see.
`--record FILE` appends that line to a file.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckaudit"]):
    from ckaudit import index
    from ckaudit.header import parse

from safetensors import SafetensorError, deserialize

from ckaudit import __version__

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


def check(data: bytes) -> None:
    """Raises where an input is judged otherwise than it should be."""
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


FIELDS = ("inputs", "seconds_of_slowest", "bytes_of_slowest", "memory", "bytes_of_memory")
EVERY, LARGE = 10_000, 2_000_000


class Record:
    """Numbers of a run in a file that outlives the process: libFuzzer ends it without a word to Python."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.numbers = memoryview(mmap.mmap(file.fileno(), 8 * len(FIELDS))).cast("d")

    def run(self, data: bytes) -> None:
        """One input, timed, and every so often its memory at size."""
        numbers = self.numbers
        start = time.perf_counter()
        check(data)
        seconds = time.perf_counter() - start
        numbers[0] += 1
        if seconds > numbers[1]:
            numbers[1], numbers[2] = seconds, len(data)
        if numbers[0] % EVERY == 0 and len(data) > 4:
            self._weigh(data)

    def _weigh(self, data: bytes) -> None:
        """The peak of one parse of `data` grown large, over its length."""
        inner = data[2:].strip()[1:-1] or b" "
        text = b"{" + b",".join([inner] * (LARGE // (len(inner) + 1))) + b"}"
        file = len(text).to_bytes(8, "little") + text
        tracemalloc.start()
        if data[0] % 3 == 2:
            index.parse("model.safetensors.index.json", text)
        else:
            parse(file, len(file))
        ratio = tracemalloc.get_traced_memory()[1] / len(file)
        tracemalloc.stop()
        if ratio > self.numbers[3]:
            self.numbers[3], self.numbers[4] = ratio, len(file)


def main() -> None:
    """The parent starts a child that fuzzes, and tells what it did."""
    given = sys.argv[1:]
    if "CKAUDIT_FUZZ" in os.environ:
        fuzz(given, Record(os.environ["CKAUDIT_FUZZ"]))
    keep = None
    if "--record" in given:
        place = given.index("--record")
        keep = Path(given[place + 1])
        given[place : place + 2] = []
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8 * len(FIELDS)))
        file.flush()
        before = set(Path.cwd().glob("crash-*")) | set(Path.cwd().glob("timeout-*")) | set(Path.cwd().glob("oom-*"))
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, __file__, *given], env=os.environ | {"CKAUDIT_FUZZ": file.name}, check=False
        )
        seconds = time.perf_counter() - start
        after = {p for kind in ("crash", "timeout", "oom") for p in Path.cwd().glob(f"{kind}-*")}
        numbers = dict(zip(FIELDS, memoryview(Path(file.name).read_bytes()).cast("d"), strict=True))
    line = json.dumps(
        {
            "inputs": int(numbers["inputs"]), "seconds": round(seconds, 1), "crashes": len(after - before), "exit": done.returncode,
            "slowest": {"seconds": round(numbers["seconds_of_slowest"], 4), "bytes": int(numbers["bytes_of_slowest"])},
            "memory": {"times_the_input": round(numbers["memory"], 2), "bytes": int(numbers["bytes_of_memory"])},
            "ckaudit": __version__, "python": platform.python_version(),
        }
    )  # fmt: skip
    print(line, flush=True)
    if keep is not None:
        with keep.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    raise SystemExit(done.returncode)


def fuzz(given: list[str], record: Record) -> None:
    """Does not return: libFuzzer ends the process."""
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "seeds")
        start.mkdir()
        for number, seed in enumerate(seeds()):
            (start / str(number)).write_bytes(seed)
        words = Path(folder, "words")
        words.write_text("".join(f'"{w.replace(chr(34), chr(92) + chr(34))}"\n' for w in WORDS))
        alone = any(Path(a).is_file() for a in given)
        defaults = [] if alone else ["-max_len=400", "-timeout=100", f"-dict={words}"]
        atheris.Setup([sys.argv[0], *defaults, *given, *([] if alone else [str(start)])], record.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

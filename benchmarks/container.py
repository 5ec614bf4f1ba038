"""Audits the container of one safetensors file of 500,000 tensors, every check on, beside `safetensors.safe_open(path, "pt").keys()`.

Each run is a fresh process, from the start of Python to the last finding, the two in turns; time is the parent's clock, memory the peak
resident set of that process. The file is sparse: a header of 60 MB before 8 GB of nothing. `python benchmarks/container.py [--runs 5]`.

Beside the sound file, in its order, ours alone also reads what costs it most: the same file with its header in another order than its
data, and with one name twice, which goes through the slow path.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

STOCK = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    print(len(file.keys()))
"""

OURS = """
import sys
from ckaudit.checkpoint import read_checkpoint
from ckaudit.checks import container
from ckaudit.source import open_source
checkpoint = read_checkpoint(open_source(sys.argv[1]))
findings, skips = container.run(checkpoint)
print(len(checkpoint.tensors), *[f.check for f in findings if f.severity == "error"])
"""


class Run(NamedTuple):
    seconds: float
    megabytes: float
    said: str


def names(count: int) -> list[str]:
    """Names as of a mixture of 384 experts a layer."""
    found: list[str] = []
    layer = 0
    while len(found) < count:
        at = f"model.layers.{layer}."
        found += [f"{at}input_layernorm.weight", f"{at}post_attention_layernorm.weight"]
        found += [f"{at}mlp.experts.{e}.{p}_proj.weight" for e in range(384) for p in ("gate", "up", "down")]
        layer += 1
    return found[:count]


def write(path: Path, count: int, *, shuffled: bool = False, twice: bool = False) -> int:
    """A sound sparse file of `count` tensors, or one whose header spoils its reader's day; the header's length in bytes."""
    entries, at = [], 0
    for name in names(count):
        shape = [64] if "norm" in name else [64, 128]
        end = at + 2 * 64 * (128 if len(shape) == 2 else 1)
        entries.append(
            f'"{name}":'
            + json.dumps({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}, separators=(",", ":"))
        )
        at = end
    if shuffled:
        entries.sort()
    if twice:
        entries.append(entries[-1])
    header = ('{"__metadata__":{"format":"pt"},' + ",".join(entries) + "}").encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    return len(header)


def run(code: str, path: Path) -> Run:
    begin = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.read().strip()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"a run ended with {child.returncode}")
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return Run(seconds, usage.ru_maxrss / scale, said)


def told(label: str, runs: list[Run]) -> tuple[float, float]:
    seconds = sorted(r.seconds for r in runs)
    megabytes = statistics.median(r.megabytes for r in runs)
    median = statistics.median(seconds)
    print(
        f"{label:44} {median:6.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})  {megabytes:6.0f} MB  says {runs[-1].said}"
    )
    return median, megabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=500_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sound, shuffled, twice = (Path(folder, f"{n}.safetensors") for n in ("sound", "shuffled", "twice"))
        length = write(sound, options.tensors)
        write(shuffled, options.tensors, shuffled=True)
        write(twice, options.tensors, twice=True)
        print(f"{options.tensors:,} tensors, header of {length:,} bytes, {options.runs} runs each, medians")
        stock, ours = [], []
        for _ in range(options.runs):
            stock.append(run(STOCK, sound))
            ours.append(run(OURS, sound))
        base = told('safetensors.safe_open(path, "pt").keys()', stock)
        mine = told("ckaudit, container audit", ours)
        print(f"time {mine[0] / base[0]:.2f}x, memory {mine[1] / base[1]:.2f}x of safe_open")
        told("ckaudit, header not in the order of its data", [run(OURS, shuffled)])
        told("ckaudit, a name twice", [run(OURS, twice)])


if __name__ == "__main__":
    main()

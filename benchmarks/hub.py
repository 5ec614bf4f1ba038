"""Reads every header of a sharded Hub repo: ckaudit beside `huggingface_hub.get_safetensors_metadata`, in turns, on one loopback server.

The server is a process of its own and holds every request back for the same time, for both. Each run is a fresh process with an empty
cache; imports and the client's session are made before the clock starts, connections after. Run it alone: `python benchmarks/hub.py`.

The floor: a round trip for the listing, then everything else in full rounds, 1 + ceil((shards + small files) / jobs). The
client reads with min(32, cores + 4) threads, after four requests one by one, so its floor, and the ratio, depend on the machine.
Bytes are what the server sent of the shards, against the length of all headers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPO = "bench/moe"


def ours(jobs: int) -> int:
    """Tensors that ckaudit reads, with so many requests at once."""
    from ckaudit.checkpoint import read_checkpoint
    from ckaudit.source import open_source

    return len(read_checkpoint(open_source(REPO, jobs=jobs), jobs=jobs).tensors)


def rival() -> int:
    """Tensors that the Hub client reads."""
    from huggingface_hub import get_safetensors_metadata

    return sum(len(file.tensors) for file in get_safetensors_metadata(REPO).files_metadata.values())


def child(which: str, jobs: int) -> None:
    """One timed reading. What both need of the Hub client is ready before: its modules, its session, not one connection."""
    import huggingface_hub

    import ckaudit.checkpoint
    import ckaudit.source.hub

    assert huggingface_hub.get_safetensors_metadata
    assert ckaudit.checkpoint.read_checkpoint
    assert ckaudit.source.hub.HubSource
    huggingface_hub.get_session()
    begin, cpu = time.perf_counter(), time.process_time()
    tensors = ours(jobs) if which == "ours" else rival()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "tensors": tensors}))


def measure(which: str, url: str, jobs: int) -> dict[str, float]:
    """One run of one reader in a fresh process: seconds, tensors, requests and bytes."""
    with tempfile.TemporaryDirectory() as home:
        env = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": home,
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
        before = _counters(url)
        done = subprocess.run(
            [sys.executable, __file__, "--child", which, "--jobs", str(jobs)],
            env=env,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        after = _counters(url)
    return json.loads(done.stdout) | {key: after[key] - before[key] for key in after}


def _counters(url: str) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/_log") as answer:
        return dict(json.load(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shards", type=int, default=163)
    parser.add_argument("--tensors", type=int, default=280)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--child", choices=["ours", "rival"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.jobs)
        return
    shape = ["--shards", str(options.shards), "--tensors", str(options.tensors), "--latency", str(options.latency)]
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "hub_server.py"), *shape],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        url, headers = server.stdout.readline().split()
        runs: dict[str, list[dict[str, float]]] = {"rival": [], "ours": []}
        for _ in range(options.runs):
            for which, taken in runs.items():
                taken.append(measure(which, url, options.jobs))
    finally:
        server.stdin.close()
        server.wait()
    report(runs, int(headers), options)


def report(runs: dict[str, list[dict[str, float]]], headers: int, options: argparse.Namespace) -> None:
    """Prints medians, the ratio, and how far the floor is."""
    medians = {which: statistics.median(run["seconds"] for run in taken) for which, taken in runs.items()}
    for which, name in (("rival", "huggingface_hub.get_safetensors_metadata"), ("ours", "ckaudit")):
        last, spread = runs[which][-1], sorted(run["seconds"] for run in runs[which])
        print(
            f"{name:42} {medians[which]:6.3f} s (of {len(spread)}: {spread[0]:.3f} to {spread[-1]:.3f})  "
            f"{last['requests']:.0f} requests  {last['sent']:,.0f} bytes  {last['tensors']:,.0f} tensors  "
            f"{statistics.median(run['cpu'] for run in runs[which]):.2f} s CPU"
        )
    small = 2  # config.json and the index
    floor = (1 + math.ceil((options.shards + small) / options.jobs)) * options.latency
    rivals = (4 + math.ceil(options.shards / min(32, (os.cpu_count() or 1) + 4))) * options.latency
    print(
        f"ratio {medians['rival'] / medians['ours']:.2f}x; bytes of shards / headers {runs['ours'][-1]['weights'] / headers:.3f}"
    )
    print(
        f"floors: ckaudit at {options.jobs} jobs {floor:.3f} s (gap {medians['ours'] - floor:.3f} s), "
        f"the client {rivals:.3f} s, their ratio {rivals / floor:.2f}x"
    )


if __name__ == "__main__":
    main()

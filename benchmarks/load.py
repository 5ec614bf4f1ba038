"""Loading a checkpoint onto a GPU: ckaudit beside the stock loader and others, in one run, files in the page cache.

    PYTHONPATH=. python benchmarks/load.py                           # one GPU, about 8 minutes, 35 GB of disk
    PYTHONPATH=. python benchmarks/load.py --scale tiny --device cpu   # the same steps in small: no figure means anything

Checkpoints are made from configs (random weights). Loaders take turns; times are medians; before every load the caches of device and
pinned memory are emptied, so that each pays for what it allocates. The table comes last; `$OUT/load.json` gets everything, if OUT is set.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import io
import json
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from ckaudit import header
from ckaudit.materialize import classes, forward, layout, loading, moments, reductions
from ckaudit.materialize.hostmap import MappedFiles
from ckaudit.materialize.job import LoadJob, LoadOptions
from ckaudit.materialize.layout import Stored
from ckaudit.materialize.reader import cached_share
from ckaudit.materialize.stream import DeviceStream
from ckaudit.materialize.watch import Watch

MINICPM = Path(__file__).parent.parent / "fixtures" / "minicpm-v-4.6" / "config.json"
_DENSE = {
    "full": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}  # fmt: skip
_MOE = {
    "full": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 512,
    },
}  # fmt: skip


class Bench:
    """One run: where things are, what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.started = time.monotonic()

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.args.budget) - (time.monotonic() - self.started)

    def note(self, key: str, value: Any) -> None:
        """Keep and print one fact."""
        self.notes[key] = value
        print(f"{time.monotonic() - self.started:6.1f} s  {key}: {value}", flush=True)

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def clean(self) -> None:
        """Free what earlier loads left, pinned memory included."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            empty_host = getattr(torch._C, "_host_emptyCache", None)
            if empty_host is not None:
                empty_host()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()

    def once(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Seconds and peak memory of one load, which is dropped at once; what went wrong, if it did."""
        self.clean()
        start = time.perf_counter()
        try:
            result = work()
            self.sync()
        except Exception as error:  # noqa: BLE001  (whatever another loader raises is its result)
            return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        del result
        return {"seconds": seconds, "peak": peak}


def main() -> int:
    """Run what is asked for within the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", default="dense,moe,minicpm")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; what does not fit is left out")
    parser.add_argument(
        "--folder",
        default=None,
        help="where checkpoints are made; a temporary folder, removed at the end, if not given",
    )
    parser.add_argument(
        "--no-extras", action="store_true", help="neither the sweep of readers and buffers nor cold reads nor profiles"
    )
    args = parser.parse_args()
    bench = Bench(args)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.cuda.get_device_name() if bench.cuda else 'CPU'}",
        flush=True,
    )
    if bench.cuda:
        _limits(bench)
    root = Path(args.folder or tempfile.mkdtemp(prefix="ckaudit-bench-", dir="."))
    try:
        for name in args.only.split(","):
            if bench.left() > 60:
                {"dense": dense, "moe": moe, "minicpm": minicpm}[name](bench, root / name)
                shutil.rmtree(root / name, ignore_errors=True)
            else:
                bench.note(f"{name} left out", "budget")
    finally:
        if args.folder is None:
            shutil.rmtree(root, ignore_errors=True)
        _report(bench)
    return 0


def dense(bench: Bench, folder: Path) -> None:
    """A llama of 12.6 GB in 4 shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _make(bench, LlamaForCausalLM, LlamaConfig(**_DENSE[bench.args.scale], dtype="bfloat16"), folder, "4GB")
    _compare(bench, "dense", folder)
    if not bench.args.no_extras:
        _profile(bench, "dense", folder)
        if bench.cuda:
            _sweep(bench, folder)
            _cold(bench, folder)


def moe(bench: Bench, folder: Path) -> None:
    """A mixture of 128 experts, 20.9 GB: 6,144 tensors that become 32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    _make(bench, Qwen3MoeForCausalLM, Qwen3MoeConfig(**_MOE[bench.args.scale], dtype="bfloat16"), folder, "4GB")
    _compare(bench, "moe", folder)
    if not bench.args.no_extras:
        _profile(bench, "moe", folder)


def minicpm(bench: Bench, folder: Path) -> None:
    """The released MiniCPM-V 4.6 in shape: loads, and both text and video pass."""
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration

    settings = json.loads(MINICPM.read_text())
    if bench.args.scale == "tiny":
        settings["text_config"] |= {
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "vocab_size": 300000,
        }
        settings["text_config"].pop("layer_types", None)
        settings["vision_config"] |= {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 192}
        settings["insert_layer_id"] = 1
    config = MiniCPMV4_6Config(
        **{k: v for k, v in settings.items() if k not in ("architectures", "auto_map", "transformers_version")}
    )
    config.dtype = "bfloat16"
    _make(bench, MiniCPMV4_6ForConditionalGeneration, config, folder, "5GB")
    _compare(bench, "minicpm-v-4.6", folder, others=False)
    job = _job(folder, bench.args.device)
    cls, config = classes.pick(str(folder), job.options)
    watch = Watch(lambda _event: None)
    loaded = loading.load(job, cls, config, loading.expected_memory(job, config), watch)
    section = forward.run(loaded.model, job, watch, lambda _section: None)
    for one in section["runs"]:
        bench.note(
            f"minicpm forward {one['kind']}", {k: one[k] for k in ("status", "finite", "inputs", "seconds", "reason")}
        )


def _make(bench: Bench, cls: Any, config: Any, folder: Path, shard: str) -> None:
    start = time.monotonic()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(bench.device):
            model = cls(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size=shard)
    del model
    bench.clean()
    for path in folder.glob("*.safetensors"):  # warm the page cache
        with path.open("rb", buffering=0) as file:
            while file.read(64 << 20):
                pass
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    shards = len(list(folder.glob("*.safetensors")))
    bench.note(f"made {cls.__name__}", f"{size / 1e9:.2f} GB in {shards} shards, {time.monotonic() - start:.0f} s")


def _job(folder: Path, device: str, **options: Any) -> LoadJob:
    files = sorted(str(p) for p in folder.glob("*.safetensors"))
    tensors = []
    for shard, path in enumerate(files):
        with open(path, "rb") as file:
            prefix = file.read(8)
            parsed = header.parse(prefix + file.read(header.declared_length(prefix) or 0), os.path.getsize(path))
        data = 8 + parsed.length
        for name, info in parsed.tensors.items():
            start, stop = info.data_offsets
            tensors.append(Stored(name, shard, info.dtype, tuple(info.shape), data + start, data + stop))
    return LoadJob(
        name=folder.name,
        folder=str(folder),
        files=tuple(files),
        tensors=tuple(tensors),
        options=LoadOptions(device=device, **options),
    )


def _ckaudit(bench: Bench, folder: Path, stages: list[dict[str, float]] | None = None, **options: Any) -> Any:
    """What `ckaudit load` does in its child process, headers read anew."""
    job = _job(folder, bench.args.device, **options)
    cls, config = classes.pick(job.folder, job.options)
    watch = Watch(lambda _event: None)
    loaded = loading.load(job, cls, config, loading.expected_memory(job, config), watch)
    if stages is not None:
        stages.append(dict(watch.seconds))
    return loaded


def _stock(bench: Bench, folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    import transformers

    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(folder, dtype=torch.bfloat16, device_map=bench.args.device)


def _compare(bench: Bench, name: str, folder: Path, *, others: bool = True) -> None:
    """All loaders in turn, `repeat` times; the first to go is another one each time."""
    from safetensors.torch import load_file

    files = sorted(str(p) for p in folder.glob("*.safetensors"))
    size = sum(map(os.path.getsize, files))
    device = bench.args.device

    def threads() -> Any:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda f: load_file(f, device=device), files))

    stages: dict[str, list[dict[str, float]]] = {"ckaudit": [], "ckaudit with values": []}
    loaders: dict[str, Callable[[], Any]] = {
        "stock from_pretrained": lambda: _stock(bench, folder),
        "ckaudit": lambda: _ckaudit(bench, folder, stages["ckaudit"], values=False),
        "ckaudit with values": lambda: _ckaudit(bench, folder, stages["ckaudit with values"]),
    }
    if others:
        job = _job(folder, device)
        planned = layout.plan(job.tensors, str)
        loaders["ckaudit's stream alone"] = lambda: _stream(bench, planned, job, LoadOptions().readers)
        loaders["safetensors load_file"] = lambda: [load_file(f, device=device) for f in files]
        loaders["safetensors, 4 threads"] = threads
        if importlib.util.find_spec("fastsafetensors"):
            loaders["fastsafetensors"] = lambda: _fastsafetensors(files, device)
        if importlib.util.find_spec("instanttensor"):
            loaders["instanttensor"] = lambda: _instanttensor(files)
    _same(bench, name, folder)
    for work in loaders.values():  # libraries loaded, kernels compiled
        bench.once(work)
    for recorded in stages.values():
        recorded.clear()
    runs: dict[str, list[dict[str, Any]]] = {key: [] for key in loaders}
    order = list(loaders)
    for turn in range(bench.args.repeat):
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            if bench.left() > 30:
                runs[key].append(bench.once(loaders[key]))
    for key, results in runs.items():
        good = [r for r in results if "error" not in r]
        row: dict[str, Any] = {"work": name, "loader": key, "bytes": size, "runs": results}
        if good:
            seconds = statistics.median(r["seconds"] for r in good)
            row |= {
                "seconds": seconds,
                "gb_per_s": size / seconds / 1e9,
                "peak_over_size": max(r["peak"] for r in good) / size,
            }
        if stages.get(key):
            row["stages"] = {k: statistics.median(s.get(k, 0.0) for s in stages[key]) for k in stages[key][0]}
        bench.rows.append(row)
        bench.note(
            f"{name} {key}", {k: v for k, v in row.items() if k not in ("work", "loader", "runs")} or results[:1]
        )


def _same(bench: Bench, name: str, folder: Path) -> None:
    """That ckaudit's model equals the stock one, element by element."""
    bench.clean()
    stock = _stock(bench, folder)
    loaded = _ckaudit(bench, folder)
    ours, theirs = loaded.model.state_dict(), stock.state_dict()
    differ = [k for k in theirs if k not in ours or not torch.equal(ours[k], theirs[k])]
    loose = [k for k, p in loaded.model.named_parameters() if not p.is_contiguous()]
    exact = {t.name: t for t in loaded.layout.tensors}
    mapped = MappedFiles(sorted(str(p) for p in folder.glob("*.safetensors")))
    wrong = []
    for found in loaded.observed.stats[:40]:
        true = moments.exact(exact[found.name], mapped.read(exact[found.name]))
        near = abs(found.mean - true.mean) <= 1e-4 * true.std + 1e-9 and abs(found.std - true.std) <= 1e-3 * true.std
        exactly = [(s.low, s.high, s.zeros, s.digest) for s in (found, true)]
        if not near or exactly[0] != exactly[1]:
            wrong.append((found, true))
    bench.note(
        f"{name} as stock",
        {"parameters": len(theirs), "differ": differ[:3], "not contiguous": loose[:3], "values wrong": wrong[:2]},
    )
    if differ or wrong or ours.keys() != theirs.keys():
        raise SystemExit(f"{name}: ckaudit and the stock loader disagree")


def _fastsafetensors(files: list[str], device: str) -> Any:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=files, nogds=True, device=f"{device}:0") as opened:
        return {k: opened.get_tensor(k).clone().detach() for k in opened.keys()}  # noqa: SIM118


def _instanttensor(files: list[str]) -> Any:
    import instanttensor

    with instanttensor.safe_open(files, framework="pt", device=0) as opened:
        return dict(opened.tensors())


def _limits(bench: Bench) -> None:
    """What the machine can do at most: pinned and pageable copies, pinning, reductions."""
    host, there = (
        torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    )
    there.copy_(host, non_blocking=True)
    bench.sync()
    start = time.perf_counter()
    for _ in range(8):
        there.copy_(host, non_blocking=True)
    bench.sync()
    bench.note("pinned copy GB/s", round(8 * (1 << 30) / (time.perf_counter() - start) / 1e9, 1))
    del host
    bench.clean()
    start = time.perf_counter()
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    bench.note("pinning 256 MiB, s", round(time.perf_counter() - start, 4))
    del pinned
    numbers = there.view(torch.bfloat16).normal_().view(1, -1)
    for name, work in (
        ("aminmax", lambda: torch.aminmax(numbers, dim=1)),
        ("sum", lambda: numbers.sum(dim=1, dtype=torch.float32)),
        ("norm 2", lambda: torch.linalg.vector_norm(numbers, 2, dim=1, dtype=torch.float32)),
        ("norm 4", lambda: torch.linalg.vector_norm(numbers, 4, dim=1, dtype=torch.float32)),
        ("norm 0", lambda: torch.linalg.vector_norm(numbers, 0, dim=1, dtype=torch.float32)),
        ("digest", lambda: reductions.digest_of(there.view(1, -1))),
        ("all reductions", lambda: reductions._reductions((0,), numbers, None)),
    ):
        work()
        bench.sync()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        start = time.perf_counter()
        for _ in range(4):
            work()
        bench.sync()
        rate = 4 * (1 << 30) / (time.perf_counter() - start) / 1e9
        bench.note(f"{name} GB/s", f"{rate:.0f}, {(torch.cuda.max_memory_allocated() - base) >> 20} MiB extra")


def _profile(bench: Bench, name: str, folder: Path) -> None:
    """Where the loading thread spends its time."""
    bench.clean()
    profile = cProfile.Profile()
    profile.enable()
    _ckaudit(bench, folder)
    bench.sync()
    profile.disable()
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(22)
        lines = [line for line in text.getvalue().splitlines() if line.strip()][4:]
        bench.notes[f"{name} profile by {order}"] = lines
        print(f"profile of {name} by {order}", *lines, sep="\n", flush=True)


def _sweep(bench: Bench, folder: Path) -> None:
    """The stream alone, by number of readers and size of buffers; each pays for its pinned memory."""
    job = _job(folder, bench.args.device)
    size = sum(t.nbytes for t in job.tensors)
    found = {}
    for window in (2, 4, 8, 16):
        for readers in (4, 8, 12, 16):
            if bench.left() < 150:
                break
            planned = layout.plan(job.tensors, str, (), max(window << 20, layout.CHUNK), window << 20)
            best = min(_stream_seconds(bench, planned, job, readers) for _ in range(3))
            found[f"{readers} x {window} MiB"] = round(size / best / 1e9, 1)
    bench.note("stream GB/s by readers x buffer", found)


def _stream_seconds(
    bench: Bench, planned: layout.Layout, job: LoadJob, readers: int, access: Any = "buffered"
) -> float:
    bench.clean()
    start = time.perf_counter()
    _stream(bench, planned, job, readers, access)
    return time.perf_counter() - start


def _stream(bench: Bench, planned: layout.Layout, job: LoadJob, readers: int, access: Any = "buffered") -> None:
    device = torch.device("cuda", 0) if bench.cuda else bench.device
    with DeviceStream(planned, job.files, device, readers=readers, access=access) as stream:
        stream.join()


def _cold(bench: Bench, folder: Path) -> None:
    """One shard from the disk, the page cache emptied before each: by kind of access."""
    whole = _job(folder, bench.args.device)
    job = LoadJob(
        name=whole.name, folder=whole.folder, files=whole.files[:1], tensors=tuple(t for t in whole.tensors if t.shard == 0),
        options=whole.options,
    )  # fmt: skip
    size = sum(t.nbytes for t in job.tensors)
    planned = layout.plan(job.tensors, lambda name: next(t.start for t in job.tensors if t.name == name), (), 16 << 20)
    os.sync()
    for access in ("buffered", "ahead", "direct"):
        for readers in (4, 16):
            if bench.left() < 120:
                return
            handle = os.open(job.files[0], os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
            share = cached_share(job.files[0])
            seconds = _stream_seconds(bench, planned, job, readers, access)
            bench.note(f"cold {access}, {readers} readers", f"{size / seconds / 1e9:.2f} GB/s ({share:.0%} was cached)")


def _report(bench: Bench) -> None:
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "load.json").write_text(
            json.dumps({"rows": bench.rows, "notes": bench.notes}, indent=1, default=str)
        )
    stock = {r["work"]: r.get("seconds") for r in bench.rows if r["loader"] == "stock from_pretrained"}
    print(f"\n{'work':14} {'loader':24} {'s':>8} {'GB/s':>7} {'x stock':>8} {'peak/size':>10}")
    for row in bench.rows:
        if "seconds" not in row:
            print(f"{row['work']:14} {row['loader']:24} {row['runs'][0]['error'] if row['runs'] else 'not run'}")
            continue
        times = stock[row["work"]] / row["seconds"] if stock.get(row["work"]) else float("nan")
        print(
            f"{row['work']:14} {row['loader']:24} {row['seconds']:8.3f} {row['gb_per_s']:7.1f} {times:8.2f} {row['peak_over_size']:10.3f}"
            f"  {({k: round(v, 3) for k, v in row['stages'].items()}) if 'stages' in row else ''}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())

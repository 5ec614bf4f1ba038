"""In the child: from a job to a model on its device, with what the loader said and what every value is."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from ckaudit.checks.observed import Observed, TensorStats, candidates
from ckaudit.header import FLOATS, TORCH_DTYPES
from ckaudit.materialize import layout as layouts
from ckaudit.materialize.classes import first_value, sub_configs
from ckaudit.materialize.estimate import Estimate, estimate, require
from ckaudit.materialize.handover import handed_over, join_patterns, settle
from ckaudit.materialize.hostmap import HostMap, MappedFiles
from ckaudit.materialize.job import LoadJob
from ckaudit.materialize.layout import Layout
from ckaudit.materialize.reader import Access, cached_share
from ckaudit.materialize.stream import UNBOUNDED, DeviceStream
from ckaudit.materialize.values import Scan, of_parameters
from ckaudit.materialize.watch import Watch

_DTYPES = {TORCH_DTYPES[name]: name for name in FLOATS}
_COLD = 0.5
"""Share of the files in the page cache below which reading is a matter of the disk."""
_SWITCH = 2e-5
"""Seconds. Reader threads need the interpreter for moments only, and must get it while the loader computes."""


class Loaded(msgspec.Struct, frozen=True):
    """A model, what its loader said, and what was seen of its tensors."""

    model: Any
    info: dict[str, Any]
    observed: Observed
    layout: Layout


def expected_memory(job: LoadJob, config: Any) -> Estimate:
    """The estimate for `job`, compared with what its device has free. Raises CkauditError where that is too little."""
    kind = torch.device(job.options.device).type
    wanted = estimate(_wanted(job), _target_dtype(job, config), _quantization(config), device=kind)
    if kind == "cpu":
        return require(wanted, _free_memory(), "the CPU")
    count = max(job.options.devices, job.processes)
    share = msgspec.structs.replace(wanted, steady=wanted.steady // count, peak=wanted.peak // count)
    free, _ = torch.cuda.mem_get_info(torch.device(job.options.device))
    return require(share, free, job.options.device)


def load(job: LoadJob, cls: Any, config: Any, needed: Estimate, watch: Watch) -> Loaded:
    """The model of `job`. Raises whatever the loader raises, SourceError for a file that ends early, OutOfMemoryError."""
    if job.processes > 1 or job.options.devices > 1:
        return _spread(job, cls, config, watch)
    device = torch.device(job.options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with watch.stage("plan"), _nimble():
        layout = _plan(job, config, device)
    files = MappedFiles(job.files)
    scan = Scan(layout, device) if job.options.values else None
    source = _source(job, layout, device, files, scan, needed, watch)
    taken: dict[str, list[str]] = defaultdict(list)
    with scan or nullcontext(), source, _nimble():
        with watch.stage("load"), handed_over(layout, job.files, job.tensors, source, files.read), _sources(taken):
            model, info = cls.from_pretrained(job.folder, **_arguments(job, config), device_map={"": device})
            settle(model)
        with watch.stage("arrive"):
            source.join()
    if isinstance(source, DeviceStream):
        watch.seconds["read"] = source.seconds
    with watch.stage("values"):
        stats = scan.finish(files.read) if scan else ()
    equal = tuple(_equal_groups(stats, layout, files))
    tied, differs = _ties(model, taken)
    observed = Observed(
        stats=stats,
        never_written=() if job.partial else tuple(sorted(info["missing_keys"])),
        partial=job.partial,
        initializer_range=first_value(config, "initializer_range"),
        equal=equal,
        tied=tied,
        tie_differs=differs,
        engine="transformers",
    )
    return Loaded(model, info, observed, layout)


def _source(
    job: LoadJob,
    layout: Layout,
    device: torch.device,
    files: MappedFiles,
    scan: Scan | None,
    needed: Estimate,
    watch: Watch,
) -> DeviceStream | HostMap:
    """Where the loader gets its tensors from: the files' own pages on a CPU, a stream to any other device."""
    ready = scan.ready if scan else None
    if device.type == "cpu":
        return HostMap(layout, files, ready=ready, moved=watch.moved)
    return DeviceStream(
        layout,
        job.files,
        device,
        readers=job.options.readers,
        access=_access(job),
        ahead=needed.ahead if needed.casts else UNBOUNDED,
        ready=ready,
        calm=scan.calm if scan else None,
        moved=watch.moved,
    )


def _spread(job: LoadJob, cls: Any, config: Any, watch: Watch) -> Loaded:
    """Over several devices: accelerate or transformers' tensor-parallel plan places, and the loader reads for itself."""
    with watch.stage("load"):
        model, info = cls.from_pretrained(job.folder, **_arguments(job, config), **_placement(job))
    watch.moved(sum(t.nbytes for t in job.tensors))
    stats: tuple[TensorStats, ...] = ()
    if job.options.values:
        with watch.stage("values"):
            stats = of_parameters(model)
    observed = Observed(
        stats=stats,
        never_written=() if job.partial else tuple(sorted(info["missing_keys"])),
        partial=job.partial,
        initializer_range=first_value(config, "initializer_range"),
        compared=False,
        engine="transformers",
    )
    return Loaded(model, info, observed, layouts.plan(_wanted(job), str))


def _placement(job: LoadJob) -> dict[str, Any]:
    if job.processes == 1:
        free = {i: torch.cuda.mem_get_info(i)[0] for i in range(job.options.devices)}
        return {"device_map": "balanced", "max_memory": free}
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return {"tp_plan": "auto"}
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=job.processes)}


def _arguments(job: LoadJob, config: Any) -> dict[str, Any]:
    if job.weights is not None:
        config.transformers_weights = job.weights
    return {
        "config": config,
        "dtype": job.options.dtype or "auto",
        "attn_implementation": job.options.attention,
        "output_loading_info": True,
        "use_safetensors": True,  # pickles are never opened
        "local_files_only": True,
        "trust_remote_code": job.options.trust_remote_code,
    }


def _plan(job: LoadJob, config: Any, device: torch.device) -> Layout:
    from transformers.core_model_loading import dot_natural_key

    joins: list[list[str]] = []
    if device.type != "cpu":
        joins = join_patterns([part.model_type for part in sub_configs(config)])
    return layouts.plan(_wanted(job), dot_natural_key, joins, job.options.chunk)


def _wanted(job: LoadJob) -> list[layouts.Stored]:
    """The tensors that the loader will take: of two with one name the later one, as loaders do."""
    unused = set(job.unused)
    return list({t.name: t for t in job.tensors if t.name not in unused}.values())


def _target_dtype(job: LoadJob, config: Any) -> str | None:
    dtype = job.options.dtype or getattr(config, "dtype", None)
    return _DTYPES.get(str(dtype).removeprefix("torch.")) if dtype is not None else None


def _quantization(config: Any) -> dict[str, Any] | None:
    found = first_value(config, "quantization_config")
    return found if isinstance(found, dict) else found.to_dict() if found is not None else None


def _free_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as info:
        for line in info:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _access(job: LoadJob) -> Access:
    """How to read: past the page cache only where the files are not in it."""
    if job.options.access != "auto":
        return job.options.access
    shares = [cached_share(path) for path in job.files]
    return "buffered" if not shares or sum(shares) / len(shares) >= _COLD else "ahead"


@contextmanager
def _nimble() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    collects = gc.isenabled()
    gc.disable()  # tens of thousands of objects that all stay: each look at them would find nothing
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if collects:
            gc.enable()


@contextmanager
def _sources(taken: dict[str, list[str]]) -> Iterator[None]:
    """Observe which tensors of the file go into which parameter."""
    from transformers import core_model_loading as loading

    original: Callable[..., Any] = loading.WeightTransform.add_tensor

    def add_tensor(self: Any, target_key: str, source_key: str, *args: Any, **kwargs: Any) -> Any:
        taken[target_key].append(source_key)
        return original(self, target_key, source_key, *args, **kwargs)

    with patch.object(loading.WeightTransform, "add_tensor", add_tensor):
        yield


def _ties(model: Any, taken: dict[str, list[str]]) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]:
    """Checkpoint tensors that the model holds as one, and pairs that its config ties but the file stores with different values."""
    still = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tied, differs = [], []
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        names = (*taken.get(one, ())[:1], *taken.get(other, ())[:1])
        if len(names) == 2 and names[0] != names[1]:
            if still.get(one) == other:
                tied.append(names)
            else:
                differs.append((names[0], names[1]))
    return tuple(tied), tuple(differs)


def _equal_groups(stats: Any, layout: Layout, files: MappedFiles) -> Iterator[tuple[str, ...]]:
    """Groups of tensors whose bytes are the same."""
    stored = {t.name: t for t in layout.tensors}
    for group in candidates(stats):
        rest = list(group)
        while len(rest) > 1:
            first = files.read(stored[rest[0].name])
            same = [t for t in rest if torch.equal(files.read(stored[t.name]), first)]
            if len(same) > 1:
                yield tuple(t.name for t in same)
            rest = [t for t in rest if t not in same]

"""The engine `transformers`: the installed release's own `from_pretrained`, run in a worker on tensors without data.

Nothing here imports torch or transformers; `loader` and its fellows run in the worker only.

What a plan of this engine says, beyond `ckaudit.plan`:

- `fate`: `loaded` · `unmatched` (in the loader's list of unexpected names; `into` is the name that it was looked up by) · `ignored` (passed
  over in silence: by the model's own ignore list, then `by_design` says which, or since another tensor won its place, then a Collision
  names both) · `not_reached` (its parameter exists and did not get it: a shape mismatch, a conversion that raised, a load that stopped).
- `shard` of a stacked or fused parameter: `expert 3`, `gate_proj`, `expert 3 gate_proj`; the number is the slot, not the name's.
- `Step.rule`: `rename`, `convert`, `prefix` (rules of transformers' conversion mapping), `base prefix` (the loader's own rule for a head
  model's weights in a base model and the other way round), or the class of a special rule (`GroupWeightRename` …).
- `Note.kind`:
  `class` (what was built, chosen by `--class`, `auto_map`, `architectures` or `model_type`) ·
  `config-newer` (config.json comes from a newer transformers than the installed one) ·
  `config-class` (the class that is built reads config.json as another kind of config than its model_type says) ·
  `unknown-quantization` (a quant_method that transformers does not know: it warns and loads unquantised) ·
  `dequantized` (the quantised weights are loaded in full precision; `--device cuda` may differ) ·
  `tied-both-stored` (names: both tensors of a pair that the config ties) ·
  `doubled-prefix` (names accepted although their prefix is there twice, `model.model.X`) ·
  `expert-gap` (names: one stack whose numbers do not run from 0 without a gap, accepted since only their order counts) ·
  `dtype-cast` (names: stored in one float or integer type, loaded as another) ·
  `shape-unchecked` (names: of another shape than their parameter, accepted since a quantisation method is at work).
- `Mismatch(kind="dtype")`: a cast between kinds (integer or 8-bit float bytes into a float parameter as they are; an fp8
  weight whose scale is not stored is cast like that without a word).
- `Unjudged.topic`: `shapes` (index-only), `dtypes` (torch has no such dtype), `tied` (both of a pair stored: equality is in the data).
- A config that transformers' own classes refuse is a `Failure` and fails, with every name `not_reached`: `from_pretrained` would raise the
  same anywhere. A missing package, file or accelerator, an unknown architecture, remote code without `--trust-remote-code`, and remote
  code that does not run are `not_judged`.
"""

from __future__ import annotations

import importlib.metadata
import re

import msgspec
from packaging.version import Version

from ckaudit.checkpoint import Checkpoint
from ckaudit.engines import EngineOptions, Job
from ckaudit.engines.cache import PlanCache, key
from ckaudit.engines.host import WorkerHost, unjudged
from ckaudit.engines.limits import beyond_reason
from ckaudit.plan import Plan
from ckaudit.progress import Progress

OLDEST, BELOW = Version("5.17"), 6
"""The oldest release of transformers that this engine knows, and the first major one that it does not."""
_VERSION = re.compile(r"^Version: *(\S+)$", re.MULTILINE)
_INSTALL = "pip install 'ckaudit[transformers]'"
_NEEDED = ("torch", "transformers", "accelerate")
# Libraries that quantisers and model classes use if they are there, so that a plan may depend on them.
_OPTIONAL = (
    "safetensors", "huggingface_hub", "bitsandbytes", "compressed-tensors", "gptqmodel", "optimum", "torchao", "fbgemm-gpu", "hqq",
    "optimum-quanto", "aqlm", "vptq", "auto-round", "amd-quark", "kernels", "triton", "timm", "peft", "tokenizers", "einops",
)  # fmt: skip


def select() -> tuple[TransformersEngine]:
    """The one engine there is: the transformers that is installed beside ckaudit."""
    return (TransformersEngine(),)


def installed() -> dict[str, str]:
    """Versions of what takes part in a load, by distribution name, without importing any of it."""
    found = {}
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        said = _VERSION.search(
            package.read_text("METADATA") or ""
        )  # the whole of it as a message costs ten times as much
        found[name] = said[1] if said else package.version
    return found


class TransformersEngine:
    """transformers' `from_pretrained`, as installed."""

    id = "transformers"

    def __init__(self, cache: PlanCache | None = None) -> None:
        self._cache = PlanCache() if cache is None else cache
        self._host = WorkerHost()

    def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
        """What `from_pretrained` does with `checkpoint`: from the cache, else from a worker (a few seconds of imports, then the load)."""
        versions = installed()
        job = Job(
            engine="transformers",
            release=versions.get("transformers"),
            options=options,
            name=checkpoint.name,
            texts=checkpoint.texts,
            tensors=tuple(checkpoint.tensors.values()),
            index_only=checkpoint.index_only,
        )
        if (reason := _unusable(versions) or beyond_reason(checkpoint.config, len(checkpoint.tensors))) is not None:
            return _finished(unjudged(job, reason), job)
        name = key(job, versions)
        plan = self._cache.get(name) if options.cache else None
        if plan is None:
            with progress.task(f"transformers {job.release}"):
                plan = self._run(job)
            if options.cache:
                self._cache.put(name, plan)
        return _finished(plan, job)

    def close(self) -> None:
        """End the worker, if one is up."""
        self._host.close()

    def _run(self, job: Job) -> Plan:
        if not job.options.trust_remote_code:
            return self._host.run(job, _no_data, job.options.budget)
        with WorkerHost() as host:  # a stranger's code may leave anything behind: no later job shares its process
            return host.run(job, _no_data, job.options.budget)


def _unusable(versions: dict[str, str]) -> str | None:
    """Why this engine cannot run here, and the way out; None if it can."""
    if absent := [name for name in _NEEDED if name not in versions]:
        return f"{' and '.join(absent)} not installed: {_INSTALL}"
    found = Version(versions["transformers"])
    if found < OLDEST or found.major >= BELOW:
        return f"transformers {found} is installed; this engine knows >={OLDEST},<{BELOW}: {_INSTALL}"
    return None


def _finished(plan: Plan, job: Job) -> Plan:
    options = {
        "device": job.options.device,
        "trust_remote_code": job.options.trust_remote_code,
        "class": job.options.class_name,
    }
    return msgspec.structs.replace(plan, release=job.release, options=options)


def _no_data(name: str) -> bytes:
    raise OSError(f"{name}: this engine reads no tensor data")

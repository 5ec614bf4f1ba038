"""The engine `vllm`: a release's own loader, run on tensors without data, with nothing of vLLM installed.

Nothing here imports torch; `replay` and its fellows run in the worker only. `docs/vllm.md` says how it works.

What a plan of this engine says, beyond `ckaudit.plan`:

- `fate`: `unmatched` (the loader raised at this tensor: it looked it up by the name `into`) · `not_reached` (the loader had its parameter
  in hand and the shapes did not fit, or it stopped before) · `dropped` (a rule of the release maps it to nothing) · `ignored` (taken and
  not written anywhere, overwritten by another tensor, then a Collision names both, or in a file that the release does not read).
- `shard`: as the release calls it (`q`, `0`, `expert 3 w1`).
- `Step.rule`: a kind of WeightsMapper rule (`prefix`, `substring`, `stacked` …), `at` the module whose `load_weights` applied it.
- `Note.kind`: `claims-too-little`, `claims-too-much` (what the loader says it loaded is not what was written) · `packed-unmapped`,
  `packed-undeclared` (what a class declares to be fused and what its rules fuse differ) · `broadcast` · `values` (real bytes were read) ·
  `assumed` (siblings of a refused tensor) · `afterwards` (what the loader raises without the refused tensors).
- `Unjudged.topic`: `faults` (why the search for further ones ended early) · `values` (whether scales are equal is in the data) ·
  `shapes`, `dtypes` (index-only).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.engines import EngineOptions, Job
from ckaudit.engines.cache import PlanCache, home, key
from ckaudit.engines.host import WorkerHost, unjudged
from ckaudit.engines.limits import beyond_reason
from ckaudit.engines.vllm import store
from ckaudit.errors import EngineError
from ckaudit.plan import Plan
from ckaudit.progress import Progress
from ckaudit.source import Source, Span, Unreadable, open_source

TREE, BESIDE, PLATFORM = "CKAUDIT_VLLM_TREE", "CKAUDIT_VLLM_BESIDE", "CKAUDIT_VLLM_PLATFORM"
"""Environment of a worker: the folder that holds the package `vllm` (unset: the installed one), folders of packages that this release needs
in another version than the installed one, and the pretended machine."""

NEEDED = ("torch", "transformers", "compressed-tensors", "pydantic", "numpy", "safetensors", "regex", "einops")
_INSTALL = "pip install 'ckaudit[vllm]'"
_MATCHED = ("transformers", "compressed-tensors")
"""Pure Python packages that decide loading, and that a release may want in another version than the installed one."""


def select(rest: str) -> tuple[VllmEngine, ...]:
    """The engines of `vllm` + `rest`: `==X` a release, `@PATH` a source tree, nothing the installed one, `>=X` all stored ones.

    Raises EngineError.
    """
    if rest == "":
        return (VllmEngine(None),)
    if rest.startswith("@"):
        return (VllmEngine(None, tree=_tree(rest[1:])),)
    if rest.startswith("==") and "*" not in rest and "," not in rest:
        return (VllmEngine(store.plain_version(rest[2:].strip())),)
    wanted = _range(rest)
    found = [r.version for r in store.releases() if wanted.contains(r.version, prereleases=True)]
    if not found:
        raise EngineError(f"No stored release matches vllm{rest}.", "Add some: `ckaudit engines add vllm==X`.")
    return tuple(VllmEngine(version) for version in found)


def _range(rest: str) -> SpecifierSet:
    try:
        return SpecifierSet(rest)
    except InvalidSpecifier:
        raise EngineError(f"vllm{rest} is no engine.", "Use vllm==X, vllm>=X, vllm@PATH or vllm.") from None


def fetch(rest: str, *, offline: bool = False, progress: Progress | None = None) -> tuple[str, ...]:
    """Store every release on the index that the specifier `rest` allows; the versions that are stored then. Raises EngineError."""
    wanted = _range(rest)
    for version in store.on_index():
        if wanted.contains(version):
            store.add(version, offline=offline, progress=progress)
    return tuple(r.version for r in store.releases() if wanted.contains(r.version, prereleases=True))


def _tree(text: str) -> Path:
    if not text:
        raise EngineError("vllm@ names no folder.", "Write vllm@PATH, with a source checkout or an unpacked wheel.")
    path = Path(text).expanduser().absolute()
    if not (path / "vllm" / "model_executor").is_dir():
        raise EngineError(
            f"{text} holds no vllm package.", "Give the root of a source checkout or of an unpacked wheel."
        )
    return path


class VllmEngine:
    """One release of vLLM: stored, a source tree, or the installed one."""

    def __init__(self, release: str | None, *, tree: Path | None = None, cache: PlanCache | None = None) -> None:
        self.release, self.tree = release, tree
        self.id = f"vllm=={release}" if release else f"vllm@{tree}" if tree else "vllm"
        self._cache = PlanCache() if cache is None else cache
        self._host: WorkerHost | None = None
        self._env: dict[str, str] = {}

    def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
        """What this release does with `checkpoint`: from the cache, else from its worker, which stays up for the next checkpoint."""
        job = self._job(checkpoint, options)
        versions = _installed()
        absent = [name for name in NEEDED if name not in versions]
        if absent:
            return self._finish(unjudged(job, f"{' and '.join(absent)} not installed: {_INSTALL}"), checkpoint)
        if self.release is None and self.tree is None and "vllm" not in versions:
            raise EngineError("vLLM is not installed beside ckaudit.", "Name a release: --engine vllm==X.")
        overrides = options.vllm.get("hf_overrides")
        config = (checkpoint.config or {}) | (overrides if isinstance(overrides, dict) else {})
        if reason := beyond_reason(config, len(checkpoint.tensors)) or _other_files(checkpoint, options):
            return self._finish(unjudged(job, reason), checkpoint)
        env, facts = self._place(options, progress)
        name = key(job, versions | facts)
        plan = self._cache.get(name) if options.cache else None
        if plan is None:
            with progress.task(self.id):
                read = Reader(checkpoint, options)
                plan = self._run(job, env, read)
            if options.cache and not read.asked:
                self._cache.put(name, plan)
        return self._finish(plan, checkpoint)

    def close(self) -> None:
        """End the worker, if one is up."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _job(self, checkpoint: Checkpoint, options: EngineOptions) -> Job:
        return Job(
            engine="vllm",
            release=self.release or (_installed().get("vllm") if self.tree is None else None),
            options=options,
            name=checkpoint.name,
            texts=checkpoint.texts,
            tensors=(*checkpoint.tensors.values(), *_strays(checkpoint)),
            index_only=checkpoint.index_only,
        )

    def _place(self, options: EngineOptions, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
        """The worker's environment, and what of it a cached plan depends on. Fetches what is missing. Raises EngineError."""
        # A worker's own rule is to write no bytecode anywhere; compiling a release takes longer than loading with it.
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(home() / "bytecode")}
        env = {PLATFORM: str(options.vllm.get("platform") or ""), **compiled}
        if self.release is not None:
            stored = store.add(self.release, offline=options.offline, progress=progress)
            env[TREE], facts = str(stored.path), {"tree": stored.sha256}
        elif self.tree is not None:
            env[TREE], facts = str(self.tree), {"tree": _fingerprint(self.tree)}
        else:
            return env, {}
        beside = []
        for package in _MATCHED:
            wanted = store.requirement(Path(env[TREE]), "vllm", package)
            version = _installed().get(package)
            if wanted is not None and version is not None and not wanted.contains(version, prereleases=True):
                match = store.add_matching(package, wanted, offline=options.offline, progress=progress)
                beside.append(str(match.path))
                facts[package] = match.version
        env[BESIDE] = os.pathsep.join(beside)
        return env, facts

    def _run(self, job: Job, env: dict[str, str], read: Callable[[str], bytes]) -> Plan:
        if (
            job.options.trust_remote_code
        ):  # a stranger's code may leave anything behind: no later job shares its process
            with WorkerHost(env=env) as host:
                return host.run(job, read, job.options.budget)
        if self._host is not None and self._env != env:
            self.close()
        if self._host is None:
            self._host, self._env = WorkerHost(env=env), env
        return self._host.run(job, read, job.options.budget)

    def _finish(self, plan: Plan, checkpoint: Checkpoint) -> Plan:
        known = checkpoint.tensors
        return msgspec.structs.replace(
            plan,
            id=self.id,
            method="live" if self.release is None and self.tree is None else "replay",
            names=tuple(n for n in plan.names if n.name in known or n.fate == "loaded"),
        )


def _other_files(checkpoint: Checkpoint, options: EngineOptions) -> str | None:
    """Why a release would not load these shards but others, whose headers were not read; None when it would.

    Source: vLLM 0.33.0, `model_executor/model_loader/default_loader.py` (load format `auto`).
    """
    if options.vllm.get("load_format") not in (None, "auto"):
        return None
    known = {shard.path for shard in (*checkpoint.shards, *checkpoint.strays)}
    here = (path.removeprefix(checkpoint.folder) for path in checkpoint.files if path not in known)
    for path in here:
        if fnmatchcase(path, "consolidated*.safetensors") and "/" not in path:
            return (
                f"{path} is here too, in Mistral's own format, and vLLM loads that in place of the files audited: audit it by its name, "
                "or give --load-format safetensors"
            )
    return None


def _strays(checkpoint: Checkpoint) -> list[TensorSpec]:
    """Tensors of files that transformers passes over: a release makes its own choice of files (`consolidated*.safetensors`)."""
    return [
        TensorSpec(name, shard.path, info.dtype, info.shape, info.nbytes)
        for shard in checkpoint.strays
        if shard.header is not None
        for name, info in shard.header.tensors.items()
    ]


def _installed() -> dict[str, str]:
    """Versions of what takes part, by distribution name, without importing any of it."""
    found = {}
    for name in (*NEEDED, "vllm", "huggingface_hub", "tokenizers", "msgspec", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _fingerprint(tree: Path) -> str:
    """What tells one state of a source tree from another: the path, size and time of every Python file."""
    digest = hashlib.sha256()
    for path in sorted((tree / "vllm").rglob("*.py")):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class Reader:
    """The real bytes of small tensors, for a loader that looks at values. Opens the target again, only if asked."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._source: Source | None = None
        self.asked = False

    def __call__(self, name: str) -> bytes:
        """Raises OSError for a tensor that cannot be read, SourceError for a target that cannot."""
        self.asked = True
        spec = self._checkpoint.tensors[name]
        shard = next((s for s in self._checkpoint.shards if s.path == spec.shard), None)
        if shard is None or shard.header is None:
            raise OSError(f"{name} is in no shard that could be read")
        start = 8 + shard.header.length
        first, last = shard.header.tensors[name].data_offsets
        if self._source is None:
            target = self._checkpoint.name
            if self._checkpoint.kind == "hub" and self._checkpoint.revision:
                target = f"{target}@{self._checkpoint.revision}"
            self._source = open_source(target, offline=self._options.offline)
        for _, data in self._source.read_spans([Span(shard.path, start + first, start + last)]):
            if isinstance(data, Unreadable):
                raise OSError(data.reason)
            return data
        raise OSError(f"{name} could not be read")

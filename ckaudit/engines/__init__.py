"""Software that would load a checkpoint, behind one protocol: Checkpoint -> Plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.errors import EngineError
from ckaudit.plan import Plan
from ckaudit.progress import Progress


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked of every engine; part of the key under which a plan is cached."""

    trust_remote_code: bool = False
    device: str = "cpu"
    class_name: str | None = None
    """Load as this model class instead of the one that the config names."""
    budget: float = 600.0
    """Seconds for one engine on one checkpoint, every repeated load included."""
    offline: bool = False
    cache: bool = True
    vllm: dict[str, Any] = {}
    """Serving options of vLLM under its own names (`quantization`, `hf_overrides`, `load_format`, `pipeline_parallel_size` …)."""
    tp: tuple[int, ...] = ()
    """Tensor-parallel sizes to try besides 1 (vLLM)."""


class Engine(Protocol):
    """One release of one loader."""

    id: str

    def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
        """What this engine does with `checkpoint`. Never raises for what the checkpoint or the environment holds:
        the first is in the plan, the second is `Plan.not_judged`. Raises EngineError for a request that makes no sense."""
        ...


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is asked to do; crosses the process border as one line of JSON."""

    engine: str
    """`transformers` or `vllm`."""
    release: str | None = None
    options: EngineOptions
    name: str
    """The target, for messages."""
    texts: dict[str, bytes]
    """The checkpoint's small files, to be laid out in a folder that the loader reads its config from."""
    tensors: tuple[TensorSpec, ...]
    index_only: bool = False


ReadTensor = Callable[[str], bytes]
"""The real bytes of one (small) checkpoint tensor by name, asked of the parent process by a loader that looks at values."""


def select(spec: str) -> tuple[Engine, ...]:
    """The engines that `--engine SPEC` names. Raises EngineError with the spellings that exist.

    Each engine module has its own `select(rest)`, imported late: a request for one must not pay for the others.
    """
    name, _, rest = spec.partition(":")
    if name == "rules":
        from ckaudit.engines import rules

        return rules.select(rest)
    if spec == "transformers":
        from ckaudit.engines import transformers

        return transformers.select()
    if spec.startswith("vllm"):
        from ckaudit.engines import vllm

        return vllm.select(spec.removeprefix("vllm"))
    raise EngineError(
        f"No engine is called {spec!r}.",
        "Use transformers, vllm==X, vllm@PATH, vllm, rules:vllm==X or rules:FILE.toml.",
    )

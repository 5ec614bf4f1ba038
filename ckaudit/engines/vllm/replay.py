"""A job for a release of vLLM: lay the checkpoint out, run the release's own loader on it, tell what happened. Runs in a worker."""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines import Job, ReadTensor
from ckaudit.engines.vllm import TREE
from ckaudit.plan import Plan


def run(job: Job, read: ReadTensor) -> Plan:
    """What this worker's release does with the checkpoint of `job`. Never raises for what the checkpoint holds."""
    deadline = time.monotonic() + job.options.budget * 0.9
    plan = Plan(id=_id(job), engine="vllm", release=job.release, method="replay" if os.environ.get(TREE) else "live")
    if reason := _unusable(job):
        return msgspec.structs.replace(plan, not_judged=reason)
    try:
        from ckaudit.engines.vllm.session import session

        engine = session()
        if not gc.get_freeze_count():  # the release and torch stay for good: not worth a look at every collection
            gc.freeze()
    except Exception as error:  # noqa: BLE001  (a release that does not import here says nothing of the checkpoint)
        return msgspec.structs.replace(plan, not_judged=f"vllm {job.release or ''} does not start here: {_line(error)}")
    plan = msgspec.structs.replace(plan, environment=engine.environment())
    gc.disable()  # the logs are a great many small objects that live to the end: looking for garbage among them takes a third of the time
    try:
        with tempfile.TemporaryDirectory(prefix="ckaudit-vllm-") as name:
            return _judge(plan, job, read, engine, Path(name), deadline)
    finally:
        gc.enable()


def _judge(plan: Plan, job: Job, read: ReadTensor, engine: Any, folder: Path, deadline: float) -> Plan:
    from ckaudit.engines.vllm import faults, planning
    from ckaudit.engines.vllm.attempt import Attempt, attempt
    from ckaudit.engines.vllm.files import write_folder

    write_folder(job.texts, job.tensors, folder, code=job.options.trust_remote_code)
    raw = json.loads(job.texts["config.json"])

    def load(tensors: Sequence[TensorSpec], tp: int = 1) -> Attempt:
        gc.collect()  # what the last load left; what was there before any is frozen
        config = engine.config(folder, job.options, tp)
        engine.group(config, tp)
        with engine.within(config):
            return attempt(config, tensors, folder, read)

    try:
        story = faults.tell(load, job.tensors, deadline)
    except Exception as error:  # noqa: BLE001  (raised before any weight: by the config or while layers are constructed)
        return msgspec.structs.replace(plan, not_judged=f"the model cannot be built here: {_line(error)}")
    plan = planning.fill(plan, story, job.tensors, raw)
    rows = tuple(_parallel(size, load, job, deadline) for size in job.options.tp)
    return msgspec.structs.replace(plan, environment=engine.environment(), tp=rows)


def _parallel(size: int, load: Callable[[Sequence[TensorSpec], int], Any], job: Job, deadline: float) -> dict[str, Any]:
    """The row of a tensor-parallel size: whether rank 0 of so many loads, what the release says, and its bytes of parameters."""
    from ckaudit.engines.vllm import planning
    from ckaudit.engines.vllm.files import SAFETENSORS
    from ckaudit.header import DTYPE_BITS

    row: dict[str, Any] = {"size": size, "verdict": "not_judged", "error": None, "bytes_per_rank": None}
    if time.monotonic() > deadline:
        return row | {"error": "the budget of time was used up before"}
    try:
        seen = load(job.tensors, size)
    except Exception as error:  # noqa: BLE001  (a size that the release refuses, or cannot build here)
        refused = isinstance(error, ValueError | AssertionError)
        return row | {"verdict": "fails" if refused else "not_judged", "error": planning.message(error)}
    held = [(shape, dtype) for shape, dtype, buffer in seen.layout.values() if not buffer]
    bits = sum(math.prod(shape) * DTYPE_BITS.get(SAFETENSORS.get(dtype, dtype), 8) for shape, dtype in held)
    row |= {"bytes_per_rank": bits // 8}
    if seen.raised is None:
        return row | {"verdict": "loads"}
    excused = seen.raised.excuse is not None
    return row | {"verdict": "not_judged" if excused else "fails", "error": planning.message(seen.raised.error)}


def _unusable(job: Job) -> str | None:
    """Why there is nothing to load, before any import."""
    if "config.json" not in job.texts:
        return "there is no config.json, so vLLM has no class to build"
    try:
        raw = json.loads(job.texts["config.json"])
    except (ValueError, RecursionError) as error:  # Python's own parser: real configs hold NaN and Infinity
        return f"config.json is not JSON ({error})"
    if not isinstance(raw, dict):
        return "config.json is not an object"
    if job.index_only or any(t.shape is None for t in job.tensors):
        return "no shard header could be read: shapes are not known"
    if not job.tensors:
        return "there are no tensors"
    return None


def _id(job: Job) -> str:
    return f"vllm=={job.release}" if job.release else "vllm"


def _line(error: BaseException) -> str:
    """The error on one line; of pydantic's only what was raised inside, without the dump of the arguments around it."""
    inner = [e["msg"] for e in error.errors()] if hasattr(error, "errors") and hasattr(error, "error_count") else []
    text = "; ".join(inner).replace("Value error, ", "") or f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:600]

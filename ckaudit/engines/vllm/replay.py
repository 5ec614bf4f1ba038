"""A job for a release of vLLM: lay the checkpoint out, run the release's own loader on it, tell what happened. Runs in a worker."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Sequence
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
    except Exception as error:  # noqa: BLE001  (a release that does not import here says nothing of the checkpoint)
        return msgspec.structs.replace(plan, not_judged=f"vllm {job.release or ''} does not start here: {_line(error)}")
    plan = msgspec.structs.replace(plan, environment=engine.environment())
    gc.disable()  # the logs are a great many small objects that live to the end: looking for garbage among them takes a third of the time
    try:
        with tempfile.TemporaryDirectory(prefix="ckaudit-vllm-") as name:
            return _judge(plan, job, read, engine, Path(name), deadline)
    finally:
        gc.enable()
        gc.collect()


def _judge(plan: Plan, job: Job, read: ReadTensor, engine: Any, folder: Path, deadline: float) -> Plan:
    from ckaudit.engines.vllm import faults, planning
    from ckaudit.engines.vllm.attempt import Attempt, attempt
    from ckaudit.engines.vllm.files import write_folder

    write_folder(job.texts, job.tensors, folder, code=job.options.trust_remote_code)
    raw = msgspec.json.decode(job.texts["config.json"])

    def load(tensors: Sequence[TensorSpec], tp: int = 1) -> Attempt:
        config = engine.config(folder, job.options, tp)
        engine.group(config, tp)
        with engine.within(config):
            return attempt(config, tensors, folder, read)

    try:
        story = faults.tell(load, job.tensors, deadline)
    except Exception as error:  # noqa: BLE001  (raised before any weight: by the config or while layers are constructed)
        return msgspec.structs.replace(plan, not_judged=f"the model cannot be built here: {_line(error)}")
    plan = planning.fill(plan, story, job.tensors, raw)
    return msgspec.structs.replace(plan, environment=engine.environment())


def _unusable(job: Job) -> str | None:
    """Why there is nothing to load, before any import."""
    if "config.json" not in job.texts:
        return "there is no config.json, so vLLM has no class to build"
    try:
        raw = msgspec.json.decode(job.texts["config.json"])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:600]

"""A job for a release of vLLM: lay the checkpoint out, run the release's own loader on it, tell what happened. Runs in a worker."""

from __future__ import annotations

import gc
import json
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
from ckaudit.engines.vllm.ranks import PLAIN, Layout
from ckaudit.engines.vllm.words import message
from ckaudit.plan import Method, Plan


def run(job: Job, read: ReadTensor) -> Plan:
    """What this worker's release does with the checkpoint of `job`. Never raises for what the checkpoint holds."""
    deadline = time.monotonic() + job.options.budget * 0.9
    options = {"tp": 1, "trust_remote_code": job.options.trust_remote_code, **job.options.vllm}
    method: Method = "replay" if os.environ.get(TREE) else "live"
    plan = Plan(id=_id(job), engine="vllm", release=job.release, method=method, options=options)
    if reason := _unusable(job):
        return msgspec.structs.replace(plan, not_judged=reason)
    try:
        from ckaudit.engines.vllm.session import session

        engine = session()
        if not gc.get_freeze_count():  # the release and torch stay for good: not worth a look at every collection
            gc.freeze()
    except Exception as error:  # noqa: BLE001  (a release that does not import here says nothing of the checkpoint)
        return msgspec.structs.replace(
            plan, not_judged=f"vllm {job.release or ''} does not start here: {message(error)}"
        )
    plan = msgspec.structs.replace(plan, environment=engine.environment())
    gc.disable()  # the logs are a great many small objects that live to the end: looking for garbage among them takes a third of the time
    try:
        with tempfile.TemporaryDirectory(prefix="ckaudit-vllm-") as name:
            return _judge(plan, job, read, engine, Path(name), deadline)
    finally:
        gc.enable()


def _judge(plan: Plan, job: Job, read: ReadTensor, engine: Any, folder: Path, deadline: float) -> Plan:
    from ckaudit.engines.vllm import faults, parallel, planning
    from ckaudit.engines.vllm.attempt import Attempt, attempt
    from ckaudit.engines.vllm.draft import Drafting
    from ckaudit.engines.vllm.files import write_folder
    from ckaudit.engines.vllm.probing import Shapes

    raw = json.loads(job.texts["config.json"])
    shapes = Shapes(job.tensors, raw)
    write_folder(job.texts, shapes.blank(job.tensors), folder, code=job.options.trust_remote_code)

    def load(tensors: Sequence[TensorSpec], layout: Layout = PLAIN, rank: int = 0) -> Attempt:
        gc.collect()  # what the last load left; what was there before any is frozen
        config = engine.config(folder, job.options, layout)
        engine.join(config, layout, rank)
        with engine.within(config):
            return attempt(config, shapes.dress(tensors), folder, read)

    def told(tensors: Sequence[TensorSpec]) -> Attempt:
        return shapes.load(tensors, load) if shapes else load(tensors)

    try:
        if shapes:
            config = engine.config(folder, job.options)
            engine.join(config)
            with engine.within(config):
                shapes.probe(config)
        story = faults.tell(told, job.tensors, deadline)
    except Exception as error:  # noqa: BLE001  (raised before any weight: by the config or while layers are constructed)
        return msgspec.structs.replace(plan, not_judged=f"the model cannot be built here: {message(error)}")
    if story.last.raised is None and not story.last.yielded and not story.faults:
        how = job.options.vllm.get("load_format")
        return msgspec.structs.replace(plan, not_judged=f"with load format {how} this release reads no tensor of it")
    plan = planning.fill(plan, story, job.tensors, raw)
    if not shapes and any(n.fate != "loaded" for n in plan.names):  # what the main model leaves may be a draft model's
        loaded = [n.name for n in plan.names if n.fate == "loaded"]
        plan = planning.with_draft(
            plan, Drafting(engine, folder, job.options, read).tell(job.tensors, loaded, deadline)
        )
    alone = parallel.Alone(story.last, raw)
    rows = tuple(parallel.row(x, load, job.tensors, alone, deadline) for x in parallel.layouts(job.options))
    plan = msgspec.structs.replace(plan, environment=engine.environment(), tp=rows)
    return shapes.told(plan) if shapes else plan


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
    if not job.tensors:
        return "there are no tensors"
    return None


def _id(job: Job) -> str:
    return f"vllm=={job.release}" if job.release else "vllm"

"""The verdict that serving gives: the installed vLLM loads the checkpoint with its own loader on the device and makes one token.

It runs in a child process, as any load does. The result is a plan like the replay's, so that the two stand side by side in one report;
where they differ, ckaudit is wrong and says so (CK607).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks import behaviour
from ckaudit.findings import Finding
from ckaudit.materialize.job import Event, LoadOptions
from ckaudit.materialize.process import started
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress, Progress

CHILD = (sys.executable, "-P", "-m", "ckaudit.materialize.live_child")


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is asked: load `folder`, then one token after `tokens` ids."""

    folder: str
    options: LoadOptions
    vocab_size: int


class LiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's verdict as a plan, and what it took and said: the `live` part of the `load` section."""

    plan: Plan
    section: dict[str, Any]


def load_vllm(
    checkpoint: Checkpoint,
    folder: Path,
    options: LoadOptions,
    *,
    progress: Progress | None = None,
    argv: tuple[str, ...] = CHILD,
) -> LiveResult:
    """Load `checkpoint`, whose files lie in `folder`, in the vLLM that is installed. Never raises for what that does."""
    job = LiveJob(folder=str(folder), options=options, vocab_size=_vocabulary(checkpoint))
    last: dict[str, Any] = {}

    def hear(event: Event) -> None:
        last.update(event.load or {})

    with tempfile.TemporaryDirectory(prefix="ckaudit-vllm-") as scratch, started(argv, cwd=scratch) as child:
        ending = child.ask(msgspec.json.encode(job), hear, progress or NullProgress())
    section = {"status": "failed", "release": None, "error": ending or None, "seconds": None, "token": None} | last
    if ending and not last.get("finished"):
        section |= {"status": "not_judged", "error": f"The engine's process {ending}"}
    release = section["release"]
    plan = Plan(
        id=f"vllm=={release}" if release else "vllm",
        engine="vllm",
        release=release,
        method="live",
        options={"device": options.device, "tp": options.devices, "trust_remote_code": options.trust_remote_code},
        environment=section.pop("environment", {}),
        architecture=section.pop("architecture", None),
        not_judged=section["error"] if section["status"] == "not_judged" else None,
        error=section["error"] if section["status"] == "failed" else None,
    )
    section.pop("finished", None)
    return LiveResult(plan=plan, section=section)


def disagreements(live: Plan, plans: Sequence[Plan]) -> tuple[Finding, ...]:
    """What the engine did beside what replays and rules of the same release predicted. Loss is no disagreement: an engine does not tell."""
    found = []
    for plan in plans:
        if plan.engine != live.engine or plan.method == "live" or plan.release != live.release:
            continue
        if "not_judged" in (plan.verdict, live.verdict):
            continue
        predicted = "fails" if plan.verdict == "fails" else "loads"
        finding = behaviour.disagreement(plan.id, predicted, live.verdict, live.error)
        if finding is not None:
            found.append(finding)
    return tuple(found)


def _vocabulary(checkpoint: Checkpoint) -> int:
    """How many ids there are, from the config."""
    config = checkpoint.config or {}
    for part in (config, config.get("text_config"), config.get("llm_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return 32

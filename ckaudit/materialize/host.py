"""The parent's side: give the child its job, show how far it is, and turn what it told into a result, however it ended."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks import behaviour, values
from ckaudit.checks.observed import Observed
from ckaudit.errors import UsageError
from ckaudit.materialize.files import chosen_shards, explicit_weights
from ckaudit.materialize.job import Event, LoadJob, LoadOptions, LoadResult
from ckaudit.materialize.layout import Stored
from ckaudit.materialize.process import Child, started
from ckaudit.progress import NullProgress, Progress

CHILD = (sys.executable, "-P", "-m", "ckaudit.materialize.child")
KINDS = ("text", "image", "video", "audio", "series", "latent")
"""Kinds of input that a forward pass can be asked for."""


def waiting(options: LoadOptions, argv: tuple[str, ...] = CHILD) -> AbstractContextManager[Child]:
    """A child process that imports what every load needs until `load` gives it a job; ended with the block."""
    # Of several processes each is placed on whatever accelerator torch sees: transformers does not ask for one.
    return started(argv, accelerators=not (options.tp and options.device == "cpu"))


def load(
    checkpoint: Checkpoint,
    folder: Path,
    options: LoadOptions,
    *,
    progress: Progress | None = None,
    unused: tuple[str, ...] = (),
    child: Child | None = None,
    argv: tuple[str, ...] = CHILD,
) -> LoadResult:
    """Load `checkpoint`, whose files lie in `folder`, in a child process: `child` where one waits already, else a new one.

    `unused` names tensors that the loader will not ask for: they are not read. Circumstances end up in the result (`environment`), with
    whatever was known by then; only an option that makes no sense raises UsageError.
    """
    for kind in options.modalities:
        if kind not in KINDS:
            raise UsageError(f"--modality {kind!r} is no kind of input.", f"Use {', '.join(KINDS)}.")
    if options.modalities and not options.forward:
        raise UsageError(
            "--modality names inputs of a forward pass, and --no-forward leaves it out.", "Give one of the two."
        )
    if options.expect is not None and not options.forward:
        raise UsageError("--expect compares a forward pass, and --no-forward leaves it out.", "Give one of the two.")
    expected = _read_expected(options.expect)
    job = make_job(checkpoint, folder, options, unused)
    with nullcontext(child) if child is not None else waiting(options, argv) as one:
        story = _converse(job, progress or NullProgress(), one)
    section, forward = story.load, story.forward
    if forward is not None and options.expect is not None:
        compared = behaviour.compare(forward, expected, options.tolerance, partial=section["status"] == "partial")
        forward["expect"] = compared | {"file": options.expect}
    section["error"], section["blame"] = story.error, story.blame or None
    seen, unread = values.run(story.observed) if story.observed is not None else ((), ())
    behaved, not_run = behaviour.run(section, forward, values=seen)
    return LoadResult(
        load=section,
        forward=forward,
        findings=(*seen, *behaved),
        skips=(*unread, *not_run),
        observed=story.observed,
        error=story.error,
        hint=story.hint,
        unanswered=_unanswered(forward, options, expected),
        environment=story.blame == "environment",
    )


def _unanswered(forward: dict[str, Any] | None, options: LoadOptions, expected: dict[str, Any]) -> bool:
    """Whether a kind of input or a comparison was asked for, and could not be had."""
    if forward is None:
        return False
    runs = any(one["status"] == "not_run" and one["kind"] in options.modalities for one in forward["runs"])
    return runs or any(kind in expected for kind in (forward["expect"] or {}).get("missing", ()))


class _Story:
    """What the child has told so far."""

    def __init__(self) -> None:
        self.load: dict[str, Any] = {"status": "failed", "stages": {}}
        self.forward: dict[str, Any] | None = None
        self.observed: Observed | None = None
        self.error: str | None = None
        self.hint = ""
        self.blame = ""

    def hear(self, event: Event) -> None:
        self.load = event.load or self.load
        self.forward = event.forward or self.forward
        self.observed = event.observed or self.observed
        if event.done:
            self.error, self.hint, self.blame = event.error, event.hint, event.blame

    def end(self, ending: str) -> None:
        """The child is gone; where that was too early, `ending` says how."""
        if not ending:
            return
        self.load["status"] = "interrupted" if ending.startswith("was interrupted") else "failed"
        self.blame = "environment"
        self.error = f"The load {ending}"
        if self.load["status"] == "failed":
            self.hint = "Try --device cpu, --shards N, or --no-values to see which part it is."


def _converse(job: LoadJob, progress: Progress, child: Child) -> _Story:
    story = _Story()
    size = sum(t.nbytes for t in job.tensors)
    with progress.task("load", size) as task:

        def hear(event: Event) -> None:
            story.hear(event)
            if event.moved:
                task.advance(event.moved)

        story.end(child.ask(msgspec.json.encode(job), hear, progress))
    return story


def make_job(checkpoint: Checkpoint, folder: Path, options: LoadOptions, unused: tuple[str, ...] = ()) -> LoadJob:
    """What the child is told: every tensor's place in its file."""
    chosen = chosen_shards(checkpoint, options)
    tensors = []
    for number, shard in enumerate(chosen):
        if shard.header is None:
            continue
        data = 8 + shard.header.length
        for name, info in shard.header.tensors.items():
            start, stop = info.data_offsets
            tensors.append(Stored(name, number, info.dtype, tuple(info.shape), data + start, data + stop))
    return LoadJob(
        name=checkpoint.name,
        folder=str(folder),
        files=tuple(str(folder / s.path) for s in chosen),
        tensors=tuple(tensors),
        unused=unused,
        weights=explicit_weights(checkpoint),
        partial=len(chosen) < len(checkpoint.shards),
        processes=int(os.environ.get("WORLD_SIZE", "1")) if options.tp else 1,
        options=options,
    )


def _read_expected(path: str | None) -> dict[str, Any]:
    """The fingerprints to compare with, by kind of input. Raises UsageError."""
    if path is None:
        return {}
    try:
        document = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"--expect {path!r} cannot be read: {error}.", "Give the JSON report of an earlier load."
        ) from error
    found = behaviour.fingerprints(document)
    if not found:
        raise UsageError(f"--expect {path!r} holds no fingerprint.", "Give the JSON report of an earlier load.")
    return dict(found)

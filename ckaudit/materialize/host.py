"""The parent's side: start the child, show how far it is, and turn what it told into a result, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks import behaviour, values
from ckaudit.checks.observed import Observed
from ckaudit.engines.host import worker_env
from ckaudit.errors import UsageError
from ckaudit.materialize.files import chosen_shards, explicit_weights
from ckaudit.materialize.job import Event, LoadJob, LoadOptions, LoadResult
from ckaudit.materialize.layout import Stored
from ckaudit.progress import NullProgress, Progress

CHILD = (sys.executable, "-P", "-m", "ckaudit.materialize.child")
KINDS = ("text", "image", "video", "audio", "series", "latent")
"""Kinds of input that a forward pass can be asked for."""
_PATIENCE = 20.0
"""Seconds that an interrupted child has to say what it knows."""
_TAIL_LINES = 3


def load(
    checkpoint: Checkpoint,
    folder: Path,
    options: LoadOptions,
    *,
    progress: Progress | None = None,
    unused: tuple[str, ...] = (),
    argv: tuple[str, ...] = CHILD,
) -> LoadResult:
    """Load `checkpoint`, whose files lie in `folder`, in a child process.

    `unused` names tensors that the loader will not ask for: they are not read. Circumstances end up in the result (`environment`), with
    whatever was known by then; only an option that makes no sense raises UsageError.
    """
    for kind in options.modalities:
        if kind not in KINDS:
            raise UsageError(f"--modality {kind!r} is no kind of input.", f"Use {', '.join(KINDS)}.")
    expected = _read_expected(options.expect)
    job = make_job(checkpoint, folder, options, unused)
    story = _converse(job, progress or NullProgress(), argv)
    section, forward = story.load, story.forward
    if forward is not None and options.expect is not None:
        forward["expect"] = behaviour.compare(forward["runs"], expected, options.tolerance) | {"file": options.expect}
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
        environment=story.blame == "environment",
    )


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
        self.hint = "Try --device cpu, --shards N, or --no-values to see which part it is."


def _converse(job: LoadJob, progress: Progress, argv: tuple[str, ...]) -> _Story:
    story = _Story()
    size = sum(t.nbytes for t in job.tensors)
    with progress.task("load", size) as task:

        def hear(event: Event) -> None:
            story.hear(event)
            if event.moved:
                task.advance(event.moved)

        story.end(run_child(argv, msgspec.json.encode(job), hear, progress))
    return story


def run_child(
    argv: tuple[str, ...], job: bytes, hear: Callable[[Event], None], progress: Progress, *, cwd: str | None = None
) -> str:
    """Give a child its job and hear what it tells until it ends. Returns how it ended where that was early, else nothing.

    Ctrl-C asks the child for what it knows; a second one ends it at once.
    """
    stage, done, interrupted = "start", False, False
    with tempfile.TemporaryFile() as errors, _child(argv, errors, cwd) as process, ExitStack() as shown:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(job + b"\n")
            process.stdin.close()
        while True:
            try:
                for line in process.stdout:
                    event = msgspec.json.decode(line, type=Event)
                    if event.stage is not None:
                        stage = event.stage
                        shown.close()
                        shown.enter_context(progress.task(f"load: {stage}"))
                    done = done or event.done
                    hear(event)
                break
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                process.send_signal(signal.SIGINT)
                timer = threading.Timer(_PATIENCE, process.kill)
                timer.daemon = True
                timer.start()
            except msgspec.DecodeError:  # a line that was cut as the child died
                continue
        code = process.wait()
        if done:
            return ""
        if interrupted:
            return f"was interrupted in stage {stage!r}."
        tail = _tail(errors)
        return f"died in stage {stage!r}: {_ending(code)}" + (f" Its last lines: {tail}" if tail else "")


@contextmanager
def _child(argv: tuple[str, ...], errors: IO[bytes], cwd: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """The child, ended with all that it started when the block is left, however that happens."""
    # The engines' workers see no accelerator; this one must.
    env = worker_env()
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=cwd, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


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


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with status {code}."
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    why = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (a file was cut while it was read?)"}.get(-code, "")  # type: ignore[call-overload]
    return f"it was killed by {name}{why}."


def _tail(errors: IO[bytes]) -> str:
    """The last lines of the child's stderr, as one line."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4096))
    lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])

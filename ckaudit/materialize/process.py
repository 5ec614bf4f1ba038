"""A child process that does the work: started, given its job, heard until it ends, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

import msgspec

from ckaudit.engines.host import worker_env
from ckaudit.materialize.job import Event
from ckaudit.progress import Progress

_PATIENCE = 20.0
"""Seconds that an interrupted child has to say what it knows."""
_TAIL_LINES = 3


@contextmanager
def started(argv: tuple[str, ...], *, cwd: str | None = None, accelerators: bool = True) -> Iterator[Child]:
    """A child that waits for its job. Ended, with all that it started, when the block is left, however that happens.

    Without `accelerators` it sees none, as an engine's worker.
    """
    env = worker_env()
    if accelerators:
        env.pop("CUDA_VISIBLE_DEVICES", None)
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=cwd, start_new_session=True
        )
        try:
            yield Child(process, errors)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


class Child:
    """A process that reads one job and tells events, a line each."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors

    def ask(self, job: bytes, hear: Callable[[Event], None], progress: Progress) -> str:
        """Give the child its job and hear what it tells until it ends. Returns how it ended where that was early, else nothing.

        Ctrl-C asks the child for what it knows; a second one ends it at once.
        """
        process = self._process
        stage, done, interrupted = "start", False, False
        assert process.stdin is not None
        assert process.stdout is not None
        with ExitStack() as shown:
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
                    code = process.wait()
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
        if done:
            return ""
        if interrupted:
            return f"was interrupted in stage {stage!r}."
        tail = _tail(self._errors)
        return f"died in stage {stage!r}: {_ending(code)}" + (f" Its last lines: {tail}" if tail else "")


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

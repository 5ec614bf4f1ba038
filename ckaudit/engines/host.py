"""The parent's side of an engine worker: start it, give it jobs, and outlive whatever it does.

A worker that dies (segmentation fault, out of memory, `os._exit`), hangs, or runs past its budget never harms the audit: its job ends as
a `Plan` that was not judged, with the reason, and the next job starts a fresh worker.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from ckaudit.engines import Job, ReadTensor
from ckaudit.engines.worker import Call, Data, Done, JobCall, ReadCall, Reply, encoded
from ckaudit.errors import CkauditError
from ckaudit.plan import Plan

# -P: a file `torch.py` in the folder that ckaudit is started from must not be imported.
WORKER = (sys.executable, "-P", "-m", "ckaudit.engines.worker")

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
_QUIET_AND_OFFLINE = {
    "CUDA_VISIBLE_DEVICES": "",  # a plan must not depend on the accelerator of the machine that makes it
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "PYTHONHASHSEED": "0",  # the same input gives the same bytes, whatever order the engine walks its sets in
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
}
_TAIL_LINES = 5


def worker_env(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of a worker: the parent's without secrets and Python switches, offline and quiet, then `extra`."""
    kept = {
        k: v for k, v in os.environ.items() if not _SECRET.search(k) and k not in ("PYTHONWARNINGS", "PYTHONSTARTUP")
    }
    return kept | _QUIET_AND_OFFLINE | dict(extra)


class WorkerHost:
    """One worker process, started at the first job and again after it died; use it as a context manager or call `close`.

    `argv` is the worker's command line; `env` is laid over `worker_env()`. The worker lives in a folder of its own (working directory and
    `TMPDIR`), which goes when it goes, so that a killed worker leaves nothing behind.
    """

    def __init__(self, argv: Sequence[str] = WORKER, env: Mapping[str, str] = {}) -> None:
        self._argv, self._env = tuple(argv), dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._stderr: IO[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, job: Job, read: ReadTensor, budget: float) -> Plan:
        """The worker's plan for `job`; `read` answers its questions for tensor bytes. `budget` is in seconds, start-up included."""
        with self._lock:
            try:
                with self._deadline(budget) as expired:
                    done = self._converse(JobCall(job), read)
                if done is not None and done.plan is not None:
                    return done.plan
                reason = self._obituary(done, budget if expired.is_set() else None)
            except BaseException:  # an interrupted worker is in the middle of a conversation: of no more use
                self.close()
                raise
            self.close()
        return unjudged(job, f"the {job.engine} worker {reason}")

    def close(self) -> None:
        """End the worker, if one runs, with every process it started. It holds nothing that is worth a farewell."""
        atexit.unregister(self.close)
        if self._process is not None:
            _kill(self._process)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # bytes that the dead worker never took
                        pipe.close()
            self._process.wait()
            self._process = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="ckaudit-worker-")
        # A file, not a pipe: nobody has to drain it while the worker runs.
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (closed by `close`)
        atexit.register(self.close)
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=self._folder,
            env=worker_env({"TMPDIR": self._folder} | self._env),
            start_new_session=True,  # its children die with it, and Ctrl-C reaches the parent alone
        )
        return self._process

    def _converse(self, call: Call, read: ReadTensor) -> Done | None:
        """Send the job, answer reads, return the worker's last word; None if it died before it could say one."""
        process = self._process or self._start()
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None or self._stderr is None:
            raise AssertionError("the worker was started with pipes")
        self._stderr.truncate(0)
        try:
            while True:
                stdin.write(encoded(call) + b"\n")
                stdin.flush()
                line = stdout.readline()
                if not line.endswith(b"\n"):
                    return None
                reply: Any = msgspec.json.decode(line, type=Reply)
                if isinstance(reply, Done):
                    return reply
                call = _answer(reply, read)
        except BrokenPipeError:
            return None

    @contextmanager
    def _deadline(self, budget: float) -> Iterator[threading.Event]:
        """Kill the worker when `budget` is over, which ends any wait on its pipes; the event says that this happened."""
        expired = threading.Event()

        def end() -> None:
            expired.set()
            if self._process is not None:
                _kill(self._process)

        timer = threading.Timer(min(budget, threading.TIMEOUT_MAX), end)  # --budget inf
        timer.daemon = True
        timer.start()
        try:
            yield expired
        finally:
            timer.cancel()

    def _obituary(self, done: Done | None, overrun: float | None) -> str:
        """Why there is no plan: what the worker said or how it ended, and its last lines."""
        if overrun is not None:
            cause = f"ran past its budget of {overrun:g} s"
        elif done is not None:
            return f"broke down: {done.error}"
        else:
            cause = self._ending()
        tail = self._tail()
        return f"{cause}; its last lines: {tail}" if tail else cause

    def _ending(self) -> str:
        if self._process is None:
            return "never started"
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its output without an answer"
        if code >= 0:
            return f"ended with status {code} before it answered"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")

    def _tail(self) -> str:
        """The last lines of the worker's stderr, as one line."""
        if self._stderr is None:
            return ""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = [line.strip() for line in self._stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:])


def unjudged(job: Job, reason: str) -> Plan:
    """The plan of a job about which nothing can be said, because of `reason`."""
    return Plan(
        id=job.engine if job.release is None or job.engine == "transformers" else f"{job.engine}=={job.release}",
        engine=job.engine,
        release=job.release,
        method="live" if job.engine == "transformers" else "replay",
        not_judged=reason,
    )


def _answer(call: ReadCall, read: ReadTensor) -> Data:
    try:
        return Data(data=read(call.name))
    except (CkauditError, KeyError, OSError, ValueError) as error:
        return Data(error=f"{type(error).__name__}: {error}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

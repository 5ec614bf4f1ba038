"""The process in which an engine's own code runs: `python -m ckaudit.engines.worker`.

It loops: one JSON `Call` a line in, one JSON `Reply` a line out, until its input ends. Whatever the engine prints goes to stderr,
since file descriptor 1 points there and the replies leave through a private copy of the original stdout. Only the standard library
and msgspec are imported before the first job says which engine it is for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from ckaudit.engines import Job, ReadTensor
from ckaudit.plan import Plan


class JobCall(msgspec.Struct, frozen=True, tag="job"):
    """Parent to worker: do this job."""

    job: Job


class Data(msgspec.Struct, frozen=True, tag="data"):
    """Parent to worker: the bytes that a `ReadCall` asked for, or why there are none."""

    data: bytes = b""
    error: str | None = None


class ReadCall(msgspec.Struct, frozen=True, tag="read"):
    """Worker to parent, in the middle of a job: the bytes of this tensor, please."""

    name: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Worker to parent: the plan, or the line with which the engine's adapter broke down (its traceback is on stderr)."""

    plan: Plan | None = None
    error: str | None = None


Runner = Callable[[Job, ReadTensor], Plan]
Call = JobCall | Data
Reply = ReadCall | Done


def encoded(value: object) -> bytes:
    """`value` as one line of JSON. Half a surrogate pair (`"dtype": "\\ud800"`, a path that is not UTF-8) has no UTF-8: a `?` then."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode("utf-8", "replace")


def engine_runner(engine: str) -> Runner:
    """The function that does jobs for `engine`, imported only now: one engine must not pay for another."""
    if engine == "transformers":
        from ckaudit.engines.transformers import loader

        return loader.run
    if engine == "vllm":
        from ckaudit.engines.vllm import replay

        return replay.run
    raise ValueError(f"no engine {engine!r} runs in a worker")


def serve(inward: BinaryIO, outward: BinaryIO, runner: Callable[[str], Runner]) -> None:
    """Do jobs from `inward` until it ends. An adapter that raises, or calls `sys.exit`, costs its own job and no other."""

    def send(line: bytes) -> None:
        outward.write(line + b"\n")
        outward.flush()

    def read(name: str) -> bytes:
        send(msgspec.json.encode(ReadCall(name)))
        got = msgspec.json.decode(inward.readline(), type=Data)
        if got.error is not None:
            raise OSError(f"{name}: {got.error}")
        return got.data

    for line in inward:
        job = msgspec.json.decode(line, type=JobCall).job
        try:
            answer = encoded(Done(plan=runner(job.engine)(job, read)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (anything at all: the parent must get its answer)
            traceback.print_exc()
            answer = encoded(Done(error=f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        send(answer)


def _end_with_parent() -> None:
    """End when the parent is gone: a job in progress would otherwise run on for nobody."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Take stdin and stdout for the conversation with the parent, away from the engine's reach, and serve."""
    inward, outward = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(inward, outward, engine_runner)


if __name__ == "__main__":
    main()

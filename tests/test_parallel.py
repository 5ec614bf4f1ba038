"""Work side by side: how much at once, what ends it, and that an interrupt does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hub_faults import slow
from hub_repos import Sparse
from hub_server import HubServer

from ckaudit.source.parallel import side_by_side


def test_every_item_comes_back_once_with_its_result() -> None:
    assert sorted(side_by_side(lambda n, _: n * n, range(100), 4)) == [(n, n * n) for n in range(100)]


def test_no_items_is_no_work() -> None:
    assert list(side_by_side(lambda n, _: n, [], 4)) == []


@pytest.mark.parametrize("jobs", [1, 3, 16])
def test_as_many_at_once_as_asked_for_and_no_more(jobs: int) -> None:
    now = most = 0
    lock = threading.Lock()
    together = threading.Barrier(jobs)

    def work(_: int, stop: threading.Event) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(timeout=30)
        with lock:
            now -= 1

    list(side_by_side(work, range(4 * jobs), jobs))
    assert most == jobs


def test_items_are_taken_only_a_little_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for n in range(1000):
            taken += 1
            yield n

    for handled, _ in enumerate(side_by_side(lambda n, _: n, items(), 4)):
        assert taken <= handled + 1 + 8
    assert taken == 1000


def test_the_first_error_is_raised_and_nothing_starts_after_it() -> None:
    started = []

    def work(n: int, stop: threading.Event) -> int:
        started.append(n)
        if n == 3:
            raise LookupError(n)
        stop.wait(40)
        return n

    before = time.monotonic()
    with pytest.raises(LookupError):
        list(side_by_side(work, range(100), 4))
    assert time.monotonic() - before < 30, "the others were told to stop"
    time.sleep(0.05)
    assert len(started) <= 5


def test_an_error_of_the_items_themselves_ends_the_work() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError

    with pytest.raises(LookupError):
        list(side_by_side(lambda n, _: n, items(), 4))


@pytest.mark.timeout(60)
def test_an_interrupt_ends_a_program_that_waits_for_a_silent_server() -> None:
    program = """
import sys
from ckaudit.source import Span, open_source
source = open_source("org/name")
spans = [Span(f"{i}.safetensors", 0, 10) for i in range(50)]
print("ready", flush=True)
for _ in source.read_spans(spans):
    pass
"""
    with HubServer({"org/name": {f"{i}.safetensors": Sparse(b"", 10**9) for i in range(50)}}) as hub:
        hub.fail("*.safetensors", slow(30), times=None)
        env = {**os.environ, **hub.env(HF_HUB_DOWNLOAD_TIMEOUT="60")}
        with subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 10
            while len(hub.log) < 17 and time.monotonic() < deadline:
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            began = time.monotonic()
            _, error = child.communicate(timeout=20)
    assert time.monotonic() - began < 15
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert error.count("Traceback") == 1, "no thread may add its own"

"""The worker and its host: answers, read round trips, and every way in which a worker can let its parent down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckaudit.engines import EngineOptions, Job
from ckaudit.engines.host import WorkerHost, worker_env

# A worker that serves with runners of its own; the engine's name says what the adapter does.
SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from ckaudit.engines import worker
from ckaudit.plan import Plan

def adapter(job, read):
    what = job.name
    if what == "noise":
        print("engine chatter"); os.write(1, b"raw chatter\\n"); sys.stdin.read()
    if what == "read":
        return Plan(id="x", engine="x", release=read("w").hex(), method="live")
    if what == "read-missing":
        try: read("gone")
        except OSError as e: return Plan(id="x", engine="x", release=str(e), method="live")
    if what == "raise": raise ValueError("adapter bug")
    if what == "quote?": return Plan(id="x", engine="x", release=None, method="live", error="no dtype \\ud800")
    if what == "quote breakdown": raise LookupError("no \\ud800")
    if what == "exit": sys.exit(7)
    if what == "hard-exit": print("last words", file=sys.stderr, flush=True); os._exit(9)
    if what == "segfault": ctypes.string_at(0)
    if what == "oom": os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang": time.sleep(600)
    if what == "orphan": subprocess.Popen(["sleep", "613"]); time.sleep(600)
    return Plan(id="x", engine="x", release=str(os.getpid()), method="live", environment=dict(os.environ), options={"cwd": os.getcwd()})

worker.engine_runner = lambda engine: adapter
worker.main()
"""


def job(what: str) -> Job:
    return Job(engine="vllm", release="1.0", options=EngineOptions(), name=what, texts={"a": b"\xff\x00"}, tensors=())


def read(name: str) -> bytes:
    return {"w": b"\x01\x02"}[name]


@pytest.fixture
def host():
    with WorkerHost([sys.executable, "-c", SCRIPT]) as host:
        yield host


def test_one_worker_serves_many_jobs(host):
    first, second = host.run(job("pid"), read, 60), host.run(job("noise"), read, 60)
    assert first.release == second.release
    assert int(first.release) != os.getpid()
    assert first.not_judged is None


def test_read_reaches_the_parent(host):
    assert host.run(job("read"), read, 60).release == "0102"
    assert "gone" in host.run(job("read-missing"), read, 60).release
    assert host.run(job("pid"), read, 60).not_judged is None


def test_text_that_is_no_unicode_goes_both_ways(host):
    """As argv and file names bring it, and as a loader quotes `"dtype": "\\ud800"` from a config: `?` stands for what has no UTF-8."""
    assert host.run(job("quote\udcff"), read, 60).error == "no dtype ?"
    assert host.run(job("quote breakdown"), read, 60).not_judged == "the vllm worker broke down: LookupError: no ?"


def test_an_adapter_that_breaks_down_costs_one_job(host):
    assert "broke down: ValueError: adapter bug" in host.run(job("raise"), read, 60).not_judged
    assert "SystemExit: 7" in host.run(job("exit"), read, 60).not_judged
    assert host.run(job("pid"), read, 60).not_judged is None


@pytest.mark.parametrize(
    ("what", "says"),
    [("hard-exit", "status 9"), ("hard-exit", "last words"), ("segfault", "SIGSEGV"), ("oom", "out of memory?")],
)
def test_a_dead_worker_is_not_judged_and_the_next_job_gets_a_new_one(host, what, says):
    plan = host.run(job(what), read, 60)
    assert plan.verdict == "not_judged"
    assert says in plan.not_judged
    assert plan.id == "vllm==1.0"
    assert host.run(job("pid"), read, 60).not_judged is None


def test_the_budget_ends_a_worker_that_hangs(host):
    began = time.monotonic()
    plan = host.run(job("hang"), read, 1.5)
    assert time.monotonic() - began < 20
    assert "budget of 1.5 s" in plan.not_judged


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("budget", [1e300, float("inf")])
def test_a_budget_without_end(host, budget):
    assert host.run(job("x"), read, budget).not_judged is None
    time.sleep(0.1)  # the timer's thread would die with an OverflowError


def test_grandchildren_die_with_the_worker(host):
    assert "budget" in host.run(job("orphan"), read, 3).not_judged
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in left.splitlines() if line == "sleep 613"]


def test_close_leaves_no_process_and_no_folder(host):
    plan = host.run(job("pid"), read, 60)
    host.close()
    host.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(plan.release), 0)
    assert not Path(plan.options["cwd"]).exists()


def test_an_interrupted_parent_ends_its_worker(host):
    pid = int(host.run(job("pid"), read, 60).release)

    def stop(_name: str) -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host.run(job("read"), stop, 60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_ends_when_its_parent_is_killed():
    program = (
        "import sys, os; from ckaudit.engines.host import WorkerHost; sys.path.insert(0, sys.argv[1]); import test_worker as t;"
        "h = WorkerHost([sys.executable, '-c', t.SCRIPT]); print(h.run(t.job('pid'), t.read, 60).release, flush=True);"
        "h.run(t.job('hang'), t.read, 600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, os.path.dirname(__file__)], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_concurrent_hosts_do_not_disturb_each_other():
    plans = {}

    def audit(n: int) -> None:
        with WorkerHost([sys.executable, "-c", SCRIPT]) as host:
            plans[n] = host.run(job("read"), read, 60)

    threads = [threading.Thread(target=audit, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [plans[n].release for n in range(3)] == ["0102"] * 3


def test_the_worker_is_offline_and_holds_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    env = worker_env({"EXTRA": "1"})
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["EXTRA"] == "1"
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONWARNINGS"} & set(env)

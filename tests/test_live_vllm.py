"""vLLM's own verdict beside the replay's, with a stand-in for vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckaudit.checkpoint import read_checkpoint
from ckaudit.errors import UsageError
from ckaudit.materialize.job import LoadOptions
from ckaudit.materialize.live import CHILD, LiveResult, disagreements, load_vllm
from ckaudit.pipeline import load as pipeline
from ckaudit.plan import NameFate, Plan
from ckaudit.source import open_source
from tests.helpers import safetensors_file

STAND_IN = str(Path(__file__).parent / "standin")


def live(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    installed: bool = True,
    argv: tuple[str, ...] = CHILD,
    **config: Any,
) -> LiveResult:
    if installed:
        monkeypatch.setenv("PYTHONPATH", STAND_IN)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 90, **config}))
    (folder / "model.safetensors").write_bytes(safetensors_file({"a": ("BF16", [2])}))
    return load_vllm(read_checkpoint(open_source(str(folder))), folder, LoadOptions(), argv=argv)


def test_a_checkpoint_that_the_engine_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = live(tmp_path, monkeypatch)
    assert (result.plan.id, result.plan.method, result.plan.verdict) == ("vllm==0.29.0", "live", "loads")
    assert (result.section["status"], result.section["token"]) == ("complete", 7)


def test_what_the_engine_raises_is_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = live(tmp_path, monkeypatch, stand_in_raises="key")
    assert result.plan.verdict == "fails"
    assert "layers.0.q_proj.weight" in (result.plan.error or "")


def test_lack_of_memory_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live(tmp_path, monkeypatch, stand_in_raises="memory").plan.verdict == "not_judged"


def test_an_engine_that_is_not_installed_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = live(tmp_path, monkeypatch, installed=False)
    assert result.plan.verdict == "not_judged"
    assert "vLLM cannot be imported" in (result.plan.not_judged or "")


def test_an_engine_that_takes_the_process_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = (sys.executable, "-c", "import os, sys; sys.stdin.readline(); os.abort()")
    result = live(tmp_path, monkeypatch, argv=dies)
    assert result.plan.verdict == "not_judged"
    assert "killed by SIGABRT" in (result.plan.not_judged or "")


def plan(method: str = "live", release: str | None = "0.29.0", **fields: Any) -> Plan:
    return Plan(id=f"vllm=={release}", engine="vllm", release=release, method=method, **fields)  # type: ignore[arg-type]


def test_engine_and_replay_that_agree() -> None:
    for error in (None, "KeyError"):
        assert disagreements(plan(error=error), [plan("replay", error=error)]) == ()
    lossy = plan("replay", names=(NameFate("a", "ignored"),))
    assert lossy.verdict == "loads_with_loss"
    assert disagreements(plan(), [lossy]) == ()  # an engine says nothing of what it drops


@pytest.mark.parametrize(("said", "did"), [(None, "KeyError"), ("KeyError", None)])
def test_engine_and_replay_that_do_not(said: str | None, did: str | None) -> None:
    (finding,) = disagreements(plan(error=did), [plan("replay", error=said)])
    assert finding.check == "CK607"


def test_only_the_same_release_judged_by_both_is_compared() -> None:
    raised = plan(error="KeyError")
    for other in (
        plan("replay", "0.25.1"),
        plan("replay", not_judged="no torch"),
        Plan(id="transformers", engine="transformers", release="0.29.0", method="live"),
        plan(),
    ):
        assert disagreements(raised, [other]) == ()
    assert disagreements(plan(not_judged="no GPU"), [plan("replay", error="KeyError")]) == ()


class Predicts:
    """An engine in place of each that is asked: every name would load."""

    id = "vllm==0.29.0"

    def plan(self, *_: object) -> Plan:
        return plan("replay")


@pytest.mark.parametrize(("trailing", "wrong"), [(b"", ["CK607"]), (b"\0", [])])
def test_a_file_that_no_loader_opens_is_no_disagreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trailing: bytes, wrong: list[str]
) -> None:
    """Names alone say that it loads; the engine raises, and where the file itself is refused that was to be expected."""
    monkeypatch.setenv("PYTHONPATH", STAND_IN)
    monkeypatch.setattr(pipeline, "select", lambda _: (Predicts(),))
    config = {"model_type": "llama", "vocab_size": 90, "stand_in_raises": "value"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(safetensors_file({"a": ("BF16", [2])}) + trailing)
    report = pipeline.load(str(tmp_path), LoadOptions(), engine="vllm").report
    assert [p.verdict for p in report.plans] == ["loads" if wrong else "fails", "fails"]
    assert [f.check for f in report.findings if f.check == "CK607"] == wrong


@pytest.mark.parametrize(
    "asked", [{"expect": "before.json"}, {"shards": 1}, {"class_name": "X"}, {"modalities": ("text",)}, {"tp": True}]
)
def test_what_its_load_does_not_go_by_is_refused_before_anything_is_read(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="vLLM's own load does not go by --"):
        pipeline.load("/no/such/folder", LoadOptions(**asked), engine="vllm")
    with pytest.raises(UsageError, match="no file or folder"):  # transformers' does
        pipeline.load("/no/such/folder", LoadOptions(**asked))

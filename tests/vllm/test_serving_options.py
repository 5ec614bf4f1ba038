"""vLLM's serving options, under its own names. On `tests/mini_vllm`, which takes them as a release does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from ckaudit.engines.host import WorkerHost
from tests.vllm.mini import ENV, fates, good, replay


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(env=ENV) as worker:
        yield worker


def test_overrides_reach_the_config(host: WorkerHost) -> None:
    plan = replay(host, good(), vllm={"hf_overrides": {"layers": 3}})
    assert plan.verdict == "fails"
    assert "layers.2.o_proj.weight" in (plan.error or "")
    assert plan.options == {"tp": 1, "trust_remote_code": False, "hf_overrides": {"layers": 3}}
    assert replay(host, good(3), vllm={"hf_overrides": {"layers": 3}}).verdict == "loads"


def test_a_quantised_model_is_not_asked_whether_all_was_loaded(host: WorkerHost) -> None:
    """The release makes its start-up check for plain models alone; what was seen stays a loss."""
    shapes = good()
    del shapes["model.layers.0.o_proj.weight"]
    assert replay(host, shapes).verdict == "fails"
    plan = replay(host, shapes, vllm={"quantization": "fp8"})
    assert (plan.verdict, plan.error) == ("loads_with_loss", None)


def test_what_quantises_as_it_loads_is_left_out(host: WorkerHost) -> None:
    assert replay(host, good(), "Online", vllm={"quantization": "fp8"}).verdict == "loads"


def test_a_load_format_that_reads_nothing_judges_nothing(host: WorkerHost) -> None:
    plan = replay(host, good(), vllm={"load_format": "dummy"})
    assert plan.not_judged == "with load format dummy this release reads no tensor of it"
    assert fates(plan, "ignored") == []


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors"])
def test_load_formats_that_read_the_same_files(host: WorkerHost, load_format: str) -> None:
    assert replay(host, good(), vllm={"load_format": load_format}).verdict == "loads"

"""Every fault in one run, and the right tensor for each, though the loader may not say which it was. On `tests/mini_vllm`."""

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


def test_three_faults_that_have_nothing_to_do_with_each_other(host: WorkerHost) -> None:
    shapes = good(3) | {"model.layers.1.o_proj.weight": (8, 4)}  # of another shape
    shapes["model.layers.0.oo_proj.weight"] = shapes.pop("model.layers.0.o_proj.weight")  # misnamed
    del shapes["model.embed.weight"]  # missing
    plan = replay(host, shapes, layers=3)
    assert plan.verdict == "fails"
    assert fates(plan, "unmatched") == ["model.layers.0.oo_proj.weight"]
    assert fates(plan, "not_reached") == ["model.layers.1.o_proj.weight"]
    unwritten = {p.name for p in plan.parameters if p.coverage != "full"}
    assert unwritten == {"embed.weight", "layers.0.o_proj.weight", "layers.1.o_proj.weight"}
    assert [f.names for f in plan.failures] == [("model.layers.0.oo_proj.weight",), ("model.layers.1.o_proj.weight",)]
    (after,) = [n.text for n in plan.notes if n.kind == "afterwards"]  # what the start-up check says of the rest
    assert "embed.weight" in after


@pytest.mark.parametrize("odd", ["model.embed.weight", "model.layers.1.q_proj.weight", "model.layers.2.v_proj.weight"])
def test_an_offender_that_nothing_points_at_is_found_by_halves(host: WorkerHost, odd: str) -> None:
    shapes = good(3) | {odd: (1, *good(3)[odd])}
    plan = replay(host, shapes, "Collects", layers=3)
    assert plan.verdict == "fails"
    assert fates(plan, "unmatched") == [odd]
    assert [f.names for f in plan.failures] == [(odd,)]
    assert len(fates(plan, "loaded")) == 12


def test_two_offenders_of_the_same_words(host: WorkerHost) -> None:
    odd = ["model.layers.0.k_proj.weight", "model.layers.2.o_proj.weight"]
    plan = replay(host, good(3) | dict.fromkeys(odd, (1, 8, 8)), "Collects", layers=3)
    assert sorted(fates(plan, "unmatched")) == odd
    assert len(fates(plan, "loaded")) == 11
    assert plan.unjudged == ()  # the search came to its end


def test_the_tensor_in_the_frames_may_be_an_innocent_one(host: WorkerHost) -> None:
    plan = replay(host, good() | {"model.layers.0.aaa": ()}, "Late")  # the next in order is layers.0.k_proj
    assert fates(plan, "unmatched") == ["model.layers.0.aaa"]
    assert len(fates(plan, "loaded")) == 9
    assert plan.error == "ValueError: a scalar is not expected"


def test_an_error_that_no_tensor_causes_is_blamed_on_none(host: WorkerHost) -> None:
    plan = replay(host, good(), "Always")
    assert plan.verdict == "fails"
    assert [f.names for f in plan.failures] == [()]
    assert [(u.topic, u.reason) for u in plan.unjudged] == [
        ("faults", "whether there are further faults: the tensor that the loader raised at was not found")
    ]
    assert fates(plan, "unmatched") == []


def test_a_shard_whose_only_tensor_is_set_aside_is_still_there(host: WorkerHost) -> None:
    plan = replay(host, good() | {"zzz": (8, 8)}, shards={"zzz": "model-2.safetensors"})
    assert (fates(plan, "unmatched"), plan.error) == (["zzz"], "KeyError: 'zzz'")
    assert len(fates(plan, "loaded")) == 9

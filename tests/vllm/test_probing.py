"""An index without headers: shapes are those that the engine's parameters want. On `tests/mini_vllm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from ckaudit.engines.host import WorkerHost
from ckaudit.plan import Plan
from tests.vllm.mini import ENV, fates, good, replay


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(env=ENV) as worker:
        yield worker


def names_alone(host: WorkerHost, names: list[str], architecture: str = "Mini", **more: object) -> Plan:
    return replay(host, dict.fromkeys(names), architecture, dtype=None, index_only=True, **more)  # type: ignore[arg-type]


def test_every_shape_is_what_its_place_wants_a_part_of_a_fused_parameter_too(host: WorkerHost) -> None:
    plan = names_alone(host, list(good()))
    assert (plan.verdict, plan.error, plan.not_judged) == ("loads", None, None)
    assert {p.coverage for p in plan.parameters} == {"full"}
    assert {u.topic for u in plan.unjudged} == {"shapes", "dtypes"}
    assert plan.mismatches == ()


def test_names_and_completeness_are_judged_all_the_same(host: WorkerHost) -> None:
    names = [n.replace("1.k_proj", "1.kk_proj") for n in good() if n != "model.layers.0.o_proj.weight"]
    plan = names_alone(host, names)
    assert plan.verdict == "fails"
    assert fates(plan, "unmatched") == ["model.layers.1.kk_proj.weight"]
    assert {(p.name, p.coverage) for p in plan.parameters if p.coverage != "full"} == {
        ("layers.0.o_proj.weight", "none"), ("layers.1.qkv_proj.weight", "partial")
    }  # fmt: skip


def test_a_vocabulary_that_the_engine_pads(host: WorkerHost) -> None:
    """The place has 16 rows, the loader takes the 13 of the config alone."""
    plan = names_alone(host, list(good()), "Padded", more={"vocab_size": 13})
    assert (plan.verdict, plan.not_judged) == ("loads", None)


def test_a_shape_that_is_not_to_be_had_is_not_judged(host: WorkerHost) -> None:
    plan = names_alone(host, list(good()), "Fussy")
    assert plan.verdict == "not_judged"
    assert "model.embed.weight" in (plan.not_judged or "")


def test_layers_of_different_sizes(host: WorkerHost) -> None:
    plan = names_alone(host, list(good()), "Tapered")
    assert (plan.verdict, plan.error) == ("loads", None)


def test_headers_that_are_there_are_still_compared(host: WorkerHost) -> None:
    """One shard could be read, and the other not."""
    shapes = good() | {"model.embed.weight": None, "model.layers.0.o_proj.weight": (8, 4)}
    plan = replay(host, shapes)  # type: ignore[arg-type]
    assert [(m.names, m.found) for m in plan.mismatches] == [(("model.layers.0.o_proj.weight",), "[8, 4]")]
    assert "model.embed.weight" in fates(plan, "loaded")

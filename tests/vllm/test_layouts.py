"""A checkpoint spread over several ranks: each rank's share, and whether all of it lands somewhere. On `tests/mini_vllm`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from ckaudit import checks
from ckaudit.engines.host import WorkerHost
from ckaudit.engines.vllm import parallel
from ckaudit.engines.vllm.ranks import Layout
from ckaudit.findings import Finding
from ckaudit.naming import printable
from ckaudit.plan import Plan
from tests.toy import checkpoint
from tests.vllm.mini import ENV, Shapes, good, replay

EXPERTS: Shapes = {f"model.experts.{i}.weight": (8,) for i in range(4)}
PP, EP = {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
EMBED, OUT, QKV, EXPERT = 16 * 8, 8 * 8, 3 * 8 * 8, 8


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(env=ENV) as worker:
        yield worker


def refused(plan: Plan) -> list[Finding]:
    names = [n.name for n in plan.names]
    return [f for f in checks.run(checkpoint(names), (plan,))[0] if f.check == "CK310"]


def test_tensor_parallel_sizes(host: WorkerHost) -> None:
    plan = replay(host, good(), tp=(2, 4, 8))
    assert [(row["size"], row["verdict"]) for row in plan.tp] == [(2, "loads"), (4, "loads"), (8, "fails")]
    assert plan.tp[2]["error"].endswith("must be divisible by tensor parallel size (8).")
    # bfloat16: embed 16 x 8 and, a layer, o_proj 8 x 8 and qkv 3 x (8 / tp) x 8; 2 bytes each; a float scale of 4 bytes as a buffer.
    assert [row["bytes_per_rank"] for row in plan.tp[:2]] == [2 * (128 + 2 * (64 + 96)), 2 * (128 + 2 * (64 + 48))]


def test_a_refused_size_is_a_finding_and_a_good_one_is_not(host: WorkerHost) -> None:
    assert refused(replay(host, good(), tp=(2, 4))) == []
    (found,) = refused(replay(host, good(), tp=(2, 8)))
    assert (found.severity, found.blame, found.found) == ("error", "environment", "tp 8")
    assert found.mend == "Serve it over tp 2, which loads."


def test_a_mistake_of_ckaudit_is_no_refusal() -> None:
    def refuses(*_: object) -> Any:
        raise TypeError("the release says no")

    rows = [
        parallel.row(Layout(2), load, [], parallel.Alone(cast(Any, None), {}), math.inf)
        for load in (refuses, lambda *_: printable(cast(Any, 1)))
    ]
    assert [row["verdict"] for row in rows] == ["fails", "not_judged"]


def test_a_checkpoint_that_fails_on_one_rank_is_told_once(host: WorkerHost) -> None:
    shapes = good()
    del shapes["model.layers.0.o_proj.weight"]
    plan = replay(host, shapes, tp=(2,))
    assert plan.tp[0]["verdict"] == "fails"
    assert refused(plan) == []


def test_each_pipeline_stage_holds_its_layers_and_the_others_theirs(host: WorkerHost) -> None:
    plan = replay(host, good(3), layers=3, vllm=PP)
    assert plan.verdict == "loads"
    (row,) = plan.tp
    assert (row["size"], row["pp"], row["verdict"], row["lost"]) == (1, 2, "loads", [])
    # The first stage: the embedding and 3 * 1 // 2 = 1 layer; the second: the two others. Two bytes an element.
    assert list(row["ranks"]) == [2 * (EMBED + OUT + QKV), 2 * 2 * (OUT + QKV)]
    assert row["bytes_per_rank"] == max(row["ranks"])


def test_pipeline_stages_of_a_model_that_has_none(host: WorkerHost) -> None:
    (row,) = replay(host, good(1), layers=1, vllm=PP).tp
    assert (row["verdict"], row["error"]) == (
        "fails",
        "NotImplementedError: Pipeline parallelism is not supported for this model.",
    )


def test_whole_experts_are_spread_over_the_ranks(host: WorkerHost) -> None:
    plan = replay(host, good() | EXPERTS, "Experts", more={"experts": 4}, vllm=EP, tp=(2,))
    assert plan.verdict == "loads"
    (row,) = plan.tp
    assert (row["ep"], row["verdict"], row["lost"]) == (True, "loads", [])
    rest = EMBED + 2 * (OUT + QKV // 2)
    assert list(row["ranks"]) == [2 * (rest + 2 * EXPERT)] * 2


def test_experts_that_no_rank_takes_are_lost(host: WorkerHost) -> None:
    plan = replay(host, good() | EXPERTS, "Forgetful", more={"experts": 4}, vllm=EP, tp=(2,))
    assert plan.verdict == "loads"  # one rank takes them all
    assert (plan.tp[0]["verdict"], plan.tp[0]["lost"]) == (
        "loads_with_loss",
        ["model.experts.2.weight", "model.experts.3.weight"],
    )
    (found,) = refused(plan)
    assert found.names == ("model.experts.2.weight", "model.experts.3.weight")


def test_experts_and_stages_together(host: WorkerHost) -> None:
    (row,) = replay(host, good() | EXPERTS, "Experts", more={"experts": 4}, vllm=EP | PP, tp=(2,)).tp
    assert (row["size"], row["pp"], row["ep"], row["verdict"], len(row["ranks"])) == (2, 2, True, "loads", 4)


def test_experts_of_a_model_that_has_none(host: WorkerHost) -> None:
    plan = replay(host, good(), vllm=EP)
    assert plan.not_judged is not None or plan.tp[0]["error"].startswith("ValueError: Number of experts")


def test_a_layout_that_was_not_judged_is_a_skip() -> None:
    rows = ({"size": 2, "verdict": "not_judged", "error": "no time"}, {"size": 4, "verdict": "loads"})
    source = checkpoint([])
    seen = Plan(id="vllm==1.0", engine="vllm", release="1.0", method="replay", tp=rows)
    found, skips = checks.run(source, (seen,))
    assert [s.reason for s in skips if s.check == "CK310"] == ["tp 2: no time"]
    assert [f for f in found if f.check == "CK310"] == []

"""Draft models (multi-token prediction), loaded by the release's own class for them. On `tests/mini_vllm`: the layer behind the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from msgspec import structs

from ckaudit import checks
from ckaudit.engines.host import WorkerHost
from ckaudit.engines.vllm.draft import layer_of
from ckaudit.plan import Draft, DraftLayer, NameFate, Plan
from tests.toy import CONFIG, checkpoint
from tests.vllm.mini import ENV, Shapes, good, replay

DRAFT: Shapes = {f"model.layers.2.{p}_proj.weight": (8, 8) for p in "qkvo"} | {"model.layers.2.eh_proj.weight": (8, 16)}


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(env=ENV) as worker:
        yield worker


def told(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    source = checkpoint([n.name for n in plan.names])
    return [(f.severity, f.names) for f in checks.run(source, (plan,))[0] if f.check == "CK219" and f.engine]


def test_a_whole_draft_layer(host: WorkerHost) -> None:
    plan = replay(host, good() | DRAFT)
    assert plan.verdict == "loads"
    assert plan.draft is not None
    assert (plan.draft.architecture, plan.draft.verdict) == ("MiniMTPModel", "loads")
    assert [(x.path, x.state, set(x.names), x.unwritten) for x in plan.draft.layers] == [
        ("model.layers.2", "complete", set(DRAFT), ())  # the embedding is the main model's
    ]
    assert {n.name for n in plan.names if n.by_design == "draft model: MiniMTPModel reads it"} == set(DRAFT)
    assert told(plan) == []


@pytest.mark.parametrize(
    ("lacking", "unwritten"),
    [("o", "layers.2.o_proj.weight"), ("k", "layers.2.qkv_proj.weight"), ("eh", "layers.2.eh_proj.weight")],
)
def test_a_draft_layer_that_is_half_there(host: WorkerHost, lacking: str, unwritten: str) -> None:
    shapes = good() | DRAFT
    del shapes[f"model.layers.2.{lacking}_proj.weight"]
    plan = replay(host, shapes)
    assert plan.verdict == "loads"  # the main model is whole
    assert plan.draft is not None
    assert plan.draft.verdict == "loads_with_loss"
    assert [(x.state, x.unwritten) for x in plan.draft.layers] == [("partial", (unwritten,))]
    assert told(plan) == [("warning", (unwritten,))]


def test_what_the_files_show_of_it_is_told_once_with_the_engine() -> None:
    """By the files alone a draft layer without `down_proj` is half there; the engine's own class says so of its parameter."""
    main = [f"model.layers.{i}.mlp.{p}_proj.weight" for i in range(2) for p in ("gate", "up", "down")]
    stored = [f"model.layers.2.mlp.{p}_proj.weight" for p in ("gate", "up")]
    source = checkpoint([*main, *stored], CONFIG | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    names = (
        *(NameFate(n, "loaded", n, read=1.0) for n in main),
        *(NameFate(n, "ignored", by_design="draft model") for n in stored),
    )
    seen = Plan(id="vllm==1.0", engine="vllm", release="1.0", method="replay", names=names)

    def half(plan: Plan) -> list[str | None]:
        return [f.engine for f in checks.run(source, (plan,))[0] if f.check == "CK219" and f.severity == "warning"]

    assert half(seen) == [None]
    layer = DraftLayer("model.layers.2", "partial", tuple(stored), ("layers.2.mlp.down_proj.weight",))
    assert half(structs.replace(seen, draft=Draft("MiniMTPModel", "loads_with_loss", None, (layer,)))) == ["vllm==1.0"]


def test_a_draft_layer_that_the_draft_class_refuses(host: WorkerHost) -> None:
    plan = replay(host, good() | DRAFT | {"model.layers.2.mlp.weight": (8, 8)})
    assert plan.draft is not None
    assert (plan.draft.verdict, plan.draft.error) == ("fails", "KeyError: 'layers.2.mlp.weight'")
    assert plan.verdict == "loads_with_loss"  # nobody reads that one


def test_a_model_without_a_draft_class_is_not_asked(host: WorkerHost) -> None:
    assert replay(host, good()).draft is None  # nothing is left over
    plan = replay(host, good() | DRAFT, "Silent")
    assert plan.draft is None
    assert plan.verdict == "loads_with_loss"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.61.mlp.experts.3.up_proj.weight", "model.layers.61"),
        ("mtp.layers.0.mlp.gate.weight", "mtp.layers.0"),
        ("mtp.fc.weight", "mtp"),
        ("model.mtp_block.2.weight", "model.mtp_block.2"),
    ],
)
def test_the_layer_of_a_name(name: str, layer: str) -> None:
    assert layer_of(name) == layer

"""The replay on a package with the shape of vLLM (`tests/mini_vllm`): verdicts, fates, faults, and whom they are blamed on.

Nothing here needs a release. A model has `embed` (16 x 8) and, a layer, fused q, k and v (24 x 8) and `o_proj` (8 x 8).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import torch

from ckaudit.checks.case import Case
from ckaudit.checks.facts import Facts
from ckaudit.checks.names import claims
from ckaudit.engines.host import WorkerHost
from ckaudit.engines.vllm import ops
from ckaudit.engines.vllm.attempt import ending
from ckaudit.engines.vllm.provenance import Provenance
from tests.toy import checkpoint
from tests.vllm.mini import ENV, fates, good, replay


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(env=ENV) as worker:
        yield worker


def test_a_good_checkpoint_loads(host: WorkerHost) -> None:
    plan = replay(host, good())
    assert (plan.verdict, plan.error, plan.not_judged) == ("loads", None, None)
    assert {p.coverage for p in plan.parameters} == {"full"}
    assert len(plan.parameters) == 5  # the buffer `k_scale` is no checkpoint's to fill
    q = next(n for n in plan.names if n.name == "model.layers.1.q_proj.weight")
    assert (q.into, q.shard, q.read) == ("layers.1.qkv_proj.weight", "q", 1.0)
    assert [(s.rule, s.key, s.at) for s in q.chain] == [("stacked", ".q_proj", ""), ("prefix", "model.", "")]
    assert plan.environment["platform"] == "cuda sm90 (pretended)"


def test_rules_are_counted_those_that_never_fire_too(host: WorkerHost) -> None:
    hits = {r.key: r.hits for r in replay(host, good()).rules}
    assert hits == {".rotary_emb.inv_freq": 0, ".q_proj": 2, ".k_proj": 2, ".v_proj": 2, ".never": 0, "model.": 9}


def test_a_missing_tensor_fails_the_start_up_check(host: WorkerHost) -> None:
    shapes = good()
    del shapes["model.layers.0.o_proj.weight"]
    plan = replay(host, shapes)
    assert plan.verdict == "fails"
    assert (
        plan.error == "ValueError: Following weights were not initialized from checkpoint: {'layers.0.o_proj.weight'}"
    )
    assert [p.name for p in plan.parameters if p.coverage == "none"] == ["layers.0.o_proj.weight"]


def test_a_loader_that_says_nothing_passes_the_loss_and_the_replay_does_not(host: WorkerHost) -> None:
    shapes = good()
    del shapes["model.layers.0.q_proj.weight"]
    plan = replay(host, shapes, "Silent")
    assert (plan.verdict, plan.error) == ("loads_with_loss", None)
    assert [(p.name, p.coverage, round(p.share or 0, 3)) for p in plan.parameters if p.coverage != "full"] == [
        ("layers.0.qkv_proj.weight", "partial", 0.667)
    ]


def test_half_a_fused_tensor_passes_the_start_up_check_and_is_seen(host: WorkerHost) -> None:
    shapes = good()
    del shapes["model.layers.0.q_proj.weight"]  # k and v are enough for the loader to call the parameter loaded
    assert replay(host, shapes).verdict == "loads_with_loss"


def test_every_fault_in_one_run(host: WorkerHost) -> None:
    shapes = good() | {"model.lm_haed.weight": (16, 8), "model.layers.1.o_proj.weight": (8, 4), "model.zzz": (1,)}
    plan = replay(host, shapes)
    assert plan.verdict == "fails"
    assert sorted(fates(plan, "unmatched")) == ["model.lm_haed.weight", "model.zzz"]
    assert fates(plan, "not_reached") == ["model.layers.1.o_proj.weight"]
    assert [(m.kind, m.parameter, m.wanted, m.found) for m in plan.mismatches] == [
        ("shape", "layers.1.o_proj.weight", "[8, 8]", "[8, 4]")
    ]
    assert len(fates(plan, "loaded")) == 8
    assert plan.error is not None
    assert plan.error.startswith(
        "AssertionError: Attempted to load weight"
    )  # names are read in order: `layers` is first


def test_siblings_of_a_refused_name_are_set_aside_together(host: WorkerHost) -> None:
    shapes = good(6) | {f"model.layers.{i}.mlp.weight": (8, 8) for i in range(6)}
    plan = replay(host, shapes, layers=6)
    assert len(fates(plan, "unmatched")) == 6
    assert len(plan.failures) == 2  # seen at layer 0 and at layer 1; the others have the same name but for the number
    assert [n.kind for n in plan.notes] == ["assumed"]


def test_a_rule_that_fires_on_the_output_of_another(host: WorkerHost) -> None:
    plan = replay(host, good(1), "Cascade", layers=1)
    assert plan.verdict == "fails"
    # In `qkv_proj`, which the rules for q_proj and k_proj make, there is a `v_proj`: it becomes `qkqkv_proj`.
    assert sorted(fates(plan, "unmatched")) == ["model.layers.0.k_proj.weight", "model.layers.0.q_proj.weight"]
    k = next(n for n in plan.names if "k_proj" in n.name)
    assert k.into == "layers.0.qkqkv_proj.weight"
    assert [s.key for s in k.chain] == ["k_proj", "v_proj", "model."]
    assert [(p.coverage, round(p.share or 0, 3)) for p in plan.parameters if "qkv" in p.name] == [("partial", 0.333)]


def test_dropped_and_skipped_names(host: WorkerHost) -> None:
    shapes = good() | {"model.layers.0.rotary_emb.inv_freq": (4,), "model.extra.skipped": (8,)}
    plan = replay(host, shapes)
    assert fates(plan, "dropped") == ["model.layers.0.rotary_emb.inv_freq"]
    assert fates(plan, "ignored") == ["model.extra.skipped"]
    assert plan.verdict == "loads_with_loss"  # the table of angles is computed, the skipped weight is lost
    assert [n.name for n in plan.names if n.by_design] == ["model.layers.0.rotary_emb.inv_freq"]


def test_two_tensors_for_one_place(host: WorkerHost) -> None:
    plan = replay(host, good() | {"embed.weight": (16, 8)})
    assert [(c.parameter, c.kept, c.lost) for c in plan.collisions] == [
        ("embed.weight", "model.embed.weight", ("embed.weight",))
    ]
    assert plan.verdict == "loads_with_loss"


def test_a_tensor_twice_as_wide_as_its_place(host: WorkerHost) -> None:
    plan = replay(host, good() | {"model.layers.0.q_proj.weight": (16, 8)})  # the loader takes the first 8 rows
    assert [(n.name, n.read) for n in plan.names if n.read != 1] == [("model.layers.0.q_proj.weight", 0.5)]
    assert plan.verdict == "loads_with_loss"


def test_a_cast_between_kinds(host: WorkerHost) -> None:
    plan = replay(host, good(), dtype="I8")
    assert {(m.kind, m.wanted, m.found) for m in plan.mismatches} == {("dtype", "BF16", "I8")}
    assert replay(host, good(), dtype="F32").mismatches == ()


def test_a_claim_that_is_wrong_fails_though_every_element_was_written(host: WorkerHost) -> None:
    plan = replay(host, good(), "Modest")
    assert plan.verdict == "fails"
    assert {p.coverage for p in plan.parameters} == {"full"}
    assert [(n.kind, n.names) for n in plan.notes] == [("claims-too-little", ("embed.weight",))]
    told = list(claims(Case(Facts(checkpoint([])), plan)))
    assert [(f.check, f.names) for f in told] == [("CK215", ("embed.weight",))]


def test_a_mistake_of_the_observer_is_not_blamed_on_the_checkpoint() -> None:
    def told(call: Callable[[], object]) -> str | None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            return ending(error, Provenance(), {}, started=True, finished=False).excuse
        raise AssertionError("nothing was raised")

    assert "ckaudit itself broke down (TypeError" in (told(lambda: ops.cat(None, (None,), {}, None)) or "")  # type: ignore[arg-type]
    assert told(lambda: [].pop()) is None
    with Provenance():
        wide, narrow = torch.empty(2, 3, device="meta"), torch.empty(2, 2, device="meta")
        assert told(lambda: wide.copy_(narrow)) is None  # torch's own word on a shape, raised below the observer


def test_values_are_fetched_for_a_loader_that_looks(host: WorkerHost) -> None:
    asked = []

    def read(name: str) -> bytes:
        asked.append(name)
        return struct.pack("<H", 0x3F80) * 64  # 1.0 in bfloat16

    plan = replay(host, good(), "Looks", read=read)
    assert plan.verdict == "loads"
    assert asked == ["model.layers.0.o_proj.weight", "model.layers.1.o_proj.weight"]
    assert (
        replay(host, good(), "Looks", read=lambda name: struct.pack("<H", 0xBF80) * 64).error == "ValueError: negative"
    )


def test_values_that_cannot_be_had_are_not_judged(host: WorkerHost) -> None:
    plan = replay(host, good(), "Looks")
    assert plan.verdict == "not_judged"
    assert "looks at values" in (plan.not_judged or "")


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Stubbed", "stub"),
        ("Early", "before the first weight was read"),
        ("Unbuildable", "no kernel for this machine"),
        ("Absent", "AbsentForCausalLM"),
    ],
)
def test_what_is_not_the_checkpoints_fault_is_not_judged(host: WorkerHost, architecture: str, reason: str) -> None:
    plan = replay(host, good(), architecture)
    assert plan.verdict == "not_judged"
    assert reason in (plan.not_judged or "")


def test_the_release_chooses_the_files(host: WorkerHost) -> None:
    """`consolidated*.safetensors` wins where it is: the other copy is not read, which is no loss."""
    shapes = good() | {name.removeprefix("model."): shape for name, shape in good().items()}
    shards = {name: "consolidated.safetensors" for name in shapes if not name.startswith("model.")}
    plan = replay(host, shapes, shards=shards)
    assert plan.verdict == "loads"
    assert {n.name for n in plan.names if n.fate == "loaded"} == set(shards)
    assert all("consolidated.safetensors" in (n.by_design or "") for n in plan.names if n.fate != "loaded")


def test_a_worker_serves_many_checkpoints_the_same_way(host: WorkerHost) -> None:
    assert replay(host, good()) == replay(host, good())


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/outside.safetensors"])
def test_a_shard_path_that_leads_out_writes_nothing_there(host: WorkerHost, path: str) -> None:
    plan = replay(host, good(), shards={"model.embed.weight": path})
    assert "model.embed.weight" not in fates(plan, "loaded")

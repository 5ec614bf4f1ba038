"""What classes declare of fused modules against what their loaders do, and rules that reach further than they were made for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from ckaudit import checks
from ckaudit.engines.host import WorkerHost
from ckaudit.engines.vllm import packing
from ckaudit.findings import Finding
from ckaudit.plan import Plan
from tests.toy import checkpoint, plan
from tests.vllm.mini import ENV, good, replay


@pytest.fixture(scope="module")
def host() -> Iterator[WorkerHost]:
    with WorkerHost(env=ENV) as worker:
        yield worker


def packed(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(n.kind, n.names) for n in plan.notes if n.kind.startswith("packed")]


def errors(plan: Plan) -> list[Finding]:
    source = checkpoint([n.name for n in plan.names])
    return [f for f in checks.run(source, (plan,))[0] if f.severity == "error" and f.engine]


def test_a_part_that_is_declared_and_that_no_rule_fuses(host: WorkerHost) -> None:
    plan = replay(host, good(), "Forgot")
    lost = tuple(f"model.layers.{i}.k_proj.weight" for i in range(2))
    assert packed(plan) == [("packed-unmapped", lost)]
    (found,) = errors(plan)
    assert (found.check, found.blame, found.names) == ("CK221", "engine", lost)
    assert "ForgotForCausalLM declares that qkv_proj is made of q_proj and k_proj and v_proj" in found.message


@pytest.mark.parametrize("architecture", ["Mini", "Declared"])  # nothing is declared; what is declared is done
def test_agreement_is_quiet(host: WorkerHost, architecture: str) -> None:
    assert packed(replay(host, good(), architecture)) == []


def test_a_part_that_the_checkpoint_lacks_is_not_the_engines_fault(host: WorkerHost) -> None:
    shapes = good()
    del shapes["model.layers.0.k_proj.weight"]
    assert packed(replay(host, shapes, "Declared")) == []


def test_a_name_that_only_ends_alike_is_not_declared(host: WorkerHost) -> None:
    plan = replay(host, good() | {"model.layers.0.kk_proj.weight": (8, 8)}, "Declared")
    assert plan.verdict == "fails"
    assert packed(plan) == []


def test_a_part_that_a_rule_fuses_and_nobody_declares_is_a_note(host: WorkerHost) -> None:
    plan = replay(host, good(), "Shy")
    assert plan.verdict == "loads"
    assert packed(plan) == [("packed-undeclared", tuple(f"model.layers.{i}.v_proj.weight" for i in range(2)))]
    assert errors(plan) == []


def test_a_rule_that_fires_outside_the_modules_it_was_made_for_is_named(host: WorkerHost) -> None:
    plan = replay(host, good() | {"model.encoder.q_proj.weight": (8, 8)}, "Wide")
    assert {(r.rule, r.key, r.hits) for r in plan.rules if r.key == ".q_proj"} == {("stacked", ".q_proj", 3)}
    told = [(f.check, f.names) for f in errors(plan)]
    assert told == [("CK217", ("model.encoder.q_proj.weight",))]
    (found,) = errors(plan)
    assert ".q_proj" in found.message
    assert "encoder" in found.message


@pytest.mark.parametrize("parts", [("qkv_proj",), ("q_proj", "qkv_proj")])
def test_a_module_that_is_stored_fused_needs_no_rule(parts: tuple[str, ...]) -> None:
    # Phi-3 declares qkv_proj as made of qkv_proj: a misspelt leaf of it is the checkpoint's fault, not a rule's
    source = checkpoint(["norm.weight", "layers.0.qkv_proj.wieght"])
    seen = plan(source, ["norm.weight", "layers.0.qkv_proj.weight"])
    declared = packing.Declared("", "PhiForCausalLM", {"qkv_proj": parts})
    assert list(packing.notes(seen, [declared])) == []


def test_a_part_beside_a_module_that_is_stored_fused() -> None:
    source = checkpoint(["norm.weight", "layers.0.q_proj.weight"])
    seen = plan(source, ["norm.weight", "layers.0.qkv_proj.weight"])
    declared = packing.Declared("", "PhiForCausalLM", {"qkv_proj": ("q_proj", "qkv_proj")})
    assert [n.names for n in packing.notes(seen, [declared])] == [("layers.0.q_proj.weight",)]

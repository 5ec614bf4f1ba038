"""Released vLLM on MiniCPM-V 4.6: what five releases do with the same checkpoint, by their own loaders.

Each needs a wheel of about 340 MB from the package index, once. Expectations: vLLM 0.24.0 loads this model, 0.25.0 moved the rule that
fuses q, k and v to where its keys also match its own output (`k_proj` becomes `qkv_proj`, whose `v_proj` becomes `qkqkv_proj`), 0.26.0
took the rule away, and 0.30.0 mended it (vllm/model_executor/models/minicpmv4_6.py of those releases).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions, select
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress
from ckaudit.source import open_source

FIXTURE = Path(__file__).parent.parent.parent / "fixtures" / "minicpm-v-4.6"
MERGER = "model.vision_tower.vit_merger.self_attn"

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]


def plan_of(release: str) -> Plan:
    (engine,) = select(f"vllm=={release}")
    try:
        return engine.plan(read_checkpoint(open_source(str(FIXTURE))), EngineOptions(), NullProgress())
    finally:
        engine.close()  # type: ignore[attr-defined]


def unmatched(plan: Plan) -> set[str]:
    return {n.name for n in plan.names if n.fate == "unmatched"}


def test_0_24_0_loads_and_says_less_than_it_did() -> None:
    plan = plan_of("0.24.0")
    assert (plan.verdict, plan.not_judged) == ("loads", None)
    assert Counter(p.coverage for p in plan.parameters) == {"full": 595}
    claims = next(n for n in plan.notes if n.kind == "claims-too-little")
    assert set(claims.names) == {f"vit_merger.self_attn.qkv_proj.{leaf}" for leaf in ("weight", "bias")}


def test_0_25_1_fails_by_a_cascade() -> None:
    plan = plan_of("0.25.1")
    assert plan.verdict == "fails"
    assert "'qkqkv_proj'" in (plan.error or "")
    assert unmatched(plan) == {f"{MERGER}.{p}_proj.{leaf}" for p in "qk" for leaf in ("weight", "bias")}
    assert Counter(p.coverage for p in plan.parameters) == {"full": 593, "partial": 2}
    k = next(n for n in plan.names if n.name == f"{MERGER}.k_proj.weight")
    assert [(s.rule, s.key, s.at, s.after) for s in k.chain][1:] == [
        ("stacked", "k_proj", "vit_merger.self_attn", "qkv_proj.weight"),
        ("stacked", "v_proj", "vit_merger.self_attn", "qkqkv_proj.weight"),
    ]


@pytest.mark.parametrize("release", ["0.27.1", "0.29.0"])
def test_0_27_1_and_0_29_0_fail_without_the_rule(release: str) -> None:
    plan = plan_of(release)
    assert plan.verdict == "fails"
    assert "'k_proj'" in (plan.error or "")
    assert unmatched(plan) == {f"{MERGER}.{p}_proj.{leaf}" for p in "qkv" for leaf in ("weight", "bias")}
    assert Counter(p.coverage for p in plan.parameters) == {"full": 593, "none": 2}


def test_0_33_0_loads() -> None:
    plan = plan_of("0.33.0")
    assert (plan.verdict, plan.not_judged) == ("loads", None)
    assert Counter(p.coverage for p in plan.parameters) == {"full": 595}


@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.27.1", "0.29.0", "0.33.0"])
def test_the_rule_book_says_the_same_of_every_name(release: str) -> None:
    (rules,) = select(f"rules:vllm=={release}")
    said = rules.plan(read_checkpoint(open_source(str(FIXTURE))), EngineOptions(), NullProgress())
    seen = plan_of(release)
    assert said.verdict == seen.verdict
    assert {n.name: n.fate for n in said.names} == {n.name: n.fate for n in seen.names}

"""Spoiled checkpoints on a released vLLM: every mutation changes the verdict, in the right place and nowhere else, and is told once.

Dense with fused q, k and v; experts one by one that are stacked; experts stacked on disk and modules renamed; a class of the
Transformers backend; a loader that rearranges what it reads. `benchmarks/vllm_mutations.py` does the same with fifty.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ckaudit.engines import Engine, EngineOptions, select
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress
from tests import toy as toys
from tests.vllm import architectures, mutations

KINDS = {
    "drop alone", "rename", "reshape alone", "widen alone", "kind of dtype alone", "half a fused tensor", "reshape part", "widen part",
    "kind of dtype part", "duplicate", "prefix",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    (found,) = select("vllm==0.33.0")
    yield found
    found.close()  # type: ignore[attr-defined]


@pytest.mark.wheel
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("LlamaForCausalLM", KINDS),
        ("Qwen3MoeForCausalLM", KINDS),
        ("GptOssForCausalLM", KINDS),
        ("OlmoForCausalLM", KINDS),
        ("BloomForCausalLM", {k for k in KINDS if "part" not in k} - {"duplicate", "half a fused tensor"}),
    ],
)
def test_every_mutation(engine: Engine, architecture: str, kinds: set[str]) -> None:
    made = architectures.make(architecture, 2)
    rows = mutations.judge(made, lambda c: engine.plan(c, EngineOptions(), NullProgress()))
    assert {r.kind for r in rows} == kinds
    assert [(r.kind, r.verdict, r.wrong) for r in rows if r.wrong] == []


def test_a_disagreement_is_seen() -> None:
    # The judge itself: a plan of the whole checkpoint is no answer to a spoiled one, and one that loses too much is none either.
    whole = toy({"a.0.weight", "a.1.weight"})
    spoiled = mutations.Mutation("drop alone", {}, frozenset({"a.1.weight"}), frozenset({"a.1.weight"}))
    assert mutations.disagreement(spoiled, whole, whole) == "loads: nothing lost"
    assert mutations.disagreement(spoiled, whole, toy({"a.0.weight"})) is None
    assert "more parameters lack: a.0.weight" in (mutations.disagreement(spoiled, whole, toy(set())) or "")
    assert mutations.misreported(spoiled, []) == "no error is told"


def toy(there: set[str]) -> Plan:
    """What an engine of two parameters says of a checkpoint with these tensors."""
    source = toys.checkpoint(there)
    return toys.plan(source, ["a.0.weight", "a.1.weight"])

"""The transformers engine as the pipeline sees it: in the parent, with a worker behind it, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.engines import EngineOptions
from ckaudit.engines import transformers as engine_module
from ckaudit.engines.cache import PlanCache
from ckaudit.engines.limits import beyond_reason
from ckaudit.engines.transformers import TransformersEngine, select
from ckaudit.engines.vllm import VllmEngine
from ckaudit.progress import NullProgress

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 16, "dtype": "bfloat16",
}  # fmt: skip
NAMES = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def checkpoint(shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    tensors = {name: TensorSpec(name, "model.safetensors", "BF16", shape, None) for name, shape in shapes.items()}
    texts = {"config.json": json.dumps(CONFIG).encode()}
    return Checkpoint(
        name="x",
        kind="local",
        revision=None,
        files={},
        config=CONFIG,
        texts=texts,
        index=None,
        shards=(),
        tensors=tensors,
    )


SOME = checkpoint({"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)})


def test_select_gives_the_one_engine():
    (engine,) = select()
    assert engine.id == "transformers"


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({}, "torch and transformers and accelerate not installed"),
        ({"torch": "2.9", "accelerate": "1", "transformers": "5.16.9"}, "transformers 5.16.9 is installed"),
        ({"torch": "2.9", "accelerate": "1", "transformers": "6.0.0"}, "transformers 6.0.0 is installed"),
        ({"torch": "2.9", "transformers": "5.20.0"}, "accelerate not installed"),
    ],
)
def test_software_that_is_missing_or_unknown_is_not_judged(monkeypatch, tmp_path, versions, says):
    monkeypatch.setattr(engine_module, "installed", lambda: versions)
    plan = TransformersEngine(PlanCache(tmp_path)).plan(SOME, EngineOptions(), NullProgress())
    assert says in plan.not_judged
    assert "pip install 'ckaudit[transformers]'" in plan.not_judged


def test_a_plan_is_made_once(tmp_path):
    pytest.importorskip("transformers")
    engine = TransformersEngine(PlanCache(tmp_path))
    first = engine.plan(SOME, EngineOptions(), NullProgress())
    engine.close()
    assert [n.fate for n in first.names] == ["loaded"] * 3
    assert first.verdict == "loads_with_loss"  # its one layer is not stored
    assert set(first.environment) == {"torch", "transformers", "accelerate", "platform"}
    engine._run = None  # whoever asks a worker now fails
    assert engine.plan(SOME, EngineOptions(), NullProgress()) == first


def test_the_budget_is_kept(tmp_path):
    pytest.importorskip("transformers")
    engine = TransformersEngine(PlanCache(tmp_path))
    plan = engine.plan(SOME, EngineOptions(budget=0.05), NullProgress())
    assert "budget" in plan.not_judged
    assert not list(Path(tmp_path).iterdir())


def test_the_parent_imports_neither_torch_nor_transformers():
    program = (
        "import sys, ckaudit.engines.transformers as t, ckaudit.engines.host; t.select(); t.installed();"
        "print([m for m in ('torch', 'transformers', 'accelerate', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**30},
        {"text_config": {"n_layer": 10**9}},
        {"num_experts": 2_000_000},
        {"depths": [2, 2, 10**12]},
        {"num_labels": 10**10},
        {"encoder_layers": 1 << 40_000},
    ],
)
def test_a_model_of_more_layers_than_anyone_builds_is_not_built(config: dict[str, object], tmp_path: Path) -> None:
    source = msgspec.structs.replace(checkpoint({"a": (1,)}), config=config)
    began = time.perf_counter()
    for engine in (TransformersEngine(PlanCache(tmp_path)), VllmEngine("0.0.1", cache=PlanCache(tmp_path))):
        plan = engine.plan(source, EngineOptions(offline=True), NullProgress())
        assert plan.not_judged is not None
        assert "a model of so many is not built" in plan.not_judged
    assert time.perf_counter() - began < 5, "no worker was asked"


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"num_hidden_layers": 100_000, "num_labels": 21_841, "n_layer": -1, "num_experts": None, "depth": True},
        {"vocab_size": 10**30, "eos_token_id": 10**12, "num_hidden_layers_note": "10" * 40, "hidden_size": 10**30},
        {"id2label": {"layers": "many"}, "layer_types": ["full"] * 9},
    ],
)
def test_numbers_that_end_soon_are_left_to_the_loader(config: dict[str, object] | None) -> None:
    assert beyond_reason(config, 21) is None


def test_as_many_layers_as_there_are_tensors_may_be_built() -> None:
    assert beyond_reason({"num_hidden_layers": 300_000}, 300_000) is None
    assert beyond_reason({"num_hidden_layers": 300_000}, 299_999) is not None

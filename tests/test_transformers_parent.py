"""The transformers engine as the pipeline sees it: in the parent, with a worker behind it, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.engines import EngineOptions
from ckaudit.engines import transformers as engine_module
from ckaudit.engines.cache import PlanCache
from ckaudit.engines.transformers import TransformersEngine, select
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

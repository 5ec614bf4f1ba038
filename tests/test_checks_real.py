"""Real saves of real classes, whole and spoilt, through the installed transformers: what is told is what that loader does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckaudit import audit
from ckaudit.engines.transformers import TransformersEngine
from ckaudit.findings import Report
from tests.real_checkpoints import build

Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    found = TransformersEngine()
    yield found
    found.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small saved model of a type, built once."""
    root, done = tmp_path_factory.mktemp("saved"), {}

    def folder(model_type: str) -> Path:
        if model_type not in done:
            done[model_type] = root / model_type
            build(model_type, done[model_type])
        return done[model_type]

    return folder


def spoil(folder: Path, into: Path, change: Callable[[Tensors], Tensors], **config: Any) -> str:
    """A copy of `folder` with its tensors and config changed."""
    from safetensors.torch import load_file, save_file

    into.mkdir()
    save_file(change(load_file(folder / "model.safetensors")), into / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(raw | config))
    return str(into)


def rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


def drop(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if part not in n}


def eight_bits(tensors: Tensors) -> Tensors:
    import torch

    return {n: x.to(torch.float8_e4m3fn) if "_proj" in n else x for n, x in tensors.items()}


def fuse(tensors: Tensors) -> Tensors:
    """Queries, keys and values of each layer in one tensor."""
    import torch

    kept = {n: x for n, x in tensors.items() if not re.search("[qkv]_proj", n)}
    parts = "model.layers.{}.self_attn.{}_proj.weight"
    return kept | {parts.format(i, "qkv"): torch.cat([tensors[parts.format(i, p)] for p in "qkv"]) for i in range(2)}


def told(report: Report) -> list[tuple[str, str, str]]:
    return [(f.check, f.severity, f.blame) for f in report.findings if f.severity != "note"]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "vit", "qwen3_vl"])
def test_a_whole_save_is_clean(model_type: str, saved: Callable[[str], Path], engine: TransformersEngine) -> None:
    report = audit(str(saved(model_type)), engines=[engine], cache=False)
    assert report.plans[0].verdict == "loads"
    assert told(report) == []
    assert told(audit(str(saved(model_type)), engines=[])) == []


CASES: list[tuple[str, str, Callable[[Tensors], Tensors], dict[str, Any], list[tuple[str, str, str]]]] = [
    ("compiled", "qwen3_moe", lambda t: {f"_orig_mod.{n}": x for n, x in t.items()}, {}, [("CK209", "error", "checkpoint")]),
    ("compiled, and tied", "gemma3_text", lambda t: {n.replace("model.", "model._orig_mod.", 1): x for n, x in t.items()}, {},
     [("CK209", "error", "checkpoint")]),
    ("wrapped, with a decoder that is tied", "bert", lambda t: {f"model.{n}": x for n, x in t.items()}, {},
     [("CK209", "error", "checkpoint")]),
    ("experts in another module", "qwen3_moe", rename(".mlp.experts.", ".moe.experts."), {}, [("CK209", "error", "checkpoint")]),
    ("more key heads in the config", "llama", lambda t: t, {"num_key_value_heads": 4}, [("CK401", "error", "config")]),
    ("more heads in the config", "llama", lambda t: t, {"num_attention_heads": 8}, [("CK401", "error", "config")]),
    ("wider heads in the config", "qwen3", lambda t: t, {"head_dim": 32}, [("CK401", "error", "config")]),
    ("a wider model in the config", "olmo2", lambda t: t, {"hidden_size": 128}, [("CK401", "error", "config")]),
    ("keys of another size in one layer", "llama",
     lambda t: {n: x[:16] if "layers.1.self_attn.k_proj" in n or "layers.1.self_attn.v_proj" in n else x for n, x in t.items()}, {},
     [("CK301", "error", "checkpoint")]),
    ("one rank's part of a matrix", "llama", lambda t: {n: x[:0] if "up_proj" in n else x for n, x in t.items()}, {},
     [("CK301", "error", "checkpoint")]),
    ("eight bits without a scheme", "llama", eight_bits, {},
     [("CK302", "error", "checkpoint")]),
    ("a layer's path twice", "llama",
     lambda t: {re.sub(r"model\.layers\.(\d+)\.", r"model.layers.\1.model.layers.\1.", n): x for n, x in t.items()}, {},
     [("CK213", "error", "checkpoint")]),
    ("the class of another task", "llama", lambda t: t, {"architectures": ["LlamaForSequenceClassification"]},
     [("CK405", "error", "config")]),
    ("a pooler that this class has not", "bert", lambda t: t | {"bert.pooler.dense.bias": t["bert.embeddings.LayerNorm.bias"].clone()}, {},
     [("CK203", "error", "checkpoint")]),
    ("a vision-language model in a text class", "gemma3", lambda t: t, {"architectures": ["Gemma3ForCausalLM"]},
     [("CK405", "error", "config")]),
    ("queries, keys and values in one", "llama", fuse, {}, [("CK222", "error", "checkpoint")]),
    ("doubled prefix", "llama", rename("model.", "model.model."), {}, [("CK213", "warning", "checkpoint")]),
    ("an expert under another number", "qwen3_moe", rename("layers.1.mlp.experts.3.", "layers.1.mlp.experts.7."), {},
     [("CK211", "error", "checkpoint")]),
    ("a lost expert", "qwen3_moe", drop("layers.1.mlp.experts.2."), {}, [("CK211", "error", "checkpoint")]),
    ("a lost gate of one expert", "qwen3_moe", drop("layers.1.mlp.experts.2.gate_proj"), {}, [("CK211", "error", "checkpoint")]),
    ("another number of experts in the config", "qwen3_moe", lambda t: t, {"num_experts": 8, "num_local_experts": 8},
     [("CK401", "error", "config")]),
    ("lost layer", "llama", drop("layers.1."), {}, [("CK210", "error", "checkpoint")]),
    ("fewer layers in the config", "llama", lambda t: t, {"num_hidden_layers": 1}, [("CK401", "error", "config")]),
    ("another width in the config", "llama", lambda t: t, {"intermediate_size": 128}, [("CK401", "error", "config")]),
    ("another vocabulary in the config", "llama", lambda t: t, {"vocab_size": 256}, [("CK401", "error", "config")]),
    ("no head, and not tied", "llama", drop("lm_head"), {"tie_word_embeddings": False}, [("CK214", "error", "undecidable")]),
    ("a norm that is not there", "llama", drop("model.norm"), {}, [("CK204", "error", "checkpoint")]),
    ("a misspelt projection", "llama", rename("o_proj", "out_proj"), {}, [("CK209", "error", "checkpoint")]),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "change", "config", "expected"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_a_spoilt_save_is_one_finding(
    model_type: str, change: Callable[[Tensors], Tensors], config: dict[str, Any], expected: list[tuple[str, str, str]],
    saved: Callable[[str], Path], engine: TransformersEngine, tmp_path: Path,
) -> None:  # fmt: skip
    target = spoil(saved(model_type), tmp_path / "spoilt", change, **config)
    assert told(audit(target, engines=[engine], cache=False)) == expected

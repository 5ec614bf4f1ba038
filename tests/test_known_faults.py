"""Faults that were reported in public, reduced to names, config and what the engine did: each is found once and blamed on the right party.

Names are as the reports give them, or as their fix shows; layers are cut to a few. The last table holds reports of false alarms.
"""

# ruff: noqa: E501  (tables: one report a row)

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import pytest

from ckaudit.checkpoint import Checkpoint
from ckaudit.mapper import Rule
from ckaudit.plan import Collision, Failure, Parameter, Plan, Step
from tests.test_checks_companions import SCHEMES
from tests.test_checks_rewrites import BARE, DOTTED, QKV, mapped
from tests.toy import CONFIG, checkpoint, findings, llama, plan, told

VLLM = "https://github.com/vllm-project/vllm/"
HF = "https://github.com/huggingface/"
SGLANG = "https://github.com/sgl-project/sglang/"

LLAMA = llama(3)
VISION = [
    f"visual.blocks.{i}.{p}"
    for i in range(3)
    for p in ("attn.qkv.weight", "attn.qkv.bias", "norm1.weight", "mlp.fc1.weight")
]
Row = tuple[str, str, str, int]
Made = tuple[Checkpoint, *tuple[Plan, ...]]
ERROR, WARN, NOTE = "error", "warning", "note"


def made(
    tensors: Any,
    parameters: Iterable[str] | None = None,
    rename: Callable[[str], str] = str,
    config: Mapping[str, Any] = {},
    **more: Any,
) -> Made:
    """A checkpoint and, where `parameters` are given, what an engine with them does."""
    files = more.pop("files", None)
    source = checkpoint(tensors, CONFIG | config, files)
    return (source,) if parameters is None else (source, plan(source, parameters, rename, **more))


def layers(template: str, count: int = 3, **words: Iterable[str]) -> list[str]:
    """`template` for every layer `{i}` and every choice of its other words."""
    names = [template.replace("{i}", str(i)) for i in range(count)]
    for word, choices in words.items():
        names = [n.replace(f"{{{word}}}", c) for n in names for c in choices]
    return names


def quantised(module: str, scheme: str, lacking: str = "") -> dict[str, tuple[str, list[int]]]:
    return {n: spec for leaf, spec in SCHEMES[scheme][1].items() if leaf != lacking for n in layers(f"{module}.{leaf}")}


def declared(scheme: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": SCHEMES[scheme][0] | more}


def dense(*modules: str) -> list[str]:
    return [n for m in modules for n in layers(f"{m}.weight")]


DOWN, UP, Q = "model.layers.{i}.mlp.down_proj", "model.layers.{i}.mlp.up_proj", "model.layers.{i}.self_attn.q_proj"


def collide() -> Made:
    a, b = (
        layers("model.decoder.layers.{i}.layer_scalar"),
        layers("model.encoder.language_model.layers.{i}.layer_scalar"),
    )
    target = layers("model.layers.{i}.layer_scalar")
    source, base = made([*a, *b], target, lambda n: re.sub(r"decoder\.|encoder\.language_model\.", "", n))
    return source, msgspec.structs.replace(
        base, collisions=tuple(Collision(t, y, (x,)) for t, x, y in zip(target, a, b, strict=True))
    )


def spoiled(name: str, rule: Rule, parameters: Iterable[str]) -> Made:
    source = checkpoint([name])
    return source, mapped(source, [rule], parameters)


def refused(error: str, names: Iterable[str] = LLAMA) -> Made:
    source, base = made(names, names)
    return source, msgspec.structs.replace(base, error=error, failures=(Failure(error),))


def with_fate(fate: str, names: Iterable[str], tensors: Iterable[str], config: Mapping[str, Any] = {}) -> Made:
    source, base = made([*tensors, *names], tensors, config=config)
    told_fates = tuple(msgspec.structs.replace(n, fate=fate) if n.name in names else n for n in base.names)
    return source, msgspec.structs.replace(base, names=told_fates)


def one_slot_of_three() -> Made:
    tensors = quantised("model.layers.{i}.self_attn.qkv_proj", "nvfp4")
    source, base = made(tensors, list(tensors), config=declared("nvfp4"))
    short = {n for n in tensors if n.endswith("weight_global_scale")}
    parts = tuple(
        Parameter(p.name, "partial", shape=(3,), dtype="F32", share=1 / 3, sources=p.sources) if p.name in short else p
        for p in base.parameters
    )
    return source, msgspec.structs.replace(base, parameters=parts)


FAULTS: list[tuple[str, Made, list[Row]]] = [
    # quantised companions
    (VLLM + "issues/11010", made(quantised(DOWN, "bnb 4-bit"), dense(DOWN), config=declared("bnb 4-bit")), [("CK305", ERROR, "engine", 15)]),
    (VLLM + "issues/1100", made(quantised(Q, "gptq"), list(quantised(Q, "gptq", "g_idx")), config=declared("gptq")), [("CK305", ERROR, "engine", 3)]),
    (SGLANG + "pull/1559", made({**quantised(Q, "fp8 tensor"), **dict.fromkeys(layers("model.layers.{i}.self_attn.kv_scale"), ("F32", [1]))},
     list(quantised(Q, "fp8 tensor")), config=declared("fp8 tensor")), [("CK305", WARN, "checkpoint", 3)]),
    (VLLM + "issues/43967", made(quantised(UP, "gptq"), [n.replace("up_proj", "gate_up_proj") for n in quantised(UP, "gptq", "g_idx")],
     lambda n: n.replace("up_proj", "gate_up_proj"), config=declared("gptq")), [("CK305", ERROR, "engine", 3)]),
    ("https://github.com/ggml-org/llama.cpp/issues/11122", made(quantised(DOWN, "bitnet"), dense(DOWN), config=declared("bitnet")), [("CK305", ERROR, "engine", 3)]),
    (VLLM + "pull/57108", made(quantised(Q, "fp8 scale", "scale"), list(quantised(Q, "fp8 scale", "scale")), config=declared("fp8 scale")),
     [("CK304", ERROR, "checkpoint", 3)]),
    (SGLANG + "issues/5095", made(quantised(Q, "fp8 tensor"), files={"hf_quant_config.json": b"{}"}), [("CK305", ERROR, "config", 9)]),
    ("https://github.com/ggml-org/llama.cpp/issues/9252", made({f"lm_head.{n}": s for n, s in SCHEMES["quanto"][1].items()}), [("CK305", ERROR, "config", 4)]),
    # layers and experts
    (VLLM + "issues/12860", made([n for n in llama(6) if not re.search(r"layers\.[45]\.", n)], llama(6), config={"num_hidden_layers": 6}),
     [("CK210", ERROR, "checkpoint", 18)]),
    (VLLM + "pull/42577", made(layers("model.layers.{i}.mlp.experts.{p}", p=("gate_up_proj", "down_proj")),
     layers("model.layers.{i}.mlp.experts.{e}.{p}_proj.weight", e="0123", p=("gate", "up", "down"))), [("CK220", ERROR, "engine", 6)]),
    (VLLM + "issues/54047", made(layers("layers.{i}.block_sparse_moe.experts.w2_weight"), layers("layers.{i}.block_sparse_moe.experts.routed_experts.w2_weight")),
     [("CK220", ERROR, "engine", 3)]),
    (HF + "transformers/issues/47031", made(dict.fromkeys(layers("model.layers.{i}.mlp.experts.gate_up_proj"), ("BF16", [4, 8, 8]))), [("CK306", WARN, "undecidable", 3)]),
    (HF + "transformers/pull/45782", made(layers("model.layers.{i}.mlp.shared_experts.{r}.w2.weight.weight", r="012")), [("CK213", WARN, "checkpoint", 9)]),
    (VLLM + "issues/40358", made([*LLAMA, *layers("model.layers.{i}.mlp.experts.w13_bias")], LLAMA), [("CK203", ERROR, "checkpoint", 3)]),
    # prefixes
    (VLLM + "pull/19054", made([n.replace("model.", "model.language_model.") for n in LLAMA] + [f"model.{n}" for n in VISION],
     [*(f"language_model.{n}" for n in LLAMA), *VISION], lambda n: re.sub(r"^(model|lm_head)\.", r"language_model.\1.", n)),
     [("CK209", ERROR, "checkpoint", 29), ("CK209", ERROR, "checkpoint", 12)]),
    (HF + "transformers/issues/45357", made([n.replace("model.", "model.language_model.language_model.language_model.") for n in LLAMA]), [("CK213", WARN, "checkpoint", 29)]),
    (VLLM + "issues/12783", made([f"_orig_mod.{n}" for n in LLAMA], LLAMA), [("CK209", ERROR, "checkpoint", 30)]),
    (HF + "transformers/issues/32067", made(["module.bert.encoder.layer.0.attention.self.query.weight", "module.cls.predictions.bias"],
     ["bert.encoder.layer.0.attention.self.query.weight", "cls.predictions.bias"]), [("CK209", ERROR, "checkpoint", 2)]),
    ("https://github.com/ggml-org/llama.cpp/issues/9211", made([n.removeprefix("model.") for n in LLAMA[:-1]], LLAMA[:-1]), [("CK209", ERROR, "checkpoint", 29)]),
    (HF + "transformers/pull/41844", made([re.sub(r"(\d)\.", r"\1._fsdp_wrapped_module.", n) for n in LLAMA], LLAMA), [("CK209", ERROR, "checkpoint", 27)]),
    (HF + "lerobot/issues/1406", made([n.replace("model.", "p.language_model.model.") for n in LLAMA[:-1]],
     [n.replace("model.", "p.model.language_model.") for n in LLAMA[:-1]]), [("CK209", ERROR, "checkpoint", 29)]),
    ("https://github.com/evilsocket/cake/issues/34", made([n.replace("model.layers.0.", "model.layers.0.model.layers.0.") for n in LLAMA]), [("CK213", WARN, "checkpoint", 9)]),
    # one class named for another
    (VLLM + "issues/15031", made([*(f"language_model.{n}" for n in LLAMA), *VISION], LLAMA), [("CK405", ERROR, "config", 42)]),
    ("https://github.com/QwenLM/Qwen3.8/issues/64", made(LLAMA, [*(f"language_model.{n}" for n in LLAMA), *VISION]), [("CK405", ERROR, "config", 30)]),
    (VLLM + "issues/28517", made([*LLAMA, *VISION], LLAMA), [("CK405", ERROR, "config", 12)]),
    # ties
    (HF + "transformers/issues/45127", made(LLAMA, LLAMA, config={"tie_word_embeddings": True}), [("CK214", NOTE, "undecidable", 2)]),
    (VLLM + "issues/51063", made(LLAMA, LLAMA[:-1], config={"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}),
     [("CK214", WARN, "config", 1), ("CK214", ERROR, "config", 1)]),
    (VLLM + "pull/46835", with_fate("dropped", ["lm_head.bias"], LLAMA[:-1]), [("CK206", ERROR, "checkpoint", 1)]),
    # an engine's own rules
    (HF + "transformers/issues/29554", spoiled("decoder_block.0.gamma", Rule("substring", "gamma", "weight"), ["decoder_block.0.gamma"]), [("CK217", ERROR, "engine", 1)]),
    (VLLM + "issues/48449", (lambda s: (s, mapped(s, BARE, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"], "attn")))(checkpoint(QKV)), [("CK201", ERROR, "engine", 4)]),
    (VLLM + "pull/49417", (lambda s: (s, mapped(s, DOTTED, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"], "attn")))(checkpoint(QKV)), [("CK202", ERROR, "engine", 6)]),
    (SGLANG + "issues/13214", spoiled("mlp.shared_expert.gate_up_proj.weight", Rule("substring", "up_proj", "gate_up_proj"), ["mlp.shared_expert.gate_up_proj.weight"]),
     [("CK201", ERROR, "engine", 1)]),
    ("https://github.com/pjlab-sys4nlp/llama-moe/issues/74", spoiled("experts.weight_gate.7", Rule("substring", "weight_g", "parametrizations.weight.original0"),
     ["experts.weight_gate.7"]), [("CK217", ERROR, "engine", 1)]),
    (VLLM + "pull/55911", collide(), [("CK207", ERROR, "checkpoint", 6)]),
    # silence
    (VLLM + "issues/39764", one_slot_of_three(), [("CK205", ERROR, "checkpoint", 3)]),
    ("https://github.com/antonellof/ferrox/issues/82", with_fate("dropped", ["bert.pooler.dense.weight", "bert.pooler.dense.bias"], LLAMA), [("CK206", ERROR, "checkpoint", 2)]),
    (SGLANG + "issues/35797", made([*LLAMA, *(f"mtp.layers.0.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))], LLAMA), [("CK203", ERROR, "checkpoint", 5)]),
    # sizes and dtypes
    (VLLM + "issues/11671", refused("ValueError: The input size is not aligned with the quantized weight shape."), [("CK218", ERROR, "undecidable", 0)]),
    (HF + "trl/issues/3112", made(dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", [30, 4])), config={"vocab_size": 32}), [("CK401", ERROR, "config", 2)]),
    ("https://github.com/benchflow-ai/posttrainarena/pull/9", made(dict.fromkeys(LLAMA, ("F32", [4, 4])), config={"dtype": "bfloat16"}), [("CK302", WARN, "checkpoint", 30)]),
]  # fmt: skip

FALSE_ALARMS: list[tuple[str, Made]] = [
    # experts fused in the layers and one by one in the draft block
    ("https://github.com/vllm-project/llm-compressor/issues/3037", made([*layers("model.layers.{i}.mlp.experts.gate_up_proj"),
     *layers("mtp.layers.0.mlp.experts.{e}.{p}_proj.weight", 1, e="0123", p=("gate", "up", "down"))])),
    # an alias that a converter left out is filled through its tie
    (HF + "text-embeddings-inference/pull/564", made(["bert.embeddings.word_embeddings.weight"], ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"],
     by_design={"cls.predictions.decoder.weight": "tied"})),
    # a module that is fused on disk and in the ignore list
    (VLLM + "pull/11354", made({**quantised(Q, "packed"), **dict.fromkeys(layers("model.layers.{i}.self_attn.qkv_proj.weight"), ("BF16", [2, 2]))},
     config=declared("packed", ignore=["model.layers.0.self_attn.qkv_proj"]))),
    # a padded vocabulary
    ("https://github.com/OpenHelix-Team/ReconVLA/issues/7", made({"model.embed_tokens.weight": ("BF16", [40, 4])}, config={"vocab_size": 40})),
    # a head that is derived from another by design
    (VLLM + "pull/32089", made(LLAMA, [*LLAMA, "score.weight"], by_design={"score.weight": "computed from lm_head"})),
    # tables that are computed
    ("https://github.com/LianjiaTech/BELLE/issues/349", made(LLAMA, [*LLAMA, *layers("model.layers.{i}.self_attn.rotary_emb.inv_freq")])),
    # parameters that are computed after loading
    (VLLM + "pull/35299", made(LLAMA, [*LLAMA, "model.layers.0.mlp.experts.w13_g_idx_sort_indices"],
     by_design={"model.layers.0.mlp.experts.w13_g_idx_sort_indices": "computed after loading"})),
    # norms that this model never had
    ("https://github.com/arcee-ai/mergekit/issues/398", made(LLAMA, LLAMA)),
    # a marker of no elements
    ("https://github.com/promptfoo/modelaudit/pull/1607", made({"scaled_fp8": ("F8_E4M3", [0]), **dict.fromkeys(LLAMA, ("BF16", [2, 2]))})),
    # dtypes below a byte
    (HF.replace("huggingface", "safetensors") + "safetensors/issues/839", made({"l.0.weight": ("F4", [2, 8]), "l.0.scales": ("F8_E8M0", [2, 1])})),
    # a bias of the model's own beside GPTQ weights
    ("https://github.com/ggml-org/llama.cpp/issues/5139", made({**quantised(Q, "gptq"), **dict.fromkeys(layers(f"{Q}.bias"), ("F16", [4]))}, config=declared("gptq"))),
]  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), [pytest.param(c, e, id=link) for link, c, e in FAULTS])
def test_a_reported_fault_is_one_finding(case: Made, expected: list[Row]) -> None:
    assert sorted(told(*case)) == sorted(expected)


@pytest.mark.parametrize("case", [pytest.param(c, id=link) for link, c in FALSE_ALARMS])
def test_a_reported_false_alarm_is_not_repeated(case: Made) -> None:
    assert [f for f in findings(*case) if f.severity != "note"] == []


def test_an_engine_bug_is_not_blamed_on_the_checkpoint() -> None:
    # the same file loads in one release and not in the next
    source = checkpoint(QKV)
    parameters = ["attn.qkv_proj.weight", "attn.qkv_proj.bias"]
    chain = {n: (Step("stacked", ".q_proj", "", n, n),) for n in QKV}
    good = mapped(source, DOTTED, parameters, id="toy==24")
    bad = plan(source, parameters, id="toy==25", chains=chain, raises=True)
    assert {f.blame for f in findings(source, good, bad)} == {"engine"}
    assert all("toy==24" in f.mend for f in findings(source, good, bad))

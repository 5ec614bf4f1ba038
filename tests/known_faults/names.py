"""Names: prefixes, renames between releases, classes of another model, and what an engine's own rules do to them."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

import re

import msgspec

from ckaudit.mapper import Rule
from ckaudit.plan import Collision
from tests.helpers import safetensors_file
from tests.known_faults.cases import ERROR, LLAMA, VISION, WARN, Case, Fault, Kind, folder, layers, made, ruled
from tests.test_checks_rewrites import BARE, DOTTED, QKV
from tests.toy import LEAVES, llama

TEXT = "model.language_model."
RESAVED = [n.replace("model.", TEXT) for n in LLAMA] + [f"model.{n}" for n in VISION]
WRAPPED = [*(f"language_model.{n}" for n in LLAMA), *VISION]
OLD = [Rule("prefix", "lm_head.", "language_model.lm_head."), Rule("prefix", "model.", "language_model.model.")]
NEW = [Rule("prefix", TEXT, "language_model.model."), Rule("prefix", "model.visual.", "visual."), *OLD]
BERT = [
    f"encoder.layer.{i}.{p}"
    for i in range(3)
    for p in ("attention.self.query.weight", "output.LayerNorm.weight", "output.LayerNorm.bias")
]
HC = ("fn", "base", "scale")
GATE = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")


def resaved_glm() -> Case:
    """Names as the model has them in memory, where the engine wants those of the files it was released with."""
    kept = [n for n in llama(3) if "mlp" not in n]
    stored = [
        *kept,
        *layers("model.layers.{i}.{a}_hc.{x}", a=("attn", "ffn"), x=HC),
        *layers("model.layers.{i}.self_attn.forget_gate.{x}", x=GATE),
        *layers("model.layers.{i}.mlp.experts.{p}", p=("gate_up_proj", "down_proj")),
    ]
    wanted = [
        *kept,
        *layers("model.layers.{i}.hc_{a}_{x}", a=("attn", "ffn"), x=HC),
        *layers("model.layers.{i}.self_attn.{x}", x=GATE),
        *layers("model.layers.{i}.mlp.experts.{e}.{p}_proj.weight", e="0123", p=("gate", "up", "down")),
    ]
    return made(stored, wanted)


def collide() -> Case:
    """Two trees of one checkpoint that the engine maps to the same parameters."""
    a, b = (
        layers("model.decoder.layers.{i}.layer_scalar"),
        layers("model.encoder.language_model.layers.{i}.layer_scalar"),
    )
    target = layers("model.layers.{i}.layer_scalar")
    source, base = made([*a, *b], target, lambda n: re.sub(r"decoder\.|encoder\.language_model\.", "", n))
    return source, msgspec.structs.replace(
        base, collisions=tuple(Collision(t, y, (x,)) for t, x, y in zip(target, a, b, strict=True))
    )


def pooled(names: list[str]) -> list[str]:
    return [*names, "score.weight"]


PREFIXES = (
    Fault(Kind.PREFIX, ("huggingface/transformers/issues/38403", "hiyouga/LlamaFactory/issues/8338", "vllm-project/vllm/pull/19054", "huggingface/transformers/issues/38489", "QwenLM/Qwen3-VL/issues/1763"),
          "A load and a save change the names on disk, and an older engine's rules put them where nothing is.",
          lambda: ruled(RESAVED, OLD, WRAPPED),
          (("CK209", ERROR, "checkpoint", 29), ("CK209", ERROR, "checkpoint", 12))),
    Fault(Kind.PREFIX, ("vllm-project/vllm/pull/19054",),
          "The same names with the rules of a release that knows them: nothing to report.",
          lambda: ruled(RESAVED, NEW, WRAPPED)),
    Fault(Kind.PREFIX, ("huggingface/transformers/issues/45357", "huggingface/transformers/pull/45256", "huggingface/transformers/pull/45314", "huggingface/transformers/issues/45478"),
          "A save writes `language_model.` three times, and a reload forgives it.",
          lambda: made([n.replace("model.", "model.language_model.language_model.language_model.") for n in LLAMA]),
          (("CK213", WARN, "checkpoint", 29),)),
    Fault(Kind.PREFIX, ("huggingface/transformers/pull/45314",),
          "After the first mend the vision tower was saved under the language model's prefix.",
          lambda: made([*(n.replace("model.", TEXT) for n in LLAMA), *(f"{TEXT}{n}" for n in VISION)], [*(n.replace("model.", TEXT) for n in LLAMA), *(f"model.{n}" for n in VISION)]),
          (("CK209", ERROR, "checkpoint", 12),)),
    Fault(Kind.PREFIX, ("vllm-project/vllm/issues/12783",),
          "torch.compile's `_orig_mod.` stands before every name.",
          lambda: made([f"_orig_mod.{n}" for n in LLAMA], LLAMA, raises=True), (("CK209", ERROR, "checkpoint", 30),)),
    Fault(Kind.PREFIX, ("huggingface/transformers/issues/32067",),
          "`module.` of distributed training stands before every name; the loader only warns and the whole model is random.",
          lambda: made(["module.bert.encoder.layer.0.attention.self.query.weight", "module.cls.predictions.bias"], ["bert.encoder.layer.0.attention.self.query.weight", "cls.predictions.bias"]),
          (("CK209", ERROR, "checkpoint", 2),)),
    Fault(Kind.PREFIX, ("ggml-org/llama.cpp/issues/9211",),
          "The backbone was saved, so the root `model.` is missing, and in F32 besides.",
          lambda: made({n.removeprefix("model."): ("F32", [2, 2]) for n in LLAMA[:-1]}, LLAMA[:-1], config={"torch_dtype": "bfloat16"}),
          (("CK209", ERROR, "checkpoint", 29), ("CK302", WARN, "checkpoint", 29))),
    Fault(Kind.PREFIX, ("huggingface/transformers/pull/41844", "huggingface/transformers/issues/37519"),
          "FSDP's segment stays inside the names of every layer, and there is no config.json.",
          lambda: folder({"model.safetensors": safetensors_file({re.sub(r"(\d)\.", r"\1._fsdp_wrapped_module.", n): ("BF16", [2, 2]) for n in LLAMA}), "README.md": b""}),
          (("CK209", ERROR, "checkpoint", 27), ("CK403", ERROR, "checkpoint", 0))),
    Fault(Kind.PREFIX, ("arcee-ai/mergekit/issues/284", "huggingface/transformers/issues/29184"),
          "Some repositories of an architecture have the prefix of the base model and some do not.",
          lambda: made(BERT, [f"bert.{n}" for n in BERT]), (("CK209", ERROR, "checkpoint", 9),)),
    Fault(Kind.SYNC, ("verl-project/verl/pull/7327", "verl-project/verl/pull/7070"),
          "PEFT's `.base_layer` stays in the names that a trainer hands to the engine.",
          lambda: made([*LLAMA, *layers("blocks.{i}.attn.qkv.base_layer.weight")], [*LLAMA, *layers("blocks.{i}.attn.qkv.weight")]),
          (("CK216", ERROR, "checkpoint", 3),)),
    Fault(Kind.SYNC, ("alibaba/ROLL/pull/500",),
          "Names reach the engine without the mapper of its class, which would take `language_model.` out.",
          lambda: made([n.replace("model.", TEXT) for n in LLAMA], LLAMA), (("CK209", ERROR, "checkpoint", 29),)),
)  # fmt: skip

RENAMES = (
    Fault(Kind.RENAMED, ("huggingface/transformers/issues/29554", "huggingface/transformers/pull/35615", "2noise/ChatTTS/issues/732", "huggingface/transformers/pull/33192"),
          "Every name with `gamma` in it is rewritten, so layer scales are never loaded.",
          lambda: ruled(["decoder_block.0.gamma"], [Rule("substring", "gamma", "weight")], ["decoder_block.0.gamma"]), (("CK217", ERROR, "engine", 1),)),
    Fault(Kind.RENAMED, ("huggingface/transformers/pull/35615",),
          "The same rule where it belongs: LayerNorm's own gamma.",
          lambda: ruled(["decoder_block.0.gamma", "bert.embeddings.LayerNorm.gamma"], [Rule("substring", "LayerNorm.gamma", "LayerNorm.weight")], ["decoder_block.0.gamma", "bert.embeddings.LayerNorm.weight"])),
    Fault(Kind.RENAMED, ("sgl-project/sglang/issues/38618", "sgl-project/sglang/pull/38616"),
          "Names that were changed on reading were not changed back on saving; the engine skips nearly the whole file.",
          resaved_glm,
          (("CK209", ERROR, "checkpoint", 12), ("CK220", ERROR, "engine", 6), ("CK203", ERROR, "checkpoint", 18))),
    Fault(Kind.RENAMED, ("huggingface/lerobot/issues/1406",),
          "The language model inside the policy moved one level, and its weights no longer match.",
          lambda: made([n.replace("model.", "paligemma.language_model.model.") for n in LLAMA[:-1]], [n.replace("model.", "paligemma.model.language_model.") for n in LLAMA[:-1]]),
          (("CK209", ERROR, "checkpoint", 29),)),
    Fault(Kind.RENAMED, ("huggingface/transformers/issues/48805",),
          "Experts are converted on saving and not on reading back: one by one on disk, fused in memory.",
          lambda: made(layers("model.layers.{i}.mlp.experts.{e}.{p}_proj.weight", e="01", p=("gate", "up")), layers("model.layers.{i}.mlp.experts.gate_up_proj")),
          (("CK220", ERROR, "engine", 12),)),
)  # fmt: skip

CLASSES = (
    Fault(Kind.CLASS, ("vllm-project/vllm/issues/15031", "unslothai/unsloth/issues/2086", "unslothai/unsloth/issues/2274"),
          "The config names the text class and the tensors are those of the vision-language model.",
          lambda: made(WRAPPED, LLAMA), (("CK405", ERROR, "config", 42),)),
    Fault(Kind.CLASS, ("QwenLM/Qwen3.8/issues/64",),
          "A text checkpoint in a vision-language class: every text name lacks a root, and nothing is stored of the tower.",
          lambda: made(LLAMA, WRAPPED), (("CK405", ERROR, "config", 30),)),
    Fault(Kind.CLASS, ("vllm-project/vllm/pull/32089", "vllm-project/vllm/issues/43062"),
          "The score head is computed from the output head by design.",
          lambda: made(LLAMA, pooled(LLAMA), by_design={"score.weight": "computed from lm_head"})),
    Fault(Kind.CLASS, ("vllm-project/vllm/issues/43062",),
          "The same without that conversion: the score head stays as initialised.",
          lambda: made(LLAMA, pooled(LLAMA)), (("CK204", ERROR, "checkpoint", 1),)),
    Fault(Kind.CLASS, ("vllm-project/vllm/issues/28517", "vllm-project/vllm/issues/21176"),
          "A multimodal checkpoint resolved to a class for text.",
          lambda: made([*LLAMA, *VISION], LLAMA), (("CK405", ERROR, "config", 12),)),
    Fault(Kind.CLASS, ("huggingface/text-embeddings-inference/pull/438", "ml-explore/mlx-lm/issues/89"),
          "The root of the names is not the one that the runtime asks for.",
          lambda: made([f"new.{n}" for n in BERT], BERT), (("CK209", ERROR, "checkpoint", 9),)),
)  # fmt: skip

RULES = (
    Fault(Kind.CASCADE, ("vllm-project/vllm/issues/48449", "vllm-project/vllm/pull/48564"),
          "Stacked rules without a leading dot rewrite what another has just written: two of three shards are lost.",
          lambda: ruled(QKV, BARE, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"], at="attn"), (("CK201", ERROR, "engine", 4),)),
    Fault(Kind.CASCADE, ("sgl-project/sglang/issues/13214",),
          "A rule matches inside a name that is fused already.",
          lambda: ruled(layers("model.layers.{i}.mlp.shared_expert.gate_up_proj.weight"), [Rule("substring", "up_proj", "gate_up_proj")], layers("model.layers.{i}.mlp.shared_expert.gate_up_proj.weight")),
          (("CK201", ERROR, "engine", 3),)),
    Fault(Kind.CASCADE, ("vllm-project/vllm/issues/42777",),
          "The mapper runs twice, and a suffix rule destroys its own result.",
          lambda: ruled(["head.weight", "mtp.0.head.weight"], [Rule("suffix", "head.weight", "lm_head.weight")], ["lm_head.weight", "mtp.0.lm_head.weight"], twice=True),
          (("CK208", ERROR, "engine", 2),)),
    Fault(Kind.CASCADE, ("vllm-project/vllm-ascend/pull/14653",),
          "The outer and the inner loader both apply one suffix rule.",
          lambda: ruled(layers("layers.{i}.self_attn.fa_k.offset"), [Rule("suffix", "fa_k.offset", "mla_attn.mla_attn.fa_k.offset")], layers("layers.{i}.self_attn.mla_attn.mla_attn.fa_k.offset"), twice=True),
          (("CK208", ERROR, "engine", 3),)),
    Fault(Kind.CASCADE, ("pjlab-sys4nlp/llama-moe/issues/74",),
          "A rename for weight norm matches in the middle of `weight_gate`: the router is random.",
          lambda: ruled([f"model.layers.29.mlp.calculator.experts.weight_gate.{i}" for i in range(8)], [Rule("substring", "weight_g", "parametrizations.weight.original0")],
                        [f"model.layers.29.mlp.calculator.experts.weight_gate.{i}" for i in range(8)]),
          (("CK217", ERROR, "engine", 8),)),
    Fault(Kind.CASCADE, ("evilsocket/cake/issues/34",),
          "The path of the layer stands twice.",
          lambda: made([n.replace("model.layers.0.", "model.layers.0.model.layers.0.") for n in LLAMA]), (("CK213", WARN, "checkpoint", len(LEAVES) + 2),)),
    Fault(Kind.SUBMODULE, ("vllm-project/vllm/pull/49417",),
          "Rules with a leading dot run in a submodule whose names have lost their path: they never fire.",
          lambda: ruled(QKV, DOTTED, ["attn.qkv_proj.weight", "attn.qkv_proj.bias"], at="attn"), (("CK202", ERROR, "engine", 6),)),
    Fault(Kind.COLLISION, ("vllm-project/vllm/pull/55911",),
          "Two trees of a checkpoint map to one parameter, and which of them wins changes between releases.",
          collide, (("CK207", ERROR, "checkpoint", 6),)),
)  # fmt: skip

FAULTS = (*PREFIXES, *RENAMES, *CLASSES, *RULES)

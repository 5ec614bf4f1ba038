"""Heads and embeddings, tensors too many, silent losses, sizes and rows."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

import msgspec

from ckaudit.plan import Failure, Note
from tests.known_faults.cases import (
    CONFIG,
    ERROR,
    LLAMA,
    NOTE,
    WARN,
    Case,
    Fault,
    Kind,
    declared,
    layers,
    made,
    quantised,
    with_fate,
)
from tests.toy import sized

TIED = {"tie_word_embeddings": True}
INV_FREQ = layers("model.layers.{i}.self_attn.rotary_emb.inv_freq", 40)
LLAMA40 = layers("model.layers.{i}.self_attn.o_proj.weight", 40)
ROUTED = ("gate_proj", "up_proj", "down_proj")


def awq() -> Case:
    """One layer in the sizes of Qwen2.5-VL-72B-Instruct-AWQ: 29568 inputs in 231 groups of 128, and 8192 in 64."""

    def module(name: str, inputs: int, outputs: int) -> dict[str, tuple[str, list[int]]]:
        return {
            f"{name}.qweight": ("I32", [inputs, outputs // 8]),
            f"{name}.qzeros": ("I32", [inputs // 128, outputs // 8]),
            f"{name}.scales": ("F16", [inputs // 128, outputs]),
        }

    tensors = module("model.layers.0.mlp.down_proj", 29568, 8192) | module(
        "model.layers.0.self_attn.o_proj", 8192, 8192
    )
    return (sized(tensors, CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}),)


def fp8_experts() -> Case:
    """Experts 320 wide in blocks of 128 (Qwen3.8-Flash-Next-FP8), and a dense layer 2048 wide that splits over 8 and no further than 16."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for module, width in (("experts.0", 320), ("experts.1", 320), ("shared_expert", 2048)):
        for part in ROUTED:
            rows, columns = (2048, width) if part == "down_proj" else (width, 2048)
            tensors[f"model.layers.0.mlp.{module}.{part}.weight"] = ("F8_E4M3", [rows, columns])
            tensors[f"model.layers.0.mlp.{module}.{part}.weight_scale_inv"] = (
                "F32",
                [-(-rows // 128), -(-columns // 128)],
            )
    return (sized(tensors, CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),)


def rows(rows_of_scales: int) -> Case:
    """A fused projection of 27136 rows, blocks of 128: 212 rows of scales when plain, 8 * 27 = 216 when interleaved for 8 ranks."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    return (
        sized(
            {name: ("F8_E4M3", [27136, 4096]), f"{name}_scale_inv": ("F32", [rows_of_scales, 32])},
            CONFIG
            | {
                "attention_projection_layout": "fused_qkv",
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
        ),
    )


FAULTS = (
    # heads and embeddings
    Fault(Kind.TIED, ("huggingface/transformers/issues/45127", "unslothai/unsloth/issues/1971", "hiyouga/LlamaFactory/pull/10832", "huggingface/peft/issues/2018"),
          "Head and embedding were trained apart and both saved, and the config still ties them: one overwrites the other. Headers cannot tell whether they are equal.",
          lambda: made(LLAMA, LLAMA, config=TIED), (("CK214", NOTE, "undecidable", 2),)),
    Fault(Kind.TIED, ("vllm-project/vllm/pull/6758", "sgl-project/sglang/pull/577", "ml-explore/mlx-examples/issues/564", "ml-explore/mlx-lm/pull/1298"),
          "A tied model ships its head too, and a loader without a rule to skip it refuses it.",
          lambda: made(LLAMA, LLAMA[:-1], config=TIED, raises=True, failures=(Failure("KeyError: 'lm_head.weight'", ("lm_head.weight",)),)),
          (("CK214", ERROR, "engine", 1), ("CK214", NOTE, "undecidable", 2))),
    Fault(Kind.TIED, ("vllm-project/vllm/issues/51063",),
          "The top level ties the head and the text part does not: a trained head is left out.",
          lambda: made(LLAMA, LLAMA[:-1], config=TIED | {"text_config": {"tie_word_embeddings": False}}), (("CK214", ERROR, "config", 1),)),
    Fault(Kind.TIED, ("vllm-project/vllm/issues/21755",),
          "A fine-tune wrote a head at the top that the class does not own.",
          lambda: made([n.replace("model.", "model.language_model.") for n in LLAMA], [n.replace("model.", "model.language_model.") for n in LLAMA[:-1]], config=TIED),
          (("CK214", NOTE, "undecidable", 2), ("CK214", WARN, "config", 1))),
    Fault(Kind.TIED, ("vllm-project/vllm/pull/46835",),
          "Skipping everything under `lm_head.` skips a trained bias too.",
          lambda: with_fate("dropped", ["lm_head.bias"], LLAMA[:-1], TIED), (("CK206", ERROR, "engine", 1),)),
    Fault(Kind.TIED, ("huggingface/text-embeddings-inference/pull/564",),
          "A conversion left one alias of a tied group out: it is filled through its tie.",
          lambda: made(["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"],
                       ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
                       by_design=dict.fromkeys(("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"), "tied"))),
    # too many
    Fault(Kind.EXTRA, ("ggml-org/llama.cpp/issues/6490", "ggml-org/llama.cpp/issues/7457"),
          "One tensor more in each of 40 layers: rotary tables that every engine computes.",
          lambda: made([*LLAMA40, *INV_FREQ], LLAMA40), (("CK206", NOTE, "checkpoint", 40),)),
    Fault(Kind.EXTRA, ("LianjiaTech/BELLE/issues/349",),
          "The same tables left out: computed, so nothing is missing.",
          lambda: made(LLAMA40, [*LLAMA40, *INV_FREQ])),
    Fault(Kind.EXTRA, ("vllm-project/vllm/issues/1420",),
          "GPTQ writes biases for layers that have none.",
          lambda: ignored_biases(), (("CK206", WARN, "checkpoint", 3),)),
    Fault(Kind.EXTRA, ("antonellof/ferrox/issues/82",),
          "A converter drops the pooler, which this class needs for its scores.",
          lambda: with_fate("dropped", ["bert.pooler.dense.weight", "bert.pooler.dense.bias"], LLAMA), (("CK206", ERROR, "engine", 2),)),
    # silence
    Fault(Kind.SILENT, ("vllm-project/vllm/issues/14828", "vllm-project/vllm/issues/11802", "vllm-project/vllm/pull/14850"),
          "A loader reports parameters as not loaded that another call filled: the report is wrong, not the checkpoint.",
          lambda: made(LLAMA, LLAMA, notes=(Note("claims-too-little", "", ("lm_head.weight",)),)),
          (("CK215", NOTE, "engine", 1),)),
    Fault(Kind.SILENT, ("vllm-project/vllm/issues/57446",),
          "A class returns no list of what it loaded, so its engine checks nothing: the parameter that no tensor fills is found all the same.",
          lambda: made([n for n in LLAMA if n != "model.layers.1.mlp.up_proj.weight"], LLAMA), (("CK204", ERROR, "checkpoint", 1),)),
    Fault(Kind.SILENT, ("vllm-project/vllm/pull/35299",),
          "Parameters that are computed after loading were reported as missing.",
          lambda: made(LLAMA, [*LLAMA, *layers("model.layers.{i}.mlp.experts.{w}", w=("w13_g_idx_sort_indices", "w2_g_idx_sort_indices"))],
                       by_design=dict.fromkeys(layers("model.layers.{i}.mlp.experts.{w}", w=("w13_g_idx_sort_indices", "w2_g_idx_sort_indices")), "computed after loading"))),
    # sizes
    Fault(Kind.SHAPE, ("QwenLM/Qwen3-VL/issues/831", "vllm-project/vllm/issues/11671", "vllm-project/vllm/issues/5675"),
          "231 groups of a down projection do not split over 2, 4 or 8 ranks.",
          awq, (("CK309", ERROR, "environment", 1),), tp=(2, 4, 8)),
    Fault(Kind.SHAPE, ("vllm-project/vllm/issues/52997", "vllm-project/vllm/issues/54178", "vllm-project/vllm/issues/42384", "sgl-project/sglang/issues/26107"),
          "Experts 320 wide, in blocks of 128: no rank gets whole blocks.",
          fp8_experts, (("CK309", ERROR, "environment", 2), ("CK309", ERROR, "environment", 4)), tp=(2, 8)),
    Fault(Kind.SHAPE, ("huggingface/trl/issues/3112", "vllm-project/vllm/issues/15124"),
          "Tokens were added or cut in training: the embedding has fewer rows than the config says.",
          lambda: (sized(dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", [151670, 64])), CONFIG | {"vocab_size": 151936}),),
          (("CK401", ERROR, "config", 2),)),
    Fault(Kind.SHAPE, ("OpenHelix-Team/ReconVLA/issues/7",),
          "An embedding that is padded beyond the tokenizer, as the config says: normal.",
          lambda: (sized({"model.embed_tokens.weight": ("BF16", [152064, 64])}, CONFIG | {"vocab_size": 152064}),)),
    # rows and tables
    Fault(Kind.FUSED_ROWS, ("sgl-project/sglang/issues/24321", "sgl-project/sglang/pull/28100", "sgl-project/sglang/pull/24379"),
          "Rows of a fused projection are interleaved by rank in one repository and plain in another, under one name and shape: only block scales betray it.",
          lambda: rows(216), (("CK306", WARN, "undecidable", 1),)),
    Fault(Kind.FUSED_ROWS, ("ROCm/Megatron-LM/pull/63",),
          "Halves of gate and up are interleaved by the number of ranks that saved them.",
          lambda: (sized({f"decoder.layers.{i}.{n}": s for i in range(3) for n, s in (("mlp.linear_fc1.weight", ("BF16", [8192, 1024])), ("mlp.linear_fc2.weight", ("BF16", [1024, 4096])),
                                                                                     ("self_attention.linear_qkv.weight", ("BF16", [1536, 1024])))}),),
          (("CK306", WARN, "undecidable", 6),)),
    Fault(Kind.TABLE, ("arcee-ai/mergekit/issues/398",),
          "A tool's table asks for norms that this model never had.",
          lambda: made(LLAMA, LLAMA)),
)  # fmt: skip


def ignored_biases() -> Case:
    """Zero biases beside the packed weights of a Falcon, which has none."""
    module = "transformer.h.{i}.mlp.dense_4h_to_h"
    biases, config = layers(f"{module}.bias"), declared("gptq")
    source, base = made(
        quantised(module, "gptq") | dict.fromkeys(biases, ("F16", [4])), list(quantised(module, "gptq")), config=config
    )
    return source, msgspec.structs.replace(
        base, names=tuple(msgspec.structs.replace(n, fate="ignored") if n.name in biases else n for n in base.names)
    )

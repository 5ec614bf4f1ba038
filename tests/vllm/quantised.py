"""Headers of small quantised checkpoints, one for each scheme, dense and with experts, as the quantisers write them.

Facts: AutoGPTQ `nn_modules/qlinear`, AutoAWQ `modules/linear/gemm.py`, compressed-tensors 0.17 `compressors/`, ModelOpt `export/`,
bitsandbytes `functional.py` (`QuantState.as_dict`), transformers 5.24.0 `integrations/{finegrained_fp8,mxfp4}.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckaudit.checkpoint import Checkpoint
from tests.toy import sized

Entries = dict[str, tuple[str, list[int]]]
Leaves = Callable[[int, int], Entries]
"""What one linear module of so many outputs and inputs is stored as."""

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS, HEAD, EXPERTS, EXPERT = 512, 1024, 1024, 2, 64, 4, 256
QUERIES, KEYS = 8, 4
ATTENTION = {
    "self_attn.q_proj": (QUERIES * HEAD, HIDDEN), "self_attn.k_proj": (KEYS * HEAD, HIDDEN), "self_attn.v_proj": (KEYS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES * HEAD),
}  # fmt: skip


def mlp(inner: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}


class Scheme(NamedTuple):
    """A quantisation: its `quantization_config`, what it makes of a module, and the key of its list of plain modules."""

    config: Mapping[str, Any]
    leaves: Leaves
    ignore: str
    dtype: str = "bfloat16"


def _groups(format: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    common = {"symmetric": True, "actorder": None, "block_structure": None, "observer_kwargs": {}, "observer": "minmax"}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {**common, "dynamic": False, "group_size": None, **weights},
                "input_activations": None if activations is None else {**common, "group_size": None, **activations},
                "output_activations": None,
            }
        },
    }  # fmt: skip


_BITS8: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
_TOKENS: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True, "observer": None}
_FP4: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

SCHEMES: dict[str, Scheme] = {
    "fp8-block": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda o, i: {"weight": ("F8_E4M3", [o, i]), "weight_scale_inv": ("F32", [-(-o // 128), -(-i // 128)])},
        "modules_to_not_convert",
    ),
    "fp8-tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda o, i: {"weight": ("F8_E4M3", [o, i]), "weight_scale": ("F32", []), "input_scale": ("F32", [])},
        "ignored_layers",
    ),
    "ct-fp8": Scheme(
        _groups("float-quantized", {**_BITS8, "type": "float"}, {**_TOKENS, "type": "float"}),
        lambda o, i: {"weight": ("F8_E4M3", [o, i]), "weight_scale": ("BF16", [o, 1])},
        "ignore",
    ),
    "ct-int8": Scheme(
        _groups("int-quantized", {**_BITS8, "type": "int"}, {**_TOKENS, "type": "int"}),
        lambda o, i: {"weight": ("I8", [o, i]), "weight_scale": ("BF16", [o, 1])},
        "ignore",
    ),
    "ct-int4": Scheme(
        _groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
        lambda o, i: {
            "weight_packed": ("I32", [o, i // 8]), "weight_scale": ("BF16", [o, i // 128]), "weight_shape": ("I64", [2]),
        },
        "ignore",
    ),
    "ct-nvfp4": Scheme(
        _groups("nvfp4-pack-quantized", _FP4, {**_FP4, "dynamic": "local"}),
        lambda o, i: {
            "weight_packed": ("U8", [o, i // 2]), "weight_scale": ("F8_E4M3", [o, i // 16]), "weight_global_scale": ("F32", [1]),
            "input_global_scale": ("F32", [1]),
        },
        "ignore",
    ),
    "modelopt-nvfp4": Scheme(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None},
        lambda o, i: {
            "weight": ("U8", [o, i // 2]), "weight_scale": ("F8_E4M3", [o, i // 16]), "weight_scale_2": ("F32", []),
            "input_scale": ("F32", []),
        },
        "ignore",
    ),
    "gptq": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "true_sequential": True},
        lambda o, i: {
            "qweight": ("I32", [i // 8, o]), "qzeros": ("I32", [i // 128, o // 8]), "scales": ("F16", [i // 128, o]), "g_idx": ("I32", [i]),
        },
        "",
        "float16",
    ),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        lambda o, i: {"qweight": ("I32", [i, o // 8]), "qzeros": ("I32", [i // 128, o // 8]), "scales": ("F16", [i // 128, o])},
        "modules_to_not_convert",
        "float16",
    ),
    "bitsandbytes": Scheme(
        {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False,
        },
        lambda o, i: {
            "weight": ("U8", [o * i // 2, 1]), "weight.absmax": ("F32", [o * i // 64]), "weight.quant_map": ("F32", [16]),
            "weight.quant_state.bitsandbytes__nf4": ("U8", [80]),
        },
        "llm_int8_skip_modules",
    ),
}  # fmt: skip


def plain(outputs: int, inputs: int) -> Entries:
    return {"weight": ("BF16", [outputs, inputs])}


_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": QUERIES, "num_key_value_heads": KEYS, "head_dim": HEAD,
    "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "attention_bias": False,
}  # fmt: skip


def dense(scheme: Scheme) -> tuple[dict[str, Any], Entries]:
    """A Llama of two layers, every linear module but the head quantised: its config and its tensors."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": INTERMEDIATE}
    tensors = _around()
    for i in range(LAYERS):
        path = f"model.layers.{i}."
        tensors |= _modules(path, scheme, ATTENTION) | _modules(f"{path}mlp.", scheme, mlp(INTERMEDIATE))
    return {**_COMMON, **config, **_declared(scheme, ["lm_head"])}, tensors


def experts(scheme: Scheme) -> tuple[dict[str, Any], Entries]:
    """A Qwen3-MoE of two layers: attention and every expert quantised, the routers plain."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS,
        "moe_intermediate_size": EXPERT, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "sliding_window": None, "use_sliding_window": False, "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    tensors = _around()
    for i in range(LAYERS):
        path = f"model.layers.{i}."
        tensors |= {f"{path}self_attn.{n}_norm.weight": ("BF16", [HEAD]) for n in "qk"}
        tensors |= {f"{path}mlp.gate.weight": ("BF16", [EXPERTS, HIDDEN])} | _modules(path, scheme, ATTENTION)
        for j in range(EXPERTS):
            tensors |= _modules(f"{path}mlp.experts.{j}.", scheme, mlp(EXPERT))
    routers = [f"model.layers.{i}.mlp.gate" for i in range(LAYERS)]
    return {**_COMMON, **config, **_declared(scheme, ["lm_head", *routers])}, tensors


def mxfp4() -> tuple[dict[str, Any], Entries]:
    """A gpt-oss of two layers: stacked experts in MXFP4 (blocks of 32, two values a byte), all else plain."""
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": HIDDEN, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
        "attention_bias": True, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    }  # fmt: skip
    tensors = _around()
    for i in range(LAYERS):
        path = f"model.layers.{i}."
        tensors[f"{path}self_attn.sinks"] = ("BF16", [QUERIES])
        for name, (o, n) in {**ATTENTION, "mlp.router": (EXPERTS, HIDDEN)}.items():
            tensors |= {f"{path}{name}.weight": ("BF16", [o, n]), f"{path}{name}.bias": ("BF16", [o])}
        for name, o in {"gate_up_proj": 2 * HIDDEN, "down_proj": HIDDEN}.items():
            tensors |= {
                f"{path}mlp.experts.{name}_blocks": ("U8", [EXPERTS, o, HIDDEN // 32, 16]),
                f"{path}mlp.experts.{name}_scales": ("U8", [EXPERTS, o, HIDDEN // 32]),
                f"{path}mlp.experts.{name}_bias": ("BF16", [EXPERTS, o]),
            }
    return {**_COMMON, **config}, tensors


def checkpoint(config: Mapping[str, Any], tensors: Entries) -> Checkpoint:
    """As a target is read: one file with these tensors."""
    return sized(tensors, config)


def _around() -> Entries:
    tensors: Entries = {
        "model.embed_tokens.weight": ("BF16", [VOCABULARY, HIDDEN]), "model.norm.weight": ("BF16", [HIDDEN]),
        "lm_head.weight": ("BF16", [VOCABULARY, HIDDEN]),
    }  # fmt: skip
    for i in range(LAYERS):
        tensors |= {f"model.layers.{i}.{n}_layernorm.weight": ("BF16", [HIDDEN]) for n in ("input", "post_attention")}
    return tensors


def _modules(path: str, scheme: Scheme, modules: Mapping[str, tuple[int, int]]) -> Entries:
    return {
        f"{path}{name}.{leaf}": held for name, size in modules.items() for leaf, held in scheme.leaves(*size).items()
    }


def _declared(scheme: Scheme, ignored: list[str]) -> dict[str, Any]:
    listed = {scheme.ignore: ignored} if scheme.ignore else {}
    return {"torch_dtype": scheme.dtype, "quantization_config": {**scheme.config, **listed}}

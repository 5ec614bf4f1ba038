"""What is meant to be so: tensors that a release leaves out on purpose, and parameters that need no tensor. Each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckaudit.engines.vllm.coverage import ParameterCoverage

DRAFT = "draft model: "
_PREDICTS = f"{DRAFT}multi-token-prediction layers, loaded by their own class when speculative decoding asks for them"

_COMPUTED = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb)\.(inv_freq|cos_cached|sin_cached)$|\.(attn\.)?masked_bias$")
_KV_SCALE = re.compile(r"\.(attn|attention|mla_attn|self_attn)?\.?(_?[qkv]|prob)(_scale|_zero_point)$|_[qkv]_scale$")
_DRAFT = re.compile(r"(^|\.)(mtp|mtp_block|nextn|eagle|medusa)[._]")
_SHARED_SCALE = re.compile(r"\.(input_scale|input_global_scale|weight_scale|weight_global_scale|weight_scale_2)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(config.get(key), dict):
            return {**config, **config[key]}
    return config


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization_config") or _text_config(config).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _reordered(config: Mapping[str, Any]) -> bool:
    """Whether a quantisation sorted the inputs of its weights before it grouped them, so that the order (`g_idx`) is needed."""
    quantization = _quantization(config)
    groups = quantization.get("config_groups")
    weights = [
        g.get("weights") for g in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(g, Mapping)
    ]
    orders = [w.get("actorder") for w in weights if isinstance(w, Mapping)]
    return bool(quantization.get("desc_act")) or any(order in ("group", "dynamic", True) for order in orders)


def name_by_design(name: str, config: Mapping[str, Any], elements: int = 0) -> str | None:
    """Why a checkpoint tensor that reached no parameter, or was overwritten there, is meant to be; None if it is a loss."""
    held = _text_config(config)
    if name.endswith(".weight_shape"):
        return "metadata: the shape before packing"
    if name.endswith((".g_idx", ".weight_g_idx")) and not _reordered(config):
        return "metadata: the order of groups, which is the natural one without desc_act"
    if name.endswith(".qzeros") and _quantization(config).get("sym"):
        return "metadata: zero points, which a symmetric scheme does not use"
    if elements == 1 and _SHARED_SCALE.search(name):
        return "shared: fused shards have one scale in this release, and the last one stands for all"
    if _COMPUTED.search(name):
        return "computed: the engine makes it from the config"
    if name.endswith(("lm_head.weight", "embed_out.weight")) and held.get(
        "tie_word_embeddings", config.get("tie_word_embeddings")
    ):
        return "tied: the config ties the head to the input embedding"
    if _DRAFT.search(name):
        return _PREDICTS
    layers = held.get("num_hidden_layers")
    found = _LAYER.search(name)
    if found and isinstance(layers, int) and held.get("num_nextn_predict_layers") and int(found[1]) >= layers:
        return _PREDICTS
    if name.endswith(".num_batches_tracked"):
        return "metadata: a counter of training"
    return None


def parameter_by_design(
    name: str, seen: ParameterCoverage, buffer: bool, zeros: bool, config: Mapping[str, Any]
) -> str | None:
    """Why a parameter that was not filled from the checkpoint is meant not to be; None if it is a loss. `zeros`: it was made as zeros."""
    if seen.elements == 0:
        return "empty: it holds no data"
    if seen.loaded and seen.loaded + seen.constant >= seen.elements and not seen.lost:
        return "padding: the loader fills the rest with a constant"
    if name.endswith("weight_shape"):
        return "metadata: the shape before packing, which no kernel asks for"
    if name.endswith("g_idx_sort_indices") or (name.endswith("g_idx") and not _reordered(config)):
        return "computed: the order of groups, which the engine works out itself or does not need without desc_act"
    if _KV_SCALE.search(name):
        return "default-valued: a scale of the KV cache that few checkpoints carry"
    if zeros and not seen.sources and name.endswith("bias"):
        return "default-valued: a bias that is made as zeros, and that this checkpoint has not"
    if buffer and not seen.sources:
        return "computed: a buffer that the engine fills itself"
    return None

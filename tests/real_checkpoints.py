"""Real checkpoints of real architectures, small enough to load in a moment: transformers' own configs with small numbers in them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 200, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_layers": 2,
    "num_decoder_layers": 2, "d_ff": 96, "d_kv": 16, "num_heads": 4, "n_layer": 2, "n_head": 4, "n_embd": 64, "depth": 2,
    "image_size": 32, "embed_dim": 64, "max_position_embeddings": 64, "n_positions": 64, "first_k_dense_replace": 1,
    "out_hidden_size": 64, "shared_expert_intermediate_size": 32, "num_nextn_predict_layers": 0, "n_shared_experts": 1,
    "ffn_hidden_size": 96, "num_encoder_layers": 2, "n_layers": 2, "dim": 64, "hidden_dim": 96, "n_heads": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "encoder_hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 32,
    "fullatt_block_indexes": [1],
}  # fmt: skip
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "layer_type_list")


def shrink(config: Any, depth: int = 0) -> Any:
    """`config`, and the configs inside it, with every size that has a small one made small."""
    known = config.to_dict()
    for name, value in SMALL.items():
        if name not in known and name not in getattr(config, "attribute_map", {}):
            continue
        old = getattr(config, name, None)
        if old is None or (isinstance(old, (list, tuple)) and not isinstance(value, list)):
            continue
        if isinstance(old, (int, float)) and not isinstance(old, bool) and not isinstance(value, list) and old < value:
            continue
        setattr(config, name, value)
    layers = getattr(config, "num_hidden_layers", None)
    for name in LISTS:
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)) and isinstance(layers, int) and len(kinds) > layers:
            setattr(config, name, (list(dict.fromkeys(kinds)) + list(kinds))[:layers])
    for name in (getattr(config, "sub_configs", None) or {}) if depth < 4 else ():
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name), depth + 1)
    return config


def build(model_type: str, folder: Path, class_name: str | None = None, **overrides: Any) -> Any:
    """A seeded model of `model_type`, saved into `folder` as `save_pretrained` writes it; `class_name` or its usual head."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = CONFIG_MAPPING[model_type]
        fields = {k: v for k, v in shrink(kind()).to_dict().items() if k != "transformers_version"} | overrides
        cls = getattr(transformers, class_name or usual_class(model_type))
        torch.manual_seed(0)
        model = cls(shrink(kind(**fields)))
        assert sum(p.numel() for p in model.parameters()) < 6_000_000, f"{model_type} is not small"
        model.save_pretrained(folder)
    return model


def usual_class(model_type: str) -> str:
    """The name of the class that most checkpoints of `model_type` are of."""
    from transformers.models.auto import modeling_auto as auto

    for table in (
        "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM",
        "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL",
    ):  # fmt: skip
        name = getattr(auto, f"{table}_MAPPING_NAMES", {}).get(model_type)
        if name:
            return name if isinstance(name, str) else name[0]
    raise LookupError(model_type)


def save(state: dict[str, Any], folder: Path, file: str = "model.safetensors") -> None:
    """Write `state` (torch tensors by name) as one safetensors file."""
    from safetensors.torch import save_file

    save_file({n: t.contiguous().clone() for n, t in state.items()}, folder / file, metadata={"format": "pt"})


def load(folder: Path, file: str = "model.safetensors") -> dict[str, Any]:
    """The tensors of one safetensors file."""
    from safetensors.torch import load_file

    return load_file(folder / file)


def job_of(folder: Path, **options: Any) -> Any:
    """The job that the engine gets for a folder: its small files and its headers, no data."""
    from ckaudit.checkpoint import TensorSpec
    from ckaudit.engines import EngineOptions, Job

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, info in header.items():
            if name != "__metadata__":
                tensors[name] = TensorSpec(name, path.name, info["dtype"], tuple(info["shape"]), None)
    texts = {
        p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".json", ".py") and ".index." not in p.name
    }
    return Job(
        engine="transformers",
        options=EngineOptions(**options),
        name=str(folder),
        texts=texts,
        tensors=tuple(tensors.values()),
    )

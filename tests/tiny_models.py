"""Models of many architectures, a few thousand weights each, made from configs: what the loader and the forward pass are tried on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
_GQA = {**_TEXT, "num_key_value_heads": 2}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def _qwen2_vl_vision(**extra: Any) -> dict[str, Any]:
    return {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2, **extra}


def _mini(t: Any) -> Any:
    """MiniCPM-V 4.6 in small: the same modules, one full and one linear attention layer."""
    text = {
        **_GQA, "model_type": "qwen3_5_text", "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {**_VISION, "model_type": "minicpmv4_6_vision", "num_hidden_layers": 3}
    config = t.MiniCPMV4_6Config(
        text_config=text,
        vision_config=vision,
        insert_layer_id=1,
        tie_word_embeddings=True,
    )
    return t.MiniCPMV4_6ForConditionalGeneration(config)


MODELS: dict[str, Callable[[Any], Any]] = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**_GQA)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320, n_positions=128)),
    "qwen3_moe": lambda t: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(**_GQA, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8)
    ),
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**_GQA, num_local_experts=4)),
    "deepseek_v3": lambda t: t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **{**_TEXT, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        )
    ),
    "mamba": lambda t: t.MambaForCausalLM(t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=320, state_size=4)),
    "bert": lambda t: t.BertModel(t.BertConfig(**_TEXT)),
    "t5": lambda t: t.T5ForConditionalGeneration(t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=320)),
    "bart": lambda t: t.BartForConditionalGeneration(
        t.BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, vocab_size=320, max_position_embeddings=128,
        )
    ),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**_VISION)),
    "clip": lambda t: t.CLIPModel(
        t.CLIPConfig(
            text_config={**_TEXT, "max_position_embeddings": 77, "eos_token_id": 2}, vision_config=_VISION, projection_dim=16
        )
    ),
    "whisper": lambda t: t.WhisperForConditionalGeneration(
        t.WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, vocab_size=320, num_mel_bins=8, max_source_positions=32, max_target_positions=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
        )
    ),
    "wav2vec2": lambda t: t.Wav2Vec2Model(
        t.Wav2Vec2Config(
            **_TEXT, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        )
    ),
    "llava": lambda t: t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=t.LlamaConfig(**_GQA), vision_config=t.CLIPVisionConfig(**_VISION), image_token_id=300
        )
    ),
    "qwen2_vl": lambda t: t.Qwen2VLForConditionalGeneration(
        t.Qwen2VLConfig(
            text_config={**_GQA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}},
            vision_config=_qwen2_vl_vision(), image_token_id=300, video_token_id=301, vision_start_token_id=302, vision_end_token_id=303,
        )
    ),
    "gemma3": lambda t: t.Gemma3ForConditionalGeneration(
        t.Gemma3Config(
            text_config={**_GQA, "head_dim": 8, "sliding_window": 16}, vision_config=_VISION, image_token_id=300, mm_tokens_per_image=4,
            boi_token_id=302, eoi_token_id=303,
        )
    ),
    "qwen2_audio": lambda t: t.Qwen2AudioForConditionalGeneration(
        t.Qwen2AudioConfig(
            text_config=t.Qwen2Config(**_GQA),
            audio_config={
                "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 8,
                "max_source_positions": 32,
            },
            audio_token_id=300,
        )
    ),
    "minicpm": _mini,
}  # fmt: skip


def save(kind: str, folder: Path, *, dtype: str = "bfloat16", shard: str = "5GB", seed: int = 0) -> Path:
    """A checkpoint of this kind in `folder`, which it returns."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = MODELS[kind](transformers).to(getattr(torch, dtype))
    for parameter in model.parameters():  # as if trained: some modules start at zero
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    model.config.dtype = dtype
    for part in ("text_config", "vision_config", "audio_config"):
        if hasattr(getattr(model.config, part, None), "dtype"):
            getattr(model.config, part).dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    return folder

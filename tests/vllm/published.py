"""What published configs state and transformers' config classes leave at another default, or under another name: facts, with sources.

Most are from the readers of published configs that other projects have written: a field that such a reader needs is in the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

JSON = Mapping[str, Any]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Fact(NamedTuple):
    """What is known of the published checkpoints of one architecture."""

    source: str = ""
    config: JSON = NOTHING
    """Fields for the config class: sizes and switches."""
    written: JSON | Callable[[JSON], JSON] = NOTHING
    """Fields of `config.json` alone (or a function that works them out from it): what the class has no field for, or calls otherwise;
    `...` takes a field away."""
    files: Mapping[str, str] = NOTHING
    """Further small files."""
    renames: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    """Patterns and replacements that turn the saved names into the published ones, where saving does not give them back."""
    transposed: tuple[str, ...] = ()
    """Endings of names whose last two dimensions are the other way round in published files; transformers turns them as it loads."""
    absent: str = ""
    """Pattern of saved names that published files have not."""
    also: Mapping[str, str] = NOTHING
    """Further tensors, each of the shape of another."""
    verdict: str = "loads"
    why: str = ""
    """Where the verdict is another than `loads`: the lines of the release that make it so."""
    exception: str = ""
    """Why the verdict is known not to be the right one."""
    without: str = ""
    """Why an architecture does not count."""


def mlx(model: str) -> str:
    return f"mlx-vlm 9b13f52, mlx_vlm/models/{model}/config.py"


CORPUS = "the published config.json in the corpus of real checkpoints: "
SENTENCE = {
    "modules.json": """[
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]""",
    "1_Pooling/config.json": '{"word_embedding_dimension": 768, "pooling_mode_cls_token": false, "pooling_mode_lasttoken": true}',
}
"""The files of an embedding model saved by sentence-transformers (sentence_transformers/SentenceTransformer.py, `_save`)."""
EMBEDDING = Fact("sentence-transformers: models of this class are published as embedding models", files=SENTENCE)
SIGLIP = {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}}


def _kimi_linear(config: JSON) -> JSON:
    full = [i + 1 for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    linear = [i + 1 for i, kind in enumerate(config["layer_types"]) if kind != "full_attention"]
    return {
        "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "use_grouped_topk": True, "rope_theta": 10000.0, "rope_scaling": None,
        "linear_attn_config": {"full_attn_layers": full, "kda_layers": linear, "head_dim": config["linear_head_dim"],
                               "num_heads": config["linear_num_heads"], "short_conv_kernel_size": config["linear_conv_kernel_dim"]},
    }  # fmt: skip


def _mimo(config: JSON) -> JSON:
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "sliding_window_size": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "swa_rope_theta": 10000.0, "rope_theta": 5000000.0, "layernorm_epsilon": 1e-05, "partial_rotary_factor": 0.334,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_shared_experts": None,
    }  # fmt: skip


def _lfm2(config: JSON) -> JSON:
    size = config["hidden_size"]
    return {"block_dim": size, "conv_dim": size, "conv_dim_out": size, "block_ff_dim": config["intermediate_size"],
            "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True}  # fmt: skip


def _dense_first(config: JSON) -> JSON:
    kinds = config["mlp_layer_types"]
    return {
        "first_k_dense_replace": kinds.index("sparse"),
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _lfm2_vl(config: JSON) -> JSON:
    return {"text_config": _lfm2(config["text_config"])}


def _deepseek_v4(config: JSON) -> JSON:
    rates = config["compress_rates"]
    return {
        "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "num_hash_layers": 3,
        "compress_ratios": [rates.get(kind, 0) for kind in config["layer_types"]],
    }  # fmt: skip


def _ernie_vl(config: JSON) -> JSON:
    """Published without a `text_config`: its fields lie at the top, and the layers with experts are a range."""
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    kinds = text["mlp_layer_types"]
    first, last = kinds.index("sparse"), len(kinds) - 1
    return {
        **text, "text_config": ..., "moe_num_experts": [text["moe_num_experts"]] * 2, "moe_layer_start_index": [first] * 2,
        "moe_layer_end_index": [last] * 2, "moe_layer_interval": 1, "moe_use_aux_free": True, "rope_3d": True, "freq_allocation": 20,
        "pixel_hidden_size": 1280, "im_patch_id": 100295, "spatial_conv_size": 2, "temporal_conv_size": 2, "use_temporal_conv": True,
        "vision_config": {"embed_dim": 1280, "mlp_ratio": 4.0},
    }  # fmt: skip


def _pair(match: re.Match[str]) -> str:
    layer, name = 2 * int(match[1]), match[2]
    rest = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(name, "mixer")
    return f"layers.{layer + (name in ('mlp', 'lambda_2'))}.{rest}"


TRANSFORMERS = "transformers 5.24.0, conversion_mapping.py: "
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}

MINIMAX_SPARSE = [0] * 3 + [1] * 57
LACKS = "vLLM reads {} of its config, which no class of transformers has and no public source that was found states"
UNUSED = "clip.py:721 passes over the layers behind the one that `vision_feature_layer` names"

FACTS: dict[str, Fact] = {
    # Embedding models and encoders
    "LlamaModel": EMBEDDING,
    "MistralModel": EMBEDDING,
    "Qwen2Model": EMBEDDING,
    "Gemma2Model": EMBEDDING,
    "BertModel": Fact(verdict="loads_with_loss", why="bert.py:386 drops `pooler.`"),
    "RobertaModel": Fact(
        verdict="loads_with_loss", why="RobertaEmbeddingModel builds a BertModel: bert.py:386 drops `pooler.`"
    ),
    "RobertaForMaskedLM": Fact(verdict="loads_with_loss", why="roberta.py:155 drops `lm_head.`"),
    "XLMRobertaModel": Fact(
        "candle, candle-transformers/src/models/xlm_roberta.rs",
        written={"position_embedding_type": "absolute"},
        verdict="loads_with_loss",
        why="RobertaEmbeddingModel builds a BertModel: bert.py:386 drops `pooler.`",
    ),
    "NomicBertModel": Fact(
        "candle, candle-transformers/src/models/nomic_bert.rs",
        written={
            "activation_function": "swiglu",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_inner": 3072,
            "n_positions": 8192,
            "layer_norm_epsilon": 1e-12,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_base": 1000,
            "rotary_emb_scale_base": None,
            "rotary_emb_interleaved": False,
            "max_trained_positions": 2048,
            "pad_vocab_size_multiple": 64,
        },
    ),
    "GteModel": Fact(
        "text-embeddings-inference, backends/candle/src/models/gte.rs",
        written={
            "position_embedding_type": "rope",
            "pack_qkv": True,
            "layer_norm_type": "layer_norm",
            "rope_theta": 160000.0,
        },
    ),
    "CLIPModel": Fact(verdict="loads_with_loss", why="clip.py:998 ignores `logit_scale`"),
    "SiglipModel": Fact(
        verdict="loads_with_loss",
        why="siglip.py:1154 ignores `logit_scale` and `logit_bias`",
    ),
    # Text
    "Lfm2ForCausalLM": Fact(mlx("lfm2"), written=_lfm2),
    "AfmoeForCausalLM": Fact(
        mlx("afmoe"), written={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    ),
    "DeepseekV2ForCausalLM": Fact(
        mlx("deepseek_v2"),
        config={"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        written={"moe_layer_freq": 1, "scoring_func": "softmax"},
    ),
    "DeepseekV3ForCausalLM": Fact(mlx("deepseek_v3"), written=NOAUX),
    "DeepseekV32ForCausalLM": Fact(mlx("deepseek_v32"), written=NOAUX),
    "GlmMoeDsaForCausalLM": Fact(mlx("glm_moe_dsa"), written=NOAUX),
    "Glm4MoeForCausalLM": Fact(mlx("glm4_moe"), config={"head_dim": 128}, written=NOAUX),
    "Glm4MoeLiteForCausalLM": Fact(mlx("glm4_moe_lite"), written=_dense_first),
    "HYV4ForCausalLM": Fact(
        TRANSFORMERS + "rules that saving turns round for every name, where loading turns few",
        renames=(
            (r"\.hc_pre\.hc_(attn|mlp)_layer\.hc_", r".hc_\1_layer.hc_pre.hc_"),
            (r"\.hc_pre\.hc_head\.", ".hc_head."),
            (r"(mlp\..*|mlp\.)linear_gate", r"\1gate_proj"),
        ),
    ),
    "DoryForCausalLM": Fact(
        "transformers 5.24.0, core_model_loading.py, LayerPairCollapse: published files have two layers for one",
        renames=((r"layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)(?=\.|$)", _pair),),
    ),
    "DeepseekV4ForCausalLM": Fact(
        mlx("deepseek_v4")
        + "; transformers 5.24.0, conversion_mapping.py: the names that it reads start without `model.`",
        written=_deepseek_v4,
        renames=(
            (r"^model\.hc_head\.hc_", "hc_head_"),
            (r"^model\.embed_tokens\.", "embed."),
            (r"^model\.", ""),
            (r"\.attn\.norm\.", ".attn.kv_norm."),
        ),
    ),
    "KimiLinearForCausalLM": Fact(
        mlx("kimi_linear"),
        written=_kimi_linear,
        renames=((r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"),),  # the dense layers keep their own name
    ),
    "MiniMaxM2ForCausalLM": Fact(
        mlx("minimax"),
        written={"rotary_dim": 64, "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "LongcatFlashForCausalLM": Fact(
        mlx("longcat_flash"),
        written={
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "zero_expert_type": "identity",
            "attention_method": "MLA",
        },
        absent=r"experts\.(51[2-9]|5[2-9]\d|[67]\d\d)\.",  # the experts that do nothing have no weights
    ),
    "MiMoV2FlashForCausalLM": Fact(mlx("mimo_v2_flash"), written=_mimo),
    "AXK1ForCausalLM": Fact(
        "transformers 5.24.0, models/axk1/modeling_axk1.py: published files store this norm for dense layers too",
        also={"model.layers.0.post_mlp_layernorm.weight": "model.layers.1.post_mlp_layernorm.weight"},
    ),
    "LagunaForCausalLM": Fact(
        verdict="loads_with_loss",
        why="RoutedExperts.load_weights (fused_moe/routed_experts.py:1004) gets `e_score_correction_bias` and passes over it",
    ),
    "DbrxForCausalLM": Fact(
        "mlx-lm d78bf58, tests/test_models.py",
        verdict="fails",
        why="dbrx.py:406 looks for `experts.w13_weight`, and the parameter is `experts.routed_experts.w13_weight`",
        config={"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000.0}},
    ),
    "NemotronForCausalLM": Fact(mlx("nemotron"), config={"num_key_value_heads": 8}),
    "Lfm2MoeForCausalLM": Fact(
        mlx("lfm2_moe"), config={"layer_types": ["full_attention" if i % 4 == 2 else "conv" for i in range(32)]}
    ),
    "HunYuanDenseV1ForCausalLM": Fact(mlx("hunyuan_v1_dense"), config={"head_dim": 128}),
    "HunYuanMoEV1ForCausalLM": Fact(mlx("hunyuan"), config={"head_dim": 128}),
    # Text with pictures and sound
    "GlmOcrForConditionalGeneration": Fact(mlx("glm_ocr"), config={"text_config": {"intermediate_size": 4608}}),
    "Glm4vForConditionalGeneration": Fact(mlx("glm4v"), config={"text_config": {"attention_bias": True}}),
    "Glm4vMoeForConditionalGeneration": Fact(
        mlx("glm4v_moe"),
        config={"text_config": {"head_dim": 128}},
        written={"text_config": {**NOAUX, "use_qk_norm": False}},
    ),
    "Gemma3ForConditionalGeneration": Fact(CORPUS + "gemma3-27b-medgemma", config=SIGLIP),
    "PaliGemmaForConditionalGeneration": Fact(CORPUS + "paligemma-3b", config=SIGLIP),
    "ColPaliForRetrieval": Fact(
        CORPUS + "paligemma-3b",
        config={"vlm_config": {"model_type": "paligemma", **SIGLIP}},
        verdict="loads_with_loss",
        why="colpali.py:197 makes the projection at its weight: the bias comes before",
    ),
    "LlavaOnevisionForConditionalGeneration": Fact(
        config=SIGLIP,
        verdict="loads_with_loss",
        why="siglip.py:720 drops `post_layernorm`, which no feature layer needs",
    ),
    "LlavaForConditionalGeneration": Fact(verdict="loads_with_loss", why=UNUSED),
    "LlavaNextForConditionalGeneration": Fact(verdict="loads_with_loss", why=UNUSED),
    "LlavaNextVideoForConditionalGeneration": Fact(verdict="loads_with_loss", why=UNUSED),
    "Gemma4ForConditionalGeneration": Fact(
        CORPUS + "gemma4-26b-a4b-w4a16-162shards",
        config={"vision_config": {"model_type": "gemma4_vision"}, "audio_config": None},
    ),
    "Gemma4UnifiedForConditionalGeneration": Fact(
        mlx("gemma4_unified"),
        config={
            "vision_config": {"model_type": "gemma4_unified_vision"},
            "audio_config": {"model_type": "gemma4_unified_audio"},
        },
    ),
    "Lfm2VlForConditionalGeneration": Fact(
        mlx("lfm2_vl"),
        config={"vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False}},
        written=_lfm2_vl,
    ),
    "Qwen3VLMoeForConditionalGeneration": Fact(
        mlx("qwen3_vl_moe"),
        written={"text_config": {"norm_topk_prob": True}},
        transposed=("experts.gate_up_proj", "experts.down_proj"),
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Fact(
        mlx("ernie4_5_moe_vl") + " and ernie4_5_moe_vl.py",
        written=_ernie_vl,
        renames=((r"^model\.vision_model\.", "vision_model."),),
    ),
    "QianfanOCRForConditionalGeneration": Fact(
        mlx("internvl_chat"),
        written={"force_image_size": 448, "select_layer": -1, "ps_version": "v2"},
        renames=(
            (r"^language_model\.model\.encoder\.", "language_model.model."),
        ),  # a rule for the vision tower that saving applies to all
    ),
    "VibeVoiceAsrForConditionalGeneration": Fact(
        TRANSFORMERS + "two rules for one prefix, of which loading needs one",
        renames=((r"^language_model\.model\.model\.", "language_model.model."),),
    ),
    "HunYuanVLForConditionalGeneration": Fact(mlx("hunyuan_vl"), config={"text_config": {"head_dim": 128}}),
    "AriaForConditionalGeneration": Fact(
        verdict="loads_with_loss", why="aria.py:83 drops `vision_tower.post_layernorm`"
    ),
    "Qwen2_5OmniForConditionalGeneration": Fact(
        verdict="loads_with_loss",
        why="qwen2_5_omni_thinker.py:1111 drops `talker.` and `token2wav.`",
    ),
    "Cosmos3EdgeForConditionalGeneration": Fact(
        without="published as the folders of a pipeline (`transformer/`, `vision_encoder/`), where vLLM looks; transformers saves one"
    ),
    "Cohere2VisionForConditionalGeneration": Fact(
        verdict="loads_with_loss", why="siglip.py:720 drops the pooling head, which it does not need"
    ),
    "MiniMaxM3SparseForConditionalGeneration": Fact(
        mlx("minimax_m3_vl"),
        config={
            "text_config": {
                "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
                "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
            }
        },
        written={
            "text_config": {
                "hidden_act": "swigluoai",
                "swiglu_alpha": 1.702,
                "swiglu_beta": 1.0,
                "swiglu_limit": 7.0,
                "moe_layer_freq": MINIMAX_SPARSE,
                "sparse_attention_config": {
                    "use_sparse_attention": True,
                    "sparse_index_dim": 128,
                    "sparse_num_index_heads": 4,
                    "sparse_topk_blocks": 16,
                    "sparse_block_size": 128,
                    "sparse_disable_index_value": MINIMAX_SPARSE,
                    "sparse_score_type": "max",
                    "sparse_init_block": 0,
                    "sparse_local_block": 1,
                    "sparse_attention_freq": MINIMAX_SPARSE,
                },
            },
            "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}},
        },
    ),
    "OlmoHybridForCausalLM": Fact(
        verdict="fails",
        why="olmo_hybrid.py:304 has no rule for `attention_layer_norm`, which transformers saves (it reads `input_layernorm` too)",
    ),
    "ModernVBertModel": Fact(
        verdict="fails",
        why="colmodernvbert.py:359 knows the names behind `model.` alone, and a model without head has no such prefix",
    ),
    "MossTranscribeDiarizeForConditionalGeneration": Fact(
        verdict="fails",
        why="moss_transcribe_diarize.py:586 knows `whisper_encoder` and `vq_adaptor`, and drops what transformers calls otherwise",
    ),
    # Known not to be judged
    "FlintForCausalLM": Fact(
        exception="its layers refuse a machine without FlashInfer, and the pretended one has none",
    ),
    "Molmo2ForConditionalGeneration": Fact(
        exception="molmo2.py:2377 reads `vit_config`, which the class of transformers has not: it needs the config class of the repository",
    ),
    "MiniCPMOcrForConditionalGeneration": Fact(
        exception="`minicpm_ocr` is in no transformers that this release allows (<5.21), and vLLM brings no config class for it",
    ),
    "Dots3NoteForCausalLM": Fact(
        exception="`dots3_note_text` is in no transformers that this release allows (<5.21); vLLM's own class is for `dots3_note`",
    ),
    "JambaForSequenceClassification": Fact(
        verdict="loads_with_loss",
        why="jamba.py:424 builds a head that a classifier's checkpoint has not",
    ),
    "DiffusionGemmaForBlockDiffusion": Fact(
        mlx("diffusion_gemma"),
        config={
            "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
            "vision_config": {"model_type": "gemma4_vision"},
        },
        verdict="loads_with_loss",
        why="diffusion_gemma.py:158 maps `layer_scalar` of encoder and decoder to one buffer, which holds the one that comes last",
    ),
    "Qwen3OmniMoeForConditionalGeneration": Fact(
        mlx("qwen3_omni_moe"), config={"talker_config": {"text_config": {"shared_expert_intermediate_size": 768}}}
    ),
    # What vLLM reads of their configs is in no class of transformers and in no public source that was found
    "NemotronH_Omni_Reasoning_V3": Fact(without=LACKS.format("`patch_size`")),
    "InklingForCausalLM": Fact(without=LACKS.format("`padded_vocab_size`")),
    "MuseSparkForConditionalGeneration": Fact(without=LACKS.format("`num_shared_experts`")),
    "Glm5NextForConditionalGeneration": Fact(without=LACKS.format("`mhc`")),
    "HYV3ForCausalLM": Fact(without=LACKS.format("`expert_hidden_dim`")),
    "CohereAsrForConditionalGeneration": Fact(without=LACKS.format("`transf_decoder`")),
    "Step3p7ForConditionalGeneration": Fact(without=LACKS.format("`output_dim`")),
    "ColModernVBertForRetrieval": Fact(without=LACKS.format("`text_config`")),
    "InklingForConditionalGeneration": Fact(
        without=LACKS.format("the fields of an enabled audio tower (`decoder_dmodel`, `audio_mode`)")
    ),
    "VoxtralForConditionalGeneration": Fact(
        without="vLLM reads the mistral format of it (`params.json` and its names), which transformers does not save"
    ),
    "MuseGlimmerAssistantModel": Fact(without="a draft model: it is loaded beside the model that it drafts for"),
}

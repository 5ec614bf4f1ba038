"""Adapters, each laid on its base."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

from ckaudit.adapters.base import Base
from ckaudit.findings import Report
from tests.adapter_toys import CONFIG, adapter, attention, base, lora, peft, repo, report, vllm, weights
from tests.known_faults.cases import ERROR, WARN, Fault, Kind

UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
RULES = (
    ("prefix", "model.visual.", "visual."),
    ("prefix", "lm_head.", "language_model.lm_head."),
    ("prefix", "model.language_model.", "language_model.model."),
)


def into(names: list[str], old: str = "", new: str = "") -> dict[str, tuple[str, str | None]]:
    """Stored name -> vLLM's parameter and shard: query, key and value in one."""
    return {n: (n.replace(old, new, 1).replace(p := n.split(".")[-2], "qkv_proj"), SHARDS[p]) for n in names}


def wrapped(prefix: str) -> Report:
    """A text adapter whose names begin with `prefix`, on a vision-language model with the rules that it had."""
    stored = weights(*attention("model.language_model.", parts="qkv"))
    on = base(stored)
    return report(
        adapter(lora(attention(prefix))),
        on,
        vllm(on, into(stored, "model.language_model.", "language_model.model."), RULES),
    )


def text_class() -> Report:
    stored = weights(*attention("language_model.model.", parts="qkv"))
    on = base(stored)
    return report(adapter(lora(attention())), on, vllm(on, into(stored), release="0.15.1"))


def fused_experts() -> Report:
    paths = [f"model.layers.{i}.mlp.experts{tail}" for i in range(2) for tail in ("", ".base_layer")]
    return report(
        adapter(
            lora(paths, 16),
            CONFIG | {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        )
    )


def in_part() -> Report:
    language, vision = attention("model.language_model."), ["model.vision_model.transformer.layers.0.self_attn.q_proj"]
    on = base(weights(*language, *vision))
    return report(adapter(lora([*language, "vision_model.transformer.layers.0.self_attn.q_proj"])), on, peft(on))


def other_component() -> Report:
    names = [f"{UNET}.to_{p}.weight" for p in ("q", "k", "v")]
    return report(
        adapter(lora([f"unet.{UNET}.to_q"], root=""), None), Base(repo({}, {}), {"transformer": base(names).checkpoint})
    )


def shards() -> Report:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    return report(
        adapter(
            lora(attention()[1:]) | {f"{name}.lora_A.weight": ("F32", [0]), f"{name}.lora_B.weight": ("F32", [32768])}
        )
    )


def shared_expert() -> Report:
    """PEFT 0.21 takes every target called `down_proj` for one of the routed experts, which this model type keeps fused."""
    shared = "model.layers.0.mlp.shared_experts.down_proj"
    experts = "model.layers.0.mlp.experts"
    on = base(
        {f"{shared}.weight": [8, 8], f"{experts}.gate_up_proj": [4, 8, 8], f"{experts}.down_proj": [4, 8, 8]},
        {"model_type": "deepseek_v3"},
    )
    return report(adapter(lora([shared]), CONFIG | {"target_modules": [shared]}), on, peft(on))


FAULTS = (
    Fault(Kind.ADAPTER, ("vllm-project/vllm/issues/34186", "vllm-project/vllm/pull/34803"),
          "Only the last segment of a name is looked at, so an adapter of the text class binds to nothing in the multimodal one, in silence.",
          text_class, (("CK901", ERROR, "checkpoint", 8),)),
    Fault(Kind.ADAPTER, ("vllm-project/vllm/issues/48019", "vllm-project/vllm/pull/39369", "vllm-project/vllm/pull/48022", "vllm-project/vllm/pull/48149", "vllm-project/vllm/pull/39278"),
          "A text adapter for a wrapped language model is accepted, and none of its modules is active.",
          lambda: wrapped("model."), (("CK901", ERROR, "checkpoint", 8),)),
    Fault(Kind.ADAPTER, ("vllm-project/vllm/pull/48022",),
          "The same adapter under the names of the wrapped model: it binds.",
          lambda: wrapped("model.language_model.")),
    Fault(Kind.ADAPTER, ("vllm-project/vllm/pull/41384", "sgl-project/sglang/pull/27381", "sgl-project/sglang/pull/25528", "vllm-project/vllm/pull/52194"),
          "Adapters on fused experts use keys that engines drop.",
          fused_experts, (("CK904", WARN, "checkpoint", 8),)),
    Fault(Kind.ADAPTER, ("huggingface/peft/issues/2566", "huggingface/peft/issues/2699"),
          "Some names are those of another class of the model, and a warning is all there is.",
          in_part, (("CK902", ERROR, "checkpoint", 2),)),
    Fault(Kind.ADAPTER, ("huggingface/diffusers/pull/10187", "huggingface/diffusers/issues/11675"),
          "The prefix is that of a component which the pipeline does not have.",
          other_component, (("CK901", ERROR, "checkpoint", 2),)),
    Fault(Kind.ADAPTER, ("huggingface/diffusers/pull/5991",),
          "The prefix of the component stands twice.",
          lambda: report(adapter(lora([f"unet.unet.{UNET}.to_k"], root="", a="lora.down.weight", b="lora.up.weight"), None)),
          (("CK906", ERROR, "checkpoint", 2),)),
    Fault(Kind.ADAPTER, ("huggingface/peft/issues/3711",),
          "A target on the shared expert is rewritten as if it were a routed one, and its factors are passed over.",
          shared_expert, (("CK909", ERROR, "engine", 2),)),
    Fault(Kind.ADAPTER, ("huggingface/peft/pull/3251",),
          "A sharded trainer saved empty and flat shards of the factors.",
          shards, (("CK903", ERROR, "checkpoint", 2),)),
)  # fmt: skip

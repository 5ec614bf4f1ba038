"""Experts and draft layers."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

import re

import msgspec

from ckaudit.mapper import Rule
from ckaudit.plan import Collision
from tests.known_faults.cases import (
    ERROR,
    LLAMA,
    WARN,
    Case,
    Fault,
    Kind,
    declared,
    layers,
    made,
    plain,
    quantised,
    ruled,
)

ONE_BY_ONE = layers("model.layers.{i}.mlp.experts.{e}.{p}_proj.weight", e="0123", p=("gate", "up", "down"))
FUSED = layers("model.layers.{i}.mlp.experts.{p}", p=("gate_up_proj", "down_proj"))
ATTENTION = "model.layers.{i}.self_attn.o_proj"


def scale_caught() -> Case:
    """A pattern for the experts' weights that has no end takes their scales too and stacks both into the weight."""
    weights = layers("model.layers.{i}.mlp.experts.{e}.down_proj.weight", e="0123")
    scales = [f"{n}_scale_inv" for n in weights]
    fused = layers("model.layers.{i}.mlp.experts.down_proj")
    source, base = ruled(
        {**{n: ("F8_E4M3", [4, 4]) for n in weights}, **dict.fromkeys(scales, ("F32", [1, 1]))},
        [Rule("regex", r"experts\.\d+\.down_proj\.weight.*", "experts.down_proj")],
        [*fused, *(f"{n}_scale_inv" for n in fused)],
        config=declared("fp8 block"),
    )
    lost = tuple(Collision(fused[i], weights[4 * i], tuple(scales[4 * i : 4 * i + 4])) for i in range(3))
    names = tuple(msgspec.structs.replace(n, fate="dropped") if n.name in scales else n for n in base.names)
    return source, msgspec.structs.replace(base, names=names, collisions=lost)


FAULTS = (
    Fault(Kind.EXPERTS, ("vllm-project/vllm/pull/42577", "vllm-project/vllm/pull/36997"),
          "Experts are saved fused, and the engine knows them one by one.",
          lambda: made(FUSED, ONE_BY_ONE), (("CK220", ERROR, "engine", 6),)),
    Fault(Kind.EXPERTS, ("vllm-project/llm-compressor/issues/3037",),
          "Experts are fused in the layers and one by one in the draft block of the same repository: each module has its own layout.",
          lambda: made([*FUSED, *layers("mtp.layers.0.mlp.experts.{e}.{p}_proj.weight", 1, e="0123", p=("gate", "up", "down"))])),
    Fault(Kind.EXPERTS, ("vllm-project/vllm/issues/54047", "vllm-project/vllm/pull/54052"),
          "The engine moved its experts one level down, and one branch still looks for the old path.",
          lambda: made(layers("layers.{i}.block_sparse_moe.experts.{e}.w2.weight", e="0123"), layers("layers.{i}.block_sparse_moe.experts.routed_experts.w2_weight"),
                       lambda n: re.sub(r"[0-9]\.w2\.weight", "w2_weight", n)),
          (("CK220", ERROR, "engine", 12),)),
    Fault(Kind.EXPERTS, ("vllm-project/llm-compressor/issues/2060",),
          "A generated ignore list holds every routed expert: little is quantised, and the engine trips over them.",
          lambda: made(quantised(ATTENTION, "nvfp4") | {n: ("BF16", [64, 64]) for n in layers("model.layers.{i}.feed_forward.experts.{e}.{p}.weight", e="0123", p=("w1", "w2", "w3"))},
                       config=declared("nvfp4", ignore=["re:.*experts.*"])),
          (("CK306", "note", "undecidable", 3), ("CK308", WARN, "config", 36))),
    Fault(Kind.EXPERTS, ("huggingface/transformers/issues/47031", "unslothai/unsloth-zoo/issues/849"),
          "Which way experts lie is guessed from their shape, and a square one fits either way.",
          lambda: made({n: ("BF16", [4, 8, 8]) for n in layers("model.layers.{i}.mlp.experts.gate_up_proj")}),
          (("CK306", WARN, "undecidable", 3),)),
    Fault(Kind.EXPERTS, ("NVIDIA-NeMo/Megatron-Bridge/pull/4706",),
          "The converter asks for experts one by one and skips what it does not find: with fused experts all of them stay random.",
          lambda: made([*LLAMA, *FUSED], [*LLAMA, *ONE_BY_ONE]), (("CK220", ERROR, "engine", 6),)),
    Fault(Kind.EXPERTS, ("huggingface/transformers/pull/45782",),
          "A rule for `experts.` catches `shared_experts.` too, and the save cuts a matrix into its rows.",
          lambda: made(layers("model.layers.{i}.mlp.shared_experts.{r}.w2.weight.weight", r="012")),
          (("CK213", WARN, "checkpoint", 9),)),
    Fault(Kind.EXPERTS, ("huggingface/transformers/pull/45930",),
          "A pattern for the experts' weights without an end catches their scales.",
          scale_caught, (("CK207", ERROR, "engine", 15),)),
    Fault(Kind.EXPERTS, ("vllm-project/vllm/issues/40358", "vllm-project/vllm/issues/28274"),
          "The method of quantisation builds experts without the bias that the engine's own rule maps to them.",
          lambda: ruled([*FUSED, *layers("model.layers.{i}.mlp.experts.gate_up_proj_bias")],
                        [Rule("substring", ".experts.gate_up_proj", ".experts.w13_weight"), Rule("substring", ".w13_weight_bias", ".w13_bias"), Rule("substring", ".experts.down_proj", ".experts.w2_weight")],
                        layers("model.layers.{i}.mlp.experts.{p}", p=("w13_weight", "w2_weight"))),
          (("CK203", ERROR, "engine", 3),)),
    # draft layers
    Fault(Kind.DRAFT, ("vllm-project/vllm/pull/44943",),
          "The experts of the draft block are stored under names from inside an engine.",
          lambda: made([*plain(ATTENTION), *layers("mtp.layers.0.mlp.experts.{p}_weight", 1, p=("w13", "w2"))],
                       [*plain(ATTENTION), *layers("mtp.layers.0.mlp.experts.{e}.{p}_proj.weight", 1, e="0123", p=("gate", "up", "down"))]),
          (("CK220", ERROR, "checkpoint", 2),)),
)  # fmt: skip

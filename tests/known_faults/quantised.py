"""Quantised checkpoints: companions, and ignore lists."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

from ckaudit.mapper import Rule
from tests.known_faults.cases import (
    DOWN,
    ERROR,
    NOTE,
    UP,
    WARN,
    Fault,
    Kind,
    Q,
    declared,
    in_part,
    layers,
    made,
    plain,
    quantised,
    ruled,
)

FC1 = "vision_tower.encoder.layers.{i}.mlp.fc1"
VISION_QKV = "model.vision_tower.encoder.layers.{i}.self_attn.{p}_proj"
MTP = {
    f"mtp.layers.0.{p}_proj.weight": ("BF16", [4, 4])
    for p in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
}


def built(module: str) -> list[str]:
    """A module as an engine builds it for packed weights."""
    return layers(f"{module}.{{leaf}}", leaf=("weight_packed", "weight_scale", "weight_shape"))


def fused(name: str) -> str:
    """Query, key and value in one, gate and up in one, as engines build them."""
    for part, whole in (
        ("q_proj", "qkv_proj"),
        ("k_proj", "qkv_proj"),
        ("v_proj", "qkv_proj"),
        ("gate_proj", "gate_up_proj"),
        ("up_proj", "gate_up_proj"),
    ):
        name = name.replace(f".{part}.", f".{whole}.")
    return name


COMPANIONS = (
    Fault(
        Kind.COMPANIONS,
        ("vllm-project/vllm/issues/11010", "unslothai/unsloth/issues/1380", "vllm-project/vllm/issues/10710"),
        "Pre-quantised bitsandbytes weights meet a loader without that path: their states have no place.",
        lambda: made(quantised(DOWN, "bnb 4-bit"), plain(DOWN), config=declared("bnb 4-bit")),
        (("CK305", ERROR, "engine", 15),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("vllm-project/vllm/issues/1100",),
        "The group index of GPTQ has no parameter in the loader; a bias of the model's own beside it is no fault.",
        lambda: made(
            quantised(Q, "gptq") | dict.fromkeys(layers(f"{Q}.bias"), ("F16", [4])),
            [*quantised(Q, "gptq", "g_idx"), *layers(f"{Q}.bias")],
            config=declared("gptq"),
        ),
        (("CK305", ERROR, "engine", 3),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("ggml-org/llama.cpp/issues/5139",),
        "A bias of the model's own beside GPTQ weights: nothing to report.",
        lambda: made(quantised(Q, "gptq") | dict.fromkeys(layers(f"{Q}.bias"), ("F16", [4])), config=declared("gptq")),
    ),
    Fault(
        Kind.COMPANIONS,
        ("sgl-project/sglang/pull/1559", "vllm-project/vllm/pull/9174"),
        "Scales of the KV cache under a name that the engine does not read: the cache falls back to 1.0.",
        lambda: made(
            quantised(Q, "fp8 tensor")
            | dict.fromkeys(
                layers("model.layers.{i}.self_attn.{s}", s=("kv_scale", "k_scale", "v_scale")), ("F32", [1])
            ),
            list(quantised(Q, "fp8 tensor")),
            config=declared("fp8 tensor"),
        ),
        (("CK305", WARN, "checkpoint", 9),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("vllm-project/vllm/issues/43967",),
        "Gate and up are joined into a layer that is built without the group index of its parts.",
        lambda: made(
            quantised(UP, "gptq"), [fused(n) for n in quantised(UP, "gptq", "g_idx")], fused, config=declared("gptq")
        ),
        (("CK305", ERROR, "engine", 3),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("ggml-org/llama.cpp/issues/11122",),
        "BitNet's packed bytes are taken for plain weights, and their scale has no place.",
        lambda: made(quantised(DOWN, "bitnet"), plain(DOWN), config=declared("bitnet")),
        (("CK305", ERROR, "engine", 3),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("vllm-project/llm-compressor/issues/959",),
        "The engine resolves a quantised layer as unquantised, so its channel scale has no parameter: an entry of the ignore list is too wide.",
        lambda: made(
            {
                **plain(Q),
                **{n: ("I8", [4, 4]) for n in plain(DOWN)},
                **dict.fromkeys(layers(f"{DOWN}.weight_scale"), ("F32", [4, 1])),
            },
            plain(Q, DOWN),
            config=declared("packed", ignore=["re:.*down_proj"]),
        ),
        (("CK305", ERROR, "config", 3),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("sgl-project/sglang/issues/5095",),
        "The scheme stands in hf_quant_config.json alone, which the loader did not read.",
        lambda: made(quantised(Q, "fp8 tensor"), files={"hf_quant_config.json": b"{}"}),
        (("CK305", ERROR, "config", 9),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("ggml-org/llama.cpp/issues/9252",),
        "quanto's names on the head, and a config that declares no quantisation.",
        lambda: made(
            {
                "lm_head.weight._data": ("I8", [4, 4]),
                "lm_head.weight._scale": ("F32", [4, 1]),
                "lm_head.input_scale": ("F32", []),
                "lm_head.output_scale": ("F32", []),
            }
        ),
        (("CK305", ERROR, "config", 4),),
    ),
    Fault(
        Kind.COMPANIONS,
        ("modular/modular/issues/6600",),
        "NVFP4's global scale is a divisor in one format and a factor in the other: the names say which was meant, only values prove it.",
        lambda: made(quantised(Q, "nvfp4"), config=declared("nvfp4")),
        (("CK306", NOTE, "undecidable", 3),),
    ),
)

IGNORE_LISTS = (
    Fault(Kind.IGNORE_LIST, ("vllm-project/vllm/pull/20046", "vllm-project/llm-compressor/issues/1546"),
          "The ignore list has the names of another release, so the vision tower is built quantised and its plain weights have no place.",
          lambda: made(quantised(Q, "packed") | plain("visual.blocks.{i}.attn.qkv"), [*quantised(Q, "packed"), *built("visual.blocks.{i}.attn.qkv")],
                       config=declared("packed", ignore=layers("model.visual.blocks.{i}.attn.qkv"))),
          (("CK307", ERROR, "config", 3),)),
    Fault(Kind.IGNORE_LIST, ("vllm-project/vllm/pull/51910",),
          "A rule that ends in a dot renames the weight and not the entry of the ignore list, which has no dot after it.",
          lambda: ruled(quantised(Q, "packed") | plain(FC1), [Rule("substring", ".mlp.fc1.", ".fc1.")],
                        [*quantised(Q, "packed"), *built("vision_tower.encoder.layers.{i}.fc1")], config=declared("packed", ignore=layers(FC1))),
          (("CK307", ERROR, "engine", 3),)),
    Fault(Kind.IGNORE_LIST, ("sgl-project/sglang/pull/24929", "sgl-project/sglang/pull/35792"),
          "Entries end in a wrapper's `.linear`, which the modules of the engine do not.",
          lambda: made(quantised(Q, "packed") | plain(*(VISION_QKV.replace("{p}", p) for p in "qkv")),
                       config=declared("packed", ignore=layers(f"{VISION_QKV}.linear", p="qkv"))),
          (("CK307", WARN, "config", 9),)),
    Fault(Kind.IGNORE_LIST, ("vllm-project/vllm/pull/11354",),
          "A module that is fused on disk and in the ignore list: right as it is.",
          lambda: made(quantised(DOWN, "packed") | plain("model.layers.{i}.self_attn.qkv_proj"), [*quantised(DOWN, "packed"), *plain("model.layers.{i}.self_attn.qkv_proj")],
                       config=declared("packed", ignore=layers("model.layers.{i}.self_attn.qkv_proj")))),
    Fault(Kind.IGNORE_LIST, ("sgl-project/sglang/issues/37848",),
          "A head that is created without its name is quantised although the ignore list exempts it.",
          lambda: made(quantised(Q, "packed") | plain("lm_head"), [*quantised(Q, "packed"), "lm_head.weight_packed", "lm_head.weight_scale"],
                       config=declared("packed", ignore=["lm_head"])),
          (("CK307", ERROR, "engine", 1),)),
    Fault(Kind.IGNORE_LIST, ("RobTand/gridbook/pull/3", "vllm-project/vllm/pull/49483"),
          "An entry for the router `gate` must not be read as one for `gate_proj`.",
          lambda: made(quantised("model.layers.{i}.mlp.gate_proj", "packed") | plain("model.layers.{i}.mlp.gate"),
                       [*quantised("model.layers.{i}.mlp.gate_proj", "packed"), *plain("model.layers.{i}.mlp.gate")],
                       config=declared("packed", ignore=layers("model.layers.{i}.mlp.gate")))),
    Fault(Kind.DRAFT, ("sgl-project/sglang/issues/35797",),
          "Draft layers are exempt one by one, fused by the engine under names that the list does not have, and built quantised.",
          lambda: made(quantised(Q, "packed") | MTP, [*quantised(Q, "packed"), *(f"mtp.layers.0.{m}.{leaf}" for m in ("self_attn.qkv_proj", "mlp.gate_up_proj")
                                                                               for leaf in ("weight_packed", "weight_scale", "weight_shape"))],
                       lambda n: fused(n) if n.startswith("mtp") else n, config=declared("packed", ignore=[n.removesuffix(".weight") for n in MTP])),
          (("CK307", ERROR, "engine", 5),)),
    Fault(Kind.SILENT, ("vllm-project/vllm/issues/39764",),
          "A projection that is fused on disk has one global scale for a parameter with three places: two stay as they were.",
          lambda: in_part(made(quantised("model.layers.{i}.self_attn.qkv_proj", "nvfp4"), quantised("model.layers.{i}.self_attn.qkv_proj", "nvfp4"),
                               config=declared("nvfp4")), "weight_global_scale", (3,), 1 / 3),
          (("CK205", ERROR, "checkpoint", 3), ("CK306", NOTE, "undecidable", 3))),
)  # fmt: skip

FAULTS = (*COMPANIONS, *IGNORE_LISTS)

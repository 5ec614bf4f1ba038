"""Names of adapter tensors, in every dialect that is in use, as (path of the module they adapt, what they are to it). Pure.

Facts: PEFT 0.21 `get_peft_model_state_dict`; diffusers `loaders/lora_pipeline.py` and `lora_conversion_utils.py`; kohya-ss
`networks/lora.py`; LyCORIS; the XLabs Flux trainer.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Role = Literal["A", "B", "bias", "magnitude", "alpha", "mid", "full", "tokens", "shared", "other"]
"""A and B are the two factors; `full` replaces a whole tensor (`modules_to_save`, biases), `tokens` some rows of one; `shared` is of no
module but of all (VeRA's projections); `other` belongs to another method than LoRA."""

Dialect = Literal["peft", "kohya", "diffusers", "xlabs"]

ROOT = "base_model.model."
"""What PEFT puts before the path of every module."""

COMPONENTS = (
    "unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "prior", "controlnet",
)  # fmt: skip
"""Parts of a diffusers pipeline that adapters name first."""

FUSED = re.compile(r"(.*\.)?experts(\.base_layer)?")
"""Modules under which PEFT saves adapters of fused experts (`target_parameters`): the inner one is `base_layer`."""

_KOHYA = {
    "lora_unet_": "unet", "lora_transformer_": "transformer", "lora_te_": "text_encoder", "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2", "lora_te3_": "text_encoder_3", "lycoris_": "unet",
}  # fmt: skip


class Part(msgspec.Struct, frozen=True, gc=False):
    """One tensor of an adapter."""

    name: str
    module: str
    """Path of the module, without root, component and adapter label; kohya's has `_` where others have `.` (`flat`)."""
    role: Role
    leaf: str
    """What follows the module in the name, the adapter's label taken out: `lora_A.weight`."""
    dialect: Dialect | None
    """None where the name itself fits several dialects, or none."""
    component: str = ""
    rooted: bool = False
    """Whether the name begins as PEFT writes it."""
    flat: bool = False
    doubled: str = ""
    """The prefix that stands there twice, `unet.`."""


_FACTOR: dict[str, Role] = {"A": "A", "B": "B", "down": "A", "up": "B", "E": "other"}
_LABEL = r"(?:\.(?!weight$|bias$)[^.]+)?"

_METHODS = (
    "hada|lokr|oft|boft|vera|ia3|hra|vblora|randlora|c3a|shira|fourierft|bone|miss|adamss|beft|deft|delora|frod|glora|gralora|hira|lily|"
    "ln_tuning|osf|peanut|psoft|pvera|road|supertuning|tinylora|unilora|waveft"
)
"""What the tensors of methods other than LoRA begin with (PEFT 0.21.2, `mapping.py`), those apart that adapt no module."""

# Tail of a name -> role; a group `f` names the factor. The first that matches is taken.
_WRITTEN: tuple[tuple[str, Role | None, Dialect | None], ...] = (
    (rf"\.(?P<leaf>lora_(?P<f>[AB])){_LABEL}\.weight$", None, None),
    (rf"\.(?P<leaf>lora_[AB]){_LABEL}\.bias$", "bias", None),
    (rf"\.(?P<leaf>lora_embedding_(?P<f>[AB])){_LABEL}$", None, "peft"),
    (rf"\.(?P<leaf>lora_magnitude_vector){_LABEL}(\.weight)?$", "magnitude", None),
    (r"\.(?P<leaf>dora_scale)$", "magnitude", None),
    (rf"\.(?P<leaf>lora_(?P<f>[ABE])){_LABEL}$", None, "peft"),
    (r"\.(?P<leaf>lora_linear_layer\.(?P<f>down|up)\.weight)$", None, "diffusers"),
    (r"\.(?P<leaf>lora\.(?P<f>down|up)\.weight)$", None, "diffusers"),
    (r"\.(?P<leaf>lora_(?P<f>down|up)(\.weight)?)$", None, None),
    (r"\.(?P<leaf>lora_mid\.weight)$", "mid", None),
    (r"\.(?P<leaf>alpha)$", "alpha", None),
    (r"\.(?P<leaf>(token_adapter\.)?trainable_tokens_delta)$", "tokens", "peft"),
    (rf"\.(?P<leaf>({_METHODS})_\w+)(\..*)?$", "other", None),
    (r"\.(?P<leaf>(oft|boft|on_input|scale))$", "other", None),
    (r"\.(?P<leaf>diff|diff_b)$", "full", None),
)  # fmt: skip
_TAILS = tuple((re.compile(pattern), role, dialect) for pattern, role, dialect in _WRITTEN)
_PROCESSOR = re.compile(r"\.processor\.(?P<layer>[a-z_]+?)_lora(?P<number>[0-9]*)\.(?P<f>down|up)\.weight$")
_JOINED = re.compile(r"(?P<layer>\.[a-z_]+)_lora\.(?P<f>down|up)\.weight$")
_SHARED = re.compile(rf"base_model\.(?P<leaf>({_METHODS})_\w+)(\..*)?")
_FULL = re.compile(rf"\.(?P<leaf>(?:base_layer\.|modules_to_save{_LABEL}\.)?(?:weight|bias))$")


def read(name: str) -> Part | None:
    """`name` as a part of an adapter; None for a name that no dialect would write."""
    if match := _SHARED.fullmatch(name):
        return Part(name, "", "shared", match["leaf"], "peft", rooted=True)
    rooted = name.startswith(ROOT)
    path = name.removeprefix(ROOT)
    twice = ROOT if rooted and path.startswith(ROOT) else ""
    path = path.removeprefix(twice)
    for prefix, component in _KOHYA.items():
        if path.startswith(prefix) and not rooted:
            tail = _tail(path)
            if tail is not None and "." not in tail[0]:
                return Part(name, tail[0].removeprefix(prefix), tail[1], tail[2], "kohya", component, flat=True)
    component = "" if rooted else next((c for c in COMPONENTS if path.startswith(f"{c}.")), "")
    if component:
        path = path.removeprefix(f"{component}.")
        twice = f"{component}." if path.startswith(f"{component}.") else ""
        path = path.removeprefix(twice)
    tail = _tail(path)
    if tail is None:
        if not rooted or (match := _FULL.search(path)) is None:
            return None
        return Part(name, path[: match.start()], "full", match["leaf"], "peft", rooted=True, doubled=twice)
    module, role, leaf, dialect = tail
    dialect = "peft" if rooted else dialect or ("diffusers" if component else None)
    return Part(name, module, role, leaf, dialect, component, rooted, doubled=twice)


def _tail(path: str) -> tuple[str, Role, str, Dialect | None] | None:
    if match := _PROCESSOR.search(path):
        layer, role = match["layer"], _FACTOR[match["f"]]
        leaf = f"{layer}_lora{match['number']}.{match['f']}.weight"
        if layer.startswith("to_"):  # diffusers before 0.20: the factors sat on the attention's processor
            module = f"{path[: match.start()]}.{'to_out.0' if layer == 'to_out' else layer}"
            return module, role, leaf, "diffusers"
        return f"{path[: match.start()]}.processor.{layer}{match['number']}", role, leaf, "xlabs"
    for pattern, fixed, dialect in _TAILS:
        match = pattern.search(path)
        if match is not None:
            role = fixed or _FACTOR[match["f"]]
            return path[: match.start()], role, match["leaf"], dialect
    if match := _JOINED.search(path):
        module = path[: match.start()] + (".to_out.0" if match["layer"] == ".to_out" else match["layer"])
        return module, _FACTOR[match["f"]], path[match.start() + 1 :], "diffusers"
    return None

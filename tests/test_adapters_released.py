"""How vLLM reads an adapter's names is held to the released functions."""

from __future__ import annotations

import ast
import math
import re
import typing
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from ckaudit.adapters import vllm
from ckaudit.mapper import Mapper, Rule
from ckaudit.plan import Plan
from tests import released

RULES = Mapper(
    [
        Rule("substring", "attn.", "self_attn."), Rule("prefix", "model.visual.", "visual."),
        Rule("prefix", "model.language_model.", "language_model.model."), Rule("suffix", ".out", ".o"),
    ]
)  # fmt: skip
ROOTS = ("base_model.model.", "", "base_model.model.base_model.model.")
PATHS = (
    "model.layers.0.attn.q_proj",
    "model.language_model.layers.0.mlp.up_proj",
    "model.visual.blocks.0.qkv",
    "lm_head",
    "x",
)
TAILS = (
    ".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_A.default.weight", ".lora_magnitude_vector", ".weight", ".lora_A.bias",
    ".lora_B",
)  # fmt: skip


class Renames:
    """The mapper's own rules are held to the releases in `test_mapper_released`."""

    def _map_name(self, name: str) -> str | None:
        return RULES.map(name).name


@pytest.mark.wheel
@pytest.mark.parametrize("release", ["0.24.0", "0.29.0", "0.33.0"])
def test_names_are_read_alike(release: str) -> None:
    try:
        module = released.classes(release, "vllm/lora/utils.py", ["parse_fine_tuned_lora_name"])
    except FileNotFoundError:
        pytest.skip(f"{released.CACHE / release} was kept by an earlier test, without this file: remove it")
    scope: dict[str, Any] = {}
    lines = "from __future__ import annotations\n" + ast.unparse(module)
    exec(lines, scope)
    for name in map("".join, product(ROOTS, PATHS, TAILS)):
        try:
            wanted = scope["parse_fine_tuned_lora_name"](name, Renames())[0]
        except ValueError:
            wanted = None
        found, _, complaint = vllm.path(name, RULES)
        assert (None if complaint else found) == wanted, name


PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
CONFIGS: tuple[dict[str, Any], ...] = (
    PLAIN, {"lora_alpha": 8}, PLAIN | {"r": 0}, PLAIN | {"use_dora": True}, PLAIN | {"modules_to_save": ["lm_head"]},
    PLAIN | {"modules_to_save": ["score"]}, PLAIN | {"modules_to_save": []}, PLAIN | {"bias": "all"}, PLAIN | {"lora_bias": True},
    PLAIN | {"init_lora_weights": "pissa"}, PLAIN | {"init_lora_weights": "gaussian"}, PLAIN | {"init_lora_weights": False},
    PLAIN | {"init_lora_weights": "loftq"}, PLAIN | {"alora_invocation_tokens": [1]}, PLAIN | {"alora_invocation_tokens": None},
    PLAIN | {"layer_replication": [[0, 2]]}, PLAIN | {"use_bdlora": {"nblocks": 2}}, PLAIN | {"use_qalora": True},
    PLAIN | {"rank_pattern": {"q_proj": 2}},
)  # fmt: skip


@pytest.mark.wheel
@pytest.mark.parametrize("release", ["0.24.0", "0.29.0", "0.33.0"])
def test_settings_are_refused_alike(release: str) -> None:
    try:
        module = released.classes(release, "vllm/lora/peft_helper.py", ["PEFTHelper"])
    except FileNotFoundError:
        pytest.skip(f"{released.CACHE / release} was kept by an earlier test, without this file: remove it")
    scope: dict[str, Any] = {
        "dataclass": dataclass, "field": field, "fields": fields, "MISSING": MISSING, "math": math, "re": re, "Literal": typing.Literal,
        "logger": SimpleNamespace(info_once=print), "LoRAConfig": None, "TensorizerConfig": None,
    }  # fmt: skip
    exec("from __future__ import annotations\n" + ast.unparse(module), scope)
    plan = Plan(id="vllm", engine="vllm", release=release, method="replay")
    for config in CONFIGS:
        try:
            scope["PEFTHelper"].from_dict(config).validate_legal(SimpleNamespace(max_lora_rank=16, bias_enabled=False))
            raises = False
        except (ValueError, ZeroDivisionError):
            raises = True
        # A bias of the factors has names of its own, which releases that do not look at the setting refuse in the weights.
        assert bool(vllm.refused(config, plan)) == raises, config

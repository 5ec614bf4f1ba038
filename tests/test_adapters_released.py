"""How vLLM reads an adapter's names is held to the released functions."""

from __future__ import annotations

import ast
from itertools import product
from typing import Any

import pytest

from ckaudit.adapters import vllm
from ckaudit.mapper import Mapper, Rule
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

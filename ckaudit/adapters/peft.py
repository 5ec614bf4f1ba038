"""What PEFT does with an adapter whose base transformers builds. Pure.

Facts, each run against the released code in the tests: PEFT 0.21.2 (`tuners/tuners_utils.py`, `utils/save_and_load.py`,
`utils/transformers_weight_conversion.py`) on transformers 5.24.0. A tensor is put into a module only where the module's full path is that
of the name and `target_modules` names it; what is left is passed over, and modules that are not served keep factors that change nothing.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from ckaudit.adapters import Adapter, Unit
from ckaudit.adapters.base import Base
from ckaudit.adapters.dialects import FUSED, ROOT
from ckaudit.adapters.outcome import Outcome
from ckaudit.adapters.surface import Surface
from ckaudit.errors import RuleError
from ckaudit.mapper import Kind, Mapper, Rule
from ckaudit.patterns import compiles, tame
from ckaudit.plan import Plan, RuleHit

TAKEN: dict[str, dict[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj",
    },
}  # fmt: skip
"""Of models whose experts transformers 5 builds fused: which targets PEFT turns into parameters of the experts."""

_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), "mixtral"),
    **dict.fromkeys(
        (
            "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
            "glm4v_moe", "longcat_flash", "solar_open", "mellum", "qwen3_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker",
            "qwen3_omni_moe_text", "qwen3_next", "hunyuan_v1_moe", "flex_olmo", "olmoe", "sarvam_mla", "exaone_moe", "cohere2_moe",
        ),
        "qwen2_moe",
    ),
}  # fmt: skip
"""Model types that PEFT converts. Not `qwen2_moe` itself: an adapter on its single experts is passed over."""


def family(model_type: object) -> dict[str, str]:
    """What PEFT makes of the targets of this type of model; empty where it converts nothing."""
    return TAKEN.get(_FAMILIES.get(model_type, ""), {}) if isinstance(model_type, str) else {}


_BY_CLASS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose renames transformers registers for classes: PEFT asks by type, gets none, and converts nothing."""


_EVERYWHERE = ("LayerNorm.", ".weight_g", ".weight_v", r"^model\.language_model\.model")
"""Beginnings of the renames that transformers has for every model."""


class Names:
    """The renames that transformers has for a base, as PEFT applies them to an adapter's names."""

    def __init__(self, plan: Plan, model_type: object) -> None:
        own = any(hit.rule in ("rename", "convert") and not hit.key.startswith(_EVERYWHERE) for hit in plan.rules)
        rules = plan.rules if own and model_type not in _BY_CLASS else ()
        self._rules = [
            (_renaming(hit), hit.at) for hit in rules if hit.rule in ("rename", "prefix") and hit.to is not None
        ]
        self._seen = {
            fate.name.rpartition(".")[0]: fate.into.rpartition(".")[0]
            for fate in (plan.names if rules else ())
            if fate.fate == "loaded" and fate.into is not None and fate.shard is None and not fate.also
        }

    def path(self, module: str) -> str:
        """The path of `module` in the class that transformers builds."""
        if not self._rules or module in self._seen:
            return self._seen.get(module, module)
        new = module
        for mapper, at in self._rules:
            head, scope, tail = new.partition(f"{at}.") if at else ("", "", new)
            new = head + scope + (mapper.map(f"{tail}.").name or "").removesuffix(".") if scope or not at else new
        # What only puts a prefix before a name is taken back: PEFT takes it for one that its own root already gave.
        return module if f"{ROOT}{module}".endswith(new) else new


def _renaming(hit: RuleHit) -> Mapper:
    keys, targets = hit.key.split(" | "), (hit.to or "").split(" | ")
    rules: list[Rule] = []
    for i, key in enumerate(keys):
        kind: Kind = "renaming" if hit.rule == "rename" else "regex"
        with suppress(RuleError):
            rules += Mapper([Rule(kind, key, targets[min(i, len(targets) - 1)])]).rules
    return Mapper(rules)


METHODS = frozenset(
    {
        "ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "CARTRIDGE", "CPT", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA",
        "GRALORA", "HIRA", "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "MULTITASK_PROMPT_TUNING", "OFT", "OSF",
        "PEANUT", "POLY", "PREFIX_TUNING", "PROMPT_TUNING", "PSOFT", "PVERA", "P_TUNING", "RANDLORA", "ROAD", "SHADOW", "SHIRA",
        "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT", "XLORA",
    }
)  # fmt: skip
"""What `peft_type` may be (`utils/peft_types.py`), in capitals; another raises."""


def refused(config: dict[str, Any] | None) -> str | None:
    """What PEFT raises of the configuration alone; None where it takes it."""
    if config is None:
        return "ValueError: Can't find 'adapter_config.json'"
    if "peft_type" not in config:
        return "KeyError: 'peft_type'"
    return None if config["peft_type"] in METHODS else f"KeyError: {config['peft_type']!r}"


def unsaved(adapter: Adapter, surface: Surface) -> list[str]:
    """Names of the tensors that PEFT asks for because of `modules_to_save` and that the adapter has not: it raises a KeyError."""
    saved = (adapter.config or {}).get("modules_to_save")
    ends = tuple(m for m in saved if isinstance(m, str) and m) if isinstance(saved, list) else ()
    if not ends:
        return []
    owned = {p: p.rpartition(".")[0] for p in surface.parameters}
    wanted = (f"{ROOT}{p}" for p, module in owned.items() if module.endswith(ends))
    return [name for name in wanted if name not in adapter.checkpoint.tensors]


def pattern_value(patterns: object, module: str) -> Any:
    """The value of the first key of `rank_pattern` or `alpha_pattern` that ends the path of `module`; None where none does."""
    for key, value in patterns.items() if isinstance(patterns, dict) else ():
        if re.fullmatch(rf"(.*\.)?({key})", module) if _readable(key) else module.endswith(f".{key}"):
            return value
    return None


def _readable(pattern: object) -> bool:
    return isinstance(pattern, str) and tame(pattern)


def targets(config: dict[str, Any] | None, module: str) -> bool | None:
    """Whether `target_modules` names `module`; None where the configuration does not say which modules it means."""
    if config is None:
        return None
    asked = config.get("target_modules")
    if not asked or not isinstance(asked, str | list) or asked == "all-linear":
        return None
    left_out = config.get("exclude_modules")
    if any(isinstance(p, str) and compiles(p) and not tame(p) for p in (asked, left_out)):
        return None  # a pattern that might never end is not tried
    if _matches(left_out, module):
        return False
    if not _matches(asked, module):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or isinstance(asked, str):
        return True
    wanted = (
        {layers}
        if isinstance(layers, int)
        else {x for x in layers if isinstance(x, int)}
        if isinstance(layers, list)
        else None
    )
    named = config.get("layers_pattern")
    roots = [named] if isinstance(named, str) else [p for p in named or () if isinstance(p, str)]
    pattern = "|".join(map(re.escape, roots)) or r"[^.]*"
    found = re.match(rf".*\.(?:{pattern})\.(\d+)\.", module)
    return None if wanted is None else found is None or int(found[1]) in wanted


def _matches(asked: object, module: str) -> bool:
    if isinstance(asked, str):
        return _readable(asked) and re.fullmatch(asked, module) is not None
    if not isinstance(asked, list):
        return False
    return any(isinstance(t, str) and (module == t or module.endswith(f".{t}")) for t in asked)


_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<leaf>[^.]+)")


def look(adapter: Adapter, base: Base, surface: Surface, unit: Unit, path: str) -> Outcome:
    leaf = path.rpartition(".")[2]
    kinds = family((base.checkpoint.config or {}).get("model_type"))
    fused = f"{path.removesuffix('.base_layer')}.{'gate_up_proj' if leaf == 'base_layer' else 'down_proj'}"
    if FUSED.fullmatch(path) and fused in surface.parameters:
        return Outcome(unit, "bound", path, fused)
    if (match := _EXPERT.fullmatch(path)) and f"{match['experts']}.{kinds.get(match['leaf'])}" in surface.parameters:
        return Outcome(unit, "bound", path, f"{match['experts']}.{kinds[match['leaf']]}")
    if not surface.holds(path):
        replicated = (adapter.config or {}).get("layer_replication")
        why = "`layer_replication` builds layers that the base has not; where they end up is not judged"
        return Outcome(unit, "open", path, why=why) if replicated else Outcome(unit, "absent", path)
    if all(p.role == "tokens" for p in unit.parts):
        return Outcome(unit, "bound", path, path)  # targeted by `trainable_token_indices`
    targeted = targets(adapter.config, path)
    if targeted is False:
        return Outcome(unit, "untargeted", path)
    if targeted and leaf in kinds and "experts" not in path.split("."):
        taken = any(p.endswith(f"experts.{kinds[leaf]}") for p in surface.parameters)
        if taken or leaf != "gate":
            return Outcome(unit, "converted", path, why=f"PEFT takes its target `{leaf}` for `experts.{kinds[leaf]}`")
    return Outcome(unit, "bound", path, path)

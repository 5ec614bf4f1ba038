"""What vLLM does with the names of an adapter. Pure.

Facts, read in the released wheels 0.24.0 to 0.33.0: `vllm/lora/utils.py` (`parse_fine_tuned_lora_name`), `lora_model.py`
(`check_unexpected_modules` looks at the last segment of a path alone), `model_manager.py` (`activate_adapter` passes over a module for
which the adapter has no full path, at log level DEBUG), `peft_helper.py` (what is refused), `worker_manager.py` (which rules rewrite).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from packaging.version import InvalidVersion, Version

from ckaudit.adapters import Adapter, Unit
from ckaudit.adapters.base import Base
from ckaudit.adapters.dialects import FUSED, ROOT
from ckaudit.adapters.outcome import Outcome
from ckaudit.adapters.surface import Surface
from ckaudit.errors import RuleError
from ckaudit.mapper import KINDS, Mapper, Rule
from ckaudit.plan import Plan, Step

_NEWEST = Version("999")
_DROPS_KEPT = Version("0.29.0")
"""Before: rules that drop a name are applied to adapters too, and raise (`get_unstacked_mapper`); then `get_rename_mapper`."""
_CLASSIFIERS = Version("0.31.0")
"""From here on `score` and `classifier` may be replaced."""
_FUSED_CHECKED = Version("0.32.0")
"""From here on an adapter on fused experts is refused where the model keeps its experts apart."""
_PATTERNS = Version("0.32.0")
"""From here on `rank_pattern` and `alpha_pattern` are followed; before, every module got `r` and `lora_alpha`."""
_FEATURES_CHECKED = Version("0.32.0")
"""From here on what an adapter needs of PEFT and vLLM has not is refused; before, it was passed over."""
_TEXT_NAMES = Version("0.33.0")
"""From here on the language model of a multimodal one is also found under the names of the text model alone."""

_BASE_EMBEDDINGS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""Ends of names that every release passes over: PEFT saves an adapted embedding whole beside its factors."""

FUSED_EXPERTS = frozenset(
    {
        "GptOssForCausalLM", "InternS1ProForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration",
    }
)  # fmt: skip
"""Architectures whose class sets `is_3d_moe_weight`: they take adapters on fused experts."""


def release(plan: Plan) -> Version:
    """The release of a plan, the newest where it does not say."""
    try:
        return Version(plan.release or "")
    except InvalidVersion:
        return _NEWEST


def renames(plan: Plan) -> Mapper:
    """The rules of the whole model that rewrite adapter names: without those that fuse, and in newer releases without those that drop."""
    kept = []
    for hit in plan.rules:
        if hit.at or hit.rule not in KINDS or hit.rule == "stacked":
            continue
        if hit.to is None and release(plan) >= _DROPS_KEPT:
            continue
        try:
            kept.append(Mapper([Rule(hit.rule, hit.key, hit.to)]).rules[0])
        except RuleError:
            continue
    return Mapper(kept)


def path(name: str, mapper: Mapper) -> tuple[str | None, tuple[Step, ...], str]:
    """The module that `name` is looked up as, the rules on the way, and what vLLM raises where it cannot read the name."""
    rest = name.replace(ROOT, "") if name.startswith(ROOT) else name
    mapped = mapper.map(rest)
    if mapped.name is None:
        return None, mapped.steps, "ValueError: Mapped LoRA weight name cannot be None."
    text = mapped.name
    if match := _READ.fullmatch(text):
        return match[1] or match[2], mapped.steps, ""
    return None, mapped.steps, f"ValueError: {text} is unsupported LoRA weight"


_READ = re.compile(r"(.+)\.lora_[AB]\.weight|(.+)\.lora_embedding_[AB]")


def reads(name: str) -> bool:
    """Whether vLLM knows what a tensor of this name is."""
    return _READ.fullmatch(name) is not None


def unread(adapter: Adapter, plan: Plan) -> list[str]:
    """Names of whole tensors in the adapter that vLLM cannot read: it knows the heads of classifiers alone, and of embeddings it passes
    over what they were."""
    heads = ("score", "classifier") if release(plan) >= _CLASSIFIERS else ()
    parts = (p for u in adapter.units for p in u.parts if p.role == "full")
    return [p.name for p in parts if not p.name.endswith(_BASE_EMBEDDINGS) and p.module.rpartition(".")[2] not in heads]


def refused(config: dict[str, Any] | None, plan: Plan) -> list[str]:
    """What vLLM raises of the configuration alone, in its own words as far as they are fixed."""
    if config is None:
        return ["adapter_config.json cannot be read"]
    if lacking := lacks(config):
        return [f"Missing required configuration fields: {', '.join(lacking)}"]
    out = []
    rank = config["r"]
    if isinstance(rank, int) and rank <= 0:
        out.append(f"LoRA rank `r` must be a positive integer, got {rank}.")
    saved = config.get("modules_to_save")
    saved = [m for m in saved if isinstance(m, str)] if isinstance(saved, list) else []
    allowed = {"score", "classifier"} if release(plan) >= _CLASSIFIERS else set()
    if set(saved) - allowed:
        out.append(f"vLLM only supports modules_to_save being None (here {', '.join(saved)}).")
    if config.get("use_dora"):
        out.append("vLLM does not yet support DoRA.")
    if release(plan) >= _FEATURES_CHECKED:
        out += [f"vLLM does not support {text}." for _, text in _features(config)]
    if config.get("bias", "none") != "none":
        out.append("Adapter bias is not supported.")
    return out


def lacks(config: dict[str, Any]) -> list[str]:
    """The keys of the configuration that vLLM needs and that are not there; PEFT has defaults for them."""
    return [key for key in ("r", "lora_alpha", "target_modules") if key not in config]


_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Ways of starting the factors that leave the base as it is."""


def _features(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Keys of the configuration that ask for what vLLM has not, each with what it calls that."""
    found = []
    if config.get("lora_bias"):
        found.append(("lora_bias", "LoRA bias (lora_bias)"))
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_INITS:
        found.append(("init_lora_weights", f"init_lora_weights={start!r}"))
    named = {
        "alora_invocation_tokens": "Activated LoRA (aLoRA)", "layer_replication": "layer_replication",
        "use_bdlora": "block-diagonal LoRA (BD-LoRA)", "use_qalora": "QALoRA",
    }  # fmt: skip
    return [*found, *((key, text) for key, text in named.items() if config.get(key))]


def ignored(config: dict[str, Any] | None, plan: Plan) -> list[str]:
    """The keys of the configuration that this release does not look at, although they change what the adapter computes."""
    held = config or {}
    patterns = [k for k in ("rank_pattern", "alpha_pattern") if held.get(k)] if release(plan) < _PATTERNS else []
    features = [k for k, _ in _features(held) if k != "lora_bias"] if release(plan) < _FEATURES_CHECKED else []
    return [*patterns, *features]


def takes_fused(plan: Plan, architectures: Iterable[str]) -> bool:
    """Whether the model's class takes adapters on fused experts; `architectures` are those of the base's config."""
    return not FUSED_EXPERTS.isdisjoint((plan.architecture, *architectures))


def refuses_fused(plan: Plan) -> bool:
    """Whether an adapter on fused experts raises where the class does not take it; before, it is passed over."""
    return release(plan) >= _FUSED_CHECKED


def language_roots(modules: Iterable[str], plan: Plan) -> list[str]:
    """Where a multimodal model may hold its language model, for releases that also find it under a text model's names; else none."""
    if release(plan) < _TEXT_NAMES:
        return []
    roots = {m.partition(".")[0] for m in modules} - {"model", "lm_head"}
    named = [r for r in roots if re.search("language|llm|text|thinker", r)]
    return sorted(named, key=lambda r: ("language" not in r, "llm" not in r, "text" not in r, r))


class Look:
    """One vLLM release with its rules, ready to look modules up."""

    def __init__(self, adapter: Adapter, base: Base, plan: Plan, surface: Surface) -> None:
        self.adapter, self.plan, self.surface = adapter, plan, surface
        self.renames = renames(plan)
        self.leaves = {m.rpartition(".")[2] for m in surface.modules}
        self.roots = language_roots(surface.modules, plan)
        self.packed: dict[str, set[str]] = {}
        for part, module in surface.into.items():
            self.packed.setdefault(part.rpartition(".")[2], set()).add(module.rpartition(".")[2])
        self.fused = takes_fused(plan, base.checkpoint.architectures)

    def look(self, unit: Unit) -> Outcome:
        chain: tuple[Step, ...] = ()
        looked, complaint = unit.path, ""
        for part in unit.parts:
            if part.name.endswith(_BASE_EMBEDDINGS):
                continue
            found, steps, said = path(part.name, self.renames)
            complaint = complaint or said
            if found is not None:
                looked, chain = found, steps
        if complaint:
            return Outcome(unit, "form", looked, chain=chain, raises=complaint)
        if FUSED.fullmatch(looked) and unit.of("A", "B"):
            return self._fused(unit, looked, chain)
        found = self._find(looked) or self._by_text_name(looked)
        if found is not None:
            return Outcome(unit, "bound", looked, self.surface.into.get(found, found), chain)
        leaf = looked.rpartition(".")[2]
        said = "" if leaf in self.leaves else f"ValueError: expected target modules, but received {looked}."
        return Outcome(unit, "absent", looked, chain=chain, raises=said)

    def _find(self, path: str) -> str | None:
        """The module of this path, or the fused one beside it that has such a part: vLLM knows parts by their last segment alone."""
        if self.surface.holds(path):
            return path
        parent, dot, leaf = path.rpartition(".")
        beside = (f"{parent}{dot}{fused}" for fused in sorted(self.packed.get(leaf, ())))
        return next((m for m in beside if self.surface.holds(m)), None)

    def _by_text_name(self, path: str) -> str | None:
        """The module of the language model that newer releases find under a text model's name."""
        tries = (f"{root}.{rest}" for root in self.roots for rest in (path, path.removeprefix("model.")))
        return next((found for t in tries if (found := self._find(t)) is not None), None)

    def _fused(self, unit: Unit, looked: str, chain: tuple[Step, ...]) -> Outcome:
        experts = looked.removesuffix(".base_layer")
        there = self.surface.holds(experts) or self._by_text_name(experts) is not None
        if self.fused and there:
            return Outcome(unit, "bound", looked, experts, chain)
        if not there:
            said = (
                f"ValueError: expected target modules, but received {looked}." if "experts" not in self.leaves else ""
            )
            return Outcome(unit, "absent", looked, chain=chain, raises=said)
        said = f"ValueError: LoRA adapter contains fused 3D MoE weights for {experts!r}, but the model uses a 2D MoE LoRA wrapper."
        return Outcome(unit, "form", looked, chain=chain, raises=said if refuses_fused(self.plan) else "")

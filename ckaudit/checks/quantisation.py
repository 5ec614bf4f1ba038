"""The quantisation that a config declares, and CK307: whether its ignore list names modules that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from ckaudit.checks.case import on_files
from ckaudit.checks.facts import Facts
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable
from ckaudit.renames import Inferred, infer_rename

IGNORE_LIST = Check("CK307", "ignore list that matches no module", "warning")
CHECKS = (IGNORE_LIST,)


def declared(facts: Facts) -> dict[str, Any]:
    """The quantisation that the config declares, wherever it stands; empty when it declares none. MLX's own key counts as method `mlx`."""
    sections = [facts.config, *(v for v in facts.config.values() if isinstance(v, dict))]
    for section in sections:
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := section.get(key), dict) and found:
                return found
        if isinstance(found := section.get("quantization"), dict) and found:
            return {"quant_method": "mlx", **found}
    return {}


def elsewhere(facts: Facts) -> str | None:
    """The file beside config.json that declares a quantisation, if one does."""
    return next(
        (
            p
            for p in facts.checkpoint.texts
            if p.endswith(("hf_quant_config.json", "quantize_config.json", "quant_config.json"))
        ),
        None,
    )


_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "query_key_value": ("query", "key", "value"),
}  # fmt: skip
_JOINED = {part: fused for fused, parts in _FUSED.items() for part in parts}


def ignored_by(config: dict[str, Any], module: str) -> str | None:
    """The entry of the config's ignore list that exempts `module`, by its own name or, of a fused module, by that of all or one part;
    None when none does."""
    stem, _, leaf = module.rpartition(".")
    known = [leaf, *_FUSED.get(leaf, ()), *([_JOINED[leaf]] if leaf in _JOINED else [])]
    names = [f"{stem}.{n}" if stem else n for n in known]
    plain, patterns = _sorted_out(tuple(_ignore_list(config)))
    for name in names:
        paths = [i for i, c in enumerate(name) if c == "."]
        for known_as in (name, *(name[:i] for i in paths), *(name[i + 1 :] for i in paths)):
            if known_as in plain:
                return known_as
    return next((e for e in patterns if any(_matches(e, n) for n in names)), None)


@lru_cache(maxsize=16)
def _sorted_out(entries: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Entries that are paths, and those that are patterns: lists with one entry for each of thousands of modules exist."""
    patterns = tuple(e for e in entries if e.startswith("re:") or "*" in e)
    return frozenset(entries).difference(patterns), patterns


def targeted(config: dict[str, Any], module: str) -> bool:
    """Whether the declared quantisation is meant for `module`: not exempt, and among the targets where these are not whole classes."""
    groups = config.get("config_groups")
    targets = [
        t for g in (groups.values() if isinstance(groups, dict) else ()) if isinstance(g, dict)
        for t in (g.get("targets") or ()) if isinstance(t, str)
    ]  # fmt: skip
    if any(config.get(k) for k in _BY_MODULE) or ignored_by(config, module) is not None:
        return False
    return not targets or any(t[:1].isupper() or _matches(t, module) for t in targets)


def weights_of(config: dict[str, Any], module: str) -> dict[str, Any]:
    """What a config with groups (compressed-tensors) sets for the weights of `module`: the first group with it; else empty."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict):
            targets = [t for t in group.get("targets") or () if isinstance(t, str)]
            if not targets or any(t[:1].isupper() or _matches(t, module) for t in targets):
                return weights
    return {}


_BY_MODULE = ("extra_config", "modules_in_block_to_quantize", "layer_quant_config", "quantized_layers")
"""Keys that say module by module what is quantised, in ways of their own. Facts: GPTQModel, AutoRound, Quark and ModelOpt configs."""


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], module) is not None
        except re.error:
            return False
    if "*" in entry:
        return fnmatchcase(module, entry)
    return module == entry or module.startswith(f"{entry}.") or f".{module}".endswith(f".{entry}")


def _ignore_list(config: dict[str, Any]) -> list[str]:
    """The entries that exempt modules, whichever quantiser's key they stand under; GPTQModel's negative patterns as `re:`."""
    dynamic = config.get("dynamic")
    patterns = [f"re:{k[2:]}" for k in dynamic if k.startswith("-:")] if isinstance(dynamic, dict) else []
    for key in (
        "ignore",
        "modules_to_not_convert",
        "llm_int8_skip_modules",
        "ignored_layers",
        "exclude_modules",
        "exclude",
    ):
        if isinstance(found := config.get(key), list):
            return [*(e for e in found if isinstance(e, str)), *patterns]
    return patterns


def ignore_list(facts: Facts) -> Iterator[Finding]:
    """Entries of the ignore list that name no module, while the same entries after one rename all would."""
    total, found = misnamed(facts)
    if found is not None:
        entry, module = next(iter(found.pairs.items()))
        yield on_files(
            facts, IGNORE_LIST, f"{len(found.pairs)} of {total} entries of the ignore list name no module of this checkpoint; "
            f"`{printable(entry)}` is stored as `{printable(module)}`.",
            found.pairs.values(), blame="config",
            mend=f"In the ignore list, {found.rename.text}.", wanted=printable(module), found=printable(entry),
        )  # fmt: skip


def misnamed(facts: Facts) -> tuple[int, Inferred | None]:
    """How many entries of the ignore list are paths, and the one rename that turns those which name nothing into modules, or into
    parts of the model that hold modules; None where fewer than two would be."""
    entries = [e for e in _ignore_list(declared(facts)) if "." in e and not re.search(r"[*^$\\\[(+?:]", e)]
    if not entries:
        return 0, None
    modules = {m for group in facts.modules.values() for m in group}
    parts = {m[: i.start()] for m in modules for i in re.finditer(r"\.", m)}
    idle = [e for e in entries if e not in modules and e not in parts]
    found = infer_rename(idle, modules | parts) if idle else None
    return len(entries), found if found is not None and len(found.pairs) > 1 else None

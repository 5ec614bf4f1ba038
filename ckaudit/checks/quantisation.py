"""The quantisation that a config declares, and CK307: whether its ignore list names modules that are there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ckaudit.checks.case import on_files
from ckaudit.checks.facts import Facts
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable
from ckaudit.patterns import compiles, ends
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
JOINED = {part: fused for fused, parts in _FUSED.items() for part in parts}
"""Names of modules, and of those that engines make of several of them."""


def ignored_by(config: dict[str, Any], module: str) -> str | None:
    """The entry of the config's ignore list that exempts `module`, by its own name or, of a fused module, by that of all or one part;
    None when none does."""
    stem, _, leaf = module.rpartition(".")
    known = [leaf, *_FUSED.get(leaf, ()), *([JOINED[leaf]] if leaf in JOINED else [])]
    names = [f"{stem}.{n}" if stem else n for n in known]
    entries = _sorted_out(tuple(_ignore_list(config)))
    return next((e for n in names if (e := entries.named(n)) is not None), None) or next(
        (e for e, pattern in entries.patterns.items() if any(entries.match(pattern, n) for n in names)), None
    )


class _Entries:
    """An ignore list, sorted out: lists with one entry for each of thousands of modules exist, and patterns come from strangers."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.plain: set[str] = set()
        self.patterns: dict[str, re.Pattern[str]] = {}
        self.refused: list[str] = []
        """Patterns that are none, or that might take for ever on some name."""
        self._left = _PATIENCE
        for entry in entries:
            if not entry.startswith("re:") and not _PATTERN.search(entry):
                self.plain.add(entry)
            elif (pattern := _compiled(entry)) is not None:
                self.patterns[entry] = pattern
            else:
                self.refused.append(entry)

    def named(self, module: str) -> str | None:
        """The entry that is the module, a part of the model above it, the end of its path, or one or two segments of it."""
        dots = [i for i, c in enumerate(module) if c == "."]
        found = next(
            (p for p in (module, *(module[:i] for i in dots), *(module[i + 1 :] for i in dots)) if p in self.plain),
            None,
        )
        if found is None:
            segments = module.split(".")
            runs = (*segments, *map(".".join, pairwise(segments)))
            found = next((r for r in runs if r in self.plain), None)
        return found

    def match(self, pattern: re.Pattern[str], module: str) -> bool:
        """Whether `pattern` matches from the start; no more than a second is spent on a list."""
        if self._left <= 0 or len(module) > _LONGEST:
            return False
        start = time.perf_counter()
        found = pattern.match(module) is not None
        self._left -= time.perf_counter() - start
        return found


_PATIENCE = 1.0
"""Seconds for all patterns of one list."""
_LONGEST = 200
"""Characters of a module's path that patterns are tried on."""
_PATTERN = re.compile(r"[*^$\\\[(+?|]")


def _compiled(entry: str) -> re.Pattern[str] | None:
    """`re:…` as compressed-tensors has it; others as transformers and ModelOpt do: a pattern up to the end of a segment, or wildcards."""
    text = entry.removeprefix("re:")
    if not ends(text):
        return None
    ways = [text] if entry.startswith("re:") else [rf"(?:{text})(?=\.|$)"]
    ways += [translate(entry)] if "*" in text and not entry.startswith("re:") else []
    sound = [w for w in ways if compiles(w)]
    return re.compile("|".join(sound)) if sound else None


@lru_cache(maxsize=16)
def _sorted_out(entries: tuple[str, ...]) -> _Entries:
    return _Entries(entries)


def targeted(config: dict[str, Any], module: str) -> bool:
    """Whether the declared quantisation is meant for `module`: not exempt, and among the targets where these are not whole classes."""
    groups = config.get("config_groups")
    targets = [
        t for g in (groups.values() if isinstance(groups, dict) else ()) if isinstance(g, dict)
        for t in (g.get("targets") or ()) if isinstance(t, str)
    ]  # fmt: skip
    refused = _sorted_out(tuple(_ignore_list(config))).refused
    if refused or any(config.get(k) for k in _BY_MODULE) or ignored_by(config, module) is not None:
        return False
    return not targets or _among(targets, module)


def _among(targets: list[str], module: str) -> bool:
    """Whether `module` is one of the targets, of which a capital begins the name of a class."""
    entries = _sorted_out(tuple(targets))
    return (
        any(t[:1].isupper() for t in targets)
        or entries.named(module) is not None
        or any(entries.match(p, module) for p in entries.patterns.values())
    )


def weights_of(config: dict[str, Any], module: str) -> dict[str, Any]:
    """What a config with groups (compressed-tensors) sets for the weights of `module`: the first group with it; else empty."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict):
            targets = [t for t in group.get("targets") or () if isinstance(t, str)]
            if not targets or _among(targets, module):
                return weights
    return {}


def weight_block(facts: Facts) -> tuple[int, int] | None:
    """Outputs and inputs of one block of FP8; None where the config has no blocks."""
    block = declared(facts).get("weight_block_size")
    fits = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    return (block[0], block[1]) if isinstance(block, list) and fits else None


_BY_MODULE = ("extra_config", "modules_in_block_to_quantize", "layer_quant_config", "quantized_layers")
"""Keys that say module by module what is quantised, in ways of their own. Facts: GPTQModel, AutoRound, Quark and ModelOpt configs."""


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
    entries = [
        e for e in _ignore_list(declared(facts)) if "." in e and not e.startswith("re:") and not _PATTERN.search(e)
    ]
    if not entries:
        return 0, None
    modules = {m for group in facts.modules.values() for m in group}
    for stem, _, leaf in [
        m.rpartition(".") for m in modules
    ]:  # engines know a list by the names of their fused modules too
        if leaf in JOINED and stem:
            modules.add(f"{stem}.{JOINED[leaf]}")
    parts = {m[: i.start()] for m in modules for i in re.finditer(r"\.", m)}
    idle = [e for e in entries if e not in modules and e not in parts]
    found = infer_rename(idle, modules | parts) if idle else None
    return len(entries), found if found is not None and len(found.pairs) > 1 else None

"""vLLM's WeightsMapper, rule by rule, with a trace. Pure: names in, names out, no torch, no I/O.

Source of the semantics: `WeightsMapper` in vllm/model_executor/models/utils.py of the released wheels 0.6.5 to 0.33.0, compared release
by release (the tests run each released class against this module):

- Kinds run in a fixed order: renaming, regex, substring, stacked, prefix, suffix. Releases differ in which kinds exist (`FAMILIES`).
- Within a kind every rule is tried in order on the text as it is *now*: no stop at the first hit, so a rule can fire on another's output.
- A regex replaces every match, every other kind the first occurrence (a suffix rule: the last).
- A stacked rule also names the shard of a fused parameter; a later one overwrites it.
- A rule whose target is None drops the name at once; later rules never see it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

import msgspec
from packaging.version import InvalidVersion, Version

from ckaudit.errors import RuleError
from ckaudit.plan import Step

Kind = Literal["renaming", "regex", "substring", "stacked", "prefix", "suffix"]
KINDS: tuple[Kind, ...] = ("renaming", "regex", "substring", "stacked", "prefix", "suffix")

ShardId = str | int | tuple[int, ...]
"""One part of a fused parameter: `q`, `0`, or a span of parts that lie side by side, `(0, 1, 2)`."""


class Family(msgspec.Struct, frozen=True):
    """What the mapper and AutoWeightsLoader of a run of releases can do, from release `since` on."""

    since: str
    kinds: tuple[Kind, ...]
    shard_lists: bool = False
    """A stacked rule may name several shards; the tensor is then loaded into each in turn."""
    rotary: tuple[str, ...] = ()
    """A name that holds one of these is not loaded: rotary tables that old checkpoints carry and every engine computes."""
    rotary_dropped: bool = False
    """The rotary names are dropped by rules at the end of the substring kind, instead of being skipped after mapping."""
    skips: bool = True
    """Loaders take `skip_prefixes` and `skip_substrs`."""
    skip_first: bool = True
    """Skips are applied to whole names before the walk through the modules, not only during it."""
    ignores_bias: bool = False
    """A name whose missing part ends in `.bias` is ignored in silence."""
    buffers: bool = False
    """Persistent buffers can be loaded like parameters."""
    fused_load: bool = False
    """Fused layers load their own parameters: below one, only its weights are looked for, and a bias it has not is left out."""
    aliases: bool = False
    """Of two names of one tied embedding only the first is loaded; the other is skipped."""


_BASE: tuple[Kind, ...] = ("substring", "prefix", "suffix")
_REGEX: tuple[Kind, ...] = ("regex", *_BASE)
_ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_ROTARY4 = ("rotary_pos_emb.inv_freq", *_ROTARY)

_replace = msgspec.structs.replace
_F065 = Family("0.6.5", _BASE, skip_first=False)
_F090 = Family("0.9.0", _BASE, rotary=_ROTARY)
_F011 = _replace(_F090, since="0.11.0", rotary=_ROTARY4)
_F018 = _replace(_F011, since="0.18.0", kinds=_REGEX)
_F019 = _replace(_F018, since="0.19.0", buffers=True)
_F024 = _replace(_F019, since="0.24.0", kinds=("renaming", *_REGEX))
_F025 = _replace(_F024, since="0.25.0", kinds=KINDS, ignores_bias=True, fused_load=True)
_F029 = _replace(_F025, since="0.29.0", rotary_dropped=True, skips=False, aliases=True)
_F031 = _replace(_F029, since="0.31.0", shard_lists=True)

FAMILIES: tuple[Family, ...] = (_F065, _F090, _F011, _F018, _F019, _F024, _F025, _F029, _F031)
"""Oldest first; each holds until the next. Read from the wheels named in the module's docstring."""


def family(release: str) -> Family:
    """The family that vLLM `release` belongs to. Raises RuleError for what is no version, or older than any mapper."""
    try:
        version = Version(release)
    except InvalidVersion:
        raise RuleError(f"{release!r} is not a vLLM release.", "Write it as in `pip index versions vllm`.") from None
    held = [f for f in FAMILIES if Version(f.since) <= version]
    if not held:
        raise RuleError(
            f"vLLM {release} has no WeightsMapper.", f"The first release that has one is {FAMILIES[0].since}."
        )
    return held[-1]


class Rule(msgspec.Struct, frozen=True):
    """One row of a mapper. `to` None drops the name, `shards` (stacked only) says into which part of the fused parameter it goes."""

    kind: Kind
    key: str
    to: str | None
    shards: tuple[ShardId, ...] = ()
    by_design: str | None = None
    """Why dropping the name is meant, where `to` is None."""
    source: str = ""
    why: str = ""


class Mapped(msgspec.Struct, frozen=True):
    """Where one name ends up: `name` is None when a rule dropped it, `shards` is empty when no stacked rule fired."""

    name: str | None
    shards: tuple[ShardId, ...]
    steps: tuple[Step, ...]
    by_design: str | None = None


def shard_text(shards: tuple[ShardId, ...]) -> str | None:
    """How a report writes shard ids: `q`, `0-2` for a span, `0, 2` for several; None for no shard."""
    texts = [f"{s[0]}-{s[-1]}" if isinstance(s, tuple) else str(s) for s in shards]
    return ", ".join(texts) or None


class Mapper:
    """The rules that sit on one module, ready to map names. `at` is the module's path (`""` is the model)."""

    def __init__(self, rules: Iterable[Rule], at: str = "") -> None:
        """Raises RuleError for a rule that no mapper can hold: an empty suffix, a pattern that does not compile, a stacked drop."""
        self.at = at
        self.rules = tuple(sorted(rules, key=lambda rule: KINDS.index(rule.kind)))
        for rule in self.rules:
            _check(rule)

    def map(self, name: str) -> Mapped:
        """`name` through every rule. A step is recorded for each rule that fires, even where the text stays the same."""
        shards: tuple[ShardId, ...] = ()
        steps: list[Step] = []
        for rule in self.rules:
            if not matches(rule, name):
                continue
            if rule.to is None:
                steps.append(Step(rule.kind, rule.key, self.at, name, None))
                return Mapped(None, (), tuple(steps), rule.by_design)
            after = rewrite(rule, name)
            shards = rule.shards or shards
            steps.append(Step(rule.kind, rule.key, self.at, name, after, shard_text(rule.shards)))
            name = after
        return Mapped(name, shards, tuple(steps))


def matches(rule: Rule, name: str) -> bool:
    """Whether `rule` fires on `name` as it is now."""
    if rule.kind in ("substring", "stacked"):
        return rule.key in name
    if rule.kind == "prefix":
        return name.startswith(rule.key)
    if rule.kind == "suffix":
        return name.endswith(rule.key)
    return compiled(rule).search(name) is not None


def rewrite(rule: Rule, name: str) -> str:
    """`name` after `rule`, which must fire on it and have a target."""
    assert rule.to is not None
    if rule.kind == "regex":
        return compiled(rule).sub(rule.to, name)
    if rule.kind == "renaming":
        return _rename(rule, name)
    if rule.kind == "suffix":
        return rule.to.join(name.rsplit(rule.key, 1))
    return name.replace(rule.key, rule.to, 1)


def _rename(rule: Rule, name: str) -> str:
    """As transformers' WeightRenaming.rename_source_key (core_model_loading.py, 5.24): the matched text, at its first occurrence."""
    match = compiled(rule).search(name)
    assert match is not None
    assert rule.to is not None
    target = re.sub(r"\(\?.+?\)?\)", "", rule.to.removeprefix("^"))
    target = re.sub(r"\(.+?\)", lambda _: r"\1", target, count=1).replace(r"\.", ".")
    if r"\1" in target:
        target = target.replace(r"\1", match.group(1))
    return name.replace(match.group(0), target, 1)


def compiled(rule: Rule) -> re.Pattern[str]:
    """The pattern of a regex or renaming rule."""
    return _compile(rule.key if rule.kind == "regex" else _renaming_pattern(rule))


def _renaming_pattern(rule: Rule) -> str:
    anchored = f"^{rule.key}" if (rule.to or "").startswith("^") and not rule.key.startswith("^") else rule.key
    pattern = anchored.replace("*.", r".*\.")
    return pattern + r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else pattern


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # set syntax that `re` and `regex` read differently
        return re.compile(pattern)


# vLLM compiles with the `regex` module. What `re` would read differently and not refuse: approximate matching, `(?:word){e<=1}`.
_FUZZY = re.compile(r"\{\s*\d*\s*(?:<=?)?\s*[ides]\b[^}]*\}")


def _check(rule: Rule) -> None:
    row = f"the {rule.kind} rule {rule.key!r}"
    if rule.kind == "suffix" and not rule.key:
        raise RuleError(f"In {row} the key is empty: vLLM's mapper raises on an empty suffix.", "Give it a key.")
    if rule.kind == "stacked" and (rule.to is None or not rule.shards):
        raise RuleError(f"In {row} the target or the shard is missing.", "A stacked rule has both.")
    if rule.kind != "stacked" and rule.shards:
        raise RuleError(f"In {row} there is a shard.", "Only stacked rules have one.")
    if rule.kind == "renaming" and rule.to is None:
        raise RuleError(f"In {row} there is no target.", "A renaming cannot drop a name.")
    if rule.kind in ("regex", "renaming"):
        _check_pattern(rule, row)


def _check_pattern(rule: Rule, row: str) -> None:
    step = "Write the pattern with what Python's `re` and the `regex` module share."
    if _FUZZY.search(rule.key):
        raise RuleError(f"In {row} there is approximate matching.", step)
    try:
        pattern = compiled(rule)
        if rule.kind == "regex" and rule.to is not None:
            _check_template(pattern, rule.to)
    except (re.error, FutureWarning, IndexError) as error:
        raise RuleError(f"In {row}: {error}.", step) from None


def _check_template(pattern: re.Pattern[str], template: str) -> None:
    """Raises re.error where the replacement names a group that the pattern has not."""
    parser: Any = getattr(re, "_parser")  # noqa: B009  the only way to check a template without a match
    parser.parse_template(template, pattern)

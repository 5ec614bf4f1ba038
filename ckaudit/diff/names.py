"""Names that changed: one rename for many tensors, names of older releases, and names that are spelt otherwise."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

import msgspec

from ckaudit.changes import Rule
from ckaudit.diff.units import Unit
from ckaudit.naming import Nearest, numbers_of, printable
from ckaudit.naming import shape as pattern
from ckaudit.renames import Rename, infer_rename

_TRIES = 16
_MANY = 2000
"""Kinds of names (numbers taken out) of which each is held against its likes; a checkpoint has some 60, only made-up ones have more."""
_TOKEN = re.compile(r"[._]")
_ADAPTER = re.compile(r"(^|\.)lora_\w+(\.|$)")


class Renamed(msgspec.Struct, frozen=True):
    """Pairs (A, B) of units that one change of names brings together."""

    rule: Rule
    text: str
    pairs: tuple[tuple[Unit, Unit], ...]
    rename: Rename | None = None
    back: bool = False
    """Whether `rename` turns the names of B into those of A."""


def rename(old: Mapping[str, Unit], new: Mapping[str, Unit]) -> Renamed | None:
    """The one rename that brings the most of these units together (keys are their names), with shapes that agree; None when there is none.

    It is looked for among names with their numbers taken out, some 60 of which stand for 45,000; and in both directions, for what B added
    inside a path can only be told by taking it out.
    """
    ours, theirs = dict.fromkeys(map(pattern, old)), dict.fromkeys(map(pattern, new))
    if any(map(_ADAPTER.search, ours)) != any(
        map(_ADAPTER.search, theirs)
    ):  # they only lie beside the names that are looked for
        ours, theirs = ({p: None for p in side if not _ADAPTER.search(p)} for side in (ours, theirs))
    for _ in range(_TRIES if max(len(ours), len(theirs)) <= _MANY else 1):
        forth = infer_rename(ours, theirs) if ours and theirs else None
        most = min(len(ours), len(theirs))
        back = infer_rename(theirs, ours) if most and (forth is None or len(forth.pairs) < most) else None
        backwards = back is not None and (forth is None or len(back.pairs) > len(forth.pairs))
        found = back if backwards else forth
        if found is None:
            return None
        pairs = [(a, b) for b, a in _pairs(found.rename, new, old)] if backwards else _pairs(found.rename, old, new)
        here, there = (new, old) if backwards else (old, new)
        if _convincing(found.rename, pairs, here, there):
            text = found.rename.text
            return Renamed("rename", f"in B, {text}" if backwards else text, tuple(pairs), found.rename, backwards)
        for one, other in found.pairs.items():  # a likeness by chance: look again without these names
            (theirs if backwards else ours).pop(one, None)
            (ours if backwards else theirs).pop(other, None)
    return None


def _pairs(rule: Rename, here: Mapping[str, Unit], there: Mapping[str, Unit]) -> list[tuple[Unit, Unit]]:
    """What `rule` brings together, each unit once."""
    renamed = {new: unit for name, unit in here.items() if (new := rule.apply(name)) != name and new in there}
    return [(unit, there[new]) for new, unit in renamed.items()]


def _convincing(
    rule: Rename, pairs: Sequence[tuple[Unit, Unit]], here: Mapping[str, Unit], there: Mapping[str, Unit]
) -> bool:
    """Whether so many tensors agree in name and shape that it is no chance, and no other pairs would do as well."""
    if _opposed(".".join(rule.old), ".".join(rule.new)):
        return False
    known = [(a.shape, b.shape) for a, b in pairs if a.shape is not None and b.shape is not None]
    agreeing = sum(a == b for a, b in known)
    if len(pairs) < 3:
        alone = (rule.kind != "path" and min(len(here), len(there)) <= 2) or _only_moved(rule, pairs)
        enough = bool(known) and agreeing == len(pairs) and (len(pairs) > 1 or alone)
    else:
        enough = 2 * agreeing >= len(known)
    return enough and (rule.kind != "path" or _clear(rule, here, there))


def _only_moved(rule: Rename, pairs: Sequence[tuple[Unit, Unit]]) -> bool:
    """Whether a prefix was added or stripped before a module that keeps its name (`language_model.lm_head.weight`)."""
    return (
        rule.kind == "root"
        and not (rule.old and rule.new)
        and all("." in min(a.name, b.name, key=len) for a, b in pairs)
    )


_OPPOSED = tuple(
    frozenset(pair.split())
    for pair in (
        "encoder decoder", "student teacher", "actor critic", "text vision", "text visual", "text audio", "vision audio", "visual audio",
        "query key", "query value", "key value", "up down", "source target", "left right", "forward backward",
    )
)  # fmt: skip
"""Words that tell parts of one model apart: a name in which one took the other's place is another part's."""


def _opposed(one: str, other: str) -> bool:
    """Whether some word of one name stands against one of the other's."""
    a, b = set(_TOKEN.split(one)), set(_TOKEN.split(other))
    return any(pair & (a - b) and pair & (b - a) for pair in _OPPOSED)


_PARTS = frozenset(
    "q k v o b z gate up down w1 w2 w3 wq wk wv wo fc1 fc2 fc in out dt x query key value dense linear1 linear2 norm1 norm2 "  # noqa: SIM905
    "ln_1 ln_2 conv1 conv2".split()
)
"""What tells the modules of one block apart. Names that differ in these alone are different modules, however alike their shapes."""


def _clear(rule: Rename, here: Mapping[str, Unit], there: Mapping[str, Unit]) -> bool:
    """Whether a rename of modules (`key_proj` to `k_proj`) is between one and the same, for there may be others that fit.

    A change further up the path, above a module that keeps its name, leaves no doubt.
    """
    if len(rule.old) != 1 or len(rule.new) != 1:
        return True
    old, new = rule.old[0], rule.new[0]
    names = [n for n in here if rule.apply(n) in there]
    if any(not f".{n.rpartition('.')[0]}".endswith(f".{old}") for n in names):
        return True
    if _WORDS.get(old, old) == _WORDS.get(new, new):
        return True
    tail = _tail(old, new)
    if {old.removesuffix(tail), new.removesuffix(tail)} <= _PARTS:
        return False
    first = names[0]
    parent, leaf = first.rpartition(".")[0].rpartition(".")[0], first.rpartition(".")[2]
    ours, theirs = _modules(here, parent, leaf, here[first]), _modules(there, parent, leaf, here[first])
    score = _ratio(old, new)
    return all(_ratio(old, t) < score for t in theirs - {new}) and all(_ratio(o, new) < score for o in ours - {old})


def _tail(one: str, other: str) -> str:
    """What two words end in alike, from the last `_` before they part on."""
    return next((f"_{t}" for t in (one.partition("_")[2],) if t and other.endswith(f"_{t}")), "")


def _modules(units: Mapping[str, Unit], parent: str, leaf: str, like: Unit) -> set[str]:
    """The modules of `parent` that have a tensor `leaf` of the shape of `like`, or of an unknown one."""
    start, end = f"{parent}." if parent else "", f".{leaf}"
    return {
        module
        for name, unit in units.items()
        if name.startswith(start)
        and name.endswith(end)
        and "." not in (module := name[len(start) : -len(end)])
        and (unit.shape is None or like.shape is None or unit.shape == like.shape)
    }


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(a=one, b=other, autojunk=False).ratio()


_LEGACY = (
    ("gamma", "weight"), ("beta", "bias"), ("weight_g", "parametrizations.weight.original0"),
    ("weight_v", "parametrizations.weight.original1"),
)  # fmt: skip
"""Last words that older releases of transformers and torch gave, and what they are called now (transformers 5.24.0,
`core_model_loading.py`)."""


def legacy(old: Mapping[str, Unit], new: Mapping[str, Unit]) -> Iterator[Renamed]:
    """Names of older releases (`gamma`, `weight_g`) against those of newer ones, in either direction."""
    for before, after in _LEGACY:
        forth = _tails(old, new, before, after)
        if forth:
            yield Renamed("legacy", f"`{before}` → `{after}`", tuple(forth))
        back = _tails(new, old, before, after)
        if back:
            yield Renamed("legacy", f"`{after}` → `{before}`", tuple((a, b) for b, a in back))


def _tails(here: Mapping[str, Unit], there: Mapping[str, Unit], before: str, after: str) -> list[tuple[Unit, Unit]]:
    dotted = f".{before}"
    renamed = {name: name.removesuffix(before) + after for name in here if f".{name}".endswith(dotted)}
    return [(here[name], there[new]) for name, new in renamed.items() if new in there]


_WORDS = {
    word: group.split()[0]
    for group in (
        "q_proj query_proj to_q linear_q query wq q_lin", "k_proj key_proj to_k linear_k key wk k_lin",
        "v_proj value_proj to_v linear_v value wv v_lin",
        "o_proj to_out linear_out out_proj wo out_lin dense", "gate_proj w1 wi_0", "down_proj w2", "up_proj w3 wi_1",
        "embed_tokens word_embeddings wte tok_embeddings embed_in embed", "lm_head head embed_out output",
        "self_attn attn attention", "mlp ffn feed_forward block_sparse_moe moe", "layers h blocks layer block",
        "q_norm norm_q", "k_norm norm_k",
        "input_layernorm attn_norm attention_norm ln_1 norm1", "post_attention_layernorm ffn_norm ln_2 norm2",
        "norm ln_f final_layernorm final_norm", "encoder_attn cross_attn crossattention", "e_score_correction_bias expert_bias",
    )
    for word in group.split()
}  # fmt: skip
"""What one module is called by different authors, and the first of its names."""
_TOLD = 4
"""Words that a sentence lists."""


def synonyms(old: Mapping[str, Unit], new: Mapping[str, Unit]) -> Iterator[Renamed]:
    """Modules of one role under another author's name (`wq`, `to_q`, `q_proj`), of the same shape, where only one pair fits."""
    ours, theirs = _canonical(old), _canonical(new)
    pairs: list[tuple[Unit, Unit]] = []
    words: dict[str, None] = {}
    for name, found in ours.items():
        (one, a), (other, b) = found, theirs.get(name) or ("", None)
        if b is not None and a.shape is not None and a.shape == b.shape:
            pairs.append((a, b))
            changed = [w for w in zip(one.split("."), other.split("."), strict=True) if w[0] != w[1]]
            words.update((f"`{printable(x)}` → `{printable(y)}`", None) for x, y in changed)
    if pairs:
        told = list(words)
        more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        yield Renamed("rename", ", ".join(told[:_TOLD]) + more, tuple(pairs))


def _canonical(units: Mapping[str, Unit]) -> dict[str, tuple[str, Unit]]:
    """Units by a name of common words; those that would share one are left out."""
    found: dict[str, list[tuple[str, Unit]]] = defaultdict(list)
    for name, unit in units.items():
        found[_common(name)].append((name, unit))
    return {name: members[0] for name, members in found.items() if len(members) == 1}


def _common(name: str) -> str:
    return ".".join(_WORDS.get(s, s) for s in name.split("."))


def common(named: Mapping[str, tuple[Unit, tuple[str, ...]]]) -> dict[str, tuple[Unit, tuple[str, ...]]]:
    """Units by a name of common words, with the renames that led to their names and a word on this one."""
    made: dict[str, tuple[Unit, tuple[str, ...]]] = {}
    for name, (unit, texts) in named.items():
        other = _common(name)
        made.setdefault(
            other, (unit, texts if other == name else (*texts, "modules under the words of another author"))
        )
    return made


def alike(old: Mapping[str, Unit], new: Mapping[str, Unit]) -> Iterator[Renamed]:
    """Names spelt otherwise: of one kind and number on both sides, of the same shapes, whose changed words are the same or nearly so."""
    ours, theirs = _kinds(old), _kinds(new)
    if max(len(ours), len(theirs)) > _MANY:
        return
    there, here = Nearest(theirs), Nearest(ours)
    groups: dict[str, list[tuple[Unit, Unit]]] = defaultdict(list)
    for kind, members in ours.items():
        other = there.find(kind)
        if other is None or here.find(other) != kind or not _same_words(kind, other):
            continue
        partners = theirs[other]
        known = all(u.shape is not None for u in members.values())
        if known and members.keys() == partners.keys() and all(members[n].shape == partners[n].shape for n in members):
            before, after = _trimmed(kind, other)
            groups[f"`{printable(before)}` → `{printable(after)}`"] += [(members[n], partners[n]) for n in members]
    for text, pairs in groups.items():
        yield Renamed("rename", text, tuple(pairs))


def _kinds(units: Mapping[str, Unit]) -> dict[str, dict[tuple[str, ...], Unit]]:
    """Names with their numbers taken out -> the numbers -> the unit."""
    found: dict[str, dict[tuple[str, ...], Unit]] = defaultdict(dict)
    for name, unit in units.items():
        found[pattern(name)][numbers_of(name)] = unit
    return dict(found)


def _same_words(one: str, other: str) -> bool:
    """Whether the words of two names are the same in another order, or one word of each is the other's misspelling.

    `q_norm` and `k_norm`, `fc1` and `fc2` are different words, however alike.
    """
    a, b = Counter(_TOKEN.split(one)), Counter(_TOKEN.split(other))
    gone, came = list((a - b).elements()), list((b - a).elements())
    if not gone and not came:
        return True
    if _opposed(one, other):
        return False
    if len(gone) != 1 or len(came) != 1:
        return False
    one, other = (re.sub(r"\d", "", w) for w in (gone[0], came[0]))
    return one != other and min(len(one), len(other)) > 3 and _ratio(one, other) >= 0.75


def _trimmed(one: str, other: str) -> tuple[str, str]:
    """What two names do not share, in whole words."""
    a, b = re.split(r"(?<=[._])", one), re.split(r"(?<=[._])", other)
    while len(a) > 1 and len(b) > 1 and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return "".join(a), "".join(b)

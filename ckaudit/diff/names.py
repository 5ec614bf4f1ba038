"""Names that changed: one rename for many tensors, names of older releases, and names that are spelt otherwise."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

import msgspec

from ckaudit.changes import Rule
from ckaudit.checks.facts import shape as pattern
from ckaudit.diff.units import Unit
from ckaudit.naming import Nearest, printable
from ckaudit.renames import Rename, infer_rename

_TRIES = 16


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
    for _ in range(_TRIES):
        forth = infer_rename(ours, theirs) if ours and theirs else None
        most = min(len(ours), len(theirs))
        back = infer_rename(theirs, ours) if most and (forth is None or len(forth.pairs) < most) else None
        backwards = back is not None and (forth is None or len(back.pairs) > len(forth.pairs))
        found = back if backwards else forth
        if found is None:
            return None
        pairs = [(a, b) for b, a in _pairs(found.rename, new, old)] if backwards else _pairs(found.rename, old, new)
        if _convincing(found.rename, pairs, min(len(old), len(new))):
            text = found.rename.text
            return Renamed("rename", f"in B, {text}" if backwards else text, tuple(pairs), found.rename, backwards)
        here, there = (theirs, ours) if backwards else (ours, theirs)
        for one, other in found.pairs.items():  # a likeness by chance: look again without these names
            here.pop(one, None)
            there.pop(other, None)
    return None


def _pairs(rule: Rename, here: Mapping[str, Unit], there: Mapping[str, Unit]) -> list[tuple[Unit, Unit]]:
    """What `rule` brings together, each unit once."""
    renamed = {new: unit for name, unit in here.items() if (new := rule.apply(name)) != name and new in there}
    return [(unit, there[new]) for new, unit in renamed.items()]


def _convincing(rename: Rename, pairs: Sequence[tuple[Unit, Unit]], most: int) -> bool:
    """Whether so many tensors agree in name and shape that it is no chance."""
    known = [(a.shape, b.shape) for a, b in pairs if a.shape is not None and b.shape is not None]
    agreeing = sum(a == b for a, b in known)
    if len(pairs) < 3:
        same = bool(known) and agreeing == len(pairs)
        return same and (rename.kind == "root" or len(pairs) > 1) and 2 * len(pairs) >= most
    return 2 * agreeing >= len(known)


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


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_TOKEN = re.compile(r"[._]")


def alike(old: Mapping[str, Unit], new: Mapping[str, Unit]) -> Iterator[Renamed]:
    """Names spelt otherwise: of one kind and number on both sides, of the same shapes, whose changed words are the same or nearly so."""
    ours, theirs = _kinds(old), _kinds(new)
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
        found[pattern(name)][tuple(_NUMBER.findall(name))] = unit
    return dict(found)


def _same_words(one: str, other: str) -> bool:
    """Whether the words of two names are the same in another order, or one word of each is the other's misspelling.

    `q_norm` and `k_norm`, `fc1` and `fc2` are different words, however alike.
    """
    a, b = Counter(_TOKEN.split(one)), Counter(_TOKEN.split(other))
    gone, came = list((a - b).elements()), list((b - a).elements())
    if not gone and not came:
        return True
    if len(gone) != 1 or len(came) != 1 or min(len(gone[0]), len(came[0])) < 4:
        return False
    if re.sub(r"\d", "", gone[0]) == re.sub(r"\d", "", came[0]):
        return False
    return SequenceMatcher(a=gone[0], b=came[0], autojunk=False).ratio() >= 0.75


def _trimmed(one: str, other: str) -> tuple[str, str]:
    """What two names do not share, in whole words."""
    a, b = re.split(r"(?<=[._])", one), re.split(r"(?<=[._])", other)
    while len(a) > 1 and len(b) > 1 and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return "".join(a), "".join(b)


def through(
    rules: Iterable[Renamed], units: Mapping[str, Unit], *, back: bool
) -> dict[str, tuple[Unit, tuple[str, ...]]]:
    """`units` after the renames that were found so far: new name -> (unit, the renames that changed its name).

    `back` takes the renames that turn names of B into names of A, for the units of B.
    """
    chosen = [(r.rename, r.text) for r in rules if r.rename is not None and r.back == back]
    found: dict[str, tuple[Unit, tuple[str, ...]]] = {}
    for name, unit in units.items():
        texts = []
        for rule, text in chosen:
            changed = rule.apply(name)
            if changed != name:
                name = changed
                texts.append(text)
        found.setdefault(name, (unit, tuple(texts)))
    return found

"""Which one change to a path turns most of these names into those: found by comparing, verified by applying it. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import msgspec

from ckaudit.naming import printable
from ckaudit.naming import shape as shape_of

_MANY = 400
"""Shapes of names (numbers taken out) that are compared; a checkpoint has some 60, only made-up ones have more."""
_AMBIGUOUS = 8
"""A tail that more expected shapes than this share (`weight`) says nothing about where a name belongs."""


class Rename(msgspec.Struct, frozen=True):
    """One change to paths, in whole segments.

    `root` replaces the leading `old` by `new` (either may be empty: a prefix added or stripped), `path` replaces `old` by `new` wherever
    it stands, `drop` takes every segment in `old` out of the path.
    """

    kind: Literal["root", "path", "drop"]
    old: tuple[str, ...]
    new: tuple[str, ...] = ()

    def apply(self, name: str) -> str:
        """`name` after the change; unchanged where it does not apply."""
        if self.kind == "root":
            old = ".".join((*self.old, ""))
            return ".".join((*self.new, name.removeprefix(old))) if name.startswith(old) else name
        path = f".{name}."
        if self.kind == "path":
            path = path.replace(".".join(("", *self.old, "")), ".".join(("", *self.new, "")))
        else:
            for segment in self.old:
                while f".{segment}." in path:
                    path = path.replace(f".{segment}.", ".")
        return path[1:-1]

    @property
    def text(self) -> str:
        """What to do, in words: "strip the prefix `_orig_mod.`"."""
        old, new = printable(".".join((*self.old, ""))), printable(".".join((*self.new, "")))
        if self.kind == "drop":
            return "take " + " and ".join(f"`{printable(s)}.`" for s in self.old) + " out of the names"
        where = "prefix " if self.kind == "root" else ""
        if not self.old:
            return f"add the {where}`{new}`"
        if not self.new:
            return f"strip the {where}`{old}`" if where else f"take `{old}` out of the names"
        return f"replace the {where}`{old}` by `{new}`" if where else f"replace `{old}` by `{new}` in the names"

    @property
    def pattern(self) -> tuple[str, str]:
        """The change as a regular expression and its replacement, as `from_pretrained(key_mapping={…})` takes them."""
        if self.kind == "drop":
            return f"(?<![^.])({'|'.join(map(_literal, self.old))})[.]", ""
        old, new = "".join(f"{_literal(s)}[.]" for s in self.old), ".".join((*self.new, ""))
        return ("^" if self.kind == "root" else "(?<![^.])") + old, new


def _literal(segment: str) -> str:
    """A pattern that matches `segment` only; plain segments stay as they are, so that a user can read it."""
    return segment if re.fullmatch(r"\w+", segment) else re.escape(segment)


class Inferred(msgspec.Struct, frozen=True):
    """A rename and what it brings together: stray name -> expected name."""

    rename: Rename
    pairs: dict[str, str]


def infer_rename(strays: Iterable[str], expected: Iterable[str]) -> Inferred | None:
    """The one rename that turns the most `strays` into `expected` names; None when there is none.

    Of equally good ones the one that changes the fewest segments, a prefix before a change inside the path.
    """
    names, wanted = list(dict.fromkeys(strays)), set(expected)
    shapes = Counter(map(shape_of, names))
    wanted_shapes = set(map(shape_of, wanted))
    best: tuple[int, int, Rename] | None = None
    known = list(shapes.items()) if len(shapes) <= 5 * _MANY else shapes.most_common(5 * _MANY)
    for rename in _candidates(shapes, wanted_shapes):
        hits = sum(n for shape, n in known if rename.apply(shape) in wanted_shapes)
        cost = -len(rename.old) - len(rename.new) - (rename.kind != "root")
        if hits and (best is None or (hits, cost) > best[:2]):
            best = hits, cost, rename
    if best is None:
        return None
    rename = best[2]
    pairs = {name: new for name in names if (new := rename.apply(name)) in wanted and new != name}
    return Inferred(rename, pairs) if pairs else None


def _candidates(shapes: Counter[str], wanted: Collection[str]) -> Iterator[Rename]:
    """Renames worth trying, the most promising first, each once."""
    votes: Counter[Rename] = Counter()
    by_tail: dict[str, list[str]] = defaultdict(list)
    for shape in sorted(wanted)[: 20 * _MANY]:
        for tail in _tails(shape):
            by_tail[tail].append(shape)
    common = shapes.most_common(_MANY)
    for shape, count in common:
        for tail in _tails(shape):
            if tail in by_tail:
                for other in by_tail[tail] if len(by_tail[tail]) <= _AMBIGUOUS else ():
                    for rename in _differences(shape, other, tail):
                        votes[rename] += count
                break
    yield from _foreign(common, wanted)
    for rename, _ in sorted(votes.items(), key=lambda v: (-v[1], v[0].kind, v[0].old, v[0].new))[:64]:
        yield rename


def _tails(shape: str) -> Iterator[str]:
    """Every trailing run of segments, the longest first."""
    while shape:
        yield shape
        shape = shape.partition(".")[2]


def _differences(shape: str, other: str, tail: str) -> Iterator[Rename]:
    """The renames that turn `shape` into `other`, which end alike."""
    old = tuple(s for s in shape.removesuffix(tail).split(".") if s)
    new = tuple(s for s in other.removesuffix(tail).split(".") if s)
    if "#" not in (*old, *new) and old != new:
        yield Rename("root", old, new)
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    old, new = old[same:], new[same:]
    if same and old and "#" not in (*old, *new):
        yield Rename("path", old, new) if new or len(old) > 1 else Rename("drop", old)


def _foreign(common: list[tuple[str, int]], wanted: Collection[str]) -> Iterator[Rename]:
    """Segments that no expected name has and many strays have: wrappers, one at a time and all together."""
    vocabulary = {segment for shape in wanted for segment in shape.split(".")}
    seen: Counter[str] = Counter()
    for shape, count in common:
        for segment in set(shape.split(".")) - vocabulary:
            seen[segment] += count
    total = sum(count for _, count in common)
    wrappers = sorted(s for s, n in seen.most_common(6) if n * 10 >= total)
    for segment in wrappers:
        yield Rename("drop", (segment,))
    if len(wrappers) > 1:
        yield Rename("drop", tuple(wrappers))

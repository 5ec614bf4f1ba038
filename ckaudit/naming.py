"""Tensor names as text: their order, how many of them are told in one line, how they are shown safely, and which is near which.

Pure, no I/O. Everything here takes names as they stand in a file, hostile ones included, and its time grows with the number of names.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import product
from math import prod

import msgspec

_DIGITS = re.compile(r"([0-9]+)")
# A number that is a whole segment of a path.
_SEGMENT = re.compile(r"(?<![^.])[0-9]+(?![^.])")
# A number that stands for itself: `layers.7.`, `blocks_7_`, `model-00007-of`, not the 1 of `fc1` or `w1`.
_INDEX = re.compile(r"(?<![0-9A-Za-z])([0-9]+)(?![0-9A-Za-z])")


def natural_key(name: str) -> tuple[object, ...]:
    """A sort key that puts `layers.9` before `layers.10`. Total: different names never share a key."""
    parts = _DIGITS.split(name)
    # A number compares by its length, then as text: int() refuses numbers of thousands of digits, which a file may hold.
    return tuple((len(n := p.lstrip("0")), n) if i % 2 else p for i, p in enumerate(parts)), name


def numbered_as(path: str, like: str, name: str) -> str:
    """`path`, which belongs to `like`, as it is for `name`, the same but for its numbers: those that `path` and `like` share, in order.

    `layers.0.qkv` for `layers.0.experts.3.q` is `layers.5.qkv` for `layers.5.experts.7.q`.
    """
    numbers = list(zip(numbers_of(like), numbers_of(name), strict=True))

    def exchanged(match: re.Match[str]) -> str:
        while numbers:
            old, new = numbers.pop(0)
            if old == match[0]:
                return new
        return str(match[0])

    return _SEGMENT.sub(exchanged, path)


# Shown as nothing although Python calls them printable (Unicode Default_Ignorable_Code_Point, and the blank braille cell).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_SHORT = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """`text` with everything escaped that could move a cursor, hide, or reorder what stands beside it.

    Escapes control characters (ANSI sequences start with one), line separators, bidi and zero-width marks, right-to-left letters,
    combining marks, lone surrogates, unassigned code points and odd spaces, in Python's notation. A backslash is doubled, so the
    result can be read back in one way only. Plain text comes back unchanged.
    """
    if "\\" not in text and (text.isascii() and text.isprintable()):
        return text
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    if char.isascii() and char.isprintable():
        return char
    hidden = not char.isprintable() or unicodedata.category(char)[0] == "M" or _INVISIBLE.match(char)
    if not hidden and unicodedata.bidirectional(char) not in ("R", "AL", "AN"):
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Fold(msgspec.Struct, frozen=True):
    """Names that differ in numbers only, told as one: text and sets of numbers in turn, which multiply out to exactly the members."""

    parts: tuple[str | tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """How many names it stands for."""
        return prod(len(p) for p in self.parts if isinstance(p, tuple))

    @property
    def text(self) -> str:
        """One printable line: `model.layers.{0..23}.mlp.up_proj.weight`. Braces that belong to a name are escaped."""
        return "".join(
            printable(p).replace("{", "\\x7b").replace("}", "\\x7d") if isinstance(p, str) else _braces(p)
            for p in self.parts
        )

    def members(self) -> list[str]:
        """Every name it stands for."""
        return ["".join(choice) for choice in product(*((p,) if isinstance(p, str) else p for p in self.parts))]


def _braces(numbers: Sequence[str]) -> str:
    """`{0..3,7}`: numbers of one width or without leading zeros, ascending; a run of three or more is told by its ends."""
    runs: list[list[str]] = []
    for n in numbers:
        if runs and int(n) == int(runs[-1][-1]) + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return "{" + ",".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(r) for r in runs) + "}"


def fold(names: Iterable[str]) -> list[str]:
    """`names` in as few printable lines as stay exact, in natural order: see `folds`."""
    return [f.text for f in folds(names)]


def folds(names: Iterable[str]) -> list[Fold]:
    """`names` (each once) as folds, in natural order. Every name is in exactly one fold, and a fold holds nothing else."""
    groups: dict[tuple[object, ...], set[tuple[str, ...]]] = defaultdict(set)
    for name in names:
        parts = _INDEX.split(name)
        numbers = tuple(parts[1::2])
        if any(len(n) > 18 for n in numbers):  # no index: left as text
            parts, numbers = [name], ()
        # Padded numbers fold only with others of their width: {00001..00010} then has one reading.
        widths = tuple(len(n) if n[0] == "0" and n != "0" else 0 for n in numbers)
        groups[(*parts[::2], widths)].add(numbers)
    found: list[Fold] = []
    for (*texts, _), members in groups.items():
        for box in _boxes(members):
            row: list[str | tuple[str, ...]] = [str(texts[0])]
            for values, text in zip(box, texts[1:], strict=True):
                row += [values, str(text)]
            found.append(Fold(_joined(row)))
    return sorted(found, key=lambda f: natural_key("".join(p if isinstance(p, str) else p[0] for p in f.parts)))


def _joined(row: list[str | tuple[str, ...]]) -> tuple[str | tuple[str, ...], ...]:
    """`row` with sets of one number turned into text."""
    out: list[str | tuple[str, ...]] = []
    for part in row:
        text = part if isinstance(part, str) else part[0] if len(part) == 1 else None
        if text is None:
            out.append(part)
        elif out and isinstance(out[-1], str):
            out[-1] += text
        else:
            out.append(text)
    return tuple(out)


def _boxes(points: set[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """`points` (tuples of numbers, equally long) cut into products of sets.

    When they are no product themselves, they are cut along the axis on which the fewest different slices remain, slices that
    are equal staying together. Each level costs one pass an axis, and there are no more levels than axes.
    """
    axes = [tuple(sorted(set(column), key=lambda n: (len(n), n))) for column in zip(*points, strict=True)]
    if prod(map(len, axes)) == len(points):
        return [tuple(axes)]
    best: tuple[int, list[tuple[frozenset[tuple[str, ...]], list[str]]]] | None = None
    for axis, values in enumerate(axes):
        if len(values) == 1:
            continue
        rest: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for point in points:
            rest[point[axis]].add((*point[:axis], *point[axis + 1 :]))
        slices: dict[frozenset[tuple[str, ...]], list[str]] = defaultdict(list)
        for value in values:
            slices[frozenset(rest[value])].append(value)
        if best is None or len(slices) < len(best[1]):
            best = axis, list(slices.items())
    if best is None:  # only one axis varies: that would have been a product
        return []
    axis, chosen = best
    return [(*box[:axis], tuple(values), *box[axis:]) for remainder, values in chosen for box in _boxes(set(remainder))]


_NUMBER = re.compile(r"\.([0-9]+)(?![^.\n])")
"""The same in names of one line each, each after a dot; it begins with a plain character, which is ten times as fast to look for."""


def shape(name: str) -> str:
    """`name` with every number that is a segment of its own as `#`."""
    return _SEGMENT.sub("#", name)


def numbers_of(name: str) -> tuple[str, ...]:
    """What `shape` takes out of `name`, in order."""
    return tuple(_SEGMENT.findall(name))


Places = dict[tuple[str, ...], None]
"""Numbers that stand together in some names, each once and in order."""


class Alike(msgspec.Struct):
    """Names of one shape, and the numbers in all of them, one name's after the other's."""

    names: list[str]
    numbers: list[str]

    @property
    def countable(self) -> bool:
        """Whether each number may be an index: of at most six digits."""
        return max(map(len, set(self.numbers)), default=0) <= 6

    def numbered_as(self, other: Alike) -> bool:
        """Whether name for name the same numbers are in both."""
        return len(self.names) == len(other.names) and self.numbers == other.numbers

    def places(self, count: int) -> Places:
        """The first `count` numbers of each name."""
        step = len(self.numbers) // len(self.names)
        return dict.fromkeys(zip(*(self.numbers[i::step] for i in range(count)), strict=True))


def alike(names: list[str]) -> dict[str, Alike]:
    """`names` by shape, in order of first appearance."""
    text = "." + "\n.".join(names)
    parts = _NUMBER.split(text)
    shapes, numbers = ".#".join(parts[::2])[1:].split("\n."), parts[1::2]
    # A name may read like what stands between two of them, or like a shape.
    if text.count("\n") != len(names) - 1 or "#" in text:
        shapes = [shape(name) for name in names]
        numbers = [n for name in names if "#" not in name for n in numbers_of(name)]
    found: dict[str, tuple[list[str], list[str], int]] = {}
    at = 0
    for name, text in zip(names, shapes, strict=True):
        group = found.get(text)
        if group is None:
            group = found[text] = [], [], text.count("#")
        group[0].append(name)
        if group[2] and "#" not in name:
            group[1].extend(numbers[at : at + group[2]])
            at += group[2]
    return {text: Alike(members, inside) for text, (members, inside, _) in found.items()}


_WORD = re.compile(r"[A-Za-z]+")
_FEW = 24
"""Candidates that are compared letter by letter for one name."""


class Nearest:
    """Finds the most similar of many names, for many names.

    Names are compared by shape (numbers taken out), so the 60 shapes of a 45,000-tensor checkpoint cost 60 comparisons; of those only
    the few that share the rarest words are compared letter by letter.
    """

    def __init__(self, candidates: Iterable[str]) -> None:
        self._names = dict.fromkeys(candidates)
        self._members: dict[str, str] = {}
        for name in self._names:
            self._members.setdefault(_INDEX.sub("#", name), name)
        self._by_word: dict[str, list[str]] = defaultdict(list)
        for shape in self._members:
            for word in set(_WORD.findall(shape)):
                self._by_word[word].append(shape)
        self._known: dict[str, str | None] = {}

    def find(self, name: str) -> str | None:
        """The candidate most like `name`, with its numbers where such a candidate exists; None when none is alike."""
        shape = _INDEX.sub("#", name)
        if shape not in self._known:
            self._known[shape] = self._closest(shape)
        found = self._known[shape]
        if found is None:
            return None
        numbers = _INDEX.findall(name)
        if found.count("#") == len(numbers):
            filled = "".join(t + n for t, n in zip(found.split("#"), [*numbers, ""], strict=True))
            if filled in self._names:
                return filled
        return self._members[found]

    def _closest(self, shape: str) -> str | None:
        votes: Counter[str] = Counter()
        for word in sorted(set(_WORD.findall(shape)), key=lambda w: (len(self._by_word.get(w, ())), w)):
            shapes = self._by_word.get(word, ())
            if len(votes) + len(shapes) > 50 * _FEW and votes:
                break
            for other in shapes[: 50 * _FEW]:
                votes[other] += 1
        matcher = SequenceMatcher(b=shape, autojunk=False)
        best: tuple[float, str] = (0.6, "")
        for other, _ in sorted(votes.items(), key=lambda v: (-v[1], abs(len(v[0]) - len(shape)), v[0]))[:_FEW]:
            matcher.set_seq1(other)
            if matcher.real_quick_ratio() > best[0] and matcher.quick_ratio() > best[0]:
                best = max(best, (matcher.ratio(), other), key=lambda b: b[0])
        return best[1] or None


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`, None when none is alike. For more than one name build one `Nearest`."""
    return Nearest(candidates).find(name)

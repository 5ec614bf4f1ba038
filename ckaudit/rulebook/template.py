"""The two small languages of rule books: name templates (`layers.{layer}.{weight,bias}`) and integer arithmetic (`2 * heads + 1`)."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

_SLOT = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_NAME = re.compile(r"[A-Za-z_]\w*")

MAX_NAMES = 1_000_000
"""A template that names more parameters than this is a mistake, or an attack by a config."""


def _slots(text: str) -> Iterator[str]:
    if "{" in _SLOT.sub("", text) or "}" in _SLOT.sub("", text):
        raise ValueError(f"{text!r} has a brace without its fellow")
    yield from _SLOT.findall(text)


def sets(text: str) -> set[str]:
    """The names of the index sets that template `text` runs over. Raises ValueError for a template that is not well formed."""
    found = set()
    for slot in _slots(text):
        if "," in slot or _RANGE.fullmatch(slot):
            continue
        if not _NAME.fullmatch(slot):
            raise ValueError(f"{text!r} has a slot {{{slot}}} that is no set, no range and no choice")
        found.add(slot)
    return found


def expand(text: str, indices: Mapping[str, Sequence[int]]) -> list[str]:
    """Every name that template `text` stands for, in order; one set named twice runs in step.

    Raises ValueError for more than `MAX_NAMES`, KeyError for a set that is not in `indices`.
    """
    slots = list(dict.fromkeys(_slots(text)))
    choices = [_choices(slot, indices) for slot in slots]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > MAX_NAMES:
        raise ValueError(f"{text!r} stands for {total} names")
    names = []
    for picked in itertools.product(*choices):
        name = text
        for slot, value in zip(slots, picked, strict=True):
            name = name.replace(f"{{{slot}}}", value)
        names.append(name)
    return names


def _choices(slot: str, indices: Mapping[str, Sequence[int]]) -> list[str]:
    if "," in slot:
        return [part.strip() for part in slot.split(",")]
    if span := _RANGE.fullmatch(slot):
        if int(span[2]) - int(span[1]) >= MAX_NAMES:
            raise ValueError(f"{{{slot}}} stands for too many names")
        return [str(i) for i in range(int(span[1]), int(span[2]) + 1)]
    return [str(i) for i in indices[slot]]


def names(text: str) -> set[str]:
    """The values that expression `text` uses. Raises ValueError for anything but + - * // and brackets over names and integers."""
    return {node.id for node in ast.walk(_tree(text)) if isinstance(node, ast.Name)}


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The integer that expression `text` comes to. Raises ValueError, KeyError for a value that is not in `values`."""
    return _value(_tree(text).body, values, text)


def _tree(text: str) -> ast.Expression:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not an expression") from None
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Name, ast.Load)
    for node in ast.walk(tree):
        number = isinstance(node, ast.Constant) and type(node.value) is int
        if not number and not isinstance(node, allowed):
            raise ValueError(f"{text!r} may use only + - * // and brackets over names and integers")
    return tree


def _value(node: ast.expr, values: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    if isinstance(node, ast.Name):
        return values[node.id]
    assert isinstance(node, ast.BinOp)
    left, right = _value(node.left, values, text), _value(node.right, values, text)
    if isinstance(node.op, ast.FloorDiv):
        if right == 0:
            raise ValueError(f"{text!r} divides by zero")
        return left // right
    if isinstance(node.op, ast.Mult):
        return left * right
    return left + right if isinstance(node.op, ast.Add) else left - right

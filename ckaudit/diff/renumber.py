"""Stacks in which layers were left out or put in, and the others renumbered. Pure."""

from __future__ import annotations

from ckaudit.checks.facts import Facts, Stack, split


def renumbered(long: Stack, short: Stack) -> dict[int, int]:
    """Number of each layer of `short` -> its number in `long`, in the same order and with the same modules.

    The numbers as they are where that fits: of layers that are all alike nobody can tell which were left out. So too where nothing fits.
    """
    same = {i: i for i in short.indices}
    if len(short.members) >= len(long.members) or all(_modules(short, i) == _modules(long, i) for i in short.indices):
        return same
    left = iter(long.indices)
    found = {i: next((j for j in left if _modules(long, j) == _modules(short, i)), -1) for i in short.indices}
    return same if -1 in found.values() else found


def pairs(a: Facts, b: Facts) -> dict[str, dict[int, int]]:
    """Stacks whose layers have other numbers in `b`: path -> number in `a` -> number in `b`."""
    found: dict[str, dict[int, int]] = {}
    for path, ours in a.layers.items():
        theirs = b.layers.get(path)
        if theirs is None or len(theirs.members) == len(ours.members):
            continue
        fewer = len(theirs.members) < len(ours.members)
        moved = renumbered(ours, theirs) if fewer else renumbered(theirs, ours)
        if any(i != j for i, j in moved.items()):
            found[path] = {j: i for i, j in moved.items()} if fewer else moved
    return found


def _modules(stack: Stack, index: int) -> frozenset[str]:
    return frozenset(split(rest)[0] for rest in stack.members.get(index, ()))

"""Where an engine keeps what belongs to a module of the checkpoint: fused, stacked and renamed modules have other names there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ckaudit.checks.facts import shape, split
from ckaudit.naming import numbered_as
from ckaudit.plan import Plan

_STACKED = re.compile(r"w\d+_")

Home = tuple[str, str]
"""The path of the engine's module, and what its parameters' names begin with: `w13_` of stacked experts, else nothing."""


class Homes:
    """By module of the checkpoint, from what was loaded; a module of which nothing was is placed as its like in another layer is."""

    def __init__(self, plan: Plan) -> None:
        self._seen: dict[str, set[Home]] = defaultdict(set)
        self._like: dict[str, str] = {}
        for fate in plan.names:
            if fate.fate == "loaded" and fate.into is not None:
                module, leaf = split(fate.name)
                owner, _, own = fate.into.rpartition(".")
                stacked = _STACKED.match(own)
                prefix = own.removesuffix(leaf) if leaf and own.endswith(leaf) else stacked[0] if stacked else ""
                self._seen[module].add((owner, prefix))
                self._like.setdefault(shape(module), module)

    def of(self, module: str) -> set[Home]:
        """Empty where neither this module nor its like was loaded."""
        if module in self._seen:
            return self._seen[module]
        like = self._like.get(shape(module))
        if like is None:
            return set()
        return {(numbered_as(owner, like, module), prefix) for owner, prefix in self._seen[like]}

    def among(self, owned: Mapping[str, list[str]], module: str) -> list[tuple[str, str]]:
        """Those parameters of `owned` (see `by_owner`) that belong to `module`, each with its leaf as the checkpoint would call it."""
        found: dict[str, str] = {}
        for owner, prefix in self.of(module):
            for name in owned.get(owner, ()):
                own = name.rpartition(".")[2]
                if own.startswith(prefix):
                    found[name] = own.removeprefix(prefix)
        return list(found.items())


def by_owner(parameters: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by the path of the module that holds them."""
    owned: dict[str, list[str]] = defaultdict(list)
    for name in parameters:
        owned[name.rpartition(".")[0]].append(name)
    return owned

"""Which units of A and of B are the same weight: by name, by layout, by rename."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckaudit.changes import Link, Rule
from ckaudit.checks.facts import Facts
from ckaudit.checks.layout import numbers
from ckaudit.diff import renumber
from ckaudit.diff.layouts import Named, relaid
from ckaudit.diff.names import Renamed, alike, common, legacy, rename, synonyms
from ckaudit.diff.units import Unit, members, quantised, same_weight, units
from ckaudit.naming import printable

_ROUNDS = 8
"""Renames that are looked for; real checkpoints need four at most."""


_Seen = dict[str, tuple[str, tuple[str, ...]]]


class Relaid(msgspec.Struct, frozen=True):
    """Units that are one weight in two layouts: `old` and `new` together hold the same."""

    old: tuple[Unit, ...]
    new: tuple[Unit, ...]


class Pairing:
    """The units of two checkpoints, brought together until no rule brings two more together."""

    def __init__(self, a: Facts, b: Facts) -> None:
        self.a, self.b = a, b
        self.pairs: list[tuple[Unit, Unit]] = []
        """Units that are one weight, those apart that do not differ at all."""
        self.same: Counter[str | None] = Counter()
        """How many tensors of each dtype do not differ at all."""
        self.renamed: dict[tuple[Rule, str], list[Link]] = defaultdict(list)
        """By rule and its words."""
        self.relaid: dict[tuple[Rule, str], list[Relaid]] = defaultdict(list)
        self.old: dict[str, Unit] = {}
        """The units of A without a partner, by name; in `new` those of B."""
        self.new: dict[str, Unit] = {}
        self._rules: list[Renamed] = []
        self._seen: tuple[_Seen, _Seen] = ({}, {})
        """Of A and of B: name -> (the name that the renames so far made of it, those that changed it)."""
        self._start()
        self._pair_up()

    def _start(self) -> None:
        """Pairs of one name. Tensors that are the same on both sides are not even made units."""
        ours, theirs = self.a.checkpoint.tensors, self.b.checkpoint.tensors
        moved = renumber.pairs(self.a, self.b)
        inside = tuple(f"{path}." for path in moved)
        same = {
            name
            for name, tensor in ours.items()
            if (other := theirs.get(name)) is not None
            and tensor.dtype == other.dtype
            and tensor.shape == other.shape
            and not (inside and name.startswith(inside))
        }
        if len(same) < max(len(ours), len(theirs)):
            old, new = quantised(self.a), quantised(self.b)
            for name in [n for n in old if n in new and old[n].scheme == new[n].scheme]:
                del old[name], new[name]  # of one scheme on both sides: told tensor by tensor
            same.difference_update(m for unit in (*old.values(), *new.values()) for m in unit.members)
            self.old = units(self.a.checkpoint, (n for n in ours if n not in same), old)
            self.new = units(self.b.checkpoint, (n for n in theirs if n not in same), new)
            for path, layers in moved.items():
                self._renumber(path, layers)
            self._take([(unit, self.new[name]) for name, unit in self.old.items() if name in self.new])
        self.same.update(ours[name].dtype for name in same)

    def _renumber(self, path: str, layers: Mapping[int, int]) -> None:
        """Pairs of layers under `path`, by their numbers in A and in B."""
        kept: list[tuple[Unit, Unit]] = []
        changed: list[tuple[Unit, Unit]] = []
        for i, j in layers.items():
            start, end = f"{path}.{i}.", f"{path}.{j}."
            for rest in self.a.layers[path].members[i]:
                if start + rest in self.old and end + rest in self.new:
                    (kept if i == j else changed).append((self.old[start + rest], self.new[end + rest]))
        self._take(kept)
        moved = {i: j for i, j in layers.items() if i != j}
        text = f"layers {numbers(moved)} of `{printable(path)}` as {numbers(moved.values())}"
        self.renamed["layers", text] += self._take(changed)

    def _take(self, pairs: Iterable[tuple[Unit, Unit]]) -> list[Link]:
        """Pairs leave what is without a partner. What is quantised alike is paired tensor by tensor."""
        links: list[Link] = []
        for one, other in pairs:
            del self.old[one.name], self.new[other.name]
            if not same_weight(one, other):
                self.pairs.append((one, other))
                links.append(Link(one.members, other.members))
                continue
            both, ours, theirs = members(one, other, self.a.checkpoint, self.b.checkpoint)
            self.pairs += both
            links += [Link(x.members, y.members) for x, y in both]
            self.old |= {u.name: u for u in ours}
            self.new |= {u.name: u for u in theirs}
        return links

    def _pair_up(self) -> None:
        for n in range(_ROUNDS):
            if n < 2:  # at once, and under the prefix that most of the names got
                self._layouts(*self._through())
            if not self._rename():
                break
        for kind in (legacy, alike, synonyms):
            old, new = self._through()
            for found in list(kind(_units(old), _units(new))):
                self._renamed(found, old, new)
        self._layouts(*self._through())
        for found in self._rules:
            self._layouts(*self._alone(found))
        self._layouts(*map(common, self._through()))

    def _rename(self) -> bool:
        """One more rename, of the names as they are stored or else of those that the renames so far made of them."""
        found = rename(self.old, self.new)
        old: Named = {}
        new: Named = {}
        if found is None and self._seen != ({}, {}):
            old, new = self._through()
            found = rename(_units(old), _units(new))
        if found is None:
            return False
        self._renamed(found, old, new)
        self._rules.append(found)
        self._see(found)
        return True

    def _see(self, found: Renamed) -> None:
        """From now on the units without a partner are looked for by what this rename makes of their names as well."""
        assert found.rename is not None
        seen = self._seen[found.back]
        for name in self.new if found.back else self.old:
            known, texts = seen.get(name, (name, ()))
            changed = found.rename.apply(known)
            if changed != known:
                seen[name] = changed, (*texts, found.text)

    def _through(self) -> tuple[Named, Named]:
        """What has no partner, by the names that the renames so far made: name -> (unit, the renames that changed it)."""
        made: list[dict[str, tuple[Unit, tuple[str, ...]]]] = [{}, {}]
        for side, loose, seen in zip(made, (self.old, self.new), self._seen, strict=True):
            for name, unit in loose.items():
                known, texts = seen.get(name, (name, ()))
                side.setdefault(known, (unit, texts))
        return made[0], made[1]

    def _renamed(self, found: Renamed, old: Named, new: Named) -> None:
        before = {u.name: texts for u, texts in (*old.values(), *new.values()) if texts}
        groups: dict[str, list[tuple[Unit, Unit]]] = defaultdict(list)
        for one, other in found.pairs:
            if one.name in self.old and other.name in self.new:
                texts = (*before.get(one.name, ()), found.text, *before.get(other.name, ()))
                groups["; ".join(dict.fromkeys(texts))].append((one, other))
        for text, pairs in groups.items():
            self.renamed[found.rule, text] += self._take(pairs)

    def _alone(self, found: Renamed) -> tuple[Named, Named]:
        """What has no partner, by the names that one rename alone makes: of two prefixes, a unit has one or the other."""
        assert found.rename is not None
        old: Named = {n: (u, ()) for n, u in self.old.items()}
        new: Named = {n: (u, ()) for n, u in self.new.items()}
        changed = {found.rename.apply(n): (u, (found.text,)) for n, u in (self.new if found.back else self.old).items()}
        return (old, changed) if found.back else (changed, new)

    def _layouts(self, old: Named, new: Named) -> None:
        if not self.old or not self.new:
            return
        for many, one, fused in ((old, new, True), (new, old, False)):
            for found in relaid(many, one):
                arrow = f"{found.parts} → {found.whole}" if fused else f"{found.whole} → {found.parts}"
                self.relaid[found.rule, "; ".join((arrow, *found.renames))] += self._laid(found.groups, fused=fused)

    def _laid(self, groups: Sequence[tuple[tuple[Unit, ...], Unit]], *, fused: bool) -> list[Relaid]:
        many, one = (self.old, self.new) if fused else (self.new, self.old)
        done = []
        for parts, whole in groups:
            if whole.name in one and all(p.name in many for p in parts):
                del one[whole.name]
                for part in parts:
                    del many[part.name]
                done.append(Relaid(parts, (whole,)) if fused else Relaid((whole,), parts))
        return done


def _units(named: Named) -> Mapping[str, Unit]:
    return {name: unit for name, (unit, _) in named.items()}

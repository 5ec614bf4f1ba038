"""Which rules of a release's WeightsMapper fired on which name, and at which module each mapper sits.

The release's own mapper maps; ckaudit's copy of its semantics only names the rules, and is believed only where both agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ckaudit.errors import RuleError
from ckaudit.mapper import Kind, Mapper, Rule
from ckaudit.plan import RuleHit, Step

_FIELDS: tuple[tuple[str, Kind], ...] = (
    ("orig_to_new_renamings", "renaming"), ("orig_to_new_renaming", "renaming"), ("orig_to_new_regex", "regex"),
    ("orig_to_new_substr", "substring"), ("orig_to_new_stacked", "stacked"), ("orig_to_new_prefix", "prefix"),
    ("orig_to_new_suffix", "suffix"),
)  # fmt: skip


class RuleWatch:
    """Watches one load. `name_of` says which checkpoint tensor a tensor is; `path_of` gives a module's path in the model."""

    def __init__(
        self, mapper_class: Any, name_of: Callable[[Any], str | None], path_of: Callable[[Any], str | None]
    ) -> None:
        self._class = mapper_class
        self._name_of, self._path_of = name_of, path_of
        self._places: list[str] = []
        self._current: list[str | None] = []
        self.chains: dict[str, list[Step]] = {}
        self.dropped: dict[str, Step] = {}
        self._mappers: dict[tuple[int, str], tuple[Any, Mapper | None]] = {}
        self._rules: dict[tuple[str, str, str | None, str], None] = {}
        self._files: dict[str, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """The class's methods report here inside this context."""
        cls = self._class
        method = "_map_name_with_shard" if hasattr(cls, "_map_name_with_shard") else "_map_name"
        real_map, real_apply = getattr(cls, method), cls.apply

        def mapped(mapper: Any, key: str) -> Any:
            out = real_map(mapper, key)
            if self._places:
                self._note(mapper, key, out[0] if isinstance(out, tuple) else out)
            return out

        def apply(mapper: Any, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            return self._apply(real_apply, mapper, weights, self._place(sys._getframe(1)))

        setattr(cls, method, mapped)
        cls.apply = apply
        try:
            yield
        finally:
            setattr(cls, method, real_map)
            cls.apply = real_apply

    def _apply(
        self, real: Any, mapper: Any, weights: Iterable[tuple[str, Any]], place: str
    ) -> Iterator[tuple[str, Any]]:
        self._known(mapper, place)
        current: list[str | None] = [None]

        def fed() -> Iterator[tuple[str, Any]]:
            for name, data in weights:
                current[0] = self._name_of(data)
                yield name, data

        mapped = iter(real(mapper, fed()))
        while True:
            self._places.append(place)
            self._current = current
            try:
                item = next(mapped, None)
            finally:
                self._places.pop()
            if item is None:
                return
            yield item

    def _place(self, frame: Any) -> str:
        """The path of the module whose `load_weights` applies a mapper: the nearest `self` (or its `.module`) that the model holds."""
        while frame is not None:
            owner = frame.f_locals.get("self")
            for candidate in (owner, getattr(owner, "module", None)):
                path = self._path_of(candidate) if candidate is not None else None
                if path is not None:
                    module = sys.modules.get(type(candidate).__module__)
                    self._files.setdefault(path, getattr(module, "__name__", "").replace(".", "/") + ".py")
                    return path
            frame = frame.f_back
        return ""

    def _known(self, mapper: Any, place: str) -> Mapper | None:
        key = (id(mapper), place)
        if key not in self._mappers:
            rules = list(_rules(mapper))
            for rule in rules:
                self._rules[(rule.kind, rule.key, rule.to, place)] = None
            try:
                self._mappers[key] = (mapper, Mapper(rules, place))
            except RuleError:
                self._mappers[key] = (mapper, None)
        return self._mappers[key][1]

    def _note(self, mapper: Any, key: str, out: str | None) -> None:
        place, name = self._places[-1], self._current[0] if self._current else None
        copy = self._known(mapper, place)
        mapped = copy.map(key) if copy is not None else None
        if mapped is not None and mapped.name == out:
            steps = [s for s in mapped.steps if s.after != s.before]
        else:
            steps = [Step("mapper", "", place, key, out)] if out != key else []
        if name is not None:
            self.chains.setdefault(name, []).extend(steps)
            if out is None and steps:
                self.dropped[name] = steps[-1]

    def hits(self, release: str | None, further: Iterable[Step] = ()) -> tuple[RuleHit, ...]:
        """Every rule of every mapper that was applied, with the number of names it changed; `further` steps were seen in other loads."""
        counts = dict.fromkeys(self._rules, 0)
        by_step = {(kind, key, at): (kind, key, to, at) for kind, key, to, at in counts}
        for step in [*(s for chain in self.chains.values() for s in chain), *further]:
            rule = by_step.get((step.rule, step.key, step.at))
            if rule is not None:
                counts[rule] += 1
        return tuple(
            RuleHit(kind, key, to, at, n, f"vllm {release or 'live'}, {self._files.get(at, '')}")
            for (kind, key, to, at), n in counts.items()
        )


def _rules(mapper: Any) -> Iterator[Rule]:
    for field, kind in _FIELDS:
        held = getattr(mapper, field, None)
        if not held:
            continue
        if kind == "renaming":
            for renaming in held:
                sources, targets = renaming.source_patterns, renaming.target_patterns
                yield Rule(kind, _first(sources), _first(targets))
            continue
        for key, to in held.items():
            text = getattr(key, "pattern", key)
            if kind == "stacked":
                shard = to[1]
                shards = tuple(shard) if isinstance(shard, list) else (shard,)
                yield Rule(kind, text, to[0], shards)
            else:
                yield Rule(kind, text, to if to is None or isinstance(to, str) else str(to))


def _first(value: Any) -> str:
    return value if isinstance(value, str) else str(next(iter(value), ""))

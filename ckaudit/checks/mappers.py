"""The mappers of a rule book and the names that reach each of them, worked out from text alone: no config, no parameters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from ckaudit.mapper import Mapped, Mapper, Rule, ShardId
from ckaudit.naming import printable
from ckaudit.rulebook.book import Book, Section, rule


class Place(msgspec.Struct, frozen=True):
    """One mapper of the book, with the names it is given: as it sees them, and as the checkpoint has them."""

    loader: str
    releases: str
    at: str
    mapper: Mapper
    seen: dict[str, str]
    """Name at this module -> checkpoint name."""

    @property
    def where(self) -> str:
        """How a finding says where the mapper stands."""
        spot = f" on {self.at}" if self.at else ""
        return f"in `{printable(self.loader)}`{spot} ({self.releases})"


def _mapper(book: Book, loader: str) -> Mapper:
    held = book.loaders[loader]
    return Mapper([rule(row, held.source) for row in held.rules], held.at)


def places(book: Book, names: Sequence[str]) -> Iterator[Place]:
    """Each mapper once, with the releases of all sections that use it and the names that reach it in any of them."""
    releases: dict[str, list[str]] = defaultdict(list)
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    for section in book.sections:
        for loader in section.loaders:
            releases[loader].append(section.releases)
        for name in names:
            for loader, inner, *_ in way(book, section, name):
                seen[loader].setdefault(inner, name)
    for loader, held in book.loaders.items():
        if held.style == "auto":
            runs = releases[loader]
            text = runs[0] if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
            yield Place(loader, text, held.at, _mapper(book, loader), seen[loader])


def way(book: Book, section: Section, name: str) -> Iterator[tuple[str, str, Mapped | None, tuple[ShardId, ...]]]:
    """The loaders that `name` passes, outermost first: loader, name as its mapper sees it, what that makes of it (None for a loop), shards.

    The shards are those set so far, by a helper ahead of the mapper too.
    """
    by_depth = sorted(section.loaders, key=lambda n: book.loaders[n].at.count(".") if book.loaders[n].at else -1)
    current: str | None = name
    path = ""
    shards: tuple[ShardId, ...] = ()
    for loader in by_depth:
        held = book.loaders[loader]
        assert current is not None
        below = inside(held.at, path, current)
        if below is None:
            continue
        path, current = below
        for row in held.before:
            if row.stacked is not None and row.stacked in current:
                current = current.replace(row.stacked, row.to or "", 1)
                shards = rule(row).shards
                break
        mapped = _mapper(book, loader).map(current) if held.style == "auto" else None
        shards = (mapped.shards if mapped else ()) or shards
        yield loader, current, mapped, shards
        if mapped is None or mapped.name is None:
            return
        current = mapped.name


def inside(at: str, path: str, name: str) -> tuple[str, str] | None:
    """The module path and the rest of the name below it, where `path`.`name` lies under the module template `at`."""
    if not at:
        return "", name
    pattern = re.sub(r"\\\{[^{}]*\\\}", "[^.]+", re.escape(at))
    full = f"{path}.{name}" if path else name
    match = re.match(rf"({pattern})\.", full)
    return (match[1], full[match.end() :]) if match else None


def probe(item: Rule) -> str:
    """The shortest plain name that the rule fires on by itself."""
    if item.kind == "prefix":
        return item.key + ("weight" if not item.key or item.key.endswith(".") else ".weight")
    if item.kind == "suffix":
        return ("model" if item.key.startswith(".") else "model.") + item.key
    head = "layer" if item.key.startswith(".") else ""
    return head + item.key + ("weight" if item.key.endswith(".") else ".weight")

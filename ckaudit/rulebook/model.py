"""A rule book applied to one config: every parameter by name, every loader where it sits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ckaudit.errors import RuleError
from ckaudit.mapper import FAMILIES, Family, Mapper, Rule, family
from ckaudit.rulebook import template
from ckaudit.rulebook.book import Book, ConfigValue, IndexSet, Loader, Parameter, Section, Skip, rule

MAX_INDEX = 100_000
"""More layers than this is a config that lies."""

ROTARY = "rotary tables are computed, never loaded"


class UnresolvedError(Exception):
    """The config does not say what the book needs to know; the text is the reason, for `Plan.not_judged`."""


class Spec(msgspec.Struct, frozen=True):
    """One parameter: its shape, the shape a checkpoint tensor needs, and for a fused one the rows of each shard."""

    name: str
    shape: tuple[int, ...] | None
    tensor: tuple[int, ...] | None
    shards: dict[str, int]
    dtype: str | None
    checked: bool
    by_design: str | None
    buffer: bool


class Seat(msgspec.Struct, frozen=True):
    """One loader on one module, ready to run."""

    at: str
    loader: Loader
    mapper: Mapper
    before: tuple[Rule, ...]
    prefixes: tuple[tuple[str, str | None], ...]
    """Prefixes of names that are skipped, each with the reason when it is meant."""
    substrings: tuple[tuple[str, str | None], ...]
    suffixes: tuple[tuple[str, str | None], ...]
    beyond: tuple[tuple[str, int, str | None], ...]
    """Prefix, number of layers, reason: a name whose index is not below that number is left out."""
    ignore_suffixes: tuple[str, ...]


class Model(msgspec.Struct, frozen=True):
    """What the engine builds for one config in one release."""

    release: str
    family: Family
    seats: dict[str, Seat]
    parameters: dict[str, Spec]
    modules: frozenset[str]
    fused: frozenset[str]
    """Modules that hold a fused parameter."""
    aliases: dict[str, str]
    """Tied: later name -> the name that the parameter goes by."""


def resolve(book: Book, section: Section, release: str, config: Mapping[str, Any]) -> Model:
    """The model that `book` describes for `config` in `release`.

    Raises UnresolvedError when the config lacks or garbles a value that is needed, RuleError when two rows name one parameter.
    """
    held = family(release) if book.project == "vllm" else FAMILIES[-1]
    values = _Values(book.config, config)
    indices = _Indices(book.sets, values)
    parameters = _parameters(book, release, values, indices)
    aliases = {tie.alias: tie.of for tie in book.ties if values.holds(tie.when)}
    seats = {}
    for name in section.loaders:
        loader = book.loaders[name]
        cited = book.cite(loader.source, release)
        for at in indices.expand(loader.at):
            seats[at] = _seat(at, loader, held, cited, values, indices)
    extra = [name for text in book.modules for name in indices.expand(text)]
    modules = frozenset(_parents([*parameters, *aliases, *(f"{m}." for m in [*extra, *seats])]))
    fused = frozenset(name.rpartition(".")[0] for name, spec in parameters.items() if spec.shards)
    return Model(release, held, seats, parameters, modules, fused, aliases)


def _parents(names: Iterable[str]) -> set[str]:
    found = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
    return found


def _parameters(book: Book, release: str, values: _Values, indices: _Indices) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for i, row in enumerate(book.parameters):
        if not values.holds(row.when) or not _applies(row.releases, release):
            continue
        shape, tensor = values.shape(row.shape), values.shape(row.tensor)
        shards = {key: values.number(text) for key, text in row.shards.items()}
        for name in (name for text in row.names for name in indices.expand(text)):
            if name in found:
                raise RuleError(
                    f"{book.architecture}: parameters[{i}]: {name} is named by an earlier row too.", "Delete one."
                )
            found[name] = _spec(name, row, shape, tensor, shards)
    return found


def _applies(releases: str, release: str) -> bool:
    return SpecifierSet(releases).contains(Version(release), prereleases=True)


def _spec(
    name: str, row: Parameter, shape: tuple[int, ...] | None, tensor: tuple[int, ...] | None, shards: dict[str, int]
) -> Spec:
    return Spec(name, shape, tensor or shape, shards, row.dtype, row.checked, row.by_design, row.buffer)


def _seat(at: str, loader: Loader, held: Family, cited: str, values: _Values, indices: _Indices) -> Seat:
    rules = [rule(row, cited) for row in loader.rules]
    skips = [s for s in loader.skip if values.holds(s.when)]
    substrings = [(s.substring, s.by_design) for s in skips if s.substring]
    if loader.style == "auto" and held.rotary_dropped:
        rules += [Rule("substring", key, None, by_design=ROTARY, source="built in") for key in held.rotary]
    elif loader.style == "auto":
        substrings += [(key, ROTARY) for key in held.rotary]
    return Seat(
        at=at,
        loader=loader,
        mapper=Mapper(rules, at),
        before=tuple(rule(row, cited) for row in loader.before),
        prefixes=tuple((s.prefix, s.by_design) for s in skips if s.prefix),
        substrings=tuple(substrings),
        suffixes=tuple((s.suffix, s.by_design) for s in skips if s.suffix),
        beyond=tuple(_beyond(s, indices) for s in skips if s.beyond),
        ignore_suffixes=(*loader.ignore_suffixes, *((".bias",) if held.ignores_bias else ())),
    )


def _beyond(skip: Skip, indices: _Indices) -> tuple[str, int, str | None]:
    assert skip.beyond
    name = next(iter(template.sets(skip.beyond)))
    return skip.beyond.partition("{")[0], len(indices[name]), skip.by_design


class _Values:
    """The book's `[config]`, read from one config.json."""

    def __init__(self, wanted: Mapping[str, ConfigValue], config: Mapping[str, Any]) -> None:
        self.wanted = wanted
        self.config = config
        self.busy: set[str] = set()

    def __getitem__(self, name: str) -> int:
        value = self.raw(name)
        if not isinstance(value, int):
            raise UnresolvedError(f"config.json: {self.wanted[name].paths[0]} is {value!r}, not a number")
        return int(value)

    def raw(self, name: str) -> Any:
        """The value under the first path that exists and is not null, else the default."""
        wanted = self.wanted[name]
        for path in wanted.paths:
            value: Any = self.config
            for part in path.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        if wanted.default is None or name in self.busy:
            raise UnresolvedError(f"config.json has no {' or '.join(wanted.paths)}")
        if not isinstance(wanted.default, str):
            return wanted.default
        self.busy.add(name)
        try:
            return self.number(wanted.default)
        finally:
            self.busy.discard(name)

    def number(self, text: str | int) -> int:
        """The integer that an expression comes to."""
        if isinstance(text, int):
            return text
        try:
            used = {name: self[name] for name in template.names(text)}
            return template.evaluate(text, used)
        except ValueError as error:
            raise UnresolvedError(f"config.json: {error}") from None

    def shape(self, row: list[str | int] | None) -> tuple[int, ...] | None:
        return None if row is None else tuple(self.number(text) for text in row)

    def holds(self, when: str | None) -> bool:
        """Whether the condition `NAME` or `not NAME` holds; None always does."""
        if when is None:
            return True
        truth = bool(self.raw(when.removeprefix("not ")))
        return truth != when.startswith("not ")


class _Indices(dict[str, list[int]]):
    """The book's `[sets]`, worked out when first asked for."""

    def __init__(self, wanted: Mapping[str, IndexSet], values: _Values) -> None:
        super().__init__()
        self.wanted = wanted
        self.values_ = values

    def __missing__(self, name: str) -> list[int]:
        wanted = self.wanted[name]
        if wanted.count is not None:
            count = self.values_.number(wanted.count)
            if count > MAX_INDEX:
                raise UnresolvedError(f"config.json asks for {count} layers ({wanted.count})")
            self[name] = list(range(count))
        else:
            assert wanted.where is not None
            kinds = self.values_.raw(wanted.where)
            if not isinstance(kinds, list) or len(kinds) > MAX_INDEX:
                raise UnresolvedError(
                    f"config.json: {self.values_.wanted[wanted.where].paths[0]} is not a list of layer types"
                )
            self[name] = [i for i, kind in enumerate(kinds) if kind == wanted.equals]
        return self[name]

    def expand(self, text: str) -> list[str]:
        """Every name that a template stands for."""
        try:
            return template.expand(text, self)
        except ValueError as error:
            raise UnresolvedError(f"config.json: {error}") from None

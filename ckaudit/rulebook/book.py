"""The types of a rule book: one struct a table of the TOML. Unknown keys are refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ckaudit import mapper
from ckaudit.errors import RuleError
from ckaudit.mapper import Rule, ShardId

FORMAT = 1


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rule as a book writes it: the kind is the key under which its pattern stands."""

    renaming: str | None = None
    regex: str | None = None
    substring: str | None = None
    stacked: str | None = None
    prefix: str | None = None
    suffix: str | None = None
    to: str | None = None
    drop: bool | str = False
    """True drops the name; a text drops it by design and says why."""
    shard: str | int | list[int] | None = None
    shards: list[str | int | list[int]] | None = None
    why: str = ""
    example: list[str] | None = None
    """`[before, after]`: what this rule alone makes of a name; run as a test."""
    source: str = ""


class Skip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Names that a loader leaves out before it looks for their parameter. One of `prefix`, `suffix`, `substring`, `beyond`."""

    prefix: str | None = None
    suffix: str | None = None
    substring: str | None = None
    beyond: str | None = None
    """`encoder.layers.{vision_layer}.`: names with an index past the end of that set."""
    when: str | None = None
    """A yes-or-no value of `[config]`; `not NAME` for its opposite."""
    by_design: str | None = None


class Loader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One `load_weights` of the engine: the module it sits on and what it does to the names it is given."""

    source: str
    at: str = ""
    class_name: str = ""
    style: Literal["auto", "loop"] = "auto"
    """`auto`: a WeightsMapper, then AutoWeightsLoader. `loop`: a hand-written loop over stacked rows, the first that lands wins."""
    rules: list[Row] = []
    before: list[Row] = []
    """Stacked rows that a helper applies ahead of the mapper; the first that matches wins."""
    skip: list[Skip] = []
    ignore_prefixes: list[str] = []
    ignore_suffixes: list[str] = []
    replace: Literal["first", "all"] = "first"
    """Loop: which occurrences of a key are rewritten."""
    carry: bool = False
    """Loop: a rewriting that finds no parameter stays in the name for the rows after it."""
    unknown: Literal["raise", "ignore", "ignore-bias"] = "raise"
    """Loop: what a name without a parameter does; `ignore-bias` ignores it only where it ends in `.bias`."""
    lands: Literal["check", "assume", "assume-but-bias"] = "check"
    """Loop: `assume` takes a rewritten name for a parameter without looking and raises if it is none (`-but-bias`: looks up a bias)."""
    why: str = ""


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of the engine's model, as name templates that share everything else."""

    names: list[str]
    shape: list[str | int] | None = None
    tensor: list[str | int] | None = None
    """The shape that a checkpoint tensor must have where it is not the parameter's own."""
    shards: dict[str, str | int] = {}
    """Fused parameter: rows of dimension 0 for each shard, in order."""
    dtype: str | None = None
    checked: bool = False
    """The engine's start-up check raises when it stays unwritten."""
    by_design: str | None = None
    """Why staying unwritten is meant."""
    buffer: bool = False
    when: str | None = None
    releases: str = ""
    source: str = ""


class Tie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two names of one embedding: `alias` is the later one, `of` the one that module traversal reaches first."""

    alias: str
    of: str
    when: str | None = None


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of releases that load alike: the loaders that act, by name."""

    releases: str
    read: list[str]
    """Releases whose sources were read for it, oldest first."""
    loaders: list[str]
    replayed: list[str] = []
    """Releases whose own loader gave the same fate for every name."""
    why: str = ""

    @property
    def specifier(self) -> SpecifierSet:
        """The releases as PEP 440 specifiers."""
        return SpecifierSet(self.releases)


class ConfigValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a value stands in config.json: the first path that exists, else `default` (an expression when it is a text)."""

    path: str | list[str]
    default: str | int | bool | None = None

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path


class IndexSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A set of layer indices: the first `count`, or where a list of the config holds the text `equals`."""

    count: str | int | None = None
    where: str | None = None
    equals: str | None = None


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one architecture is loaded, over the releases of one engine."""

    format: int
    architecture: str
    sections: list[Section]
    loaders: dict[str, Loader]
    project: str = "vllm"
    also: list[str] = []
    """Further names of the same architecture."""
    sources: dict[str, str] = {}
    """Short names for paths inside the project."""
    config: dict[str, ConfigValue] = {}
    sets: dict[str, IndexSet] = {}
    modules: list[str] = []
    """Modules without parameters, where a loader tells them from names that do not exist."""
    parameters: list[Parameter] = []
    ties: list[Tie] = []

    def section(self, release: str) -> Section | None:
        """The section that covers `release`; None when none does. Raises RuleError for what is no version."""
        try:
            version = Version(release)
        except InvalidVersion:
            raise RuleError(f"{release!r} is not a release.", f"Newest covered: {self.newest}.") from None
        return next((s for s in self.sections if s.specifier.contains(version, prereleases=True)), None)

    @property
    def newest(self) -> str:
        """The newest release whose sources were read for this book."""
        return max((r for s in self.sections for r in s.read), key=Version)

    def cite(self, source: str, release: str) -> str:
        """Project, release and path of a row's source."""
        return f"{self.project} {release} {self.sources.get(source, source)}".strip()


def rule(row: Row, source: str = "") -> Rule:
    """The mapper's rule that `row` writes. Raises ValueError when the row has no kind, two kinds, or no outcome."""
    kinds = [k for k in mapper.KINDS if getattr(row, k) is not None]
    if len(kinds) != 1:
        raise ValueError("needs exactly one of " + ", ".join(mapper.KINDS))
    if (row.to is None) == (row.drop is False):
        raise ValueError("needs either `to` or `drop`")
    if row.shard is not None and row.shards is not None:
        raise ValueError("has both `shard` and `shards`")
    given = row.shards if row.shards is not None else [] if row.shard is None else [row.shard]
    shards: tuple[ShardId, ...] = tuple(tuple(s) if isinstance(s, list) else s for s in given)
    reason = row.drop if isinstance(row.drop, str) else None
    key: Any = getattr(row, kinds[0])
    return Rule(kinds[0], key, row.to, shards, reason, row.source or source, row.why)

"""What must hold across the rows of a rule book; each law names the row that breaks it."""

from __future__ import annotations

from typing import NoReturn

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ckaudit import mapper
from ckaudit.errors import RuleError
from ckaudit.rulebook import template
from ckaudit.rulebook.book import FORMAT, Book, IndexSet, Loader, Parameter, Row, Section, rule


def check(book: Book, file: str) -> None:
    """Raises RuleError, naming `file` and the row, for the first law that `book` breaks."""
    _Laws(book, file).check()


class _Laws:
    """What must hold across the rows of a book."""

    def __init__(self, book: Book, file: str) -> None:
        self.book = book
        self.file = file

    def fail(self, row: str, what: str, step: str = "rules/README.md describes the format.") -> NoReturn:
        raise RuleError(f"{self.file}: {row}: {what}.", step)

    def check(self) -> None:
        book = self.book
        if book.format != FORMAT:
            self.fail("format", f"{book.format} is not known", f"This ckaudit reads format {FORMAT}.")
        if not book.sections:
            self.fail("sections", "there are none", "Add a [[sections]] table.")
        for name, loader in book.loaders.items():
            self.loader(f"loaders.{name}", loader)
        used = [self.section(i, section) for i, section in enumerate(book.sections)]
        self.disjoint()
        for name in sorted(set(book.loaders) - set().union(*used)):
            self.fail(f"loaders.{name}", "no section uses it", "Name it in a section or delete it.")
        for i, parameter in enumerate(book.parameters):
            self.parameter(f"parameters[{i}]", parameter)
        for name, wanted in book.sets.items():
            self.index_set(f"sets.{name}", wanted)
        for name, value in book.config.items():
            if isinstance(value.default, str):
                self.expression(f"config.{name}", value.default)
        self.distinct()
        for i, tie in enumerate(book.ties):
            self.condition(f"ties[{i}]", tie.when)
        for name in book.modules:
            self.templated("modules", name)

    def loader(self, row: str, loader: Loader) -> None:
        self.templated(row, loader.at)
        for group, rows in (("rules", loader.rules), ("before", loader.before)):
            seen: set[tuple[str, str]] = set()
            for i, item in enumerate(rows):
                self.rule(f"{row}.{group}[{i}]", item, seen)
                if (loader.style == "loop" or group == "before") and item.stacked is None:
                    self.fail(f"{row}.{group}[{i}]", "only stacked rows can stand here")
        for i, skip in enumerate(loader.skip):
            self.condition(f"{row}.skip[{i}]", skip.when)
            given = [v for v in (skip.prefix, skip.suffix, skip.substring, skip.beyond) if v is not None]
            if len(given) != 1 or not given[0]:
                self.fail(f"{row}.skip[{i}]", "needs exactly one of prefix, suffix, substring, beyond, not empty")
            if skip.beyond is not None:
                self.templated(f"{row}.skip[{i}]", skip.beyond)

    def rule(self, row: str, item: Row, seen: set[tuple[str, str]]) -> None:
        try:
            made = rule(item)
            alone = mapper.Mapper([made])
        except ValueError as error:
            self.fail(row, str(error))
        except RuleError as error:
            self.fail(row, error.message.removesuffix("."), error.hint)
        if (made.kind, made.key) in seen:
            self.fail(row, f"the {made.kind} key {made.key!r} stands twice", "A mapper is a dict: one row a key.")
        seen.add((made.kind, made.key))
        if item.example is not None and (len(item.example) != 2 or alone.map(item.example[0]).name != item.example[1]):
            found = alone.map(item.example[0]).name if item.example else None
            self.fail(row, f"the example does not hold: it gives {found!r}", "Mend the example or the rule.")

    def section(self, i: int, section: Section) -> set[str]:
        row = f"sections[{i}]"
        try:
            specifier = section.specifier
            versions = [Version(r) for r in (*section.read, *section.replayed)]
        except (InvalidSpecifier, InvalidVersion) as error:
            self.fail(row, str(error), "Write releases as in `>=0.25.0, <0.27.0`.")
        if not section.read:
            self.fail(row, "`read` names no release", "Name the releases whose sources were read.")
        for version in versions:
            if not specifier.contains(version, prereleases=True):
                self.fail(row, f"{version} is outside {section.releases}")
        for name in section.loaders:
            if name not in self.book.loaders:
                self.fail(row, f"no loader is called {name!r}")
        spots = [self.book.loaders[n].at for n in section.loaders]
        for at in sorted({s for s in spots if spots.count(s) > 1}):
            self.fail(row, f"two loaders sit on {at!r}", "A module has one load_weights.")
        if "" not in spots:
            self.fail(row, "no loader sits on the model", 'Name one with at = "".')
        kinds = mapper.family(section.read[0]).kinds if self.book.project == "vllm" else mapper.KINDS
        for name in section.loaders:
            loader = self.book.loaders[name]
            for item in loader.rules if loader.style == "auto" else []:
                if rule(item).kind not in kinds:
                    self.fail(f"loaders.{name}", f"{section.read[0]} has no {rule(item).kind} rules")
        return set(section.loaders)

    def disjoint(self) -> None:
        """No release may fall into two sections: tried at every release and bound that the book names, and just beside each."""
        marks = {Version(r) for s in self.book.sections for r in (*s.read, *s.replayed)}
        marks |= {Version(b.version.removesuffix(".*")) for s in self.book.sections for b in s.specifier}
        tried = {v for m in marks for v in (m, Version(f"{m.base_version}.1"), Version(f"{m.base_version}.dev1"))}
        for version in sorted(tried):
            held = [i for i, s in enumerate(self.book.sections) if s.specifier.contains(version, prereleases=True)]
            if len(held) > 1:
                self.fail(f"sections{held}", f"{version} falls into more than one", "Ranges must not overlap.")

    def parameter(self, row: str, parameter: Parameter) -> None:
        self.condition(row, parameter.when)
        if not parameter.names:
            self.fail(row, "there are no names")
        for name in parameter.names:
            self.templated(row, name)
        try:
            SpecifierSet(parameter.releases)
        except InvalidSpecifier as error:
            self.fail(row, str(error))
        for text in (*(parameter.shape or ()), *(parameter.tensor or ()), *parameter.shards.values()):
            self.expression(row, text)

    def index_set(self, row: str, wanted: IndexSet) -> None:
        if (wanted.count is None) == (wanted.where is None) or (wanted.where is None) != (wanted.equals is None):
            self.fail(row, "needs either `count`, or `where` with `equals`")
        if wanted.count is not None:
            self.expression(row, wanted.count)
        self.condition(row, wanted.where)

    def distinct(self) -> None:
        """No two rows may name one parameter, tried with few indices: sets that select layers by type have none in common."""
        selected = [n for n, s in self.book.sets.items() if s.where is not None]
        indices = {n: [selected.index(n)] if n in selected else list(range(len(selected) + 1)) for n in self.book.sets}
        seen: dict[str, list[tuple[int, Parameter]]] = {}
        for i, row in enumerate(self.book.parameters):
            for name in (name for text in row.names for name in template.expand(text, indices)):
                for j, other in seen.get(name, []):
                    if not _exclusive(row, other):
                        self.fail(f"parameters[{i}]", f"{name} is named by parameters[{j}] too", "Delete one.")
                seen.setdefault(name, []).append((i, row))

    def templated(self, row: str, text: str) -> None:
        try:
            names = template.sets(text)
        except ValueError as error:
            self.fail(row, str(error))
        for name in sorted(names - set(self.book.sets)):
            self.fail(row, f"no set is called {name!r}", "Add it under [sets].")

    def expression(self, row: str, text: str | int) -> None:
        try:
            names = template.names(str(text))
        except ValueError as error:
            self.fail(row, str(error))
        for name in sorted(names - set(self.book.config)):
            self.fail(row, f"no config value is called {name!r}", "Add it under [config].")

    def condition(self, row: str, when: str | None) -> None:
        if when is not None and when.removeprefix("not ") not in self.book.config:
            self.fail(row, f"no config value is called {when.removeprefix('not ')!r}", "Add it under [config].")


def _exclusive(row: Parameter, other: Parameter) -> bool:
    """Whether two rows are never in force together: opposite conditions, or each for its own releases."""
    whens = {row.when, other.when}
    opposite = any(w is not None and f"not {w}" in whens for w in whens)
    return opposite or (row.releases != other.releases and bool(row.releases and other.releases))

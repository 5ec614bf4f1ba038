"""rules/*.toml -> validated, frozen rule books. The format is documented in `rules/README.md`.

Books are found by file name (the architecture in lower case), so that an audit reads one file however many there are.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path

import msgspec

from ckaudit import resources
from ckaudit.errors import RuleError
from ckaudit.rulebook.book import Book
from ckaudit.rulebook.laws import check

ALIASES = "aliases.toml"
"""Architecture -> further names of it, as the books' `also` have them: so that a book is found without reading the others."""

_LONGEST = 200
"""Characters of an architecture; a config's may be longer than a file name can be."""


@lru_cache(maxsize=64)
def find(architecture: str) -> Book | None:
    """The shipped book for `architecture`; None when there is none. Raises RuleError for a shipped book that is not well formed."""
    if not architecture.isidentifier() or len(architecture) > _LONGEST or f"{architecture.lower()}.toml" == ALIASES:
        return None
    folder = resources.folder("rules")
    named = {
        name: stem for stem, names in tomllib.loads((folder / ALIASES).read_text("utf-8")).items() for name in names
    }
    file = folder / f"{named.get(architecture, architecture).lower()}.toml"
    book = parse(file.read_text("utf-8"), file.name) if file.is_file() else None
    return book if book is not None and architecture in (book.architecture, *book.also) else None


def shipped() -> dict[str, Book]:
    """Every shipped book by architecture; reads them all."""
    folder = resources.folder("rules")
    files = [f for f in folder.iterdir() if f.name.endswith(".toml") and f.name != ALIASES]
    books = [parse(f.read_text("utf-8"), f.name) for f in files]
    return {book.architecture: book for book in sorted(books, key=lambda b: b.architecture)}


def read(path: Path) -> Book:
    """A user's own book. Raises RuleError, also for a file that is not there."""
    try:
        return parse(path.read_text("utf-8"), path.name)
    except OSError as error:
        raise RuleError(f"{path}: {error.strerror or error}.", "Give the path of a rule book (TOML).") from None
    except UnicodeDecodeError:
        raise RuleError(f"{path}: not UTF-8 text.", "A rule book is TOML in UTF-8.") from None


def parse(text: str, file: str) -> Book:
    """A rule book from TOML. Raises RuleError naming the file and the row."""
    try:
        book = msgspec.convert(tomllib.loads(text), Book)
    except msgspec.ValidationError as error:
        raise RuleError(f"{file}: {error}.", "rules/README.md describes the format.") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError is a ValueError; a number of 5,000 digits raises a plain one
        raise RuleError(f"{file}: not TOML: {error}.", "Mend the file.") from None
    check(book, file)
    return book

"""References in a file: what a healthy side scored once, so that CI need not run it again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ckaudit.errors import SourceError, UsageError
from ckaudit.scores import Score

DEFAULT_TOLERANCE = 0.01


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One reference: the score, and how far a candidate may be from it (relative) with the reason for a width of its own."""

    score: Score
    tolerance: float = DEFAULT_TOLERANCE
    tolerance_reason: str = ""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A reference file: entries by name (the target, unless `--entry` says otherwise)."""

    schema_version: int = 1
    entries: dict[str, Entry] = {}


def read(path: Path) -> File:
    """The file at `path`. Raises SourceError when it cannot be read and UsageError when it is not a reference file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(
            f"The reference file {path} cannot be read: {error.strerror}.", "Make one with --save-reference."
        ) from error
    try:
        found = msgspec.json.decode(data, type=File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a reference file: {error}.", "Make one with --save-reference.") from error
    if found.schema_version != 1:
        raise UsageError(
            f"{path} has schema version {found.schema_version}.", "This release of ckaudit reads version 1."
        )
    return found


def entry(path: Path, name: str) -> Entry:
    """The entry `name` of the file, or its only one. Raises UsageError naming those that exist."""
    entries = read(path).entries
    if name in entries:
        return entries[name]
    if len(entries) == 1:
        return next(iter(entries.values()))
    raise UsageError(
        f"{path} has no entry {name!r}; it has {', '.join(map(repr, sorted(entries))) or 'none'}.",
        "Choose with --entry.",
    )


def save(path: Path, name: str, new: Entry) -> None:
    """Add or replace the entry `name`, keeping the others; the file is replaced whole or not at all."""
    if new.tolerance != DEFAULT_TOLERANCE and not new.tolerance_reason:
        raise UsageError("A tolerance of its own needs a reason.", 'Add --tolerance-reason "why".')
    entries = dict(read(path).entries) if path.exists() else {}
    entries[name] = new
    text = msgspec.json.format(msgspec.json.encode(File(entries=dict(sorted(entries.items())))), indent=1)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(text + b"\n")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise SourceError(
            f"The reference file {path} cannot be written: {error.strerror}.", "Check the folder."
        ) from error

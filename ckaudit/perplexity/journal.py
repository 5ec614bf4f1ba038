"""Rows that were scored already, kept so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ckaudit.perplexity.encode import Encoded
from ckaudit.scores import RowScore, ids_hash


class Journal:
    """One file of row scores under `folder`, named after everything that the numbers depend on (`key`)."""

    def __init__(self, folder: Path, key: Iterable[str]) -> None:
        self.path = folder / f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:32]}.jsonl"
        self.known = {row.id: row for row in self._read()}

    def _read(self) -> Iterator[RowScore]:
        with suppress(OSError):
            for line in self.path.read_bytes().splitlines():
                with suppress(msgspec.DecodeError):  # the last line of a run that was killed may be cut
                    yield msgspec.json.decode(line, type=RowScore)

    def score(self, rows: list[Encoded], score: Callable[[list[Encoded]], Iterator[RowScore]]) -> Iterator[RowScore]:
        """The score of each of `rows`, from the journal where it stands there, else from `score`, and written down at once."""
        left = [row for row in rows if not self._stands(row)]
        for row in rows:
            if self._stands(row):
                yield self.known[row.row.id]
        if not left:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            for result in score(left):
                file.write(msgspec.json.encode(result) + b"\n")
                file.flush()
                yield result

    def _stands(self, row: Encoded) -> bool:
        return row.row.id in self.known and self.known[row.row.id].ids_hash == ids_hash(row.ids)

    def finish(self) -> None:
        """Forget the rows: the run is complete."""
        self.path.unlink(missing_ok=True)

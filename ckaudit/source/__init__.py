"""Where a checkpoint's bytes come from: a Hub repo or a local folder, behind one small protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from ckaudit.progress import NullProgress, Progress

MAX_WHOLE = 200_000_000
"""Bytes. A file that is read whole may not be longer: what decides loading is text, and the longest index is far shorter."""


class FileInfo(msgspec.Struct, frozen=True):
    """One file of the target: its path inside the target (`/` separated), size in bytes, and sha256 where the Hub knows it."""

    path: str
    size: int | None
    sha256: str | None = None


class Span(msgspec.Struct, frozen=True):
    """A range of bytes of one file to read: `start` up to, not including, `stop` (clipped to the end of the file)."""

    path: str
    start: int
    stop: int


class SpanQueue(deque[Span]):
    """Spans to read that grow while they are read. Unlike a generator's, its end is not for ever."""

    def __iter__(self) -> Iterator[Span]:
        return self

    def __next__(self) -> Span:
        if not self:
            raise StopIteration
        return self.popleft()


class Source(Protocol):
    """Read access to one target, fixed to one revision for the whole audit."""

    name: str
    """The target as the user named it, without the revision."""
    kind: str
    """`hub` or `local`."""
    revision: str | None
    """The commit that every read uses; None for a local target."""

    def files(self) -> dict[str, FileInfo]:
        """Every file of the target by path, sorted. Raises SourceError."""
        ...

    def folder(self, paths: Iterable[str]) -> Path:
        """A local folder that holds these files whole, fetched first where the target is not local. Raises SourceError."""
        ...

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes | Unreadable]]:
        """The bytes of each span, side by side, in the order they arrive.

        `spans` is asked for more each time a result has been handled, even if it had run dry by then, so one call can carry follow-ups:
        the consumer adds them to the queue that `spans` drains. At most twice `jobs` spans are taken ahead of the results.

        A file that cannot be read although the target can (a server that ignores ranges, a dangling link, no permission)
        yields Unreadable in its place; circumstances that concern the whole target raise SourceError.
        """
        ...


class Unreadable(msgspec.Struct, frozen=True):
    """Why one file could not be read: becomes a finding or a skip, never silence."""

    reason: str


def open_source(
    target: str,
    *,
    jobs: int = 32,
    offline: bool = False,
    progress: Progress = NullProgress(),  # noqa: B008  stateless
) -> Source:
    """The source that `target` names, see `ckaudit.source.target`: what exists on this disk wins over a repo of the same name.

    Opening a Hub repo costs one request: it fixes the commit and lists the files. Raises UsageError for a target that makes no sense and
    SourceError for one that cannot be reached.
    """
    from ckaudit.source.target import parse

    return parse(target, progress).open(jobs=jobs, offline=offline, progress=progress)

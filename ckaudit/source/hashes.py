"""The SHA-256 of whole files of a target, from any source: everything is read once, a few megabytes at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ckaudit.progress import Progress
from ckaudit.source import Source, Span, SpanQueue, Unreadable

STEP = 8 << 20
"""Bytes of one read. One read of a file is under way at a time, so that its bytes come in order."""


def sha256(source: Source, paths: Iterable[str], progress: Progress) -> dict[str, str | Unreadable]:
    """Path -> its SHA-256 in hexadecimal, or why it could not be read. Raises SourceError for what concerns the whole target."""
    files = source.files()
    wanted = list(paths)
    digests = {path: hashlib.sha256() for path in wanted}
    found: dict[str, str | Unreadable] = {}
    queue = SpanQueue(Span(path, 0, STEP) for path in wanted)
    total = sum(files[path].size or 0 for path in wanted)
    with progress.task("Hashing, in MB", total >> 20) as task:
        told = read = 0
        for span, data in source.read_spans(queue):
            if isinstance(data, Unreadable):
                found[span.path] = data
                continue
            digests[span.path].update(data)
            read += len(data)
            task.advance((read >> 20) - told)
            told = read >> 20
            size = files[span.path].size
            if len(data) < STEP or span.stop == size:
                found[span.path] = digests[span.path].hexdigest()
            else:
                queue.append(Span(span.path, span.stop, span.stop + STEP))
    return {path: found[path] for path in wanted}

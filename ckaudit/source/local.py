"""A checkpoint on disk: a folder, one file, or a snapshot in the Hugging Face cache.

Nothing is followed out of the target: a repo may hold links to anywhere. The exception is the cache, whose snapshots are links to blobs.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from ckaudit.errors import SourceError
from ckaudit.naming import printable
from ckaudit.source import FileInfo, Span, Unreadable

MAX_ENTRIES = 100_000
"""Files and folders walked before a folder is taken for something else than a checkpoint."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class LocalSource:
    """Read access to one folder (hidden folders apart), or to those of its own files that `only` accepts by name."""

    def __init__(
        self,
        root: Path,
        *,
        name: str,
        kind: str = "local",
        revision: str | None = None,
        only: Callable[[str], bool] | None = None,
        stores: tuple[Path, ...] = (),
        absent: Mapping[str, FileInfo] | None = None,
    ) -> None:
        """`stores` are folders outside `root` that links may lead into; `absent` are files known to exist, but not here."""
        self.name = as_text(name)
        self.kind = kind
        self.revision = revision
        self._root = Path(os.path.realpath(root))
        self._only = only
        self._homes = (self._root, *(Path(os.path.realpath(s)) for s in stores))
        self._absent = absent or {}
        self._seen: dict[str, tuple[Path, os.stat_result]] = {}
        self._broken: dict[str, str] = {}
        self._files: dict[str, FileInfo] | None = None
        self._notes: Path | Literal[False] | None = None
        """Where the Hub's client keeps what it knows of files that it put here; False where it did not."""

    def files(self) -> dict[str, FileInfo]:
        """Every file by path, sorted; one that cannot be read has no size. Raises SourceError. The folder is walked once."""
        if self._files is None:
            found = {path: self._info(path, at) for path, at in self._walk() if self._only is None or self._only(path)}
            for path, info in self._absent.items():
                if path not in found:
                    found[path] = info
                    self._broken[path] = "not in the local cache of the Hub"
            self._files = dict(sorted(found.items()))
        return self._files

    def folder(self, paths: Iterable[str]) -> Path:
        """The folder itself, once each of these files is known to be readable there. Raises SourceError."""
        known = self.files()
        for path in paths:
            if path not in known or path in self._broken:
                reason = self._broken.get(path, "it is not there")
                raise SourceError(
                    f"{printable(path)} of {self.name} cannot be read: {reason}.",
                    "Put the file in its place, or fetch it again.",
                )
        return self._root

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes | Unreadable]]:
        """The bytes of each span, in the order asked."""
        for span in spans:
            yield span, self._read(span)

    def _read(self, span: Span) -> bytes | Unreadable:
        self.files()
        if span.path not in self._seen:
            return Unreadable(self._broken.get(span.path, "there is no such file"))
        at, then = self._seen[span.path]
        return read_range(at, span.start, span.stop, then)

    def _walk(self) -> Iterator[tuple[str, Path]]:
        folders, entries = [("", self._root)], 0
        while folders:
            prefix, folder = folders.pop()
            try:
                with os.scandir(folder) as rows:
                    for row in rows:
                        entries += 1
                        if entries > MAX_ENTRIES:
                            raise SourceError(
                                f"{self.name} holds more than {MAX_ENTRIES:,} files.",
                                "Give the folder of one checkpoint.",
                            )
                        path = prefix + as_text(row.name)
                        if not row.is_dir(follow_symlinks=False):
                            yield path, Path(row.path)
                        elif self._only is None and not row.name.startswith("."):
                            folders.append((path + "/", Path(row.path)))
            except OSError as error:
                if not prefix:
                    raise SourceError(
                        f"{self.name} cannot be read: {_cause(error)}.", "Check the path and its permissions."
                    ) from None
                self._broken[prefix] = _cause(error)
                yield prefix, folder

    def _downloaded(self, path: str) -> str | None:
        """The sha256 that the Hub's client wrote down when it put a large file here (`hf download --local-dir`): commit, etag, time."""
        if self._notes is None:
            notes = self._root / ".cache" / "huggingface" / "download"
            self._notes = notes if notes.is_dir() else False
        if not self._notes:
            return None
        try:
            lines = (self._notes / f"{path}.metadata").read_bytes()[:4096].decode("utf-8", "replace").split("\n")
        except OSError:
            return None
        return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None

    def _info(self, path: str, at: Path) -> FileInfo:
        """What is known of one entry; where it cannot be read, why, for later."""
        sha256 = None
        try:
            if at.is_symlink():
                real = Path(os.path.realpath(at))
                if not any(real.is_relative_to(home) for home in self._homes):
                    self._broken[path] = "a link that leads out of the target, so it is not followed"
                elif _SHA256.fullmatch(blob := Path(os.readlink(at)).name):
                    sha256 = blob  # the cache names the blob of a large file by its sha256
            else:
                sha256 = self._downloaded(path)
            seen = os.stat(at)
        except OSError as error:
            self._broken[path] = "a link to nothing" if at.is_symlink() and not at.exists() else _cause(error)
            return FileInfo(path, None)
        if not stat.S_ISREG(seen.st_mode):
            self._broken.setdefault(path, "not a regular file")
        if path in self._broken:
            return FileInfo(path, None)
        self._seen[path] = (at, seen)
        return FileInfo(path, seen.st_size, sha256)


def read_range(at: Path, start: int, stop: int, then: os.stat_result | None = None) -> bytes | Unreadable:
    """The bytes `start` to `stop` (clipped) of a regular file; Unreadable if it is not one, or not the one seen `then`."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(at, flags)  # O_NONBLOCK: a pipe that took the file's place must not hang the audit
    except OSError as error:
        return Unreadable(_cause(error))
    with os.fdopen(handle, "rb", buffering=0) as file:
        try:
            now = os.fstat(handle)
            if not stat.S_ISREG(now.st_mode):
                return Unreadable("not a regular file")
            wanted = max(0, min(stop, now.st_size) - start)
            file.seek(start)
            data = file.read(wanted) or b""
            while len(data) < wanted and (piece := file.read(wanted - len(data))):
                data += piece
            after = os.fstat(handle)
        except OSError as error:
            return Unreadable(_cause(error))
    if _identity(after) != _identity(then or now) or len(data) != wanted:
        return Unreadable("it changed while it was read")
    return data


def _identity(seen: os.stat_result) -> tuple[int, int, int, int]:
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns


def _cause(error: OSError) -> str:
    """The system's own words (`Permission denied`), without the path, which may be hostile."""
    return (error.strerror or type(error).__name__).lower()


def as_text(name: str) -> str:
    """A path as text that any report can hold: bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")

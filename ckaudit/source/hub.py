"""A model repo on the Hugging Face Hub: the only module that knows its client, its addresses and its cache.

One request fixes the commit and lists the files; every read is of that commit. The session is the client's own, so that its proxies,
certificates and hooks hold; see `transfer` for what happens on the way and `faults` for how it is told.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import huggingface_hub
import msgspec
from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import hf_hub_url, repo_folder_name

import ckaudit
from ckaudit.errors import SourceError, UsageError, words_of
from ckaudit.naming import printable
from ckaudit.progress import NullProgress, Progress
from ckaudit.source import FileInfo, Source, Span, Unreadable, target
from ckaudit.source.faults import Asked, Refusal, explain
from ckaudit.source.local import read_range
from ckaudit.source.pace import Clock, Pace
from ckaudit.source.parallel import side_by_side
from ckaudit.source.transfer import Transfer, Wanted

MAX_JOBS = 96
"""The client's pool holds 100 connections; more readers would wait in it until they time out."""

_KEPT = 64 << 20
"""Bytes of files read whole that are kept, so that none is asked for twice."""

# The root of the client's exceptions, from httpx or httpx2, whichever this huggingface_hub was built on.
_CLIENT_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


class _Lfs(msgspec.Struct):
    sha256: str | None = None
    size: int | None = None


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Listing(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]
    id: str | None = None
    gated: bool | str | None = None


def open_hub(name: str, revision: str | None, *, jobs: int, offline: bool, progress: Progress) -> Source:
    """The repo `name` at `revision` (None: its default branch); when offline, as the local cache holds it."""
    told = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    if offline or told or constants.HF_HUB_OFFLINE:
        return _from_cache(name, revision)
    return HubSource(name, revision, jobs=jobs, progress=progress)


def _from_cache(name: str, revision: str | None) -> Source:
    cache = Path(constants.HF_HUB_CACHE)
    repo = cache / repo_folder_name(repo_id=name, repo_type="model")
    commit = target.cached_commit(repo, revision)
    at = f"{name}@{printable(revision)}" if revision else name
    step = "Unset HF_HUB_OFFLINE (or --offline) to read it from the Hub."
    if commit is None:
        raise SourceError(f"{at} is not in the local cache ({cache}), and the Hub must not be asked.", step)
    source = target.open_snapshot(repo, commit, name, kind="hub")
    if not any(path.endswith((".safetensors", ".safetensors.index.json")) for path in source.files()):
        raise SourceError(f"The local cache holds no weights of {at}, and the Hub must not be asked.", step)
    return source


class HubSource:
    """Read access to one commit of one model repo."""

    kind = "hub"

    def __init__(
        self,
        name: str,
        revision: str | None = None,
        *,
        jobs: int = 32,
        progress: Progress | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Asks the Hub for the commit and its files. Raises SourceError. `clock` is for tests."""
        self.name = name
        self._jobs = max(1, min(jobs, MAX_JOBS))
        self._endpoint, host = _endpoint()
        token = _token()
        _check_client()
        self._asked = Asked(
            repo=name,
            host=host,
            endpoint=self._endpoint,
            revision=revision,
            token=bool(token),
        )
        self._transfer = Transfer(
            get_session,
            (_CLIENT_ERROR, OSError),
            Pace(progress or NullProgress(), clock),
            headers={"user-agent": _user_agent(), "accept-encoding": "identity"},
            secret={"authorization": f"Bearer {token}"} if token else {},
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        listing = self._list(revision)
        self.revision: str | None = listing.sha
        # A repo that was renamed answers to its old name by redirects: one for the listing will do.
        now = target.repo(listing.id or "")
        self._repo = now.name if now is not None and now.revision is None else name
        self._gated = listing.gated
        found = (FileInfo(s.rfilename, s.size, s.lfs.sha256 if s.lfs else None) for s in listing.siblings)
        self._files = {info.path: info for info in sorted(found, key=lambda info: info.path)}
        self._snapshot = _snapshot(name, listing.sha)
        self._kept: dict[str, bytes] = {}
        self._room = _KEPT

    def files(self) -> dict[str, FileInfo]:
        """Every file of the commit by path, sorted, with its size and, for large ones, its sha256."""
        return self._files

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes | Unreadable]]:
        """The bytes of each span, `jobs` at once, in the order they arrive; the first SourceError ends all of them."""
        return side_by_side(self._read, spans, self._jobs)

    def folder(self, paths: Iterable[str]) -> Path:
        """A folder of the local cache that holds these files whole, fetched by the client itself (resumed, hf-xet, with its own progress).

        Raises SourceError.
        """
        try:
            found = huggingface_hub.snapshot_download(
                self._repo,
                revision=self.revision,
                allow_patterns=[re.sub(r"([*?\[])", r"[\1]", path) for path in paths],  # paths, not globs
                cache_dir=constants.HF_HUB_CACHE,
                endpoint=self._endpoint,
                max_workers=min(self._jobs, 8),
            )
        except (HfHubHTTPError, _CLIENT_ERROR, OSError, ValueError) as error:
            raise SourceError(
                f"The files of {self.name} cannot be downloaded: {printable(words_of(error))}",
                "Run again: it goes on where it stopped.",
            ) from error
        return Path(found)

    def _list(self, revision: str | None) -> _Listing:
        url = f"{self._endpoint}/api/models/{self.name}"
        url += f"/revision/{quote(revision, safe='')}" if revision else ""
        body = self._transfer.fetch(Wanted(url=f"{url}?blobs=true", asked=self._asked), threading.Event())
        if isinstance(body, Refusal):
            raise explain(body)
        try:
            if isinstance(body, bytes):
                listing = msgspec.json.decode(body, type=_Listing)
                if re.fullmatch(r"[0-9A-Za-z]{1,64}", listing.sha):
                    return listing
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        raise SourceError(
            f"{self._asked.host} answers, but not with the listing of a model repo.",
            "Check that HF_ENDPOINT is the address of a Hub.",
        )

    def _read(self, span: Span, stop: threading.Event) -> bytes | Unreadable:
        info = self._files.get(span.path)
        if info is None:
            return Unreadable("the repo has no such file")
        if _unsafe(span.path):
            return Unreadable("its name is not a path inside the repo")
        end = span.stop if info.size is None else min(span.stop, info.size)
        if end <= span.start:
            return b""
        if (kept := self._kept.get(span.path)) is not None:
            return kept[span.start : end]
        cached = self._cached(info)
        if cached is not None and isinstance(data := read_range(cached, span.start, end), bytes):
            return data
        asked = self._about(span.path)
        url = hf_hub_url(self._repo, span.path, revision=self.revision, endpoint=self._endpoint)
        got = self._transfer.fetch(Wanted(url=url, asked=asked, start=span.start, stop=end, size=info.size), stop)
        if isinstance(got, Refusal):
            return self._refused(got)
        if isinstance(got, Unreadable):
            return got
        all_of_it = span.start == 0 and (end == info.size or (info.size is None and len(got) < end))
        if all_of_it and len(got) <= self._room:
            self._room -= len(got)
            self._kept[span.path] = got
        return got

    def _refused(self, answer: Refusal) -> Unreadable:
        """One file that is refused in a repo that is open is that file's fault; in a gated repo, or for a bad token, it is not."""
        error = explain(answer)
        one_file = answer.status == 403 or answer.code == "GatedRepo"
        if answer.status in (401, 403) and not (one_file and self._gated is False):
            raise error
        return Unreadable(error.message.rstrip("."))

    def _about(self, path: str) -> Asked:
        return msgspec.structs.replace(self._asked, path=path)

    def _cached(self, info: FileInfo) -> Path | None:
        """The file in the local cache, when that holds this commit's, whole."""
        if self._snapshot is None:
            return None
        path = self._snapshot / info.path
        try:
            return path if info.size is not None and path.stat().st_size == info.size else None
        except OSError:
            return None


def _endpoint() -> tuple[str, str]:
    """The Hub's address and its host, for messages. Raises UsageError when HF_ENDPOINT is no web address."""
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    try:
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0 and endpoint.isprintable():
            return endpoint, parts.netloc.rpartition("@")[2]
    except ValueError:
        pass
    raise UsageError(
        f"HF_ENDPOINT is {printable(endpoint)}, which is no web address.", "Set it to one like https://huggingface.co."
    )


def _token() -> str | None:
    """The user's token, as the client finds it."""
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError("The token (HF_TOKEN, or the stored one) holds characters that no token has.", "Set it anew.")
    return token


def _check_client() -> None:
    """Makes the client's session, which the environment can prevent."""
    try:
        get_session()
    except (OSError, ValueError, ImportError) as error:
        cause = printable(words_of(error, 200)).rstrip(".")
        raise SourceError(
            f"The connection to the Hub cannot be set up: {cause}.", "Check HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE."
        ) from error


def _snapshot(name: str, commit: str) -> Path | None:
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots" / commit
    return folder if folder.is_dir() else None


def _unsafe(path: str) -> bool:
    return any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path


def _user_agent() -> str:
    """As the client words it; its own function for this asks the Hub for a list first, which costs a request."""
    return f"ckaudit/{ckaudit.__version__}; hf_hub/{huggingface_hub.__version__}"

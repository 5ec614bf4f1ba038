"""Bytes of one file over HTTP, whatever happens on the way: redirects, retries, rate limits, cut bodies, servers that ignore ranges.

Knows no HTTP library by name: it is handed a client that has `stream`, as httpx and httpx2 do (huggingface_hub uses either, by release).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from ckaudit.errors import SourceError
from ckaudit.progress import Progress
from ckaudit.source import MAX_WHOLE, Unreadable
from ckaudit.source.faults import Asked, Refusal, explain, refusal, retry_after, unreachable

TRIES = 5
MAX_REDIRECTS = 10
MAX_WAIT = 300.0
"""Seconds that rate limits may hold up one source in all; the Hub counts requests in windows of five minutes."""

_BACKOFF = (0.5, 1.0, 2.0, 4.0)
_GAIN = 1 << 16
"""Bytes. An attempt that got this far before it broke does not count against `TRIES`."""
_SMALL = 1 << 16
"""Bytes of an error or a redirect that are read, so that its connection can be used again."""
_MOVED = (301, 302, 303, 307, 308)
_RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes `start` to `stop` of the file at `url`. `size` is the whole file's, where known; `stop` None means all of a file."""

    url: str
    asked: Asked
    start: int = 0
    stop: int | None = None
    size: int | None = None

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop in (None, self.size)


class Clock:
    """Time as reads see it; tests put one in its place that does not sleep."""

    def now(self) -> float:
        """Seconds since some point in the past."""
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Sleeps, unless `stop` is set meanwhile."""
        stop.wait(seconds)


class Cancelled(Exception):  # noqa: N818  not an error: nobody waits for the result any more
    """The read was given up because another one failed or the user interrupted."""


class _Again(Exception):  # noqa: N818
    """This attempt failed in a way that another may not."""

    def __init__(self, error: SourceError, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.after = error, after


class _Limited(Exception):  # noqa: N818
    def __init__(self, after: float | None) -> None:
        super().__init__()
        self.after = after


class _Refused(Exception):  # noqa: N818
    def __init__(self, answer: Refusal) -> None:
        super().__init__()
        self.answer = answer


class Transfer:
    """Reads over one client, by many threads. `headers` go with each request; `secret` ones only to the host they are meant for."""

    def __init__(
        self,
        client: Callable[[], Any],
        errors: tuple[type[Exception], ...],
        *,
        headers: Mapping[str, str],
        secret: Mapping[str, str],
        timeout: float | None,
        progress: Progress,
        clock: Clock | None = None,
    ) -> None:
        """`errors` are what the client raises; `timeout` is in seconds without a byte."""
        self._client, self._errors = client, errors
        self._headers, self._secret = dict(headers), dict(secret)
        self._timeout, self._progress, self._clock = timeout, progress, clock or Clock()
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._waited = 0.0
        self._reached: set[tuple[str, str | None, int | None]] = set()
        self._moved: dict[str, str] = {}

    def fetch(self, wanted: Wanted, stop: threading.Event) -> bytes | Unreadable | Refusal:
        """The bytes; Unreadable when the server cannot give this part of this file; Refusal for a status that ends it (4xx).

        Raises SourceError for what would befall any other read as well, Cancelled once `stop` is set.
        """
        body = bytearray()
        tries = limits = 0
        while wanted.stop is None or wanted.start + len(body) < wanted.stop:
            self._hold(stop)
            mark, signed = len(body), wanted.url in self._moved
            try:
                problem = self._attempt(wanted, body, stop)
            except _Limited as limit:
                limits += 1
                self._limit(limit.after if limit.after else min(2.0 ** min(limits, 6), 60.0), wanted.asked)
                continue
            except _Again as again:
                self._moved.pop(wanted.url, None)
                tries = tries + 1 if len(body) - mark < _GAIN else 1
                if tries >= TRIES:
                    raise _spent(again.error) from again
                self._clock.wait(max(_BACKOFF[tries - 1], min(again.after or 0.0, 60.0)), stop)
                continue
            except _Refused as refused:
                self._moved.pop(wanted.url, None)
                if signed:
                    continue  # an address that ran out: ask the Hub for a new one
                return refused.answer
            if problem is not None or wanted.stop is None:
                return problem or bytes(body)
        return bytes(body)

    def _attempt(self, wanted: Wanted, body: bytearray, stop: threading.Event) -> Unreadable | None:
        """Adds to `body` what one request, redirects followed, gives."""
        url = self._moved.get(wanted.url, wanted.url)
        if wanted.whole and not body:
            span = {}
        else:
            span = {"range": f"bytes={wanted.start + len(body)}-{'' if wanted.stop is None else wanted.stop - 1}"}
        trusted = _origin(url) == _origin(wanted.url)
        for _ in range(MAX_REDIRECTS):
            headers = {**self._headers, **(self._secret if trusted else {}), **span}
            try:
                with self._client().stream(
                    "GET", url, headers=headers, timeout=self._timeout, follow_redirects=False
                ) as response:
                    self._reached.add(_origin(url))
                    if response.status_code not in _MOVED:
                        asked = wanted.asked if trusted else _elsewhere(wanted.asked, url)
                        return self._take(response, wanted, asked, body, ranged=bool(span), stop=stop)
                    url, trusted = self._follow(response, url, trusted, wanted)
            except self._errors as error:
                raise self._failed(error, url, wanted.asked) from error
        raise SourceError(
            f"{wanted.asked.host} redirects {wanted.asked.what} in a circle.", "Check HF_ENDPOINT and proxy settings."
        )

    def _follow(self, response: Any, url: str, trusted: bool, wanted: Wanted) -> tuple[str, bool]:
        """Where a redirect leads, and whether the token may go there: once it has left the host, it stays away."""
        _small_body(response)
        try:
            target = urljoin(url, response.headers.get("location", ""))
            parts, origin = urlsplit(target), _origin(target)
        except ValueError:
            target, parts, origin = "", urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or origin is None:
            raise SourceError(
                f"{wanted.asked.host} redirects {wanted.asked.what} to no web address.", "Check HF_ENDPOINT."
            )
        trusted = trusted and origin == _origin(wanted.url)
        if not trusted:
            self._moved[wanted.url] = target
        return target, trusted

    def _take(
        self, response: Any, wanted: Wanted, asked: Asked, body: bytearray, *, ranged: bool, stop: threading.Event
    ) -> Unreadable | None:
        status = response.status_code
        if status == 416:
            _small_body(response)
            return Unreadable(f"{asked.host} says that the file ends before byte {wanted.start + len(body):,}")
        if status == 429:
            _small_body(response)
            raise _Limited(retry_after(response.headers))
        if status not in (200, 206):
            answer = refusal(status, response.headers, _small_body(response), asked)
            if status == 408 or status >= 500:
                raise _Again(explain(answer), retry_after(response.headers))
            raise _Refused(answer)
        if response.headers.get("content-encoding", "identity") != "identity":
            return Unreadable(f"{asked.host} compresses the file, though asked not to")
        if status == 206 and ranged:
            return self._take_part(response, wanted, asked, body, stop)
        if status == 206 or not wanted.whole:
            return Unreadable(f"{asked.host} does not honour range requests, so reading it would mean downloading it")
        body.clear()  # the server cannot resume: it sends the whole again
        limit = MAX_WHOLE if wanted.size is None else wanted.size
        got = self._pour(response, body, limit, stop)
        if got > limit:
            return Unreadable(f"{asked.host} sends more than the {limit:,} bytes that it may hold")
        if wanted.size is not None and len(body) < wanted.size:
            raise _Again(_cut(asked))
        return None

    def _take_part(
        self, response: Any, wanted: Wanted, asked: Asked, body: bytearray, stop: threading.Event
    ) -> Unreadable | None:
        host = asked.host
        told = _RANGE.fullmatch(response.headers.get("content-range", "").strip())
        at = wanted.start + len(body)
        if told is None or int(told[1]) != at or int(told[2]) < at:
            return Unreadable(f"{host} sends another range than the one asked for")
        if told[3] != "*" and wanted.size is not None and int(told[3]) != wanted.size:
            return Unreadable(f"{host} lists it with {wanted.size:,} bytes, but serves {int(told[3]):,}")
        end = int(told[2]) + 1 if wanted.stop is None else min(int(told[2]) + 1, wanted.stop)
        if self._pour(response, body, end - at, stop) > end - at:
            return Unreadable(f"{host} sends more than the range asked for")
        if wanted.start + len(body) < end:
            raise _Again(_cut(asked))
        return None

    @staticmethod
    def _pour(response: Any, body: bytearray, limit: int, stop: threading.Event) -> int:
        """Adds at most `limit` bytes to `body`; returns how many came, which is more than `limit` when there were more."""
        got = 0
        for piece in response.iter_raw():
            if stop.is_set():
                raise Cancelled
            body += piece[: limit - got]
            got += len(piece)
            if got > limit:
                break
        return got

    def _failed(self, error: Exception, url: str, asked: Asked) -> Exception:
        """What to raise for an error of the client: worth another try, unless nothing was ever heard from that host."""
        parts = urlsplit(url)
        host = asked.host if parts.netloc == urlsplit(asked.endpoint).netloc else parts.netloc.rpartition("@")[2]
        proxies = {} if proxy_bypass(parts.hostname or "") else getproxies()
        explained = unreachable(error, asked, proxies.get(parts.scheme) or proxies.get("all"), host)
        connecting = any(
            kind.__name__ in ("ConnectError", "ConnectTimeout", "ProxyError") for kind in type(error).__mro__
        )
        return explained if connecting and _origin(url) not in self._reached else _Again(explained)

    def _limit(self, after: float, asked: Asked) -> None:
        """Holds every read back for `after` seconds. Raises SourceError when that goes beyond what is worth waiting for."""
        with self._lock:
            now = self._clock.now()
            more = now + after - max(now, self._not_before)
            if more <= 0:
                return
            if self._waited + more > MAX_WAIT:
                raise SourceError(
                    f"{asked.host} limits the rate of requests and asks to wait {after:,.0f} s.",
                    "Try again later, with fewer --jobs; with HF_TOKEN set, the limit is higher.",
                )
            self._waited += more
            self._not_before = now + after
        self._progress.note(f"{asked.host} limits the rate of requests: waiting {after:,.0f} s.")

    def _hold(self, stop: threading.Event) -> None:
        if (delay := self._not_before - self._clock.now()) > 0:
            self._clock.wait(delay, stop)
        if stop.is_set():
            raise Cancelled


def _spent(error: SourceError) -> SourceError:
    return SourceError(f"{error.message.rstrip('.')} (tried {TRIES} times).", error.hint)


def _cut(asked: Asked) -> SourceError:
    return SourceError(f"{asked.host} cut {asked.what} short.", "Try again later.")


def _elsewhere(asked: Asked, url: str) -> Asked:
    return msgspec.structs.replace(asked, host=urlsplit(url).netloc.rpartition("@")[2], token=False)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _small_body(response: Any) -> bytes:
    """The beginning of a body that is not worth more; read to its end when short, so that the connection stays usable."""
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > _SMALL:
            break
    return bytes(body)

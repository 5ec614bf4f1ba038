"""Bytes of one file over HTTP, whatever happens on the way: redirects, retries, rate limits, cut bodies, servers that ignore ranges.

Knows no HTTP library by name: it is handed a client that has `stream`, as httpx and httpx2 do (huggingface_hub uses either, by release).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from ckaudit.errors import SourceError
from ckaudit.source import MAX_WHOLE, Unreadable
from ckaudit.source.faults import Asked, Refusal, explain, refusal, retry_after, unreachable
from ckaudit.source.pace import Pace

MAX_REDIRECTS = 10

_GAIN = 1 << 16
"""Bytes. A try that got this far before it broke does not count against the others."""
_SMALL = 1 << 16
"""Bytes of an error or a redirect that are read, so that its connection can be used again."""
_MOVED = (301, 302, 303, 307, 308)
_RANGE = re.compile(r"bytes\s+(?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes `start` to `stop` of the file at `url`; `stop` None is its end. `size` is the whole file's, where known."""

    url: str
    asked: Asked
    start: int = 0
    stop: int | None = None
    size: int | None = None


class Cancelled(Exception):  # noqa: N818  not an error: nobody waits for the result any more
    """The read was given up because another one failed or the user interrupted."""


class _Again(Exception):  # noqa: N818
    """This try failed in a way that another may not."""

    def __init__(self, error: SourceError, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.after = error, after


class _Limited(Exception):  # noqa: N818
    def __init__(self, after: float | None) -> None:
        super().__init__()
        self.after = after


class _Reading:
    """How far one read has come: `body` so far, and where it ends, as far as is known."""

    def __init__(self, wanted: Wanted, stop: threading.Event) -> None:
        self.wanted, self.stop = wanted, stop
        self.body = bytearray()
        self.end = wanted.stop

    @property
    def at(self) -> int:
        """The byte of the file to be read next."""
        return self.wanted.start + len(self.body)

    @property
    def done(self) -> bool:
        return self.end is not None and self.at >= self.end

    @property
    def whole(self) -> bool:
        """Whether all of the file is wanted."""
        return self.wanted.start == 0 and self.end in (None, self.wanted.size)

    @property
    def range(self) -> dict[str, str]:
        """The header that asks for the rest; none to ask for all of a file."""
        if self.whole and not self.body:
            return {}
        return {"range": f"bytes={self.at}-{'' if self.end is None else self.end - 1}"}

    def pour(self, response: Any, limit: int) -> bool:
        """Adds at most `limit` bytes of a response; False when it had more, which are left where they are."""
        room = limit
        for piece in response.iter_raw():
            if self.stop.is_set():
                raise Cancelled
            self.body += piece[:room]
            if len(piece) > room:
                return False
            room -= len(piece)
        return True


class Transfer:
    """Reads over one client, by many threads. `headers` go with each request; `secret` ones only to the host they are meant for."""

    def __init__(
        self,
        client: Callable[[], Any],
        errors: tuple[type[Exception], ...],
        pace: Pace,
        *,
        headers: Mapping[str, str],
        secret: Mapping[str, str],
        timeout: float | None,
    ) -> None:
        """`errors` are what the client raises; `timeout` is in seconds without a byte."""
        self._client, self._errors, self._pace = client, errors, pace
        self._headers, self._secret, self._timeout = dict(headers), dict(secret), timeout
        self._reached: set[tuple[str, str | None, int | None]] = set()
        self._moved: dict[str, str] = {}

    def fetch(self, wanted: Wanted, stop: threading.Event) -> bytes | Unreadable | Refusal:
        """The bytes; Unreadable when the server cannot give this part of this file; Refusal for a status that ends it (4xx).

        Raises SourceError for what would befall any other read as well, Cancelled once `stop` is set.
        """
        reading = _Reading(wanted, stop)
        failed = limits = 0
        while not reading.done:
            self._pace.hold(stop)
            if stop.is_set():
                raise Cancelled
            before, signed = len(reading.body), wanted.url in self._moved
            try:
                problem = self._attempt(reading)
            except _Limited as limit:
                limits += 1
                self._pace.limit(limit.after, limits, wanted.asked.host)
                continue
            except _Again as again:
                self._moved.pop(wanted.url, None)
                failed = failed + 1 if len(reading.body) - before < _GAIN else 1
                self._pace.back_off(failed, again.error, again.after, stop)
                continue
            if isinstance(problem, Refusal) and self._moved.pop(wanted.url, "") and signed:
                continue  # an address that ran out: ask the Hub for a new one
            if problem is not None:
                return problem
        return bytes(reading.body)

    def _attempt(self, reading: _Reading) -> Unreadable | Refusal | None:
        """Takes what one request, redirects followed, gives."""
        asked, home = reading.wanted.asked, reading.wanted.url
        url = self._moved.get(home, home)
        trusted = url == home
        for _ in range(MAX_REDIRECTS):
            headers = {**self._headers, **(self._secret if trusted else {}), **reading.range}
            try:
                with self._client().stream(
                    "GET", url, headers=headers, timeout=self._timeout, follow_redirects=False
                ) as response:
                    self._reached.add(_origin(url))
                    if response.status_code not in _MOVED:
                        return _take(response, reading, asked if trusted else _elsewhere(asked, url))
                    _beginning(response)
                    url = _target(response, url, asked)
            except self._errors as error:
                raise self._failed(error, url, asked) from error
            if not trusted or _origin(url) != _origin(home):
                trusted = False  # what has left the host stays without the token, even if it comes back
                self._moved[home] = url
        raise SourceError(f"{asked.host} redirects {asked.what} in a circle.", "Check HF_ENDPOINT and proxy settings.")

    def _failed(self, error: Exception, url: str, asked: Asked) -> Exception:
        """What to raise for an error of the client: worth another try, unless nothing was ever heard from that host."""
        parts = urlsplit(url)
        host = asked.host if parts.netloc == urlsplit(asked.endpoint).netloc else parts.netloc.rpartition("@")[2]
        proxies = {} if proxy_bypass(parts.hostname or "") else getproxies()
        explained = unreachable(error, asked, proxies.get(parts.scheme) or proxies.get("all"), host)
        kinds = {kind.__name__ for kind in type(error).__mro__}
        connecting = kinds & {"ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol"}
        return explained if connecting and _origin(url) not in self._reached else _Again(explained)


def _take(response: Any, reading: _Reading, asked: Asked) -> Unreadable | Refusal | None:
    """Takes the body of an answer that is no redirect; None when it went as it should."""
    status = response.status_code
    if status == 416:
        return _beyond(response, reading, asked)
    if status == 429:
        _beginning(response)
        raise _Limited(retry_after(response.headers))
    if status not in (200, 206):
        answer = refusal(status, response.headers, _beginning(response), asked)
        if status == 408 or status >= 500:
            raise _Again(explain(answer), retry_after(response.headers))
        return answer
    if response.headers.get("content-encoding", "identity") != "identity":
        return Unreadable(f"{asked.host} compresses the file, though asked not to")
    ranged = bool(reading.range)
    if status == 206 and ranged:
        return _take_part(response, reading, asked)
    if status == 200 and (not ranged or _is_all(response, reading)):
        return _take_all(response, reading, asked)
    return Unreadable(f"{asked.host} does not honour range requests, so reading it would mean downloading it")


def _take_part(response: Any, reading: _Reading, asked: Asked) -> Unreadable | None:
    size, at = reading.wanted.size, reading.at
    told = _RANGE.fullmatch(response.headers.get("content-range", "").strip())
    if told is None or told[1] is None or int(told[1]) != at or int(told[2]) < at:
        return Unreadable(f"{asked.host} sends another range than the one asked for")
    stop = int(told[2]) + 1
    if told[3] != "*":
        total = int(told[3])
        if size is not None and total != size:
            return Unreadable(f"{asked.host} lists it with {size:,} bytes, but serves {total:,}")
        reading.end = total if reading.end is None else min(reading.end, total)
    stop = stop if reading.end is None else min(stop, reading.end)
    if not reading.pour(response, stop - at):
        return Unreadable(f"{asked.host} sends more than the range asked for")
    if reading.at < stop:
        raise _Again(_cut(asked))
    reading.end = reading.end or reading.at
    return None


def _is_all(response: Any, reading: _Reading) -> bool:
    """Whether 200 to a range is no harm: all of the file is wanted anyway, or all of it is no more than was asked for."""
    if reading.whole or reading.wanted.start or reading.end is None:
        return reading.whole
    length = response.headers.get("content-length", "")
    return reading.wanted.size is None and length.isdigit() and int(length) <= reading.end


def _take_all(response: Any, reading: _Reading, asked: Asked) -> Unreadable | None:
    reading.body.clear()  # a server that cannot resume sends all of it again
    size = reading.wanted.size
    limit = size if size is not None else min(reading.end or MAX_WHOLE, MAX_WHOLE)
    if not reading.pour(response, limit):
        return Unreadable(f"{asked.host} sends more than the {limit:,} bytes that it may hold")
    if size is not None and reading.at < size:
        raise _Again(_cut(asked))
    reading.end = reading.at
    return None


def _beyond(response: Any, reading: _Reading, asked: Asked) -> Unreadable | None:
    """A range that begins behind the end: nothing is left to read where the size was not known, else the listing is wrong."""
    _beginning(response)
    told = _RANGE.fullmatch(response.headers.get("content-range", "").strip())
    if reading.wanted.size is None and told is not None and told[3] != "*" and int(told[3]) <= reading.at:
        reading.end = reading.at
        return None
    return Unreadable(f"{asked.host} says that the file ends before byte {reading.at:,}")


def _target(response: Any, url: str, asked: Asked) -> str:
    """Where a redirect leads."""
    try:
        target = urljoin(url, str(response.headers.get("location", "")))
        scheme, host, _ = _origin(target)
    except ValueError:
        target, scheme, host = "", "", None
    if scheme not in ("http", "https") or not host or not target.isprintable():
        raise SourceError(f"{asked.host} redirects {asked.what} to no web address.", "Check HF_ENDPOINT.")
    return target


def _cut(asked: Asked) -> SourceError:
    return SourceError(f"{asked.host} cut {asked.what} short.", "Try again later.")


def _elsewhere(asked: Asked, url: str) -> Asked:
    return msgspec.structs.replace(asked, host=urlsplit(url).netloc.rpartition("@")[2], token=False)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port. Raises ValueError for what is no address."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _beginning(response: Any) -> bytes:
    """The beginning of a body that is not worth more; read to its end when short, so that the connection stays usable."""
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > _SMALL:
            break
    return bytes(body)

"""What a Hub, or the way to it, can answer instead of bytes, as one line that names the cause and the next step. Pure, no I/O."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from urllib.parse import urlsplit

import msgspec

from ckaudit.errors import SourceError, words_of
from ckaudit.naming import printable


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request was about, for messages."""

    repo: str
    host: str
    """`huggingface.co`, or the host and port of a mirror; what every message names instead of an address that may be signed."""
    endpoint: str
    revision: str | None = None
    path: str | None = None
    """A file of the repo; None for the listing."""
    token: bool = False
    """Whether a token was sent."""

    @property
    def what(self) -> str:
        return f"{printable(self.path)} of {self.repo}" if self.path else self.repo


class Refusal(msgspec.Struct, frozen=True):
    """An answer with an error status: the Hub's own code for it (`X-Error-Code`), and its own words."""

    asked: Asked
    status: int
    code: str
    words: str


def refusal(status: int, headers: Mapping[str, str], body: bytes, asked: Asked) -> Refusal:
    """What an error answer says, from its headers and the beginning of its body."""
    words = headers.get("x-error-message", "")
    if not words:
        try:
            told = json.loads(body)
            words = told.get("error", "") if isinstance(told, dict) else ""
        except (ValueError, RecursionError):
            words = ""
    words = printable(words if isinstance(words, str) else "").strip()
    return Refusal(asked, status, headers.get("x-error-code", ""), words[:200].rstrip("."))


def explain(answer: Refusal) -> SourceError:
    """Why the Hub refuses, and what to do about it. One line."""
    asked, status = answer.asked, answer.status
    page = f"{asked.endpoint}/{asked.repo}"
    if answer.code == "GatedRepo" and not asked.token:
        return SourceError(
            f"{asked.what} is gated.", f"Accept its terms at {page}, then set HF_TOKEN (or run hf auth login)."
        )
    if answer.code == "GatedRepo":
        return SourceError(f"{asked.what} is gated, and your token was not given access.", f"Ask for it at {page}.")
    if answer.words.startswith("Access to this resource is disabled"):
        return SourceError(f"{asked.repo} is disabled on {asked.host}.", "Its page may say why; audit another copy.")
    if status == 401 and asked.token and answer.code != "RepoNotFound":
        return SourceError(
            f"{asked.host} refuses the token.",
            "It may have expired: set HF_TOKEN to a new one, or unset it for a public repo.",
        )
    if answer.code == "RevisionNotFound":
        return SourceError(
            f"{asked.repo} has no revision {printable(asked.revision or 'main')}.",
            "Give a branch, a tag or a commit of it.",
        )
    if answer.code == "EntryNotFound" or (status == 404 and asked.path):
        return SourceError(
            f"{asked.what} is not there, although it is listed.", "Upload it again, or audit another revision."
        )
    if answer.code == "RepoNotFound" or (status in (401, 404) and not asked.path):
        return _no_such_repo(asked)
    if status in (401, 403):
        said = f" ({answer.words})" if answer.words else ""
        return SourceError(f"{asked.host} denies access to {asked.what}{said}.", "Use a token that may read this repo.")
    if status == 407:
        return SourceError(
            "The proxy wants a user and a password.", "Set HTTPS_PROXY to http://user:password@host:port."
        )
    said = f": {answer.words}" if answer.words else ""
    return SourceError(
        f"{asked.host} answered {status} for {asked.what}{said}.", _LATER if status >= 500 else _ENDPOINT
    )


_LATER = "Try again later."
_ENDPOINT = "Check that HF_ENDPOINT is the address of a Hub."


def _no_such_repo(asked: Asked) -> SourceError:
    found = f"There is no folder {asked.repo} here, and {asked.host} has no such model repo"
    if asked.token:
        return SourceError(
            f"{found} that your token may read.", "Check the spelling, and the token's rights if it is private."
        )
    return SourceError(
        f"{found} that can be read without a token.", "Check the spelling; for a private repo set HF_TOKEN."
    )


def unreachable(error: BaseException, asked: Asked, proxy: str | None, host: str) -> SourceError:
    """Why no answer came from `host`, from the chain of exceptions below an HTTP client's own one."""
    way = f" through the proxy {_bare(proxy)}" if proxy else ""
    cause, step = _why(error)
    if proxy and step is _CHECK:
        step = "Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY."
    return SourceError(f"Cannot reach {host}{way} for {asked.what}: {cause}.", step)


_CHECK = "Check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 reads what the local cache holds."


def _why(error: BaseException) -> tuple[str, str]:
    chain = list(_chain(error))
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if any(isinstance(link, ssl.SSLCertVerificationError) for link in chain):
        return "its certificate is not trusted", "Behind a company proxy, point SSL_CERT_FILE at its root certificate."
    if any(isinstance(link, ssl.SSLError) for link in chain):
        return "the TLS handshake failed", _CHECK
    if any(isinstance(link, socket.gaierror) for link in chain):
        return "its name cannot be resolved", _CHECK
    if any(isinstance(link, ConnectionRefusedError) for link in chain):
        return "the connection was refused", _CHECK
    if "ConnectTimeout" in names:
        return "it did not answer in time", _CHECK
    if "TimeoutException" in names or any(isinstance(link, TimeoutError) for link in chain):
        return "it stopped answering", "Try again, or raise HF_HUB_DOWNLOAD_TIMEOUT (seconds)."
    if any(isinstance(link, ConnectionResetError | BrokenPipeError) for link in chain):
        return "the connection was reset", _LATER
    if "RemoteProtocolError" in names:
        return "the answer was cut short", _LATER
    return printable(words_of(error, 200)).rstrip("."), _CHECK


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _bare(address: str) -> str:
    """A proxy's address without the password in it."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that an answer asks to wait: `Retry-After` as seconds or a date, else the reset of the Hub's `RateLimit` header."""
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value) if value[:1].isdigit() else _until(value, now)
        if isfinite(seconds):
            return max(0.0, seconds)
    except (ValueError, TypeError, OverflowError):
        pass
    reset = [part for part in headers.get("ratelimit", "").split(";") if part.strip().startswith("t=")]
    try:
        return float(reset[0].strip()[2:]) if reset else None
    except ValueError:
        return None


def _until(date: str, now: datetime | None) -> float:
    when = parsedate_to_datetime(date)
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (when - (now or datetime.now(UTC))).total_seconds()

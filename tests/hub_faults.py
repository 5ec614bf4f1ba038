"""What can go wrong between a client and a Hub, for `HubServer.fail`.

`status`, `error`, `rate_limited`, `gated`, `bad_token`, `cut`, `reset`, `drop`, `slow`, `redirect`, `whole` (200 to a range), and any
`Fault(...)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """What happens instead of the right answer. Without `status`, the right answer is sent, changed as the other fields say."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay: float = 0.0
    ignore_range: bool = False
    cut: int | None = None
    """Close the connection after this many bytes of body, although the headers promise all of them."""
    reset: bool = False
    """Close by RST rather than FIN."""
    drop: bool = False
    """Close without any answer."""
    extra: bytes = b""
    """Bytes sent beyond the right body, and counted in Content-Length."""


def status(code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Fault:
    """Answers with this status."""
    return Fault(status=code, headers=headers or {}, body=body)


def error(code: int, name: str, message: str) -> Fault:
    """An error with the headers that the Hub sends, and that its client understands."""
    body = json.dumps({"error": message}).encode()
    return Fault(status=code, headers={"X-Error-Code": name, "X-Error-Message": message} if name else {}, body=body)


def rate_limited(retry_after: str | int) -> Fault:
    """429, to be tried again after so many seconds (or at an HTTP date)."""
    return status(429, {"Retry-After": str(retry_after)})


def gated(code: int = 403) -> Fault:
    """A file behind terms that were not accepted: 401 without a token, 403 with one."""
    return error(code, "GatedRepo", "Access to this model is restricted and you are not in the authorized list.")


def bad_token() -> Fault:
    """The token is not (or no longer) valid."""
    return error(401, "", "Invalid credentials in Authorization header")


def cut(after: int) -> Fault:
    """The body ends after `after` bytes."""
    return Fault(cut=after)


def reset(after: int) -> Fault:
    """The connection is reset after `after` bytes of body."""
    return Fault(cut=after, reset=True)


def drop() -> Fault:
    """The connection closes without an answer."""
    return Fault(drop=True)


def slow(seconds: float) -> Fault:
    """The right answer, late."""
    return Fault(delay=seconds)


def redirect(location: str, code: int = 302) -> Fault:
    """Sends the client elsewhere; an empty body comes along."""
    return status(code, {"Location": location})


def whole() -> Fault:
    """200 and the whole file, whatever range was asked for."""
    return Fault(ignore_range=True)

"""How answers and failures of a Hub are worded: the cause, then the next step, in one line."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime

import pytest

from ckaudit.source.faults import Asked, explain, refusal, retry_after, unreachable

ASKED = Asked(repo="org/name", host="hub.example", endpoint="https://hub.example")


def wrapped(cause: Exception, name: str = "ConnectError") -> Exception:
    """`cause` below two exceptions of an HTTP library, as they arrive."""
    inner = RuntimeError("low")
    inner.__cause__ = cause
    outer: Exception = type(name, (Exception,), {})(str(cause))
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "cause", "step"),
    [
        (wrapped(ssl.SSLCertVerificationError("self-signed")), "its certificate is not trusted", "SSL_CERT_FILE"),
        (wrapped(ssl.SSLError("WRONG_VERSION_NUMBER")), "the TLS handshake failed", "HF_ENDPOINT"),
        (wrapped(socket.gaierror(-2, "Name or service not known")), "its name cannot be resolved", "HF_HUB_OFFLINE=1"),
        (wrapped(ConnectionRefusedError(111, "refused")), "the connection was refused", "HF_ENDPOINT"),
        (wrapped(TimeoutError(), "ConnectTimeout"), "it did not answer in time", "network"),
        (wrapped(TimeoutError(), "ReadTimeout"), "it stopped answering", "HF_HUB_DOWNLOAD_TIMEOUT"),
        (wrapped(ConnectionResetError(104, "reset"), "ReadError"), "the connection was reset", "later"),
        (type("RemoteProtocolError", (Exception,), {})("peer closed"), "the answer was cut short", "later"),
        (type("Odd", (Exception,), {})("first\x1b[31m.\nsecond"), r"first\x1b[31m. second", "network"),
        (type("Odd", (Exception,), {})(), "Odd", "network"),
    ],
)
def test_why_no_answer_came(error: Exception, cause: str, step: str) -> None:
    told = unreachable(error, ASKED, None, "hub.example")
    assert told.message == f"Cannot reach hub.example for org/name: {cause}."
    assert step in told.hint


def test_an_error_that_causes_itself_is_no_endless_chain() -> None:
    error = wrapped(ValueError("x"))
    assert error.__cause__ is not None
    error.__cause__.__cause__ = error
    assert "Cannot reach" in unreachable(error, ASKED, None, "hub.example").message


@pytest.mark.parametrize(
    ("headers", "body", "words"),
    [
        ({}, b"", ""),
        ({}, b"<html>no</html>", ""),
        ({}, b"[1]", ""),
        ({}, b'{"error": 3}', ""),
        ({}, b'{"error": "No.\\u202egood"}', r"No.\u202egood"),
        ({"x-error-message": "From the header"}, b'{"error": "from the body"}', "From the header"),
        ({}, b"[" * 50_000, ""),
        ({"x-error-message": "x" * 500}, b"", "x" * 200),
    ],
)
def test_a_servers_own_words_are_short_and_harmless(headers: dict[str, str], body: bytes, words: str) -> None:
    assert refusal(418, headers, body, ASKED).words == words


def test_words_become_part_of_one_sentence() -> None:
    told = explain(refusal(418, {"x-error-message": "I am a\nteapot."}, b"", ASKED))
    assert (
        str(told)
        == r"hub.example answered 418 for org/name: I am a\nteapot. Check that HF_ENDPOINT is the address of a Hub."
    )


NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after": "Thu, 01 Jan 2026 12:01:30 GMT"}, 90.0),
        ({"retry-after": "Thu, 01 Jan 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1" * 400}, None),
        ({}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"api";r=0'}, None),
        ({"ratelimit": '"api";t=x'}, None),
        ({"retry-after": "soon", "ratelimit": '"api"; r=0; t=9'}, 9.0),
    ],
)
def test_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, NOW) == seconds

"""Reading a repo from a Hub, with every fault that the loopback Hub can play."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import huggingface_hub
import pytest
from hub_faults import Fault, bad_token, cut, drop, error, gated, rate_limited, redirect, reset, slow, status, whole
from hub_repos import Repo, Sparse
from hub_server import HubServer
from huggingface_hub import constants

from ckaudit.errors import SourceError, UsageError
from ckaudit.source import Span, Unreadable, open_source
from ckaudit.source.hub import HubSource
from tests.helpers import all_of

HEAD = bytes(range(256)) * 400  # 102,400 bytes that tell their own position
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "a.safetensors": Sparse(HEAD, 5_000_000_000),
    "b.safetensors": Sparse(HEAD[::-1], 5_000_000_000),
}
A, B = Span("a.safetensors", 0, 100_000), Span("b.safetensors", 0, 100_000)


class Notes:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token, no proxy, an empty cache."""
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer({"org/name": FILES}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def read(source: HubSource, *spans: Span) -> dict[str, bytes | Unreadable]:
    return {span.path: data for span, data in source.read_spans(spans)}


class Clock:
    """A clock that only its own waits move on."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def now(self) -> float:
        return sum(self.waited)

    def wait(self, seconds: float, stop: threading.Event) -> None:
        self.waited.append(seconds)


def no_wait(clock: Clock | None = None) -> HubSource:
    """The repo, opened by a source whose waits are noted rather than slept."""
    return HubSource("org/name", clock=clock or Clock())


def refused(name: str = "org/name", revision: str | None = None) -> str:
    """The one line that opening a repo ends with."""
    with pytest.raises(SourceError) as caught:
        HubSource(name, revision, clock=Clock())
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.hint, line
    return line


# What is read, and with how much


def test_one_request_opens_a_repo_and_every_read_uses_its_commit(hub: HubServer) -> None:
    source = open_source("org/name")
    repo = hub.repos["org/name"]
    assert (source.name, source.kind, source.revision) == ("org/name", "hub", repo.head)
    assert [r.path for r in hub.log] == ["/api/models/org/name"]
    assert list(source.files()) == ["a.safetensors", "b.safetensors", "config.json"]
    assert source.files()["a.safetensors"].size == 5_000_000_000
    assert len(source.files()["a.safetensors"].sha256 or "") == 64
    assert source.files()["config.json"].sha256 is None
    assert read(source, A, B) == {"a.safetensors": HEAD[:100_000], "b.safetensors": HEAD[::-1][:100_000]}
    assert {r.path.split("/")[4] for r in hub.log[1:]} == {repo.head}
    assert sorted(r.range or "" for r in hub.log[1:]) == ["bytes=0-99999"] * 2
    assert sum(r.sent for r in hub.log[1:]) == 200_000


@pytest.mark.parametrize("kind", ["branch", "tag", "commit", "pull request"])
def test_a_revision_of_any_kind_is_read(hub: HubServer, kind: str) -> None:
    repo = hub.repos["org/name"]
    ref = {"branch": "dev", "tag": "v1.0", "commit": "", "pull request": "refs/pr/3"}[kind]
    sha = repo.push({"config.json": b"older"}, ref or "hidden")
    source = open_source(f"org/name@{ref or sha}")
    assert source.revision == sha != repo.head
    assert all_of(source, "config.json") == b"older"


def test_a_commit_that_moves_between_two_reads_changes_nothing(hub: HubServer) -> None:
    source = open_source("org/name")
    hub.repos["org/name"].push({"config.json": b"{}", "a.safetensors": Sparse(b"new", 3)})
    assert all_of(source, "config.json") == FILES["config.json"]
    assert read(source, A)["a.safetensors"] == HEAD[:100_000]


def test_a_file_read_whole_is_not_read_twice(hub: HubServer) -> None:
    source = open_source("org/name")
    assert all_of(source, "config.json") == all_of(source, "config.json") == FILES["config.json"]
    assert read(source, Span("config.json", 2, 12)) == {"config.json": b"model_type"}
    assert len(hub.paths("*/config.json")) == 1
    assert hub.log[-1].range is None


def test_spans_are_clipped_and_empty_ones_cost_nothing(hub: HubServer) -> None:
    source = open_source("org/name")
    assert read(source, Span("a.safetensors", 4_999_999_990, 9_999_999_999)) == {"a.safetensors": bytes(10)}
    asked = len(hub.log)
    assert read(source, Span("a.safetensors", 5_000_000_000, 6_000_000_000)) == {"a.safetensors": b""}
    assert read(source, Span("b.safetensors", 10, 10)) == {"b.safetensors": b""}
    assert len(hub.log) == asked


def test_what_the_commit_does_not_hold(hub: HubServer) -> None:
    source = open_source("org/name")
    assert isinstance(read(source, Span("c.safetensors", 0, 10))["c.safetensors"], Unreadable)
    assert len(hub.log) == 1


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a//b", "a\\..\\b", "./a"])
def test_a_listed_name_that_is_no_path_inside_the_repo_is_never_asked_for(hub: HubServer, path: str) -> None:
    hub.repos["org/name"].push({path: b"hostile"})
    source = open_source("org/name")
    assert isinstance(read(source, Span(path, 0, 10))[path], Unreadable)
    assert len(hub.log) == 1


def test_names_with_odd_characters_are_read(hub: HubServer) -> None:
    files = {name: name.encode() for name in ("a b.json", "q?x=1.json", "h#1.json", "p%20.json", "sub/übung.json")}
    hub.repos["org/name"].push(files)
    source = open_source("org/name")
    assert read(source, *(Span(name, 0, 100) for name in files)) == files


def test_reads_are_side_by_side_and_reuse_their_connections(hub: HubServer) -> None:
    hub.repos["org/name"].push({f"{i:03}.safetensors": Sparse(HEAD, 10**9) for i in range(64)})
    source = open_source("org/name", jobs=16)
    hub.latency = 0.2
    got = read(source, *(Span(f"{i:03}.safetensors", 0, 1000) for i in range(64)))
    assert set(got.values()) == {HEAD[:1000]}
    assert 8 <= hub.most <= 16
    assert len({r.peer for r in hub.log}) <= 17


def test_the_order_is_that_of_arrival_and_follow_ups_join_the_same_call(hub: HubServer) -> None:
    source = open_source("org/name")
    hub.fail("*/a.safetensors", slow(0.3))
    todo = [A, B]

    class Feed:
        def __iter__(self) -> Iterator[Span]:
            return self

        def __next__(self) -> Span:
            if not todo:
                raise StopIteration
            return todo.pop(0)

    order = []
    for span, _ in source.read_spans(Feed()):
        order.append(span)
        if span == B:
            todo.append(Span("b.safetensors", 100_000, 100_010))
    assert order == [B, Span("b.safetensors", 100_000, 100_010), A]


def test_a_listing_without_sizes_is_enough(hub: HubServer) -> None:
    short = {"s.safetensors": b"short", "empty.json": b""}
    hub.repos["org/name"].sizes = False
    hub.repos["org/name"].push(FILES | short)
    source = open_source("org/name")
    assert source.files()["a.safetensors"].size is None
    assert all_of(source, "config.json") == all_of(source, "config.json") == FILES["config.json"]
    assert len(hub.paths("*/config.json")) == 1
    assert all_of(source, "empty.json") == b""
    assert read(source, A, Span("s.safetensors", 0, 1000)) == {
        "a.safetensors": HEAD[:100_000],
        "s.safetensors": b"short",
    }
    assert read(source, Span("b.safetensors", 4_999_999_999, 10**10)) == {"b.safetensors": b"\0"}
    assert read(source, Span("b.safetensors", 10**10, 10**11)) == {"b.safetensors": b""}
    hub.fail("*", whole(), times=None)
    fresh = open_source("org/name")
    assert all_of(fresh, "config.json") == FILES["config.json"], "all of it is no more than was asked for"
    assert isinstance(read(fresh, A)["a.safetensors"], Unreadable)


# Faults that pass


def test_every_shard_fails_twice_and_then_works(hub: HubServer) -> None:
    hub.fail("*.safetensors", status(503), times=2)
    clock = Clock()
    source = no_wait(clock)
    assert read(source, A, B) == {"a.safetensors": HEAD[:100_000], "b.safetensors": HEAD[::-1][:100_000]}
    assert sorted(clock.waited) == [0.5, 0.5, 1.0, 1.0]
    assert len(hub.paths("*.safetensors")) == 6


@pytest.mark.parametrize("fault", [cut(70_000), reset(70_000)], ids=["cut", "reset"])
def test_a_body_that_breaks_is_resumed_from_the_byte_reached(hub: HubServer, fault: Fault) -> None:
    hub.fail("*/a.safetensors", fault)
    assert read(no_wait(), A) == {"a.safetensors": HEAD[:100_000]}
    first, second = (r for r in hub.log if r.path.endswith("a.safetensors"))
    assert first.range == "bytes=0-99999"
    start = int((second.range or "").removeprefix("bytes=").split("-")[0])
    assert start == 70_000 if not fault.reset else 0 <= start <= 70_000  # a reset may lose what was under way
    assert second.sent == 100_000 - start


def test_a_whole_file_that_breaks_is_resumed_too(hub: HubServer) -> None:
    hub.fail("*/config.json", cut(5))
    assert all_of(no_wait(), "config.json") == FILES["config.json"]
    assert [r.range for r in hub.log[1:]] == [None, "bytes=5-22"]


def test_a_whole_file_is_read_even_from_a_server_that_cannot_resume(hub: HubServer) -> None:
    hub.fail("*/config.json", cut(5))
    hub.fail("*/config.json", whole())
    assert all_of(no_wait(), "config.json") == FILES["config.json"]


def test_long_progress_outlives_many_breaks(hub: HubServer) -> None:
    hub.repos["org/name"].push({"a.safetensors": Sparse(b"", 10**9)})
    hub.fail("*/a.safetensors", cut(100_000), times=12)
    assert read(no_wait(), Span("a.safetensors", 0, 1_500_000))["a.safetensors"] == bytes(1_500_000)


def test_a_connection_that_closes_without_an_answer_is_tried_again(hub: HubServer) -> None:
    hub.fail("*", drop())
    assert read(no_wait(), A) == {"a.safetensors": HEAD[:100_000]}


def test_a_slow_shard_arrives(hub: HubServer) -> None:
    hub.fail("*/a.safetensors", slow(0.5))
    assert read(no_wait(), A, B) == {"a.safetensors": HEAD[:100_000], "b.safetensors": HEAD[::-1][:100_000]}
    assert len(hub.log) == 3


def test_a_rate_limit_of_a_minute_is_waited_for_once_by_all(hub: HubServer) -> None:
    hub.fail("*.safetensors", rate_limited(60))
    clock = Clock()
    notes = Notes()
    source = HubSource("org/name", progress=notes, clock=clock)  # type: ignore[arg-type]
    assert read(source, A, B) == {"a.safetensors": HEAD[:100_000], "b.safetensors": HEAD[::-1][:100_000]}
    assert 59 < max(clock.waited) <= 60
    assert any("waiting 60 s" in text for text in notes.said)


def test_a_rate_limit_really_holds_reads_back(hub: HubServer) -> None:
    source = HubSource("org/name")
    hub.fail("*/a.safetensors", rate_limited(1))
    began = time.monotonic()
    assert read(source, A) == {"a.safetensors": HEAD[:100_000]}
    assert time.monotonic() - began > 0.9


def test_a_rate_limit_may_name_a_date_or_a_reset(hub: HubServer) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    hub.fail("*/a.safetensors", rate_limited(date))
    hub.fail("*/b.safetensors", status(429, {"RateLimit": '"api";r=0;t=45'}))
    clock = Clock()
    source = no_wait(clock)
    read(source, A)
    assert 27 < max(clock.waited) <= 30
    clock.waited.clear()
    read(source, B)
    assert 44 < max(clock.waited) < 45.1


def test_a_rate_limit_beyond_the_bound_ends_with_advice(hub: HubServer) -> None:
    hub.fail("*/a.safetensors", rate_limited(3600))
    with pytest.raises(SourceError, match=r"asks to wait 3,600 s\. Try again later.*HF_TOKEN"):
        read(no_wait(), A)
    assert len(hub.paths("*/a.safetensors")) == 1


def test_a_rate_limit_without_end_ends(hub: HubServer) -> None:
    hub.fail("*/a.safetensors", status(429), times=None)
    clock = Clock()
    with pytest.raises(SourceError, match="limits the rate of requests"):
        read(no_wait(clock), A)
    assert clock.now() <= 300


@pytest.mark.parametrize("seed", range(8))
def test_whatever_passes_the_bytes_are_right_and_nothing_whole_is_read_twice(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Up to two random faults on every path, then none; the data of every file tell their own position."""
    dice = random.Random(seed)
    files: dict[str, bytes | Sparse] = {f"{i}.json": dice.randbytes(dice.randrange(1, 5000)) for i in range(5)}
    files |= {f"{i}.safetensors": Sparse(dice.randbytes(200_000), 10**9) for i in range(20)}
    with HubServer({"org/name": files}, cdn=seed % 2 == 1) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for path in ["/api/*", *(f"*/{name}" for name in files)]:
            for _ in range(dice.randrange(3)):
                at = dice.randrange(1, 150_000)
                hub.fail(
                    path,
                    dice.choice([cut(at), reset(at), drop(), status(503), status(429), rate_limited(5), slow(0.01)]),
                )
        source = no_wait()
        spans = [Span(path, 0, dice.randrange(1, 150_000)) for path in files]
        follow = [Span(span.path, span.stop, span.stop + 50_000) for span in spans if "safetensors" in span.path]
        for part in (spans, follow):
            for span, data in source.read_spans(part):
                assert data == files[span.path][span.start : span.stop], span
        assert [all_of(source, f"{i}.json") for i in range(5)] == [files[f"{i}.json"] for i in range(5)]
        asked = len(hub.log)
        for i in range(5):
            all_of(source, f"{i}.json")
        assert len(hub.log) == asked


# Faults of one file


def test_a_server_that_ignores_ranges_is_left_at_once(hub: HubServer) -> None:
    hub.fail("*/a.safetensors", whole(), times=None)
    got = read(no_wait(), A, B)
    assert isinstance(got["a.safetensors"], Unreadable)
    assert "does not honour range requests" in got["a.safetensors"].reason
    assert got["b.safetensors"] == HEAD[::-1][:100_000]
    (request,) = (r for r in hub.log if r.path.endswith("a.safetensors"))
    assert request.sent < 50_000_000, "what fits into the socket's buffers before the client hangs up, of 5 GB"


def test_a_small_file_is_read_from_a_server_that_ignores_ranges(hub: HubServer) -> None:
    hub.fail("*/config.json", whole(), times=None)
    assert read(no_wait(), Span("config.json", 0, 1000)) == {"config.json": FILES["config.json"]}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(status=206, headers={"Content-Range": "bytes 5-99999/5000000000"}), "another range"),
        (Fault(status=206, headers={"Content-Range": "bytes 0-99999/4000000000"}), "5,000,000,000 bytes, but serves 4,000,000,000"),
        (Fault(status=206), "another range"),
        (Fault(status=206, headers={"Content-Type": "multipart/byteranges; boundary=x"}), "another range"),
        (Fault(extra=b"more"), "more than the range"),
        (Fault(status=416), "ends before byte 0"),
        (Fault(status=206, headers={"Content-Range": "bytes 0-99999/5000000000", "Content-Encoding": "gzip"}), "compresses"),
        (error(404, "EntryNotFound", "Entry not found"), "not there, although it is listed"),
        (status(404), "not there, although it is listed"),
        (gated(), "is gated"),
        (status(403), "denies access"),
        (status(451, body=b'{"error": "Unavailable for \\u001b[31mlegal\\nreasons"}'), r"answered 451 .*\\x1b\[31mlegal\\nreasons"),
    ],
)  # fmt: skip
def test_a_fault_of_one_file_is_told_of_that_file(hub: HubServer, fault: Fault, reason: str) -> None:
    hub.fail("*/a.safetensors", fault, times=None)
    got = read(no_wait(), A, B)
    assert isinstance(got["a.safetensors"], Unreadable)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(got["a.safetensors"].reason)
    assert got["b.safetensors"] == HEAD[::-1][:100_000]


def test_a_shorter_range_than_asked_for_is_completed(hub: HubServer) -> None:
    part = Fault(status=206, headers={"Content-Range": "bytes 0-9/5000000000"}, body=HEAD[:10])
    hub.fail("*/a.safetensors", part)
    assert read(no_wait(), A) == {"a.safetensors": HEAD[:100_000]}
    assert [r.range for r in hub.log[1:]] == ["bytes=0-99999", "bytes=10-99999"]


# Faults of the whole target: one line each


@pytest.mark.parametrize("code", [500, 502, 503, 504, 520])
def test_a_hub_that_is_down_is_asked_five_times(hub: HubServer, code: int) -> None:
    hub.fail("/api/*", status(code), times=None)
    assert f"answered {code} for org/name (tried 5 times). Try again later." in refused()
    assert len(hub.log) == 5


def test_a_shard_that_never_comes_ends_the_audit(hub: HubServer) -> None:
    hub.fail("*/a.safetensors", status(503), times=None)
    with pytest.raises(SourceError, match=r"answered 503 for a\.safetensors of org/name \(tried 5 times\)"):
        read(no_wait(), A, B)


@pytest.mark.parametrize(
    ("fault", "cause"), [(cut(10), "cut short"), (reset(10), "reset|cut short"), (drop(), "cut short|reset")]
)
def test_a_body_that_always_breaks_ends_the_audit(hub: HubServer, fault: Fault, cause: str) -> None:
    source = no_wait()
    hub.fail("*/a.safetensors", fault, times=None)
    with pytest.raises(
        SourceError, match=rf"Cannot reach .* for a\.safetensors of org/name: .*({cause}).*tried 5 times"
    ):
        read(source, A)


def test_no_such_repo(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    line = refused("org/nothing")
    assert "no folder org/nothing here" in line
    assert "no such model repo that can be read without a token" in line
    assert "HF_TOKEN" in line
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    assert "no such model repo that your token may read" in refused("org/nothing")


def test_no_such_revision(hub: HubServer) -> None:
    assert "org/name has no revision v9. Give a branch, a tag or a commit" in refused(revision="v9")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    repos = {"org/gated": Repo(FILES, gated="auto"), "org/private": Repo(FILES, private=True), "org/open": Repo(FILES)}
    with HubServer(repos, tokens={"hf_in": ("org/gated", "org/private"), "hf_out": ()}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_gated_and_private_repos_open_with_the_right_token(guarded: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_in")
    assert read(HubSource("org/gated"), A) == {"a.safetensors": HEAD[:100_000]}
    assert read(HubSource("org/private"), A) == {"a.safetensors": HEAD[:100_000]}


def test_the_stored_token_is_used(guarded: HubServer) -> None:
    Path(constants.HF_TOKEN_PATH).write_text("hf_in")
    assert read(HubSource("org/private"), A) == {"a.safetensors": HEAD[:100_000]}


def test_a_gated_repo_says_how_to_get_in(guarded: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match=r"is gated\. Accept its terms at http.*/org/gated, then set HF_TOKEN"):
        read(HubSource("org/gated"), A)
    monkeypatch.setenv("HF_TOKEN", "hf_out")
    with pytest.raises(
        SourceError, match=r"is gated, and your token was not given access\. Ask for it at http.*/org/gated"
    ):
        all_of(HubSource("org/gated"), "config.json")


def test_a_private_repo_and_a_bad_token(guarded: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "for a private repo set HF_TOKEN" in refused("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_out")
    assert "that your token may read" in refused("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "refuses the token. It may have expired" in refused("org/open")
    assert "hf_expired" not in refused("org/open")


def test_a_gated_file_in_an_open_repo_is_told_of_that_file(hub: HubServer) -> None:
    hub.fail("*/a.safetensors", gated(401), times=None)
    got = read(no_wait(), A, B)
    assert got["a.safetensors"] == Unreadable("a.safetensors of org/name is gated")
    assert got["b.safetensors"] == HEAD[::-1][:100_000]


def test_a_token_that_expires_on_the_way_ends_the_audit(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    source = no_wait()
    hub.fail("*/a.safetensors", bad_token(), times=None)
    with pytest.raises(SourceError, match="refuses the token"):
        read(source, A, B)


def test_a_disabled_repo(hub: HubServer) -> None:
    hub.fail("/api/*", error(403, "", "Access to this resource is disabled."))
    assert "org/name is disabled" in refused()


@pytest.mark.parametrize(
    "body", [b"<html>Log in</html>", b"[]", b"{}", b'{"sha": "../x", "siblings": []}', b"\xff", b"[" * 100_000]
)
def test_an_answer_that_is_no_listing(hub: HubServer, body: bytes) -> None:
    hub.fail("/api/*", status(200, body=body))
    assert "not with the listing of a model repo. Check that HF_ENDPOINT" in refused()


# The way there


@pytest.fixture
def _own_session() -> Iterator[None]:
    """A session of its own: the client looks at the proxy variables when it makes one."""
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.mark.parametrize(("folder", "said"), [("org", True), ("other", False)])
def test_a_path_with_a_slip_is_told_as_one(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, said: bool
) -> None:
    """`org/nmae` beside a folder `org`: the user may never have meant the Hub."""
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="no such model repo") as found:
        open_source("org/nmae")
    assert str(found.value).count("There is no folder org/nmae here") == 1  # the answer says so already
    hub.fail("/api/*", status(403))
    with pytest.raises(SourceError, match="denies access") as found:
        open_source("org/nmae")
    assert ("There is no folder org/nmae here either. " in str(found.value)) is said


def test_a_refused_connection_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    assert refused().startswith(
        f"Cannot reach 127.0.0.1:{port} for org/name: the connection was refused. Check the network"
    )


@pytest.mark.parametrize(
    "endpoint", ["hub.internal", "ftp://hub", "http://", "http://[x", "http://h:99999", "http://a\nb"]
)
def test_an_endpoint_that_is_no_address(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UsageError, match=r"HF_ENDPOINT is .*, which is no web address\. Set it to one") as caught:
        open_source("org/name")
    assert str(caught.value).isprintable()


def test_a_token_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_“quoted”")
    with pytest.raises(UsageError, match="holds characters that no token has"):
        open_source("org/name")


@pytest.mark.usefixtures("_own_session")
@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "SSL_CERT_FILE"])
def test_a_session_that_cannot_be_made(hub: HubServer, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "gopher://127.0.0.1" if variable == "HTTPS_PROXY" else "/no/such/file.pem")
    assert "The connection to the Hub cannot be set up: " in refused()


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert "Cannot reach hub.invalid for org/name: its name cannot be resolved." in refused()


def test_plain_http_where_tls_is_spoken(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("http:", "https:"))
    assert "the TLS handshake failed" in refused()


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "it stopped answering (tried 5 times). Try again, or raise HF_HUB_DOWNLOAD_TIMEOUT" in refused()


@pytest.mark.usefixtures("_own_session")
def test_a_proxy_is_used_and_blamed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("http_proxy", hub.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert all_of(open_source("org/name"), "config.json") == FILES["config.json"]
    assert {r.headers["host"] for r in hub.log} == {"hub.invalid"}
    hub.fail("/api/*", status(407))
    assert "The proxy wants a user and a password." in refused()
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    huggingface_hub.close_session()
    line = refused()
    assert "through the proxy http://127.0.0.1:9 for org/name: the connection was refused. Check HTTPS_PROXY" in line
    assert "secret" not in line


# Redirects


def test_the_token_never_reaches_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({"org/name": FILES}, cdn=True) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        hub.fail("*", status(503))  # retries must not bring it back
        hub.fail("*/b.safetensors", cut(50_000))
        source = no_wait()
        spans = [A, B, Span("a.safetensors", 100_000, 102_400), Span("config.json", 0, 1000)]
        got = [data for span in spans for _, data in source.read_spans([span])]
        assert got == [HEAD[:100_000], HEAD[::-1][:100_000], HEAD[100_000:], FILES["config.json"]]
        assert hub.cdn_log
        assert not [r for r in hub.cdn_log if "authorization" in r.headers or "hf_secret" in str(r)]
        assert all(r.headers["authorization"] == "Bearer hf_secret" for r in hub.log)


def test_a_follow_up_goes_straight_to_where_the_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({"org/name": FILES}, cdn=True) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        source = HubSource("org/name")
        for start in (0, 10, 20):
            assert read(source, Span("a.safetensors", start, start + 10)) == {"a.safetensors": HEAD[start : start + 10]}
        assert (len(hub.log), len(hub.cdn_log)) == (2, 3)
        hub.fail("*/a.safetensors", status(403, body=b"signature expired"))
        assert read(source, Span("a.safetensors", 30, 40)) == {"a.safetensors": HEAD[30:40]}
        assert (len(hub.log), len(hub.cdn_log)) == (3, 5)


def test_a_store_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({"org/name": FILES}) as hub, HubServer({}) as store:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.fail("*/a.safetensors", redirect(f"{store.url}/x?Signature=abc"), times=None)
        store.fail("*", status(403), times=None)
        got = read(no_wait(), A)["a.safetensors"]
        assert isinstance(got, Unreadable)
        assert got.reason == f"{store.url.removeprefix('http://')} denies access to a.safetensors of org/name"
        assert len(store.log) == 1


def test_a_relative_redirect_keeps_the_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.fail("/api/models/org/old", redirect("/api/models/org/name?blobs=true", 307))
    source = HubSource("org/old")
    assert (source.name, source.revision) == ("org/old", hub.repos["org/name"].head)
    assert read(source, A) == {"a.safetensors": HEAD[:100_000]}
    assert [r.headers.get("authorization") for r in hub.log] == ["Bearer hf_secret"] * 3, (
        "files are asked for by the new name"
    )


def test_a_token_that_was_dropped_does_not_come_back(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer({}) as other:
        hub.fail("/api/models/org/name", redirect(f"{other.url}/away"))
        other.fail("*", redirect(f"{hub.url}/api/models/org/name?blobs=true"))
        assert HubSource("org/name").revision == hub.repos["org/name"].head
        assert [r.headers.get("authorization") for r in hub.log] == ["Bearer hf_secret", None]
        assert [r.headers.get("authorization") for r in other.log] == [None]


@pytest.mark.parametrize("location", ["", "/api/models/org/name"])
def test_redirects_in_a_circle_end(hub: HubServer, location: str) -> None:
    hub.fail("*", redirect(location), times=None)
    assert "redirects org/name in a circle" in refused()
    assert len(hub.log) == 10


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/y", "http://[bad", "http://x:99999999/"])
def test_redirects_to_no_web_address_end(hub: HubServer, location: str) -> None:
    hub.fail("*", redirect(location), times=None)
    assert "redirects org/name to no web address" in refused()


# Ends


def test_the_first_failure_ends_everything_promptly(hub: HubServer) -> None:
    hub.repos["org/name"].push({f"{i}.safetensors": Sparse(HEAD, 10**9) for i in range(200)})
    source = no_wait()
    hub.fail("*/0.safetensors", bad_token())
    hub.fail("*", slow(0.2), times=None)
    with pytest.raises(SourceError):
        read(source, *(Span(f"{i}.safetensors", 0, 1000) for i in range(200)))
    time.sleep(0.5)
    assert len(hub.log) < 100


def test_a_consumer_that_stops_ends_the_reads(hub: HubServer) -> None:
    hub.repos["org/name"].push({f"{i}.safetensors": Sparse(HEAD, 10**9) for i in range(200)})
    source = open_source("org/name", jobs=2)
    hub.fail("*", slow(0.05), times=None)
    for _ in source.read_spans(Span(f"{i}.safetensors", 0, 1000) for i in range(200)):
        break
    time.sleep(0.3)
    assert len(hub.log) < 10
    assert not [t for t in threading.enumerate() if t.name == "ckaudit-read"]


# The cache


def _cache(commit: str, files: dict[str, bytes], ref: str | None = "main") -> Path:
    """A cache as the client lays it out: blobs, links to them, a ref."""
    repo = Path(constants.HF_HUB_CACHE) / "models--org--name"
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    (repo / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    for i, (name, data) in enumerate(files.items()):
        (repo / "blobs" / f"{i:064x}").write_bytes(data)
        (repo / "snapshots" / commit / name).symlink_to(Path("../../blobs") / f"{i:064x}")
    if ref:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return repo


def test_files_that_sit_whole_in_the_cache_are_read_from_it(hub: HubServer) -> None:
    repo = hub.repos["org/name"]
    small = Sparse(HEAD, 102_400)
    sha = repo.push({**FILES, "a.safetensors": small})
    _cache(sha, {"config.json": FILES["config.json"], "a.safetensors": HEAD, "b.safetensors": b"incomplete"})
    source = open_source("org/name")
    assert all_of(source, "config.json") == FILES["config.json"]
    assert read(source, A, B) == {"a.safetensors": HEAD[:100_000], "b.safetensors": HEAD[::-1][:100_000]}
    assert [r.path.split("/")[-1] for r in hub.log] == ["name", "b.safetensors"]


def test_a_cached_file_that_cannot_be_read_is_asked_for(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _cache(hub.repos["org/name"].head, {"config.json": FILES["config.json"]})
    source = open_source("org/name")
    monkeypatch.setattr("ckaudit.source.hub.read_range", lambda *_: Unreadable("permission denied"))
    assert all_of(source, "config.json") == FILES["config.json"]
    assert len(hub.paths("*/config.json")) == 1


def test_another_commit_in_the_cache_is_not_used(hub: HubServer) -> None:
    _cache("0" * 40, {"config.json": FILES["config.json"]})
    assert all_of(open_source("org/name"), "config.json") == FILES["config.json"]
    assert len(hub.paths("*/config.json")) == 1


@pytest.mark.parametrize("how", ["option", "variable", "client"])
def test_offline_reads_the_cache_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    index = b'{"weight_map": {"x": "b.safetensors", "y": "../../../etc/passwd", "z": 3}}'
    _cache("1" * 40, {"model.safetensors.index.json": index, "a.safetensors": HEAD})
    if how == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if how == "client":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = open_source("org/name", offline=how == "option")
    assert (source.name, source.kind, source.revision) == ("org/name", "hub", "1" * 40)
    assert list(source.files()) == ["a.safetensors", "b.safetensors", "model.safetensors.index.json"]
    got = dict(source.read_spans([A, B]))
    assert got[A] == HEAD[:100_000]
    assert got[B] == Unreadable("not in the local cache of the Hub")
    assert open_source(f"org/name@{'1' * 8}", offline=True).revision == "1" * 40
    assert not hub.log


def test_offline_without_the_repo_says_so() -> None:
    with pytest.raises(SourceError, match=r"org/name is not in the local cache .* Unset HF_HUB_OFFLINE"):
        open_source("org/name", offline=True)
    _cache("1" * 40, {"config.json": b"{}"})
    with pytest.raises(SourceError, match=r"no weights of org/name"):
        open_source("org/name", offline=True)
    for revision in ("dev", "../refs/main", "/etc/passwd", "1" * 6):
        with pytest.raises(SourceError, match=r"org/name@.* is not in the local cache"):
            open_source(f"org/name@{revision}", offline=True)


# --- whole files for a load ---------------------------------------------------------------------------------------


def test_files_are_downloaded_at_the_commit_into_the_cache_and_from_then_on_read_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HubServer({"org/name": {"config.json": b"{}", "a[1].safetensors": HEAD, "b.safetensors": HEAD}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        folder = no_wait().folder(["config.json", "a[1].safetensors"])
        assert (folder / "a[1].safetensors").read_bytes() == HEAD
        assert not (folder / "b.safetensors").exists()


def test_a_download_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({"org/name": {"config.json": b"{}", "a.safetensors": HEAD}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        source = no_wait()
        server.fail("*/a.safetensors", gated())
        with pytest.raises(SourceError, match="cannot be downloaded") as caught:
            source.folder(["a.safetensors"])
    assert "\n" not in str(caught.value)

"""`--verify-hash`: the bytes of the weights against what the Hub says of them, wherever that is known from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import constants
from test_cli import ckaudit as program

from ckaudit.errors import UsageError
from ckaudit.findings import Report
from ckaudit.pipeline import names as pipeline
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
from ckaudit.source.hashes import STEP, sha256
from tests.diff_examples import decoder, split
from tests.helpers import DictSource, checkpoint_files

FILES = checkpoint_files(split(decoder(), 2))
FIRST, SECOND = sorted(path for path in FILES if path.endswith(".safetensors"))
COMMIT = "c" * 40
SPOILT = FILES[FIRST][:-1] + b"\1"


def told(report: Report) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [(f.check, f.severity, f.blame, f.names) for f in report.findings if f.check == "CK118"]


def audited(target: str) -> Report:
    return pipeline.audit(target, [], verify_hash=True)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def downloaded(folder: Path, files: dict[str, bytes]) -> str:
    """As `hf download --local-dir` leaves a folder: a note beside each file, with the sha256 of the large ones."""
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for path, data in files.items():
        (folder / path).write_bytes(data)
        etag = digest(FILES[path]) if path.endswith(".safetensors") else "0" * 40
        (notes / f"{path}.metadata").write_text(f"{COMMIT}\n{etag}\n1764500000.0\n")
    return str(folder)


def cached(folder: Path, files: dict[str, bytes]) -> str:
    """A repo in the Hub's cache: a snapshot of links to blobs that are named by what they hold."""
    repo = folder / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path, data in files.items():
        blob = digest(FILES[path]) if path.endswith(".safetensors") else hashlib.sha1(data).hexdigest()
        (repo / "blobs" / blob).write_bytes(data)
        (snapshot / path).symlink_to(f"../../blobs/{blob}")
    return str(snapshot)


@pytest.mark.parametrize("make", [downloaded, cached])
class TestOnDisk:
    def test_what_the_hub_has(self, make: object, tmp_path: Path) -> None:
        report = audited(make(tmp_path, FILES))  # type: ignore[operator]
        assert told(report) == []
        assert "CK118" not in {s.check for s in report.skips}

    def test_other_bytes_of_the_same_length(self, make: object, tmp_path: Path) -> None:
        report = audited(make(tmp_path, FILES | {FIRST: SPOILT}))  # type: ignore[operator]
        assert told(report) == [("CK118", "error", "environment", (FIRST,))]
        (finding,) = (f for f in report.findings if f.check == "CK118")
        assert (finding.wanted, finding.found) == (f"SHA-256 {digest(FILES[FIRST])}", f"SHA-256 {digest(SPOILT)}")
        assert finding.bytes == len(SPOILT)
        assert report.exit_code == 1

    def test_nothing_is_read_unless_asked(self, make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckaudit.source.hashes.sha256", lambda *_: pytest.fail("read"))
        assert told(pipeline.audit(make(tmp_path, FILES | {FIRST: SPOILT}), [])) == []  # type: ignore[operator]


def test_a_file_that_nothing_is_known_of_is_not_judged(tmp_path: Path) -> None:
    target = downloaded(tmp_path, FILES)
    (tmp_path / ".cache/huggingface/download" / f"{SECOND}.metadata").unlink()
    assert [s.reason for s in audited(target).skips if s.check == "CK118"] == [
        f"nothing says which SHA-256 {SECOND} should have"
    ]


def test_notes_that_are_none_are_not_believed(tmp_path: Path) -> None:
    target = downloaded(tmp_path, FILES)
    for note, text in ((FIRST, b"\xff\xfe\x00"), (SECOND, b"x\n../../etc/passwd\n")):
        (tmp_path / ".cache/huggingface/download" / f"{note}.metadata").write_bytes(text)
    with pytest.raises(UsageError, match="Nothing says which SHA-256"):
        audited(target)


def test_a_folder_that_is_not_from_the_hub(tmp_path: Path) -> None:
    for path, data in FILES.items():
        (tmp_path / path).write_bytes(data)
    done = program("names", str(tmp_path), "--verify-hash", "--engine", "rules:tests/llama.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hf download --local-dir" in done.stderr


def test_long_files_are_read_in_order_and_once() -> None:
    data = {"a": bytes(STEP) + b"a", "b": b"b" * (2 * STEP), "c": b""}
    source = DictSource(data)
    assert sha256(source, data, NullProgress()) == {path: digest(content) for path, content in data.items()}
    assert len(source.reads) == len({(s.path, s.start) for s in source.reads})


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # other tests put their process off line
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        with HubServer({"org/name": FILES}) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            yield server

    def test_the_listing_says_what_the_bytes_should_be(self, hub: HubServer) -> None:
        assert told(audited("org/name")) == []
        assert sum(r.sent for r in hub.log if FIRST in r.path) >= len(FILES[FIRST])

    def test_a_copy_in_the_cache_that_is_not_the_hub_s(self, hub: HubServer, tmp_path: Path) -> None:
        """A file of the right length in the local cache is taken for the Hub's: its bytes say that it is not."""
        commit = open_source("org/name").revision
        assert commit is not None
        snapshot = tmp_path / "models--org--name" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / FIRST).write_bytes(SPOILT)
        assert told(audited("org/name")) == [("CK118", "error", "environment", (FIRST,))]
        assert hub.log

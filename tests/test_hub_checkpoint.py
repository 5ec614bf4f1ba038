"""A checkpoint read from a Hub under fault is the one read without, or says what is missing: never another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_faults import Fault, cut, drop, gated, rate_limited, reset, slow, status, whole
from hub_repos import Sparse, sharded
from hub_server import HubServer
from huggingface_hub import constants

from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.errors import SourceError
from ckaudit.source.hub import HubSource
from ckaudit.source.pace import Clock

FILES = sharded(shards=4, tensors=30)
SHARDS = [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]


class NoWait(Clock):
    def wait(self, seconds: float, stop: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # other tests put their process off line
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer({"org/name": FILES}, cdn=True) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def audit_input() -> Checkpoint:
    return read_checkpoint(HubSource("org/name", clock=NoWait()))


def test_the_headers_are_those_of_the_files(hub: HubServer) -> None:
    found = audit_input()
    assert [shard.path for shard in found.shards] == SHARDS
    assert len(found.tensors) == 120
    for shard in found.shards:
        file = FILES[shard.path]
        assert isinstance(file, Sparse)
        assert shard.header is not None
        assert 8 + shard.header.length == len(file.head)
    assert not found.defects


@pytest.mark.parametrize(
    "fault",
    [status(503), status(429), rate_limited(60), cut(1000), reset(1000), drop(), slow(0.05)],
    ids=["503", "429", "a minute's limit", "cut", "reset", "dropped", "slow"],
)
def test_what_passes_leaves_no_trace(hub: HubServer, fault: Fault) -> None:
    clean = audit_input()
    hub.fail("*", fault, times=2)
    assert audit_input() == clean


def test_a_commit_that_moves_while_it_is_read(hub: HubServer) -> None:
    clean = audit_input()
    source = HubSource("org/name")
    hub.repos["org/name"].push({"config.json": b"{}", SHARDS[0]: b"replaced"})
    assert read_checkpoint(source) == clean


@pytest.mark.parametrize("fault", [gated(), whole(), status(404)], ids=["gated", "no ranges", "gone"])
def test_a_file_that_stays_closed_is_told_and_its_tensors_stay_known(hub: HubServer, fault: Fault) -> None:
    hub.fail(f"*/{SHARDS[1]}", fault, times=None)
    found = audit_input()
    assert [shard.header is None for shard in found.shards] == [False, True, False, False]
    assert [defect.code for defect in found.shards[1].defects] == ["unreadable"]
    assert len(found.tensors) == 120, "the index names them"
    assert sum(spec.shape is None for spec in found.tensors.values()) == 30


def test_a_config_that_is_gated_is_not_taken_for_missing(hub: HubServer) -> None:
    hub.fail("*/config.json", gated(), times=None)
    found = audit_input()
    assert found.config is None
    assert [(defect.code, defect.name) for defect in found.defects] == [("unreadable", "config.json")]


def test_what_does_not_pass_ends_the_audit(hub: HubServer) -> None:
    hub.fail(f"*/{SHARDS[3]}", status(500), times=None)
    with pytest.raises(SourceError, match="answered 500"):
        audit_input()

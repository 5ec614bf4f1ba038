"""The cache of plans: what it keeps, what it must not, and that nothing in its folder can stop an audit."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines import EngineOptions, Job
from ckaudit.engines import cache as caches
from ckaudit.engines.cache import PlanCache, key
from ckaudit.plan import Draft, NameFate, Plan, Unjudged

PLAN = Plan(id="x", engine="x", release="1", method="live", names=(NameFate(name="a", fate="loaded", read=0.5),))
JOB = Job(
    engine="transformers",
    release="5.24.0",
    options=EngineOptions(),
    name="org/name",
    texts={"config.json": b"{}"},
    tensors=(TensorSpec("a", "model.safetensors", "BF16", (2, 3), 12),),
)


def changed(**fields):
    return msgspec.structs.replace(JOB, **fields)


def test_a_plan_comes_back_as_it_was(tmp_path):
    cache = PlanCache(tmp_path / "plans")
    assert cache.get("k") is None
    cache.put("k", PLAN)
    assert cache.get("k") == PLAN
    assert cache.get("other") is None
    assert [p.suffix for p in (tmp_path / "plans").iterdir()] == [".plan"]


def test_options_that_are_no_unicode_have_a_key():
    """As an argument of the command line that is not UTF-8 arrives."""
    assert key(changed(options=EngineOptions(class_name="\udcff")), {}) != key(JOB, {})


def test_what_was_not_judged_is_not_kept(tmp_path):
    cache = PlanCache(tmp_path)
    cache.put("k", msgspec.structs.replace(PLAN, not_judged="no library"))
    assert cache.get("k") is None


@pytest.mark.parametrize(
    "part",
    [
        {"tp": ({"size": 2, "verdict": "not_judged", "error": "the budget of time was used up before rank 1"},)},
        {"draft": Draft("XMTP", "not_judged", "no such layer here")},
        {"unjudged": (Unjudged("faults", "whether there are further faults: the budget of time is used up"),)},
    ],
)
def test_nor_is_a_plan_of_which_a_part_was_not_judged(tmp_path, part):
    cache = PlanCache(tmp_path)
    cache.put("k", msgspec.structs.replace(PLAN, **part))
    assert cache.get("k") is None


def test_what_no_run_could_judge_is_kept(tmp_path):
    whole = msgspec.structs.replace(
        PLAN,
        tp=({"size": 2, "verdict": "fails", "error": "ValueError: heads"},),
        draft=Draft("XMTP", "loads"),
        unjudged=(Unjudged("values", "whether the scales of fused shards are equal is in the data"),),
    )
    cache = PlanCache(tmp_path)
    cache.put("k", whole)
    assert cache.get("k") == whole


@pytest.mark.parametrize("spoil", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_no_entry(tmp_path, spoil):
    cache = PlanCache(tmp_path)
    cache.put("k", PLAN)
    path = tmp_path / "k.plan"
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-3],
            "flipped": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
            "empty": b"",
            "foreign": b"{}" * 99,
        }[spoil]
    )
    assert cache.get("k") is None
    cache.put("k", PLAN)
    assert cache.get("k") == PLAN


def test_the_plan_used_last_outlives_the_others(tmp_path):
    cache = PlanCache(tmp_path)
    cache.put("a", PLAN)
    size = (tmp_path / "a.plan").stat().st_size
    small = PlanCache(tmp_path, max_bytes=4 * size)
    for age, name in enumerate("abcd"):
        small.put(name, PLAN)
        os.utime(tmp_path / f"{name}.plan", (age, age))
    assert small.get("a") == PLAN  # which makes it the youngest
    small.put("e", PLAN)
    assert {p.stem for p in tmp_path.iterdir()} == {"a", "c", "d", "e"}


def test_a_folder_that_cannot_be_used_is_an_empty_cache(tmp_path):
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans")
    cache.put("k", PLAN)
    assert cache.get("k") is None


def test_the_folder_is_where_ckaudit_home_says(tmp_path, monkeypatch):
    monkeypatch.setenv("CKAUDIT_HOME", str(tmp_path))
    PlanCache().put("k", PLAN)
    assert (tmp_path / "plans" / "k.plan").is_file()


@pytest.mark.parametrize(
    "other",
    [
        changed(release="5.25.0"),
        changed(texts={"config.json": b"{} "}),
        changed(texts={"config.json": b"{}", "modeling.py": b""}),
        changed(tensors=()),
        changed(tensors=(TensorSpec("b", "model.safetensors", "BF16", (2, 3), 12),)),
        changed(tensors=(TensorSpec("a", "model.safetensors", "F16", (2, 3), 12),)),
        changed(tensors=(TensorSpec("a", "model.safetensors", "BF16", (3, 2), 12),)),
        changed(options=EngineOptions(device="cuda")),
        changed(options=EngineOptions(class_name="X")),
        changed(options=EngineOptions(trust_remote_code=True)),
        changed(index_only=True),
    ],
)
def test_the_key_changes_with_whatever_can_change_the_plan(other):
    assert key(other, {"torch": "2"}) != key(JOB, {"torch": "2"})


def test_the_key_changes_with_the_software_and_not_with_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "CODE", tmp_path)
    code = tmp_path / "header" / "text.py"
    code.parent.mkdir()
    code.write_text("1")
    first = key(JOB, {"torch": "2"})
    assert first != key(JOB, {"torch": "3"})
    assert first != key(JOB, {"torch": "2", "bitsandbytes": "1"})
    assert first == key(changed(name="copy/of-it", options=EngineOptions(budget=1.0, offline=True)), {"torch": "2"})
    code.write_text("2")
    assert first != key(JOB, {"torch": "2"})


def test_the_code_in_the_key_is_ckaudits_own():
    assert {"naming.py", "header/text.py", "engines/vllm/replay.py"} <= {
        p.relative_to(caches.CODE).as_posix() for p in caches.CODE.rglob("*.py")
    }


def test_home_is_a_folder_of_the_user_without_ckaudit_home(monkeypatch):
    monkeypatch.delenv("CKAUDIT_HOME", raising=False)
    assert isinstance(caches.home(), Path)
    assert caches.home().name == "ckaudit"

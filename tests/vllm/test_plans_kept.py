"""Which plans of a release are kept, where the loader looks at what no key holds: the values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions
from ckaudit.engines.cache import PlanCache
from ckaudit.engines.vllm import VllmEngine
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
from tests.helpers import safetensors_file
from tests.vllm.mini import MINI, good

ONE, MINUS_ONE = 0x3F80, 0xBF80
"""1.0 and -1.0 in bfloat16."""


def planned(folder: Path, architecture: str, value: int, cache: PlanCache) -> Plan:
    config = {"architectures": [f"{architecture}ForCausalLM"], "layers": 2, "heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    blank = safetensors_file({name: ("BF16", shape) for name, shape in good().items()})
    start = 8 + struct.unpack("<Q", blank[:8])[0]
    data = struct.pack("<H", value) * ((len(blank) - start) // 2)
    (folder / "model.safetensors").write_bytes(blank[:start] + data)
    engine = VllmEngine(None, tree=MINI, cache=cache)
    try:
        return engine.plan(read_checkpoint(open_source(str(folder))), EngineOptions(), NullProgress())
    finally:
        engine.close()


def test_a_verdict_that_hangs_on_values_is_not_kept_for_the_next_values(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans")
    (target := tmp_path / "target").mkdir()
    assert planned(target, "Looks", MINUS_ONE, cache).error == "ValueError: negative"
    assert planned(target, "Looks", ONE, cache).verdict == "loads"


def test_one_that_hangs_on_headers_alone_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(tmp_path / "plans")
    (target := tmp_path / "target").mkdir()
    first = planned(target, "Mini", ONE, cache)
    assert first.verdict == "loads"
    monkeypatch.setattr(VllmEngine, "_run", lambda *_: pytest.fail("a second run"))
    assert planned(target, "Mini", MINUS_ONE, cache).names == first.names

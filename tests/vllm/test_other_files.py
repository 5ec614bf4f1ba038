"""Which files a release would load, where a folder holds the weights twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.engines import EngineOptions
from ckaudit.engines.vllm import VllmEngine, _other_files
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
from tests.helpers import safetensors_file
from tests.vllm.mini import MINI

TENSORS = {"model.embed.weight": ("BF16", (16, 8))}


def folder(path: Path, *names: str) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["MiniForCausalLM"], "layers": 0, "heads": 4}))
    for name in names:
        (path / name).write_bytes(safetensors_file(TENSORS))
    return path


def read(target: Path) -> Checkpoint:
    return read_checkpoint(open_source(str(target)))


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"])
def test_files_that_a_release_prefers_and_nobody_read_leave_its_verdict_open(tmp_path: Path, name: str) -> None:
    checkpoint = read(folder(tmp_path, "model.safetensors", name))
    plan = VllmEngine(None, tree=MINI).plan(checkpoint, EngineOptions(cache=False), NullProgress())
    assert plan.verdict == "not_judged"
    assert (plan.not_judged or "").startswith(f"{name} is here too, in Mistral's own format")


def test_files_that_are_read_or_not_preferred(tmp_path: Path) -> None:
    both = read(folder(tmp_path, "model.safetensors", "consolidated.safetensors"))
    assert _other_files(both, EngineOptions(vllm={"load_format": "safetensors"})) is None
    assert _other_files(read(tmp_path / "consolidated.safetensors"), EngineOptions()) is None
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "model.fp16.safetensors")
    assert _other_files(read(tmp_path), EngineOptions()) is None

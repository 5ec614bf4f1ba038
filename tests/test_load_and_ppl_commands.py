"""`ckaudit load` and `ckaudit ppl` as real programs, on the tiny trained model. Exit codes and sections, not numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
TINY = ROOT / "fixtures" / "tiny-qwen2-vl"
SCHEMA = json.loads(files("ckaudit").joinpath("report/schema_v1.json").read_text())


def run(*args: object, home: Path) -> tuple[int, str, str]:
    env = os.environ | {"CKAUDIT_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "ckaudit", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    return done.returncode, done.stdout, done.stderr


def report(*args: object, home: Path) -> tuple[int, dict[str, Any]]:
    code, out, said = run(*args, "--json", "-", home=home)
    assert out, said
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    assert document["exit_code"] == code
    return code, document


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy whose weights a test may spoil."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def spoil(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[7] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_sound_model_loads_runs_and_is_shown(tmp_path: Path) -> None:
    table = tmp_path / "stats.csv"
    code, out, said = run("load", TINY, "--stats", table, home=tmp_path)
    assert code == 0, said
    assert "✓ load complete" in out
    assert "0 errors" in out
    assert len(table.read_text().splitlines()) == 1 + 69  # a heading, then one row a tensor


def test_one_nan_is_found_by_value_and_by_running(model: Path, tmp_path: Path) -> None:
    spoil(model, "model.layers.1.mlp.up_proj.weight", float("nan"))
    code, shown, said = run("load", model, "--json", tmp_path / "report.json", home=tmp_path)
    assert code == 1, said
    assert "(not finite)" in shown  # in the place of a logit
    document = json.loads((tmp_path / "report.json").read_text())
    found = {f["check"]: f for f in document["findings"]}
    assert found["CK501"]["names"] == ["model.layers.1.mlp.up_proj.weight"]
    assert document["load"]["status"] == "complete"
    text = next(r for r in document["forward"]["runs"] if r["kind"] == "text")
    assert text["finite"] is False
    assert "layers.1" in text["first_non_finite"]["module"]


def test_a_load_that_cannot_work_is_not_begun_without_force(model: Path, tmp_path: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate((model / "model.safetensors").stat().st_size - 100)
    code, document = report("load", model, home=tmp_path)
    assert code == 1
    assert document["load"]["status"] == "not_begun"
    assert document["forward"] is None


def test_an_index_without_its_files_is_not_loaded(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    shutil.copy(TINY / "config.json", folder)
    with safe_open(TINY / "model.safetensors", "pt") as stored:
        places = dict.fromkeys(stored.keys(), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    code, document = report("load", folder, home=tmp_path)
    assert (code, document["load"]["status"], document["forward"]) == (3, "not_begun", None)


def test_an_earlier_report_is_what_a_load_is_expected_to_give(model: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    options = ("--no-values", "--modality", "text")
    assert run("load", TINY, *options, "--json", before, home=tmp_path)[0] == 0
    assert run("load", TINY, *options, "--expect", before, home=tmp_path)[0] == 0
    assert run("load", TINY, *options, "--expect", before, "--seed", "5", home=tmp_path)[0] == 3  # another input
    spoil(model, "model.norm.weight", 400.0)
    code, document = report("load", model, *options, "--expect", before, home=tmp_path)
    assert code == 1
    assert [f["check"] for f in document["findings"]] == ["CK605"] or "fingerprint" in str(document["findings"])


def test_options_that_make_no_sense_are_one_line(tmp_path: Path) -> None:
    for args in (
        ("--device", "abacus"),
        ("--engine", "sglang"),
        ("--stats", tmp_path / "x.xls"),
        ("--expect", tmp_path / "x.json", "--no-forward"),
        ("--modality", "text", "--no-forward"),
        ("--stats", tmp_path / "x.csv", "--no-values"),
    ):
        code, _, said = run("load", TINY, *args, home=tmp_path)
        assert code == 2, (args, said)
        assert "Traceback" not in said


def test_a_load_that_was_stopped_says_so_everywhere(tmp_path: Path) -> None:
    """No machine has so many devices. The names were judged, and still neither the text nor the JSON may tell of a success."""
    code, document = report("load", TINY, "--device", "cuda:99", home=tmp_path)
    assert (code, document["load"]["status"], document["load"]["blame"]) == (2, "failed", "environment")
    code, out, said = run("load", TINY, "--device", "cuda:99", home=tmp_path)
    assert (code, "exit 2: the load was stopped" in out, "exit 0" in out) == (2, True, False)
    assert said.startswith("ckaudit: 100 CUDA devices asked for")


def test_a_reference_is_kept_and_catches_another_model(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "ref.json"
    assert run("ppl", TINY, "--save-reference", kept, "--entry", "tiny", home=tmp_path)[0] == 0
    code, document = report("ppl", TINY, "--reference", kept, "--entry", "tiny", home=tmp_path)
    assert code == 0
    assert abs(document["perplexity"]["comparison"]["relative"]) < 1e-6
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(96, 96)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, document = report("ppl", model, "--reference", kept, "--entry", "tiny", home=tmp_path)
    assert code == 1
    assert "CK651" in {f["check"] for f in document["findings"]}
    code, _, said = run("ppl", TINY, "--reference", kept, "--rows", 5, home=tmp_path)
    assert code == 2
    assert "other rows" in said


def test_rows_are_compared_one_by_one_on_the_terminal(tmp_path: Path) -> None:
    code, out, said = run("ppl", TINY, "--candidate-dtype", "bfloat16", "--rows", 12, "--prove", home=tmp_path)
    assert code in (0, 1), said  # twelve rows may hide a fault, and then that is said
    assert out.startswith(str(TINY)) or "perplexity " in out
    assert "picture-0" in out
    assert "RGB to BGR" in out

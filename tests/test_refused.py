"""Spoilt files beside sound weights: an audit says `fails` where the released loader raises, and there alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ckaudit.checkpoint import read_checkpoint  # noqa: E402
from ckaudit.checks import container  # noqa: E402
from ckaudit.pipeline.stages import refused  # noqa: E402
from ckaudit.plan import Plan  # noqa: E402
from ckaudit.source import open_source  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
INDEX = "model.safetensors.index.json"
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(path, max_shard_size="4KB")
    assert (path / INDEX).is_file()
    return path


def index(document: dict[str, Any], **fields: object) -> str:
    return json.dumps(document | fields)


def entry(file: object) -> Callable[[dict[str, Any]], str]:
    """The index with this value for one tensor."""
    return lambda document: index(document, weight_map=document["weight_map"] | {"lm_head.weight": file})


INDICES: dict[str, Callable[[dict[str, Any]], str]] = {
    "as it is": index,
    "weight_map null": lambda d: index(d, weight_map=None),
    "a list": lambda d: index(d, weight_map=[*d["weight_map"]]),
    "a number": lambda d: index(d, weight_map=3),
    "empty": lambda d: index(d, weight_map={}),
    "none": lambda d: json.dumps({"metadata": d["metadata"]}),
    "a file of 3": entry(3),
    "a file of null": entry(None),
    "a list of files": entry(["x.safetensors"]),
    "no file": entry(""),
    "every file 1": lambda d: index(d, weight_map=dict.fromkeys(d["weight_map"], 1)),
    "metadata null": lambda d: index(d, metadata=None),
    "metadata a list": lambda d: index(d, metadata=[]),
    "no metadata": lambda d: json.dumps({"weight_map": d["weight_map"]}),
    "an empty metadata": lambda d: index(d, metadata={}),
    "total_size of words": lambda d: index(d, metadata={"total_size": "many"}),
    "a list at the top": lambda d: json.dumps([d]),
    "null at the top": lambda _: "null",
    "nothing": lambda _: "",
    "a byte order mark": lambda d: "\ufeff" + index(d),
    "NaN": lambda d: index(d)[:-1] + ', "x": NaN}',
    "a key twice": lambda d: '{"metadata": {},' + index(d)[1:],
    "more behind it": lambda d: index(d) + ",",
}
SETTINGS = {
    f"{file} is {text or 'empty'}": (file, text)
    for file in ("generation_config.json", "adapter_config.json")
    for text in ("{", "[]", "null", '"x"', "3", "")
} | {
    "settings of generation that make no sense": ("generation_config.json", '{"max_length": "x", "temperature": "hot"}'),
    "an adapter whose weights are not there": ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "org/base"}'),
    "a tokenizer that is none": ("tokenizer.json", "{"), "a preprocessor that is none": ("preprocessor_config.json", "{"),
    "a pipeline that is none": ("model_index.json", "{"),
}  # fmt: skip


def agree(path: Path) -> tuple[bool, bool]:
    """(what an audit of sound names says of the files, what from_pretrained does): whether it fails."""
    checkpoint = read_checkpoint(open_source(str(path)))
    plan = Plan(id="transformers", engine="transformers", release=transformers.__version__, method="live")
    (plan,) = refused((plan,), container.run(checkpoint)[0], checkpoint)
    try:
        transformers.AutoModelForCausalLM.from_pretrained(path)
    except Exception:  # noqa: BLE001  (whatever it raises)
        return plan.verdict == "fails", True
    return plan.verdict == "fails", False


@pytest.mark.parametrize("spoil", INDICES.values(), ids=INDICES)
def test_an_index(spoil: Callable[[dict[str, Any]], str], sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    (path / INDEX).write_text(spoil(json.loads((sound / INDEX).read_text())), encoding="utf-8")
    ours, theirs = agree(path)
    assert ours == theirs


@pytest.mark.parametrize(("file", "text"), SETTINGS.values(), ids=SETTINGS)
def test_settings(file: str, text: str, sound: Path, tmp_path: Path) -> None:
    if file.startswith("adapter"):
        pytest.importorskip("peft", reason="peft is not installed: then the file is not looked at")
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    (path / file).write_text(text, encoding="utf-8")
    ours, theirs = agree(path)
    assert ours == theirs


def test_files_outside_of_the_folder_are_not_judged(sound: Path, tmp_path: Path) -> None:
    """The loader would find them; an audit never reads outside of what it was given."""
    path, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(sound, path)
    shutil.copytree(sound, other)
    document = json.loads((sound / INDEX).read_text())
    document["weight_map"] = {n: f"../other/{f}" for n, f in document["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(document), encoding="utf-8")
    assert transformers.AutoModelForCausalLM.from_pretrained(path) is not None
    checkpoint = read_checkpoint(open_source(str(path)))
    plan = Plan(id="transformers", engine="transformers", release=None, method="live")
    assert refused((plan,), container.run(checkpoint)[0], checkpoint)[0].verdict == "not_judged"


@pytest.mark.parametrize(
    ("text", "release", "fails"),
    [
        ('{"weight_map": null}', "0.24.0", True), ('{"weight_map": {"a": 3}}', "0.33.0", True), ('{"weight_map": {}}', "0.33.0", True),
        ('{"weight_map": {"a": "gone.safetensors"}}', "0.25.1", False), ('{"weight_map": {"a": "gone.safetensors"}}', "0.26.0", True),
        ("[]", "0.33.0", True),
    ],
)  # fmt: skip
def test_vllm_reads_the_weight_map_alone(text: str, release: str, fails: bool, sound: Path, tmp_path: Path) -> None:
    """`filter_duplicate_safetensors_files`: it asks for no metadata, and from 0.26 on for every file."""
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    (path / INDEX).write_text(text, encoding="utf-8")
    checkpoint = read_checkpoint(open_source(str(path)))
    plan = Plan(id=f"vllm=={release}", engine="vllm", release=release, method="replay")
    findings = container.run(checkpoint)[0]
    assert (refused((plan,), findings, checkpoint)[0].verdict == "fails") is fails

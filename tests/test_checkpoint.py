"""Which files of a target count, how few reads their headers cost, and what becomes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import DictSource, Entries, checkpoint_files, header, index_file, safetensors_file

from ckaudit.checkpoint import Checkpoint, TensorSpec, components, read_checkpoint
from ckaudit.checkpoint.layout import UNKNOWN_GUESS, choose, doubles, guess_headers, other_weights, sequences
from ckaudit.progress import NullProgress
from ckaudit.source import FileInfo

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS: dict[str, Entries] = {A: {"a": ("BF16", [2, 2]), "z": ("F32", [])}, B: {"b": ("F4", [2])}}


def read(files: dict[str, bytes], **options: Any) -> Checkpoint:
    folder = options.pop("folder", "")
    return read_checkpoint(DictSource(files, **options), folder=folder)


def test_a_sharded_target() -> None:
    found = read(checkpoint_files(SHARDS, {"model_type": "llama"}), name="org/name", kind="hub", revision="c0ffee")
    assert (found.name, found.kind, found.revision) == ("org/name", "hub", "c0ffee")
    assert found.config == {"model_type": "llama"}
    assert json.loads(found.texts["config.json"]) == {"model_type": "llama"}
    assert list(found.texts) == ["config.json"]
    assert [s.path for s in found.shards] == [A, B]
    assert found.tensors == {
        "a": TensorSpec("a", A, "BF16", (2, 2), 8),
        "z": TensorSpec("z", A, "F32", (), 4),
        "b": TensorSpec("b", B, "F4", (2,), 1),
    }
    assert found.index is not None
    assert found.index.total_size == 13
    assert not found.index_only
    assert found.defects == ()
    assert found.unaudited is None


def test_an_index_alone_gives_names() -> None:
    files = checkpoint_files(SHARDS)
    found = read({INDEX: files[INDEX], "config.json": files["config.json"]})
    assert found.index_only
    assert found.tensors["a"] == TensorSpec("a", A, None, None, None)
    assert set(found.tensors) == {"a", "z", "b"}
    assert [d.code for s in found.shards for d in s.defects] == ["shard-missing", "shard-missing"]


def test_an_unreadable_shard_keeps_its_names() -> None:
    found = read(checkpoint_files(SHARDS), unreadable={B: "permission denied"})
    assert found.shards[1].header is None
    assert [(d.code, d.found) for d in found.shards[1].defects] == [("unreadable", "permission denied")]
    assert found.tensors["b"].dtype is None
    assert found.tensors["a"].dtype == "BF16"


def test_an_unknown_dtype_is_no_dtype() -> None:
    data = header({"a": ("F32", [1])}).replace(b'"F32"', b'"F99"') + bytes(4)
    assert read({"model.safetensors": data}).tensors["a"] == TensorSpec("a", "model.safetensors", None, (1,), 4)


ONE = safetensors_file({"x": ("F32", [1])})
OTHER = safetensors_file({"y": ("F32", [1])})


@pytest.mark.parametrize(
    ("files", "loaded", "strays"),
    [
        # transformers 5.24 `_get_resolved_checkpoint_files`: a single file wins over an index.
        ({"model.safetensors": ONE, INDEX: index_file({"y": A}), A: OTHER}, ["model.safetensors"], [A]),
        ({INDEX: index_file({"y": A}), A: OTHER, "extra.safetensors": ONE}, [A], ["extra.safetensors"]),
        ({"diffusion_pytorch_model.safetensors": ONE}, ["diffusion_pytorch_model.safetensors"], []),
        ({"diffusion_pytorch_model.safetensors.index.json": index_file({"y": A}), A: OTHER}, [A], []),
        ({"adapter_model.safetensors": ONE, "adapter_config.json": b"{}"}, ["adapter_model.safetensors"], []),
        ({"model.safetensors": ONE, "adapter_model.safetensors": OTHER}, ["model.safetensors"], []),
        ({"model.safetensors": ONE, "consolidated.safetensors": OTHER}, ["model.safetensors"], []),
        ({"consolidated.safetensors": ONE, "params.json": b"{}"}, ["consolidated.safetensors"], []),
        ({"model.safetensors": ONE, "model.fp16.safetensors": OTHER}, ["model.safetensors"], []),
        ({"model.fp16.safetensors": OTHER}, ["model.fp16.safetensors"], []),
        ({"model.safetensors.index.fp16.json": index_file({"y": "model.fp16-00001-of-00001.safetensors"}),
          "model.fp16-00001-of-00001.safetensors": OTHER}, ["model.fp16-00001-of-00001.safetensors"], []),
        ({A: ONE, B: OTHER}, [A, B], []),
        ({"model.safetensors": ONE, "original/x.safetensors": OTHER}, ["model.safetensors"], []),
        ({"config.json": b'{"transformers_weights": "t.safetensors"}', "t.safetensors": ONE, "model.safetensors": OTHER},
         ["t.safetensors"], ["model.safetensors"]),
        ({"config.json": b'{"transformers_weights": "t.safetensors.index.json"}', "t.safetensors.index.json": index_file({"y": B}),
          B: OTHER, "model.safetensors": ONE}, [B], ["model.safetensors"]),
        # An index none of whose files is here, while others are: those count, and the checks say that the index is stale.
        ({INDEX: index_file({"x": "model-00001-of-00030.safetensors"}), A: ONE, B: OTHER}, [A, B], []),
        ({INDEX: b"{", A: ONE, B: OTHER}, [A, B], []),
        ({INDEX: index_file({"x": "../evil.safetensors"}), A: ONE}, [A], []),
    ],
)  # fmt: skip
def test_which_files_count(files: dict[str, bytes], loaded: list[str], strays: list[str]) -> None:
    found = read(files)
    assert [s.path for s in found.shards] == loaded
    assert [s.path for s in found.strays] == strays
    assert all(s.header is not None for s in (*found.shards, *found.strays))
    assert {t.shard for t in found.tensors.values()} == set(loaded)


def test_of_a_named_file_only_that_counts() -> None:
    files = checkpoint_files(SHARDS)
    found = read({A: files[A], "config.json": files["config.json"]}, name=f"some/folder/{A}")
    assert [s.path for s in found.shards] == [A]
    found = read(files | {"model.safetensors": ONE}, name=f"some/folder/{INDEX}")
    assert [s.path for s in found.shards] == [A, B]


def test_nothing_outside_the_folder_is_read() -> None:
    files = {INDEX: index_file({"a": "../secret.safetensors", "b": "/etc/passwd", "c": "model.safetensors"})}
    source = DictSource(files | {"../secret.safetensors": ONE, "/etc/passwd": ONE, "model.safetensors": OTHER})
    read_checkpoint(source)
    assert {span.path for span in source.reads} == {INDEX, "model.safetensors"}


def test_a_component_folder_is_audited_as_a_unit() -> None:
    files = {
        "model_index.json": b'{"_class_name": "FluxPipeline"}',
        "transformer/config.json": b'{"_class_name": "FluxTransformer2DModel"}',
        "transformer/diffusion_pytorch_model.safetensors": ONE,
        "text_encoder/model.safetensors": OTHER,
        "text_encoder/config.json": b'{"model_type": "t5"}',
    }
    assert components(files) == ("text_encoder", "transformer")
    root = read(files)
    assert root.shards == ()
    assert root.unaudited is not None
    assert "text_encoder, transformer" in root.unaudited
    part = read(files, folder="transformer")
    assert part.folder == "transformer/"
    assert part.config == {"_class_name": "FluxTransformer2DModel"}
    assert list(part.texts) == ["config.json"]
    assert [s.path for s in part.shards] == ["transformer/diffusion_pytorch_model.safetensors"]
    assert part.tensors["x"].shard == "transformer/diffusion_pytorch_model.safetensors"
    assert part.files == root.files


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"pytorch_model.bin": b"x", "training_args.bin": b"x"}, ".bin"),
        ({"model-Q4_K_M.gguf": b"GGUF"}, ".gguf"),
        ({"onnx/model.onnx": b"x"}, ".onnx"),
        ({"config.json": b"{}"}, "no safetensors file is here"),
        ({"training_args.bin": b"x", "optimizer.pt": b"x"}, "no safetensors file is here"),
        ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "no tensor name"),
    ],
)
def test_why_nothing_can_be_audited(files: dict[str, bytes], reason: str) -> None:
    found = read(files)
    assert found.tensors == {}
    assert found.unaudited is not None
    assert reason in found.unaudited


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (b'{"model_type": "llama",}', "double quotes"),
        (b"[1]", "a list"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1", "LFS pointer"),
        (b'<<<<<<< HEAD\n{"a": 1}\n=======\n{"a": 2}\n>>>>>>> x\n', "merge conflict"),
        (b"[" * 100_000, "recursion"),
        (b'{"a": "\xff"}', "utf-8"),
    ],
)
def test_a_config_that_is_no_json_object(config: bytes, found: str) -> None:
    checkpoint = read({"config.json": config, "model.safetensors": ONE})
    assert checkpoint.config is None
    (defect,) = checkpoint.defects
    assert defect.code == "config-json"
    assert found in defect.found


def test_code_is_taken_only_when_asked_for() -> None:
    files = {
        "config.json": b"{}",
        "modeling_x.py": b"pass",
        "model.safetensors": ONE,
        "README.md": b"x",
        "tokenizer.json": b"{}",
    }
    assert set(read(files).texts) == {"config.json"}
    assert set(read_checkpoint(DictSource(files), code=True).texts) == {"config.json", "modeling_x.py"}


def many(layer: int, count: int) -> Entries:
    return {f"model.layers.{layer}.mlp.experts.{i}.down_proj.weight": ("F8_E4M3", [2048, 7168]) for i in range(count)}


def big(entries: Entries) -> tuple[bytes, int]:
    """The header and the size of the file it belongs to; its data is never read."""
    head = header(entries, {"format": "pt"})
    return head, len(head) + sum(s[0] * s[1] for _, s in entries.values())


def test_a_shard_costs_one_read_of_little_more_than_its_header() -> None:
    shards = {f"model-{i:05}-of-00003.safetensors": many(i, 300 * i) for i in (1, 2, 3)}
    heads = {path: big(entries) for path, entries in shards.items()}
    files = {path: head for path, (head, _) in heads.items()}
    files[INDEX] = index_file({name: path for path, entries in shards.items() for name in entries}, 1)
    source = DictSource(files, sizes={path: size for path, (_, size) in heads.items()})
    found = read_checkpoint(source)
    assert all(s.header and len(s.header.tensors) == 300 * i for i, s in enumerate(found.shards, 1))
    reads = [span for span in source.reads if span.path in heads]
    assert len(reads) == 3
    assert sum(span.stop for span in reads) <= 1.1 * sum(len(head) for head, _ in heads.values())


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_header_around_the_guess(extra: int) -> None:
    """One read where it fits to the byte, two without a gap or an overlap where it does not."""
    head = header({"a": ("F32", [1])}, {"pad": "", "format": "pt"})
    head = header({"a": ("F32", [1])}, {"pad": "x" * (UNKNOWN_GUESS - len(head) + extra * 8), "format": "pt"})
    assert len(head) == UNKNOWN_GUESS + extra * 8
    source = DictSource({"model.safetensors": head + bytes(4)})
    found = read_checkpoint(source)
    assert list(found.tensors) == ["a"]
    assert found.shards[0].defects == ()
    spans = [(s.start, s.stop) for s in source.reads]
    assert spans == [(0, UNKNOWN_GUESS)] + ([(UNKNOWN_GUESS, len(head))] if extra > 0 else [])


def test_a_file_that_is_no_header_is_not_read_further() -> None:
    for data in (
        b"<!DOCTYPE html>" * 20_000,
        bytes(300_000),
        b"\xff" * 300_000,
        (2**39).to_bytes(8, "little") + b'{"a' * 100_000,
    ):
        source = DictSource({"model.safetensors": data})
        found = read_checkpoint(source)
        assert len(source.reads) == 1
        assert len(found.shards[0].defects) == 1


def test_guesses_come_from_names_and_sizes() -> None:
    short, long = guess_headers({"a": "x", "b" * 50: "y"}, {"x": 100, "y": 100}).values()
    assert long - short == 49
    small, large = guess_headers({"a": "x", "b": "y"}, {"x": 100, "y": 10**10}).values()
    assert large - small == 2 * (11 - 3)


def test_sequences() -> None:
    (one,) = sequences(["model-00001-of-00004.safetensors", "model-00003-of-00004.safetensors", "x.safetensors"])
    assert (one.total, sorted(one.present), one.missing) == (4, [1, 3], [2, 4])
    assert sequences(["model-00001-of-micro.safetensors"]) == []
    assert [s.missing for s in sequences(["model_00001-of-000001.safetensors"])] == [[]]
    assert [s.missing for s in sequences(["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"])] == [
        []
    ]
    (huge,) = sequences(["model-1-of-999999999.safetensors"])
    assert len(huge.missing) == 100


@pytest.mark.parametrize(
    ("path", "is_double"),
    [
        ("model.fp16.safetensors", True), ("model.fp16-00001-of-00002.safetensors", True), ("model-00001-of-00002.fp16.safetensors", True),
        ("consolidated-00001-of-00002.safetensors", True), ("adapter_model.safetensors", True),
        ("model.safetensors", False), ("model-00001-of-00002.safetensors", False), ("model-vision.safetensors", False),
        ("flux1-dev.safetensors", False), ("v1.5.safetensors", False),
    ],
)  # fmt: skip
def test_files_that_double_a_checkpoint(path: str, is_double: bool) -> None:
    assert (doubles(path) is not None) == is_double


def test_other_weights() -> None:
    paths = [
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "a/b.gguf",
        "tokenizer.model",
        "rng_state_0.pth",
        "model.onnx",
    ]
    assert other_weights(paths) == ["pytorch_model.bin", "a/b.gguf", "model.onnx"]


def test_choosing_needs_no_files() -> None:
    assert choose({}, "x", None).shards == ()
    assert choose({"model.safetensors": FileInfo("model.safetensors", 1)}, "x", {"transformers_weights": 3}).shards == (
        "model.safetensors",
    )


def test_progress_counts_every_file() -> None:
    steps: list[int] = []

    class Task:
        def advance(self, count: int = 1) -> None:
            steps.append(count)

        def __enter__(self) -> Task:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    class Watching(NullProgress):
        def task(self, label: str, total: int | None = None) -> Task:  # type: ignore[override]
            assert total == 2
            return Task()

    read_checkpoint(DictSource(checkpoint_files(SHARDS)), progress=Watching())
    assert sum(steps) == 2

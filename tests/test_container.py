"""CK1xx: each kind of fault of files and index is found once, and what only looks like one is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers import DictSource, Entries, checkpoint_files, encode, header, header_json, index_file, safetensors_file

from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.checks import container
from ckaudit.findings import Finding
from ckaudit.header import MAX_HEADER

INDEX = "model.safetensors.index.json"
CONFIG = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS: dict[str, Entries] = {
    A: {"model.embed_tokens.weight": ("BF16", [8, 4]), "model.layers.0.w": ("BF16", [4, 4])},
    B: {"model.layers.1.w": ("BF16", [4, 4]), "lm_head.weight": ("BF16", [8, 4])},
}
SOUND = checkpoint_files(SHARDS, json.loads(CONFIG))
NAMES = [name for entries in SHARDS.values() for name in entries]
WHOLE = {name: entry for entries in SHARDS.values() for name, entry in entries.items()}
MAP = {name: path for path, entries in SHARDS.items() for name in entries}
TOTAL = 2 * (64 + 32)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"


def one(data: bytes) -> dict[str, bytes]:
    return {"model.safetensors": data, "config.json": CONFIG}


def audit(files: dict[str, bytes], **options: Any) -> tuple[Checkpoint, list[Finding], dict[str, str]]:
    folder = options.pop("folder", "")
    checkpoint = read_checkpoint(DictSource(files, **options), folder=folder)
    findings, skips = container.run(checkpoint)
    return checkpoint, list(findings), {s.check: s.reason for s in skips}


def told(findings: list[Finding]) -> list[tuple[str, str, int]]:
    return [(f.check, f.severity, f.count) for f in findings]


def entries(prefix: str, count: int, dtype: str = "BF16") -> Entries:
    return {f"{prefix}.{i}.weight": (dtype, [4, 4]) for i in range(count)}


def with_map(change: dict[str, str | None], total: int | None = TOTAL) -> dict[str, bytes]:
    """The sound target with another weight_map; None takes a name out."""
    weight_map = {name: path for name, path in (MAP | change).items() if path is not None}
    return SOUND | {INDEX: index_file(weight_map, total)}


QUIET: dict[str, dict[str, bytes]] = {
    "sharded": SOUND,
    "single": one(safetensors_file(WHOLE)),
    "zero-size marker, as in Wan 2.2 fp8": one(safetensors_file({"a": ("F8_E4M3", [2]), "scaled_fp8": ("F8_E4M3", [0])})),
    "no dimension": one(safetensors_file({"logit_scale": ("F32", [])})),
    "an index whose every entry is model.safetensors": one(safetensors_file(WHOLE))
    | {INDEX: index_file(dict.fromkeys(WHOLE, "model.safetensors"), TOTAL)},
    "mlx's metadata": one(safetensors_file(WHOLE, {"format": "mlx"})),
    "CRLF": SOUND | {INDEX: SOUND[INDEX].replace(b"\n", b"\r\n")},
    "more in the index's metadata": SOUND | {INDEX: index_file(MAP, TOTAL, total_parameters=96, total_shards=2)},
    "six digits of total": checkpoint_files({"model-00001-of-000001.safetensors": WHOLE}, index=True),
    "words for a total": checkpoint_files({f"model-0000{i}-of-micro.safetensors": entries(str(i), 2) for i in (1, 2)}),
    "underscores": checkpoint_files({f"model_0000{i}-of-00002.safetensors": entries(str(i), 2) for i in (1, 2)}),
    "a shard of another name beside numbered ones": checkpoint_files(SHARDS | {"model-vision.safetensors": entries("v", 2)}),
    "an adapter": {"adapter_model.safetensors": safetensors_file(WHOLE), "adapter_config.json": b"{}"},
    "diffusers": {"diffusion_pytorch_model.safetensors": safetensors_file(WHOLE), "config.json": b'{"_class_name": "X"}'},
    "named in the config": {
        "config.json": b'{"transformers_weights": "w.safetensors", "model_type": "x"}', "w.safetensors": safetensors_file(WHOLE),
    },
    "other files": SOUND | {"tokenizer.json": b"{}", "pytorch_model.bin": b"x", "README.md": b"x", "onnx/model.onnx": b"x"},
    "sub-byte": one(safetensors_file({"w": ("F4", [2, 8]), "s": ("F8_E8M0", [2, 1])})),
    "header in another order than the data": one(
        encode({k: header_json(WHOLE, {"format": "pt"})[k] for k in ["__metadata__", *sorted(WHOLE)]}) + bytes(TOTAL)
    ),
}  # fmt: skip


@pytest.mark.parametrize("files", QUIET.values(), ids=QUIET)
def test_what_is_sound_is_left_alone(files: dict[str, bytes]) -> None:
    _, findings, skips = audit(files)
    assert told(findings) == []
    assert skips == {}


def spoiled(name: str, **fields: object) -> bytes:
    document = header_json(WHOLE, {"format": "pt"})
    document[name] |= fields
    return encode(document) + bytes(TOTAL)


CUT = safetensors_file(WHOLE)[:-70]  # into the last two tensors, of 32 and 64 bytes

GENERATION = "generation_config.json"
CAUSAL, ENCODER = (json.dumps({"architectures": [f"Llama{x}"]}).encode() for x in ("ForCausalLM", "Model"))
LEFT = "error" if find_spec("peft") else "warning"

FILES: dict[str, tuple[dict[str, bytes], list[tuple[str, str, int]]]] = {
    "LFS pointers": (SOUND | {A: LFS, B: LFS}, [("CK101", "error", 2)]),
    "an HTML page": (one(b"<!DOCTYPE html><html>"), [("CK101", "error", 1)]),
    "a pickle": (one(b"PK\x03\x04\x14\x00\x06\x00" + bytes(100)), [("CK101", "error", 1)]),
    "two kinds": (SOUND | {A: LFS, B: b""}, [("CK101", "error", 1), ("CK101", "error", 1)]),
    "cut in its data": (one(CUT), [("CK103", "error", 1)]),
    "cut in its header": (one(safetensors_file(WHOLE)[:150]), [("CK103", "error", 1)]),
    "broken JSON": (one(encode('{"a":{"dtype":"F32",]}')), [("CK104", "error", 1)]),
    "not UTF-8": (one(encode(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}') + b"x"), [("CK104", "error", 1)]),
    "a name twice": (
        one(encode(header(WHOLE, {"format": "pt"})[8:].rstrip()[:-1] + b',"lm_head.weight":{"dtype":"BF16","shape":[8,4],'
                   b'"data_offsets":[128,192]}}') + bytes(TOTAL)),
        [("CK105", "error", 1)],
    ),
    "an entry without shape": (one(spoiled("lm_head.weight", shape=None)), [("CK106", "error", 1)]),
    "an unknown dtype": (one(spoiled("lm_head.weight", dtype="F8_E4M3FN")), [("CK107", "error", 1)]),
    "an overlap": (one(spoiled("model.layers.0.w", data_offsets=[60, 92])), [("CK108", "error", 2)]),
    "declares more than it spans": (one(spoiled("model.layers.0.w", shape=[1000, 1000])), [("CK109", "error", 1)]),
    "trailing bytes": (one(safetensors_file(WHOLE) + bytes(5)), [("CK110", "error", 1)]),
    "metadata of numbers": (one(safetensors_file(WHOLE).replace(b'"pt"', b"1234")), [("CK111", "error", 1)]),
    "a field too many": (
        one(encode(header_json(WHOLE, {"format": "pt"}) | {"x": {"dtype": "U8", "shape": [0], "data_offsets": [192, 192], "y": 1}})
            + bytes(TOTAL)),
        [("CK112", "warning", 1)],
    ),
    "no metadata": (one(safetensors_file(WHOLE, None)), [("CK113", "warning", 1)]),
    "no format": (SOUND | {A: safetensors_file(SHARDS[A], {}), B: safetensors_file(SHARDS[B], {"x": "y"})}, [("CK113", "warning", 2)]),
    "a format of its own": (one(safetensors_file(WHOLE, {"format": "np"})), [("CK113", "warning", 1)]),
    "no format, no config": ({"model.safetensors": safetensors_file(WHOLE, None)}, [("CK113", "note", 1)]),
    "no tensors": (one(safetensors_file({}, {"crc": "12"})), [("CK114", "warning", 1)]),
    "no tensors in one shard": (
        SOUND | {"x.safetensors": safetensors_file({})}, [("CK130", "warning", 1)],
    ),
    "generation settings that are none": (SOUND | {"config.json": CAUSAL, GENERATION: b"[]"}, [("CK117", "error", 1)]),
    "generation settings cut": (SOUND | {"config.json": CAUSAL, GENERATION: b"{"}, [("CK117", "warning", 1)]),
    "generation settings": (SOUND | {"config.json": CAUSAL, GENERATION: b'{"top_k": NaN}'}, []),
    "generation settings of an encoder": (SOUND | {"config.json": ENCODER, GENERATION: b"[]"}, []),
    "an adapter that was left": (SOUND | {"adapter_config.json": b'{"r": 4}'}, [("CK117", LEFT, 1)]),
    "an adapter with its weights": (SOUND | {"adapter_config.json": b'{"r": 4}', "adapter_model.bin": b"x"}, []),
    "config in a merge conflict": (SOUND | {"config.json": b"<<<<<<< HEAD\n{}\n=======\n{}\n>>>>>>> x"}, [("CK116", "error", 1)]),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), FILES.values(), ids=FILES)
def test_faults_of_one_file(files: dict[str, bytes], expected: list[tuple[str, str, int]]) -> None:
    _, findings, _ = audit(files)
    assert told(findings) == expected
    assert all(f.message and f.names for f in findings)


def test_a_header_over_the_cap_is_told_and_read() -> None:
    files = one(encode(header(WHOLE, {"format": "pt"})[8:].ljust(MAX_HEADER + 1)) + bytes(TOTAL))
    checkpoint, findings, _ = audit(files)
    assert told(findings) == [("CK102", "error", 1)]
    assert len(checkpoint.tensors) == len(WHOLE)


ABSENT_43 = {f"layers.{i}.attn.wo_a.scale": A for i in range(43)}

SETS: dict[str, tuple[dict[str, bytes], list[tuple[str, str, int]]]] = {
    # index by itself
    "merge conflict": (SOUND | {INDEX: SOUND[INDEX] + b"\n=======\n" + SOUND[INDEX]}, [("CK120", "error", 1)]),
    "no weight_map": (SOUND | {INDEX: b'{"metadata": {}}'}, [("CK121", "error", 1)]),
    "no metadata": (SOUND | {INDEX: json.dumps({"weight_map": MAP}).encode()}, [("CK121", "error", 1)]),
    "weight_map twice": (SOUND | {INDEX: b'{"weight_map": {},' + SOUND[INDEX][1:]}, [("CK121", "warning", 1)]),
    "a file of 3": (
        SOUND | {INDEX: SOUND[INDEX].replace(b'"lm_head.weight": "' + B.encode() + b'"', b'"lm_head.weight": 3')},
        [("CK121", "error", 1), ("CK128", "warning", 1)],
    ),
    "empty": ({INDEX: index_file({}, 0), "config.json": CONFIG}, [("CK122", "error", 1)]),
    "a name twice": (
        SOUND | {INDEX: SOUND[INDEX].replace(b'"lm_head.weight"', b'"model.layers.1.w": "' + B.encode() + b'", "lm_head.weight"')},
        [("CK123", "error", 1)],
    ),
    "path traversal": (with_map({"x": "../../etc/shadow.safetensors"}), [("CK124", "error", 1)]),
    # index against shards
    "a shard missing": ({k: v for k, v in SOUND.items() if k != B}, [("CK125", "error", 1)]),
    "index lists what the shard lacks": (with_map({"mtp.fc.weight": B}), [("CK126", "error", 1)]),
    "index lists scales that no shard has": (with_map(ABSENT_43), [("CK126", "error", 43)]),
    "index has two tensors in each other's shard": (
        with_map({"model.layers.0.w": B, "model.layers.1.w": A}), [("CK127", "warning", 2)],
    ),
    "a shard has what the index lacks": (with_map({"lm_head.weight": None}), [("CK128", "warning", 1)]),
    "a tensor in two shards": (
        SOUND | {B: safetensors_file(SHARDS[B] | {"model.layers.0.w": ("F32", [4, 4])}), INDEX: index_file(MAP, 224)},
        [("CK129", "error", 1)],
    ),
    "a tensor in two shards, counted twice": (
        SOUND | {B: safetensors_file(SHARDS[B] | {"model.layers.0.w": ("BF16", [4, 4])}), INDEX: index_file(MAP, TOTAL + 32)},
        [("CK129", "error", 1)],
    ),
    "index lists and counts what no shard has": (with_map({"mtp.fc.weight": B}, TOTAL + 100), [("CK126", "error", 1)]),
    "index neither lists nor counts what a shard has": (with_map({"lm_head.weight": None}, TOTAL - 64), [("CK128", "warning", 1)]),
    "index counts neither what it lists nor what is there": (
        with_map({"lm_head.weight": None}, TOTAL - 60), [("CK128", "warning", 1), ("CK132", "warning", 1)],
    ),
    "total_size lies": (with_map({}, total=TOTAL + 2), [("CK132", "warning", 1)]),
    "total_size 0": (with_map({}, total=0), [("CK132", "warning", 1)]),
    "total_size a string": (
        SOUND | {INDEX: json.dumps({"metadata": {"total_size": "192"}, "weight_map": MAP}).encode()}, [("CK132", "warning", 1)],
    ),
    "no total_size, as mflux writes": (with_map({}, total=None), [("CK132", "note", 1)]),
    # an index of something else
    "index of a 30-shard split beside 15 shards": (
        {f"model-{i:05}-of-00015.safetensors": safetensors_file(entries(f"layers.{i}", 2)) for i in range(1, 16)}
        | {INDEX: index_file({f"layers.{i}.{j}.weight": f"model-{2 * i - 1 + j:05}-of-00030.safetensors"
                              for i in range(1, 16) for j in (0, 1)}, 960), "config.json": CONFIG},
        [("CK133", "error", 1)],
    ),
    "the base model's index beside other files": (
        {A: safetensors_file(entries("model.layers", 9)), B: safetensors_file(entries("lm", 3)), "config.json": CONFIG}
        | {INDEX: index_file({f"transformer.h.{i}.w": A if i < 9 else B for i in range(12)}, 384)},
        [("CK134", "error", 1)],
    ),
    # the folder
    "shards without an index": ({k: v for k, v in SOUND.items() if k != INDEX}, [("CK135", "error", 2)]),
    "one file of another name": ({"llama.safetensors": safetensors_file(WHOLE), "config.json": CONFIG}, [("CK135", "error", 1)]),
    "one file of another name without a config": ({"flux1-dev.safetensors": safetensors_file(WHOLE)}, [("CK135", "warning", 1)]),
    "two of four shards and no index": (
        {f"model-0000{i}-of-00004.safetensors": safetensors_file(entries(f"layers.{i}", 2)) for i in (1, 2)} | {"config.json": CONFIG},
        [("CK136", "error", 2)],
    ),
    "a number that the index skips": (
        checkpoint_files({f"model-0000{i}-of-00003.safetensors": entries(f"layers.{i}", 2) for i in (1, 3)}),
        [("CK136", "warning", 1)],
    ),
    "a 4-bit model.safetensors beside the shards of an index": (
        SOUND | {"model.safetensors": safetensors_file({n: ("U32", [4]) for n in WHOLE} | {"lm_head.scales": ("F16", [4])})},
        [("CK131", "error", 3)],
    ),
    "the same model whole beside its shards": (SOUND | {"model.safetensors": safetensors_file(WHOLE)}, [("CK131", "warning", 3)]),
    "a whole model beside shards without an index": (
        {k: v for k, v in SOUND.items() if k != INDEX} | {"model.safetensors": safetensors_file(WHOLE)}, [("CK130", "error", 2)],
    ),
    "a file more than the index has": (SOUND | {"extra.safetensors": safetensors_file({"x": ("F32", [4])})}, [("CK130", "warning", 1)]),
    "a shard more than the index has": (
        checkpoint_files({"model-00001-of-00001.safetensors": WHOLE}, index=True) | {"old.safetensors": safetensors_file(WHOLE)},
        [("CK130", "warning", 1)],
    ),
    "Mistral's own format beside": (SOUND | {"consolidated.safetensors": safetensors_file(WHOLE)}, [("CK130", "note", 1)]),
    "a variant beside": (one(safetensors_file(WHOLE)) | {"model.fp16.safetensors": b"x"}, [("CK130", "note", 1)]),
    "a second copy in a sub-folder": (
        SOUND | {f"original/model--0000{i}-of-00002.safetensors": SOUND[A] for i in (1, 2)}, [("CK137", "warning", 2)],
    ),
    "a small module in a sub-folder": (
        SOUND | {"2_Dense/model.safetensors": safetensors_file({"w": ("F32", [2])})}, [("CK137", "note", 1)],
    ),
    "two splits, an index for one": (
        checkpoint_files({f"diffusion-0000{i}-of-00002.safetensors": entries(f"b.{i}", 4) for i in (1, 2)})
        | {f"diffusion-0000{i}-of-00004.safetensors": safetensors_file({f"b.{(i + 1) // 2}.{j}.weight": ("BF16", [4, 4])
           for j in ((0, 1) if i % 2 else (2, 3))}) for i in (1, 2, 3, 4)},
        [("CK130", "warning", 4)],
    ),
    "two splits and no index": (
        {f"model-0000{i}-of-00002.safetensors": safetensors_file(entries(f"b.{i}", 4)) for i in (1, 2)}
        | {f"model-0000{i}-of-00004.safetensors": safetensors_file({f"b.{(i + 1) // 2}.{j}.weight": ("BF16", [4, 4])
           for j in ((0, 1) if i % 2 else (2, 3))}) for i in (1, 2, 3, 4)},
        [("CK129", "error", 8), ("CK135", "warning", 6)],
    ),
    "only .bin": ({"pytorch_model.bin": b"x" * 10, "config.json": CONFIG}, [("CK138", "warning", 1)]),
    "only GGUF": ({"m-Q4_K_M.gguf": b"GGUF"}, [("CK138", "warning", 1)]),
    "nothing": ({"README.md": b"x"}, [("CK138", "error", 0)]),
    "a pipeline of components": (
        {"model_index.json": b"{}", "unet/diffusion_pytorch_model.safetensors": SOUND[A]}, [("CK138", "warning", 1)],
    ),
    "weights that the config names are not there": (
        {"config.json": b'{"transformers_weights": "w.safetensors"}', "model.safetensors": safetensors_file(WHOLE)},
        [("CK125", "error", 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), SETS.values(), ids=SETS)
def test_faults_of_the_set(files: dict[str, bytes], expected: list[tuple[str, str, int]]) -> None:
    _, findings, _ = audit(files)
    assert told(findings) == expected
    assert all(f.message for f in findings)


def test_missing_shard_names_what_went_with_it() -> None:
    _, (finding,), skips = audit({k: v for k, v in SOUND.items() if k != B})
    assert finding.names == (B,)
    assert "2 tensors" in finding.message
    assert "CK126" in skips
    assert "1 of 2 headers" in skips["CK126"]


def test_absent_tensors_are_named_with_their_shard() -> None:
    _, (finding,), _ = audit(with_map(ABSENT_43))
    assert finding.names == tuple(ABSENT_43)
    assert finding.wanted == f"layers.0.attn.wo_a.scale in {A}"
    assert finding.blame == "checkpoint"


def test_a_stray_shows_both_sides() -> None:
    _, (finding,), _ = audit(SETS["a 4-bit model.safetensors beside the shards of an index"][0])
    assert "U32 [4]" in finding.message
    assert "BF16" in finding.message
    _, (finding,), _ = audit(SETS["a second copy in a sub-folder"][0])
    assert finding.bytes == 2 * len(SOUND[A])


def test_what_transformers_loads_instead_is_told() -> None:
    files = SETS["shards without an index"][0]
    _, (finding,), _ = audit(files | {"pytorch_model.bin": b"x"})
    assert "transformers loads pytorch_model.bin instead" in finding.message
    _, (finding,), _ = audit(files)
    assert "transformers finds no weights" in finding.message


def test_two_runs_say_the_same() -> None:
    """Whatever the order in which sets of strings come out, which differs from process to process."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_container as t\n"
        "for files, _ in t.SETS.values(): print([(f.message, f.names, f.wanted, f.found) for f in t.audit(files)[1]])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


def test_bytes_missing_and_left_over() -> None:
    _, (cut,), _ = audit(one(CUT))
    assert cut.bytes == 70
    _, (long,), _ = audit(one(safetensors_file(WHOLE) + bytes(5)))
    assert long.bytes == 5


def test_an_index_alone_says_what_is_left_unjudged() -> None:
    checkpoint, findings, skips = audit({INDEX: SOUND[INDEX], "config.json": CONFIG})
    assert len(checkpoint.tensors) == 4
    assert findings == []
    assert {"CK101", "CK103", "CK105", "CK109", "CK125", "CK126", "CK129", "CK132"} <= skips.keys()


def test_on_the_hub_an_index_without_its_shards_is_a_fault() -> None:
    _, findings, _ = audit({INDEX: SOUND[INDEX], "config.json": CONFIG}, kind="hub", name="org/name")
    assert told(findings) == [("CK125", "error", 2)]


def test_nothing_to_audit_passes_nothing() -> None:
    _, _, skips = audit({"pytorch_model.bin": b"x"})
    assert skips.keys() == {c.id for c in container.CHECKS} - {"CK138"}


def test_one_file_of_a_set_is_judged_by_itself() -> None:
    _, findings, skips = audit({A: SOUND[A], "config.json": CONFIG}, name=f"folder/{A}")
    assert findings == []
    assert skips == {"CK125": "one file of a set was named, and the others were left alone"}


@pytest.mark.parametrize(
    ("reason", "severity", "blame"),
    [
        ("a link to nothing", "error", "checkpoint"),
        ("a link that leads out of the target, so it is not followed", "error", "checkpoint"),
        ("permission denied", "warning", "environment"),
        ("not in the local cache of the Hub", "warning", "environment"),
    ],
)
def test_what_cannot_be_read_is_never_silent(reason: str, severity: str, blame: str) -> None:
    _, (finding,), skips = audit(SOUND, unreadable={A: reason})
    assert (finding.check, finding.severity, finding.blame, finding.names) == ("CK115", severity, blame, (A,))
    assert reason in finding.message
    assert "CK101" in skips


def test_an_unreadable_index_is_told_too() -> None:
    _, findings, _ = audit(SOUND, unreadable={INDEX: "permission denied"})
    assert [f.check for f in findings][:1] == ["CK115"]


def test_sizes_that_are_not_known_leave_the_end_unjudged() -> None:
    _, findings, skips = audit(SOUND, sizes={A: None})
    assert findings == []
    assert skips == dict.fromkeys(("CK103", "CK110"), f"the size of {A} is not known")


def test_hostile_names_cost_nothing() -> None:
    evil = {"a\x1b[2J": ("F32", [1]), "..\u202e/x\n": ("F32", [1])}
    _, findings, _ = audit(one(safetensors_file(evil)))
    assert findings == []


def test_ids_are_unique_and_in_order() -> None:
    ids = [c.id for c in container.CHECKS]
    assert ids == sorted(set(ids))
    assert all(i.startswith("CK1") for i in ids)


def test_a_component_is_audited_in_its_folder() -> None:
    files = {f"transformer/{path}": data for path, data in SOUND.items()} | {
        "vae/diffusion_pytorch_model.safetensors": SOUND[A]
    }
    checkpoint, findings, skips = audit(files, folder="transformer")
    assert len(checkpoint.tensors) == 4
    assert (findings, skips) == ([], {})
    _, (finding,), _ = audit({p: d for p, d in files.items() if not p.endswith(B)}, folder="transformer")
    assert (finding.check, finding.names) == ("CK125", (B,))

"""What only a GPU shows: asynchronous copies, reductions on the device, real memory figures. Skipped where there is none."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tiny_models  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_load import KINDS, checks, run, spoil  # noqa: E402

from ckaudit.header import TORCH_DTYPES  # noqa: E402
from ckaudit.materialize import moments, values  # noqa: E402
from ckaudit.materialize.dtypes import torch_dtype, torch_shape  # noqa: E402
from ckaudit.materialize.hostmap import MappedFiles  # noqa: E402
from ckaudit.materialize.layout import Stored, plan  # noqa: E402
from ckaudit.materialize.stream import DeviceStream  # noqa: E402
from ckaudit.naming import natural_key  # noqa: E402

GPU = torch.device("cuda", 0)
KNOWN = [name for name in TORCH_DTYPES if name == "U8" or torch_dtype(name) is not torch.uint8]


def drawn(dtype: str, size: int) -> bytes:
    """`size` bytes of this dtype, no NaN and no Inf among them: those are counted elsewhere, from the file."""
    kind = torch_dtype(dtype)
    if dtype == "BOOL":
        return bytes(b & 1 for b in os.urandom(size))
    if not kind.is_floating_point or dtype in ("F4", "F8_E8M0"):
        return os.urandom(size).replace(b"\xff", b"\x7e")
    numbers = torch.randn(size // kind.itemsize, dtype=torch.float64)
    numbers[::10] = 0
    return bytes(numbers.to(kind).view(torch.uint8).numpy())


def stored(folder: Path, sizes: dict[str, int], dtype: str) -> tuple[list[str], list[Stored], dict[str, bytes]]:
    """A file of one tensor per size (in bytes), after a header of 16 bytes: numbers as in a model, every tenth of them zero."""
    content = {name: drawn(dtype, size) for name, size in sizes.items()}
    path = folder / "data.bin"
    path.write_bytes(bytes(16) + b"".join(content.values()))
    tensors, at = [], 16
    for name, data in content.items():
        width = 1 if dtype == "F4" else torch_dtype(dtype).itemsize
        shape = (len(data) // width * (2 if dtype == "F4" else 1),)
        tensors.append(Stored(name, 0, dtype, shape, at, at + len(data)))
        at += len(data)
    return [str(path)], tensors, content


@pytest.mark.parametrize("dtype", KNOWN)
def test_every_dtype_arrives_whole_and_is_judged_as_on_the_cpu(dtype: str, tmp_path: Path) -> None:
    # Small ones of one kind, one past the limit for batching, one of more than a block's worth of windows.
    sizes = {"a": 512, "b": 512, "c": 512, "d": 16, "large": 1 << 20, "larger": (9 << 20) + 16}
    files, tensors, content = stored(tmp_path, sizes, dtype)
    layout = plan(tensors, natural_key, (), 6 << 20, 1 << 20)
    mapped = MappedFiles(files)
    with values.Scan(layout, GPU) as scan, DeviceStream(layout, files, GPU, readers=4, ready=scan.ready) as stream:
        for index, tensor in enumerate(layout.tensors):
            taken = stream.take(index)
            assert taken.shape == torch_shape(dtype, tensor.shape)
            assert bytes(taken.contiguous().view(torch.uint8).flatten().cpu().numpy()) == content[tensor.name]
        stream.join()
    for found in scan.finish(mapped.read):
        tensor = next(t for t in tensors if t.name == found.name)
        true = moments.exact(tensor, mapped.read(tensor))
        same = ("count", "nan", "inf", "zeros", "low", "high", "digest")
        assert [getattr(found, k) for k in same] == [getattr(true, k) for k in same]
        assert found.mean == pytest.approx(true.mean, rel=1e-4, abs=1e-4 * true.std + 1e-9)
        assert found.std == pytest.approx(true.std, rel=1e-3)


def test_what_the_loader_makes_other_tensors_of_is_let_go_on_the_way(tmp_path: Path) -> None:
    """Both forms of all would be twice the size; both forms of what is ahead, and what waits to be reduced together, are 0.6 of it."""
    total, each = 512 << 20, 16 << 20
    files, tensors, _ = stored(tmp_path, {f"t{i}": each for i in range(total // each)}, "BF16")
    layout = plan(tensors, natural_key, (), 8 << 20, 1 << 20)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with (
        values.Scan(layout, GPU) as scan,
        DeviceStream(layout, files, GPU, readers=2, ahead=64 << 20, ready=scan.ready, calm=scan.calm) as stream,
    ):
        made = [stream.take(index).to(torch.float16) for index in range(len(tensors))]
        stream.join()
    assert len(scan.finish(MappedFiles(files).read)) == len(made)
    assert torch.cuda.max_memory_allocated() - before < 1.6 * total


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_loads_and_runs(kind: str, tmp_path: Path) -> None:
    tiny_models.save(kind, tmp_path)
    result = run(tmp_path, device="cuda")
    assert result.error is None
    assert result.load["status"] == "complete"
    assert result.load["device_name"] == torch.cuda.get_device_name()
    assert result.load["peak_bytes"] >= result.load["steady_bytes"] > 0
    assert result.forward is not None
    runs = {r["kind"]: r for r in result.forward["runs"]}
    assert {k: (r["status"], r["finite"]) for k, r in runs.items()} == dict.fromkeys(KINDS[kind], ("ran", True))
    assert all(r["peak_bytes"] > 0 for r in runs.values())
    assert result.findings == ()
    theirs = run(tmp_path)
    assert result.observed is not None
    assert theirs.observed is not None
    told = [
        [(s.name, s.nan, s.zeros, s.low, s.high, s.digest) for s in r.stats] for r in (result.observed, theirs.observed)
    ]
    assert told[0] == told[1]


def test_the_parameters_of_a_model_are_judged_where_they_lie() -> None:
    """As of a model that several devices share: most are there, one is not."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 1000), torch.nn.Linear(1000, 3000, dtype=torch.bfloat16))
    told = [[(s.name, s.dtype, s.count, s.low, s.high, s.zeros, s.digest) for s in values.of_parameters(m)]
            for m in (model, model.to(GPU))]  # fmt: skip
    model[0].to("cpu")
    split = [(s.name, s.dtype, s.count, s.low, s.high, s.zeros, s.digest) for s in values.of_parameters(model)]
    assert len(told[0]) == 4
    assert told[0] == told[1] == split


def test_planted_faults_are_found(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path)
    query, norm, up = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"

    def plant(tensors: dict[str, Any]) -> None:
        tensors[query][3, 5] = math.nan
        tensors[norm][2] = math.inf
        tensors[up].zero_()

    spoil(tmp_path, plant)
    result = run(tmp_path, device="cuda")
    found = checks(result)
    assert (found["CK501"], found["CK502"]) == ((query, norm), (up,))
    assert result.forward is not None
    assert [r["finite"] for r in result.forward["runs"]] == [False]


def test_a_file_that_was_cut_since_its_header_was_read(tmp_path: Path) -> None:
    files, tensors, _ = stored(tmp_path, {"a": 1 << 20, "b": 1 << 20}, "BF16")
    os.truncate(files[0], 3 << 19)
    before = torch.cuda.memory_allocated()
    layout = plan(tensors, natural_key)
    with pytest.raises(Exception, match="inside a tensor"), DeviceStream(layout, files, GPU) as stream:
        stream.take(1)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_stays_fp8(kind: str, tmp_path: Path) -> None:
    """Block-quantised as DeepSeek publishes: the loader keeps the codes, and fuses those of experts."""
    tiny_models.save(kind, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {}
    for name, value in load_file(path).items():
        tensors[name] = value
        if value.dim() == 2 and "proj" in name:
            blocks = [-(-side // 128) for side in value.shape]
            tensors[name] = (value.float() / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full(blocks, 0.001)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    result = run(tmp_path, device="cuda", forward=False)
    assert result.error is None
    assert (result.load["missing"], result.load["unexpected"], result.load["mismatched"]) == ([], [], [])
    assert result.observed is not None
    assert {s.dtype for s in result.observed.stats} >= {"F8_E4M3", "F32", "BF16"}
    assert not {"CK501", "CK502", "CK503"} & checks(result).keys()

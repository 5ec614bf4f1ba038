"""The transformers engine beside the stock meta load that it wraps, on a mixture of experts with 45,395 tensors.

    python benchmarks/transformers_engine.py [--repeats 3]

Each time is that of a fresh process, imports included, except the rows "load only": the same load again in a process that is already warm.
The checkpoint is DeepSeek-V3 in number and naming of tensors (61 layers, 256 experts), with small shapes: names are what the time goes to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "vocab_size": 200,
    "num_nextn_predict_layers": 0,
}  # fmt: skip

STOCK = """
import json, sys, time, torch
from transformers import AutoConfig, DeepseekV3ForCausalLM
folder, repeats = sys.argv[1], int(sys.argv[2])
for _ in range(repeats):
    began = time.perf_counter()
    with open(f"{folder}/model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    state = {n: torch.empty(t["shape"], dtype=torch.bfloat16, device="meta") for n, t in header.items()}
    config = AutoConfig.from_pretrained(folder)
    _, info = DeepseekV3ForCausalLM.from_pretrained(
        None, config=config, state_dict=state, device_map={"": torch.device("meta")}, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    print(time.perf_counter() - began)
"""

ENGINE = """
import sys, time
from pathlib import Path
from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions
from ckaudit.engines.transformers import TransformersEngine
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
folder, repeats = sys.argv[1], int(sys.argv[2])
engine = TransformersEngine()
for _ in range(repeats):
    began = time.perf_counter()
    plan = engine.plan(read_checkpoint(open_source(folder)), EngineOptions(cache=False), NullProgress())
    assert plan.verdict == "loads" and len(plan.names) == 45395, plan.not_judged
    print(time.perf_counter() - began)
engine.close()
"""


def write_checkpoint(folder: Path) -> None:
    """config.json, and a file with a whole header and a hole where the data would be."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = DeepseekV3Config(**CONFIG, architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    header, end = {}, 0
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        size = 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    config.save_pretrained(folder)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def clock(argv: list[str], env: dict[str, str]) -> tuple[float, list[float]]:
    """(seconds of the whole process, the seconds it printed itself)."""
    began = time.perf_counter()
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, [float(line) for line in done.stdout.split()] if "-c" in argv else []


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    repeats = options.parse_args().repeats
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, home = Path(scratch, "model"), {"CKAUDIT_HOME": f"{scratch}/home"}
        folder.mkdir()
        write_checkpoint(folder)
        audit = [sys.executable, "-m", "ckaudit", "names", str(folder), "--engine", "transformers", "--quiet"]
        clock(audit, home)
        for _ in range(repeats):  # side by side, so that a busy moment of the machine falls on all of them
            for name, script in (("stock", STOCK), ("engine", ENGINE)):
                whole, inner = clock([sys.executable, "-c", script, str(folder), "2"], {})
                rows.setdefault(f"{name}, whole process", []).append(whole - inner[1])
                rows.setdefault(f"{name}, load only", []).append(inner[1])
            rows.setdefault("ckaudit names, cached", []).append(clock(audit, home)[0])
    middle = {name: statistics.median(times) for name, times in rows.items()}
    for name, seconds in middle.items():
        print(f"{name:24} {seconds:7.2f} s   of {', '.join(f'{t:.2f}' for t in rows[name])}")
    for what in ("whole process", "load only"):
        print(f"engine / stock, {what:13} {middle[f'engine, {what}'] / middle[f'stock, {what}']:.2f}")


if __name__ == "__main__":
    main()

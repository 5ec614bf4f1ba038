"""The replay of a vLLM release: a small checkpoint in a cold process, each further one, and a mixture of experts with 45,395 tensors.

    python benchmarks/vllm.py [--release 0.33.0] [--repeats 3]

Cold is a whole `ckaudit names` in a fresh process, its cache of plans empty and the release's bytecode compiled. Wall time depends on what
else the machine does, user CPU time much less; both are medians. Peak memory is that of the fullest process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, HEADS, VOCABULARY, EXPERTS = 7168, 128, 129280, 256
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
CONFIG = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": HIDDEN, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCABULARY, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""DeepSeek-V3's config.json, its rope scaling left out."""

FURTHER = """
import resource, sys, time
from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions, select
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
(engine,) = select(f"vllm=={sys.argv[2]}")
for _ in range(4):
    began = time.perf_counter()
    plan = engine.plan(read_checkpoint(open_source(sys.argv[1])), EngineOptions(cache=False), NullProgress())
    assert plan.verdict == "loads", plan.not_judged
    print(time.perf_counter() - began)
engine.close()
"""


def shapes(layers: int) -> dict[str, list[int]]:
    """Names and shapes of a DeepSeek-V3 with so many layers, its draft layer left out."""
    query, key = LATENT["q_lora_rank"], LATENT["kv_lora_rank"]
    rope, nope, value = LATENT["qk_rope_head_dim"], LATENT["qk_nope_head_dim"], LATENT["v_head_dim"]
    out = {
        "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCABULARY, HIDDEN],
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        out |= {f"{at}.{n}_layernorm.weight": [HIDDEN] for n in ("input", "post_attention")}
        out |= {
            f"{at}.self_attn.q_a_proj.weight": [query, HIDDEN], f"{at}.self_attn.q_a_layernorm.weight": [query],
            f"{at}.self_attn.q_b_proj.weight": [HEADS * (nope + rope), query],
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": [key + rope, HIDDEN], f"{at}.self_attn.kv_a_layernorm.weight": [key],
            f"{at}.self_attn.kv_b_proj.weight": [HEADS * (nope + value), key], f"{at}.self_attn.o_proj.weight": [HIDDEN, HEADS * value],
        }  # fmt: skip
        if i < CONFIG["first_k_dense_replace"]:
            out |= mlp(f"{at}.mlp", 18432)
            continue
        out |= {f"{at}.mlp.gate.weight": [EXPERTS, HIDDEN], f"{at}.mlp.gate.e_score_correction_bias": [EXPERTS]}
        out |= mlp(f"{at}.mlp.shared_experts", 2048)
        for expert in range(EXPERTS):
            out |= mlp(f"{at}.mlp.experts.{expert}", 2048)
    return out


def mlp(at: str, inner: int) -> dict[str, list[int]]:
    ways = {"gate_proj": [inner, HIDDEN], "up_proj": [inner, HIDDEN], "down_proj": [HIDDEN, inner]}
    return {f"{at}.{name}.weight": size for name, size in ways.items()}


def write(folder: Path, layers: int) -> int:
    """config.json and a true header over a hole; the number of tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    header, end = {}, 0
    for name, shape in shapes(layers).items():
        start, end = end, end + math.prod(shape) * (4 if name.endswith("_bias") else 2)
        header[name] = {
            "dtype": "F32" if name.endswith("_bias") else "BF16",
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return len(header)


def clock(argv: list[str]) -> tuple[float, float, float, str]:
    """(wall seconds, user CPU seconds, peak MB of the fullest process, stdout)."""
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    began = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    wall, usage = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 1), done.stderr
    return wall, usage.ru_utime - held, usage.ru_maxrss / 1024, done.stdout


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--release", default="0.33.0")
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        small, large = Path(scratch, "small"), Path(scratch, "large")
        write(small, 2)
        count = write(large, 61)

        def audit(target: Path) -> tuple[float, float, float]:
            words = [
                "names",
                str(target),
                "--engine",
                f"vllm=={given.release}",
                "--no-cache",
                "--quiet",
                "--allow-not-judged",
            ]
            wall, user, peak, said = clock([sys.executable, "-m", "ckaudit", *words])
            assert "loads" in said, said
            return wall, user, peak

        audit(small)  # fetches the release and compiles it
        for _ in range(given.repeats):
            rows.setdefault("cold, one small checkpoint", []).append(audit(small))
            *_, said = clock([sys.executable, "-c", FURTHER, str(small), given.release])
            rows.setdefault("each further one", []).append(
                (statistics.median(map(float, said.split()[1:])), math.nan, math.nan)
            )
            rows.setdefault(f"{count:,} tensors", []).append(audit(large))
    for name, times in rows.items():
        wall, user, peak = (statistics.median(column) for column in zip(*times, strict=True))
        rest = "" if math.isnan(user) else f" {user:6.2f} s user {peak:6.0f} MB"
        print(f"{name:28} {wall:6.2f} s wall{rest}")


if __name__ == "__main__":
    main()

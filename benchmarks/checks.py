"""How long the checks take on a 45,000-tensor mixture of experts: the files alone, with a clean plan, and with every name wrong.

    python benchmarks/checks.py

Prints the best of five runs in seconds. Reading headers and asking engines are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckaudit import checks
from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.naming import fold
from ckaudit.plan import NameFate, Parameter, Plan

LAYERS, EXPERTS, DENSE = 61, 256, 3
LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm", "mlp.gate")


def names() -> list[str]:
    """DeepSeek-V3 in outline: 3 dense layers, 58 of 256 experts each."""
    found = [f"model.layers.{i}.{leaf}.weight" for i in range(LAYERS) for leaf in LEAVES]
    found += [
        f"model.layers.{i}.mlp.experts.{j}.{p}_proj.weight"
        for i in range(DENSE, LAYERS) for j in range(EXPERTS) for p in ("gate", "up", "down")
    ]  # fmt: skip
    return [*found, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def checkpoint(tensors: list[str]) -> Checkpoint:
    specs = {n: TensorSpec(n, "model.safetensors", "BF16", (64, 64), 8192) for n in tensors}
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": LAYERS}
    return Checkpoint(
        name="moe", kind="local", revision=None, files={}, config=config, texts={}, index=None, shards=(), tensors=specs
    )


def plan(tensors: list[str], *, right: bool) -> Plan:
    stored = tensors if right else [f"_orig_mod.{n}" for n in tensors]
    fates = tuple(NameFate(n, "loaded" if right else "unmatched", n, read=1.0 if right else 0.0) for n in stored)
    parameters = tuple(Parameter(n, "full" if right else "none") for n in tensors)
    return Plan(
        id="transformers", engine="transformers", release="5", method="live", names=fates, parameters=parameters
    )


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    right = names()
    wrong = [f"_orig_mod.{n}" for n in right]
    good, bad = plan(right, right=True), plan(right, right=False)
    print(f"{len(right):,} tensors")
    print(f"files alone         {best(lambda: checks.run(checkpoint(right), ())):.2f} s")
    print(f"with a clean plan   {best(lambda: checks.run(checkpoint(right), (good,))):.2f} s")
    print(f"every name wrong    {best(lambda: checks.run(checkpoint(wrong), (bad,))):.2f} s")
    print(f"folding the names   {best(lambda: fold(right)):.2f} s")


if __name__ == "__main__":
    main()

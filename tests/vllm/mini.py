"""Jobs for the package with the shape of vLLM (`tests/mini_vllm`).

A model has `embed` (16 x 8) and, a layer, fused q, k and v (24 x 8) and `o_proj` (8 x 8).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines import EngineOptions, Job
from ckaudit.engines.host import WorkerHost
from ckaudit.engines.vllm import PLATFORM, TREE
from ckaudit.plan import Plan

MINI = Path(__file__).parent.parent / "mini_vllm"
Shapes = dict[str, tuple[int, ...]]


ENV = {TREE: str(MINI), PLATFORM: "cuda:sm90"}
"""The environment of a worker for it."""


def good(layers: int = 2) -> Shapes:
    out: Shapes = {"model.embed.weight": (16, 8)}
    for i in range(layers):
        out |= {f"model.layers.{i}.{p}_proj.weight": (8, 8) for p in "qkvo"}
    return out


def replay(host: WorkerHost, shapes: Shapes, architecture: str = "Mini", dtype: str | None = "BF16", layers: int = 2,
           read: Callable[[str], bytes] | None = None, shards: dict[str, str] | None = None, more: dict[str, object] | None = None,
           index_only: bool = False, **options: object) -> Plan:  # fmt: skip
    config = {"architectures": [f"{architecture}ForCausalLM"], "layers": layers, "heads": 4, **(more or {})}
    tensors = tuple(
        TensorSpec(name, (shards or {}).get(name, "model.safetensors"), dtype, shape, 0)
        for name, shape in shapes.items()
    )
    job = Job(
        engine="vllm", release="1.0", options=EngineOptions(**options), name="x",  # type: ignore[arg-type]
        texts={"config.json": json.dumps(config).encode()}, tensors=tensors, index_only=index_only,
    )  # fmt: skip

    def refuse(name: str) -> bytes:
        raise OSError(name)

    return host.run(job, read or refuse, 300)


def fates(plan: Plan, fate: str) -> list[str]:
    return [n.name for n in plan.names if n.fate == fate]

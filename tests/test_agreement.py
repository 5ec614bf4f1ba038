"""The engine, which sees headers, against the real `from_pretrained`, which has the data: real architectures times seeded faults.

The oracle is the public call on a real file, `output_loading_info=True`, and what it raises; nothing of the engine's observers is in it.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "TQDM_DISABLE": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
}
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from real_checkpoints import build, job_of, load, save  # noqa: E402

from ckaudit.engines.transformers import loader  # noqa: E402
from ckaudit.plan import Plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and torch's own deprecations are not ours to fail on

# Of every kind that the loader treats differently: plain, tied, stacked experts, fused and cut projections, renamed prefixes,
# encoder-decoder, vision, composite models whose parts bring rules of their own.
TYPES = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gemma", "gemma2",
    "gemma3_text", "gemma3", "mistral", "phi", "phi3", "phimoe", "granite", "granitemoe", "olmo2", "olmoe", "glm4",
    "glm4_moe", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "bert", "roberta", "distilbert", "albert", "electra",
    "mpnet", "t5", "bart", "m2m_100", "pegasus", "whisper", "vit", "clip", "siglip", "deit", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl", "qwen3_5_text", "qwen3_next", "llava", "paligemma", "idefics3", "gpt_oss", "jamba", "mamba",
    "minimax", "ernie4_5_moe", "jetmoe", "minicpmv4_6", "mpt", "codegen", "cohere2", "flex_olmo", "modernbert",
    "blip", "pixtral", "mistral3", "internvl", "timesformer", "segformer", "kimi_k25",
]  # fmt: skip

State = dict[str, Any]


def faults(state: State, prefix: str, tied: dict[str, str], rng: random.Random) -> Iterator[tuple[str, State]]:
    """(name of the fault, a checkpoint that has it)."""
    names = sorted(state)

    def one(among: list[str] = names) -> str:
        return rng.choice(among)

    victim = one()
    yield "renamed", {(f"{n}_renamed" if n == victim else n): t for n, t in state.items()}
    victim = one()
    yield "dropped", {n: t for n, t in state.items() if n != victim}
    yield (
        "added",
        {**state, "extra.thing.weight": torch.zeros(3), "model.layers.99.mlp.up_proj.weight": torch.zeros(2, 2)},
    )
    victim = one([n for n in names if state[n].ndim])
    yield (
        "reshaped",
        {
            **state,
            victim: torch.zeros((state[victim].shape[0] + 1, *state[victim].shape[1:]), dtype=state[victim].dtype),
        },
    )
    base = f"{prefix}." if prefix else "base."
    if any(n.startswith(base) for n in names):
        yield "prefix stripped", {n.removeprefix(base): t for n, t in state.items()}
    yield "prefix doubled", {base + n: t for n, t in state.items()}
    yield "compiled", {f"_orig_mod.{n}": t for n, t in state.items()}
    ends = [n for n in names if n in tied or n in tied.values()]
    if ends:
        yield "tied pair dropped", {n: t for n, t in state.items() if n not in ends}
    experts = [n for n in names if ".experts." in n and n.split(".experts.")[1].split(".")[0].isdigit()]
    if experts:
        last = max(int(n.split(".experts.")[1].split(".")[0]) for n in experts)
        yield "last expert dropped", {n: t for n, t in state.items() if f".experts.{last}." not in n}
        yield (
            "expert renumbered",
            {n.replace(f".experts.{last}.", f".experts.{last + 4}."): t for n, t in state.items()},
        )
        victim = one(experts)
        yield "expert tensor dropped", {n: t for n, t in state.items() if n != victim}
        victim = one(experts)
        yield "expert reshaped", {**state, victim: torch.zeros((state[victim].shape[0] + 2, *state[victim].shape[1:]))}
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "embeddings.position_ids": torch.zeros(1, 8).long(),
    }
    yield "old buffers", {**state, **buffers}
    yield "half precision", {n: t.to(torch.float16) if t.is_floating_point() else t for n, t in state.items()}


def real_load(cls: Any, folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(`output_loading_info` with mismatches let through, the type of what a plain load raises)."""
    info, raised = None, None
    try:
        _, info = cls.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
        if info["mismatched_keys"]:
            cls.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (whatever the loader raises is the oracle's word)
        raised = type(error).__name__
    return info, raised


def disagreements(plan: Plan, info: dict[str, Any] | None, raised: str | None) -> dict[str, Any]:
    """What engine and oracle say differently: {question: (oracle, engine)}."""
    assert plan.not_judged is None, plan.not_judged
    said: dict[str, Any] = {"raised": (raised, plan.error.partition(":")[0] if plan.error else None)}
    if info is not None:
        shapes = {(m.parameter, m.found, m.wanted) for m in plan.mismatches if m.kind == "shape"}
        gone = {p.name for p in plan.parameters if p.coverage != "full" and p.by_design is None}
        said["mismatched"] = ({(n, str(list(a)), str(list(b))) for n, a, b in info["mismatched_keys"]}, shapes)
        said["missing"] = (set(info["missing_keys"]), gone - {name for name, _, _ in shapes})
        strays, named = {n.into for n in plan.names if n.fate == "unmatched"}, set(info["unexpected_keys"])
        # Of a tensor that a rule would cut in three, the loader lists three names; the plan has one fate for it.
        cut = any(r.to and " | " in r.to and r.hits for r in plan.rules)
        said["unexpected"] = (named & strays if cut and strays else named, strays)
    return {question: both for question, both in said.items() if both[0] != both[1]}


@pytest.mark.parametrize("model_type", TYPES)
def test_agreement(model_type: str, tmp_path: Path) -> None:
    model = build(model_type, tmp_path)
    cls, prefix, tied = type(model), model.base_model_prefix, dict(model.all_tied_weights_keys)
    state = load(tmp_path)
    rng = random.Random(zlib.crc32(model_type.encode()))
    wrong = {}
    for fault, faulty in [("none", state), *faults(state, prefix, tied, rng)]:
        save(faulty, tmp_path)
        plan = loader.run(job_of(tmp_path), lambda name: b"")
        info, raised = real_load(cls, tmp_path)
        if different := disagreements(plan, info, raised):
            wrong[fault] = different
        strays = {n.name for n in plan.names if n.fate == "unmatched"}
        if info is not None and 0 < len(strays) < len(faulty):
            # The oracle names the model's side. The engine's source names are right if without them it has nothing to name.
            save({n: t for n, t in faulty.items() if n not in strays}, tmp_path)
            left, _ = real_load(cls, tmp_path)
            assert left is None or not left["unexpected_keys"], (fault, strays)
    (tmp_path / "model.safetensors").unlink()
    assert wrong == {}

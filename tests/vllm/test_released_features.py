"""One released vLLM on pipeline stages, spread experts, a draft model, an index alone, and several faults at once.

The release's wheel of about 340 MB is fetched from the package index once. The model is GLM-4-MoE in small: names as the published
checkpoints have them, the draft layer behind the last, sizes small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions, select
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress
from ckaudit.source import open_source

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]

H, D, E, INNER, V = 256, 64, 8, 128, 512
Shapes = dict[str, list[int]]
Ask = Callable[..., Plan]
CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": H, "intermediate_size": 2 * H, "head_dim": D,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_nextn_predict_layers": 1, "vocab_size": V,
    "attention_bias": True, "use_qk_norm": True, "n_routed_experts": E, "n_shared_experts": 1, "moe_intermediate_size": INNER,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def mlp(at: str, inner: int) -> Shapes:
    return {
        f"{at}.gate_proj.weight": [inner, H],
        f"{at}.up_proj.weight": [inner, H],
        f"{at}.down_proj.weight": [H, inner],
    }


def shapes() -> Shapes:
    out: Shapes = {"model.embed_tokens.weight": [V, H], "model.norm.weight": [H], "lm_head.weight": [V, H]}
    for i in range(5):
        at = f"model.layers.{i}"
        rows = {"q": 4 * D, "k": 2 * D, "v": 2 * D}
        out |= {f"{at}.self_attn.{p}_proj.weight": [n, H] for p, n in rows.items()}
        out |= {f"{at}.self_attn.{p}_proj.bias": [n] for p, n in rows.items()}
        out |= {
            f"{at}.self_attn.o_proj.weight": [H, 4 * D],
            f"{at}.self_attn.q_norm.weight": [D],
            f"{at}.self_attn.k_norm.weight": [D],
        }
        out |= {f"{at}.{n}_layernorm.weight": [H] for n in ("input", "post_attention")}
        if i == 0:
            out |= mlp(f"{at}.mlp", 2 * H)
            continue
        out |= {f"{at}.mlp.gate.weight": [E, H], f"{at}.mlp.gate.e_score_correction_bias": [E]}
        for expert in range(E):
            out |= mlp(f"{at}.mlp.experts.{expert}", INNER)
        out |= mlp(f"{at}.mlp.shared_experts", INNER)
    at = "model.layers.4"
    out |= {
        f"{at}.eh_proj.weight": [H, 2 * H],
        f"{at}.embed_tokens.weight": [V, H],
        f"{at}.shared_head.head.weight": [V, H],
    }
    return out | {f"{at}.{n}.weight": [H] for n in ("enorm", "hnorm", "shared_head.norm")}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A function that gives the plan of 0.33.0 for shapes, or for names alone."""
    (engine,) = select("vllm==0.33.0")

    def plan(held: Shapes, *, index: bool = False, **options: object) -> Plan:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        if index:
            weights = dict.fromkeys(held, "model-00001-of-00001.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        else:
            write(folder / "model.safetensors", held)
        given = EngineOptions(cache=False, **options)  # type: ignore[arg-type]
        return engine.plan(read_checkpoint(open_source(str(folder))), given, NullProgress())

    yield plan
    engine.close()  # type: ignore[attr-defined]


def write(path: Path, held: Shapes) -> None:
    header, end = {}, 0
    for name, shape in held.items():
        start = end
        end += 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_layouts_and_the_draft_model(ask: Ask) -> None:
    plan = ask(shapes(), tp=(2, 3), vllm={"pipeline_parallel_size": 2, "enable_expert_parallel": True})
    assert (plan.verdict, plan.not_judged) == ("loads", None)
    good, bad = plan.tp
    assert (good["verdict"], good["lost"], len(good["ranks"])) == ("loads", [], 4)
    assert bad["verdict"] == "fails"
    assert "divisible by tensor parallel size (3)" in bad["error"]
    assert plan.draft is not None
    assert (plan.draft.architecture, plan.draft.verdict) == ("Glm4MoeMTPModel", "loads")
    assert [(x.path, x.state) for x in plan.draft.layers] == [("model.layers.4", "complete")]


def test_stages_add_up_to_the_whole(ask: Ask) -> None:
    plan = ask(shapes(), vllm={"pipeline_parallel_size": 2})
    wide = (".mlp.gate.weight", ".e_score_correction_bias")  # kept in float32 (vllm/model_executor/models/glm4_moe.py)
    main = {n: s for n, s in shapes().items() if not n.startswith("model.layers.4.")}
    whole = sum((4 if n.endswith(wide) else 2) * s[0] * (s[1] if len(s) > 1 else 1) for n, s in main.items())
    assert sum(plan.tp[0]["ranks"]) == whole


def test_half_a_draft_layer(ask: Ask) -> None:
    held = {
        n: s
        for n, s in shapes().items()
        if not n.startswith(("model.layers.4.enorm", "model.layers.4.self_attn.k_proj"))
    }
    plan = ask(held)
    assert plan.verdict == "loads"
    assert plan.draft is not None
    (layer,) = plan.draft.layers
    assert layer.state == "partial"
    assert {n.rpartition("layers.4.")[2] for n in layer.unwritten} == {
        "enorm.weight", "mtp_block.self_attn.qkv_proj.weight", "mtp_block.self_attn.qkv_proj.bias"
    }  # fmt: skip


def test_an_index_alone(ask: Ask) -> None:
    plan = ask({n: s for n, s in shapes().items() if not n.startswith("model.layers.4.")}, index=True)
    assert (plan.verdict, plan.error, plan.not_judged) == ("loads", None, None)
    assert {u.topic for u in plan.unjudged} >= {"shapes", "dtypes"}


def test_three_faults_at_once(ask: Ask) -> None:
    held = {
        n.replace("experts.7.up_proj", "experts.7.upproj"): s
        for n, s in shapes().items()
        if not n.startswith("model.layers.4.")
    }
    held["model.layers.0.self_attn.o_proj.weight"] = [H // 2, 4 * D]
    del held["model.layers.1.input_layernorm.weight"]
    plan = ask(held)
    assert plan.verdict == "fails"
    skipped = [
        n.name for n in plan.names if n.fate == "ignored"
    ]  # this class passes over experts' names that it does not know
    assert skipped == [f"model.layers.{i}.mlp.experts.7.upproj.weight" for i in (1, 2, 3)]
    assert plan.draft is None
    assert [n.name for n in plan.names if n.fate == "not_reached"] == ["model.layers.0.self_attn.o_proj.weight"]
    assert {p.name: p.coverage for p in plan.parameters if p.coverage != "full" and not p.by_design}.keys() >= {
        "model.layers.0.self_attn.o_proj.weight", "model.layers.1.input_layernorm.weight"
    }  # fmt: skip

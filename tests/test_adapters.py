"""Adapters: dialects, recognition, binding, and every check on them, each with what it must leave alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ckaudit.adapters import recognise
from ckaudit.adapters.base import Base
from ckaudit.adapters.binding import bind_all
from ckaudit.adapters.dialects import read
from ckaudit.checks import adapters as checks
from ckaudit.cli import app
from ckaudit.plan import Parameter
from ckaudit.report import json_v1
from ckaudit.report.terminal import render
from tests.adapter_examples import CASES, PAGES, example
from tests.adapter_toys import (
    CONFIG,
    ROOT,
    Entries,
    adapter,
    attention,
    base,
    lora,
    only,
    peft,
    repo,
    report,
    skips,
    told,
    vllm,
    weights,
)
from tests.helpers import checkpoint_files, safetensors_file

LLAMA = Path(__file__).parent.parent / "fixtures" / "llama-good"
UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


class TestDialects:
    """Names as the tools write them; what each means follows from the tools' own sources, named in `dialects`."""

    @pytest.mark.parametrize(
        ("name", "component", "module", "role", "dialect"),
        [
            # PEFT, saved
            (f"{ROOT}model.layers.0.self_attn.q_proj.lora_A.weight", "", "model.layers.0.self_attn.q_proj", "A", "peft"),
            (f"{ROOT}model.embed_tokens.lora_embedding_B", "", "model.embed_tokens", "B", "peft"),
            (f"{ROOT}m.q.lora_magnitude_vector", "", "m.q", "magnitude", "peft"),
            (f"{ROOT}m.q.lora_B.bias", "", "m.q", "bias", "peft"),
            (f"{ROOT}lm_head.weight", "", "lm_head", "full", "peft"),
            (f"{ROOT}m.embed_tokens.base_layer.weight", "", "m.embed_tokens", "full", "peft"),
            (f"{ROOT}m.mlp.experts.base_layer.lora_A.weight", "", "m.mlp.experts.base_layer", "A", "peft"),
            (f"{ROOT}m.k.ia3_l", "", "m.k", "other", "peft"),
            # with an adapter's label, which is no part of the path
            (f"{ROOT}m.q.lora_A.default.weight", "", "m.q", "A", "peft"),
            (f"{ROOT}score.modules_to_save.default.weight", "", "score", "full", "peft"),
            (f"unet.{UNET}.to_q.lora_A.default_0.weight", "unet", f"{UNET}.to_q", "A", "diffusers"),
            # diffusers, three generations
            (f"unet.{UNET}.to_k.lora.down.weight", "unet", f"{UNET}.to_k", "A", "diffusers"),
            (f"unet.{UNET}.processor.to_out_lora.up.weight", "unet", f"{UNET}.to_out.0", "B", "diffusers"),
            ("text_encoder.text_model.q_proj.lora_linear_layer.up.weight", "text_encoder", "text_model.q_proj", "B", "diffusers"),
            ("transformer.transformer_blocks.0.attn.to_q.lora_B.weight", "transformer", "transformer_blocks.0.attn.to_q", "B", "diffusers"),
            # kohya
            ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", "unet", "down_blocks_0_attentions_0_proj_in", "A", "kohya"),
            ("lora_te2_text_model_encoder_layers_0_fc1.alpha", "text_encoder_2", "text_model_encoder_layers_0_fc1", "alpha", "kohya"),
            ("lora_unet_x_to_q.dora_scale", "unet", "x_to_q", "magnitude", "kohya"),
            ("lora_unet_x_to_q.hada_w1_a", "unet", "x_to_q", "other", "kohya"),
            # XLabs
            ("double_blocks.0.processor.qkv_lora1.down.weight", "", "double_blocks.0.processor.qkv1", "A", "xlabs"),
        ],
    )  # fmt: skip
    def test_a_name(self, name: str, component: str, module: str, role: str, dialect: str) -> None:
        part = read(name)
        assert part is not None
        assert (part.component, part.module, part.role, part.dialect) == (component, module, role, dialect)

    @pytest.mark.parametrize(
        "name", ["model.layers.0.self_attn.q_proj.weight", "lm_head.bias", "x", "", "a.lora_A.b.c.weight"]
    )
    def test_no_adapter_name(self, name: str) -> None:
        assert read(name) is None


class TestRecognition:
    def test_peft_kohya_and_diffusers_are_adapters(self) -> None:
        assert adapter(lora(attention())).dialect == "peft"
        flat = {
            "lora_unet_mid_block_to_q.lora_down.weight": ("F16", [4, 8]),
            "lora_unet_mid_block_to_q.alpha": ("F16", []),
        }
        assert adapter(flat, None, file="style.safetensors").dialect == "kohya"  # type: ignore[arg-type]
        assert adapter(lora([f"unet.{UNET}.to_q"], root=""), None).dialect == "diffusers"

    def test_a_model_with_an_adapter_inside_is_none(self) -> None:
        """As `state_dict()` of an unmerged model saves it: every adapted module has its base layer beside the factors."""
        names = [f"{m}.base_layer.weight" for m in attention(layers=3)]
        assert recognise(repo(lora(attention(layers=3), root="") | {n: ("F32", [8, 8]) for n in names}, None)) is None

    def test_a_model_is_none(self) -> None:
        assert recognise(base(weights(*attention())).checkpoint) is None

    def test_embeddings_that_peft_saves_whole_make_no_model(self) -> None:
        whole: Entries = {f"{ROOT}{n}.weight": ("F32", [32, 8]) for n in ("model.embed_tokens.base_layer", "lm_head")}
        found = adapter(lora(attention()) | whole)
        assert [u.module for u in found.replaced] == ["model.embed_tokens", "lm_head"]


def fused(names: list[str], prefix: tuple[str, str] = ("", "")) -> dict[str, tuple[str, str | None]]:
    """Stored name -> vLLM's parameter and shard, for q, k and v that it holds in one."""
    out: dict[str, tuple[str, str | None]] = {}
    for name in names:
        here = name.replace(*prefix, 1) if prefix[0] else name
        part = here.split(".")[-2]
        out[name] = (here.replace(part, "qkv_proj"), SHARDS[part]) if part in SHARDS else (here, None)
    return out


class TestBinding:
    def test_a_healthy_adapter_binds_everywhere(self) -> None:
        on = base(weights(*attention(parts="qkv")))
        found = report(adapter(lora(attention())), on, peft(on), vllm(on, fused(weights(*attention(parts="qkv")))))
        assert found.findings == ()
        assert found.skips == ()
        assert [p.verdict for p in found.plans] == ["loads", "loads"]
        assert found.plans[1].names[0].into == "model.layers.0.self_attn.qkv_proj"
        assert found.exit_code == 0

    def test_a_suffix_is_not_enough(self) -> None:
        """An adapter of the text class on a multimodal one: vLLM looks at the last segment, finds it, and binds nothing."""
        stored = weights(*attention("language_model.model.", parts="qkv"))
        on = base(stored)
        f = only(adapter(lora(attention())), on, vllm(on, fused(stored)))
        assert (f.check, f.severity, f.count) == ("CK901", "error", 8)
        assert "0 of 4 modules bind" in f.message
        assert "vLLM says nothing" in f.message
        assert "Add the prefix `language_model.`" in f.mend
        assert f.wanted == f"{ROOT}language_model.model.layers.0.self_attn.q_proj.lora_A.weight"

    RULES = (
        ("prefix", "model.visual.", "visual."),
        ("prefix", "lm_head.", "language_model.lm_head."),
        ("prefix", "model.language_model.", "language_model.model."),
    )

    def test_rules_rewrite_adapter_names(self) -> None:
        stored = weights(*attention("model.language_model.", parts="qkv"))
        on, into = base(stored), fused(stored, ("model.language_model.", "language_model.model."))
        plan = vllm(on, into, self.RULES)
        assert told(adapter(lora(attention("model.language_model."))), on, plan) == []
        f = only(adapter(lora(attention())), on, plan)
        assert f.check == "CK901"
        assert f.wanted == f"{ROOT}model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
        assert "4 of the 4 bind" in f.mend

    def test_the_order_of_rules_counts(self) -> None:
        """`model.` appended to the rules helps text names; put first, it takes the vision tower's away."""
        vision = [f"model.visual.blocks.{i}.attn.proj.weight" for i in range(2)]
        stored = weights(*attention("model.language_model.", parts="qkv"))
        on = base([*stored, *vision])
        into = fused(stored, ("model.language_model.", "language_model.model.")) | {
            v: (v.replace("model.", "", 1), None) for v in vision
        }
        general = ("prefix", "model.", "language_model.model.")
        text, tower = adapter(lora(attention())), adapter(lora([v.removesuffix(".weight") for v in vision]))
        last, first = vllm(on, into, (*self.RULES, general)), vllm(on, into, (general, *self.RULES))
        assert told(text, on, last) == told(tower, on, last) == []
        assert [c for c, *_ in told(tower, on, first)] == ["CK901"]

    @pytest.mark.parametrize(("release", "checks_"), [("0.32.0", ["CK901"]), ("0.33.0", [])])
    def test_newer_releases_find_text_names(self, release: str, checks_: list[str]) -> None:
        stored = weights(*attention("language_model.model.", parts="qkv"))
        on = base(stored)
        assert [
            c for c, *_ in told(adapter(lora(attention())), on, vllm(on, fused(stored), release=release))
        ] == checks_

    def test_what_vllm_does_not_know_at_all_raises(self) -> None:
        on = base(weights(*attention(parts="qkv")))
        found = report(
            adapter(lora(["model.layers.0.mixer.in_proj"])), on, vllm(on, fused(weights(*attention(parts="qkv"))))
        )
        assert found.plans[0].verdict == "fails"
        assert "vLLM raises" in found.findings[0].message

    def test_parts_are_known_by_their_last_segment(self) -> None:
        """As vLLM's `packed_modules_mapping`: a module whose own weights did not load has parts all the same."""
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        plan = vllm(on, fused(stored))
        lost = Parameter("merger.attn.qkv_proj.weight", "none", (24, 8), "BF16")
        plan = replace(plan, parameters=(*plan.parameters, lost))
        assert told(adapter(lora(["merger.attn.q_proj"])), on, plan) == []
        assert [c for c, *_ in told(adapter(lora(["merger.other.q_proj"])), on, plan)] == ["CK901"]

    def test_single_experts_bind_as_parts_of_the_fused_module(self) -> None:
        parts = (("gate_proj", "w13_weight"), ("up_proj", "w13_weight"), ("down_proj", "w2_weight"))
        stored: dict[str, tuple[str, str | None]] = {
            f"model.layers.0.mlp.experts.{e}.{p}.weight": (f"model.layers.0.mlp.experts.{w}", f"expert {e}")
            for e in range(2)
            for p, w in parts
        }
        on = base(list(stored))
        paths = [n.removesuffix(".weight") for n in stored]
        assert told(adapter(lora(paths)), on, vllm(on, stored)) == []
        shared = [p.replace("experts.0.", "shared_experts.") for p in paths[:3]]
        assert told(adapter(lora(shared)), on, vllm(on, stored)) == [("CK901", "error", "checkpoint", 6)]

    def test_what_every_engine_misses_alike_is_told_once(self) -> None:
        on = base(weights(*attention(parts="qkv")))
        f = only(
            adapter(lora(attention("model.model."))), on, peft(on), vllm(on, fused(weights(*attention(parts="qkv"))))
        )
        assert (f.check, f.engine) == ("CK901", None)
        assert "PEFT warns" in f.message
        assert "vLLM says nothing" in f.message

    def test_what_one_engine_binds_is_the_other_ones_fault(self) -> None:
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        f = only(adapter(lora(attention())), on, peft(on), vllm(on, fused(stored, ("model.", "language_model.model."))))
        assert (f.check, f.blame, f.engine) == ("CK901", "engine", "vllm==0.29.0")
        assert f.mend.startswith("Use transformers")

    def test_in_part(self) -> None:
        """As when an adapter of a conditional-generation class has its vision names without the `model.` that this class puts first."""
        language, vision = attention("model.language_model."), ["model.vision_model.layers.0.self_attn.q_proj"]
        on = base(weights(*language, *vision))
        f = only(adapter(lora([*language, "vision_model.layers.0.self_attn.q_proj"])), on, peft(on))
        assert (f.check, f.count) == ("CK902", 2)
        assert "4 of 5 modules bind" in f.message
        assert "Add the prefix `model.`" in f.mend

    def test_another_base(self) -> None:
        on = base(weights(*attention()))
        f = only(adapter(lora(["transformer.h.0.attn.c_attn"])), on, peft(on))
        assert f.check == "CK901"
        assert "adapter's base" in f.mend

    def test_without_a_base_it_is_said_how_to_give_one(self) -> None:
        found = report(adapter(lora(attention())))
        assert found.findings == ()
        assert [s.check for s in found.skips] == ["CK901"]
        assert "--base org/base" in found.skips[0].reason
        assert found.exit_code == 3

    def test_a_base_that_no_engine_knows_is_taken_by_its_names(self) -> None:
        on = base(weights(*attention()))
        blind = peft(on).__class__(
            id="transformers", engine="transformers", release=None, method="live", not_judged="no torch"
        )
        found = report(adapter(lora(attention())), on, blind)
        assert [p.verdict for p in found.plans] == ["not_judged", "loads"]


class TestPipelines:
    UNETS = [f"{UNET}.to_{p}.weight" for p in ("q", "k", "v")] + [f"{UNET}.to_out.0.weight"]

    def pipeline(self, *components: str) -> Base:
        return Base(repo({}, {}), {c: base(self.UNETS).checkpoint for c in components})

    @pytest.mark.parametrize(
        "made",
        [
            lora([f"unet.{UNET}.to_q"], root="", a="lora.down.weight", b="lora.up.weight"),
            lora([f"unet.{UNET}.to_q", f"unet.{UNET}.to_out.0"], root=""),
            lora([f"lora_unet_{UNET}.to_q".replace(".", "_")], root="", a="lora_down.weight", b="lora_up.weight"),
            lora([f"unet.{UNET}.processor"], root="", a="to_out_lora.down.weight", b="to_out_lora.up.weight"),
        ],
        ids=["diffusers", "peft in diffusers", "kohya", "processors"],
    )
    def test_every_dialect_binds(self, made: Entries) -> None:
        found = report(adapter(made, None), self.pipeline("unet"))
        assert found.findings == ()
        assert [(p.id, p.verdict) for p in found.plans] == [("base-names", "loads")]

    def test_the_wrong_component(self) -> None:
        f = only(adapter(lora([f"unet.{UNET}.to_q"], root=""), None), self.pipeline("transformer"))
        assert (f.check, f.severity) == ("CK901", "error")

    def test_a_component_that_is_there_twice(self) -> None:
        made = lora([f"unet.unet.{UNET}.to_k"], root="", a="lora.down.weight", b="lora.up.weight")
        f = only(adapter(made, None))
        assert (f.check, f.count) == ("CK906", 2)
        assert f.wanted == f"unet.{UNET}.to_k.lora.down.weight"

    def test_names_of_the_authors_own_code_are_not_judged(self) -> None:
        made = lora(
            ["lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k"],
            root="",
            a="lora_down.weight",
            b="lora_up.weight",
        )
        found = report(adapter(made, None), self.pipeline("unet"))
        assert found.findings == ()
        assert "which is not judged" in found.skips[0].reason

    @pytest.mark.parametrize("root", ["", "model.diffusion_model."])
    def test_a_file_in_the_layout_of_its_authors(self, root: str) -> None:
        """What is called alike binds; what diffusers calls otherwise is converted by whoever loads it."""
        on = base([f"{root}input_blocks.4.1.transformer_blocks.0.attn1.to_k.weight"])
        made = lora(
            ["lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k"],
            root="",
            a="lora_down.weight",
            b="lora_up.weight",
        )
        assert [p.verdict for p in report(adapter(made, None), on).plans] == ["loads"]
        other = lora([f"lora_unet_{UNET}.to_q".replace(".", "_")], root="", a="lora_down.weight", b="lora_up.weight")
        found = report(adapter(other, None), on)
        assert found.findings == ()
        assert "which is not judged" in found.skips[0].reason

    def test_xlabs_on_its_own_layout(self) -> None:
        on = base(["double_blocks.0.img_attn.qkv.weight"])
        made = lora(["double_blocks.0.processor"], root="", a="qkv_lora1.down.weight", b="qkv_lora1.up.weight")
        assert report(adapter(made, None), on).findings == ()
        beyond = lora(["double_blocks.7.processor"], root="", a="qkv_lora1.down.weight", b="qkv_lora1.up.weight")
        assert [c for c, *_ in told(adapter(beyond, None), on)] == ["CK901"]

    def test_a_pipeline_with_such_a_file_beside_its_folders(self) -> None:
        single = base(["model.diffusion_model.input_blocks.0.0.weight"]).checkpoint
        on = Base(single, self.pipeline("unet").components)
        assert report(adapter(lora([f"unet.{UNET}.to_q"], root=""), None), on).findings == ()


class TestShapes:
    def test_what_zero_3_leaves(self) -> None:
        name = f"{ROOT}model.layers.0.self_attn.q_proj"
        spoilt: Entries = {f"{name}.lora_A.weight": ("F32", [0]), f"{name}.lora_B.weight": ("F32", [32768])}
        f = only(adapter(lora(attention()[1:]) | spoilt))
        assert (f.check, f.count, f.blame) == ("CK903", 2, "checkpoint")
        assert "ZeRO-3" in f.message

    def test_a_rank_that_the_configuration_does_not_say(self) -> None:
        f = only(adapter(lora(attention(), rank=8)))
        assert (f.check, f.blame, f.mend) == ("CK903", "config", 'Set "r": 8.')

    @pytest.mark.parametrize("key", ["q_proj", r"layers\.\d+\.self_attn\.q_proj", "model.layers.0.self_attn.q_proj"])
    def test_a_rank_pattern(self, key: str) -> None:
        made = lora(attention(layers=1, parts="q"), rank=8) | lora(attention(layers=1, parts="v"))
        assert told(adapter(made, CONFIG | {"rank_pattern": {key: 8}})) == []
        assert [c for c, *_ in told(adapter(made, CONFIG | {"rank_pattern": {"o_proj": 8}}))] == ["CK903"]

    def test_factors_of_two_runs(self) -> None:
        made = lora(attention()) | {f"{ROOT}{attention()[0]}.lora_B.weight": ("F32", [8, 16])}
        assert told(adapter(made)) == [("CK903", "error", "checkpoint", 2)]

    def test_another_size_of_the_base(self) -> None:
        on = base({n: [16, 8] for n in weights(*attention())})
        found = report(adapter(lora(attention())), on, peft(on))
        assert [(f.check, f.count) for f in found.findings] == [("CK903", 4)]
        assert found.plans[0].verdict == "fails"
        assert told(adapter(lora(dict.fromkeys(attention(), (16, 8)))), on, peft(on)) == []

    def test_embeddings_and_transposed_layers_have_other_sides(self) -> None:
        """An embedding's first factor has a column for each row of the weight; Conv1D keeps its weight as (inputs, outputs)."""
        on = base({"wte.weight": [32, 8], "h.0.c_attn.weight": [8, 24], "h.0.c_attn.bias": [24]})
        made: Entries = {
            f"{ROOT}wte.lora_embedding_A": ("F32", [4, 32]),
            f"{ROOT}wte.lora_embedding_B": ("F32", [8, 4]),
        }
        config = CONFIG | {"target_modules": ["c_attn", "wte"]}
        assert told(adapter(made | lora({"h.0.c_attn": (24, 8)}), config), on, peft(on)) == []

    def test_dora(self) -> None:
        vectors: Entries = {f"{ROOT}{m}.lora_magnitude_vector": ("F32", [8]) for m in attention()}
        config = CONFIG | {"use_dora": True}
        on = base(weights(*attention()))
        assert told(adapter(lora(attention()) | vectors, config), on, peft(on)) == []
        assert told(adapter(lora(attention()), config)) == [("CK905", "error", "checkpoint", 8)]

    def test_half_a_pair(self) -> None:
        made = {n: s for n, s in lora(attention()).items() if not n.endswith("1.self_attn.v_proj.lora_B.weight")}
        assert told(adapter(made)) == [("CK905", "error", "checkpoint", 1)]

    def test_packed_weights_have_no_shape_to_compare(self) -> None:
        names = [f"{m}.qweight" for m in attention()]
        on = base({n: [1, 64] for n in names})
        assert told(adapter(lora(attention())), on, peft(on)) == []


EXPERTS = CONFIG | {
    "target_modules": [],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


class TestForms:
    PATHS = tuple(f"model.layers.0.mlp.experts{tail}" for tail in ("", ".base_layer"))
    PARAMETERS = tuple(f"model.layers.0.mlp.experts.{p}" for p in ("gate_up_proj", "down_proj"))

    def test_fused_experts(self) -> None:
        found = adapter(lora(self.PATHS, rank=16), EXPERTS)
        on = base({p: [4, 8, 8] for p in self.PARAMETERS})
        assert told(found) == [("CK904", "warning", "checkpoint", 4)]
        assert told(found, on, peft(on)) == [("CK904", "note", "checkpoint", 4)]  # PEFT takes them; who serves may not
        into = {
            p: (f"model.layers.0.mlp.experts.{w}", None)
            for p, w in zip(self.PARAMETERS, ("w13_weight", "w2_weight"), strict=True)
        }
        assert told(found, on, vllm(on, dict(into), architecture="Qwen3MoeForCausalLM")) == [
            ("CK904", "error", "engine", 4)
        ]
        assert told(found, on, vllm(on, dict(into), architecture="Qwen3VLMoeForConditionalGeneration")) == []

    def test_an_adapter_label_in_the_name_stops_vllm(self) -> None:
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        labelled = lora(attention(), a="lora_A.default.weight", b="lora_B.default.weight")
        found = report(adapter(labelled), on, vllm(on, fused(stored)))
        assert [(f.check, f.severity, f.count) for f in found.findings] == [("CK904", "error", 8)]
        assert found.plans[0].verdict == "fails"


class TestConfiguration:
    @pytest.mark.parametrize(
        ("target_modules", "lost"),
        [
            (["q_proj", "v_proj"], 0), (["q_proj"], 4), (r".*\.self_attn\.(q|v)_proj", 0), (r"model\.layers\.0\..*", 4), ("all-linear", 0),
            (None, 0), (["model.layers.0.self_attn.q_proj", "v_proj"], 2), (["proj"], 8), ([3, None, "q_proj", "v_proj"], 0), ("(", 8),
        ],
    )  # fmt: skip
    def test_what_is_not_targeted(self, target_modules: object, lost: int) -> None:
        on = base(weights(*attention()))
        found = report(adapter(lora(attention()), CONFIG | {"target_modules": target_modules}), on, peft(on)).findings
        assert [(f.check, f.blame, f.count) for f in found] == ([("CK909", "config", lost)] if lost else [])

    def test_a_shared_expert_that_is_taken_for_a_routed_one(self) -> None:
        shared = "model.layers.0.mlp.shared_experts.down_proj"
        names = {
            f"{shared}.weight": [8, 8],
            "model.layers.0.mlp.experts.gate_up_proj": [4, 8, 8],
            "model.layers.0.mlp.experts.down_proj": [4, 8, 8],
        }
        config = CONFIG | {"target_modules": [shared]}
        on = base(names, {"model_type": "deepseek_v3"})
        f = only(adapter(lora([shared]), config), on, peft(on))
        assert (f.check, f.blame) == ("CK909", "engine")
        assert "`experts.down_proj`" in f.message
        other = base(names, {"model_type": "qwen2_moe"})  # PEFT converts nothing of this type
        assert told(adapter(lora([shared]), config), other, peft(other)) == []

    def test_targeted_modules_without_tensors(self) -> None:
        on = base(weights(*attention()))
        assert told(adapter(lora(attention()[:2])), on, peft(on)) == [("CK907", "warning", "checkpoint", 2)]
        narrow = CONFIG | {"layers_to_transform": [0]}
        assert told(adapter(lora(attention()[:2]), narrow), on, peft(on)) == []

    def test_without_weights(self) -> None:
        assert told(adapter(None)) == [("CK908", "error", "checkpoint", 0)]

    def test_pickled_weights_are_not_missing_and_not_judged(self) -> None:
        on = base(weights(*attention()))
        found = report(adapter(None, **{"adapter_model.bin": b"x"}), on, peft(on))
        assert "CK908" not in {f.check for f in found.findings}
        assert {p.verdict for p in found.plans} == {"not_judged"}
        assert found.exit_code == 3

    @pytest.mark.parametrize(
        ("more", "release", "check"),
        [
            ({"modules_to_save": ["lm_head"]}, "0.29.0", "CK910"), ({"modules_to_save": ["score"]}, "0.30.0", "CK910"),
            ({"modules_to_save": ["score"]}, "0.33.0", None),
            ({"bias": "all"}, "0.33.0", "CK910"), ({"rank_pattern": {"q_proj": 4}}, "0.31.0", "CK910"),
            ({"rank_pattern": {"q_proj": 4}}, "0.32.0", None),
            ({"r": 4}, "0.29.0", None),
        ],
    )  # fmt: skip
    def test_settings_and_releases(self, more: dict[str, object], release: str, check: str | None) -> None:
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        found = report(adapter(lora(attention()), CONFIG | more), on, vllm(on, fused(stored), release=release)).findings
        assert [f.check for f in found] == ([check] if check else [])

    def test_what_vllm_has_not_is_no_error_for_an_adapter_that_peft_takes(self) -> None:
        """Unless somebody asked for that engine by name; and one that PEFT does not take either is as wrong as before."""
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        dora: Entries = lora(attention()) | {f"{ROOT}{m}.lora_magnitude_vector": ("F32", [8]) for m in attention()}
        found = adapter(dora, CONFIG | {"use_dora": True})
        bindings = bind_all(found, on, (peft(on), vllm(on, fused(stored))))
        for asked, severity in ((True, "error"), (False, "warning")):
            (finding,), _ = checks.run(found, on, bindings, asked=asked)
            assert (finding.check, finding.severity, finding.blame) == ("CK910", severity, "engine")
        elsewhere = base(weights(*attention("other.", parts="qkv")))
        bindings = bind_all(
            found, elsewhere, (peft(elsewhere), vllm(elsewhere, fused(weights(*attention("other.", parts="qkv")))))
        )
        assert {f.severity for f in checks.run(found, elsewhere, bindings, asked=False)[0]} == {"error"}

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("init_lora_weights", "pissa"),
            ("alora_invocation_tokens", [1]),
            ("layer_replication", [[0, 2]]),
            ("use_qalora", True),
        ],
    )
    def test_what_changes_the_adapter_is_passed_over_and_later_refused(self, key: str, value: object) -> None:
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        for release, severity in (("0.31.0", "warning"), ("0.32.0", "error")):
            plan = vllm(on, fused(stored), release=release)
            assert told(adapter(lora(attention()), CONFIG | {key: value}), on, plan) == [
                ("CK910", severity, "engine", 0)
            ]
        assert (
            told(adapter(lora(attention()), CONFIG | {key: None}), on, vllm(on, fused(stored), release="0.33.0")) == []
        )

    def test_another_method_is_refused_once(self) -> None:
        """By its settings, before its names are looked at; and by its names where the settings pass."""
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        names: Entries = {f"{ROOT}{m}.hada_w1_a": ("F32", [8, 4]) for m in attention()}
        other = {k: v for k, v in CONFIG.items() if k != "lora_alpha"} | {"peft_type": "LOHA"}
        assert told(adapter(names, other), on, vllm(on, fused(stored))) == [("CK910", "error", "engine", 0)]
        assert told(adapter(names, CONFIG | {"peft_type": "LOHA"}), on, vllm(on, fused(stored))) == [
            ("CK904", "error", "engine", 4)
        ]

    def test_alpha_is_missing(self) -> None:
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        found = adapter(lora(attention()), {k: v for k, v in CONFIG.items() if k != "lora_alpha"})
        assert told(found, on, vllm(on, fused(stored))) == [("CK910", "error", "config", 0)]
        assert told(found, on, peft(on)) == []  # PEFT has a default

    def test_an_embedding_that_is_adapted(self) -> None:
        """PEFT saves it whole beside its factors; vLLM passes over that tensor."""
        stored = [*weights(*attention(parts="qkv")), "lm_head.weight"]
        on = base(stored)
        names: Entries = lora([*attention(), "lm_head"]) | {f"{ROOT}lm_head.base_layer.weight": ("F32", [8, 8])}
        config = CONFIG | {"target_modules": ["q_proj", "v_proj", "lm_head"]}
        assert (
            told(
                adapter(names, config), on, vllm(on, fused(stored[:-1]) | {"lm_head.weight": ("lm_head.weight", None)})
            )
            == []
        )

    def test_a_head_that_replaces_the_base_s(self) -> None:
        head = f"{ROOT}lm_head.weight"
        on = base([*weights(*attention()), "lm_head.weight"])
        config = CONFIG | {"modules_to_save": ["lm_head"]}
        assert told(adapter(lora(attention()) | {head: ("F32", [8, 8])}, config), on, peft(on)) == []
        f = only(adapter(lora(attention()) | {head: ("F32", [10, 8])}, config), on, peft(on))
        assert (f.check, f.severity, f.count) == ("CK903", "error", 1)
        assert "resize_token_embeddings(10)" in f.mend
        f = only(adapter(lora(attention()), config), on, peft(on))
        assert (f.check, f.severity, f.names) == ("CK907", "error", (head,))

    def test_vllm_reads_no_whole_tensor_but_a_classifier_s(self) -> None:
        stored = [*weights(*attention(parts="qkv")), "lm_head.weight"]
        on = base(stored)
        plan = vllm(on, fused(stored[:-1]) | {"lm_head.weight": ("lm_head.weight", None)}, release="0.33.0")
        for name, says in (("lm_head.weight", [("CK904", "error", "engine", 1)]), ("score.weight", [])):
            assert told(adapter(lora(attention()) | {f"{ROOT}{name}": ("F32", [8, 8])}), on, plan) == says

    def test_no_configuration(self) -> None:
        on = base(weights(*attention()))
        found = report(adapter(lora(attention()), None), on, peft(on))
        assert [(f.check, f.blame) for f in found.findings] == [("CK910", "checkpoint")]
        assert found.plans[0].verdict == "fails"

    def test_a_rank_above_the_default_is_a_note(self) -> None:
        stored = weights(*attention(parts="qkv"))
        on = base(stored)
        f = only(adapter(lora(attention(), rank=64), CONFIG | {"r": 64}), on, vllm(on, fused(stored)))
        assert (f.check, f.severity) == ("CK910", "note")
        assert "--max-lora-rank 64" in f.mend

    def test_modules_to_save(self) -> None:
        head: Entries = {f"{ROOT}score.weight": ("F32", [2, 8])}
        on = base(weights(*attention()))
        found = adapter(lora(attention()) | head, CONFIG | {"modules_to_save": ["score"]})
        assert told(found, on, peft(on)) == [("CK902", "warning", "checkpoint", 1)]
        task = adapter(lora(attention()) | head, CONFIG | {"modules_to_save": ["score"], "task_type": "SEQ_CLS"})
        assert report(task, on, peft(on)).plans[0].verdict == "loads"
        assert told(task, on, peft(on)) == []

    @pytest.mark.parametrize(
        "text", [b"", b"[]", b"{", b"\xff", b"null", b'{"r": "x", "target_modules": 3, "rank_pattern": [1]}']
    )
    def test_a_broken_configuration_stops_nothing(self, text: bytes) -> None:
        made = repo(lora(attention()), None, **{"adapter_config.json": text})
        found = recognise(made)
        assert found is not None
        on = base(weights(*attention()))
        render(report(found, on, peft(on), vllm(on, fused(weights(*attention())))))


def test_ids_of_hostile_names_are_harmless() -> None:
    made = lora(["a\x1b[31m.q_proj", "..\n/x.v_proj"])
    text = render(report(adapter(made), base(weights(*attention())), peft(base(weights(*attention())))))
    assert "\x1b" not in text.replace("\\x1b", "")


class TestWhole:
    """Through the command line, on files."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Callable[..., Path]:
        def put(entries: Entries, config: dict[str, object] | None = CONFIG) -> Path:
            (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_file(entries))
            if config is not None:
                (tmp_path / "adapter_config.json").write_text(json.dumps(config))
            return tmp_path

        return put

    def run(self, *words: str) -> tuple[int, dict[str, object]]:
        done = CliRunner().invoke(app, ["names", *words, "--json", "-"])
        return done.exit_code, json.loads(done.stdout)

    def test_on_a_model(self, folder: Callable[..., Path]) -> None:
        sizes = {m: (4 if "v_proj" in m else 8, 8) for m in attention()}
        code, made = self.run(str(folder(lora(sizes))), "--base", str(LLAMA), "--engine", "rules:tests/llama.toml")
        assert (code, made["findings"]) == (0, [])
        assert made["adapter"]["engines"] == [  # type: ignore[index]
            {
                "id": "rules:tests/llama.toml",
                "bound": 4,
                "absent": 0,
                "untargeted": 0,
                "converted": 0,
                "form": 0,
                "open": 0,
            }
        ]

    def test_on_a_component_of_a_pipeline(
        self, folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        pipeline = tmp_path_factory.mktemp("pipeline")
        (pipeline / "unet").mkdir()
        config = {"_class_name": "UNet2DConditionModel"}
        files = checkpoint_files(
            {"diffusion_pytorch_model.safetensors": {n: ("F16", [8, 8]) for n in TestPipelines.UNETS}}, config
        )
        for name, data in files.items():
            (pipeline / "unet" / name).write_bytes(data)
        (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
        at = folder(lora([f"unet.{UNET}.to_q"], root=""), None)
        assert self.run(str(at), "--base", str(pipeline))[0] == 0
        assert self.run(str(at), "--base", str(pipeline / "unet"))[0] == 0
        other = folder(lora(["transformer.blocks.0.to_q"], root=""), None)
        code, made = self.run(str(other), "--base", str(pipeline / "unet"))
        assert (code, [f["check"] for f in made["findings"]]) == (1, ["CK901"])  # type: ignore[attr-defined]

    def test_a_base_for_a_model_is_a_mistake(self) -> None:
        done = CliRunner().invoke(app, ["names", str(LLAMA), "--base", str(LLAMA)])
        assert done.exit_code == 2

    def test_without_a_base(self, folder: Callable[..., Path]) -> None:
        code, made = self.run(str(folder(lora(attention()))))
        assert (code, made["engines"]) == (3, [])


def test_json_has_its_shape() -> None:
    on = base(weights(*attention()))
    made = json_v1.document(report(adapter(lora(attention())), on, peft(on)))
    assert made.adapter is not None
    assert (made.adapter.modules, made.adapter.engines[0].bound) == (4, 4)


@pytest.mark.parametrize("check", CASES)
def test_the_example_is_real(check: str) -> None:
    page = (PAGES / f"{check}.md").read_text(encoding="utf-8")
    assert f"```\n{example(check)}\n```" in page, "python -m tests.adapter_examples renews the pages"


def test_every_check_has_an_example() -> None:
    assert [c.id for c in checks.CHECKS] == CASES


def test_skips_are_none_for_what_was_judged() -> None:
    on = base(weights(*attention()))
    assert skips(adapter(lora(attention())), on, peft(on)) == []

"""CK304, CK305, CK307: quantised weights, their companions, and the config."""

from collections.abc import Mapping

import pytest

from ckaudit.checkpoint import Checkpoint
from ckaudit.findings import Finding
from ckaudit.plan import Failure, Mismatch, Plan
from tests.toy import CONFIG, checkpoint, findings, only, plan, told

Leaves = Mapping[str, tuple[str, list[int]]]
W: tuple[str, list[int]] = ("BF16", [4, 4])

SCHEMES: dict[str, tuple[dict[str, object], Leaves]] = {
    "gptq": (
        {"quant_method": "gptq"},
        {"qweight": ("I32", [1, 4]), "qzeros": ("I32", [1, 1]), "scales": ("F16", [1, 4]), "g_idx": ("I32", [4])},
    ),
    "awq": ({"quant_method": "awq"}, {"qweight": ("I32", [4, 1]), "qzeros": ("I32", [1, 1]), "scales": ("F16", [1, 4])}),
    "packed": (
        {"quant_method": "compressed-tensors"},
        {"weight_packed": ("I32", [4, 1]), "weight_scale": ("BF16", [4, 1]), "weight_shape": ("I64", [2])},
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors"},
        {
            "weight_packed": ("U8", [4, 2]), "weight_scale": ("F8_E4M3", [4, 1]), "weight_global_scale": ("F32", [1]),
            "input_global_scale": ("F32", [1]),
        },
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt"},
        {"weight": ("U8", [4, 2]), "weight_scale": ("F8_E4M3", [4, 1]), "weight_scale_2": ("F32", []), "input_scale": ("F32", [])},
    ),
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"weight": ("F8_E4M3", [4, 4]), "weight_scale_inv": ("F32", [1, 1])},
    ),
    "fp8 tensor": (
        {"quant_method": "compressed-tensors"},
        {"weight": ("F8_E4M3", [4, 4]), "weight_scale": ("F32", [1]), "input_scale": ("F32", [1])},
    ),
    "fp8 scale": ({"quant_method": "fp8"}, {"weight": ("F8_E4M3", [4, 4]), "scale": ("F8_E8M0", [1, 1])}),
    "bnb 4-bit": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": ("U8", [8, 1]), "weight.absmax": ("U8", [1]), "weight.quant_map": ("F32", [16]), "weight.nested_absmax": ("F32", [1]),
            "weight.nested_quant_map": ("F32", [256]), "weight.quant_state.bitsandbytes__nf4": ("U8", [90]),
        },
    ),
    "bnb 8-bit": ({"quant_method": "bitsandbytes"}, {"weight": ("I8", [4, 4]), "SCB": ("F32", [4]), "weight_format": ("U8", [])}),
    "mlx": ({"quant_method": "mlx"}, {"weight": ("U32", [4, 1]), "scales": ("BF16", [4, 1]), "biases": ("BF16", [4, 1])}),
    "bitnet": ({"quant_method": "bitnet"}, {"weight": ("U8", [1, 4]), "weight_scale": ("BF16", [1])}),
    "quanto": (
        {"quant_method": "quanto"},
        {"weight._data": ("I8", [4, 4]), "weight._scale": ("F32", [4, 1]), "input_scale": ("F32", []), "output_scale": ("F32", [])},
    ),
    "aqlm": (
        {"quant_method": "aqlm", "in_group_size": 8, "nbits_per_codebook": 16},
        {"codes": ("I16", [4, 1, 1]), "codebooks": ("F16", [1, 16, 1, 4]), "scales": ("F16", [4, 1, 1, 1])},
    ),
    "vptq": (
        {"quant_method": "vptq", "config_for_layers": {}},
        {
            "indices": ("U16", [1, 2, 4]), "centroids.weight": ("BF16", [1, 64]), "res_centroids.weight": ("BF16", [1, 64]),
            "perm": ("U16", [4]), "weight_scale": ("BF16", [4]), "weight_bias": ("BF16", [4]),
        },
    ),
    "spqr": (
        {"quant_method": "spqr", "bits": 3},
        {"dense_weights": ("I64", [1, 1]), "row_offsets": ("I32", [5]), "col_vals": ("I32", [3]), "in_perm": ("I32", [4])},
    ),
    "higgs": (
        {"quant_method": "higgs", "bits": 4},
        {"weight": ("I16", [1, 4]), "scales": ("F16", [4, 1]), "tables": ("F16", [16]), "tables2": ("F16", [16, 16, 2])},
    ),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, {"weight": ("I8", [4, 4]), "weight_scales": ("F16", [4])}),
    "hqq": (
        {"quant_method": "hqq"},
        {"W_q": ("U8", [8, 1]), "scale": ("BF16", [4, 1]), "zero": ("BF16", [4, 1]), "nbits": ("I32", []), "shape": ("I32", [2])},
    ),
    "torchao": (
        {"quant_method": "torchao"},
        {"_weight_qdata": ("I8", [4, 4]), "_weight_scale": ("BF16", [4, 1]), "_weight_zero_point": ("I8", [4, 1])},
    ),
    "fp_quant": (
        {"quant_method": "fp_quant", "forward_dtype": "mxfp4"},
        {
            "qweight": ("U8", [4, 2]), "scales": ("U8", [4, 1]), "weight_global_scale": ("BF16", [1]), "act_global_scale": ("BF16", [1]),
            "forward_hadamard_matrix": ("BF16", [4, 4]), "backward_hadamard_matrix": ("BF16", [4, 4]),
        },
    ),
    "metal": (
        {"quant_method": "metal", "bits": 4},
        {"weight": ("U32", [4, 1]), "scales": ("F32", [4, 1]), "qbiases": ("F32", [4, 1])},
    ),
}  # fmt: skip
LINEARS = [f"model.layers.{i}.{leaf}" for i in range(8) for leaf in ("self_attn.o_proj", "mlp.down_proj")]


def quantised(leaves: Leaves, lacking: str = "", at: str = "") -> dict[str, tuple[str, list[int]]]:
    """Every linear layer with these leaves, a norm beside them; `lacking` names a leaf that the module `at` (or all) does not have."""
    tensors = {
        f"{m}.{leaf}": spec
        for m in LINEARS
        for leaf, spec in leaves.items()
        if not (leaf == lacking and m.startswith(at))
    }
    return tensors | {f"model.layers.{i}.input_layernorm.weight": ("BF16", [4]) for i in range(8)}


def config(method: dict[str, object]) -> dict[str, object]:
    return CONFIG | (
        {"quantization": {"bits": 4}} if method["quant_method"] == "mlx" else {"quantization_config": method}
    )


def judged(source: Checkpoint, *plans: Plan) -> list[Finding]:
    """The findings apart from what headers cannot tell of every NVFP4 checkpoint."""
    return [f for f in findings(source, *plans) if f.check != "CK306"]


@pytest.mark.parametrize("name", SCHEMES)
class TestEveryScheme:
    def test_whole_and_declared_is_clean(self, name: str) -> None:
        method, leaves = SCHEMES[name]
        assert judged(checkpoint(quantised(leaves), config(method))) == []

    def test_undeclared_is_told_once(self, name: str) -> None:
        (finding,) = judged(checkpoint(quantised(SCHEMES[name][1])))
        assert (finding.check, finding.severity, finding.blame) == ("CK305", "error", "config")
        assert finding.count == len(LINEARS) * len(SCHEMES[name][1])

    def test_one_module_without_a_companion(self, name: str) -> None:
        method, leaves = SCHEMES[name]
        optional = {"input_scale", "input_global_scale", "output_scale", "weight_format"}
        for leaf in leaves.keys() - optional - {"weight", "qweight", "weight_packed", "weight._data"}:
            (finding,) = judged(checkpoint(quantised(leaves, leaf, LINEARS[3]), config(method)))
            severity = "warning" if leaf == "g_idx" else "error"  # without desc_act the order is the natural one
            assert (finding.check, finding.severity, finding.blame, finding.count) == (
                "CK304",
                severity,
                "checkpoint",
                1,
            ), leaf
            assert finding.names[0].startswith(f"{LINEARS[3]}.{leaf.split('.bitsandbytes')[0]}")


class TestCompanions:
    def test_every_scale_of_a_declared_fp8_lost(self) -> None:
        # the scales never reached the shards: no module has one to compare with, but the config says fp8
        method, leaves = SCHEMES["fp8 block"]
        finding = only(checkpoint(quantised(leaves, "weight_scale_inv"), config(method)))
        assert (finding.check, finding.count) == ("CK304", len(LINEARS))

    def test_a_weight_that_is_cast_for_want_of_its_scale(self) -> None:
        # the engine reads it as a plain weight: that is what losing the scale means, and no second fault; another weight's cast is one
        method, leaves = SCHEMES["fp8 block"]
        source = checkpoint(quantised(leaves, "weight_scale_inv", LINEARS[3]), config(method))
        casts = [
            Mismatch("dtype", f"{m}.weight", (f"{m}.weight",), "BF16", "F8_E4M3") for m in (LINEARS[3], LINEARS[4])
        ]
        alone = plan(source, [*source.tensors], mismatches=casts[:1])
        assert [f.check for f in findings(source, alone)] == ["CK304"]
        both = plan(source, [*source.tensors], mismatches=casts)
        assert [(f.check, f.names) for f in findings(source, both)][1:] == [("CK302", (f"{LINEARS[4]}.weight",))]

    def test_fp8_that_is_only_a_storage_type(self) -> None:
        assert findings(checkpoint(quantised({"weight": ("F8_E4M3", [4, 4])}))) == []

    def test_a_zero_size_marker(self) -> None:
        assert findings(checkpoint({"scaled_fp8": ("F8_E4M3", [0]), "norm.weight": ("BF16", [4])})) == []

    def test_a_scale_without_its_weight(self) -> None:
        method, leaves = SCHEMES["packed"]
        found = told(checkpoint(quantised(leaves, "weight_packed", LINEARS[3]), config(method)))
        assert found == [("CK304", "error", "checkpoint", 2)]  # its scale and its shape are left alone

    def test_fused_experts_in_mxfp4(self) -> None:
        blocks = {
            f"model.layers.{i}.mlp.experts.{p}_blocks": ("U8", [2, 4, 1, 16])
            for i in range(3)
            for p in ("gate_up_proj", "down_proj")
        }
        scales = {n.replace("_blocks", "_scales"): ("U8", [2, 4, 1]) for n in blocks}
        bias = {n.replace("_blocks", "_bias"): ("BF16", [2, 4]) for n in blocks}
        declared = config({"quant_method": "mxfp4"})
        assert findings(checkpoint(blocks | scales | bias, declared)) == []
        scales.pop("model.layers.1.mlp.experts.down_proj_scales")
        finding = only(checkpoint(blocks | scales | bias, declared))
        assert (finding.check, finding.names) == ("CK304", ("model.layers.1.mlp.experts.down_proj_scales",))

    @pytest.mark.parametrize("scheme", ["aqlm", "vptq", "higgs", "hqq"])
    def test_leaves_that_models_have_for_other_reasons(self, scheme: str) -> None:
        # one such leaf by itself (codes of a codec, indices of a pooling, tables of a tokeniser) says nothing of quantisation
        for leaf, (dtype, shape) in SCHEMES[scheme][1].items():
            if leaf not in ("weight_scale", "weight", "W_q"):
                assert findings(checkpoint(quantised({leaf: (dtype, shape), "bias": ("BF16", [4])}))) == [], leaf

    def test_every_companion_of_a_declared_scheme_lost(self) -> None:
        # nothing is left to compare with, but the config says what the int8 weights and the codes are
        for scheme, left in (("eetq", "weight"), ("aqlm", "codes"), ("metal", "weight"), ("hqq", "W_q")):
            method, leaves = SCHEMES[scheme]
            found = findings(checkpoint(quantised({left: leaves[left]}), config(method)))
            lost = leaves.keys() - {left, "nbits", "shape"}
            assert {(f.check, f.count) for f in found} == {("CK304", len(LINEARS))}, scheme
            assert {f.names[0].rpartition(".")[2] for f in found} == lost

    def test_a_layer_scale_is_no_companion(self) -> None:
        names = [
            f"blocks.{i}.{p}"
            for i in range(4)
            for p in ("ls1.scale", "attn.logit_scale", "norm.weight", "attn.qkv.weight")
        ]
        assert findings(checkpoint(names)) == []

    def test_plain_layers_beside_quantised_ones(self) -> None:
        method, leaves = SCHEMES["bnb 4-bit"]
        dense = {"model.layers.0.mlp.up_proj.weight": W, "lm_head.weight": W}
        assert findings(checkpoint(quantised(leaves) | dense, config(method))) == []


class TestScheme:
    def test_declared_in_another_file(self) -> None:
        method = {"hf_quant_config.json": b'{"quantization": {"quant_algo": "FP8"}}'}
        finding = only(checkpoint(quantised(SCHEMES["fp8 tensor"][1]), files=method))
        assert (finding.check, finding.blame) == ("CK305", "config")
        assert "hf_quant_config.json" in finding.message

    def test_declared_and_nothing_is(self) -> None:
        finding = only(checkpoint({f"{m}.weight": W for m in LINEARS}, config({"quant_method": "gptq"})))
        assert (finding.check, finding.blame) == ("CK305", "config")

    @pytest.mark.parametrize(
        "method",
        [
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {"quant_method": "compressed-tensors", "format": "dense"},
            {"quant_method": "new"},
        ],
    )
    def test_plain_weights_that_may_be_quantised_on_loading(self, method: dict[str, object]) -> None:
        assert findings(checkpoint({f"{m}.weight": W for m in LINEARS}, config(method))) == []

    def test_declared_as_another(self) -> None:
        finding = only(checkpoint(quantised(SCHEMES["gptq"][1]), config({"quant_method": "bitsandbytes"})))
        assert (finding.check, finding.found) == ("CK305", "GPTQ or AWQ")

    def test_declared_in_the_text_part(self) -> None:
        inner = CONFIG | {"text_config": {"quantization_config": {"quant_method": "gptq"}}}
        assert findings(checkpoint(quantised(SCHEMES["gptq"][1]), inner)) == []


def stacked(name: str) -> str:
    """As an engine calls it that keeps modules under other paths, and companions under other names."""
    return name.replace("mlp.down_proj.", "ffn.w2_").replace("self_attn.o_proj.", "attn.out.")


class TestEngine:
    def test_what_is_not_there_is_told_once(self) -> None:
        # the engine lacks `ffn.w2_weight_scale` because the checkpoint lacks `mlp.down_proj.weight_scale`: one cause
        method, leaves = SCHEMES["packed"]
        whole = checkpoint(quantised(leaves))
        source = checkpoint(quantised(leaves, "weight_scale", LINEARS[3]), config(method))
        engine = plan(source, {stacked(n) for n in whole.tensors}, stacked)
        assert [p.name for p in engine.parameters if p.coverage == "none"] == ["model.layers.1.ffn.w2_weight_scale"]
        assert told(source, engine) == [("CK304", "error", "checkpoint", 1)]

    def test_the_weight_itself_is_not_there(self) -> None:
        method, leaves = SCHEMES["packed"]
        whole = checkpoint(quantised(leaves))
        source = checkpoint(quantised(leaves, "weight_packed", LINEARS[3]), config(method))
        assert [f.check for f in findings(source, plan(source, {stacked(n) for n in whole.tensors}, stacked))] == [
            "CK304"
        ]

    def test_another_loss_in_the_same_layer_is_told_too(self) -> None:
        method, leaves = SCHEMES["packed"]
        whole = checkpoint(quantised(leaves))
        tensors = quantised(leaves, "weight_scale", LINEARS[3])
        del tensors["model.layers.1.input_layernorm.weight"]
        source = checkpoint(tensors, config(method))
        assert [f.check for f in findings(source, plan(source, {stacked(n) for n in whole.tensors}, stacked))] == [
            "CK304",
            "CK204",
        ]

    def test_a_plain_weight_that_is_cast(self) -> None:
        # fp8 has the shape of the plain weight, so it loads, cast and without a scale
        method, leaves = SCHEMES["fp8 block"]
        whole = checkpoint(quantised(leaves))
        tensors = quantised(leaves, "weight_scale_inv", LINEARS[3]) | {f"{LINEARS[3]}.weight": W}
        source = checkpoint(tensors, config(method))
        cast = Mismatch("dtype", stacked(f"{LINEARS[3]}.weight"), (f"{LINEARS[3]}.weight",), "F8_E4M3", "BF16")
        engine = plan(source, {stacked(n) for n in whole.tensors}, stacked, mismatches=(cast,))
        assert told(source, engine) == [("CK308", "error", "config", 1)]

    def test_a_plain_weight_that_does_not_fit(self) -> None:
        method, leaves = SCHEMES["modelopt nvfp4"]
        whole = quantised(leaves)
        tensors = {n: s for n, s in whole.items() if not n.startswith(LINEARS[3])} | {f"{LINEARS[3]}.weight": W}
        source = checkpoint(tensors, config(method))
        engine = plan(source, {stacked(n): shape for n, (_, shape) in whole.items()}, stacked)
        assert [(f.check, f.severity) for f in judged(source, engine)] == [("CK308", "error")]

    def test_a_cast_in_a_module_that_lacks_nothing(self) -> None:
        method, leaves = SCHEMES["fp8 block"]
        source = checkpoint(quantised(leaves) | {f"{LINEARS[3]}.weight": W}, config(method))
        cast = Mismatch("dtype", f"{LINEARS[3]}.weight", (f"{LINEARS[3]}.weight",), "F8_E4M3", "BF16")
        assert [f.check for f in findings(source, plan(source, list(source.tensors), mismatches=(cast,)))] == ["CK302"]

    def test_modules_that_the_engine_builds_unquantised(self) -> None:
        method, leaves = SCHEMES["gptq"]
        source = checkpoint(quantised(leaves), config(method))
        model = {f"{m}.weight" for m in LINEARS} | {n for n in source.tensors if "norm" in n}
        finding = only(source, plan(source, model, raises=True))
        assert (finding.check, finding.severity, finding.blame, finding.count) == (
            "CK305",
            "error",
            "engine",
            4 * len(LINEARS),
        )

    def test_an_entry_of_the_ignore_list_that_matches_too_much(self) -> None:
        method, leaves = SCHEMES["packed"]
        source = checkpoint(quantised(leaves), config(method | {"ignore": ["re:.*down_proj"]}))
        model = {n for n in source.tensors if "down_proj" not in n} | {
            f"{m}.weight" for m in LINEARS if "down_proj" in m
        }
        finding = only(source, plan(source, model))
        assert (finding.check, finding.blame) == ("CK305", "config")
        assert "re:.*down_proj" in finding.message

    def test_companions_of_common_names_that_the_engine_has_no_place_for(self) -> None:
        method, leaves = SCHEMES["vptq"]
        source = checkpoint(quantised(leaves), config(method))
        model = {f"{m}.weight" for m in LINEARS} | {n for n in source.tensors if "norm" in n}
        finding = only(source, plan(source, model))
        assert (finding.check, finding.count) == ("CK305", len(leaves) * len(LINEARS))

    def test_experts_one_by_one_in_a_model_that_stacks_them(self) -> None:
        leaves = SCHEMES["packed"][1]
        tensors = {
            f"model.layers.{i}.experts.{j}.up_proj.{leaf}": s
            for i in range(3)
            for j in range(4)
            for leaf, s in leaves.items()
        }
        source = checkpoint(tensors, config(SCHEMES["packed"][0]))
        finding = only(source, plan(source, [f"model.layers.{i}.experts.up_proj" for i in range(3)]))
        assert (finding.check, finding.count) == ("CK305", 36)

    def test_weights_of_mlx_on_an_engine_that_has_no_such_scheme(self) -> None:
        source = checkpoint(quantised(SCHEMES["mlx"][1]), config(SCHEMES["mlx"][0]))
        failing = plan(
            source,
            [f"{m}.weight" for m in LINEARS],
            error="ValueError: no quant_method",
            failures=(Failure("ValueError: no quant_method"),),
        )
        finding = only(source, failing)
        assert (finding.check, finding.blame, finding.count) == ("CK305", "checkpoint", len(LINEARS))
        assert findings(source, plan(source, list(source.tensors))) == []

    def test_scales_of_the_cache_that_are_dropped(self) -> None:
        method, leaves = SCHEMES["fp8 tensor"]
        cache: Leaves = {f"model.layers.{i}.self_attn.{x}_scale": ("F32", []) for i in range(8) for x in "kv"}
        tensors = quantised(leaves)
        source = checkpoint({**tensors, **cache}, config(method))
        assert told(source, plan(source, list(tensors))) == [("CK305", "warning", "checkpoint", 16)]
        assert findings(source, plan(source, list(source.tensors))) == []


class TestIgnoreList:
    def entries(self, ignore: list[str]) -> list[tuple[str, str, str, int]]:
        method, leaves = SCHEMES["packed"]
        dense = {f"vision_tower.layers.{i}.{p}.weight": W for i in range(3) for p in ("fc1", "fc2")}
        return told(checkpoint(quantised(leaves) | dense, config(method | {"ignore": ignore})))

    def test_names_of_another_release(self) -> None:
        wrong = [f"model.visual.layers.{i}.{p}" for i in range(3) for p in ("fc1", "fc2")]
        assert self.entries(wrong) == [("CK307", "warning", "config", 6)]

    def test_a_wrapper_at_the_end(self) -> None:
        wrong = [f"vision_tower.layers.{i}.{p}.linear" for i in range(3) for p in ("fc1", "fc2")]
        assert self.entries(wrong) == [("CK307", "warning", "config", 6)]

    @pytest.mark.parametrize(
        "ignore",
        [["lm_head"], ["re:vision_tower.*"], ["vision_tower"], ["vision_tower.layers.0.fc1", "model.mtp.fc"], []],
    )
    def test_entries_that_match_or_are_for_what_is_not_stored(self, ignore: list[str]) -> None:
        assert self.entries(ignore) == []

    def test_names_of_fused_modules(self) -> None:
        # engines that fuse q, k and v go by the fused name too
        method, leaves = SCHEMES["packed"]
        dense = {f"model.layers.{i}.self_attn.{x}_proj.weight": W for i in range(3) for x in "qkv"}
        fused = [f"model.layers.{i}.self_attn.qkv_proj" for i in range(3)]
        assert told(checkpoint(quantised(leaves) | dense, config(method | {"ignore": fused}))) == []
        wrong = [n.replace("model.", "llm.") for n in fused]
        assert told(checkpoint(quantised(leaves) | dense, config(method | {"ignore": wrong}))) == [
            ("CK307", "warning", "config", 3)
        ]

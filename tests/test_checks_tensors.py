"""CK301, CK302, CK303, CK306 and CK401 to CK405: shapes, dtypes, and the config against the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from ckaudit import checks
from ckaudit.plan import Mismatch, NameFate, Note, Plan
from tests.toy import CONFIG, checkpoint, findings, llama, only, plan, told

LLAMA = llama()
HIDDEN, WIDE, VOCAB = 8, 16, 32


def shapes(hidden: int = HIDDEN, wide: int = WIDE, vocab: int = VOCAB) -> dict[str, list[int]]:
    """Shapes of a small decoder."""
    found = {}
    for name in LLAMA:
        matrix = (
            [wide, hidden]
            if "gate" in name or "up_" in name
            else [hidden, wide]
            if "down" in name
            else [hidden, hidden]
        )
        found[name] = (
            [vocab, hidden] if "embed" in name or "lm_head" in name else [hidden] if "norm" in name else matrix
        )
    return found


def bf16(of: Mapping[str, list[int]]) -> dict[str, tuple[str, list[int]]]:
    return {n: ("BF16", s) for n, s in of.items()}


SIZES = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "vocab_size": VOCAB, "num_hidden_layers": 4}


class TestShapes:
    def test_the_config_says_another_vocabulary(self) -> None:
        source = checkpoint(bf16(shapes(vocab=30)), CONFIG | SIZES)
        finding = only(source, plan(source, shapes(), raises=True))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK401", "error", "config", 2)
        assert finding.mend.startswith("Set vocab_size to 30")
        assert told(source) == [("CK401", "error", "config", 2)]

    def test_the_config_says_another_width_in_every_layer(self) -> None:
        source = checkpoint(bf16(shapes(wide=24)), CONFIG | SIZES)
        finding = only(source, plan(source, shapes(), raises=True))
        assert (finding.check, finding.blame, finding.count) == ("CK401", "config", 12)  # gate, up and down of 4 layers
        assert "intermediate_size: 16" in finding.message

    def test_one_layer_that_differs_from_the_others(self) -> None:
        odd = shapes() | {"model.layers.2.mlp.up_proj.weight": [24, HIDDEN]}
        source = checkpoint(bf16(odd), CONFIG | SIZES)
        finding = only(source, plan(source, shapes(), raises=True))
        assert (finding.check, finding.blame, finding.count) == ("CK301", "checkpoint", 1)
        assert (finding.wanted, finding.found) == ("[16, 8]", "[24, 8]")

    def test_experts_that_lie_the_other_way(self) -> None:
        fused = [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(3)]
        source = checkpoint({n: ("BF16", [4, HIDDEN, 2 * WIDE]) for n in fused}, CONFIG | SIZES)
        finding = only(source, plan(source, {n: [4, 2 * WIDE, HIDDEN] for n in fused}, raises=True))
        assert (finding.check, finding.count) == ("CK301", 3)
        assert "the same transposed" in finding.message
        assert finding.mend.startswith("Transpose")
        # other numbers altogether
        finding = only(source, plan(source, {n: [4, 3 * WIDE, HIDDEN] for n in fused}, raises=True))
        assert "transposed" not in finding.message

    def test_a_size_that_no_config_entry_has(self) -> None:
        source = checkpoint(bf16(shapes(vocab=30)), CONFIG)
        assert only(source, plan(source, shapes())).check == "CK301"

    def test_more_rows_than_the_tokenizer_has_are_normal(self) -> None:
        assert findings(checkpoint(bf16(shapes(vocab=40)), CONFIG | SIZES)) == []

    def test_shapes_that_the_loader_does_not_compare(self) -> None:
        source = checkpoint(LLAMA)
        note = Note("shape-unchecked", "these differ", (LLAMA[3],))
        assert told(source, plan(source, LLAMA, notes=(note,))) == [("CK301", "warning", "checkpoint", 1)]


class TestDtypes:
    def test_integers_taken_for_weights(self) -> None:
        source = checkpoint(LLAMA)
        cast = tuple(Mismatch("dtype", n, (n,), "BF16", "I8") for n in LLAMA[1:8])
        assert told(source, plan(source, LLAMA, mismatches=cast)) == [("CK302", "error", "checkpoint", 7)]

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_saved_in_a_wider_float_than_declared(self, key: str) -> None:
        finding = only(checkpoint(dict.fromkeys(LLAMA, ("F32", [2, 2])), CONFIG | {key: "bfloat16"}))
        assert (finding.check, finding.severity, finding.count) == ("CK302", "warning", len(LLAMA))
        assert "2 times" in finding.message

    @pytest.mark.parametrize("declared", ["float32", "bfloat16", "float16", None, 7])
    def test_as_wide_or_narrower_or_not_declared(self, declared: Any) -> None:
        stored = "F32" if declared == "float32" else "BF16"
        assert findings(checkpoint(dict.fromkeys(LLAMA, (stored, [2, 2])), CONFIG | {"dtype": declared})) == []

    def test_a_few_wide_tensors_are_normal(self) -> None:
        mixed = dict.fromkeys(LLAMA, ("BF16", [4, 4])) | {f"model.layers.{i}.A_log": ("F32", [2]) for i in range(4)}
        assert findings(checkpoint(mixed, CONFIG | {"dtype": "bfloat16"})) == []


def test_a_tensor_of_which_half_is_used() -> None:
    source = checkpoint(LLAMA)
    base = plan(source, LLAMA)
    half = tuple(msgspec.structs.replace(n, read=0.5) if "up_proj" in n.name else n for n in base.names)
    assert told(source, msgspec.structs.replace(base, names=half)) == [("CK303", "error", "config", 4)]


class TestUndecidable:
    def fused(self, rows: int, columns: int) -> list[tuple[str, str, str, int]]:
        return told(
            checkpoint({f"model.layers.{i}.mlp.experts.gate_up_proj": ("BF16", [4, rows, columns]) for i in range(3)})
        )

    def test_square_experts_may_be_transposed(self) -> None:
        assert self.fused(8, 8) == [("CK306", "warning", "undecidable", 3)]

    def test_oblong_ones_tell(self) -> None:
        assert self.fused(8, 4) == []

    def test_more_scale_rows_than_blocks_betray_interleaved_ranks(self) -> None:
        # 3392 rows for each of 8 ranks: 27 blocks of 128 a rank make 216 rows of scales, a plain layout 212
        quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        for scales, expected in ((216, [("CK306", "warning", "undecidable", 1)]), (212, [])):
            tensors = {
                "l.0.qkv_proj.weight": ("F8_E4M3", [27136, 128]),
                "l.0.qkv_proj.weight_scale_inv": ("F32", [scales, 1]),
            }
            assert told(checkpoint(tensors, CONFIG | quantised)) == expected
            assert told(checkpoint(tensors, CONFIG | {"text_config": quantised})) == expected

    def test_a_layout_that_only_the_config_hints_at(self) -> None:
        tensors = {"l.0.qkv_proj.weight": ("BF16", [12, 4])}
        assert told(checkpoint(tensors, CONFIG | {"attention_projection_layout": "fused_qkv"})) == [
            ("CK306", "warning", "undecidable", 1)
        ]
        assert findings(checkpoint(tensors)) == []


class TestLayers:
    def test_more_layers_than_the_model_is_built_with(self) -> None:
        source = checkpoint(LLAMA, CONFIG | {"num_hidden_layers": 3})
        finding = only(source, plan(source, [n for n in LLAMA if "layers.3." not in n]))
        assert (finding.check, finding.blame, finding.count) == ("CK401", "config", 9)
        assert finding.mend == "Set num_hidden_layers to 4."
        assert told(source) == [("CK401", "error", "config", 1)]

    @pytest.mark.parametrize(
        "sizes",
        [{"num_hidden_layers": 4}, {"text_config": {"num_hidden_layers": 4}}, {"n_layer": 4}, {},
         {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}],
    )  # fmt: skip
    def test_a_config_that_agrees(self, sizes: dict[str, Any]) -> None:
        assert findings(checkpoint(LLAMA, CONFIG | sizes)) == []

    def test_a_list_of_modules_that_are_no_layers(self) -> None:
        mergers = [f"model.visual.mergers.{i}.{p}.weight" for i in range(3) for p in ("fc1", "fc2", "norm")]
        assert findings(checkpoint(mergers, CONFIG | {"num_hidden_layers": 2})) == []

    def test_a_tower_that_the_config_says_nothing_of(self) -> None:
        tower = [f"vision.blocks.{i}.{p}.weight" for i in range(7) for p in ("fc1", "fc2", "norm")]
        assert findings(checkpoint([*LLAMA, *tower], CONFIG | {"num_hidden_layers": 4})) == []


class TestWholeParts:
    TOWER = tuple(f"vision.blocks.{i}.{p}.weight" for i in range(4) for p in ("fc1", "fc2", "norm"))

    def test_a_text_class_on_a_checkpoint_with_vision(self) -> None:
        resampler = [f"resampler.{p}.weight" for p in "abcdefgh"]
        source = checkpoint([*LLAMA, *self.TOWER, *resampler])
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK405", "error", "config", 20)

    def test_a_vision_class_on_a_text_checkpoint(self) -> None:
        source = checkpoint(LLAMA)
        finding = only(source, plan(source, [*LLAMA, *self.TOWER]))
        assert (finding.check, finding.blame, finding.count) == ("CK405", "config", 12)

    def test_a_text_class_whose_tensors_keep_the_prefix_of_the_whole(self) -> None:
        # saved from the vision-language class, declared as the text-only one: one wrong word, not a prefix and a part
        source = checkpoint([*(f"language_model.{n}" for n in LLAMA), *self.TOWER])
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.blame, finding.count) == ("CK405", "config", len(LLAMA) + 12)

    def test_a_vision_class_on_plain_text_names(self) -> None:
        source = checkpoint(LLAMA)
        finding = only(source, plan(source, [*(f"language_model.{n}" for n in LLAMA), *self.TOWER]))
        assert (finding.check, finding.blame, finding.count) == ("CK405", "config", len(LLAMA))

    def test_a_wrong_prefix_beside_a_lost_tensor_is_two_findings(self) -> None:
        source = checkpoint([f"x.{n}" for n in LLAMA[1:]])
        assert {t[0] for t in told(source, plan(source, LLAMA))} == {"CK209", "CK204"}

    def test_a_few_lost_tensors_are_no_part(self) -> None:
        source = checkpoint([n for n in (*LLAMA, *self.TOWER) if n != self.TOWER[0]])
        assert only(source, plan(source, [*LLAMA, *self.TOWER])).check == "CK204"


class TestReadable:
    def test_weights_without_a_config(self) -> None:
        lone = checkpoint(LLAMA, None)
        assert told(lone) == [("CK403", "note", "checkpoint", 0)]
        repo = checkpoint(LLAMA, None, {"README.md": b""})
        assert told(repo) == [("CK403", "error", "checkpoint", 0)]

    @pytest.mark.parametrize("other", ["adapter_config.json", "model_index.json"])
    def test_repos_that_have_their_config_under_another_name(self, other: str) -> None:
        assert not [f for f in findings(checkpoint(LLAMA, None, {other: b"{}"})) if f.check == "CK403"]

    def test_a_config_that_cannot_be_parsed_is_the_containers_to_tell(self) -> None:
        found = checks.run(checkpoint(LLAMA, None, {"config.json": b"{"}), ())[0]
        assert [f.check for f in found if f.severity == "error"] == ["CK116"]

    def test_no_class_named(self) -> None:
        assert told(checkpoint(LLAMA, {"model_type": "toy"})) == [("CK404", "warning", "config", 0)]

    def test_code_of_the_repo(self) -> None:
        assert told(checkpoint(LLAMA, CONFIG | {"auto_map": {"AutoModel": "m.M"}})) == [("CK404", "note", "config", 0)]

    def test_saved_by_a_newer_transformers(self) -> None:
        source = checkpoint(LLAMA)
        note = Note("config-newer", "config.json was written by transformers 9.9, newer than 5.24")
        assert told(source, plan(source, LLAMA, notes=(note,))) == [("CK402", "warning", "environment", 0)]

    @pytest.mark.parametrize(
        "config",
        [{"architectures": "x"}, {"text_config": 7}, {"num_hidden_layers": "4"}, {"quantization_config": []}, {"tie_word_embeddings": "no"},
         {"vocab_size": -1}, {"num_hidden_layers": True}, {"auto_map": []}, {"quantization_config": {"quant_method": 3, "ignore": [1]}}],
    )  # fmt: skip
    def test_a_config_of_odd_types_is_no_crash(self, config: dict[str, Any]) -> None:
        source = checkpoint(LLAMA, CONFIG | config)
        checks.run(
            source,
            (
                plan(source, LLAMA),
                Plan(id="e", engine="e", release=None, method="live", names=(NameFate("x", "loaded"),)),
            ),
        )

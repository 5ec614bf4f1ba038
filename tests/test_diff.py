"""diff: for every rule a pair of checkpoints that it explains, and one much like it that it must not."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ckaudit.changes import Change, Diff, Link
from ckaudit.diff import compare
from ckaudit.findings import Report
from tests.diff_examples import decoder, one, sharded, split, told
from tests.toy import CONFIG, Entries

TIED = CONFIG | {"tie_word_embeddings": True}
UNTIED = CONFIG | {"tie_word_embeddings": False}
LAYERS = 4
Made = dict[str, tuple[str, list[int]]]


def report(a: Entries, b: Entries, config_a: Any = CONFIG, config_b: Any = CONFIG, **options: Any) -> Report:
    x, y = one(a, config_a), one(b, config_b)
    return told(compare(x, y, **options), x, y)


def diff(a: Entries, b: Entries, config_a: Any = CONFIG, config_b: Any = CONFIG) -> Diff:
    return compare(one(a, config_a), one(b, config_b))


def rows(found: Diff) -> list[tuple[str, str | None, int, int]]:
    """(kind, rule, tensors of A, tensors of B) of every change."""
    return [(c.kind, c.rule, len(set(c.old)), len(set(c.new))) for c in found.changes]


def only(found: Diff) -> Change:
    assert len(found.changes) == 1, rows(found)
    return found.changes[0]


def without(entries: Entries, *patterns: str) -> Made:
    return {n: (d, list(s)) for n, (d, s) in entries.items() if not any(re.search(p, n) for p in patterns)}


def renamed(entries: Entries, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Made:
    return {re.sub(pattern, replacement, n): (d, list(s)) for n, (d, s) in entries.items()}


def retyped(entries: Entries, dtype: str, pattern: str = "") -> Made:
    return {n: (dtype if re.search(pattern, n) else d, list(s)) for n, (d, s) in entries.items()}


def test_nothing_differs() -> None:
    found = diff(decoder(), decoder())
    assert (found.changes, found.identical, found.unjudged) == ((), 39, ())
    # 2 * 100 * 16 + 16 for what is outside the layers; a layer has 2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16 elements, of 2 bytes
    assert found.identical_bytes == 2 * (2 * 100 * 16 + 16 + LAYERS * (32 + 512 + 256 + 1152))


def test_how_tensors_are_sharded_is_no_difference() -> None:
    entries = decoder()
    assert compare(sharded(split(entries, 3)), one(dict(reversed(entries.items())))).changes == ()


class TestRenames:
    @pytest.mark.parametrize(
        ("pattern", "replacement", "text"),
        [
            ("^", "module.", "add the prefix `module.`"),
            ("^model.", "", "strip the prefix `model.`"),  # the head has another name on neither side
            ("^model.", "bert.", "replace the prefix `model.` by `bert.`"),
            ("self_attn", "attention", "replace `self_attn.` by `attention.` in the names"),
            (r"layers\.(\d+)\.", r"layers.\1._fsdp_wrapped_module.", "in B, take `_fsdp_wrapped_module.` out of the names"),
        ],
    )  # fmt: skip
    def test_one_rule_for_many_names(self, pattern: str, replacement: str, text: str) -> None:
        target = renamed(decoder(), pattern, replacement)
        change = only(diff(decoder(), target))
        assert (change.kind, change.rule, change.text) == ("renamed", "rename", text)
        assert {link.old[0]: link.new[0] for link in change.links} == {
            a: b for a, b in zip(decoder(), target, strict=True) if a != b
        }

    def test_each_name_by_one_rule(self) -> None:
        """What transformers 4.52 did to vision language models: two prefixes changed places, the head's went."""
        source = {f"language_model.{n}": e for n, e in decoder().items()}
        source |= {f"vision_tower.blocks.{i}.{p}.weight": ("BF16", [16, 16]) for i in range(3) for p in ("fc1", "fc2")}
        target = renamed(source, r"^language_model\.model\.", "model.language_model.")
        target = renamed(target, r"^language_model\.lm_head", "lm_head")
        target = renamed(target, "^vision_tower", "model.vision_tower")
        assert sorted(rows(diff(source, target))) == [
            ("renamed", "rename", 1, 1), ("renamed", "rename", 6, 6), ("renamed", "rename", 38, 38),
        ]  # fmt: skip

    def test_a_renamed_tensor_may_be_cast_as_well(self) -> None:
        found = diff(decoder(), retyped(renamed(decoder(), "^", "module."), "F32"))
        assert rows(found) == [("renamed", "rename", 39, 39), ("retyped", "cast", 39, 39)]

    def test_other_shapes_are_another_module(self) -> None:
        """A tower of the same names under another prefix, twice as wide: lost and added, not renamed."""
        tower = {f"vpm.blocks.{i}.{p}.weight": ("BF16", [16, 16]) for i in range(3) for p in ("fc1", "fc2")}
        wide = {f"vision.blocks.{i}.{p}.weight": ("BF16", [32, 32]) for i in range(3) for p in ("fc1", "fc2")}
        assert rows(diff(decoder() | tower, decoder() | wide)) == [("removed", None, 6, 0), ("added", None, 0, 6)]

    def test_modules_that_play_other_parts_are_no_rename(self) -> None:
        """One gained a norm on its keys, the other had one on its queries: the same shape in every layer."""
        queries, keys = (
            {f"model.layers.{i}.self_attn.{p}_norm.weight": ("BF16", [4]) for i in range(LAYERS)} for p in "qk"
        )
        assert rows(diff(decoder() | queries, decoder() | keys)) == [("removed", None, 4, 0), ("added", None, 0, 4)]

    @pytest.mark.parametrize(
        ("one", "other"), [("encoder", "decoder"), ("text_model", "vision_model"), ("student", "teacher")]
    )
    def test_nor_are_two_halves_of_a_model(self, one: str, other: str) -> None:
        found = diff(decoder(root=f"model.{one}."), decoder(root=f"model.{other}."))
        assert rows(found) == [("removed", None, 38, 0), ("added", None, 0, 38)]

    def test_nor_are_two_that_may_be_either_of_two(self) -> None:
        old, new = (
            {f"model.layers.{i}.{p}.weight": ("BF16", [16]) for i in range(LAYERS) for p in pair}
            for pair in (("scale_a", "scale_b"), ("gamma_x", "gamma_y"))
        )
        assert rows(diff(decoder() | old, decoder() | new)) == [("removed", None, 8, 0), ("added", None, 0, 8)]

    def test_a_misspelling(self) -> None:
        change = only(diff(decoder(), renamed(decoder(), "post_attention_layernorm", "post_attention_layrnorm")))
        assert (change.kind, change.rule, len(change.links)) == ("renamed", "rename", 4)

    def test_a_module_that_one_alone_can_be(self) -> None:
        change = only(diff(decoder(), renamed(decoder(), "k_proj", "key_proj")))
        assert (change.rule, change.text) == ("rename", "replace `k_proj.` by `key_proj.` in the names")

    def test_names_joined_otherwise(self) -> None:
        """GLM re-saved by transformers: the words of a path changed places (524 tensors were skipped by who served it)."""
        old, new = (
            {f"model.layers.{i}.{n}": ("BF16", [8, 4]) for i in range(LAYERS) for n in names}
            for names in (("hc_attn_fn", "hc_attn_base"), ("attn_hc.fn", "attn_hc.base"))
        )
        change = only(diff(decoder() | old, decoder() | new))
        assert (change.rule, change.text, len(change.links)) == ("rename", "`hc_attn_` → `attn_hc.`", 8)

    def test_another_authors_words(self) -> None:
        words = {
            "q_proj": "wq",
            "k_proj": "wk",
            "v_proj": "wv",
            "o_proj": "wo",
            "gate_proj": "w1",
            "down_proj": "w2",
            "up_proj": "w3",
        }
        target = {re.sub("|".join(words), lambda m: words[m[0]], n): e for n, e in decoder().items()}
        found = diff(decoder(), target)
        assert {c.rule for c in found.changes} == {"rename"}
        links = {link.old[0]: link.new[0] for c in found.changes for link in c.links}
        assert links == {a: b for a, b in zip(decoder(), target, strict=True) if a != b}

    def test_older_words_of_a_layer_norm(self) -> None:
        new = {f"encoder.layer.{i}.LayerNorm.{p}": ("F32", [16]) for i in range(3) for p in ("weight", "bias")}
        old = renamed(renamed(new, "weight$", "gamma"), "bias$", "beta")
        assert rows(diff(old, new)) == [("renamed", "legacy", 3, 3), ("renamed", "legacy", 3, 3)]
        assert diff(new, old).changes[0].text == "`weight` → `gamma`"


def fused(entries: Entries, parts: tuple[str, ...], whole: str, rows_: int) -> Made:
    """The decoder with these projections of every layer in one."""
    made = without(entries, *(f"{p}[.]" for p in parts))
    holds = "self_attn" if "q_proj" in parts else "mlp"
    return made | {f"model.layers.{i}.{holds}.{whole}.weight": ("BF16", [rows_, 16]) for i in range(LAYERS)}


def experts(
    count: int = 6, prefix: str = "mlp", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Made:
    shapes = [24, 16], [24, 16], [16, 24]
    made = without(decoder(), "mlp")
    return made | {
        f"model.layers.{i}.{prefix}.experts.{e}.{p}.weight": ("BF16", s)
        for i in range(LAYERS)
        for e in range(count)
        for p, s in zip(parts, shapes, strict=True)
    }


def stacked(count: int = 6, *, transposed: bool = False) -> Made:
    made = without(decoder(), "mlp")
    for i in range(LAYERS):
        gate_up, down = [count, 48, 16], [count, 16, 24]
        made[f"model.layers.{i}.mlp.experts.gate_up_proj"] = ("BF16", [count, 16, 48] if transposed else gate_up)
        made[f"model.layers.{i}.mlp.experts.down_proj"] = ("BF16", [count, 24, 16] if transposed else down)
    return made


class TestLayouts:
    QKV = "q_proj", "k_proj", "v_proj"

    @pytest.mark.parametrize("whole", ["qkv_proj", "qkv", "Wqkv", "query_key_value", "c_attn"])
    def test_fused_and_split(self, whole: str) -> None:
        other = fused(decoder(), self.QKV, whole, 32)
        change = only(diff(decoder(), other))
        assert (change.kind, change.rule) == ("relaid", "fused")
        assert {len(link.old) for link in change.links} == {3}
        back = only(diff(other, decoder()))
        assert {Link(link.new, link.old) for link in back.links} == set(change.links)

    def test_gate_and_up_with_their_names(self) -> None:
        change = only(diff(decoder(), fused(decoder(), ("gate_proj", "up_proj"), "gate_up_proj", 48)))
        assert change.text == "`gate_proj`, `up_proj` → `gate_up_proj`"

    def test_rows_that_do_not_add_up_are_a_loss(self) -> None:
        found = diff(decoder(), fused(decoder(), self.QKV, "qkv_proj", 31))
        assert rows(found) == [("removed", None, 12, 0), ("added", None, 0, 4)]

    def test_a_part_that_is_not_there_is_a_loss(self) -> None:
        source = without(decoder(), "layers.2.self_attn.k_proj")
        found = diff(source, fused(decoder(), self.QKV, "qkv_proj", 32))
        assert rows(found) == [("relaid", "fused", 9, 3), ("removed", None, 2, 0), ("added", None, 0, 1)]

    @pytest.mark.parametrize("transposed", [False, True])
    def test_experts_stacked_and_unstacked(self, transposed: bool) -> None:
        other = stacked(transposed=transposed)
        assert sorted(rows(diff(experts(), other))) == [("relaid", "stacked", 24, 4), ("relaid", "stacked", 48, 4)]
        assert sorted(rows(diff(other, experts()))) == [("relaid", "stacked", 4, 24), ("relaid", "stacked", 4, 48)]

    def test_experts_of_another_name_and_place(self) -> None:
        """Mixtral as transformers 5 keeps it."""
        source = experts(prefix="block_sparse_moe", parts=("w1", "w3", "w2"))
        source |= {f"model.layers.{i}.block_sparse_moe.gate.weight": ("BF16", [6, 16]) for i in range(LAYERS)}
        target = stacked() | {f"model.layers.{i}.mlp.gate.weight": ("BF16", [6, 16]) for i in range(LAYERS)}
        found = diff(source, target)
        assert sorted(rows(found)) == [
            ("relaid", "stacked", 24, 4), ("relaid", "stacked", 48, 4), ("renamed", "rename", 4, 4),
        ]  # fmt: skip

    def test_one_expert_that_is_not_there_is_a_loss(self) -> None:
        found = diff(without(experts(), r"layers.1.mlp.experts.3\."), stacked())
        assert ("removed", None, 15, 0) in rows(found)
        assert ("added", None, 0, 2) in rows(found)


def fp8(entries: Entries, companion: str = "weight_scale_inv") -> Made:
    made: Made = {}
    for name, (dtype, shape) in entries.items():
        linear = "_proj" in name
        made[name] = ("F8_E4M3" if linear else dtype, list(shape))
        if linear:
            made[name.removesuffix("weight") + companion] = ("F32", [1, 1])
    return made


def packed(entries: Entries) -> Made:
    made: Made = {}
    for name, (dtype, shape) in entries.items():
        if "_proj" not in name:
            made[name] = (dtype, list(shape))
            continue
        module = name.removesuffix("weight")
        made[f"{module}weight_packed"] = ("I32", [shape[0], shape[1] // 8])
        made[f"{module}weight_scale"] = ("BF16", [shape[0], 1])
        made[f"{module}weight_shape"] = ("I64", [2])
    return made


class TestQuantised:
    def test_experts_that_are_stacked_and_quantised(self) -> None:
        found = rows(diff(fp8(experts()), stacked()))
        linears = 6 * 3 * LAYERS
        assert [r[:2] for r in found] == [("relaid", "stacked"), ("relaid", "stacked"), ("quantised", "quantised")]
        assert found[2][2:] == (2 * (linears + 4 * LAYERS), 2 * LAYERS + 4 * LAYERS)

    LINEARS = 7 * LAYERS

    def test_fp8_and_back(self) -> None:
        assert rows(diff(decoder(), fp8(decoder()))) == [("quantised", "quantised", self.LINEARS, 2 * self.LINEARS)]
        assert rows(diff(fp8(decoder()), decoder())) == [("quantised", "quantised", 2 * self.LINEARS, self.LINEARS)]

    @pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
    def test_fused_experts_with_scales_of_their_own(self, dtype: str) -> None:
        made = stacked()
        for name in [n for n in made if "experts" in n]:
            made[name] = (dtype, made[name][1])
            made[f"{name}_scale_inv"] = ("F32", [6, 1, 1])
        assert rows(diff(stacked(), made)) == [("quantised", "quantised", 2 * LAYERS, 4 * LAYERS)]
        found = diff(experts(), made)
        assert [r[:2] for r in rows(found)] == [
            ("relaid", "stacked"),
            ("relaid", "stacked"),
            ("quantised", "quantised"),
        ]
        lost = diff(made, without(made, "down_proj_scale_inv"))
        assert rows(lost) == [("removed", None, LAYERS, 0)]

    def test_packed_and_renamed(self) -> None:
        found = diff(decoder(), packed(renamed(decoder(), "^model", "language_model.model")))
        assert rows(found) == [
            ("renamed", "rename", 38, 38 + 2 * self.LINEARS),
            ("quantised", "quantised", self.LINEARS, 3 * self.LINEARS),
        ]

    def test_data_that_cannot_be_the_weights(self) -> None:
        short = packed(decoder())
        short["model.layers.0.mlp.up_proj.weight_packed"] = ("I32", [23, 2])
        assert ("reshaped", None, 1, 3) in rows(diff(decoder(), short))

    @pytest.mark.parametrize("where", ["layers.2.mlp.up_proj", "_proj"])
    def test_quantised_without_what_the_scheme_needs(self, where: str) -> None:
        made = report(decoder(), without(packed(decoder()), f"{where}.*weight_scale"))
        lost = 1 if where != "_proj" else self.LINEARS
        assert [(f.check, f.severity, f.count) for f in made.findings] == [("CK801", "error", lost)]
        assert "without `weight_scale`" in made.findings[0].message

    def test_every_scale_lost_is_no_cast(self) -> None:
        """The weights are still in eight bits, and nothing says by what to multiply them."""
        assert rows(diff(fp8(decoder()), without(fp8(decoder()), "scale_inv"))) == [("removed", None, self.LINEARS, 0)]
        prefixed = renamed(without(fp8(decoder()), "scale_inv"), "^", "module.")
        assert sorted(rows(diff(fp8(decoder()), prefixed)), key=str) == [
            ("removed", None, self.LINEARS, 0),
            ("renamed", "rename", 39, 39),
        ]

    def test_weights_of_eight_bits_without_the_scale_that_others_have(self) -> None:
        target = without(fp8(decoder()), "layers.1.mlp.*scale_inv")
        found = report(decoder(), target).findings
        assert [(f.check, f.severity, f.count) for f in found] == [("CK801", "error", 3)]
        cast = {n: (("F8_E4M3" if "mlp" in n else d), s) for n, (d, s) in decoder().items()}
        assert {f.severity for f in report(decoder(), cast).findings} == {"warning"}  # a plain cast has none anywhere

    def test_a_scale_lost_between_two_of_one_scheme(self) -> None:
        found = diff(packed(decoder()), without(packed(decoder()), "layers.1.mlp.up_proj.weight_scale"))
        assert rows(found) == [("removed", None, 1, 0)]
        prefixed = without(renamed(packed(decoder()), "^", "module."), "layers.1.mlp.up_proj.weight_scale")
        assert ("removed", None, 1, 0) in rows(diff(packed(decoder()), prefixed))


QUANTISERS: dict[str, Callable[[list[int]], dict[str, tuple[str, list[int]]]]] = {
    "GPTQ or AWQ": lambda s: {
        "qweight": ("I32", [s[1] // 8, s[0]]), "qzeros": ("I32", [1, s[0] // 8]), "scales": ("F16", [1, s[0]]), "g_idx": ("I32", [s[1]]),
    },
    "bitsandbytes 4-bit": lambda s: {
        "weight": ("U8", [s[0] * s[1] // 2, 1]), "weight.absmax": ("F32", [4]), "weight.quant_map": ("F32", [16]),
        "weight.quant_state.bitsandbytes__nf4": ("U8", [80]),
    },
    "packed bytes with a scale": lambda s: {
        "weight": ("U8", [s[0], s[1] // 2]), "weight_scale": ("F8_E4M3", [s[0], 1]), "weight_scale_2": ("F32", []),
        "input_scale": ("F32", []),
    },
    "MLX": lambda s: {"weight": ("U32", [s[0], s[1] // 8]), "scales": ("BF16", [s[0], 1]), "biases": ("BF16", [s[0], 1])},
    "int8": lambda s: {"weight": ("I8", s), "SCB": ("F32", [s[0]])},
}  # fmt: skip


@pytest.mark.parametrize("scheme", QUANTISERS)
def test_schemes(scheme: str) -> None:
    """What each quantiser stores for a linear layer, by its own documents; every other tensor stays as it is."""
    made: Made = {}
    for name, (dtype, shape) in decoder().items():
        module = name.removesuffix("weight")
        made |= (
            {module + leaf: e for leaf, e in QUANTISERS[scheme](shape).items()}
            if "_proj" in name
            else {name: (dtype, shape)}
        )
    change = only(diff(decoder(), made))
    assert (change.kind, change.rule, len(change.links)) == ("quantised", "quantised", 28)
    assert scheme in change.text or scheme == "int8"


def test_companions_whose_weight_is_not_there() -> None:
    """`weight.absmax` is no weight, though its name begins like one."""
    made: Made = {n: (d, list(s)) for n, (d, s) in decoder().items()}
    for name in [n for n in made if "_proj" in n]:
        leaves = QUANTISERS["bitsandbytes 4-bit"](made.pop(name)[1])
        made |= {name.removesuffix("weight") + leaf: e for leaf, e in leaves.items()}
    del made["model.layers.1.mlp.up_proj.weight"]
    found = report(decoder(), made).findings
    assert [(f.check, f.names) for f in found] == [("CK801", ("model.layers.1.mlp.up_proj.weight",))]
    assert "without `weight`" in found[0].message


class TestDtypes:
    def test_a_cast(self) -> None:
        change = only(diff(decoder(), retyped(decoder(), "F32")))
        assert (change.kind, change.rule, change.text) == ("retyped", "cast", "BF16 → F32")
        assert change.new_bytes == 2 * change.old_bytes

    def test_two_dtypes_to_one(self) -> None:
        source = retyped(decoder(), "F32", "norm")
        assert rows(diff(source, retyped(decoder(), "F16"))) == [("retyped", "cast", 30, 30), ("retyped", "cast", 9, 9)]

    def test_some_layers_alone(self) -> None:
        found = report(decoder(), retyped(decoder(), "F16", "down_proj")).findings
        assert [(f.check, f.severity, f.count) for f in found] == [("CK804", "warning", 4)]

    def test_the_few_in_a_wider_dtype(self) -> None:
        """A router's bias that the source keeps in F32: every F32 tensor changed, and it is no cast of the checkpoint."""
        bias = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": ("F32", [8]) for i in range(LAYERS)}
        found = report(decoder() | bias, decoder() | retyped(bias, "BF16")).findings
        assert [(f.check, f.severity, f.count) for f in found] == [("CK804", "warning", 4)]

    def test_floats_to_integers(self) -> None:
        found = report(decoder(), retyped(decoder(), "I8", "norm")).findings
        assert [(f.check, f.severity) for f in found] == [("CK804", "error")]

    def test_parts_and_whole(self) -> None:
        whole = retyped(fused(decoder(), TestLayouts.QKV, "qkv_proj", 32), "F16")
        assert ("retyped", "cast", 39, 31) in rows(diff(decoder(), whole))


class TestShapes:
    def test_a_vocabulary(self) -> None:
        change = only(diff(decoder(), decoder(vocab=104)))
        assert (change.rule, change.wanted, change.found, len(change.links)) == (
            "vocabulary",
            "[100, 16]",
            "[104, 16]",
            2,
        )

    def test_not_against_the_config(self) -> None:
        config = CONFIG | {"vocab_size": 100}
        assert rows(diff(decoder(), decoder(vocab=104), config, config)) == [("reshaped", None, 2, 2)]
        assert only(diff(decoder(), decoder(vocab=104), config, CONFIG | {"vocab_size": 104})).rule == "vocabulary"

    def test_not_the_embedding_alone(self) -> None:
        target = decoder() | {"model.embed_tokens.weight": ("BF16", [104, 16])}
        assert rows(diff(decoder(), target)) == [("reshaped", None, 1, 1)]

    def test_transposed_is_told(self) -> None:
        target = decoder() | {f"model.layers.{i}.mlp.up_proj.weight": ("BF16", [16, 24]) for i in range(LAYERS)}
        found = report(decoder(), target).findings
        assert [(f.check, f.severity, f.count, f.message) for f in found] == [
            ("CK803", "error", 4, "4 tensors are transposed.")
        ]

    def test_a_router_and_its_experts(self) -> None:
        gates = [{f"model.layers.{i}.mlp.gate.weight": ("BF16", [n, 16]) for i in range(LAYERS)} for n in (6, 4)]
        sizes = [CONFIG | {"num_experts": n} for n in (6, 4)]
        found = diff(experts(6) | gates[0], experts(4) | gates[1], *sizes)
        assert rows(found) == [("reshaped", "experts", 4, 4), ("removed", "experts", 24, 0)]
        silent = diff(experts(6) | gates[0], experts(4) | gates[1], sizes[0], sizes[0])
        assert rows(silent) == [("reshaped", None, 4, 4), ("removed", None, 24, 0)]


class TestOneSided:
    def test_a_tied_head(self) -> None:
        change = only(diff(decoder(), without(decoder(), "lm_head"), TIED, TIED))
        assert (change.kind, change.rule) == ("removed", "tied")
        assert only(diff(without(decoder(), "lm_head"), decoder(), TIED, UNTIED)).rule == "tied"

    def test_a_head_that_is_not_tied(self) -> None:
        found = report(decoder(), without(decoder(), "lm_head"), UNTIED, UNTIED).findings
        assert [(f.check, f.severity, f.blame, f.count) for f in found] == [("CK801", "error", "checkpoint", 1)]

    def test_a_head_that_may_be_tied(self) -> None:
        made = report(decoder(), without(decoder(), "lm_head"))
        assert [(f.check, f.severity, f.blame) for f in made.findings] == [("CK801", "warning", "undecidable")]

    def test_a_tied_head_of_another_shape_is_lost(self) -> None:
        source = decoder() | {"lm_head.weight": ("BF16", [100, 8])}
        assert only(diff(source, without(decoder(), "lm_head"), TIED, TIED)).rule is None

    def test_another_embedding_is_no_twin(self) -> None:
        """Of the same shape by chance; the twin of an embedding is the head."""
        source = decoder() | {"audio.embed_tokens.weight": ("BF16", [100, 16])}
        kept = without(source, "lm_head")
        assert only(diff(kept, without(kept, "model.embed_tokens"), TIED, TIED)).rule is None
        assert only(diff(decoder(), without(decoder(), "embed_tokens"), TIED, TIED)).rule == "tied"

    def test_the_embeddings_of_an_encoder_and_its_decoder(self) -> None:
        shared: Made = {
            f"{n}.weight": ("F32", [100, 16])
            for n in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
        }
        rest: Made = {f"encoder.layers.{i}.fc1.weight": ("F32", [16, 16]) for i in range(3)}
        config = CONFIG | {"is_encoder_decoder": True}
        found = only(diff(shared | rest, without(shared, "embed_tokens|lm_head") | rest, config, config))
        assert (found.rule, found.text[:21], len(found.links)) == ("tied", "tied to `shared.weigh", 3)

    DRAFT: ClassVar[Made] = {
        f"mtp.layers.0.{p}.weight": ("BF16", [16, 16]) for p in ("eh_proj", "mlp.down_proj", "mlp.up_proj")
    }

    ANNOUNCED = CONFIG | {"num_nextn_predict_layers": 1}

    def test_draft_layers_that_the_config_of_b_still_announces(self) -> None:
        found = report(decoder() | self.DRAFT, decoder(), self.ANNOUNCED, self.ANNOUNCED).findings
        assert [(f.check, f.severity, f.count, f.bytes) for f in found] == [("CK801", "error", 3, 3 * 16 * 16 * 2)]
        assert "num_nextn_predict_layers: 1" in found[0].message

    def test_draft_layers_that_nobody_announces(self) -> None:
        """The model is whole without them, so a warning; but they are lost, and nothing says that they were meant to be."""
        found = report(decoder() | self.DRAFT, decoder()).findings
        assert [(f.check, f.severity, f.count) for f in found] == [("CK801", "warning", 3)]

    def test_draft_layers_retired_or_added(self) -> None:
        assert only(diff(decoder() | self.DRAFT, decoder(), self.ANNOUNCED, CONFIG)).rule == "draft"
        assert only(diff(decoder(), decoder() | self.DRAFT)).rule == "draft"

    def test_half_a_draft_model(self) -> None:
        change = only(diff(decoder() | self.DRAFT, decoder() | without(self.DRAFT, "down_proj")))
        assert (change.kind, change.rule, change.text) == (
            "removed",
            None,
            "a part of the draft layers (MTP), 1 of 3 tensors",
        )

    def test_draft_layers_behind_the_last(self) -> None:
        """DeepSeek numbers its draft layer as one more layer."""
        config = CONFIG | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
        source = decoder(5) | {"model.layers.4.eh_proj.weight": ("BF16", [16, 32])}
        lost = only(diff(source, decoder(4), config, config))
        assert (lost.rule, lost.text[:31], len(lost.old)) == (None, "draft layers (MTP), all of them", 10)
        assert only(diff(source, decoder(4), config, config | {"num_nextn_predict_layers": 0})).rule == "draft"

    def test_layers_that_the_config_counts(self) -> None:
        sizes = [CONFIG | {"num_hidden_layers": n} for n in (6, 4)]
        assert only(diff(decoder(6), decoder(4), *sizes)).rule == "layers"
        assert only(diff(decoder(4), decoder(6), *reversed(sizes))).rule == "layers"
        lost = only(diff(decoder(6), decoder(4), sizes[0], sizes[0]))
        assert (lost.rule, lost.text) == (None, "layers 4,5 of `model.layers`")

    def test_a_layer_left_out_and_the_others_renumbered(self) -> None:
        """Layers of two kinds: only one way of counting brings like to like."""
        sizes = [CONFIG | {"num_hidden_layers": n} for n in (6, 5)]
        whole = decoder(6)
        for i in (0, 1, 3, 4):  # all but every third keep a norm of their queries
            whole |= {f"model.layers.{i}.self_attn.q_norm.weight": ("BF16", [8])}
        shorter = renamed(without(whole, r"layers\.2\."), r"layers\.([345])", lambda m: f"layers.{int(m[1]) - 1}")
        found = diff(whole, shorter, *sizes)
        assert [(c.kind, c.rule) for c in found.changes] == [("renamed", "layers"), ("removed", "layers")]
        moved, gone = found.changes
        assert all(
            o.replace("layers.3", "layers.2") == n
            for o, n in (x for x in zip(moved.old, moved.new, strict=True))
            if "layers.3" in o
        )
        assert {n.split(".")[2] for n in gone.old} == {"2"}
        back = diff(shorter, whole, *reversed(sizes))
        assert [(c.kind, c.rule) for c in back.changes] == [("renamed", "layers"), ("added", "layers")]

    def test_a_layer_out_of_the_middle(self) -> None:
        sizes = [CONFIG | {"num_hidden_layers": n} for n in (6, 5)]
        assert only(diff(decoder(6), without(decoder(6), "layers.2."), *sizes)).rule is None

    def test_tables_that_loaders_compute(self) -> None:
        tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": ("F32", [8]) for i in range(LAYERS)}
        assert only(diff(decoder() | tables, decoder())).rule == "buffer"
        assert only(diff(decoder(), decoder() | tables)).rule == "buffer"
        for module in ("attn", "attn.attention"):  # GPT-2, GPT-Neo
            mask = {f"model.layers.{i}.{module}.bias": ("BOOL", [1, 1, 32, 32]) for i in range(LAYERS)}
            assert only(diff(decoder() | mask, decoder())).rule == "buffer"

    def test_a_bias_is_no_table(self) -> None:
        for size in ([16], [1, 1, 1, 1]):
            biases = {f"model.layers.{i}.attn.bias": ("BF16", size) for i in range(LAYERS)}
            assert only(diff(decoder() | biases, decoder())).rule is None

    def test_an_adapter_gone(self) -> None:
        source = renamed(decoder(), r"q_proj\.", "q_proj.base_layer.")
        source |= {
            f"model.layers.{i}.self_attn.q_proj.lora_{x}.default.weight": ("BF16", [16, 4])
            for i in range(LAYERS)
            for x in "AB"
        }
        made = report(source, decoder())
        assert [(f.check, f.severity, f.blame, f.count) for f in made.findings] == [
            ("CK801", "warning", "undecidable", 8)
        ]
        assert [(f.check, f.severity, f.count) for f in report(decoder(), source).findings] == [("CK802", "warning", 8)]


class TestLoss:
    def test_whole_source_shards(self) -> None:
        """An exporter that drops the shards which hold a tensor that it leaves out (AReaL #1403)."""
        shards = split(decoder(), 3)
        last = list(shards)[-1]
        a = sharded(shards | {last: shards[last] | TestOneSided.DRAFT})
        found = compare(a, sharded({n: e for n, e in shards.items() if n != last}))
        assert rows(found) == [("removed", None, 3, 0), ("removed", None, len(shards[last]), 0)]
        assert found.changes[1].text == f"all of source shard {last}, of which 3 more are told apart"
        assert found.changes[1].old_bytes == 2 * sum(
            s[0] * (s[1] if len(s) > 1 else 1) for _, s in shards[last].values()
        )

    def test_parts_of_shards(self) -> None:
        shards = split(decoder(), 3)
        first = next(iter(shards))
        found = compare(sharded(shards), sharded(shards | {first: without(shards[first], "embed_tokens")}))
        assert [(c.text, c.nearest) for c in found.changes] == [("`model.embed_tokens.weight`", None)]

    def test_a_part_of_the_model(self) -> None:
        tower = {f"vpm.blocks.{i}.{p}.weight": ("BF16", [16, 16]) for i in range(3) for p in ("fc1", "fc2")}
        assert only(diff(decoder() | tower, decoder())).text == "all of `vpm.` (6)"

    def test_the_nearest_name_that_is_left_over(self) -> None:
        target = without(decoder(), "layers.1.mlp.up_proj") | {"model.layers.1.mlp.up_projection.weight": ("BF16", [9])}
        lost = diff(decoder(), target).changes[0]
        assert lost.nearest == "model.layers.1.mlp.up_projection.weight"


class TestRoundtrip:
    def test_a_rule_is_no_excuse(self) -> None:
        made = report(decoder(), renamed(decoder(), "^", "module."), roundtrip=True)
        assert [(f.check, f.severity, f.count) for f in made.findings] == [("CK805", "error", 39)]
        assert made.exit_code == 1
        assert report(decoder(), renamed(decoder(), "^", "module.")).exit_code == 0

    def test_warnings_are_errors(self) -> None:
        extra = {"extra.weight": ("BF16", [3])}
        assert report(decoder(), decoder() | extra).exit_code == 0
        assert report(decoder(), decoder() | extra, roundtrip=True).exit_code == 1

    def test_identical(self) -> None:
        assert report(decoder(), decoder(), roundtrip=True).exit_code == 0


@pytest.mark.parametrize("name", ["a\x1b[31m.weight", "a\u202e.weight", "#.weight", "..", "", "a" * 5000 + ".weight"])
def test_hostile_names(name: str) -> None:
    extra: Made = {name: ("BF16", [3])}
    for a, b in ((decoder() | extra, decoder()), (decoder(), decoder() | extra)):
        made = report(a, b)
        assert [f.names for f in made.findings] == [(name,)]
        assert all("\x1b" not in f.message and "\u202e" not in f.message for f in made.findings)


class TestSavedAgainstSource:
    """Cases that were reported, by the names that the reports give."""

    def test_a_prefix_three_times(self) -> None:
        """https://github.com/huggingface/transformers/issues/45357: loading again hides it."""
        source = renamed(decoder(), "^model", "model.language_model")
        source |= {
            f"model.visual.blocks.{i}.attn.{p}.weight": ("BF16", [16, 16]) for i in range(3) for p in ("qkv", "proj")
        }
        target = renamed(source, "^model.language_model", "model.language_model.language_model.language_model")
        target = renamed(target, "^model.visual", "model.language_model.visual")
        assert rows(diff(source, target)) == [("renamed", "rename", 38, 38), ("renamed", "rename", 6, 6)]
        assert [f.check for f in report(source, target, roundtrip=True).findings] == ["CK805", "CK805"]

    @pytest.mark.parametrize("prefix", ["bert.", "transformer."])
    def test_an_alias_of_the_whole(self, prefix: str) -> None:
        """https://github.com/arcee-ai/mergekit/issues/284: some repos of one architecture have the base's prefix, some do not."""
        names = [f"encoder.layer.{i}.output.LayerNorm.{p}" for i in range(4) for p in ("weight", "bias")] + [
            "ln_f.bias"
        ]
        bare: Made = {n: ("F32", [16]) for n in names}
        found = report(bare, {prefix + n: e for n, e in bare.items()})
        assert (found.findings, found.exit_code) == ((), 0)
        assert found.diff is not None
        assert only(found.diff).text == f"add the prefix `{prefix}`"

    def test_a_third_of_the_tensors_and_nearly_all_bytes(self) -> None:
        """https://github.com/sgl-project/sglang/issues/38618: what was renamed on read was not named back on save."""
        words = {
            "attn_hc.fn": [4, 4],
            "attn_hc.base": [4],
            "attn_hc.scale": [3],
            "ffn_hc.fn": [4, 4],
            "ffn_hc.base": [4],
            "ffn_hc.scale": [3],
        }
        gates = {"f_a_proj.weight": [2, 16], "f_b_proj.weight": [16, 2], "dt_bias": [16], "A_log": [4]}
        saved, source = stacked(), experts()
        for i in range(LAYERS):
            layer = f"model.layers.{i}"
            for word, shape in words.items():
                saved[f"{layer}.{word}"] = ("BF16", shape)
                source[f"{layer}." + re.sub(r"(attn|ffn)_hc[.]", r"hc_\1_", word)] = ("BF16", shape)
            for gate, shape in gates.items():
                saved[f"{layer}.self_attn.forget_gate.{gate}"] = ("BF16", shape)
                source[f"{layer}.self_attn.{gate}"] = ("BF16", shape)
            saved[f"{layer}.self_attn.conv1d.weight"] = ("BF16", [48, 1, 4])
            source |= {f"{layer}.self_attn.{p}_conv1d.weight": ("BF16", [16, 1, 4]) for p in "qkv"}
        made = report(source, saved, roundtrip=True)
        assert made.diff is not None
        assert {(c.kind, c.rule, len(c.links)) for c in made.diff.changes} == {
            ("renamed", "rename", 16), ("renamed", "rename", 12), ("relaid", "fused", 4), ("relaid", "stacked", 4),
        }  # fmt: skip
        assert [f.check for f in made.findings] == ["CK805"] * 6
        assert sum(f.bytes for f in made.findings) + made.diff.identical_bytes == sum(
            one(saved).tensors[n].nbytes or 0 for n in saved
        )


def spoilt(rng: random.Random, entries: Entries) -> Made:
    """`entries` after one to four things that savers do, chosen by `rng`."""
    made = without(entries)
    for _ in range(rng.randint(1, 4)):
        made = one_of_many(rng, made) or made
    return made


def one_of_many(rng: random.Random, made: Made) -> Made:
    module = re.escape(rng.choice(list(made)).split(".")[-2])
    number = rng.randint(0, 3)
    lost = set(rng.sample(list(made), min(3, len(made))))
    steps: list[Callable[[], Made]] = [
        lambda: renamed(made, "^", "module."),
        lambda: renamed(made, r"^model\.", ""),
        lambda: {n: e for n, e in made.items() if n not in lost},
        lambda: without(made, rf"\.{module}\."),
        lambda: retyped(made, "F16", rf"\.{module}\."),
        lambda: retyped(made, "F32"),
        lambda: fp8(made),
        lambda: renamed(without(made, rf"layers\.{number}\."), rf"layers\.([{number + 1}-9])", lambda m: f"layers.{int(m[1]) - 1}"),
        lambda: renamed(made, rf"\.{module}\.", f".{module}x."),
        lambda: made | {f"tower.blocks.{i}.fc.weight": ("BF16", [4, 4]) for i in range(3)},
        lambda: {n: (d, s[::-1] if "down" in n else s) for n, (d, s) in made.items()},
    ]  # fmt: skip
    return rng.choice(steps)()


@pytest.mark.parametrize("seed", range(120))
def test_every_tensor_is_accounted_for_once_and_with_its_bytes(seed: int) -> None:
    """Whatever became of A: each of its tensors is the same in B, or in one change of names or one loss; each of B's likewise."""
    rng = random.Random(seed)
    a, b = one(spoilt(rng, decoder()) if seed % 2 else decoder()), one(spoilt(rng, decoder()))
    found = compare(a, b)
    touched, came = ({n for c in found.changes for n in getattr(c, side)} for side in ("old", "new"))
    same = a.tensors.keys() - touched
    assert all(b.tensors[n].dtype == a.tensors[n].dtype and b.tensors[n].shape == a.tensors[n].shape for n in same)
    assert same | came == b.tensors.keys()
    assert found.identical == len(same)
    sizes = {n: t.nbytes or 0 for n, t in a.tensors.items()}
    assert found.identical_bytes + sum(sizes[n] for n in touched) == sum(sizes.values())
    for side, kinds in (("old", ("renamed", "relaid", "removed")), ("new", ("renamed", "relaid", "added"))):
        told = Counter(n for c in found.changes if c.kind in kinds for n in set(getattr(c, side)))
        assert max(told.values(), default=1) == 1, told.most_common(3)
    gone = {n for c in found.changes if c.kind == "removed" for n in c.old}
    assert not gone & {n for c in found.changes if c.kind in ("retyped", "reshaped", "quantised") for n in c.old}
    assert all(c.old_bytes == sum(sizes[n] for n in set(c.old)) for c in found.changes)

"""Each value fault, and beside it what looks alike and is normal."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ckaudit.checks.observed import Observed, TensorStats, candidates
from ckaudit.checks.values import run


def stats(name: str, shape: tuple[int, ...] = (64, 64), **fields: Any) -> TensorStats:
    """A sound trained matrix, unless a field says otherwise."""
    usual = {
        "dtype": "BF16",
        "count": math.prod(shape),
        "low": -0.3,
        "high": 0.31,
        "mean": 0.001,
        "std": 0.03,
        "kurtosis": 4.2,
    }
    return TensorStats(name=name, shape=shape, **{**usual, **fields})


def zeros(name: str, shape: tuple[int, ...] = (64, 64)) -> TensorStats:
    return stats(name, shape, zeros=math.prod(shape), low=0.0, high=0.0, mean=0.0, std=0.0, kurtosis=None)


def ones(name: str, shape: tuple[int, ...] = (64, 64)) -> TensorStats:
    return stats(name, shape, low=1.0, high=1.0, mean=1.0, std=0.0, kurtosis=None)


def found(*tensors: TensorStats, **seen: Any) -> dict[str, tuple[str, ...]]:
    """Check id to names."""
    findings, _ = run(Observed(stats=tensors, initializer_range=0.02, **seen))
    return {f.check: f.names for f in findings}


SOUND = stats("model.layers.0.mlp.up_proj.weight")


def test_sound_values_give_no_finding() -> None:
    assert found(SOUND) == {}


@pytest.mark.parametrize(("nan", "inf"), [(3, 0), (0, 1)])
def test_nan_and_inf(nan: int, inf: int) -> None:
    assert found(SOUND, stats("a.weight", nan=nan, inf=inf)) == {"CK501": ("a.weight",)}


def test_inf_in_a_mask_is_what_masks_are_made_of() -> None:
    assert found(stats("h.0.attn.masked_bias", (1,), inf=1)) == {}
    assert found(stats("h.0.attn.mask", (8, 8), inf=28)) == {}


def test_integers_that_are_made_of_a_weight_when_it_is_used_are_zero_before() -> None:
    """I-BERT (transformers, models/ibert/quant_modules.py) keeps `weight_integer` beside every weight, and fills it in its integer mode."""
    assert found(zeros("encoder.layer.0.attention.self.query.weight_integer")) == {}
    assert found(zeros("encoder.layer.0.attention.self.query.weight")) != {}


def test_inf_as_a_bound_says_that_there_is_none() -> None:
    assert found(stats("layers.0.ffw_layer_1.input_max", (), count=1, inf=1)) == {}
    assert found(stats("layers.0.input_max", (64,), inf=1)) == {"CK501": ("layers.0.input_max",)}
    assert found(stats("layers.0.scale", (), count=1, inf=1)) == {"CK501": ("layers.0.scale",)}


def test_nan_in_a_mask_is_not() -> None:
    assert found(stats("h.0.attn.mask", (8, 8), nan=1)) == {"CK501": ("h.0.attn.mask",)}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.q_proj.weight",
        "lm_head.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "sam.mask_decoder.layers.0.q_proj.weight",
        "rotary.index.weight",
    ],
)
def test_an_all_zero_matrix(name: str) -> None:
    assert found(zeros(name)) == {"CK502": (name,)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.bias", (64,)),  # a bias of a norm is zero where training left it so
        ("model.norm.weight", (64,)),  # Gemma adds one to it
        ("model.layers.0.mlp.experts.down_proj_bias", (4, 64)),  # biases of fused experts have two dimensions
        ("model.layers.0.self_attn.q_proj.qzeros", (8, 64)),  # symmetric quantisation
        ("model.layers.0.self_attn.q_proj.weight_zero_point", (64, 8)),
        ("vit.embeddings.mask_token", (1, 1, 64)),
        ("encoder.position_ids", (1, 512)),
        ("embeddings.token_type_embeddings.weight", (1, 64)),  # one row is no matrix
    ],
)
def test_zero_where_zero_is_normal(name: str, shape: tuple[int, ...]) -> None:
    assert found(zeros(name, shape)) == {}


@pytest.mark.parametrize(
    "name", ["base.q_proj.lora_B.default.weight", "blocks.0.adaLN_modulation.1.weight", "zero_convs.0.weight"]
)
def test_a_weight_that_starts_at_zero_is_a_note(name: str) -> None:
    findings, _ = run(Observed(stats=(zeros(name),)))
    assert [(f.check, f.severity) for f in findings] == [("CK502", "note")]


QUANTISED = [
    # the scale, and the tensor that it makes a weight of, as each writer names them
    ("l.0.up_proj.weight_scale_inv", (1, 2), "F32", "l.0.up_proj.weight", "F8_E4M3"),  # DeepSeek
    ("l.0.up_proj.weight_scale", (), "BF16", "l.0.up_proj.weight", "F8_E4M3"),  # compressed-tensors, ModelOpt
    ("l.0.up_proj.weight_scale_2", (), "F32", "l.0.up_proj.weight", "U8"),  # ModelOpt NVFP4
    # the same, by block: rounded to nothing
    ("l.0.up_proj.weight_scale", (64, 4), "F8_E4M3", "l.0.up_proj.weight", "U8"),
    ("l.0.up_proj.weight_global_scale", (1,), "F32", "l.0.up_proj.weight_packed", "U8"),  # compressed-tensors NVFP4
    ("l.0.up_proj.scales", (4, 64), "F16", "l.0.up_proj.qweight", "I32"),  # GPTQ, AWQ
    ("l.0.up_proj.weight.absmax", (64,), "F32", "l.0.up_proj.weight", "U8"),  # bitsandbytes, 4 bits
    ("l.0.up_proj.SCB", (64,), "F32", "l.0.up_proj.weight", "I8"),  # bitsandbytes, 8 bits
    ("l.0.up_proj.weight._scale", (64, 1), "BF16", "l.0.up_proj.weight._data", "I8"),  # quanto
    ("l.0.up_proj.scale", (64, 1), "F16", "l.0.up_proj.W_q", "U8"),  # HQQ
    ("l.0.up_proj.scale_weight", (), "F32", "l.0.up_proj.weight", "F8_E4M3"),  # ComfyUI
    ("l.0.up_proj.qscale_weight", (), "F32", "l.0.up_proj.weight", "F8_E4M3"),  # Mistral
    ("l.0.experts.gate_up_proj_scales", (2, 64, 2), "U8", "l.0.experts.gate_up_proj_blocks", "U8"),  # gpt-oss
    ("l.0.experts.down_proj_scale_inv", (2, 1, 1), "F32", "l.0.experts.down_proj", "F8_E4M3"),
]


@pytest.mark.parametrize(("scale", "shape", "dtype", "weight", "packed"), QUANTISED)
def test_a_scale_of_zero_leaves_nothing_of_a_quantised_weight(
    scale: str, shape: tuple[int, ...], dtype: str, weight: str, packed: str
) -> None:
    sound = stats(weight, dtype=packed)
    lost = msgspec.structs.replace(zeros(scale, shape), dtype=dtype)
    assert found(SOUND, sound, lost) == {"CK502": (scale,)}
    kept = msgspec.structs.replace(lost, zeros=math.prod(shape) - 1, high=0.001)  # a row of zeros has a scale of zero
    assert found(SOUND, sound, kept) == {}
    assert found(SOUND, stats(weight), lost) == {}, "beside what is not quantised it is a parameter like others"


def test_a_scale_of_a_weight_that_starts_at_zero_is_a_note_as_the_weight_is() -> None:
    name = "blocks.0.adaLN_modulation.1.weight"
    seen = (zeros(f"{name}_scale", ()), msgspec.structs.replace(zeros(name), dtype="F8_E4M3"))
    findings, _ = run(Observed(stats=seen, initializer_range=0.02))
    assert [(f.check, f.severity) for f in findings] == [("CK502", "note"), ("CK502", "note")]


def test_e8m0_has_no_zero_but_its_least_power_is_one() -> None:
    """A byte of zero is 2**-127 (OCP Microscaling Formats 1.0, section 5.4.1), and 2**-126 no byte of zero."""
    weight = stats("l.0.up_proj.weight", dtype="F4")
    least, next_ = (
        TensorStats(name="l.0.up_proj.weight_scale", dtype="F8_E8M0", shape=(64, 4), count=256, low=v, high=v, mean=v)
        for v in (2.0**-127, 2.0**-126)
    )
    assert found(weight, least) == {"CK502": (least.name,)}
    assert found(weight, next_) == {}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((f"l.0.up_proj.{n}", "F32") for n in ("input_scale", "input_global_scale", "output_scale", "act_scale")),
        ("l.0.up_proj.bias", "F32"),
        *((f"l.0.{n}", "F32") for n in ("k_scale", "v_scale", "q_scale", "logit_scale", "layer_scale")),
        *((f"l.0.up_proj.{n}", "I32") for n in ("qzeros", "g_idx", "weight_zero_point")),
        ("l.0.up_proj.weight.absmax", "U8"),  # codes of a table, whose first is -1
        ("l.0.up_proj.weight.nested_absmax", "F32"),  # all blocks as large as their mean
        ("l.0.up_proj.scale_shift_table", "F8_E4M3"),
        ("l.0.norm.scale", "BF16"),  # in a model of FP8 weights, a norm's own weight
    ],
)
def test_what_may_be_zero_in_a_quantised_model(name: str, dtype: str) -> None:
    weights = (stats("l.0.up_proj.weight", dtype="F8_E4M3"), stats("l.0.fused", dtype="F8_E4M3"))
    assert found(*weights, msgspec.structs.replace(zeros(name, (64,)), dtype=dtype)) == {}


def test_a_constant_matrix() -> None:
    assert found(ones("model.layers.0.mlp.up_proj.weight")) == {"CK503": ("model.layers.0.mlp.up_proj.weight",)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (64,)),  # a fresh norm
        ("q_proj.weight_scale_inv", (4, 4)),  # a scale that is one number
        ("q_proj.input_scale", ()),
        ("bn.num_batches_tracked", ()),
    ],
)
def test_constant_where_constant_is_normal(name: str, shape: tuple[int, ...]) -> None:
    assert found(ones(name, shape)) == {}


def layers(count: int, **odd: Any) -> list[TensorStats]:
    """A stack whose deviations differ as in trained models: by up to a factor of two."""
    stack = [stats(f"model.layers.{i}.mlp.down_proj.weight", std=0.02 * 2 ** math.sin(i)) for i in range(count)]
    stack[count // 2] = stats(stack[count // 2].name, **odd) if odd else stack[count // 2]
    return stack


def test_a_layer_far_from_its_siblings() -> None:
    for std in (0.02 * 128, 0.02 / 448):  # a scale that was lost, or applied twice
        assert found(*layers(12, std=std)) == {"CK504": ("model.layers.6.mlp.down_proj.weight",)}


def test_layers_that_differ_as_layers_do() -> None:
    assert found(*layers(12)) == {}
    assert found(*layers(12, std=0.02 * 5)) == {}  # a first or last layer often stands out like this
    assert found(*layers(6, std=2.0)) == {}  # six do not say what is usual
    norms = [stats(f"model.layers.{i}.norm.weight", (64,), std=0.1 if i else 60.0) for i in range(12)]
    assert found(*norms) == {}  # norms differ by any factor


def test_a_parameter_that_was_never_written() -> None:
    assert found(SOUND, never_written=("model.layers.1.mlp.up_proj.weight",)) == {
        "CK505": ("model.layers.1.mlp.up_proj.weight",)
    }


def drawn(name: str, **fields: Any) -> TensorStats:
    """What 4M numbers from normal(0, 0.02) give: every moment within its standard error."""
    return stats(
        name, (2048, 2048), **{"mean": 2e-6, "std": 0.020003, "kurtosis": 3.001, "low": -0.104, "high": 0.106, **fields}
    )


def test_weights_as_initialised() -> None:
    assert found(drawn("model.layers.0.mlp.up_proj.weight")) == {"CK506": ("model.layers.0.mlp.up_proj.weight",)}
    some = drawn("a.weight", kurtosis=3.02, kurtosis_count=1024 * 1024)  # five standard errors and a rounding are 0.026
    assert found(some) == {"CK506": ("a.weight",)}


def test_torchs_default_for_a_linear_layer_is_an_initialisation_too() -> None:
    bound = 1 / math.sqrt(2048)
    uniform = drawn("a.weight", std=bound / math.sqrt(3), kurtosis=1.8, low=-bound, high=bound, mean=1e-6)
    assert found(uniform) == {"CK506": ("a.weight",)}


@pytest.mark.parametrize(
    "fields",
    [
        {"std": 0.0208},  # 4 % off: 80 standard errors
        {"kurtosis": 3.2},  # training makes tails
        {"kurtosis": 3.02, "kurtosis_count": 2048 * 2048},  # five standard errors and a rounding are 0.014
        {"mean": 2e-4},
        {"kurtosis": None},
    ],
)
def test_trained_weights_that_come_near(fields: dict[str, Any]) -> None:
    assert found(drawn("a.weight", **fields)) == {}


def test_a_norm_of_each_head_is_no_matrix() -> None:
    assert found(ones("model.layers.0.self_attn.q_norm.weight", (8, 16))) == {}
    made = "transformer_blocks.0.norm1.linear.weight"  # a matrix that makes a norm's weights
    assert found(ones(made, (8, 16))) == {"CK503": (made,)}


def test_few_weights_do_not_say_whether_they_were_trained() -> None:
    assert found(stats("a.weight", (64, 64), std=0.02, kurtosis=3.0, mean=0.0)) == {}


def test_the_same_bytes_under_two_names() -> None:
    pair = ("model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight")
    assert found(SOUND, equal=(pair,)) == {"CK507": pair}


def test_the_same_bytes_where_they_are_meant() -> None:
    pair = ("model.embed_tokens.weight", "lm_head.weight")
    assert found(SOUND, equal=(pair,), tied=(pair,)) == {}
    findings, _ = run(Observed(stats=(SOUND,), equal=(pair,)))  # not tied: twice the memory, no fault
    assert [(f.check, f.severity) for f in findings] == [("CK507", "note")]


def test_only_what_may_hold_the_same_weights_is_compared() -> None:
    same = {"digest": 7}
    layers_alike = [stats("layers.0.up.weight", **same), stats("layers.1.up.weight", **same)]
    others = [
        stats("layers.0.rotary_emb.inv_freq", (8, 8), **same),  # computed: the same in every layer
        stats("layers.0.norm.weight", (64,), **same),
        stats("layers.0.mixer.A_log", **same),  # what Mamba starts from in every layer
        stats("layers.0.down.weight", digest=8),
        stats("layers.0.other.weight", dtype="F32", **same),
    ]
    assert [[t.name for t in group] for group in candidates([*layers_alike, *others])] == [
        ["layers.0.up.weight", "layers.1.up.weight"]
    ]


def test_a_tied_pair_that_differs() -> None:
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    assert found(SOUND, tie_differs=(pair,)) == {"CK508": pair}


def test_what_was_not_read_is_not_passed() -> None:
    _, skips = run(Observed(stats=()))
    assert {s.check for s in skips} == {"CK501", "CK502", "CK503", "CK504", "CK506", "CK507", "CK508"}
    _, skips = run(Observed(stats=(SOUND,)))
    assert [s.check for s in skips] == ["CK506"]  # no initializer_range in the config


def test_tensors_that_were_not_compared_are_not_judged_equal_or_tied() -> None:
    usual = Observed(stats=(stats("a"),), initializer_range=0.02)
    assert not run(usual)[1]
    skips = run(msgspec.structs.replace(usual, compared=False))[1]
    assert [s.check for s in skips] == ["CK507", "CK508"]


def test_names_in_messages_are_harmless() -> None:
    findings, _ = run(Observed(stats=(stats("a\x1b[31m.weight", nan=1),)))
    assert "\x1b" not in findings[0].message

"""renames: each case is a way that a trainer, wrapper or exporter is known to change every name of a file."""

import re

import pytest

from ckaudit.renames import Rename, infer_rename

LLAMA = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(3) for p in "qkvo"),
    *(f"model.layers.{i}.mlp.{p}_proj.weight" for i in range(3) for p in ("gate", "up", "down")),
    *(f"model.layers.{i}.input_layernorm.weight" for i in range(3)),
]
VLM = [
    *(f"model.visual.blocks.{i}.attn.qkv.{p}" for i in range(2) for p in ("weight", "bias")),
    *(n.replace("model.", "model.language_model.") for n in LLAMA),
]
BODY = [n.removeprefix("model.") for n in LLAMA if n != "lm_head.weight"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "model.", "llm.", "anything.at.all."])
def test_a_prefix_on_every_name_is_stripped(prefix: str) -> None:
    found = infer_rename([prefix + n for n in LLAMA], LLAMA)
    assert found is not None
    assert found.rename == Rename("root", tuple(prefix[:-1].split(".")))
    assert found.pairs == {prefix + n: n for n in LLAMA}


@pytest.mark.parametrize("prefix", ["model.", "bert.", "language_model.model."])
def test_a_lost_prefix_is_added(prefix: str) -> None:
    found = infer_rename(BODY, [prefix + n for n in BODY])
    assert found is not None
    assert found.rename == Rename("root", (), tuple(prefix[:-1].split(".")))
    assert len(found.pairs) == len(BODY)


def test_a_prefix_is_replaced() -> None:
    # the encoder of a larger model, saved under its own name
    found = infer_rename([f"vision_tower.{n}" for n in BODY], [f"model.visual.{n}" for n in BODY])
    assert found is not None
    assert found.rename == Rename("root", ("vision_tower",), ("model", "visual"))


def test_a_wrapper_inside_the_path() -> None:
    wrapped = [re.sub(r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module.", n) for n in LLAMA if ".layers." in n]
    found = infer_rename(wrapped, LLAMA)
    assert found is not None
    assert found.rename == Rename("drop", ("_fsdp_wrapped_module",))
    assert set(found.pairs.values()) == {n for n in LLAMA if ".layers." in n}


def test_several_wrappers_at_several_depths() -> None:
    wrapped = [
        "_fsdp_wrapped_module." + re.sub(r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module._checkpoint_wrapped_module.", n)
        for n in LLAMA
    ]
    found = infer_rename(wrapped, LLAMA)
    assert found is not None
    assert set(found.pairs.values()) == set(LLAMA)


def test_a_wrapper_before_the_leaf() -> None:
    found = infer_rename([n.replace("_proj.", "_proj.linear.") for n in LLAMA if "_proj" in n], LLAMA)
    assert found is not None
    assert found.rename == Rename("drop", ("linear",))


def test_a_prefix_repeated_three_times() -> None:
    text = [n for n in VLM if "language_model" in n]
    tripled = [n.replace("language_model.", "language_model.language_model.language_model.") for n in text]
    found = infer_rename(tripled, VLM)
    assert found is not None
    assert found.pairs == dict(zip(tripled, text, strict=True))


def test_segments_that_changed_places() -> None:
    # pre-trained for one release, loaded by another: `language_model.model` became `model.language_model`
    old = [f"policy.language_model.model.{n}" for n in BODY]
    found = infer_rename(old, [f"policy.model.language_model.{n}" for n in BODY])
    assert found is not None
    assert len(found.pairs) == len(BODY)


def test_the_rename_that_mends_most_wins() -> None:
    # the text part has one wrong prefix, the (smaller) vision part another
    strays = [n.replace("model.language_model.", "model.") for n in VLM if "language_model" in n]
    strays += [n.replace("model.visual.", "visual.") for n in VLM if "visual" in n]
    found = infer_rename(strays, VLM)
    assert found is not None
    assert found.rename.apply("model.norm.weight") == "model.language_model.norm.weight"
    assert not any("visual" in n for n in found.pairs)


@pytest.mark.parametrize(
    ("strays", "expected"),
    [
        (["nicheformer.layers.0.attn.in_proj_weight", "gene_qformer.query"], LLAMA),
        ([], LLAMA),
        (["a.weight"], []),
    ],
)
def test_nothing_in_common_is_none(strays: list[str], expected: list[str]) -> None:
    assert infer_rename(strays, expected) is None


def test_a_number_is_no_part_of_a_rename() -> None:
    # layers shifted by one are not a prefix; nothing may claim to mend them
    assert infer_rename(["model.layers.3.mlp.up_proj.weight"], LLAMA) is None


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        (Rename("root", ("_orig_mod",)), "strip the prefix `_orig_mod.`"),
        (Rename("root", (), ("model",)), "add the prefix `model.`"),
        (Rename("root", ("a", "b"), ("c",)), "replace the prefix `a.b.` by `c.`"),
        (Rename("path", ("a",), ("b",)), "replace `a.` by `b.` in the names"),
        (Rename("drop", ("x", "y")), "take `x.` and `y.` out of the names"),
    ],
)
def test_says_what_to_do(rename: Rename, text: str) -> None:
    assert rename.text == text


@pytest.mark.parametrize(
    ("rename", "name"),
    [
        (Rename("root", ("_orig_mod",)), "_orig_mod.model.norm.weight"),
        (Rename("root", (), ("model",)), "norm.weight"),
        (Rename("path", ("a", "b"), ("c",)), "x.a.b.w"),
        (Rename("root", ("a+b",)), "a+b.w"),
        (Rename("drop", ("x", "y")), "x.y.a.x.w"),
    ],
)
def test_the_pattern_does_the_same(rename: Rename, name: str) -> None:
    pattern, replacement = rename.pattern
    assert re.sub(pattern, replacement, name) == rename.apply(name) != name


def test_made_up_names_do_not_cost_a_product() -> None:
    # 20,000 different shapes on either side; comparing each with each would take hours
    def word(i: int) -> str:
        return "".join(chr(97 + int(c)) for c in str(i))

    found = infer_rename([f"x.{word(i)}.weight" for i in range(20000)], [f"{word(i)}.weight" for i in range(20000)])
    assert found is not None
    assert len(found.pairs) == 20000

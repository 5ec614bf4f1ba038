"""Rule books: what is read, and each law broken on purpose."""

from __future__ import annotations

import re
import tomllib

import pytest

from ckaudit import resources, rulebook
from ckaudit.errors import RuleError
from ckaudit.rulebook import template
from ckaudit.rulebook.book import Row, rule
from ckaudit.rulebook.model import UnresolvedError, resolve

GOOD = """
format = 1
architecture = "TinyForCausalLM"

[config]
layers = { path = "num_hidden_layers" }
hidden = { path = ["hidden_size", "d_model"] }
heads = { path = "num_attention_heads" }
head_dim = { path = "head_dim", default = "hidden // heads" }
kinds = { path = "layer_types" }
tied = { path = "tie_word_embeddings", default = false }

[sets]
layer = { count = "layers" }
full = { where = "kinds", equals = "full_attention" }
linear = { where = "kinds", equals = "linear_attention" }

[[sections]]
releases = ">=0.25.0, <0.30.0"
read = ["0.25.0"]
loaders = ["model"]

[[sections]]
releases = ">=0.30.0, <=0.33.0"
read = ["0.30.0", "0.33.0"]
loaders = ["model", "attn"]

[loaders.model]
source = "tiny.py"
rules = [
  { stacked = ".q_proj", to = ".qkv_proj", shard = "q", example = ["a.q_proj.bias", "a.qkv_proj.bias"] },
  { prefix = "mtp.", drop = "draft model" },
]
skip = [{ prefix = "lm_head.", when = "tied" }]

[loaders.attn]
source = "tiny.py"
at = "layers.{full}.attn"

[[parameters]]
names = ["layers.{full}.attn.qkv_proj.weight"]
shape = ["3 * heads * head_dim", "hidden"]
shards = { q = "heads * head_dim", k = "heads * head_dim", v = "heads * head_dim" }

[[parameters]]
names = ["layers.{linear}.attn.{in_proj,out_proj}.weight", "layers.{layer}.norm.weight"]

[[parameters]]
names = ["lm_head.weight"]
when = "not tied"

[[ties]]
alias = "lm_head.weight"
of = "embed.weight"
when = "tied"
"""
CONFIG = {
    "num_hidden_layers": 3,
    "d_model": 8,
    "num_attention_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def model(text: str = GOOD, release: str = "0.33.0", **config):
    book = rulebook.parse(text, "tiny.toml")
    section = book.section(release)
    assert section is not None
    return resolve(book, section, release, CONFIG | config)


def test_templates_and_config_become_parameters():
    found = model()
    assert list(found.parameters) == [
        "layers.1.attn.qkv_proj.weight",
        "layers.0.attn.in_proj.weight", "layers.0.attn.out_proj.weight",
        "layers.2.attn.in_proj.weight", "layers.2.attn.out_proj.weight",
        "layers.0.norm.weight", "layers.1.norm.weight", "layers.2.norm.weight",
        "lm_head.weight",
    ]  # fmt: skip
    fused = found.parameters["layers.1.attn.qkv_proj.weight"]
    assert fused.shape == (
        24,
        8,
    )  # 3 x 2 heads x (8 // 2), by the second path of `hidden` and the default of `head_dim`
    assert fused.shards == {"q": 8, "k": 8, "v": 8}
    assert set(found.seats) == {"", "layers.1.attn"}
    assert {"layers", "layers.1", "layers.1.attn", "layers.1.attn.qkv_proj", "lm_head"} <= found.modules


def test_conditions_choose_rows_skips_and_ties():
    assert model(tie_word_embeddings=True).aliases == {"lm_head.weight": "embed.weight"}
    assert "lm_head.weight" not in model(tie_word_embeddings=True).parameters
    tied = model(release="0.25.0", tie_word_embeddings=True)
    assert ("lm_head.", None) in tied.seats[""].prefixes
    assert model(release="0.25.0").seats[""].prefixes == ()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"d_model": None}, "no hidden_size or d_model"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"num_hidden_layers": "24"}, "not a number"),
        ({"layer_types": "full_attention"}, "not a list"),
        ({"num_attention_heads": 0}, "divides by zero"),
    ],
)
def test_a_config_that_does_not_say_is_a_reason_not_a_crash(config, reason):
    with pytest.raises(UnresolvedError, match=reason):
        model(**config)


def test_sections_are_chosen_by_release():
    book = rulebook.parse(GOOD, "tiny.toml")
    assert [s and s.read for s in map(book.section, ("0.25.0", "0.29.9", "0.30.0", "0.33.0", "0.34.0", "0.24.0"))] == [
        ["0.25.0"], ["0.25.0"], ["0.30.0", "0.33.0"], ["0.30.0", "0.33.0"], None, None,
    ]  # fmt: skip
    assert book.newest == "0.33.0"
    with pytest.raises(RuleError, match="is not a release"):
        book.section("latest")


@pytest.mark.parametrize(
    ("old", "new", "row"),
    [
        ("format = 1", "format = 2", "format"),
        ('architecture = "TinyForCausalLM"', 'architecture = "T"\nfoo = 1', "foo"),
        ('shard = "q", ', "", r"loaders.model.rules\[0\]"),
        ('drop = "draft model"', 'drop = "x", to = "y"', r"loaders.model.rules\[1\]"),
        ('{ prefix = "mtp.", drop', '{ prefix = "mtp.", suffix = "x", drop', r"loaders.model.rules\[1\]"),
        ('{ prefix = "mtp.", drop', "{ drop", r"loaders.model.rules\[1\]"),
        ('{ prefix = "mtp."', '{ regex = "(mtp"', r"loaders.model.rules\[1\]"),
        ('{ prefix = "mtp.", drop = "draft model" },', '{ prefix = "a.", to = "b." }, { prefix = "a.", to = "c." }', "stands twice"),
        ('"a.qkv_proj.bias"', '"a.qkv.bias"', "example does not hold"),
        ("<0.30.0", "<=0.30.0", "more than one"),
        (">=0.30.0", "=>0.30.0", r"sections\[1\]"),
        ('read = ["0.25.0"]', 'read = ["0.24.0"]', "outside"),
        ('read = ["0.25.0"]', "read = []", "names no release"),
        ('loaders = ["model"]', 'loaders = ["model", "gone"]', "no loader is called 'gone'"),
        ('loaders = ["model"]', "loaders = []", "no loader sits on the model"),
        ('["model", "attn"]', '["model"]', "loaders.attn: no section uses it"),
        ('at = "layers.{full}.attn"', 'at = ""', "two loaders sit on ''"),
        ('at = "layers.{full}.attn"', 'at = "layers.{ful}.attn"', "no set is called 'ful'"),
        ("names = [\"layers.{full}.attn.qkv_proj.weight\"]", "names = [\"layers.{full.weight\"]", r"parameters\[0\]"),
        ("3 * heads * head_dim", "3 * headz", "no config value is called 'headz'"),
        ("3 * heads * head_dim", "__import__('os')", "may use only"),
        ("3 * heads * head_dim", "3 ** heads", "may use only"),
        ('when = "not tied"', 'when = "not tie"', r"parameters\[2\]"),
        ('"layers.{layer}.norm.weight"', '"layers.{layer}.attn.qkv_proj.weight"', "is named by"),
        ('count = "layers"', 'count = "layers", where = "kinds", equals = "x"', "sets.layer"),
        ('{ prefix = "lm_head.", when', '{ prefix = "lm_head.", substring = "x", when', r"loaders.model.skip\[0\]"),
    ],
)  # fmt: skip
def test_each_law_names_file_and_row(old, new, row):
    assert GOOD.count(old) >= 1
    with pytest.raises(RuleError, match=row) as caught:
        rulebook.parse(GOOD.replace(old, new, 1), "tiny.toml")
    assert str(caught.value).startswith("tiny.toml: ")
    assert "\n" not in str(caught.value)


def test_rows_with_opposite_conditions_may_name_one_parameter():
    extra = '[[parameters]]\nnames = ["lm_head.weight"]\nwhen = "tied"\nby_design = "tied"\n\n[[ties]]'
    assert "lm_head.weight" in model(GOOD.replace("[[ties]]", extra, 1), tie_word_embeddings=True).parameters


def test_a_kind_that_the_release_lacks_is_refused():
    old = GOOD.replace(">=0.25.0", ">=0.24.0").replace('read = ["0.25.0"]', 'read = ["0.24.0"]')
    with pytest.raises(RuleError, match=re.escape("0.24.0 has no stacked rules")):
        rulebook.parse(old, "tiny.toml")


def test_what_is_not_toml_or_not_there_is_one_line(tmp_path):
    with pytest.raises(RuleError, match=r"x\.toml: not TOML"):
        rulebook.parse("a = ", "x.toml")
    with pytest.raises(RuleError, match=r"x\.toml: not TOML"):
        rulebook.parse("format = " + "9" * 5000, "x.toml")  # more digits than Python reads
    with pytest.raises(RuleError, match="No such file"):
        rulebook.read(tmp_path / "gone.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RuleError, match="not UTF-8"):
        rulebook.read(tmp_path / "latin.toml")


def test_shard_lists_and_spans_are_told_apart():
    assert rule(Row(stacked="a", to="b", shard=[0, 1, 2])).shards == ((0, 1, 2),)
    assert rule(Row(stacked="a", to="b", shards=["k", "v"])).shards == ("k", "v")


@pytest.mark.parametrize(
    "name",
    ["minicpmv4_6forconditionalgeneration", "aliases", "../secrets", "a/b", "", "x.y", "CON:", "a\0b", "A" * 300],
)
def test_a_name_that_is_no_architecture_finds_no_book(name):
    assert rulebook.find(name) is None


def test_every_shipped_book_is_sound_and_found_by_its_architecture():
    books = rulebook.shipped()
    assert "MiniCPMV4_6ForConditionalGeneration" in books
    for architecture, book in books.items():
        assert resources.folder("rules").joinpath(f"{architecture.lower()}.toml").is_file()
        assert rulebook.find(architecture) == book
        for other in book.also:
            assert rulebook.find(other) == book
    listed = tomllib.loads(resources.folder("rules").joinpath(rulebook.ALIASES).read_text("utf-8"))
    assert listed == {a: b.also for a, b in books.items() if b.also}


def test_templates():
    indices = {"i": [0, 5]}
    assert template.expand("a.{i}.{x,y}.{i}", indices) == ["a.0.x.0", "a.0.y.0", "a.5.x.5", "a.5.y.5"]
    assert template.expand("a.{2..4}", {}) == ["a.2", "a.3", "a.4"]
    with pytest.raises(ValueError, match="stands for"):
        template.expand("{i}" * 1 + "{0..999999}", {"i": list(range(10))})


def test_arithmetic():
    assert template.evaluate("(vocab + 63) // 64 * 64 - 1", {"vocab": 100}) == 127
    with pytest.raises(ValueError, match="divides by zero"):
        template.evaluate("1 // a", {"a": 0})

"""CK7xx: each check on a book with the fault, and on one that comes near it and is sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckaudit import rulebook
from ckaudit.checks.rules import CHECKS, lint

MINICPM = Path(__file__).parent.parent / "fixtures/minicpm-v-4.6"


def book(rules: str, at: str = "", parameters: str = "[]", extra: str = ""):
    sub = f'[loaders.inner]\nsource = "x"\nat = "{at}"\nrules = [{rules}]' if at else ""
    text = f"""
format = 1
architecture = "*"
sections = [{{ releases = ">=1", read = ["1"], loaders = ["model"{', "inner"' if at else ""}] }}]
project = "mine"
parameters = {parameters}
[loaders.model]
source = "x"
rules = [{"" if at else rules}]
{extra}
{sub}
"""
    return rulebook.parse(text, "book.toml")


def found(rules: str, names=(), **more):
    findings, _ = lint(book(rules, **more), names)
    return [(f.check, f.severity) for f in findings]


BARE = '{ stacked = "q_proj", to = "qkv_proj", shard = "q" }, { stacked = "v_proj", to = "qkv_proj", shard = "v" }'
DOTTED = (
    '{ stacked = ".q_proj", to = ".qkv_proj", shard = "q" }, { stacked = ".v_proj", to = ".qkv_proj", shard = "v" }'
)


def test_ck701_a_stacked_rule_fires_on_what_another_wrote():
    findings, _ = lint(book(BARE))
    cascade = next(f for f in findings if f.check == "CK701")
    assert cascade.severity == "error"
    assert "`q_proj.weight` -> `qkv_proj.weight` -> `qkqkv_proj.weight`" in cascade.message


def test_ck701_names_are_those_that_went_that_way():
    findings, _ = lint(book(BARE), ["a.q_proj.weight", "a.v_proj.weight", "norm.weight"])
    assert next(f for f in findings if f.check == "CK701").names == ("a.q_proj.weight",)


@pytest.mark.parametrize(
    "rules",
    [
        DOTTED,  # `.v_proj` is not in `.qkv_proj`
        # a rename that prepares a name for a stacked rule is meant
        '{ substring = ".wq.", to = ".q_proj." }, { stacked = ".q_proj", to = ".qkv_proj", shard = "q" }',
        '{ prefix = "model.vision.vit.", to = "vit." }, { prefix = "model.vision.", to = "vpm." }',
        '{ prefix = "a.", to = "b." }, { prefix = "c.", to = "a." }',  # the later one writes what the earlier one reads
    ],
)
def test_ck701_leaves_alone(rules):
    assert "CK701" not in [check for check, _ in found(rules)]


def test_ck701_a_rename_that_another_rename_meets_is_a_warning():
    assert ("CK701", "warning") in found('{ prefix = "model.", to = "m." }, { prefix = "m.", to = "x." }')


def test_ck702_a_short_prefix_takes_the_names_of_a_longer_one():
    rules = '{ prefix = "model.", to = "lm." }, { prefix = "model.vision.", to = "vit." }'
    assert ("CK702", "warning") in found(rules)
    swapped = '{ prefix = "model.vision.", to = "vit." }, { prefix = "model.", to = "lm." }'
    assert "CK702" not in [check for check, _ in found(swapped)]


def test_ck702_a_drop_takes_the_names_of_a_later_rule():
    assert ("CK702", "warning") in found('{ substring = "mtp.", drop = true }, { prefix = "mtp.head.", to = "x." }')
    # `model.` is rewritten by the first rule, but the second reads what it writes
    assert "CK702" not in [c for c, _ in found('{ substring = "b.", to = "c." }, { prefix = "a.", to = "d." }')]


def test_ck703_needs_names():
    findings, skips = lint(book(DOTTED))
    assert "CK703" not in [f.check for f in findings]
    assert {s.check for s in skips} == {"CK703", "CK704"}
    assert ("CK703", "note") in found(DOTTED, ["a.q_proj.weight"])  # nothing for `.v_proj`
    assert "CK703" not in [c for c, _ in found(DOTTED, ["a.q_proj.weight", "a.v_proj.weight"])]


def test_ck704_two_names_on_one_place():
    rules = '{ prefix = "model.decoder.", to = "model." }, { prefix = "model.encoder.", to = "model." }'
    names = ["model.decoder.layers.0.scalar", "model.encoder.layers.0.scalar", "model.encoder.layers.1.scalar"]
    findings, _ = lint(book(rules), names)
    assert [f.names for f in findings if f.check == "CK704"] == [tuple(names[:2])]
    # q and v go to different shards of one parameter
    assert "CK704" not in [c for c, _ in found(DOTTED, ["a.q_proj.weight", "a.v_proj.weight"])]


def test_ck705_a_rule_that_changes_its_own_result():
    rules = '{ suffix = "head.weight", to = "lm_head.weight" }'
    assert ("CK705", "note") in found(rules)
    assert ("CK705", "warning") in found(rules, ["lm_head.weight"])
    assert "CK705" not in [c for c, _ in found('{ prefix = "model.", to = "language_model.model." }')]
    assert "CK705" not in [
        c for c, _ in found('{ prefix = "visual.", to = "visual." }')
    ]  # fires again, changes nothing
    assert "CK705" not in [c for c, _ in found(DOTTED)]


INNER = '[{ names = ["vit.attn.{qkv_proj,out}.weight"] }]'
DEEPER = '[{ names = ["vit.layers.0.attn.{qkv_proj,out}.weight"] }]'


def test_ck706_a_dotted_key_in_a_module_whose_names_have_no_parent():
    findings, _ = lint(book(DOTTED, at="vit.attn", parameters=INNER), ["vit.attn.q_proj.weight", "vit.attn.out.weight"])
    dead = next(f for f in findings if f.check == "CK706")
    assert dead.severity == "error"
    assert dead.names == ("vit.attn.q_proj.weight",)
    # told without names too
    assert ("CK706", "error") in found(DOTTED, at="vit.attn", parameters=INNER)


@pytest.mark.parametrize(
    ("at", "parameters"),
    [
        ("vit", DEEPER),  # something stands before the dot there
        ("vit.attn", "[]"),  # no parameters to tell by
        ("vit.attn", '[{ names = ["vit.attn.out.weight"] }]'),  # the rule is for other classes
    ],
)
def test_ck706_leaves_alone(at, parameters):
    assert "CK706" not in [c for c, _ in found(DOTTED, at=at, parameters=parameters)]


def test_ck706_leaves_rules_on_the_model_alone():
    assert "CK706" not in [c for c, _ in found(DOTTED, parameters='[{ names = ["qkv_proj.weight"] }]')]


def test_ck707_keys_that_match_inside_words():
    rules = '{ substring = "weight_g", to = "original0" }'
    assert found(rules) == [("CK707", "note")]
    assert found(rules, ["experts.weight_gate"]) == [("CK707", "warning")]
    assert found(rules, ["experts.weight_g"]) == [("CK707", "note")]  # a dot before it, the end after it
    assert found('{ substring = ".hc_", to = ".head_" }', ["a.hc_fn"]) == []  # the start of a word, on purpose
    assert ("CK707", "warning") in found('{ prefix = "lm_head", to = "head" }', ["lm_head_norm.weight"])
    assert ("CK707", "note") in found('{ prefix = "lm_head", to = "head" }', ["lm_head.weight"])
    assert ("CK707", "warning") in found('{ suffix = "head.weight", to = "out.weight" }', ["lm_head.weight"])
    assert "CK707" not in [c for c, _ in found('{ prefix = "lm_head.", to = "head." }')]
    assert "CK707" not in [c for c, _ in found('{ prefix = "", to = "model." }')]


def test_the_minicpm_book_tells_the_released_faults():
    shipped = rulebook.find("MiniCPMV4_6ForConditionalGeneration")
    assert shipped is not None
    names = list(json.loads((MINICPM / "tensors.json").read_text()))
    findings, skips = lint(shipped, names)
    assert skips == ()
    errors = {(f.check, f.count) for f in findings if f.severity == "error"}
    # 0.25 to 0.26: q and k, weight and bias, take the wrong way, and meet at one place, once for weight and once for bias;
    # 0.27 to 0.29: q, k and v, weight and bias
    assert errors == {("CK701", 4), ("CK704", 2), ("CK706", 6)}


def test_control_characters_in_a_book_are_escaped():
    findings, _ = lint(book(r'{ prefix = "a\u001b[31m", to = "b" }'))
    assert findings
    assert all("\x1b" not in f.message for f in findings)


def test_every_check_has_a_page():
    pages = Path(__file__).parent.parent / "docs/checks"
    for check in CHECKS:
        assert (pages / f"{check.id}.md").read_text().startswith(f"# {check.id}: {check.title}\n")

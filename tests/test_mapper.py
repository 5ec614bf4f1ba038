"""The mapper's semantics, each expected value reasoned from the order of kinds and `str.replace(old, new, 1)`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckaudit.errors import RuleError
from ckaudit.mapper import FAMILIES, KINDS, Mapper, Rule, family, shard_text
from ckaudit.plan import Step


def stacked(*rows: tuple[str, str, str]) -> list[Rule]:
    return [Rule("stacked", key, to, (shard,)) for key, to, shard in rows]


BARE = stacked(("q_proj", "qkv_proj", "q"), ("k_proj", "qkv_proj", "k"), ("v_proj", "qkv_proj", "v"))
DOTTED = stacked((".q_proj", ".qkv_proj", "q"), (".k_proj", ".qkv_proj", "k"), (".v_proj", ".qkv_proj", "v"))
GDN = [
    Rule("stacked", ".in_proj_qkv", ".in_proj_qkvz", ((0, 1, 2),)),
    Rule("stacked", ".in_proj_z", ".in_proj_qkvz", (3,)),
    Rule("stacked", ".in_proj_b", ".in_proj_ba", (0,)),
    Rule("stacked", ".in_proj_a", ".in_proj_ba", (1,)),
]


@pytest.mark.parametrize(
    ("rules", "name", "mapped", "shards"),
    [
        # `v_proj` stands in the `qkv_proj` that the first rule wrote, so the third fires on it and takes the shard id
        (BARE, "q_proj.weight", "qkqkv_proj.weight", ("v",)),
        (BARE, "k_proj.weight", "qkqkv_proj.weight", ("v",)),
        (BARE, "v_proj.weight", "qkv_proj.weight", ("v",)),
        (BARE, "self_attn.qkv_proj.weight", "self_attn.qkqkv_proj.weight", ("v",)),  # a name that came fused
        # nothing stands before the dot in a name whose parent path is stripped
        (DOTTED, "q_proj.weight", "q_proj.weight", ()),
        (DOTTED, "self_attn.q_proj.weight", "self_attn.qkv_proj.weight", ("q",)),
        (DOTTED, "self_attn.qkv_proj.weight", "self_attn.qkv_proj.weight", ()),  # `.v_proj` is not in `.qkv_proj`
        # only the first occurrence of a key is replaced
        (DOTTED, "a.q_proj.q_proj.weight", "a.qkv_proj.q_proj.weight", ("q",)),
        # `.in_proj_qkv` is the beginning of `.in_proj_qkvz`: a fused name grows another z
        (GDN, "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_qkvzz.weight", ((0, 1, 2),)),
        (GDN, "linear_attn.in_proj_ba.weight", "linear_attn.in_proj_baa.weight", (0,)),
        (GDN, "linear_attn.in_proj_z.weight", "linear_attn.in_proj_qkvz.weight", (3,)),
        # a suffix replaces the last occurrence
        ([Rule("suffix", "head.weight", "lm_head.weight")], "lm_head.weight", "lm_lm_head.weight", ()),
        ([Rule("suffix", ".a", ".b")], "x.a.a", "x.a.b", ()),
        # a trailing dot leaves the bare module name alone
        ([Rule("prefix", "lm_head.", "language_model.lm_head.")], "lm_head", "lm_head", ()),
        ([Rule("prefix", "", "model.")], "norm.weight", "model.norm.weight", ()),
        # every prefix rule is tried on the text as it is now: the second fires on what the first wrote
        ([Rule("prefix", "model.", "m."), Rule("prefix", "m.", "x.")], "model.norm", "x.norm", ()),
        # a regex replaces every match
        ([Rule("regex", r"\d+", "N")], "a.0.b.1", "a.N.b.N", ()),
        # substring before prefix, whatever the order of rows
        ([Rule("prefix", "a.", "p."), Rule("substring", "x.", "a.")], "x.w", "p.w", ()),
    ],
)
def test_a_name_is_mapped_as_reasoned(rules, name, mapped, shards):
    found = Mapper(rules).map(name)
    assert (found.name, found.shards) == (mapped, shards)


def test_the_trace_shows_each_rule_that_fired():
    assert Mapper(BARE, "vit.attn").map("q_proj.weight").steps == (
        Step("stacked", "q_proj", "vit.attn", "q_proj.weight", "qkv_proj.weight", "q"),
        Step("stacked", "v_proj", "vit.attn", "qkv_proj.weight", "qkqkv_proj.weight", "v"),
    )


def test_a_drop_ends_the_way_at_once():
    mapper = Mapper([Rule("substring", ".inv_freq", None, by_design="computed"), Rule("prefix", "model.", "x.")])
    found = mapper.map("model.rotary.inv_freq")
    assert found.name is None
    assert found.by_design == "computed"
    assert found.steps == (Step("substring", ".inv_freq", "", "model.rotary.inv_freq", None),)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("suffix", "", "x"),  # str.rsplit refuses an empty separator
        Rule("stacked", "a", None, ("q",)),
        Rule("stacked", "a", "b"),
        Rule("prefix", "a", "b", ("q",)),
        Rule("renaming", "a", None),
        Rule("regex", "(a", "b"),
        Rule("regex", "a", r"\1"),  # no such group
        Rule("regex", r"\p{L}", "b"),  # the `regex` module's, not `re`'s
        Rule("regex", "[[:alpha:]]", "b"),  # read differently by the two
        Rule("regex", "(?:model){e<=1}", "b"),  # approximate for `regex`, literal for `re`
    ],
)
def test_a_rule_that_no_mapper_can_hold_is_refused(rule):
    with pytest.raises(RuleError):
        Mapper([rule])


@pytest.mark.parametrize("key", [r"layers\.(\d+)\.", "a{2,3}", r"x\.{1}y"])
def test_plain_patterns_are_not_taken_for_what_regex_reads_differently(key):
    Mapper([Rule("regex", key, "z")])


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "q", "ba"]), min_size=1, max_size=4).map(".".join)
PLAIN = st.builds(Rule, st.sampled_from(["substring", "prefix"]), NAMES, NAMES | st.none())


CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@CALM
@given(st.lists(PLAIN, max_size=4), NAMES)
def test_the_steps_lead_from_the_name_to_the_result(rules, name):
    found = Mapper(rules).map(name)
    text: str | None = name
    for step in found.steps:
        assert step.before == text
        text = step.after
    assert text == found.name


@CALM
@given(NAMES)
def test_a_name_that_no_rule_meets_is_left_as_it_is(name):
    found = Mapper([Rule("substring", "Z", "a"), Rule("prefix", "Z", None), Rule("suffix", "Z", "b")]).map(name)
    assert (found.name, found.steps) == (name, ())


def test_families_are_in_order_and_hold_until_the_next():
    assert family("0.6.5") is FAMILIES[0]
    assert family("0.30.0") is family("0.29.0")
    assert "stacked" not in family("0.24.0").kinds
    assert family("0.25.0").kinds == KINDS
    assert not family("0.24.0").ignores_bias
    assert family("0.25.1").ignores_bias
    assert not family("0.30.0").shard_lists
    assert family("0.31.0").shard_lists


@pytest.mark.parametrize("release", ["0.6.4", "newest", ""])
def test_a_release_without_a_mapper_is_refused(release):
    with pytest.raises(RuleError):
        family(release)


def test_shard_ids_are_written_for_people():
    assert shard_text(()) is None
    assert shard_text(("q",)) == "q"
    assert shard_text(((0, 1, 2),)) == "0-2"
    assert shard_text(("k", "v")) == "k, v"

"""ckaudit's mapper and walk against the classes of released vLLM wheels, run on the same rules and names."""

from __future__ import annotations
import __future__

import ast
import collections.abc
import itertools
import re
import typing
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import released
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckaudit import rulebook
from ckaudit.engines.rules.walk import walk
from ckaudit.mapper import KINDS, Mapper, Rule, family
from ckaudit.rulebook import parse
from ckaudit.rulebook.book import rule as made
from ckaudit.rulebook.model import resolve

RELEASES = ("0.8.5", "0.18.1", "0.24.0", "0.25.1", "0.27.1", "0.29.0", "0.33.0")
UTILS = "vllm/model_executor/models/utils.py"
FIELDS = {"renaming": "orig_to_new_renaming", "substring": "orig_to_new_substr"}


@cache
def namespace(release: str) -> dict[str, Any]:
    """WeightsMapper and AutoWeightsLoader of `release`, run from source with light stand-ins for what they import."""
    import torch
    from torch import nn

    names = ["WeightsMapper", "AutoWeightsLoader"]
    if family(release).aliases:
        names.append("_get_tied_embedding_params")

    class Missing(nn.Module):
        """Of pipeline stages elsewhere; none here."""

    def default_weight_loader(param: Any, loaded: Any) -> None:
        param.written.append(getattr(loaded, "shard_id", None))

    quiet = SimpleNamespace(debug=lambda *_: None, warning=lambda *_: None, warning_once=lambda *_: None)
    room: dict[str, Any] = {
        **vars(typing), **vars(collections.abc), "dataclass": dataclass, "field": field, "replace": replace, "re": re,
        "itertools": itertools, "torch": torch, "nn": nn, "logger": quiet, "VocabParallelEmbedding": nn.Embedding,
        "PPMissingLayer": Missing, "StageMissingLayer": Missing, "default_weight_loader": default_weight_loader,
        "support_quantized_model_reload_from_hp_weights": lambda function: function,
        "maybe_prefix": lambda prefix, name: name if not prefix else f"{prefix}.{name}",
    }  # fmt: skip
    tree = released.classes(release, UTILS, names)
    exec(compile(tree, f"vllm {release}", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), room)
    return room


def real_mapper(release: str, rules: list[Rule]) -> Any:
    """The release's own mapper with these rules."""
    tables: dict[str, dict[Any, Any]] = {}
    for rule in rules:
        key = re.compile(rule.key) if rule.kind == "regex" else rule.key
        shards = list(rule.shards) if len(rule.shards) > 1 else rule.shards[0] if rule.shards else None
        value = (rule.to, shards) if rule.kind == "stacked" else rule.to
        tables.setdefault(FIELDS.get(rule.kind, f"orig_to_new_{rule.kind}"), {})[key] = value
    return namespace(release)["WeightsMapper"](**tables)


def real_map(release: str, rules: list[Rule], name: str) -> tuple[str | None, Any]:
    """What the release's own mapper makes of `name`, with the shard id where it has them."""
    mapper = real_mapper(release, rules)
    if not hasattr(mapper, "_map_name_with_shard"):
        return mapper._map_name(name), None
    found = mapper._map_name_with_shard(name)
    return (None, None) if found is None else found


WORDS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    ".q_proj",
    ".qkv_proj",
    "up_proj",
    "gate_up_proj",
    "model.",
    "model",
    "lm_head",
    "head",
]
WORDS += ["a", "a.", ".a", "weight", ".weight", "in_proj_qkv", "in_proj_qkvz", ".in_proj_b", ".in_proj_ba"]
TEXT = st.sampled_from(WORDS)
NAME = st.lists(st.sampled_from([w.strip(".") for w in WORDS] + ["0", "10", "layers"]), min_size=1, max_size=5).map(
    ".".join
)
SHARD = st.sampled_from(["q", "k", "v", 0, 1, (0, 1, 2)])
ROWS = st.one_of(
    st.builds(Rule, st.sampled_from(["substring", "prefix", "suffix"]), TEXT, TEXT | st.none() | st.just("")),
    st.builds(Rule, st.just("prefix"), st.just(""), TEXT),
    st.builds(Rule, st.just("stacked"), TEXT, TEXT, SHARD.map(lambda s: (s,))),
    st.builds(
        Rule,
        st.just("regex"),
        st.sampled_from([r"a\.", r"(\w+)_proj", r"^model\.", r"\d+", "head$"]),
        st.sampled_from(["x", ""]),
    ),
    st.builds(Rule, st.just("regex"), st.just(r"(\w+)_proj"), st.sampled_from([r"\1_p", r"\g<1>.\1"]) | st.none()),
)
RULES = st.lists(ROWS, max_size=7, unique_by=lambda rule: (rule.kind, rule.key))


@pytest.mark.wheel
@pytest.mark.parametrize("release", RELEASES)
def test_every_name_is_mapped_as_the_release_maps_it(release):
    kinds = family(release).kinds
    namespace(release)

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(RULES, NAME)
    def agrees(rules, name):
        held = [rule for rule in rules if rule.kind in kinds]
        found = Mapper(held).map(name)
        wanted, shard = real_map(release, held, name)
        assert found.name == wanted
        if wanted is not None:
            assert found.shards == (() if shard is None else (shard,))

    agrees()


@pytest.mark.wheel
@pytest.mark.parametrize("release", RELEASES)
def test_the_release_has_the_kinds_that_its_family_says(release):
    fields = {f.replace("renamings", "renaming") for f in namespace(release)["WeightsMapper"].__dataclass_fields__}
    wanted = {FIELDS.get(kind, f"orig_to_new_{kind}") for kind in family(release).kinds}
    assert fields == wanted
    order = [f.replace("renamings", "renaming") for f in namespace(release)["WeightsMapper"].__dataclass_fields__]
    assert order == [FIELDS.get(kind, f"orig_to_new_{kind}") for kind in KINDS if kind in family(release).kinds]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["a", r"^a\.", "a_", "head", "*.a", r"model\.(a|b)\.", "a.weight"]),
       st.sampled_from(["x", "^x", r"x\.", r"(?!y)x", "x_"]), NAME)  # fmt: skip
def test_renamings_are_those_of_transformers(source, target, name):
    from transformers.core_model_loading import WeightRenaming

    rule = Rule("renaming", source, target)
    assert Mapper([rule]).map(name).name == WeightRenaming(source, target).rename_source_key(name)[0]


# ----- the walk through the modules -----

BOOK = """
format = 1
architecture = "Tree"
parameters = [
  {{ names = ["lm_head.weight", "model.norm.weight", "model.embed.weight", "scale"] }},
  {{ names = ["model.layers.{{0..1}}.attn.{{qkv_proj,o_proj}}.weight", "model.layers.{{0..1}}.attn.qkv_proj.bias"] }},
  {{ names = ["vit.attn.{{qkv_proj,out}}.{{weight,bias}}", "vit.norm.weight"] }},
  {{ names = ["vit.table"], buffer = true }},
]
modules = ["model.act"]
sections = [{{ releases = "=={release}", read = ["{release}"], loaders = {loaders} }}]

[loaders.root]
source = "x"
{root}

[loaders.inner]
source = "x"
at = "model"
{inner}

[loaders.vit]
source = "x"
at = "vit.attn"
{vit}
"""


def row(rule: Rule) -> str:
    kind, to = rule.kind, "drop = true" if rule.to is None else f"to = {rule.to!r}"
    shard = (
        f", shard = {list(s) if isinstance(s, tuple) else repr(s)}"
        if (s := next(iter(rule.shards), None)) is not None
        else ""
    )
    return f"{{ {kind} = '{rule.key}', {to}{shard} }}"


def table(rules: list[Rule], skips: list[str], prefixes: list[str]) -> str:
    skip = ", ".join(f"{{ prefix = '{s}' }}" for s in skips)
    return f"rules = [{', '.join(map(row, rules))}]\nskip = [{skip}]\nignore_prefixes = {prefixes}"


def tree(release: str, loaders: dict[str, tuple[list[Rule], list[str], list[str]]]) -> tuple[Any, dict[str, Any]]:
    """The same model as `BOOK` out of real modules, each loader being the release's AutoWeightsLoader; parameters remember writes."""
    import torch
    from torch import nn

    room = namespace(release)

    def module(path: str, children: dict[str, Any]) -> Any:
        made: Any = nn.Module()
        if path in loaders:
            rules, skips, prefixes = loaders[path]

            class Loads(nn.Module):
                def load_weights(self, weights: Any) -> Any:
                    held = {"ignore_unexpected_prefixes": list(prefixes)}
                    if family(release).skips:
                        held["skip_prefixes"] = list(skips)
                    return room["AutoWeightsLoader"](self, **held).load_weights(
                        weights, mapper=real_mapper(release, rules)
                    )

            made = Loads()
        for name, child in children.items():
            if isinstance(child, dict):
                made.add_module(name, module(f"{path}.{name}" if path else name, child))
            elif child == "buffer":
                made.register_buffer(name, torch.empty(1))
            else:
                made.register_parameter(name, nn.Parameter(torch.empty(1), requires_grad=False))
        return made

    leaf = {"weight": 1}
    attn = {"qkv_proj": {"weight": 1, "bias": 1}, "o_proj": leaf}
    layers = {"0": {"attn": attn}, "1": {"attn": attn}}
    vit = {
        "attn": {"qkv_proj": {"weight": 1, "bias": 1}, "out": {"weight": 1, "bias": 1}},
        "norm": leaf,
        "table": "buffer",
    }
    model = {"norm": leaf, "embed": leaf, "layers": layers, "act": {}}
    root = module("", {"lm_head": leaf, "scale": 1, "model": model, "vit": vit})
    held = dict([*root.named_parameters(), *root.named_buffers()])
    for tensor in held.values():
        tensor.written = []
    return root, held


PARTS = [
    "lm_head",
    "model",
    "vit",
    "norm",
    "embed",
    "scale",
    "layers",
    "0",
    "1",
    "2",
    "attn",
    "qkv_proj",
    "q_proj",
    "v_proj",
    "o_proj",
    "out",
]
PARTS += [
    "weight",
    "bias",
    "act",
    "table",
    "rotary_emb",
    "inv_freq",
    "mtp",
    "rotary_emb.cos_cached",
    "model.layers.0.attn",
    "vit.attn",
]
PATH = st.one_of(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map(".".join),
    st.tuples(
        st.sampled_from(["vit.attn", "model.layers.0.attn", "model.layers.1", "model", "vit", "lm_head", "model.act"]),
        st.sampled_from(
            [
                "q_proj.weight",
                "v_proj.bias",
                "qkv_proj.weight",
                "o_proj.bias",
                "norm.weight",
                "weight",
                "bias",
                "table",
                "x.bias",
            ]
        ),
    ).map(".".join),
)
STACKED = st.builds(
    Rule,
    st.just("stacked"),
    st.sampled_from(["q_proj", ".q_proj", "v_proj", ".v_proj"]),
    st.sampled_from(["qkv_proj", ".qkv_proj"]),
    SHARD.map(lambda s: (s,)),
)
PREFIX = st.builds(
    Rule,
    st.just("prefix"),
    st.sampled_from(["model.", "vit.", "mtp.", "lm_head", "layers.0."]),
    st.sampled_from(["", "vit.", "model.", "layers.1."]) | st.none(),
)
SUBSTRING = st.builds(
    Rule,
    st.just("substring"),
    st.sampled_from(["rotary", ".attn", "norm"]),
    st.sampled_from(["norm", ".attn"]) | st.none(),
)
TREE_RULES = st.lists(STACKED | PREFIX | SUBSTRING, max_size=3, unique_by=lambda rule: (rule.kind, rule.key))
SKIPS = st.lists(st.sampled_from(["lm_head.", "mtp.", "model.layers.1", "layers.1.", "norm"]), max_size=2, unique=True)
LOADER = st.tuples(TREE_RULES, SKIPS, st.lists(st.sampled_from(["model.layers.", "layers.", "lm_head.x"]), max_size=1))


CARRIED: tuple[list[Rule], list[str], list[str]] = ([Rule("stacked", ".q_proj", ".qkv_proj", ("q",))], [], [])
NOTHING: tuple[list[Rule], list[str], list[str]] = ([], [], [])


@pytest.mark.wheel
@pytest.mark.parametrize("release", RELEASES)
def test_every_name_ends_where_the_release_leaves_it(release):
    namespace(release)
    kinds = family(release).kinds

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @example(
        {"": CARRIED, "vit.attn": NOTHING}, ["vit.attn.q_proj.weight"]
    )  # the inner mapper leaves the shard id alone
    @example({"": NOTHING, "vit.attn": CARRIED}, ["vit.attn.q_proj.weight", "vit.attn.x.bias"])
    @given(
        st.fixed_dictionaries({"": LOADER}, optional={"model": LOADER, "vit.attn": LOADER}),
        st.lists(PATH, min_size=1, max_size=8),
    )
    def agrees(chosen, names):
        loaders = {at: ([r for r in rules if r.kind in kinds], skips if family(release).skips else [], prefixes)
                   for at, (rules, skips, prefixes) in chosen.items()}  # fmt: skip
        used = ["root", *(n for n, at in (("inner", "model"), ("vit", "vit.attn")) if at in loaders)]
        text = BOOK.format(
            release=release, loaders=used, root=table(*loaders[""]), inner=table(*loaders.get("model", ([], [], []))),
            vit=table(*loaders.get("vit.attn", ([], [], []))),
        )  # fmt: skip
        for name, at in (("inner", "model"), ("vit", "vit.attn")):
            if at not in loaders:
                text = re.sub(rf"\[loaders\.{name}\].*?(?=\n\[|\Z)", "", text, flags=re.DOTALL)
        book = parse(text, "tree.toml")
        model = resolve(book, book.sections[0], release, {})
        for name in names:
            assert ours(model, name) == theirs(release, loaders, name), name

    agrees()


def ours(model: Any, name: str) -> tuple[str, Any]:
    landing = walk(model, name)
    if landing.fate == "loaded":
        return landing.into or "", next(iter(landing.shards), None)
    return ("raises", None) if landing.error else ("nothing", None)


def theirs(release: str, loaders: dict[str, Any], name: str) -> tuple[str, Any]:
    import torch

    root, held = tree(release, loaders)
    try:
        root.load_weights(iter([(name, torch.empty(1))]))
    except ValueError:
        return "raises", None
    written = [(full, tensor.written[0]) for full, tensor in held.items() if tensor.written]
    return written[0] if written else ("nothing", None)


# ----- the shipped books against the sources they cite -----


def mapper_of(release: str, path: str, class_name: str) -> dict[str, dict[str, Any]]:
    """The tables of the `hf_to_vllm_mapper` that a class declares in its body, as literals."""
    body = released.classes(release, path, [class_name]).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == "hf_to_vllm_mapper":
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "WeightsMapper"]
            return {str(k.arg): ast.literal_eval(k.value) for call in calls for k in call.keywords}
    return {}


@pytest.mark.wheel
@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.27.1", "0.29.0", "0.33.0"])
@pytest.mark.parametrize(
    ("architecture", "at", "path", "class_name"),
    [
        ("MiniCPMV4_6ForConditionalGeneration", "", "minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration"),
        (
            "MiniCPMV4_6ForConditionalGeneration",
            "vit_merger.self_attn",
            "minicpmv4_6",
            "MiniCPMV4_6ViTWindowAttentionSelfAttn",
        ),
        ("MiniCPMV4_6ForConditionalGeneration", "vpm", "idefics2_vision_model", "Idefics2VisionTransformer"),
        ("MiniCPMV4_6ForConditionalGeneration", "language_model", "qwen3_5", "Qwen3_5ForCausalLMBase"),
        ("LlamaForCausalLM", "model", "llama", "LlamaModel"),
        ("Qwen2ForCausalLM", "model", "qwen2", "Qwen2Model"),
        ("Qwen3ForCausalLM", "model", "qwen2", "Qwen2Model"),
    ],
)
def test_a_book_has_the_rules_of_the_release(architecture, release, at, path, class_name):
    book = rulebook.find(architecture)
    assert book is not None
    section = book.section(release)
    assert section is not None
    loader = next((book.loaders[n] for n in section.loaders if book.loaders[n].at == at), None)
    rows = [made(r) for r in loader.rules] if loader is not None and loader.style == "auto" else []
    book_has: dict[str, dict[str, Any]] = {}
    for r in rows:
        if r.key == "head.":
            continue  # added in __init__, from 0.29.0
        value = (r.to, r.shards[0]) if r.kind == "stacked" else r.to
        book_has.setdefault(FIELDS.get(r.kind, f"orig_to_new_{r.kind}"), {})[r.key] = value
    release_has = mapper_of(release, f"vllm/model_executor/models/{path}.py", class_name)
    assert book_has == release_has
    assert {k: list(v) for k, v in book_has.items()} == {k: list(v) for k, v in release_has.items()}  # the order counts

"""The rules engine on MiniCPM-V 4.6. Expected fates are what released loaders did (see `data/README.md`), or reasoned beside the case."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.engines import EngineOptions, select
from ckaudit.engines.rules import default_spec
from ckaudit.errors import EngineError, RuleError
from ckaudit.plan import Plan, Step
from ckaudit.progress import NullProgress

HERE = Path(__file__).parent
MINICPM = HERE.parent / "fixtures/minicpm-v-4.6"
CONFIG = json.loads((MINICPM / "config.json").read_text())
TENSORS = json.loads((MINICPM / "tensors.json").read_text())
FATES = json.loads((HERE / "data/minicpm_fates.json").read_text())
CAUSAL = json.loads((HERE / "data/causal_fates.json").read_text())
WINDOW = "model.vision_tower.vit_merger.self_attn"


def checkpoint(tensors=TENSORS, config=CONFIG, **more) -> Checkpoint:
    specs = {
        n: TensorSpec(n, "model.safetensors", dtype, shape and tuple(shape), None)
        for n, (dtype, shape) in tensors.items()
    }
    held = {"name": "x", "kind": "local", "revision": None, "files": {}, "texts": {}, "index": None, "shards": ()}
    return Checkpoint(config=config, tensors=specs, **(held | more))


def plan(spec: str, **more) -> Plan:
    (engine,) = select(spec)
    return engine.plan(checkpoint(**more), EngineOptions(), NullProgress())


def counts(found: Plan) -> tuple[Counter, Counter]:
    return Counter(n.fate for n in found.names), Counter(p.coverage for p in found.parameters)


def renamed(old: str, new: str) -> dict:
    return {n.replace(old, new): v for n, v in TENSORS.items()}


def with_tensors(*extra: str, dtype="BF16", shape=(2,)) -> dict:
    return TENSORS | dict.fromkeys(extra, (dtype, shape))


# ----- the story -----


@pytest.mark.parametrize("release", ["0.24.0", "0.33.0"])
def test_these_releases_load_it(release):
    found = plan(f"rules:vllm=={release}")
    assert (found.verdict, found.error) == ("loads", None)
    assert counts(found) == (Counter(loaded=779), Counter(full=595))
    assert (found.engine, found.method) == ("vllm", "rules")
    assert [n.kind for n in found.notes] == ["provisional"]


def test_0_25_1_cascades_and_loses_q_and_k():
    found = plan("rules:vllm==0.25.1")
    assert found.verdict == "fails"
    assert counts(found) == (Counter(loaded=775, unmatched=4), Counter(full=593, partial=2))
    lost = {n.name: n for n in found.names if n.fate == "unmatched"}
    assert set(lost) == {f"{WINDOW}.{p}_proj.{leaf}" for p in "qk" for leaf in ("weight", "bias")}
    fate = lost[f"{WINDOW}.q_proj.weight"]
    assert fate.shard == "v"
    assert fate.chain[-2:] == (
        Step("stacked", "q_proj", "vit_merger.self_attn", "q_proj.weight", "qkv_proj.weight", "q"),
        Step("stacked", "v_proj", "vit_merger.self_attn", "qkv_proj.weight", "qkqkv_proj.weight", "v"),
    )
    partial = {p.name: p for p in found.parameters if p.coverage == "partial"}
    assert set(partial) == {f"vit_merger.self_attn.qkv_proj.{leaf}" for leaf in ("weight", "bias")}
    assert all(p.share == pytest.approx(1 / 3) for p in partial.values())
    assert partial["vit_merger.self_attn.qkv_proj.bias"].sources == (f"{WINDOW}.v_proj.bias",)
    # the first of the lost in file order is k; both take the same way
    assert found.error == (
        "predicted: ValueError: There is no module or parameter named 'qkqkv_proj' in MiniCPMV4_6ViTWindowAttentionSelfAttn"
    )


@pytest.mark.parametrize("release", ["0.27.1", "0.29.0"])
def test_a_dotted_rule_can_never_fire_in_the_window_attention(release):
    found = plan(f"rules:vllm=={release}")
    assert found.verdict == "fails"
    assert counts(found) == (Counter(loaded=773, unmatched=6), Counter(full=593, none=2))
    dead = [n for n in found.notes if n.kind == "dead-rule"]
    assert {n.names for n in dead} == {tuple(f"{WINDOW}.{p}_proj.{leaf}" for leaf in ("weight", "bias")) for p in "qkv"}
    hits = {(r.key, r.at): r.hits for r in found.rules}
    assert hits[".q_proj", "vit_merger.self_attn"] == 0
    assert hits[".q_proj", "vpm"] == 2 * 27  # the same rule on a module with layers below it, weight and bias
    assert hits[".q_proj", "language_model.model"] == 6


def test_rules_say_where_they_stand():
    found = plan("rules:vllm==0.25.1")
    rule = next(r for r in found.rules if r.key == "v_proj")
    assert rule.source == "vllm 0.25.1 vllm/model_executor/models/minicpmv4_6.py"
    assert rule.hits == 6  # q and k after their own rule, v by itself; weight and bias


def agrees(spec: str, release: str, fates: dict, config: dict) -> None:
    """Every name ends where the release left it."""
    # A head is judged alone, as it was recorded: beside its embedding it would not raise
    heads = [name for name in fates if "lm_head" in name]
    for group in ([name for name in fates if name not in heads], *([name] for name in heads)):
        found = plan(spec, tensors={name: ("BF16", fates[name]["shape"]) for name in group}, config=config)
        raising = {name for failure in found.failures for name in failure.names}
        for fate in found.names:
            got = "raises" if fate.name in raising else fate.into if fate.fate == "loaded" else "ignored"
            assert got == fates[fate.name][release], fate.name


@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.27.1", "0.29.0", "0.33.0"])
def test_each_odd_name_ends_where_the_release_left_it(release):
    agrees(f"rules:vllm=={release}", release, FATES, CONFIG)


@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.29.0", "0.33.0"])
@pytest.mark.parametrize("case", sorted(CAUSAL))
def test_each_odd_name_of_a_causal_model_ends_where_the_release_left_it(case, release):
    agrees(f"rules:vllm=={release}", release, CAUSAL[case]["names"], CAUSAL[case]["config"])


# ----- what else can happen -----


def test_every_release_of_the_book_is_judged_and_no_other():
    for release, verdict in {
        "0.22.0": "loads", "0.23.0": "loads", "0.25.0": "fails", "0.26.0": "fails", "0.27.0": "fails", "0.28.0": "fails",
        "0.30.0": "loads", "0.31.0": "loads", "0.32.0": "loads", "0.21.0": "not_judged", "0.34.0": "not_judged",
    }.items():  # fmt: skip
        assert plan(f"rules:vllm=={release}").verdict == verdict, release
    reason = plan("rules:vllm==0.34.0").not_judged
    assert reason == "no section of the rule book covers 0.34.0; nearest is 0.33.0 (section >=0.32.0, <=0.33.0)"
    assert "nearest is 0.22.0" in (plan("rules:vllm==0.6.6").not_judged or "")


def test_a_release_between_those_that_were_read_says_so():
    assert "unread-release" in [n.kind for n in plan("rules:vllm==0.26.1").notes]


def test_the_newest_release_is_the_default():
    assert default_spec(checkpoint()) == "rules:vllm==0.33.0"
    assert plan("rules:vllm").id == "rules:vllm==0.33.0"
    assert default_spec(checkpoint(config={"architectures": ["NoSuchModel"]})) is None
    assert default_spec(checkpoint(config=None)) is None
    assert default_spec(checkpoint(config={"architectures": "text"})) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"config": None}, "no config.json"),
        ({"config": {}}, "names no architecture"),
        ({"config": {"architectures": ["NoSuchModel"]}}, "--engine vllm==X"),
        ({"config": CONFIG | {"quantization_config": {"quant_method": "gptq"}}}, "quantised (gptq)"),
        ({"texts": {"hf_quant_config.json": b"{}"}}, "quantised"),
        ({"config": {k: v for k, v in CONFIG.items() if k != "text_config"}}, "config.json has no text_config."),
        ({"tensors": {}}, "no tensor names"),
    ],
)
def test_what_cannot_be_said_is_not_judged(more, reason):
    found = plan("rules:vllm==0.33.0", **more)
    assert found.verdict == "not_judged"
    assert reason in (found.not_judged or "")


def test_a_missing_norm_stops_the_start_and_a_missing_linear_does_not():
    # vLLM's start-up check exempts modules that have a quantisation method, quantised or not; a norm has none
    norm = "model.language_model.norm.weight"
    found = plan("rules:vllm==0.33.0", tensors={n: v for n, v in TENSORS.items() if n != norm})
    assert found.error == (
        "predicted: ValueError: Following weights were not initialized from checkpoint: 'language_model.model.norm.weight'"
    )
    linear = "model.language_model.layers.0.mlp.down_proj.weight"
    found = plan("rules:vllm==0.33.0", tensors={n: v for n, v in TENSORS.items() if n != linear})
    assert (found.verdict, found.error) == ("loads_with_loss", None)


def test_draft_and_rotary_tensors_are_left_out_by_design():
    extra = with_tensors("mtp.fc.weight", "model.language_model.layers.3.self_attn.rotary_emb.inv_freq")
    for release, fate in (("0.25.1", "ignored"), ("0.29.0", "dropped")):
        found = {n.name: n for n in plan(f"rules:vllm=={release}", tensors=extra).names}
        assert found["mtp.fc.weight"].fate == fate
        assert all(found[n].by_design for n in extra.keys() - TENSORS.keys())
    assert plan("rules:vllm==0.33.0", tensors=extra).verdict == "loads"


def test_an_unexpected_bias_is_ignored_in_silence_and_never_by_design():
    name = "model.language_model.layers.0.mlp.down_proj.bias"
    found = plan("rules:vllm==0.33.0", tensors=with_tensors(name))
    fate = next(n for n in found.names if n.name == name)
    assert (fate.fate, fate.by_design) == ("ignored", None)
    assert found.verdict == "loads_with_loss"


def test_a_stored_head_that_is_tied():
    extra = with_tensors("lm_head.weight", shape=(248320, 1024))
    new = plan("rules:vllm==0.33.0", tensors=extra)
    assert new.verdict == "loads"
    assert (
        next(n for n in new.names if n.name == "lm_head.weight").by_design
        == "tied to language_model.model.embed_tokens.weight"
    )
    old = plan("rules:vllm==0.24.0", tensors=extra)  # loads both into one parameter
    assert [n.kind for n in old.notes] == ["provisional", "tied-twice"]
    assert old.collisions == ()


def test_a_tied_head_without_its_embedding_raises():
    tensors = {n: v for n, v in with_tensors("lm_head.weight", shape=(248320, 1024)).items() if "embed_tokens" not in n}
    assert "tied to" in (plan("rules:vllm==0.33.0", tensors=tensors).error or "")


def test_an_untied_head_is_a_parameter_of_its_own():
    config = CONFIG | {"text_config": CONFIG["text_config"] | {"tie_word_embeddings": False}}
    tensors = with_tensors("lm_head.weight", shape=(248320, 1024))
    assert plan("rules:vllm==0.33.0", tensors=tensors, config=config).verdict == "loads"
    assert (
        plan("rules:vllm==0.33.0", config=config).verdict == "loads_with_loss"
    )  # a head has a quantisation method: exempt


def test_two_tensors_on_one_parameter_collide():
    twin = "model.vpm.post_layernorm.weight"  # the older name of the tower, which has a rule of its own
    found = plan("rules:vllm==0.33.0", tensors=with_tensors(twin, shape=(1152,)))
    (collision,) = found.collisions
    assert (collision.kept, collision.lost) == (twin, ("model.vision_tower.post_layernorm.weight",))


def test_a_fused_tensor_fills_the_parameter_and_a_part_beside_it_collides():
    parts = {n for n in TENSORS if n.startswith(f"{WINDOW}.") and "_proj.weight" in n and "out_proj" not in n}
    whole = {n: v for n, v in TENSORS.items() if n not in parts} | {f"{WINDOW}.qkv_proj.weight": ("BF16", [3456, 1152])}
    assert plan("rules:vllm==0.33.0", tensors=whole).verdict == "loads"
    both = whole | {f"{WINDOW}.k_proj.weight": ("BF16", [1152, 1152])}
    (collision,) = plan("rules:vllm==0.33.0", tensors=both).collisions
    assert collision.lost == (f"{WINDOW}.qkv_proj.weight",)


def test_a_wrong_shape_raises_and_names_both_shapes():
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    found = plan("rules:vllm==0.33.0", tensors=TENSORS | {name: ("BF16", [2048, 1024])})
    (mismatch,) = found.mismatches
    # 8 heads of 256, with an output gate as wide
    assert (mismatch.wanted, mismatch.found) == ("[4096, 1024]", "[2048, 1024]")
    assert found.verdict == "fails"
    assert next(n for n in found.names if n.name == name).fate == "not_reached"


def test_integers_in_place_of_floats_are_a_mismatch_of_dtype():
    name = "model.language_model.norm.weight"
    (mismatch,) = plan("rules:vllm==0.33.0", tensors=TENSORS | {name: ("I8", [1024])}).mismatches
    assert (mismatch.kind, mismatch.wanted, mismatch.found) == ("dtype", "BF16", "I8")
    assert plan("rules:vllm==0.33.0", tensors=TENSORS | {name: ("F32", [1024])}).mismatches == ()


def test_names_alone_are_judged_and_shapes_left_open():
    bare = dict.fromkeys(TENSORS, (None, None))
    found = plan("rules:vllm==0.25.1", tensors=bare)
    assert counts(found) == (Counter(loaded=775, unmatched=4), Counter(full=593, partial=2))
    assert "shapes" in [u.topic for u in found.unjudged]
    assert {n.read for n in found.names if n.fate == "loaded"} == {None}


def test_layers_past_the_last_are_left_out_of_the_tower_only():
    late = "model.vision_tower.encoder.layers.27.layer_norm1.weight"
    found = plan("rules:vllm==0.33.0", tensors=with_tensors(late))
    fate = next(n for n in found.names if n.name == late)
    assert (fate.fate, fate.by_design) == ("ignored", "layers past those that are built")
    text = "model.language_model.layers.24.input_layernorm.weight"
    assert plan("rules:vllm==0.33.0", tensors=with_tensors(text)).verdict == "fails"


def test_names_of_the_hostile_kind_are_only_names():
    extra = with_tensors("../../etc/passwd", "a\x1b[31m", "", ".", "model..weight", "model.language_model." * 400 + "x")
    found = plan("rules:vllm==0.33.0", tensors=extra)
    assert Counter(n.fate for n in found.names) == Counter(loaded=779, unmatched=6)


# ----- one's own book -----

OWN = """
format = 1
architecture = "*"
sections = [{ releases = ">=0.25.0", read = ["0.33.0"], loaders = ["model"] }]
loaders = { model = { source = "mine.py", rules = [{ prefix = "model.", to = "" }] } }
parameters = [{ names = ["a.weight", "b.weight"], checked = true }]
"""


def test_a_book_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    found = plan(f"rules:{file}", tensors={"model.a.weight": ("BF16", [1])}, config={"architectures": ["Any"]})
    assert found.id == f"rules:{file}"
    assert found.names[0].into == "a.weight"
    assert "'b.weight'" in (found.error or "")


def test_a_book_for_another_architecture_or_without_parameters_judges_nothing(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(OWN.replace('"*"', '"Other"'))
    assert "is for Other" in (plan(f"rules:{file}").not_judged or "")
    file.write_text("\n".join(line for line in OWN.splitlines() if not line.startswith("parameters")))
    assert "lists no parameters" in (plan(f"rules:{file}").not_judged or "")


def test_spellings_that_are_none():
    for spec in ("rules:", "rules:sglang", "rules:vllm=0.33.0", "rules:vllm=="):
        with pytest.raises(EngineError):
            select(spec)
    with pytest.raises(RuleError):
        select("rules:gone.toml")
    with pytest.raises(RuleError):
        plan("rules:vllm==newest")


def test_the_engine_imports_neither_torch_nor_the_hub():
    heavy = "('torch', 'transformers', 'huggingface_hub')"
    code = f"import sys, ckaudit.engines.rules.judge; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_release_that_fails_names_those_that_load_it():
    """0.22 to 0.24 and 0.30 to 0.33 load MiniCPM-V 4.6 (`FATES`); one that loads has nothing to say of others."""
    notes = {n.kind: n.text for n in plan("rules:vllm==0.27.1").notes}
    assert notes["loads-elsewhere"] == ">=0.22.0,<0.25.0 or >=0.30.0,<=0.33.0"
    assert "loads-elsewhere" not in {n.kind for n in plan("rules:vllm==0.33.0").notes}


def test_a_checkpoint_that_no_release_loads_is_sent_to_none():
    lost = {n: v for n, v in TENSORS.items() if "layer_norm1" not in n}
    assert "loads-elsewhere" not in {n.kind for n in plan("rules:vllm==0.27.1", tensors=lost).notes}

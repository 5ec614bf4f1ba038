"""CK203 to CK207, CK214, CK215, CK218, and what holds for all checks together."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckaudit import checks
from ckaudit.checks import catalogue
from ckaudit.plan import Collision, Failure, NameFate, Note, Parameter, Plan, RuleHit, Step, Unjudged
from tests.toy import CONFIG, checkpoint, findings, llama, only, plan, told

LLAMA = llama()


def drop(names: list[str], *parts: str) -> list[str]:
    return [n for n in names if not any(p in n for p in parts)]


class TestStrayAndMissing:
    def test_a_foreign_tensor_in_every_layer_is_one_finding(self) -> None:
        source = checkpoint([*LLAMA, *(f"model.layers.{i}.self_attn.indexer.v_transform" for i in range(4))])
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK203", "error", "checkpoint", 4)
        assert "`model.layers.{0..3}.self_attn.indexer.v_transform`" in finding.message

    def test_a_parameter_that_no_tensor_fills(self) -> None:
        source = checkpoint(drop(LLAMA, "layers.2.self_attn.q_proj"))
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.severity, finding.count) == ("CK204", "error", 1)
        assert finding.names == ("model.layers.2.self_attn.q_proj.weight",)

    def test_missing_bytes_are_those_of_the_parameter(self) -> None:
        source = checkpoint(drop(LLAMA, "model.norm"))
        whole = plan(source, LLAMA)
        sized = tuple(msgspec.structs.replace(p, shape=(8, 4), dtype="F32") for p in whole.parameters)
        assert only(source, msgspec.structs.replace(whole, parameters=sized)).bytes == 8 * 4 * 4

    def test_a_misspelt_leaf_names_what_it_should_be(self) -> None:
        source = checkpoint(
            [n.replace("post_attention_layernorm", "post_attn_layernorm") if ".2." in n else n for n in LLAMA]
        )
        finding = only(source, plan(source, LLAMA))
        assert (finding.count, finding.wanted) == (1, "model.layers.2.post_attention_layernorm.weight")

    def test_likeness_alone_does_not_marry_other_shapes(self) -> None:
        tensors = {n: ("BF16", [2, 2]) for n in LLAMA if "model.norm" not in n} | {
            "model.norms.weight": ("BF16", [9, 9])
        }
        source = checkpoint(tensors)
        found = told(source, plan(source, {n: [2, 2] for n in LLAMA}))
        assert {f[0] for f in found} == {"CK203", "CK204"}

    def test_the_engine_is_blamed_when_another_loads_it(self) -> None:
        source = checkpoint(LLAMA)
        bad = plan(source, drop(LLAMA, "model.norm"), id="toy==2", raises=True)
        finding = only(source, bad, plan(source, LLAMA, id="toy==1"))
        assert (finding.check, finding.blame, finding.engine) == ("CK203", "engine", "toy==2")
        assert finding.mend == "Use toy==1, which loads them."

    @pytest.mark.parametrize("extra", [
            "model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_pos_emb.inv_freq", "bert.embeddings.position_ids",
            "bn.num_batches_tracked",
    ])  # fmt: skip
    def test_tables_that_engines_compute_are_at_most_a_note(self, extra: str) -> None:
        source = checkpoint([*LLAMA, *{extra.format(i) for i in range(4)}])
        assert {f[:2] for f in told(source, plan(source, LLAMA))} == {("CK206", "note")}
        assert findings(source) == []
        whole = checkpoint(LLAMA)
        assert findings(whole, plan(whole, [*LLAMA, extra.format(0)])) == []

    def test_what_is_by_design_is_no_finding(self) -> None:
        source = checkpoint([*LLAMA, "aux.weight"])
        model = [*LLAMA, "buffer"]
        assert (
            findings(source, plan(source, model, by_design={"aux.weight": "computed", "buffer": "default-valued"}))
            == []
        )

    def test_a_lost_shard_explains_its_parameters(self) -> None:
        index = {"weight_map": dict.fromkeys(LLAMA, "model.safetensors")}
        lost = checkpoint(
            drop(LLAMA, "layers.3.", "model.norm"), files={"model.safetensors.index.json": msgspec.json.encode(index)}
        )
        assert findings(lost, plan(lost, LLAMA)) == []
        assert any(f.severity == "error" for f in checks.run(lost, (plan(lost, LLAMA),))[0])


class TestSilent:
    def silent(self, names: list[str], fate: str, **more: Any) -> Plan:
        source = checkpoint([*LLAMA, *names])
        base = plan(source, LLAMA)
        changed = tuple(msgspec.structs.replace(n, fate=fate) if n.name in names else n for n in base.names)
        return msgspec.structs.replace(base, names=changed, **more)

    def test_an_ignored_bias_is_a_loss(self) -> None:
        names = [f"model.layers.{i}.self_attn.q_proj.bias" for i in range(4)]
        source = checkpoint([*LLAMA, *names])
        assert told(source, self.silent(names, "ignored")) == [("CK206", "error", "checkpoint", 4)]

    def test_a_dropped_head_bias_is_a_loss(self) -> None:
        source = checkpoint([*LLAMA, "lm_head.bias"])
        assert told(source, self.silent(["lm_head.bias"], "dropped")) == [("CK206", "error", "engine", 1)]

    def test_a_bias_that_a_quantiser_added_is_a_warning(self) -> None:
        extra = ["h.0.fc.bias"]
        module = {f"h.0.fc.{leaf}": ("I32", [2, 2]) for leaf in ("qweight", "qzeros", "scales")}
        source = checkpoint(
            {**{n: ("BF16", [2, 2]) for n in (*LLAMA, *extra)}, **module},
            CONFIG | {"quantization_config": {"quant_method": "gptq"}},
        )
        base = plan(source, [*LLAMA, *module])
        changed = tuple(msgspec.structs.replace(n, fate="ignored") if n.name in extra else n for n in base.names)
        assert told(source, msgspec.structs.replace(base, names=changed)) == [("CK206", "warning", "checkpoint", 1)]


class TestCollision:
    def test_two_trees_on_one_are_one_finding(self) -> None:
        a, b = [[f"model.{t}.layers.{i}.scalar" for i in range(3)] for t in ("decoder", "encoder")]
        source = checkpoint([*a, *b])
        target = [f"model.layers.{i}.scalar" for i in range(3)]
        base = plan(source, target, lambda n: n.replace("decoder.", "").replace("encoder.", ""))
        clash = tuple(Collision(t, y, (x,)) for t, x, y in zip(target, a, b, strict=True))
        finding = only(source, msgspec.structs.replace(base, collisions=clash))
        assert (finding.check, finding.severity, finding.count) == ("CK207", "error", 6)


class TestTies:
    HEAD = ("lm_head.weight",)

    def config(self, **flags: Any) -> dict[str, Any]:
        return CONFIG | flags

    def test_tied_and_one_stored(self) -> None:
        source = checkpoint(drop(LLAMA, "lm_head"), self.config(tie_word_embeddings=True))
        assert findings(source, plan(source, LLAMA, by_design={"lm_head.weight": "tied"})) == []

    def test_untied_and_both_stored(self) -> None:
        source = checkpoint(LLAMA, self.config(tie_word_embeddings=False))
        assert findings(source, plan(source, LLAMA)) == []

    def test_tied_and_both_stored_cannot_be_told(self) -> None:
        source = checkpoint(LLAMA, self.config(tie_word_embeddings=True))
        assert told(source, plan(source, LLAMA)) == [("CK214", "note", "undecidable", 2)]

    def test_tied_and_of_another_shape(self) -> None:
        shapes = {n: ("BF16", [2, 2]) for n in LLAMA} | {"lm_head.weight": ("BF16", [3, 2])}
        assert told(checkpoint(shapes, self.config(tie_word_embeddings=True))) == [("CK214", "error", "config", 2)]

    def test_untied_and_no_head(self) -> None:
        source = checkpoint(drop(LLAMA, "lm_head"), self.config(tie_word_embeddings=False))
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.severity, finding.blame) == ("CK214", "error", "undecidable")

    def test_the_two_levels_disagree(self) -> None:
        both = self.config(tie_word_embeddings=True, text_config={"tie_word_embeddings": False})
        assert told(checkpoint(LLAMA, both)) == [("CK214", "warning", "config", 1)]
        assert findings(checkpoint(drop(LLAMA, "lm_head"), both)) == []

    def test_a_stored_head_that_a_class_has_no_place_for(self) -> None:
        source = checkpoint(LLAMA, self.config(tie_word_embeddings=True, text_config={"tie_word_embeddings": False}))
        found = told(source, plan(source, drop(LLAMA, "lm_head")))
        assert ("CK214", "error", "config", 1) in found

    @pytest.mark.parametrize("named", [[], "ToyForCausalLM", [None, 3]])
    def test_a_head_lost_because_the_config_names_no_class(self, named: object) -> None:
        # one engine guesses a class without a head, another one with it: neither was told which
        source = checkpoint(LLAMA, CONFIG | {"architectures": named})
        found = told(source, plan(source, drop(LLAMA, "lm_head")), plan(source, LLAMA, id="toy==2"))
        assert found == [("CK404", "warning", "config", 0), ("CK214", "error", "config", 1)]
        source = checkpoint(LLAMA)
        found = told(source, plan(source, drop(LLAMA, "lm_head")), plan(source, LLAMA, id="toy==2"))
        assert found == [("CK214", "error", "engine", 1)]


class TestLoader:
    def test_an_error_that_nothing_explains(self) -> None:
        source = checkpoint(LLAMA)
        broken = plan(source, LLAMA, error="ValueError: block size", failures=(Failure("ValueError: block size"),))
        assert told(source, broken) == [("CK218", "error", "undecidable", 0)]

    def test_a_config_that_no_class_takes(self) -> None:
        # no parameter was made and no tensor asked for: only the config was read until then
        source = checkpoint(LLAMA)
        fates = tuple(NameFate(n, "not_reached", read=0.0) for n in source.tensors)
        error = "Field 'hidden_size' expected int, got list"
        stopped = msgspec.structs.replace(
            plan(source, ()), error=error, failures=(Failure(error),), names=fates, parameters=()
        )
        assert told(source, stopped) == [("CK218", "error", "config", 0)]
        # another engine that builds the model from it: the config may be sound
        other = plan(source, LLAMA, id="toy==2")
        assert told(source, stopped, other) == [("CK218", "error", "undecidable", 0)]

    def test_an_error_without_details(self) -> None:
        source = checkpoint(LLAMA)
        assert told(source, plan(source, LLAMA, error="boom")) == [("CK218", "error", "undecidable", 0)]

    def test_an_error_about_what_is_found_already(self) -> None:
        source = checkpoint([*LLAMA, "aux.weight"])
        failing = plan(source, LLAMA, raises=True, failures=(Failure("KeyError: 'aux.weight'", ("aux.weight",)),))
        assert told(source, failing) == [("CK203", "error", "checkpoint", 1)]

    @pytest.mark.parametrize("kind", ["claims-too-little", "claims-too-much"])
    def test_a_wrong_claim_is_a_note(self, kind: str) -> None:
        source = checkpoint(LLAMA)
        claim = Note(kind, "as the engine words it", ("lm_head.weight",))
        assert told(source, plan(source, LLAMA, notes=(claim,))) == [("CK215", "note", "engine", 1)]

    def test_other_notes_are_no_claims(self) -> None:
        source = checkpoint(LLAMA)
        assert told(source, plan(source, LLAMA, notes=(Note("broadcast", "spread", ("lm_head.weight",)),))) == []


class TestNotJudged:
    def test_is_a_skip_and_no_finding(self) -> None:
        source = checkpoint(LLAMA)
        stopped = Plan(id="toy==1", engine="toy", release="1", method="live", not_judged="no such package")
        found, skips = checks.run(source, (stopped,))
        assert [f for f in found if f.check[:3] in ("CK2", "CK3", "CK4")] == []
        assert {(s.engine, s.reason) for s in skips} == {("toy==1", "no such package")}

    def test_what_the_engine_left_open_is_a_skip(self) -> None:
        source = checkpoint(LLAMA)
        open_question = plan(source, LLAMA, unjudged=(Unjudged("tied", "equality is in the data"),))
        assert ("CK214", "toy==1") in {(s.check, s.engine) for s in checks.run(source, (open_question,))[1]}


class TestSeveralEngines:
    def test_what_all_of_them_lack_is_told_once_and_of_the_files(self) -> None:
        source = checkpoint(drop(LLAMA, "layers.2.self_attn.q_proj"))
        finding = only(source, *(plan(source, LLAMA, id=f"toy=={i}") for i in range(3)))
        assert (finding.check, finding.engine, finding.blame) == ("CK204", None, "checkpoint")

    def test_what_one_of_them_loads_is_told_of_the_others(self) -> None:
        source = checkpoint(LLAMA)
        plans = [plan(source, drop(LLAMA, "model.norm"), id=f"toy=={i}") for i in (1, 2)] + [
            plan(source, LLAMA, id="toy==3")
        ]
        assert {(f.check, f.engine, f.blame) for f in findings(source, *plans)} == {
            ("CK203", "toy==1", "engine"),
            ("CK203", "toy==2", "engine"),
        }

    def test_a_tensor_that_one_warns_of_and_another_passes_over_is_told_once(self) -> None:
        source = checkpoint([*LLAMA, "model.norm.bias"])
        loud, quiet = plan(source, LLAMA), plan(source, LLAMA, id="toy==2")
        fates = tuple(msgspec.structs.replace(n, fate="ignored") if n.fate == "unmatched" else n for n in quiet.names)
        quiet = msgspec.structs.replace(quiet, names=fates)
        finding = only(source, loud, quiet)
        assert (finding.check, finding.engine, finding.names) == ("CK203", None, ("model.norm.bias",))
        assert "toy==2 passes over them without a word" in finding.message
        other = checkpoint([*LLAMA, "model.norm.bias", "model.extra.weight"])  # of another set each says its own
        one, two = plan(other, [*LLAMA, "model.extra.weight"]), plan(other, LLAMA, id="toy==2")
        fates = tuple(msgspec.structs.replace(n, fate="ignored") if n.fate == "unmatched" else n for n in two.names)
        assert len(findings(other, one, msgspec.structs.replace(two, names=fates))) > 1

    def test_a_part_of_a_fused_parameter_that_another_lacks_too_is_told_once(self) -> None:
        source = checkpoint(drop(LLAMA, "layers.2.self_attn.q_proj"))
        fused = [n for n in LLAMA if not any(p in n for p in ("q_proj", "k_proj", "v_proj"))]
        fused += [f"model.layers.{i}.self_attn.qkv_proj.weight" for i in range(4)]
        short = "model.layers.2.self_attn.qkv_proj.weight"
        parts = tuple(
            Parameter(n, "partial", share=0.5, sources=("model.layers.2.self_attn.k_proj.weight",)) if n == short else Parameter(n, "full")
            for n in fused
        )  # fmt: skip
        rules = tuple(RuleHit("stacked", f".{p}_proj", ".qkv_proj", "", 3) for p in "qkv")
        step = Step("stacked", ".k_proj", "", "a", "b")
        names = tuple(NameFate(n, "loaded", n, chain=(step,) if "k_proj" in n else ()) for n in source.tensors)
        fusing = Plan(id="toy==2", engine="toy", release="2", method="live", names=names, parameters=parts, rules=rules)
        assert [(f.check, f.engine) for f in findings(source, fusing)] == [("CK205", "toy==2")]
        finding = only(source, plan(source, LLAMA), fusing)
        assert (finding.check, finding.engine, finding.names) == (
            "CK204",
            None,
            ("model.layers.2.self_attn.q_proj.weight",),
        )


def test_the_catalogue_has_each_id_once() -> None:
    ids = [c.id for c in catalogue.CHECKS]
    assert len(set(ids)) == len(ids)


FATES = st.sampled_from(["loaded", "dropped", "ignored", "unmatched", "not_reached"])
COVERAGE = st.sampled_from(["full", "partial", "none", "unknown"])
NAMES = st.sampled_from(
    [
        *LLAMA[:14],
        "lm_head.weight",
        "mtp.0.w",
        "x.bias",
        "x.qweight",
        "x.lora_A.weight",
        "a.experts.0.up_proj.weight",
        "",
        ".",
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(NAMES, st.tuples(FATES, NAMES, st.sampled_from([None, 0.0, 0.5, 1.0])), max_size=12),
    st.dictionaries(NAMES, COVERAGE, max_size=12),
    st.sampled_from([None, "boom"]),
    st.sampled_from([CONFIG, CONFIG | {"tie_word_embeddings": True}, CONFIG | {"num_hidden_layers": 3}]),
)
def test_a_bad_verdict_never_comes_without_a_finding(
    fates: Any, parameters: Any, error: str | None, config: Any
) -> None:
    source = checkpoint([n for n in fates if n], config)
    told_plan = Plan(
        id="toy==1", engine="toy", release="1", method="live", error=error,
        names=tuple(NameFate(name=n, fate=f, into=i, read=r) for n, (f, i, r) in fates.items()),
        parameters=tuple(Parameter(name=p, coverage=c) for p, c in parameters.items()),
    )  # fmt: skip
    found = [f for f in checks.run(source, (told_plan,))[0] if f.severity in ("error", "warning")]
    if told_plan.verdict == "fails":
        assert any(f.severity == "error" for f in found)
    if told_plan.verdict == "loads_with_loss":
        assert found
    if told_plan.verdict == "loads":
        assert not [f for f in found if f.engine == "toy==1"]

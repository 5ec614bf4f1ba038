"""CK209, CK213, CK216: prefixes, wrappers, repeats, adapters left in the names."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions, select
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
from tests.toy import checkpoint, findings, llama, only, plan, told

FIXTURES = Path(__file__).parent.parent / "fixtures"
LLAMA = llama()


def wrap(segment: str) -> list[str]:
    return [re.sub(r"(layers\.\d+)\.", rf"\1.{segment}.", n) for n in LLAMA]


class TestWrongPrefix:
    @pytest.mark.parametrize(
        "prefix", ["_orig_mod.", "module.", "base_model.model.", "model.", "llm.", "some.trainer."]
    )
    def test_a_prefix_on_every_name_is_one_finding(self, prefix: str) -> None:
        source = checkpoint([prefix + n for n in LLAMA])
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.severity, finding.blame, finding.count) == (
            "CK209",
            "error",
            "checkpoint",
            len(LLAMA),
        )
        assert finding.mend.startswith(f"Strip the prefix `{prefix}`")
        assert finding.bytes == 8 * len(LLAMA)  # every tensor is BF16 [2, 2]

    def test_the_lost_root_of_a_bare_backbone(self) -> None:
        # saved as the backbone, loaded as the model with a head; the head is tied, so nothing else is wrong
        source = checkpoint([n.removeprefix("model.") for n in LLAMA if n != "lm_head.weight"])
        finding = only(source, plan(source, LLAMA, by_design={"lm_head.weight": "tied"}))
        assert (finding.check, finding.count) == ("CK209", len(LLAMA) - 1)
        assert finding.mend.startswith("Add the prefix `model.`")

    def test_a_wrapper_inside_the_path(self) -> None:
        source = checkpoint(wrap("_fsdp_wrapped_module"))
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.count) == ("CK209", 36)  # 4 layers of 9; the other three names are right
        assert "`_fsdp_wrapped_module.`" in finding.mend

    def test_two_parts_with_two_prefixes_are_two_findings(self) -> None:
        vision = [f"visual.blocks.{i}.attn.{p}.weight" for i in range(3) for p in ("qkv", "proj")]
        source = checkpoint([*LLAMA, *vision])
        model = [n.replace("model.", "model.language_model.") for n in LLAMA] + [f"model.{n}" for n in vision]
        found = told(source, plan(source, model))
        # lm_head is right as it is
        assert sorted(found) == [("CK209", "error", "checkpoint", 6), ("CK209", "error", "checkpoint", len(LLAMA) - 1)]

    def test_it_is_the_engines_fault_when_another_release_loads_the_same_names(self) -> None:
        source = checkpoint(LLAMA)
        wrong = plan(source, LLAMA, lambda n: n.replace("model.", "language_model.model."), id="toy==2", raises=True)
        finding = only(source, wrong, plan(source, LLAMA, id="toy==1"))
        assert (finding.check, finding.blame, finding.engine) == ("CK209", "engine", "toy==2")
        assert "toy==1" in finding.mend

    def test_experts_that_are_looked_up_by_one_name_are_all_counted(self) -> None:
        source = checkpoint([f"_orig_mod.layers.{i}.experts.{j}.up_proj.weight" for i in range(3) for j in range(4)])
        found = only(
            source,
            plan(
                source,
                [f"layers.{i}.experts.up_proj" for i in range(3)],
                lambda n: re.sub(r"(experts)\.\d\.(up_proj).*", r"\1.\2", n),
            ),
        )
        assert (found.check, found.count) == ("CK209", 12)
        assert "key_mapping" not in found.mend  # the stored names are not what is looked up

    def test_right_names_are_left_alone(self) -> None:
        source = checkpoint(LLAMA)
        assert findings(source, plan(source, LLAMA)) == []

    def test_foreign_tensors_are_no_wrong_prefix(self) -> None:
        source = checkpoint([*LLAMA, "gene_projector.proj.weight"])
        assert only(source, plan(source, LLAMA)).check == "CK203"

    @pytest.mark.parametrize("segment", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
    def test_known_wrappers_are_told_without_an_engine(self, segment: str) -> None:
        for names in ([f"{segment}.{n}" for n in LLAMA], wrap(segment)):
            assert only(checkpoint(names)).check == "CK209"

    def test_a_module_called_module_inside_the_path_is_no_wrapper(self) -> None:
        assert findings(checkpoint(wrap("module"))) == []


class TestRepeated:
    def test_an_engine_that_forgives_a_doubled_prefix(self) -> None:
        source = checkpoint([f"model.{n}" if n.startswith("model.") else n for n in LLAMA])
        finding = only(source, plan(source, LLAMA, lambda n: n.replace("model.model.", "model.")))
        assert (finding.check, finding.severity, finding.count) == ("CK213", "warning", len(LLAMA) - 1)

    def test_a_model_whose_own_tree_repeats_is_left_alone(self) -> None:
        names = [n.replace("model.", "model.encoder.model.model.") for n in LLAMA]
        source = checkpoint(names)
        assert findings(source, plan(source, names)) == []
        assert findings(source) == []

    def test_a_repeat_that_the_engine_renames_on_purpose(self) -> None:
        # ViT's own names, which a conversion of the loader changes
        names = [f"vit.encoder.layer.{i}.attention.attention.{p}.weight" for i in range(3) for p in ("query", "key")]
        source = checkpoint(names)
        rename = {
            n: n.replace("attention.attention.query", "attention.q_proj").replace(
                "attention.attention.key", "attention.k_proj"
            )
            for n in names
        }
        assert findings(source, plan(source, list(rename.values()), rename.__getitem__)) == []

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("model.", "model.language_model.language_model.language_model."),
            (".self_attn.", ".self_attn.mla.mla.mla.mla."),
        ],
    )
    def test_three_times_is_told_from_the_files(self, old: str, new: str) -> None:
        assert {t[0] for t in told(checkpoint([n.replace(old, new) for n in LLAMA]))} == {"CK213"}

    def test_a_repeated_layer_path_is_told_from_the_files(self) -> None:
        names = [re.sub(r"(model\.layers\.\d+\.)", r"\1\1", n) for n in LLAMA]
        assert "CK213" in {t[0] for t in told(checkpoint(names))}

    def test_experts_of_the_same_number_as_their_layer_repeat_nothing(self) -> None:
        names = [
            f"layers.{i}.experts.{j}.{p}.weight" for i in range(4) for j in range(4) for p in ("gate_proj", "up_proj")
        ]
        assert findings(checkpoint(names)) == []


class TestUnmerged:
    def adapted(self) -> list[str]:
        names = [n.replace("q_proj.weight", "q_proj.base_layer.weight") for n in LLAMA]
        return names + [f"model.layers.{i}.self_attn.q_proj.lora_{x}.default.weight" for i in range(4) for x in "AB"]

    def test_one_finding_for_the_adapter_and_the_weights_it_moved(self) -> None:
        source = checkpoint(self.adapted())
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.severity, finding.count) == (
            "CK216",
            "error",
            12,
        )  # 4 layers: base_layer, lora_A, lora_B
        assert "merge_and_unload" in finding.mend
        assert told(source) == [("CK216", "error", "checkpoint", 12)]

    def test_an_adapter_repo_is_no_full_model(self) -> None:
        names = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{x}.weight" for i in range(4) for x in "AB"]
        source = checkpoint(names, None, {"adapter_config.json": b'{"peft_type": "LORA"}'})
        assert not [f for f in findings(source) if f.check in ("CK216", "CK209")]

    def test_an_engine_that_knows_the_adapter_is_believed(self) -> None:
        source = checkpoint(self.adapted())
        assert findings(source, plan(source, self.adapted())) == []


def test_two_copies_of_a_model_are_not_both_found() -> None:
    source = checkpoint([f"{half}.{n}" for half in ("student", "teacher") for n in LLAMA])
    finding = only(source, plan(source, LLAMA))
    assert (finding.check, finding.count) == ("CK209", 2 * len(LLAMA))
    assert finding.mend.startswith("Keep one copy")
    single = checkpoint([f"student.{n}" for n in LLAMA])
    assert only(single, plan(single, LLAMA)).mend.startswith("Strip the prefix `student.`")


class TestFusedParameters:
    """An engine that fuses has no parameter of the name that a part should have: its rules tell it."""

    @staticmethod
    def by_book(fixture: str) -> list[tuple[str, str, int, str]]:
        source = read_checkpoint(open_source(str(FIXTURES / fixture)))
        (engine,) = select("rules:vllm==0.33.0")
        made = engine.plan(source, EngineOptions(), NullProgress())
        return [(f.check, f.severity, f.count, f.wanted) for f in findings(source, made)]

    def test_a_misspelt_part_is_one_finding(self) -> None:
        assert self.by_book("llama-misspelt") == [("CK209", "error", 2, "model.layers.0.self_attn.k_proj.weight")]

    def test_a_prefix_before_every_name_is_one_finding(self) -> None:
        assert self.by_book("llama-compiled-prefix") == [("CK209", "error", 21, "model.embed_tokens.weight")]

    @staticmethod
    def fused(*more: str) -> list[str]:
        """The parameters of an engine that joins q, k and v, and gate and up."""
        joined = {re.sub(r"[qkv]_proj", "qkv_proj", re.sub(r"(gate|up)_proj", "gate_up_proj", n)) for n in LLAMA}
        return [*sorted(joined), *more]

    def test_parts_go_with_the_prefix_where_no_rule_was_reached(self) -> None:
        # the loader stops at `wrapper.`, so nothing shows where q, k and v would have gone but the place that is empty
        source = checkpoint([f"wrapper.{n}" for n in LLAMA])
        finding = only(source, plan(source, self.fused()))
        assert (finding.check, finding.count) == ("CK209", len(LLAMA))

    def test_parts_that_the_engine_keeps_under_other_roots(self) -> None:
        # one wrapper around a head and a backbone, of which the engine renames the second: one finding, the head with it
        source = checkpoint([f"wrapper.{n}" for n in LLAMA])
        model = [n.replace("model.", "language_model.model.") for n in LLAMA if n != "lm_head.weight"]
        finding = only(source, plan(source, model))
        assert (finding.check, finding.count) == ("CK209", len(LLAMA))

    @pytest.mark.parametrize(("size", "rest"), [([5, 2], []), ([6, 2], ["CK204"])])
    def test_a_head_that_the_engine_calls_otherwise(self, size: list[int], rest: list[str]) -> None:
        # `embed_out` is `head` there: nothing tells but its shape, which no other tensor without a place has
        tensors = {f"wrapper.{n}": ("BF16", [2, 2]) for n in LLAMA if n != "lm_head.weight"}
        source = checkpoint(tensors | {"wrapper.embed_out.weight": ("BF16", [5, 2])})
        model = {n: [2, 2] for n in LLAMA if n != "lm_head.weight"} | {"head.weight": size}
        found = findings(source, plan(source, model))
        assert [f.check for f in found] == ["CK209", *rest]
        assert found[0].count == len(LLAMA)

    def test_what_is_missing_elsewhere_is_told_beside_the_prefix(self) -> None:
        source = checkpoint([f"wrapper.{n}" for n in LLAMA])
        found = findings(source, plan(source, self.fused("score.weight")))
        assert [(f.check, f.names) for f in found if f.check != "CK209"] == [("CK204", ("score.weight",))]

    def test_strangers_under_a_prefix_that_the_model_has(self) -> None:
        # `model.` is no wrapper: what stands under it and pairs with nothing is told by itself
        source = checkpoint([n.replace("model.", "model.text.") for n in LLAMA] + ["model.text.extra.a.weight"])
        found = findings(source, plan(source, LLAMA))
        assert [(f.check, f.names) for f in found if f.check != "CK209"] == [("CK203", ("model.text.extra.a.weight",))]

    def test_a_part_that_is_not_there_stays_missing(self) -> None:
        assert [f[:3] for f in self.by_book("llama-missing-tensor")] == [("CK205", "error", 1)]

    def test_an_error_that_tells_of_the_module_alone(self) -> None:
        """vLLM stops at the first segment that it does not know, and names that."""
        wrapped = [re.sub(r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module.", n) for n in LLAMA]
        source = checkpoint(wrapped)
        made = plan(source, LLAMA, id="vllm==1")
        short = tuple(
            structs.replace(n, into=n.name.partition("._fsdp")[0] + "._fsdp_wrapped_module") if "_fsdp" in n.name else n
            for n in made.names
        )
        finding = only(source, structs.replace(made, names=short))
        assert (finding.check, finding.count) == ("CK209", sum("_fsdp" in n for n in wrapped))
        assert finding.mend.startswith("Take `_fsdp_wrapped_module.` out of the names")

    def test_experts_that_are_stacked(self) -> None:
        experts = [
            f"model.layers.{i}.moe.experts.{e}.{p}_proj.weight"
            for i in range(3)
            for e in range(4)
            for p in ("gate", "up", "down")
        ]
        source = checkpoint(experts)
        stacked = {f"model.layers.{i}.mlp.experts.{w}_weight": [4, 2, 2] for i in range(3) for w in ("w13", "w2")}
        finding = only(source, plan(source, stacked, id="vllm==1"))
        assert (finding.check, finding.count, finding.wanted) == (
            "CK209",
            36,
            "model.layers.0.mlp.experts.0.gate_proj.weight",
        )
        lone = [f"model.layers.{i}.mlp.router.{e}.weight" for i in range(3) for e in range(4)]  # no likeness of paths
        other = checkpoint(lone)
        assert "CK209" not in {f.check for f in findings(other, plan(other, stacked, id="vllm==1"))}

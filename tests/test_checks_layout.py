"""CK210, CK211, CK212, CK219: numbered stacks."""

import re
from typing import ClassVar

import pytest
from msgspec.structs import replace

from tests.toy import CONFIG, checkpoint, findings, llama, only, plan, sized, told

LLAMA = llama(6)


def without(names: list[str], *parts: str) -> list[str]:
    return [n for n in names if not any(p in n for p in parts)]


class TestLayers:
    def test_a_hole_is_told_from_the_files(self) -> None:
        finding = only(checkpoint(without(LLAMA, "layers.2.", "layers.3.")))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK210", "error", "checkpoint", 2)
        assert finding.names == ("model.layers.2", "model.layers.3")

    def test_with_an_engine_it_stays_one_finding(self) -> None:
        source = checkpoint(without(LLAMA, "layers.2.", "layers.3."))
        assert told(source, plan(source, LLAMA)) == [("CK210", "error", "checkpoint", 2)]

    def test_lost_layers_at_the_end_are_told_by_the_engine(self) -> None:
        source = checkpoint(without(LLAMA, "layers.4.", "layers.5."), CONFIG | {"num_hidden_layers": 6})
        finding = only(source, plan(source, LLAMA))
        assert (finding.check, finding.blame, finding.count) == ("CK210", "checkpoint", 18)  # 2 layers of 9 parameters
        assert "num_hidden_layers: 6" in finding.message
        assert "layers 4,5" in finding.message

    def test_lost_layers_at_the_end_without_an_engine(self) -> None:
        source = checkpoint(without(LLAMA, "layers.4.", "layers.5."), CONFIG | {"num_hidden_layers": 6})
        assert told(source) == [("CK401", "error", "undecidable", 2)]

    def test_an_engine_that_loads_all_disproves_a_hole(self) -> None:
        # layers without weights are possible
        names = without(LLAMA, "layers.2.")
        source = checkpoint(names)
        assert findings(source, plan(source, names)) == []

    def test_a_sequential_skips_what_has_no_weights(self) -> None:
        names = [f"projector.{i}.{p}" for i in (0, 1, 3) for p in ("weight", "bias")]
        assert findings(checkpoint([*LLAMA, *names])) == []

    def test_equal_steps_are_a_pattern_not_a_loss(self) -> None:
        assert findings(checkpoint(without(LLAMA, "layers.1.", "layers.3.", "layers.5."))) == []

    def test_layers_of_two_kinds_are_no_hole(self) -> None:
        hybrid = [n.replace("self_attn", "linear_attn") if "layers.3." in n else n for n in LLAMA]
        assert findings(checkpoint(without(hybrid, "layers.5.self_attn.v_proj"))) == []


def experts(layers: range = range(3), count: int = 4) -> list[str]:
    return [
        f"model.layers.{i}.mlp.experts.{j}.{p}_proj.weight"
        for i in layers
        for j in range(count)
        for p in ("gate", "up", "down")
    ]


def fused(name: str) -> str:
    """Where a loader that stacks experts puts a tensor."""
    head, found, tail = name.partition(".experts.")
    return f"{head}.experts.{tail.partition('.')[2].removesuffix('.weight')}" if found and tail[0].isdecimal() else name


class TestExperts:
    def test_all_there(self) -> None:
        source = checkpoint(experts())
        assert findings(source) == []
        assert findings(source, plan(source, set(map(fused, experts())), fused)) == []

    @pytest.mark.parametrize(
        ("lost", "names"),
        [
            ("layers.1.mlp.experts.2.", ("model.layers.1.mlp.experts.2",)),
            ("layers.1.mlp.experts.3.", ("model.layers.1.mlp.experts.3",)),  # the last: seen beside the other layers
            ("layers.1.mlp.experts.2.up_proj", ("model.layers.1.mlp.experts.2.up_proj",)),
        ],
    )
    def test_a_gap_that_a_stacking_loader_accepts(self, lost: str, names: tuple[str, ...]) -> None:
        source = checkpoint(without(experts(), lost))
        finding = only(source, plan(source, set(map(fused, experts())), fused))
        assert (finding.check, finding.severity, finding.names) == ("CK211", "error", names)

    def test_a_renumbered_expert(self) -> None:
        source = checkpoint([n.replace("experts.3.", "experts.7.") for n in experts()])
        finding = only(source)
        assert (finding.check, finding.count) == ("CK211", 12)  # experts 3, 4, 5 and 6 of three layers

    def test_pruned_alike_in_every_layer_with_the_config(self) -> None:
        source = checkpoint(experts(count=3), CONFIG | {"num_experts": 3})
        assert findings(source) == []

    def test_pruned_without_the_config(self) -> None:
        finding = only(checkpoint(experts(count=3), CONFIG | {"num_experts": 4}))
        assert (finding.check, finding.blame, finding.wanted, finding.found) == ("CK401", "config", "4", "3")

    @pytest.mark.parametrize(("rows", "blame"), [(4, "checkpoint"), (3, "config")])
    def test_pruned_alike_with_an_engine_that_stacks_what_is_there(self, rows: int, blame: str) -> None:
        # a router of as many rows as the config says still chooses the lost experts: then these are missing, else the config is old
        routers = {f"model.layers.{i}.mlp.gate.weight": ("BF16", [rows, 2]) for i in range(3)}
        stored = dict.fromkeys(experts(count=3), ("BF16", [2, 2])) | routers
        source = checkpoint(stored, CONFIG | {"num_experts": 4})
        wanted = dict.fromkeys(map(fused, experts(count=3))) | {name: [4, 2] for name in routers}
        loaded = plan(source, wanted, fused)
        parts = tuple(
            replace(p, coverage="partial", share=0.75) if "gate.weight" not in p.name else p for p in loaded.parameters
        )
        assert told(source, replace(loaded, parameters=parts)) == [("CK401", "error", blame, 3)]

    def test_more_declared_than_an_engine_asks_for(self) -> None:
        # the engine builds as many as are there (it goes by another key) and loses nothing
        source = checkpoint(experts(count=3), CONFIG | {"num_experts": 4})
        assert told(source, plan(source, set(map(fused, experts(count=3))), fused)) == []

    def test_some_experts_quantised_and_some_not(self) -> None:
        names = [n.replace("weight", "weight_packed") if "experts.0." in n else n for n in experts()]
        scales = [n.replace("weight_packed", "weight_scale") for n in names if "packed" in n]
        assert not [f for f in findings(checkpoint(names + scales)) if f.check == "CK211"]

    def test_both_layouts_in_one_module(self) -> None:
        both = [*experts(), "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]
        finding = only(checkpoint(both))
        assert (finding.check, finding.severity, finding.count) == ("CK212", "error", 2)

    def test_one_layout_in_a_module_and_the_other_in_the_next(self) -> None:
        # the draft block keeps its experts one by one
        names = [f"model.layers.{i}.mlp.experts.{p}" for i in range(3) for p in ("gate_up_proj", "down_proj")]
        mtp = [n.replace("model.layers", "mtp.layers") for n in experts(range(1))]
        assert findings(checkpoint([*names, *mtp])) == []

    @pytest.mark.parametrize("stored", ["fused", "single"])
    def test_the_layout_that_the_engine_does_not_read(self, stored: str) -> None:
        both = {
            "fused": [f"model.layers.{i}.mlp.experts.{p}" for i in range(3) for p in ("gate_up_proj", "down_proj")],
            "single": experts(),
        }
        source = checkpoint(both.pop(stored))
        finding = only(source, plan(source, next(iter(both.values()))))
        assert (finding.check, finding.severity, finding.blame, finding.count) == (
            "CK220",
            "error",
            "engine",
            len(source.tensors),
        )

    def test_a_lost_expert_tensor_is_no_layout(self) -> None:
        source = checkpoint(without(experts(), "layers.1.mlp.experts.2."))
        assert only(source, plan(source, experts())).check == "CK211"

    def test_a_router_beside_the_experts(self) -> None:
        names = [*experts(), *(f"model.layers.{i}.mlp.experts.gate.weight" for i in range(3))]
        assert findings(checkpoint(names)) == []


class TestDraft:
    def test_announced_and_absent_is_a_note(self) -> None:
        assert told(checkpoint(LLAMA, CONFIG | {"num_nextn_predict_layers": 1})) == [("CK219", "note", "config", 0)]

    @pytest.mark.parametrize("extra", ["mtp.layers.0.eh_proj.weight", "model.mtp_layers.0.input_proj.weight"])
    def test_announced_and_stored(self, extra: str) -> None:
        assert findings(checkpoint([*LLAMA, extra], CONFIG | {"num_nextn_predict_layers": 1})) == []

    def test_stored_as_the_layer_after_the_last(self) -> None:
        assert findings(checkpoint(LLAMA, CONFIG | {"num_hidden_layers": 5, "num_nextn_predict_layers": 1})) == []

    def test_left_out_by_design_is_a_note(self) -> None:
        extra = "mtp.layers.0.eh_proj.weight"
        source = checkpoint([*LLAMA, extra])
        assert told(source, plan(source, LLAMA, by_design={extra: "draft model"})) == [("CK219", "note", "engine", 1)]


MTP = [n.replace("model.layers.0.", "mtp.layers.0.") for n in LLAMA if "layers.0." in n]


class TestDraftInPart:
    def found(self, draft: list[str], **config: int) -> list[tuple[str, str, str, int]]:
        return told(checkpoint([*LLAMA, *draft], CONFIG | config))

    def test_whole(self) -> None:
        assert self.found([*MTP, "mtp.fc.weight", "mtp.norm.weight"], num_nextn_predict_layers=1) == []

    def test_half_a_block(self) -> None:
        half = [n for n in MTP if "down_proj" not in n and "v_proj" not in n]
        assert self.found(half) == [("CK219", "warning", "checkpoint", 2)]

    def test_one_of_two(self) -> None:
        assert self.found(MTP, num_nextn_predict_layers=2) == [("CK219", "warning", "checkpoint", 1)]

    def test_behind_the_last_layer(self) -> None:
        # as DeepSeek-V3 stores its own: layer 5 of a model of five
        whole = [*LLAMA, "model.layers.5.eh_proj.weight"]
        config = CONFIG | {"num_nextn_predict_layers": 1, "num_hidden_layers": 5}
        assert told(checkpoint(whole, config)) == []
        half = [n for n in whole if "layers.5.self_attn.o_proj" not in n]
        assert told(checkpoint(half, config)) == [("CK219", "warning", "checkpoint", 1)]

    @pytest.mark.parametrize(
        "change",
        [
            ("self_attn.q_proj", "self_attn.qkv_proj"),  # fused
            ("mlp.gate_proj", "mlp.experts.gate_up_proj"),  # the layout of its experts is its own
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            ("mlp.down_proj", "mlp.down_proj_packed"),
        ],
    )
    def test_a_block_of_another_make(self, change: tuple[str, str]) -> None:
        parts = [
            n.replace(*change)
            for n in MTP
            if not (change[0].startswith("mlp.gate") and ".mlp." in n and "gate" not in n)
        ]
        if "qkv" in change[1]:
            parts = [n for n in parts if ("k_proj" not in n and "v_proj" not in n) or "qkv" in n]
        assert self.found(parts) == []


def test_layers_that_are_numbered_from_one() -> None:
    config = CONFIG | {"num_hidden_layers": 4}
    shifted = [re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + 1}", n) for n in llama(4)]
    source = checkpoint(shifted, config)
    finding = only(source, plan(source, llama(4)))
    assert (finding.check, finding.severity, finding.blame, finding.engine) == ("CK210", "error", "checkpoint", None)
    assert "numbered from 1" in finding.message
    lost = checkpoint(
        [n for n in llama(5) if "layers.0." not in n], config | {"num_hidden_layers": 5}
    )  # the first is not there
    assert "numbered from 1" not in " ".join(f.message for f in findings(lost, plan(lost, llama(5))))


class TestJoined:
    """Projections that are one tensor here and several there."""

    SPLIT: ClassVar[dict[str, list[int]]] = {
        **{f"model.layers.{i}.attn.q_proj.weight": [8, 4] for i in range(3)},
        **{f"model.layers.{i}.attn.{p}_proj.weight": [2, 4] for i in range(3) for p in "kv"},
    }
    FUSED: ClassVar[dict[str, list[int]]] = {f"model.layers.{i}.attn.qkv_proj.weight": [12, 4] for i in range(3)}

    def test_fused_on_disk(self) -> None:
        source = sized({n: ("BF16", s) for n, s in self.FUSED.items()})
        finding = only(source, plan(source, self.SPLIT))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK222", "error", "checkpoint", 3)
        assert "headers cannot tell" in finding.mend

    def test_split_on_disk(self) -> None:
        source = sized({n: ("BF16", s) for n, s in self.SPLIT.items()})
        assert told(source, plan(source, self.FUSED)) == [("CK222", "error", "checkpoint", 9)]

    def test_the_engine_is_blamed_where_another_loads_them(self) -> None:
        source = sized({n: ("BF16", s) for n, s in self.SPLIT.items()})
        assert told(source, plan(source, self.FUSED), plan(source, self.SPLIT, id="toy==2")) == [
            ("CK222", "error", "engine", 9)
        ]

    def test_rows_that_do_not_add_up(self) -> None:
        source = sized({n: ("BF16", [10, 4]) for n in self.FUSED})
        assert "CK222" not in {c for c, *_ in told(source, plan(source, self.SPLIT))}

"""CK308, and CK307 of an engine: plain weights where the config wants quantised ones, and what is plain on purpose."""

from __future__ import annotations

import time

import pytest

from ckaudit.mapper import Rule
from tests.test_checks_companions import LINEARS, SCHEMES, W, config, quantised
from tests.test_checks_rewrites import mapped
from tests.toy import CONFIG, checkpoint, only, plan, told

LAST = LINEARS[-1]
METHOD, LEAVES = SCHEMES["packed"]
REST = {n: s for n, s in quantised(LEAVES).items() if not n.startswith(LAST)}
ODD = REST | {f"{LAST}.weight": W}
"""One module of the last layer is plain."""

ROUTED = {
    f"model.layers.{i}.mlp.experts.{e}.{p}.weight": ("BF16", [64, 64])
    for i in range(3)
    for e in range(4)
    for p in ("w1", "w2")
}


class TestPlain:
    def test_one_of_many(self) -> None:
        finding = only(checkpoint(ODD, config(METHOD)))
        assert (finding.check, finding.severity, finding.blame) == ("CK308", "warning", "config")
        assert finding.names == (f"{LAST}.weight",)

    @pytest.mark.parametrize(
        "more",
        [
            {"ignore": [LAST]},
            {"ignore": ["re:.*layers\\.7\\..*"]},
            {"modules_to_not_convert": ["model.layers.7"]},
            {"exclude_modules": ["model.layers.7*"]},
            {"dynamic": {"-:model\\.layers\\.7\\..*": {}}},
            {"config_groups": {"g": {"targets": ["re:.*layers\\.[0-6]\\..*"]}}},
            {"extra_config": {LAST: {"bits": 16}}},
        ],
        ids=["name", "pattern", "whole layer", "wildcard", "GPTQModel", "targets", "AutoRound"],
    )
    def test_what_the_config_leaves_plain(self, more: dict[str, object]) -> None:
        assert told(checkpoint(ODD, config(METHOD | more))) == []

    def test_entries_under_other_names_are_told_as_that(self) -> None:
        odd = {f"{m}.weight": W for m in LINEARS[-4:]}
        rest = {
            n: s
            for n, s in quantised(LEAVES).items()
            if not n.startswith(("model.layers.6.mlp", "model.layers.7", "model.layers.6.self"))
        }
        ignore = {"ignore": ["language_model.model.layers.6", "language_model.model.layers.7"]}
        assert told(checkpoint(rest | odd, config(METHOD | ignore))) == [("CK307", "warning", "config", 2)]

    def test_targets_that_are_a_class(self) -> None:
        groups = {"config_groups": {"g": {"targets": ["Linear"]}}}
        assert [c for c, *_ in told(checkpoint(ODD, config(METHOD | groups)))] == ["CK308"]

    def test_modules_that_are_plain_in_every_layer(self) -> None:
        dense = {f"model.layers.{i}.mlp.router.weight": W for i in range(8)}
        assert told(checkpoint(quantised(LEAVES) | dense, config(METHOD))) == []

    def test_the_parts_of_a_module_that_is_exempt_under_its_fused_name(self) -> None:
        parts = {
            f"model.layers.{i}.mlp.{p}_proj.{leaf}": s
            for i in range(3)
            for p in ("gate", "up")
            for leaf, s in LEAVES.items()
        }
        plain = {f"model.layers.3.mlp.{p}_proj.weight": W for p in ("gate", "up")}
        method = METHOD | {"ignore": ["model.layers.3.mlp.gate_up_proj"]}
        assert told(checkpoint(parts | plain, config(method))) == []
        assert [c for c, *_ in told(checkpoint(parts | plain, config(METHOD)))] == ["CK308"]


class TestPatterns:
    """Patterns of an ignore list come from strangers."""

    @pytest.mark.parametrize(
        "evil",
        [
            "re:(m+o*)+$",
            "re:(.*a)*b",
            "re:" + ".*x" * 50,
            r"re:(m)\1*",
            "re:(",
            "re:[",
            "*" * 40 + "x",
            "re:" + "(" * 5000,
            "(?<=x)y*",
        ],
    )
    def test_one_that_might_never_end_is_not_tried(self, evil: str) -> None:
        name = "m" * 60 + "!"
        leaves = {f"{name}.{i}.down_proj.{leaf}": spec for i in range(3) for leaf, spec in LEAVES.items()}
        source = checkpoint(leaves | {f"{name}.3.down_proj.weight": W}, config(METHOD | {"ignore": [evil]}))
        start = time.perf_counter()
        assert told(source) == []  # the list may exempt it: nothing is claimed
        assert time.perf_counter() - start < 5

    def test_the_others_share_a_second(self) -> None:
        slow = [f"re:.*a.*b.*c{i}" for i in range(3000)]
        tensors = {f"{'ab' * 90}.{i}.down_proj.{leaf}": spec for i in range(30) for leaf, spec in LEAVES.items()}
        source = checkpoint(tensors | {f"{'ab' * 90}.30.down_proj.weight": W}, config(METHOD | {"ignore": slow}))
        start = time.perf_counter()
        told(source)
        assert time.perf_counter() - start < 10

    @pytest.mark.parametrize(
        ("entry", "hit"),
        [
            ("re:.*layers\\.7\\..*", True),
            ("model.layers.*.mlp.down_proj", True),
            ("*down_proj", True),
            ("model.layers.7", True),
            ("mlp", True),
            ("model.layers", True),
            ("model.layer", False),
            ("down", False),
            ("re:layers\\.7", False),
        ],
    )
    def test_what_an_entry_exempts(self, entry: str, hit: bool) -> None:
        assert (told(checkpoint(ODD, config(METHOD | {"ignore": [entry]}))) == []) is hit


class TestExperts:
    def test_all_exempt(self) -> None:
        finding = only(checkpoint(quantised(LEAVES) | ROUTED, config(METHOD | {"ignore": ["re:.*experts.*"]})))
        assert (finding.check, finding.blame, finding.count) == ("CK308", "config", 24)
        # 24 matrices of 8192 bytes, and 704 bytes beside them
        assert "99% of the checkpoint" in finding.message

    def test_a_few_small_ones(self) -> None:
        small = {n: ("BF16", [1, 2]) for n in ROUTED}
        large = {n: (d, [64 * k for k in s]) for n, (d, s) in quantised(LEAVES).items()}
        assert told(checkpoint(large | small, config(METHOD | {"ignore": ["re:.*experts.*"]}))) == []


class TestEngine:
    """Plain weights that an engine builds quantised modules for."""

    TOWER = "vision.layers.{}.fc1"

    def parameters(self, module: str) -> list[str]:
        return [*quantised(LEAVES), *(f"{module.format(i)}.{leaf}" for i in range(3) for leaf in LEAVES)]

    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        return quantised(LEAVES) | {f"{self.TOWER.format(i)}.weight": W for i in range(3)}

    def test_in_the_ignore_list(self) -> None:
        source = checkpoint(self.tensors(), config({"quant_method": "modelopt", "ignore": ["vision"]}))
        finding = only(source, plan(source, self.parameters(self.TOWER), raises=True))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK307", "error", "engine", 3)

    @pytest.mark.parametrize(
        ("entry", "blame"),
        [("vision", "config"), ("vision.layers", "config"), ("re:vision.*", "engine"), ("re:.*fc1", "engine")],
    )
    def test_what_compressed_tensors_reads_as_an_entry(self, entry: str, blame: str) -> None:
        # its own matching (compressed_tensors/utils/match.py) knows whole names and `re:`, no parts of a path
        source = checkpoint(self.tensors(), config(METHOD | {"ignore": [entry]}))
        finding = only(source, plan(source, self.parameters(self.TOWER), raises=True))
        assert (finding.check, finding.blame, finding.count) == ("CK307", blame, 3)

    @pytest.mark.parametrize(("ignore", "check"), [([], "CK308"), (["re:.*_attn.*"], "CK307")])
    def test_parts_of_a_module_that_is_built_quantised(self, ignore: list[str], check: str) -> None:
        # q, k and v are plain in every layer, so nothing shows where the engine would have put them but the name of the fused module
        parts = {f"model.layers.{i}.self_attn.{x}_proj.weight": W for i in range(3) for x in "qkv"}
        source = checkpoint(quantised(LEAVES) | parts, config(METHOD | {"ignore": ignore}))
        fused = [f"model.layers.{i}.self_attn.qkv_proj.{leaf}" for i in range(3) for leaf in LEAVES]
        finding = only(source, plan(source, [*quantised(LEAVES), *fused]))
        assert (finding.check, finding.count) == (check, 9)

    def test_parts_beside_another_module_that_lacks_its_companions(self) -> None:
        parts = {f"model.layers.{i}.self_attn.{x}_proj.weight": W for i in range(3) for x in "qkv"}
        source = checkpoint(quantised(LEAVES) | parts, config(METHOD))
        other = [f"model.layers.{i}.self_attn.gate.{leaf}" for i in range(3) for leaf in LEAVES]
        assert {c for c, *_ in told(source, plan(source, [*quantised(LEAVES), *other]))} == {"CK203", "CK204"}

    def test_not_in_it(self) -> None:
        source = checkpoint(self.tensors(), config(METHOD))
        finding = only(source, plan(source, self.parameters(self.TOWER)))
        assert (finding.check, finding.severity, finding.blame, finding.count) == ("CK308", "error", "config", 3)

    def test_a_rule_for_weights_that_misses_the_entry(self) -> None:
        rules = [Rule("prefix", "vision.", "visual."), Rule("substring", ".fc1.", ".proj.")]
        source = checkpoint(self.tensors(), config(METHOD | {"ignore": [self.TOWER.format(i) for i in range(3)]}))
        finding = only(source, mapped(source, rules, self.parameters("visual.layers.{}.proj")))
        assert (finding.check, finding.blame, finding.count) == ("CK307", "engine", 3)
        # the prefix is changed in both, the dotted part in the weight's name alone
        assert "`visual.layers.0.proj` of the tensor's module and `visual.layers.0.fc1` of the entry" in finding.message

    def test_a_module_that_is_simply_not_there(self) -> None:
        source = checkpoint(self.tensors(), config(METHOD))
        assert [c for c, *_ in told(source, plan(source, list(quantised(LEAVES))))] == ["CK203"]

    def test_without_a_quantisation(self) -> None:
        source = checkpoint({f"{self.TOWER.format(i)}.weight": W for i in range(3)}, CONFIG)
        found = told(source, plan(source, [f"{self.TOWER.format(i)}.weight_packed" for i in range(3)]))
        assert not {c for c, *_ in found} & {"CK307", "CK308"}

    def test_a_wrong_prefix_of_a_quantised_checkpoint_is_one_finding(self) -> None:
        """Companions are no scheme of their own where the same rename mends them with their weights."""
        source = checkpoint({f"module.{n}": s for n, s in quantised(LEAVES).items()}, config(METHOD))
        finding = only(source, plan(source, list(quantised(LEAVES))))
        assert (finding.check, finding.count) == ("CK209", len(quantised(LEAVES)))


class TestGlobalScales:
    def test_both_conventions_at_once(self) -> None:
        one, other = SCHEMES["nvfp4"][1], SCHEMES["modelopt nvfp4"][1]
        tensors = {f"a.{i}.q_proj.{leaf}": s for i in range(2) for leaf, s in one.items()} | {
            f"b.{i}.q_proj.{leaf}": s for i in range(2) for leaf, s in other.items()
        }
        found = told(checkpoint(tensors, config(SCHEMES["nvfp4"][0])))
        assert ("CK306", "warning", "undecidable", 4) in found

    def test_a_scale_of_another_scheme(self) -> None:
        assert [
            c for c, *_ in told(checkpoint(quantised(SCHEMES["fp8 tensor"][1]), config(SCHEMES["fp8 tensor"][0])))
        ] == []

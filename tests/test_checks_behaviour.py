"""What a model does, judged from the sections of the report."""

from __future__ import annotations

from typing import Any

import pytest

from ckaudit.checks.behaviour import compare, disagreement, fingerprints, run
from ckaudit.checks.observed import Observed, TensorStats
from ckaudit.checks.values import run as judge_values

PRINT = {"of": "logits", "ids": [7, 3, 9, 1, 4], "logits": [8.0, 6.0, 5.0, 4.0, 2.0], "flat": False}


def passed(**fields: Any) -> dict[str, Any]:
    usual = {
        "kind": "text",
        "status": "ran",
        "finite": True,
        "first_non_finite": None,
        "fingerprint": PRINT,
        "reason": None,
    }
    return {"ignored_from": [], "raised_from": [], **usual, **fields}


def checks(*runs: dict[str, Any], load: dict[str, Any] | None = None) -> list[str]:
    findings, _ = run(load, {"runs": list(runs)})
    return [f.check for f in findings]


def test_a_sound_pass_gives_no_finding() -> None:
    assert checks(passed(), load={"status": "complete", "error": None}) == []


def test_the_loader_raises() -> None:
    error = {"status": "failed", "error": "size mismatch for lm_head.weight", "blame": "checkpoint"}
    findings, _ = run(error, None)
    assert [f.check for f in findings] == ["CK601"]
    assert "size mismatch" in findings[0].message


def test_a_full_device_is_not_the_checkpoints_fault() -> None:
    assert run({"status": "failed", "error": "Out of memory", "blame": "environment"}, None) == ((), ())


def test_the_forward_pass_raises() -> None:
    assert checks(passed(status="raised", reason="RuntimeError: mat1 and mat2", finite=None, fingerprint=None)) == [
        "CK602"
    ]


def test_output_that_is_not_finite_names_the_first_module() -> None:
    first = {"module": "model.layers.3.self_attn.q_proj", "class": "Linear", "nan": True, "inf": False}
    findings, _ = run(None, {"runs": [passed(finite=False, first_non_finite=first)]})
    assert [(f.check, f.names) for f in findings] == [("CK603", ("model.layers.3.self_attn.q_proj",))]


def test_a_strange_output_is_the_checkpoints_where_its_values_are_strange() -> None:
    first = {"module": "model.layers.3.self_attn.q_proj", "class": "Linear", "nan": True, "inf": False}
    runs = [
        passed(finite=False, first_non_finite=first),
        passed(first_non_finite=first),
        passed(fingerprint={**PRINT, "flat": True}),
    ]
    usual: dict[str, Any] = {"dtype": "BF16", "shape": (4, 4), "count": 16, "std": 1.0, "low": -1.0, "high": 1.0}
    stats = [TensorStats(name="model.layers.3.mlp.up_proj.weight", nan=nan, **usual) for nan in (1, 0)]
    for stat, blame in zip(stats, ("checkpoint", "undecidable"), strict=True):
        values = judge_values(Observed(stats=(stat,), initializer_range=0.02))[0]
        findings, _ = run(None, {"runs": runs}, values=values)
        assert [(f.check, f.blame) for f in findings] == [("CK603", blame), ("CK604", blame), ("CK605", blame)]
    zeros = TensorStats(
        name="embeddings.token_type_embeddings.weight", zeros=16, **usual | {"std": 0.0, "low": 0.0, "high": 0.0}
    )
    noted = judge_values(Observed(stats=(zeros,)))[0]  # a table that may well be zero
    assert [f.severity for f in noted] == ["note"]
    assert [f.blame for f in run(None, {"runs": runs[:1]}, values=noted)[0]] == ["undecidable"]


def test_nan_that_does_not_reach_the_output() -> None:
    first = {"module": "model.layers.0.mlp.gate", "class": "Gate", "nan": True, "inf": False}
    assert checks(passed(first_non_finite=first)) == ["CK604"]


def test_inf_on_the_way_is_how_some_modules_mask() -> None:
    first = {"module": "model.layers.0.mlp.gate", "class": "Gate", "nan": False, "inf": True}
    assert checks(passed(first_non_finite=first)) == []


def test_output_that_says_nothing() -> None:
    assert checks(passed(fingerprint={**PRINT, "flat": True})) == ["CK605"]


def test_input_that_nothing_looks_at() -> None:
    assert checks(passed(kind="image", status="ignored", finite=None, fingerprint=None)) == ["CK605"]
    assert checks(passed(kind="image", ignored_from=["processor"])) == ["CK605"]
    assert checks(passed(kind="image", ignored_from=["config"])) == []  # one of our own tries


def test_what_the_repos_processor_makes_must_not_raise() -> None:
    told = "processor: ValueError: Image features and image tokens do not match"
    assert checks(passed(kind="image", raised_from=["processor"], reason=told)) == ["CK602"]
    assert checks(passed(kind="image", raised_from=["config"])) == []  # one of our own tries
    assert checks(passed(kind="image", reason="processor: ImportError: no torchvision")) == []


def test_input_that_could_not_be_made_is_not_passed() -> None:
    findings, skips = run(
        None, {"runs": [passed(kind="video", status="not_run", finite=None, fingerprint=None, reason="no way")]}
    )
    assert (findings, [s.check for s in skips]) == ((), ["CK602", "CK603"])


@pytest.mark.parametrize(
    ("other", "matches"),
    [
        (PRINT, True),
        ({"ids": [7, 3, 9, 1, 4], "logits": [8.05, 6.0, 5.0, 4.0, 2.0]}, True),  # 0.05 of 8 is within a hundredth
        ({"ids": [7, 3, 9, 1, 4], "logits": [8.2, 6.0, 5.0, 4.0, 2.0]}, False),
        (
            {"ids": [7, 3, 9, 4, 1], "logits": [8.0, 6.0, 5.0, 4.0, 2.0]},
            False,
        ),  # 4 and 2 are not near enough to change places
        (
            {"ids": [7, 3, 9, 1, 5], "logits": [8.0, 6.0, 5.0, 4.0, 2.0]},
            True,
        ),  # the last of the five may be another that is as large
        ({"ids": [5, 3, 9, 1, 4], "logits": [8.0, 6.0, 5.0, 4.0, 2.0]}, False),
        ({"ids": [7, 3, 9, 1, 4], "logits": [None, 6.0, 5.0, 4.0, 2.0]}, False),
        ({"ids": [7], "logits": [8.0]}, False),
        ({"ids": [70, 30, 90, 10, 40], "logits": [8.0, 6.0, 5.0, 4.0, 2.0]}, False),
    ],
)
def test_fingerprints_within_the_tolerance(other: dict[str, Any], matches: bool) -> None:
    section = compare({"runs": [passed(fingerprint=other)]}, {"text": PRINT}, 0.01)
    assert section["matched"] is matches
    findings, _ = run(None, {"runs": [passed(fingerprint=other)], "expect": section})
    assert [f.check for f in findings] == ([] if matches else ["CK606"])


def test_other_ids_are_another_output_though_all_are_about_as_large() -> None:
    """Logits around 20 that lie within 1 % of each other say nothing about which ids they belong to."""
    near = [20.2, 20.15, 20.12, 20.1, 20.05]
    ours = {"ids": [910, 911, 912, 913, 914], "logits": near, "flat": False}
    swapped = {"ids": [11, 10, 12, 13, 99], "logits": near, "flat": False}
    expected = {"text": {"ids": [10, 11, 12, 13, 14], "logits": near}}
    assert not compare({"runs": [passed(fingerprint=ours)]}, expected, 0.01)["matched"]
    assert compare({"runs": [passed(fingerprint=swapped)]}, expected, 0.01)["matched"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 5}, "seed 5"),
        ({"inputs_from": "processor"}, "made from the processor"),
        ({"inputs": {"input_ids": [1, 128]}}, "input_ids is 1x128, the expected one's was 1x64"),
    ],
)
def test_outputs_of_other_inputs_are_not_compared(change: dict[str, Any], why: str) -> None:
    """A missing package makes the input from the config and not by the processor: no weight has changed."""
    made = {"inputs_from": "config", "inputs": {"input_ids": [1, 64]}}
    base = {"seed": 0, "runs": [passed(**made)]}
    expected = fingerprints({"forward": base})
    assert compare(base, expected, 0.01)["matched"]
    other = {"seed": change.get("seed", 0), "runs": [passed(**{**made, **change})]}
    section = compare(other, expected, 0.01)
    assert (section["matched"], section["missing"], section["runs"]) == (False, ["text"], [])
    findings, skips = run(None, {"runs": other["runs"], "expect": section})
    assert findings == ()
    assert [s.check for s in skips] == ["CK606"]
    assert why in skips[0].reason


def test_a_trial_of_some_shards_is_not_compared() -> None:
    section = compare({"runs": [passed()]}, {"text": PRINT}, 0.01, partial=True)
    assert section["reasons"] == {"text": "only some shards were loaded"}


def test_a_kind_without_an_expected_fingerprint_is_a_skip() -> None:
    section = compare({"runs": [passed(), passed(kind="image")]}, {"text": PRINT, "video": PRINT}, 0.01)
    assert section["missing"] == ["image", "video"]
    _, skips = run(None, {"runs": [], "expect": section})
    assert [s.check for s in skips] == ["CK606", "CK606"]


def test_fingerprints_are_found_in_every_form() -> None:
    runs = [passed(), passed(kind="image", fingerprint=None)]
    assert fingerprints({"forward": {"runs": runs}}) == {"text": PRINT}
    assert fingerprints({"runs": runs}) == {"text": PRINT}
    assert fingerprints({"text": PRINT}) == {"text": PRINT}
    for other in (
        [],
        {},
        {"text": {"ids": [1, 1], "logits": [2.0, 2.0]}},
        {"forward": None},
        {"text": {"ids": ["a"], "logits": [1.0]}},
        {"text": {"ids": [1, 2], "logits": [1.0]}},
        7,
    ):
        assert fingerprints(other) == {}


def test_engine_and_replay() -> None:
    assert disagreement("vllm==0.25.1", "fails", "fails", "KeyError") is None
    finding = disagreement("vllm==0.25.1", "loads", "fails", "KeyError: 'q_proj'")
    assert finding is not None
    assert (finding.check, finding.blame) == ("CK607", "undecidable")

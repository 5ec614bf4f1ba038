"""The table of quantised modules: on disk, in the config, in each engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks import schemes
from ckaudit.findings import Quantised, Report
from ckaudit.pipeline import describe
from ckaudit.plan import Plan
from ckaudit.report import json_v1
from ckaudit.report.terminal import render
from tests.test_checks_companions import LINEARS, SCHEMES, W, config, quantised
from tests.toy import checkpoint, plan

METHOD, LEAVES = SCHEMES["packed"]
GROUPS = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}
TOWER = {f"vision.layers.{i}.down_proj.weight": W for i in range(3)}


def rows(source: Checkpoint, *plans: Plan) -> list[tuple[int, str, str, dict[str, str]]]:
    return [(r.count, r.on_disk, r.declared, r.built) for r in schemes.table(source, plans)]


def test_nothing_is_quantised() -> None:
    assert rows(checkpoint({f"{m}.weight": W for m in LINEARS})) == []


@pytest.mark.parametrize(
    ("scheme", "on_disk", "said"),
    [
        ("gptq", "GPTQ or AWQ", "gptq"),
        ("fp8 block", "FP8", "fp8 blocks of 128×128"),
        ("bnb 4-bit", "bitsandbytes 4-bit", "bitsandbytes 4-bit"),
        ("mlx", "MLX", "mlx 4-bit"),
        ("aqlm", "AQLM", "aqlm"),
        ("vptq", "VPTQ", "vptq"),
        ("spqr", "SpQR", "spqr 3-bit"),
        ("higgs", "HIGGS", "higgs 4-bit"),
        ("eetq", "EETQ", "eetq"),
        ("hqq", "HQQ or SINQ", "hqq"),
        ("torchao", "torchao", "torchao"),
        ("fp_quant", "FP-Quant", "fp_quant"),
        ("metal", "Metal", "metal 4-bit"),
    ],
)
def test_what_is_stored_and_what_is_said(scheme: str, on_disk: str, said: str) -> None:
    method, leaves = SCHEMES[scheme]
    assert rows(checkpoint(quantised(leaves), config(method))) == [(len(LINEARS), on_disk, said, {})]


def test_said_nowhere_and_said_elsewhere() -> None:
    tensors = quantised(SCHEMES["fp8 tensor"][1])
    assert rows(checkpoint(tensors)) == [(16, "FP8", "nothing", {})]
    other = {"hf_quant_config.json": b"{}"}
    assert rows(checkpoint(tensors, files=other)) == [(16, "FP8", "in hf_quant_config.json alone", {})]


def test_what_engines_build() -> None:
    source = checkpoint(quantised(LEAVES) | TOWER, config(METHOD | GROUPS | {"ignore": ["vision"]}))
    right = plan(source, list(source.tensors))
    wrong = plan(
        source, [n for n in quantised(LEAVES) if "norm" in n] + [f"{m}.weight" for m in LINEARS], id="other==1"
    )
    blind = plan(source, [], id="blind", not_judged="no torch")
    assert rows(source, right, wrong, blind) == [
        (16, "compressed-tensors, packed", "compressed-tensors 4-bit groups of 32", {"toy==1": "quantised", "other==1": "plain"}),
        (3, "plain", "plain (ignore list)", {"toy==1": "plain", "other==1": "nothing"}),
    ]  # fmt: skip


def test_plain_modules_of_other_names_are_left_out() -> None:
    tensors = quantised(LEAVES) | {"model.embed_tokens.weight": W}
    assert [count for count, *_ in rows(checkpoint(tensors, config(METHOD)))] == [16]


def test_many_rows_are_cut_and_hostile_text_is_harmless() -> None:
    table = tuple(
        Quantised(modules=(f"a.{i}", "b"), count=9 - i, on_disk="[red]x\x1b[2J", declared="plain", built={"toy==1": "plain"})
        for i in range(9)
    )  # fmt: skip
    source = checkpoint(quantised(LEAVES), config(METHOD))
    made = Report(target=describe(source), plans=(), quantisation=table)
    text = render(made)
    assert "\x1b" not in text
    assert "[red]x" in text
    assert "3 rows more" in text
    assert "rows more" not in render(made, verbose=True)
    assert "quantised" not in render(made, quiet=True)
    document: dict[str, Any] = json.loads(json_v1.render(made))
    assert document["quantisation"] == json.loads(msgspec.json.encode(table))

"""The example on the page of every check of values and behaviour. `python -m tests.load_examples` renews them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckaudit.checks import behaviour, values
from ckaudit.checks.observed import Observed, TensorStats
from ckaudit.findings import Finding, Report, ordered
from ckaudit.pipeline import describe
from ckaudit.report.terminal import render
from tests.toy import checkpoint

PAGES = Path(__file__).parent.parent / "docs" / "checks"
_Q = "model.layers.{}.self_attn.q_proj.weight"
_UP = "model.layers.{}.mlp.up_proj.weight"
_TOP = {"of": "logits", "ids": [264, 13, 198, 11, 220], "logits": [12.25, 11.5, 10.875, 10.75, 9.9375], "flat": False}


def _stats(name: str, shape: tuple[int, ...] = (4096, 4096), **fields: Any) -> TensorStats:
    usual = {
        "dtype": "BF16",
        "count": math.prod(shape),
        "low": -0.4,
        "high": 0.4,
        "mean": 1e-5,
        "std": 0.03,
        "kurtosis": 4.5,
    }
    return TensorStats(name=name, shape=shape, **{**usual, **fields})


def _seen(*stats: TensorStats, **more: Any) -> list[Finding]:
    return list(values.run(Observed(stats=stats, initializer_range=0.02, engine="transformers", **more))[0])


def _ran(kind: str = "text", **fields: Any) -> dict[str, Any]:
    usual = {
        "status": "ran",
        "finite": True,
        "first_non_finite": None,
        "fingerprint": _TOP,
        "reason": None,
        "ignored_from": [],
    }
    return {"kind": kind, **usual, **fields}


def _told(
    *runs: dict[str, Any],
    load: dict[str, Any] | None = None,
    expect: dict[str, Any] | None = None,
    values: Sequence[Finding] = (),
) -> list[Finding]:
    return list(behaviour.run(load, {"runs": runs, "expect": expect}, values=values)[0])


def _findings() -> dict[str, list[Finding]]:
    flat = {"mean": 0.0, "std": 0.0, "kurtosis": None}
    stack = [_stats(_UP.format(i), std=0.02 + i / 4000 if i != 5 else 8.7) for i in range(32)]
    culprit = {"module": "model.layers.7.self_attn.q_proj", "class": "Linear", "nan": True, "inf": False}
    gate = {"module": "model.layers.3.mlp.gate", "class": "MoeGate", "nan": True, "inf": False}
    other = _TOP | {"ids": [198, 264, 13, 220, 11], "logits": [14.0, 11.25, 10.5, 10.25, 9.0]}
    disagree = behaviour.disagreement("vllm==0.29.0", "loads", "fails", "KeyError: 'layers.0.q_proj.weight'")
    return {
        "CK501": _seen(_stats(_Q.format(7), nan=100)),
        "CK502": _seen(*(_stats(_UP.format(i), zeros=4096 * 4096, low=0.0, high=0.0, **flat) for i in (30, 31))),
        "CK503": _seen(_stats(_UP.format(4), low=1.0, high=1.0, **flat | {"mean": 1.0})),
        "CK504": _seen(*stack),
        "CK505": _seen(_stats(_Q.format(0)), never_written=("lm_head.weight",)),
        "CK506": _seen(_stats("visual.merger.mlp.0.weight", std=0.02, kurtosis=3.0, mean=0.0), _stats(_Q.format(0))),
        "CK507": _seen(_stats(_UP.format(1)), equal=((_UP.format(1), _UP.format(2)),)),
        "CK508": _seen(_stats("lm_head.weight"), tie_differs=(("lm_head.weight", "model.embed_tokens.weight"),)),
        "CK601": _told(load={"blame": "checkpoint", "error": "RuntimeError: Error(s) in loading: size mismatch for lm_head.weight"}),
        "CK602": _told(_ran(status="raised", reason="RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x4096 and 2048x64)")),
        "CK603": _told(_ran(finite=False, first_non_finite=culprit), values=_seen(_stats(_Q.format(7), nan=100))),
        "CK604": _told(_ran(first_non_finite=gate), values=_seen(_stats("model.layers.3.mlp.gate.weight", nan=1))),
        "CK605": _told(_ran("image", ignored_from=["processor"])),
        "CK606": _told(_ran(), expect=behaviour.compare({"runs": [_ran(fingerprint=other)]}, {"text": _TOP}, 0.01)),
        "CK607": [disagree] if disagree else [],
    }  # fmt: skip


FINDINGS = _findings()


def example(check: str) -> str:
    """The finding of `check` in its case, as the terminal shows it."""
    found = [f for f in FINDINGS[check] if f.check == check][:1]
    report = Report(target=describe(checkpoint(["a"])), plans=(), findings=ordered(found, []))
    lines = [line.rstrip() for line in render(report, width=110).split("\n")]
    start = next(i for i, line in enumerate(lines) if f" {check} " in line)
    stop = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith("  "))
    return "\n".join(lines[start:stop])


def renewed(page: str, check: str) -> str:
    """`page` with its example as the program prints it now."""
    return re.sub(r"(## Example\n\n```\n).*?(\n```\n)\Z", lambda m: m[1] + example(check) + m[2], page, flags=re.DOTALL)


if __name__ == "__main__":
    for check in FINDINGS:
        path = PAGES / f"{check}.md"
        path.write_text(renewed(path.read_text(encoding="utf-8"), check), encoding="utf-8")

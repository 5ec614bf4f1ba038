"""What the terminal and the JSON say of layouts over several ranks and of draft models."""

from __future__ import annotations

import json

from ckaudit.plan import Draft, DraftLayer
from ckaudit.report import json_v1
from ckaudit.report.terminal import render
from tests.reports import good, report

ROWS = (
    {
        "size": 2,
        "pp": 2,
        "ep": True,
        "verdict": "loads",
        "error": None,
        "bytes_per_rank": 2048,
        "ranks": [2048, 1024],
        "lost": [],
    },
    {
        "size": 4,
        "pp": 2,
        "ep": True,
        "verdict": "loads_with_loss",
        "bytes_per_rank": 2048,
        "ranks": [],
        "lost": ["a.b", "c"],
    },
)
DRAFT = Draft("MiniMTPModel", "fails", "KeyError: 'x'", (DraftLayer("model.layers.61", "partial", ("a",), ("b",)),))


def lines(**more: object) -> str:
    return render(report(plans=(good(**more),), findings=()), width=110)


def test_layouts_in_the_terminal() -> None:
    shown = lines(tp=ROWS)
    assert "tp 2 · pp 2 · ep" in shown
    assert "2 names on no rank, such as a.b" in shown
    assert "pp" not in lines(
        tp=({"size": 2, "verdict": "loads", "bytes_per_rank": 2048},)
    )  # sizes alone stay as they were


def test_a_draft_model_in_the_terminal() -> None:
    shown = lines(draft=DRAFT)
    assert "draft: MiniMTPModel fails · partial: model.layers.61" in shown
    assert "KeyError: 'x'" in shown
    assert "draft" not in lines()


def test_both_in_the_json() -> None:
    made = json.loads(json_v1.render(report(plans=(good(tp=ROWS, draft=DRAFT),), findings=())))["engines"][0]
    assert [row["lost"] for row in made["tp"]] == [[], ["a.b", "c"]]
    assert made["tp"][0]["ranks"] == [2048, 1024]
    assert made["draft"]["layers"] == [
        {"path": "model.layers.61", "state": "partial", "names": ["a"], "unwritten": ["b"]}
    ]
    assert json.loads(json_v1.render(report(plans=(good(),), findings=())))["engines"][0]["draft"] is None

"""Every checkpoint under `fixtures/` against its `expected.json`: the verdicts, counts and findings that must come out, and nothing else.

The facts are reasoned from the loaders, with the reason in `why`. A verdict that headers alone leave to the loader's mood is `ANY`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from make_fixtures import fixtures

import ckaudit
from ckaudit.engines import Engine, select
from ckaudit.report import json_v1

FIXTURES = Path(__file__).parent.parent / "fixtures"
EXPECTED = sorted(FIXTURES.glob("*/expected.json"))
CASES = [
    pytest.param(path.parent, case, id=f"{path.parent.name}-{case['engine']}")
    for path in EXPECTED
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]
]


@pytest.fixture(scope="session")
def transformers() -> Engine:
    """One engine, and so one worker, for all fixtures."""
    (engine,) = select("transformers")
    return engine


@pytest.fixture(scope="session", autouse=True)
def _laid_out() -> None:
    """Fixtures that ship a header alone get their file of the right size, all of it a hole."""
    subprocess.run([sys.executable, str(FIXTURES / "make.py")], check=True, stdout=subprocess.DEVNULL)


def told(made: dict[str, Any]) -> list[dict[str, Any]]:
    """The standing findings in the form of `expected.json`: one row a check, severity and party, with all names."""
    rows: dict[tuple[str, str, str], set[str]] = {}
    for f in made["findings"]:
        if f["suppressed_by"] is None:
            rows.setdefault((f["check"], f["severity"], f["blame"]), set()).update(f["names"])
    return [{"check": c, "severity": s, "blame": b, "names": sorted(n)} for (c, s, b), n in sorted(rows.items())]


@pytest.mark.parametrize(("folder", "case"), CASES)
def test_expected(folder: Path, case: dict[str, Any], transformers: Engine) -> None:
    engine = transformers if case["engine"] == "transformers" else case["engine"]
    made = json.loads(json_v1.render(ckaudit.audit(str(folder), [engine], cache=False)))
    assert made["exit_code"] == case["exit_code"]
    (found,) = made["engines"]
    assert case["verdict"] in ("ANY", found["verdict"]), found["error"] or found["not_judged"]
    assert {k: found["summary"][k] for k in case.get("summary", {})} == case.get("summary", {})
    # `names` may be left out where a finding has none or they are not the point.
    wanted = sorted(case["findings"], key=lambda f: (f["check"], f["severity"], f["blame"]))
    assert [
        f if "names" in w else {k: v for k, v in f.items() if k != "names"}
        for f, w in zip(told(made), wanted, strict=True)
    ] == wanted


def test_every_made_fixture_is_in_step_and_expected() -> None:
    for name, files in fixtures().items():
        assert (FIXTURES / name / "expected.json").is_file(), name
        for path, content in files.items():
            assert (FIXTURES / name / path).read_bytes() == content, f"{name}/{path}: run python tests/make_fixtures.py"


@pytest.mark.parametrize("path", EXPECTED, ids=lambda p: p.parent.name)
def test_every_fixture_says_why(path: Path) -> None:
    assert json.loads(path.read_text(encoding="utf-8"))["why"].endswith(".")

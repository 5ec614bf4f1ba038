"""Faults that were reported in public: each is found once and blamed on the right party, and no false alarm is repeated."""

from __future__ import annotations

import re

import pytest

from ckaudit import checks
from ckaudit.checks.catalogue import CHECKS
from ckaudit.findings import Report
from ckaudit.plan import Step
from tests.known_faults.cases import Fault, Kind
from tests.known_faults.page import PAGE, render
from tests.known_faults.table import ELSEWHERE, FAULTS
from tests.test_checks_rewrites import DOTTED, QKV, mapped
from tests.toy import checkpoint, findings, plan

LINK = re.compile(r"[\w.-]+/[\w.-]+/(issues|pull)/[0-9]+")


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.links[0]) for f in FAULTS])
def test_a_report_is_told_as_it_should_be(fault: Fault) -> None:
    made = fault.case()
    found = made.findings if isinstance(made, Report) else checks.run(made[0], made[1:], fault.tp)[0]
    assert sorted((f.check, f.severity, f.blame, f.count) for f in found) == sorted(fault.says), [
        f.message for f in found
    ]
    assert all(f.message and (f.mend or f.severity == "note") for f in found)


def test_every_kind_is_covered() -> None:
    assert {row.kind for row in (*FAULTS, *ELSEWHERE)} == set(Kind)


def test_reports_are_named_by_public_links_and_once() -> None:
    rows = [*FAULTS, *ELSEWHERE]
    assert all(LINK.fullmatch(link) for row in rows for link in row.links)
    assert len({row.links[0] for row in rows}) >= 108


def test_every_row_that_headers_cannot_tell_says_why() -> None:
    known = {c.id for c in CHECKS}
    for row in ELSEWHERE:
        assert row.why, row.links
        assert set(re.findall(r"CK[0-9]{3}", row.why + row.by)) <= known


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python -m tests.known_faults.page writes it"


def test_an_engine_bug_is_not_blamed_on_the_checkpoint() -> None:
    # the same file loads in one release and not in the next
    source = checkpoint(QKV)
    parameters = ["attn.qkv_proj.weight", "attn.qkv_proj.bias"]
    chain = {n: (Step("stacked", ".q_proj", "", n, n),) for n in QKV}
    good = mapped(source, DOTTED, parameters, id="toy==24")
    bad = plan(source, parameters, id="toy==25", chains=chain, raises=True)
    assert {f.blame for f in findings(source, good, bad)} == {"engine"}
    assert all("toy==24" in f.mend for f in findings(source, good, bad))

"""The example on every page of the checks of values and behaviour is what the program prints."""

import pytest

from ckaudit.checks import behaviour, values
from tests.load_examples import FINDINGS, PAGES, example


@pytest.mark.parametrize("check", FINDINGS)
def test_the_example_is_real(check: str) -> None:
    page = (PAGES / f"{check}.md").read_text(encoding="utf-8")
    assert f"```\n{example(check)}\n```" in page, "python -m tests.load_examples renews the pages"


def test_every_check_of_these_families_has_one() -> None:
    assert [c.id for c in (*values.CHECKS, *behaviour.CHECKS)] == list(FINDINGS)

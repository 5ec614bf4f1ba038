"""The example on every page of the name, tensor and config checks is what the program prints."""

import pytest

from ckaudit.checks import catalogue
from tests.check_examples import CASES, PAGES, example


@pytest.mark.parametrize("check", CASES)
def test_the_example_is_real(check: str) -> None:
    page = (PAGES / f"{check}.md").read_text(encoding="utf-8")
    assert f"```\n{example(check)}\n```" in page, "python -m tests.check_examples renews the pages"


def test_every_check_of_these_families_has_one() -> None:
    assert [c.id for c in catalogue.CHECKS if c.id[:3] in ("CK2", "CK3", "CK4")] == CASES

"""The example on every page of the CK80x checks is what the program prints."""

import pytest

from tests.diff_examples import CASES, PAGES, example


@pytest.mark.parametrize("check", CASES)
def test_the_example_is_real(check: str) -> None:
    page = (PAGES / f"{check}.md").read_text(encoding="utf-8")
    assert f"```\n{example(check)}\n```" in page, "python -m tests.diff_examples renews the pages"

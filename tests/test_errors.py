"""Other programs' words, as ckaudit repeats them."""

from __future__ import annotations

import pytest

from ckaudit.errors import in_one_line, words_of


@pytest.mark.parametrize(
    ("error", "words", "line"),
    [
        (ValueError("two\n  lines"), "two lines", "ValueError: two lines"),
        (ValueError(""), "ValueError", "ValueError"),
        (ValueError(" \n"), "ValueError", "ValueError"),
        (KeyError("layers.0"), "'layers.0'", "KeyError: 'layers.0'"),
    ],
)
def test_an_exception_on_one_line(error: Exception, words: str, line: str) -> None:
    assert (words_of(error), in_one_line(error)) == (words, line)


def test_what_is_too_long_ends_with_a_whole_word() -> None:
    assert words_of(ValueError("one two three"), 9) == "one two …"
    assert words_of(ValueError("one two three"), 13) == "one two three"
    assert words_of(ValueError("x" * 20), 9) == "x" * 9 + " …"

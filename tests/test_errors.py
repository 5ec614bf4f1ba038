"""Other programs' words, as ckaudit repeats them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckaudit import naming
from ckaudit.errors import in_one_line, is_own_slip, words_of


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


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_a_slip_of_ckaudit_is_told_from_what_a_loader_raises() -> None:
    assert is_own_slip(raised(lambda: naming.printable(1)))  # type: ignore[arg-type]
    assert not is_own_slip(raised(lambda: {}["a loader's own"]))
    assert not is_own_slip(raised(lambda: naming.numbered_as("a", "b.0", "c")))  # a ValueError may be meant
    assert not is_own_slip(KeyError("never raised"))

"""Patterns from a checkpoint: which are tried. Each risky one here takes longer than the age of the world on `"a" * 60 + "!"`, or might."""

from __future__ import annotations

import pytest

from ckaudit.adapters import peft
from ckaudit.patterns import tame


@pytest.mark.parametrize("text", [r"(a+)+c", r"m.(a|aa)+c", r"(.*)\1", r"(?=a+)b", r".*a.*b.*c.*d.*e", "("])
def test_what_might_not_end_or_is_no_pattern_is_not_tried(text: str) -> None:
    assert not tame(text)


@pytest.mark.parametrize("text", [r".*\.q_proj", r"model\.layers\.\d+\.mlp\..*", "(?:q|k|v)_proj", "lm_head"])
def test_ordinary_patterns_are(text: str) -> None:
    assert tame(text)


def test_an_adapter_with_such_a_pattern_is_left_open_and_does_not_hang() -> None:
    module = "m." + "a" * 60
    assert peft.targets({"target_modules": "m.(a+)+c"}, module) is None
    assert peft.targets({"target_modules": "m.*", "exclude_modules": "m.(a+)+c"}, module) is None
    assert peft.targets({"target_modules": r"m\.a+"}, module) is True
    assert peft.pattern_value({"m.(a+)+c": 8}, module) is None

"""Regular expressions that come with a checkpoint: hostile until they are known to end."""

from __future__ import annotations

import re
import warnings

_RISKY = re.compile(r"\)[*+{]|\\[1-9]|\(\?[^:]")
"""A repeated group, a back reference, a look around: what can make a match take time without end."""
_REPEATS = 4
"""Repeats in one pattern: each may try every split of a name."""


def ends(text: str) -> bool:
    """Whether a match of `text`, read as a pattern or as wildcards, ends soon: nothing risky in it, and few repeats."""
    return not _RISKY.search(text) and len(re.findall(r"(?<!\\)[*+{]", text)) <= _REPEATS


def tame(text: str) -> bool:
    """Whether `text` is a regular expression whose match ends soon."""
    return ends(text) and compiles(text)


def compiles(text: str) -> bool:
    """Whether `text` is a regular expression at all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set": what a stranger's pattern may come to mean one day
            re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True

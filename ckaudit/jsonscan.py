"""The members of one JSON object, one at a time, in bytes that may be broken, hostile or huge. Pure, no I/O.

A JSON library gives all or nothing: it drops repeated keys, stops at the first fault without what came before it, and builds every nested
value on the way. Here a member is two slices of the input; memory stays constant, and time linear, whatever the input holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_WS = rb"[ \t\n\r]*+"
_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
STRING = re.compile(_STRING, re.DOTALL)
"""One JSON string, quotes included, from its opening quote on."""

_KEY = re.compile(_WS + rb"(" + _STRING + rb")" + _WS + rb":" + _WS, re.DOTALL)
FLAT = rb'\{[^{}"]*+(?:' + _STRING + rb'[^{}"]*+)*+\}'
"""Pattern of an object without objects in it, strings and arrays allowed: what every tensor entry and every `__metadata__` is."""
_FLAT = re.compile(FLAT, re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\[\]{}\":]++")
_STRUCTURE = re.compile(rb'["{}\[\]]')
_NEXT = re.compile(_WS + rb"([,}])")
_OPEN = re.compile(_WS + rb"\{")
_EMPTY = re.compile(_WS + rb"\}")
_BLANK = re.compile(_WS)

MAX_STRUCTURE = 10_000
"""Brackets and strings inside one nested value, past which it is given up: a tensor entry has fewer than ten."""


class Broken(Exception):  # noqa: N818 - a fact about the input, always caught by the parser that asked
    """The bytes stop being JSON: `at` is the offset of the first byte that does not fit, `reason` what was wanted there."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(f"{reason} at byte {at}")
        self.at = at
        self.reason = reason


class Member(NamedTuple):
    """One `key: value` of an object, both as raw JSON, and where the value starts."""

    key: bytes
    value: bytes
    at: int


def members(data: bytes, start: int = 0, stop: int | None = None) -> Iterator[Member]:
    """The members of the object at `start`, repeated keys included, then nothing but white space up to `stop` (the end, unless given).

    Raises Broken where the object is not well formed; every member before that place has been given by then. A value is only
    as well formed as its brackets and quotes: who decodes it learns the rest.
    """
    stop = len(data) if stop is None else stop
    opening = _OPEN.match(data, start, stop)
    if opening is None:
        raise Broken(start, "no opening brace")
    at = opening.end()
    closing = _EMPTY.match(data, at, stop)
    while closing is None:
        key = _KEY.match(data, at, stop)
        if key is None:
            raise Broken(at, "no key, or a key that is not a string,")
        end = _end_of_value(data, key.end(), stop)
        yield Member(key.group(1), data[key.end() : end], key.end())
        follow = _NEXT.match(data, end, stop)
        if follow is None:
            raise Broken(end, "no comma or closing brace")
        at = follow.end()
        closing = follow if follow.group(1) == b"}" else None
    if not _BLANK.fullmatch(data, closing.end(), stop):
        raise Broken(closing.end(), "something follows the closing brace")


def _end_of_value(data: bytes, at: int, stop: int) -> int:
    for pattern in (_FLAT, STRING, _SCALAR):
        match = pattern.match(data, at, stop)
        if match is not None:
            return match.end()
    depth = 0
    for _ in range(MAX_STRUCTURE):
        mark = _STRUCTURE.search(data, at, stop)
        if mark is None:
            break
        char = mark.group()
        if char == b'"':
            string = STRING.match(data, mark.start(), stop)
            if string is None:
                raise Broken(mark.start(), "an unfinished string")
            at = string.end()
            continue
        if depth == 0 and char in b"}]":
            raise Broken(mark.start(), "no value")
        depth += 1 if char in b"{[" else -1
        at = mark.end()
        if depth == 0:
            return at
    raise Broken(at, "an unfinished value, or one nested beyond all measure,")


def count_strings(text: bytes) -> int:
    """How many strings well-formed JSON holds, keys included: more than a decoder kept means that a key was there twice."""
    if b"\\" in text:
        return sum(1 for _ in STRING.finditer(text))
    return text.count(b'"') // 2


def excerpt(raw: bytes) -> str:
    """At most 60 bytes of the input as printable ASCII, to show in a message."""
    text = raw[:60].decode("ascii", "backslashreplace")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text + ("…" if len(raw) > 60 else "")

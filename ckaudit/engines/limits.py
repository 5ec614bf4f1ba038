"""Numbers in a config that no loader comes to the end of: a model is built layer by layer, long before its weights are looked at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_COUNTS = re.compile(r"(^|_)(n_)?(layers?|experts?|blocks?|stages?|depths?|labels?)$")
"""Last words of keys that say how many modules (or names of classes) are made. Facts: the configurations of transformers."""
_FEW = 100_000
"""Modules that are made in seconds, whether or not there are tensors for them."""
_LONGEST = 40
"""Digits of a number that are told."""


def beyond_reason(config: Mapping[str, Any] | None, tensors: int) -> str | None:
    """Why a model of this config is not to be built: it counts more of something than there are tensors; None when it may be."""
    most = max(_FEW, tensors)
    for key, value in _counts(config or {}):
        if value > most:
            said = str(value) if value.bit_length() < 3 * _LONGEST else f"a number of {value.bit_length()} bits"
            return f"config.json says {key}: {said}, and there are {tensors:,} tensors; a model of so many is not built"
    return None


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    queue: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    for path, section in queue:
        for key, value in section.items():
            if isinstance(value, dict) and len(queue) < 200:
                queue.append((f"{path}{key}.", value))
            elif _COUNTS.search(str(key)):
                numbers = value if isinstance(value, list) else [value]
                yield from ((f"{path}{key}", n) for n in numbers if isinstance(n, int) and not isinstance(n, bool))

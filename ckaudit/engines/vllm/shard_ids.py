"""Which part of a fused parameter a loader says that it is writing: the shard and expert ids that its functions were called with."""

from __future__ import annotations

import sys
from functools import lru_cache
from types import CodeType
from typing import Any

_SHARD = ("loaded_shard_id", "shard_id")
_EXPERT = "expert_id"
_FRAMES = 12  # how far up a write looks


def spoken(depth: int = 1) -> str | None:
    """`q`, `0`, `0-2`, `expert 3 w1`, from the frames above the caller's, or above that `depth`; None where none says.

    Only what a function was called with counts: `load_weights` has loop variables of the same names, left from another weight.
    """
    frame: Any = sys._getframe(depth)
    shard = expert = None
    for _ in range(_FRAMES):
        frame = frame.f_back
        if frame is None or (shard is not None and expert is not None):
            break
        named = _arguments(frame.f_code)
        if not named:
            continue
        local = frame.f_locals
        if shard is None:
            shard = next((local.get(n) for n in named if n != _EXPERT), None)
        if expert is None and _EXPERT in named:
            expert = local.get(_EXPERT)
    expert = expert if isinstance(expert, int) else None
    if isinstance(shard, str | int | tuple):
        text = f"{shard[0]}-{shard[-1]}" if isinstance(shard, tuple) and shard else str(shard)
        return text if expert is None else f"expert {expert} {text}"
    return None if expert is None else f"expert {expert}"


@lru_cache(maxsize=4096)
def _arguments(code: CodeType) -> tuple[str, ...]:
    """The arguments of a function that say which part is written."""
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return tuple(n for n in (*_SHARD, _EXPERT) if n in named)

"""The same checkpoint spread over several ranks: whether each rank loads its share, and whether all of it lands somewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines import EngineOptions
from ckaudit.engines.vllm import stubs
from ckaudit.engines.vllm.attempt import Attempt
from ckaudit.engines.vllm.design import parameter_by_design
from ckaudit.engines.vllm.files import SAFETENSORS
from ckaudit.engines.vllm.ranks import Layout
from ckaudit.engines.vllm.words import message
from ckaudit.errors import is_own_slip
from ckaudit.header import DTYPE_BITS

PP, EP = "pipeline_parallel_size", "enable_expert_parallel"
"""vLLM's own names of the options that make a layout."""

Load = Callable[[Sequence[TensorSpec], Layout, int], Attempt]


def layouts(options: EngineOptions) -> tuple[Layout, ...]:
    """The layouts that were asked for: each tensor-parallel size, with the other two options; one alone where no size was given."""
    pp, ep = int(options.vllm.get(PP) or 1), bool(options.vllm.get(EP))
    sizes = options.tp or ((1,) if pp > 1 or ep else ())
    return tuple(Layout(size, pp, ep) for size in sizes)


class Alone(NamedTuple):
    """What one rank that holds all of the model came to, and the checkpoint's config."""

    attempt: Attempt
    config: Mapping[str, Any]


def row(layout: Layout, load: Load, tensors: Sequence[TensorSpec], alone: Alone, deadline: float) -> dict[str, Any]:
    """What one layout comes to: the verdict over all its ranks, the release's own words, the bytes of parameters of each rank that was
    loaded and of the fullest, and the checkpoint tensors that no rank takes although one that holds all (`alone`) does."""
    out: dict[str, Any] = {
        "size": layout.tp, "pp": layout.pp, "ep": layout.ep, "verdict": "not_judged", "error": None, "bytes_per_rank": None,
        "ranks": [], "lost": [],
    }  # fmt: skip
    seen: list[Attempt] = []
    for rank in layout.ranks():
        if time.monotonic() > deadline:
            return out | {"error": f"the budget of time was used up before rank {rank}"}
        try:
            attempt = load(tensors, layout, rank)
        except Exception as error:  # noqa: BLE001  (a layout that the release refuses; it built the model on one rank)
            verdict = "not_judged" if stubs.touched(error) or is_own_slip(error) else "fails"
            return out | {"verdict": verdict, "error": message(error)}
        if attempt.raised is not None:
            verdict = "fails" if attempt.raised.excuse is None else "not_judged"
            return out | {"verdict": verdict, "error": message(attempt.raised.error)} | _bytes([*seen, attempt])
        seen.append(attempt)
    lost = list(_lost(seen, alone))
    return out | {"verdict": "loads_with_loss" if lost else "loads", "lost": lost} | _bytes(seen)


def _bytes(seen: Sequence[Attempt]) -> dict[str, Any]:
    ranks = [_parameter_bytes(attempt) for attempt in seen]
    return {"ranks": ranks, "bytes_per_rank": max(ranks)}


def _parameter_bytes(attempt: Attempt) -> int:
    held = [(shape, dtype) for shape, dtype, buffer in attempt.layout.values() if not buffer]
    return sum(math.prod(shape) * DTYPE_BITS.get(SAFETENSORS.get(dtype, dtype), 8) for shape, dtype in held) // 8


def _lost(seen: Sequence[Attempt], alone: Alone) -> Iterator[str]:
    """Names of checkpoint tensors that land on no rank, then of parameters that a rank leaves unwritten; not what is lost on one rank too.

    Layers of other stages and experts of other ranks are not there, so over all ranks every tensor has to be read.
    """
    for name, whole in alone.attempt.result.tensors.items():
        if whole.read != 0 and all(_unread(attempt, name) for attempt in seen):
            yield name
    for name in dict.fromkeys(n for attempt in seen for n in attempt.result.parameters):
        if any(_gap(attempt, name, alone.config) for attempt in seen) and not _gap(alone.attempt, name, alone.config):
            yield name


def _unread(attempt: Attempt, name: str) -> bool:
    held = attempt.result.tensors.get(name)
    return held is None or held.read == 0


def _gap(attempt: Attempt, name: str, config: Mapping[str, Any]) -> bool:
    held = attempt.result.parameters.get(name)
    if held is None or held.unknown or held.loaded >= held.elements:
        return False
    return parameter_by_design(name, held, attempt.layout[name][2], name in attempt.zeros, config) is None

"""How many placeholder tokens in a text a picture, a video or a sound fills: the model's own part for it is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckaudit.materialize.circumstances import device_lost, out_of_memory
from ckaudit.materialize.classes import first_value
from ckaudit.materialize.media import Tensors, features_method, parameters

_PROJECTOR = re.compile("projector|connector|adapter|aligner|bridge")
_DIFFERS = re.compile(r"tokens?:? \(?(\d+)\)?,? (?:and )?(?:\w+ )*?features:? \(?(\d+)")
"""How models say that a text has too few placeholders, or too many: "tokens: 1, features: 256"."""


def count(model: Any, kind: str, tensors: Tensors, trial: Callable[[int], Tensors]) -> int:
    """Placeholders for these tensors. `trial(n)` makes a whole input with n of them, on the model's device.

    Raises what the part for this kind raises, else what the model does, or ValueError where a model does not show it.
    """
    method = features_method(model, kind)
    refused: Exception | None = None
    if method is not None:
        takes = parameters(method)
        try:
            return rows(method(**{k: v for k, v in tensors.items() if k in takes}))
        except Exception as error:  # it may want the text as well: the whole model is tried
            if out_of_memory(error) or device_lost(error):
                raise
            refused = error
    found, raised = _tried(model, kind, trial)
    if found is not None:
        return found
    raise (
        refused or raised or ValueError(f"{type(model).__name__} does not show how many tokens a {kind} input fills")
    )


def _tried(model: Any, kind: str, trial: Callable[[int], Tensors]) -> tuple[int | None, Exception | None]:
    """What a run with one placeholder shows: the rows of a projector, the number in an error, or that one is enough; and its error."""
    width = int(first_value(getattr(model.config, "text_config", model.config), "hidden_size") or 0)
    made: list[int] = []
    with _watching(model, width, made):
        try:
            model(**trial(1))
        except Exception as error:  # expected: one is rarely the right number
            if out_of_memory(error) or device_lost(error):
                raise
            if differs := _DIFFERS.search(str(error)):
                return int(differs[2]), None
            return (made[-1] if made else None), error
    return made[-1] if made else (1 if features_method(model, kind) is None else None), None


@contextmanager
def _watching(model: Any, width: int, made: list[int]) -> Iterator[None]:
    """Inside, `made` gets the number of rows of every projector output that is `width` wide."""

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim() and output.shape[-1] == width:
            made.append(output.numel() // width)

    handles = [
        m.register_forward_hook(look) for n, m in model.named_modules() if _PROJECTOR.search(n.rpartition(".")[2])
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows(features: Any) -> int:
    """How many tokens the output of a vision or audio part fills."""
    pooled = getattr(features, "pooler_output", None)
    features = features if pooled is None else pooled
    if isinstance(features, torch.Tensor):
        return int(features.numel() // features.shape[-1])
    if isinstance(features, list | tuple):
        return sum(
            rows(part)
            for part in (features if isinstance(features, list) else features[:1] if _nested(features) else features)
        )
    return rows(features.last_hidden_state)


def _nested(features: tuple[Any, ...]) -> bool:
    return bool(features) and isinstance(features[0], list | tuple)

"""Finds the first place in a model whose output is not finite, without a wait on the device while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import msgspec
import torch


class Culprit(msgspec.Struct, frozen=True):
    """A module whose output holds NaN or Inf: its path, its class, and what it holds."""

    module: str
    kind: str
    nan: bool
    inf: bool


class Probe:
    """Watches every module's outputs, in the order in which they are computed: the innermost module comes first."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.ran: set[str] = set()
        """Paths of the modules that computed something."""

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Inside, outputs are looked at."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first(self, *, nan: bool = False) -> Culprit | None:
        """The first module that gave NaN or Inf, or NaN alone: Inf may be meant where the output does not show it.

        -Inf alone is what a mask is made of, and not meant, unless a weight of the module is to blame for it.
        """
        return next((c for c in self._culprits if c.nan or (c.inf and not nan)), None)

    @cached_property
    def _culprits(self) -> list[Culprit]:
        """What each output held, once the model has run: every look waits for the device."""
        return [
            Culprit(
                name, type(module).__name__, bool(nan.item()), bool(up.item()) or (bool(down.item()) and _gives(module))
            )
            for name, module, nan, up, down in self._seen
        ]

    def _hook(self, name: str) -> Any:
        def look(module: Any, _inputs: Any, output: Any) -> None:
            self.ran.add(name)
            for tensor in tensors_in(output):
                if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
                    value = _wide(tensor.detach())
                    down = torch.isneginf(value).any()
                    self._seen.append((name, module, torch.isnan(value).any(), torch.isposinf(value).any(), down))

        return look


def _gives(module: Any) -> bool:
    """Whether a module's own weights explain -Inf: one is not finite, or so short a dtype may overflow in a matrix."""
    own = [p.detach() for p in module.parameters(recurse=False) if p.is_floating_point() and not p.is_meta]
    short = not module._modules and any(p.dtype == torch.float16 and p.dim() > 1 for p in own)
    return short or not all(bool(torch.isfinite(_wide(p)).all().item()) for p in own)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of one byte as float32: torch tells of no others whether they are finite."""
    return tensor.float() if tensor.itemsize == 1 else tensor


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Every tensor in a model's output, however it is packed."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for member in value.values():
            yield from tensors_in(member, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for member in value:
            yield from tensors_in(member, depth - 1)

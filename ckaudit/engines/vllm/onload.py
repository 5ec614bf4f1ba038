"""What a release does while it loads and that needs a GPU: left out, or done the plain way. Where the weights go is the same."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

_FAST_READERS = ("fastsafetensors_weights_iterator", "instanttensor_weights_iterator")
"""Readers of the load formats of the same names: other ways to bring the same files onto a GPU."""


@contextmanager
def plainly(model: Any) -> Iterator[None]:
    """Inside this context nothing turns weights into a kernel's layout (a release that quantises as it loads does it layer by layer), no
    layer that the release put on `meta` itself is made anew, as everything stays there, and files are read by the plain reader."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading = _nothing
    with ExitStack() as stack:
        with suppress(ImportError):
            layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
            stack.enter_context(patch.object(layerwise, "materialize_layer", _nothing))
        loader: Any = importlib.import_module("vllm.model_executor.model_loader.default_loader")
        for name in _FAST_READERS:
            if hasattr(loader, name):
                stack.enter_context(patch.object(loader, name, _plain_reader))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _plain_reader(files: list[str], *_: Any, **__: Any) -> Any:
    weight_utils: Any = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
    return weight_utils.safetensors_weights_iterator(files, False)

"""Plant faults in a healthy model, one at a time, to learn whether perplexity would notice them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ckaudit.perplexity.encode import Encoder


class NotApplicable(Exception):  # noqa: N818  no error: the fault has no place in this model
    """The model has nothing that this fault could be planted in."""


Plant = Callable[[Any, Encoder], AbstractContextManager[None]]


def _text_layers(model: Any) -> list[Any]:
    """Decoder layers of the language model: the list of as many modules as its config says, outside vision and audio towers."""
    import torch

    config = getattr(model.config, "get_text_config", lambda: model.config)()
    count = getattr(config, "num_hidden_layers", None)
    towers = ("vis", "audio", "image", "encoder")
    for name, module in model.named_modules():
        of_a_tower = any(tower in name for tower in towers)
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and not of_a_tower:
            return list(module)
    raise NotApplicable("no list of decoder layers found")


def _attentions(model: Any) -> list[Any]:
    """Modules with separate query and key projections, in the decoder layers."""
    found = [
        m for layer in _text_layers(model) for m in layer.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")
    ]
    if not found:
        raise NotApplicable("no attention with separate q and k projections found")
    return found


@contextmanager
def _kept(tensors: list[Any]) -> Iterator[None]:
    """Restore `tensors` in place on the way out."""
    import torch

    saved = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(tensors, saved, strict=True):
                tensor.copy_(old)


@contextmanager
def channels_swapped(_model: Any, encoder: Encoder) -> Iterator[None]:
    """Pictures arrive as BGR instead of RGB."""
    if not encoder.sees:
        raise NotApplicable("the model takes no pictures")
    real = encoder.picture

    def swapped(data: bytes) -> Any:
        from PIL import Image

        return Image.merge("RGB", real(data).split()[::-1])

    encoder.picture = swapped
    try:
        yield
    finally:
        encoder.picture = real


@contextmanager
def query_key_swapped(model: Any, _encoder: Encoder) -> Iterator[None]:
    """q and k of every decoder layer's attention change places (with fewer key heads: k and as many rows of q)."""
    import torch

    pairs = [(a.q_proj.weight, a.k_proj.weight) for a in _attentions(model)]
    with _kept([t for pair in pairs for t in pair]):
        with torch.no_grad():
            for query, key in pairs:
                rows = min(query.shape[0], key.shape[0])
                upper = query[:rows].clone()
                query[:rows].copy_(key[:rows])
                key[:rows].copy_(upper)
        yield


@contextmanager
def layer_zeroed(model: Any, _encoder: Encoder) -> Iterator[None]:
    """Every weight of the middle decoder layer is zero, as if it had never been written."""
    import torch

    layers = _text_layers(model)
    tensors = list(layers[len(layers) // 2].parameters())
    with _kept(tensors):
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
        yield


@contextmanager
def rotary_base_changed(model: Any, _encoder: Encoder) -> Iterator[None]:
    """The rotary base is squared (10,000 becomes 100,000,000): every frequency of the text model is squared with it."""
    import torch

    found = [m for name, m in model.named_modules() if hasattr(m, "inv_freq") and "vis" not in name]
    if not found:
        raise NotApplicable("no rotary position embedding found")
    tensors = [m.inv_freq for m in found]
    with _kept(tensors):
        with torch.no_grad():
            for tensor in tensors:
                tensor.pow_(2.0)
        yield


@contextmanager
def image_tokens_shuffled(model: Any, encoder: Encoder) -> Iterator[None]:
    """The vision tower's output tokens come in another (fixed) order."""
    import torch

    tower = next(
        (
            m
            for name, m in model.named_modules()
            if name.rpartition(".")[2] in ("visual", "vision_tower", "vision_model")
        ),
        None,
    )
    if tower is None or not encoder.sees:
        raise NotApplicable("no vision tower found")

    def shuffled(tensor: Any) -> Any:
        axis = max(tensor.ndim - 2, 0)
        order = torch.randperm(tensor.shape[axis], generator=torch.Generator().manual_seed(0)).to(tensor.device)
        return tensor.index_select(axis, order)

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return shuffled(output)
        for key, value in list(output.items()):
            if isinstance(value, torch.Tensor) and value.ndim >= 2:
                output[key] = shuffled(value)
        return output

    handle = tower.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def shard_at_initialisation(model: Any, _encoder: Encoder) -> Iterator[None]:
    """One shard of one fused matrix stays as initialised: k of the first attention's qkv, drawn anew with the config's spread."""
    import torch

    weight = _attentions(model)[0].k_proj.weight
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    spread = getattr(config, "initializer_range", None) or 1 / math.sqrt(weight.shape[1])
    with _kept([weight]):
        with torch.no_grad():
            fresh = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * spread
            weight.copy_(fresh.to(weight))
        yield


FAULTS: tuple[tuple[str, Plant], ...] = (
    ("RGB to BGR", channels_swapped),
    ("q and k swapped", query_key_swapped),
    ("one layer zeroed", layer_zeroed),
    ("rotary base squared", rotary_base_changed),
    ("image tokens shuffled", image_tokens_shuffled),
    ("one shard of a fused matrix at its initialisation", shard_at_initialisation),
)

"""What models take beside ids, pixels and sound, made by the name of the parameter that takes it: a name means the same in every model.

Sizes come from the config. A name that is not known here is not made: the model then says what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckaudit.materialize.classes import first_value
from ckaudit.materialize.media import Tensors

_REGIONS = 8
"""Regions of a picture that another model has found, steps of a game, words of a question."""


class Beside:
    """Makes what goes beside other inputs, for one config."""

    def __init__(self, config: Any, random: torch.Generator) -> None:
        self._config, self._random = config, random

    def knows(self, names: set[str]) -> bool:
        """Whether any of these parameters can be made."""
        return any(name in _MAKERS for name in names)

    def fill(self, names: set[str], inputs: Tensors) -> Tensors:
        """The inputs with those of these parameters that can be made and are not there."""
        made = dict(inputs)
        for name in sorted(names - set(inputs)):
            value = _MAKERS[name](self, made) if name in _MAKERS else None
            if value is not None:
                made[name] = value
        return made

    def series(self) -> Iterator[Tensors]:
        """Values over time, as (1, time, channels), as (1, time), and as a list of series."""
        config = self._config
        if first_value(config, "state_dim") is not None and first_value(config, "act_dim") is not None:
            yield {}  # the steps of a game: all of them are made by name
            return
        channels = int(first_value(config, "num_input_channels", "input_size") or 1)
        lags = max(first_value(config, "lags_sequence") or [0])
        time = int(first_value(config, "context_length", "max_position_embeddings") or 512) + int(lags)
        yield {"past_values": self.noise(1, time, channels)}
        yield {"past_values": self.noise(1, time)}
        yield {"past_values": [self.noise(time)]}

    def noise(self, *shape: int) -> torch.Tensor:
        """Normal noise of this shape."""
        return torch.randn(shape, generator=self._random)

    def part(self, key: str) -> Any:
        """The config of a part; None where there is none."""
        return getattr(self._config, key, None)

    def size(self, *keys: str) -> int | None:
        """The first of these settings that is a number."""
        value = first_value(self._config, *keys)
        return int(value) if isinstance(value, int) else None


_Maker = Callable[[Beside, Tensors], torch.Tensor | None]


def _noise(*lead: int, keys: tuple[str, ...]) -> _Maker:
    """Noise of these sizes, and of one that the config names; nothing where it names none."""

    def make(beside: Beside, _inputs: Tensors) -> torch.Tensor | None:
        last = beside.size(*keys)
        return None if last is None else beside.noise(*lead, last)

    return make


def _tensor(inputs: Tensors, *names: str) -> torch.Tensor | None:
    """The first of these inputs that is there and a tensor."""
    return next((value for name in names if isinstance(value := inputs.get(name), torch.Tensor)), None)


def _tokens(inputs: Tensors) -> int | None:
    ids = _tensor(inputs, "input_ids")
    return None if ids is None else ids.shape[1]


def _boxes(beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """(1, n, 4): the left, upper, right and lower edge of each word on its page."""
    count = _tokens(inputs)
    edge = min(beside.size("max_2d_position_embeddings") or 1001, 1001)
    if count is None:
        return None
    corner = torch.arange(count) % (edge // 2)
    return torch.stack([corner, corner, corner + edge // 4, corner + edge // 4], dim=-1)[None]


def _picture_places(beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """(1, n): the words that the picture takes the place of."""
    count, places = _tokens(inputs), beside.size("latent_query_num")
    if count is None or places is None or "pixel_values" not in inputs:
        return None
    return (torch.arange(count) < places).long()[None]


def _tiles_seen(_beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """(1, n, pictures, tiles): every word looks at every tile."""
    count, tiles = _tokens(inputs), _tensor(inputs, "aspect_ratio_mask")
    if count is None or tiles is None:
        return None
    return torch.ones((1, count, *tiles.shape[1:]), dtype=torch.long)


def _sound_mask(_beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """(1, time): all of the sound is sound."""
    sound = _tensor(inputs, "input_features", "input_values")
    return None if sound is None else torch.ones((1, max(sound.shape[1:])), dtype=torch.long)


def _like(name: str, *, one: bool = False) -> _Maker:
    def make(beside: Beside, inputs: Tensors) -> torch.Tensor | None:
        other = _tensor(inputs, name)
        if other is None:
            return None
        return torch.ones_like(other) if one else beside.noise(*other.shape)

    return make


def _pixels_seen(_beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    pixels = _tensor(inputs, "pixel_values")
    return None if pixels is None or pixels.dim() != 4 else torch.ones((1, *pixels.shape[-2:]), dtype=torch.long)


def _pictures_seen(_beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """(1, pictures): all of them are there. Where a mask of pixels is meant, the model can do without."""
    pixels = _tensor(inputs, "pixel_values")
    return None if pixels is None or pixels.dim() != 5 else torch.ones(pixels.shape[:2], dtype=torch.bool)


def _looked_at(_beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """(1, n, pictures): every word looks at every picture."""
    count, pixels = _tokens(inputs), _tensor(inputs, "pixel_values")
    if count is None or pixels is None or pixels.dim() != 5:
        return None
    return torch.ones((1, count, pixels.shape[1]), dtype=torch.long)


def _enlarged(beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    """The same pictures for a second vision part that wants them larger."""
    pixels, side = _tensor(inputs, "pixel_values"), getattr(beside.part("high_res_vision_config"), "image_size", None)
    return None if pixels is None or not isinstance(side, int) else beside.noise(*pixels.shape[:-2], side, side)


def _words(beside: Beside, _inputs: Tensors) -> torch.Tensor:
    return torch.ones((1, beside.size("task_seq_len") or _REGIONS), dtype=torch.long)


def _times(key: str, features: str) -> _Maker:
    """(1, time, features) beside the values of a series, or where `key` is given as far ahead as the config says."""

    def make(beside: Beside, inputs: Tensors) -> torch.Tensor | None:
        past, count = _tensor(inputs, "past_values"), beside.size(features)
        if past is None or count is None:
            return None
        return beside.noise(1, (beside.size(key) or 1) if key else past.shape[1], count)

    return make


def _future(beside: Beside, inputs: Tensors) -> torch.Tensor | None:
    past, ahead = _tensor(inputs, "past_values"), beside.size("prediction_length")
    if past is None or ahead is None:
        return None
    return beside.noise(1, ahead, *past.shape[2:])


def _actions(beside: Beside, _inputs: Tensors) -> torch.Tensor | None:
    size = beside.size("act_dim")
    return None if size is None else beside.noise(1, _REGIONS, size)


_MAKERS: dict[str, _Maker] = {
    "bbox": _boxes,
    "image_embeds_position_mask": _picture_places,
    "cross_attention_mask": _tiles_seen,
    "qformer_input_ids": _words,
    "qformer_attention_mask": _words,
    "task_inputs": _words,
    "lang_ids": lambda _b, _i: torch.zeros(1, dtype=torch.long),
    "visual_feats": _noise(1, _REGIONS, keys=("visual_feat_dim",)),
    "visual_pos": _noise(1, _REGIONS, keys=("visual_pos_dim",)),
    "visual_embeds": _noise(1, _REGIONS, keys=("visual_embedding_dim",)),
    "input_features_mask": _sound_mask,
    "feature_attention_mask": _sound_mask,
    "padding_mask": _sound_mask,
    "pixel_mask": _pixels_seen,
    "pixel_attention_mask": _pictures_seen,
    "image_attention_mask": _looked_at,
    "high_res_pixel_values": _enlarged,
    "prompt_pixel_values": _like("pixel_values"),
    "prompt_masks": _like("pixel_values"),
    "state": _noise(1, keys=("max_state_dim",)),
    "past_time_features": _times("", "num_time_features"),
    "past_observed_mask": _like("past_values", one=True),
    "future_time_features": _times("prediction_length", "num_time_features"),
    "future_values": _future,
    "static_real_features": _noise(1, keys=("num_static_real_features",)),
    "states": _noise(1, _REGIONS, keys=("state_dim",)),
    "actions": _actions,
    "rewards": lambda beside, _: beside.noise(1, _REGIONS, 1),
    "returns_to_go": lambda beside, _: beside.noise(1, _REGIONS, 1),
    "timesteps": lambda _b, _i: torch.arange(_REGIONS)[None],
}

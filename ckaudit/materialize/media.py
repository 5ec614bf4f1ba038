"""Pixels, patches, frames and sound of the shapes that a model's own methods take, made from its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ckaudit.materialize.classes import first_value

Tensors = dict[str, Any]
_SIDE = 8
"""Patches along each side of an image: few, and a multiple of every merge factor in use (2, and 2 twice)."""
FRAMES = 4
_LONGEST = 3000
"""Frames of sound: the 30 s of Whisper, the longest window that a model insists on."""
_MELS = (
    "num_mel_bins",
    "feature_size",
    "n_mels",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_dim",
)


class Media:
    """Makes noise for one model; `takes` are the parameters of its forward method."""

    def __init__(self, model: Any, takes: set[str], random: torch.Generator) -> None:
        self._model, self._takes, self._random = model, takes, random
        self._vision = getattr(model.config, "vision_config", None) or model.config
        parts = (getattr(model.config, key, None) for key in ("audio_config", "encoder_config"))
        self._audio = next((part for part in parts if part is not None), model.config)

        self.frames = int(getattr(self._vision, "num_frames", 0) or 0)
        """Pictures that make one input of a model of videos, which may call them pixel values; 0 for other models."""

    def of(self, kind: str) -> Iterator[Tensors]:
        """Ways to make an input of this kind, the likeliest first."""
        return {"image": self._images, "video": self._videos, "audio": self._sounds}[kind]()

    def noise(self, *shape: int) -> torch.Tensor:
        """Normal noise of this shape."""
        return torch.randn(shape, generator=self._random)

    def _images(self) -> Iterator[Tensors]:
        takes = self._feature_parameters("image")
        channels, patch, size = self._picture()
        n = _SIDE * _SIDE
        if "flattened_patches" in takes:  # each with its row and column before its pixels
            places = 1 + torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE)).float()[None]
            patches = torch.cat([places, self.noise(1, n, channels * patch * patch)], dim=-1)
            yield {"flattened_patches": patches, "attention_mask": torch.ones((1, n), dtype=torch.long)}
            return
        if "image_grid_thw" in takes:
            yield {
                "pixel_values": self.noise(n, self._patch_width()),
                "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]]),
            }
        if "target_sizes" in takes:
            yield {"pixel_values": self.noise(1, channels, patch, n * patch), "target_sizes": _grid(1, torch.int32)}
        if "spatial_shapes" in takes:
            mask = torch.ones((1, n), dtype=torch.long)
            yield {
                "pixel_values": self.noise(1, n, channels * patch * patch),
                "spatial_shapes": _grid(1),
                "pixel_attention_mask": mask,
            }
        sizes = {"image_sizes": torch.tensor([[size, size]])}
        variants: list[Tensors] = [{}, sizes] if "image_sizes" in takes else [{}]
        if "image_sizes" in self.own_parameters("image"):
            variants.reverse()
        for extra in variants:
            yield {"pixel_values": self.noise(1, channels, size, size), **extra}
        for tiles in (*([self.frames] if self.frames else []), 1, 2, 3, 5):
            yield {"pixel_values": self.noise(1, tiles, channels, size, size), **variants[0]}

    def _videos(self) -> Iterator[Tensors]:
        takes = self._feature_parameters("video")
        channels, patch, size = self._picture()
        n = _SIDE * _SIDE
        if "video_grid_thw" in takes:
            thw = torch.tensor([[FRAMES, _SIDE, _SIDE]])
            seconds = {"second_per_grid_ts": torch.ones(1)} if "second_per_grid_ts" in self._takes else {}
            yield {
                "pixel_values_videos": self.noise(FRAMES * n, self._patch_width()),
                "video_grid_thw": thw,
                **seconds,
            }
        if "target_sizes_videos" in takes:
            pixels = self.noise(1, channels, patch, FRAMES * n * patch)
            yield {"pixel_values_videos": pixels, "target_sizes_videos": _grid(FRAMES, torch.int32)}
        yield {"pixel_values_videos": self.noise(1, FRAMES, channels, size, size)}
        if self.frames:
            yield {"pixel_values_videos": self.noise(1, self.frames, channels, size, size)}

    def _sounds(self) -> Iterator[Tensors]:
        takes = self._feature_parameters("audio")
        mels = int(first_value(self._audio, *_MELS) or 80)
        frames = min(2 * int(first_value(self._audio, "max_source_positions") or 1500), _LONGEST)
        if "input_values" in takes:
            if first_value(self._audio, "num_mel_bins", "max_length") and hasattr(self._audio, "frequency_stride"):
                yield {"input_values": self.noise(1, int(self._audio.max_length), mels)}  # a spectrogram
            yield {"input_values": self.noise(1, 16000)}
            yield {"input_values": self.noise(1, 1, 16000)}
            return
        masks: list[str] = [k for k in ("feature_attention_mask", "input_features_mask") if k in takes]
        ones = {k: torch.ones((1, frames), dtype=torch.long) for k in masks}
        yield {"input_features": self.noise(1, mels, frames), **ones}
        yield {"input_features": self.noise(1, frames, mels), **ones}
        width = int(getattr(self._audio, "spec_size", 0) ** 2 // mels or frames)
        yield {"input_features": self.noise(1, 1, width, mels)}

    def _feature_parameters(self, kind: str) -> set[str]:
        """What the part for this kind takes; where it has no method of its own, what the model takes."""
        return self._takes | self.own_parameters(kind)

    def own_parameters(self, kind: str) -> set[str]:
        found: set[str] = set()
        for owner in (self._model, getattr(self._model, "model", None)):
            features = getattr(owner, f"get_{kind}_features", None)
            found |= parameters(features) if features is not None else set()
        return found

    def _picture(self) -> tuple[int, int, int]:
        """Channels, patch size and image size."""
        channels = first_value(self._vision, "num_channels", "in_channels", "in_chans") or 3
        patch = _one(first_value(self._vision, "patch_size") or 14)
        return (
            int(channels),
            patch,
            _one(first_value(self._vision, "image_size", "img_size", "input_size") or 16 * patch),
        )

    def _patch_width(self) -> int:
        channels, patch, _ = self._picture()
        return channels * int(first_value(self._vision, "temporal_patch_size") or 1) * patch * patch


def parameters(method: Any) -> set[str]:
    """Names of the parameters of a method."""
    return set(inspect.signature(method).parameters)


def _grid(count: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.tensor([[_SIDE, _SIDE]] * count, dtype=dtype)


def _one(size: Any) -> int:
    return int(size if isinstance(size, int | float) else size[0])

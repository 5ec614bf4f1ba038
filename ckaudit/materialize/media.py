"""Pixels, patches, frames and sound of the shapes that a model's own methods take, made from its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ckaudit.materialize.classes import first_value

Tensors = dict[str, Any]
_SIDE, _THIRDS = 8, 12
"""Patches along each side of an image: few, and a multiple of every merge factor in use (2, and 2 twice; 3)."""
_WIDE = 64
"""Patches along a side that make a picture of thousands of tokens."""
FRAMES = 4
_SAMPLES = 19200
"""Samples of sound: 1.2 s of most models, and a multiple of their strides (320, 640, 1920)."""
_LONGEST = 3000
"""Frames of sound: the 30 s of Whisper, the longest window that a model insists on."""
_MELS = (
    "input_size",
    "num_mel_bins",
    "num_chroma",
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
        merged = first_value(self._vision, "pooling_kernel_size", "spatial_merge_size")
        self._side = _THIRDS if isinstance(merged, int) and merged % 3 == 0 and merged else _SIDE
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
        channels, patch, (high, wide) = self._picture()
        n = self._side**2
        places = takes & {"image_position_ids", "pixel_position_ids"}
        if places:
            pixels = self.noise(1, n, self._patch_width())
            yield {"pixel_values": pixels, **{k: _places(self._side)[None] for k in places}}
        if "grid_thw" in takes:  # a vision part by itself, which may call its patches hidden states
            name = "pixel_values" if "pixel_values" in takes else "hidden_states"
            sizes = {"merge_sizes": torch.ones(1, dtype=torch.long)} if "merge_sizes" in takes else {}
            for pixels in (self.noise(n, self._patch_width()), self.noise(n, channels, patch, patch)):
                yield {name: pixels, "grid_thw": torch.tensor([[1, self._side, self._side]]), **sizes}
            return
        if "aspect_ratio_ids" in takes:
            tiles = int(first_value(self._vision, "max_num_tiles") or 1)
            ones = torch.ones((1, 1), dtype=torch.long)
            yield {
                "pixel_values": self.noise(1, 1, tiles, channels, high, wide),
                "aspect_ratio_ids": ones,
                "aspect_ratio_mask": torch.ones((1, 1, tiles), dtype=torch.long),
            }
        if "flattened_patches" in takes:  # each with its row and column before its pixels
            width = int(first_value(self._vision, "patch_embed_hidden_size") or channels * patch * patch)
            patches = torch.cat([1 + _places(self._side).float()[None], self.noise(1, n, width)], dim=-1)
            yield {"flattened_patches": patches, "attention_mask": torch.ones((1, n), dtype=torch.long)}
            return
        if "image_grid_thw" in takes:
            yield {
                "pixel_values": self.noise(n, self._patch_width()),
                "image_grid_thw": torch.tensor([[1, self._side, self._side]]),
                **({"image_merge_sizes": torch.ones(1, dtype=torch.long)} if "image_merge_sizes" in takes else {}),
            }
            yield {
                "pixel_values": self.noise(n, channels, patch, patch),
                "image_grid_thw": torch.tensor([[1, self._side, self._side]]),
            }
        if "image_grid_hw" in takes:
            yield {"pixel_values": self.noise(n, self._patch_width()), "image_grid_hw": _grid(self._side, 1)}
        if "target_sizes" in takes:
            yield {
                "pixel_values": self.noise(1, channels, patch, n * patch),
                "target_sizes": _grid(self._side, 1, torch.int32),
            }
        if "spatial_shapes" in takes:
            mask = torch.ones((1, n), dtype=torch.long)
            yield {
                "pixel_values": self.noise(1, n, channels * patch * patch),
                "spatial_shapes": _grid(self._side, 1),
                "pixel_attention_mask": mask,
            }
        sizes = {"image_sizes": torch.tensor([[high, wide]])}
        variants: list[Tensors] = [{}, sizes] if "image_sizes" in takes else [{}]
        if "image_sizes" in takes and high > _WIDE * patch:  # of any size: as few patches as elsewhere
            side = self._side * patch
            yield {"pixel_values": self.noise(1, channels, side, side), "image_sizes": torch.tensor([[side, side]])}
        if "image_sizes" in self.own_parameters("image"):
            variants.reverse()
        for extra in variants:
            yield {"pixel_values": self.noise(1, channels, high, wide), **extra}
        for tiles in (*([self.frames] if self.frames else []), 1, 2, 3, 5):
            yield {"pixel_values": self.noise(1, tiles, channels, high, wide), **variants[0]}
        yield {"pixel_values": self.noise(1, n, self._patch_width())}
        yield {"pixel_values": self.noise(n, self._patch_width())}

    def _videos(self) -> Iterator[Tensors]:
        takes = self._feature_parameters("video")
        channels, patch, (high, wide) = self._picture()
        n = self._side**2
        if "video_grid_thw" in takes:
            thw = torch.tensor([[FRAMES, self._side, self._side]])
            seconds: Tensors = {
                k: torch.ones(1) for k in ("second_per_grid_ts", "video_second_per_grid") if k in self._takes
            }
            merged = {"video_merge_sizes": torch.ones(1, dtype=torch.long)} if "video_merge_sizes" in takes else {}
            for pixels in (
                self.noise(FRAMES * n, self._patch_width()),
                self.noise(FRAMES * n, channels, patch, patch),
            ):
                yield {"pixel_values_videos": pixels, "video_grid_thw": thw, **seconds, **merged}
        if "video_position_ids" in takes:
            pixels = self.noise(1, FRAMES, n, self._patch_width())
            counts = {"num_frames_per_video": torch.tensor([FRAMES])} if "num_frames_per_video" in takes else {}
            yield {
                "pixel_values_videos": pixels,
                "video_position_ids": _places(self._side).expand(1, FRAMES, n, 2).contiguous(),
                **counts,
            }
        if "target_sizes_videos" in takes:
            pixels = self.noise(1, channels, patch, FRAMES * n * patch)
            yield {"pixel_values_videos": pixels, "target_sizes_videos": _grid(self._side, FRAMES, torch.int32)}
        yield {"pixel_values_videos": self.noise(1, FRAMES, channels, high, wide)}
        if self.frames:
            yield {"pixel_values_videos": self.noise(1, self.frames, channels, high, wide)}

    def _sounds(self) -> Iterator[Tensors]:
        takes = self._feature_parameters("audio")
        mels = int(first_value(self._audio, *_MELS) or 80)
        frames = min(2 * int(first_value(self._audio, "max_source_positions") or 1500), _LONGEST)
        if "input_values" in takes:
            if first_value(self._audio, "num_mel_bins", "max_length") and hasattr(self._audio, "frequency_stride"):
                yield {"input_values": self.noise(1, int(self._audio.max_length), mels)}  # a spectrogram
            yield {"input_values": self.noise(1, _SAMPLES)}
            yield {"input_values": self.noise(1, 1, _SAMPLES)}
            return
        for bands in (mels,) if first_value(self._audio, *_MELS) else (mels, 128):
            yield {"input_features": self.noise(1, bands, frames)}
            yield {"input_features": self.noise(1, frames, bands)}
        width = int(getattr(self._audio, "spec_size", 0) ** 2 // mels or frames)
        yield {"input_features": self.noise(1, 1, width, mels)}

    def _feature_parameters(self, kind: str) -> set[str]:
        """What the part for this kind takes; where it has no method of its own, what the model takes."""
        return self._takes | self.own_parameters(kind)

    def own_parameters(self, kind: str) -> set[str]:
        """What the method for this kind takes."""
        features = features_method(self._model, kind)
        return set() if features is None else parameters(features)

    def needed(self, kind: str) -> set[str]:
        """What it cannot do without."""
        features = features_method(self._model, kind)
        return set() if features is None else needed(features)

    def _picture(self) -> tuple[int, int, tuple[int, int]]:
        """Channels, patch size, and the height and width of an image."""
        channels = first_value(self._vision, "num_channels", "in_channels", "in_chans") or 3
        patch = _one(first_value(self._vision, "patch_size") or 14)
        return (
            int(channels),
            patch,
            _pair(first_value(self._vision, "image_size", "img_size", "input_size") or 16 * patch),
        )

    def _patch_width(self) -> int:
        channels, patch, _ = self._picture()
        return channels * int(first_value(self._vision, "temporal_patch_size", "patch_temporal") or 1) * patch * patch


def parameters(method: Any) -> set[str]:
    """Names of the parameters of a method."""
    return set(inspect.signature(method).parameters)


def needed(method: Any) -> set[str]:
    """Names of the parameters that a method cannot do without."""
    given = inspect.signature(method).parameters.values()
    return {p.name for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD} - {"self"}


def features_method(model: Any, kind: str) -> Any:
    """The method of the model, or of the outermost part that has one, which makes embeddings of this kind; None where there is none."""
    for module in model.modules():
        method = getattr(module, f"get_{kind}_features", None)
        if method is not None and parameters(method) - {"args", "kwargs"}:
            return method
    return None


def _places(side: int) -> torch.Tensor:
    """(patches, 2): row and column of every patch."""
    return torch.cartesian_prod(torch.arange(side), torch.arange(side))


def _grid(side: int, count: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.tensor([[side, side]] * count, dtype=dtype)


def _one(size: Any) -> int:
    return int(size if isinstance(size, int | float) else size[0])


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of a size that is one number, both, or a mapping with either name."""
    if isinstance(size, dict):
        size = (size.get("height") or size.get("shortest_edge"), size.get("width") or size.get("shortest_edge"))
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[0]), int(size[-1]))

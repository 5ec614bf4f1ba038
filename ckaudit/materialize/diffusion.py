"""Diffusion transformers and UNets: loaded by diffusers' own `from_pretrained`, run on latents made from the config."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckaudit.checks.observed import Observed
from ckaudit.errors import EngineError
from ckaudit.materialize import layout as layouts
from ckaudit.materialize.job import LoadJob
from ckaudit.materialize.loading import Loaded
from ckaudit.materialize.media import Tensors, parameters
from ckaudit.materialize.values import of_parameters
from ckaudit.materialize.watch import Watch

_SIDE = 16
"""Latent pixels along each side, unless the model was made for fewer."""
_TOKENS = 64


def applies(folder: str) -> bool:
    """Whether the config is one of diffusers."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "_class_name" in config and "_diffusers_version" in config


def pick(folder: str) -> Any:
    """The model class that the config names. Raises EngineError."""
    name = str(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["_class_name"])
    try:
        import diffusers  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise EngineError(
            f"{name} is a model of diffusers, which is not installed.", "pip install diffusers"
        ) from error
    cls = getattr(diffusers, name, None)
    if not inspect.isclass(cls) or not hasattr(cls, "from_pretrained"):
        raise EngineError(f"diffusers {diffusers.__version__} has no model {name!r}.", "Install a release that has.")
    return cls


def load(job: LoadJob, cls: Any, watch: Watch) -> Loaded:
    """The model on its device. Raises whatever the loader raises."""
    dtype = getattr(torch, job.options.dtype) if job.options.dtype not in (None, "auto") else None
    with watch.stage("load"):
        model, info = cls.from_pretrained(
            job.folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
        model = model.to(job.options.device).eval()
    watch.moved(sum(t.nbytes for t in job.tensors))
    with watch.stage("values"):
        stats = of_parameters(model) if job.options.values else ()
    missing = () if job.partial else tuple(sorted(info["missing_keys"]))
    observed = Observed(stats=stats, never_written=missing, partial=job.partial, compared=False, engine="diffusers")
    return Loaded(model, info, observed, layouts.plan(job.tensors, str))


class LatentRecipes:
    """Makes inputs for one model of diffusers, by what its forward method takes."""

    def __init__(self, model: Any, seed: int) -> None:
        self.config, self.takes = model.config, parameters(model.forward)
        self._random = torch.Generator().manual_seed(seed)

    def kinds(self) -> tuple[str, ...]:
        """One kind: `latent`."""
        return ("latent",)

    def candidates(self, kind: str) -> Iterator[Callable[[], Tensors]]:  # noqa: ARG002  (there is but one)
        """The one way of making it."""
        yield self.latents

    def latents(self) -> Tensors:
        """Noise at one time step, with a prompt of 64 random embeddings where the model takes one."""
        inputs: Tensors = {
            "sample" if "sample" in self.takes else "hidden_states": self._latent(),
            "timestep": torch.tensor([500]),
        }
        width = self._first("joint_attention_dim", "caption_channels", "cross_attention_dim", "text_dim")
        if "encoder_hidden_states" in self.takes and width:
            inputs["encoder_hidden_states"] = self._noise(1, _TOKENS, int(width))
        if "encoder_hidden_states_mask" in self.takes:
            inputs["encoder_hidden_states_mask"] = torch.ones((1, _TOKENS), dtype=torch.long)
        if "pooled_projections" in self.takes:
            inputs["pooled_projections"] = self._noise(1, int(self._first("pooled_projection_dim") or 0))
        if "class_labels" in self.takes and self._first("num_embeds_ada_norm", "num_class_embeds"):
            inputs["class_labels"] = torch.tensor([1])
        if "img_ids" in self.takes:
            rows = torch.arange(_TOKENS)
            inputs["img_ids"] = torch.stack([torch.zeros(_TOKENS), rows // 8, rows % 8], dim=1)
            inputs["txt_ids"] = torch.zeros(_TOKENS, 3)
        if "img_shapes" in self.takes:
            inputs["img_shapes"] = [[(1, 8, 8)]]
        if "guidance" in self.takes and self._first("guidance_embeds"):
            inputs["guidance"] = torch.tensor([3.5])
        if "added_cond_kwargs" in self.takes and "encoder_hidden_states" in inputs:
            inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
        return inputs

    def _latent(self) -> torch.Tensor:
        channels = int(self._first("in_channels") or 4)
        if self.takes & {"img_ids", "img_shapes"}:  # these take patches as tokens
            return self._noise(1, _TOKENS, channels)
        patch = self._first("patch_size")
        if isinstance(patch, list | tuple) and len(patch) == 3:  # a video: frames, height, width
            return self._noise(1, channels, 2 * int(patch[0]), _SIDE, _SIDE)
        size = self._first("sample_size")
        side = min(_SIDE, size) if isinstance(size, int) else _SIDE
        return self._noise(1, channels, side, side)

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def _first(self, *keys: str) -> Any:
        return next((v for k in keys if (v := self.config.get(k)) is not None), None)

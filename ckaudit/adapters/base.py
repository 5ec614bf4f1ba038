"""What an adapter is laid on: a model, a component of a diffusion pipeline, or the pipeline with the components that count."""

from __future__ import annotations

import re

import msgspec

from ckaudit.adapters import Adapter
from ckaudit.checkpoint import Checkpoint, components, read_checkpoint
from ckaudit.progress import Progress
from ckaudit.source import Source


class Base(msgspec.Struct, frozen=True):
    """A checkpoint, and where that is a pipeline the components that the adapter names."""

    checkpoint: Checkpoint
    components: dict[str, Checkpoint] = {}

    @property
    def is_model(self) -> bool:
        """Whether it is one for the engines: not a pipeline, nor a component that diffusers loads."""
        return (
            not self.components
            and bool(self.checkpoint.tensors)
            and "_class_name" not in (self.checkpoint.config or {})
        )


def read_base(source: Source, adapter: Adapter, *, progress: Progress, code: bool = False, jobs: int = 32) -> Base:
    """The base at `source`; of a pipeline those components that `adapter` may have modules of. Raises SourceError."""
    checkpoint = read_checkpoint(source, progress=progress, code=code, jobs=jobs)
    if checkpoint.tensors and "model_index.json" not in checkpoint.texts:
        return Base(checkpoint)  # sub-folders of a model hold something else
    folders = [c for c in components(source.files()) if c in _wanted(adapter)]
    return Base(checkpoint, {c: read_checkpoint(source, progress=progress, jobs=jobs, folder=c) for c in folders})


def _wanted(adapter: Adapter) -> set[str]:
    found = {u.component for u in adapter.units}
    flat = any(u.parts[0].flat for u in adapter.units)  # kohya calls every denoiser unet
    return found | ({"transformer"} if flat else set()) | ({"unet", "transformer"} if "" in found else set())


def kind_of(checkpoint: Checkpoint) -> str | None:
    """Which component of a pipeline a checkpoint is, by the class that its config names; None where that says nothing."""
    config = checkpoint.config or {}
    named = config.get("_class_name")
    if isinstance(named, str):
        return "unet" if "UNet" in named else "transformer" if "Transformer" in named else None
    text = any(re.search("CLIPText|T5Encoder", name) for name in checkpoint.architectures)
    return "text_encoder" if text else None

"""The repo's own processor and chat template: how text and pictures become model inputs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckaudit.errors import EngineError, words_of


def load_processor(folder: Path, *, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """The processor (or, for a text model, the tokenizer) of the repo in `folder`.

    `min_pixels` and `max_pixels` override the repo's limits on a picture's height x width, in pixels.
    Raises EngineError when the repo has none, or when a package that it needs is not installed.
    """
    from transformers import AutoTokenizer

    try:
        if not (folder / "processor_config.json").is_file() and not (folder / "preprocessor_config.json").is_file():
            return AutoTokenizer.from_pretrained(folder)
        processor = _whole(folder) if find_spec("torchvision") else _without_video(folder)
    except ImportError as error:
        said = str(error).strip().split(". ")[0].removesuffix(".")  # what follows is advice for notebooks
        raise EngineError(
            f"The processor of {folder.name} needs a package that is not installed: {said}.",
            "Install it; pictures take the extra ckaudit[ppl].",
        ) from error
    except (ValueError, OSError, KeyError) as error:
        raise EngineError(
            f"No processor or tokenizer can be loaded from {folder}: {words_of(error)}",
            "The repo must hold tokenizer and processor files.",
        ) from error
    _limit_pixels(processor, min_pixels, max_pixels)
    return processor


def _whole(folder: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)


def _without_video(folder: Path) -> Any:
    """The repo's processor class without its video half, which needs torchvision; pictures and text do not."""
    import transformers

    declared = [json.loads(p.read_text()) for p in folder.glob("*_config.json")]
    name = next((d["processor_class"] for d in declared if isinstance(d, dict) and "processor_class" in d), None)
    whole = getattr(transformers, name or "", None)
    if whole is None or "video_processor" not in whole.get_attributes():
        return _whole(folder)

    def check(self: Any, part: str, value: Any) -> Any:
        return None if part == "video_processor" else whole.check_argument_for_proper_class(self, part, value)

    image_only = type(whole.__name__, (whole,), {"check_argument_for_proper_class": check})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    # The image processor stands in for the video half: constructors read settings off it, and no video ever comes.
    return image_only(
        image_processor=images, tokenizer=tokenizer, video_processor=images, chat_template=tokenizer.chat_template
    )


def _limit_pixels(processor: Any, low: int | None, high: int | None) -> None:
    """Set the limits in the spelling of this image processor: edges that hold areas (the Qwen2-VL family), or attributes."""
    images = getattr(processor, "image_processor", None)
    if images is None:
        return
    for key, edge, value in (("min_pixels", "shortest_edge", low), ("max_pixels", "longest_edge", high)):
        size = getattr(images, "size", None)
        if value is None:
            continue
        if isinstance(size, dict) and edge in size:
            size[edge] = value
        elif getattr(size, edge, None) is not None:
            setattr(size, edge, value)
        else:
            setattr(images, key, value)


def pixel_limits(processor: Any) -> dict[str, int | None]:
    """The limits in force, in pixels of height x width: part of every result, since they change the number of image tokens."""
    images = getattr(processor, "image_processor", None)
    size = getattr(images, "size", None) or {}
    edges = size if isinstance(size, dict) else vars(size)
    return {
        "min_pixels": getattr(images, "min_pixels", None) or edges.get("shortest_edge"),
        "max_pixels": getattr(images, "max_pixels", None) or edges.get("longest_edge"),
    }

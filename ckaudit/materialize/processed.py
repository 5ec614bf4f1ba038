"""Inputs made by the repo's own processor and chat template, as its users make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ckaudit.materialize.template import ChatTemplate

_SIDE = 224
_FRAMES = 4
_RATE = 16000
_ROOMY = 512
"""Tokens. A model with fewer positions may not take a second sentence."""
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "length"}
_SENTENCE = (
    "The quick brown fox jumps over the lazy dog while seven wizards quietly examine a box of liquor jugs. "
    "Describe what you notice, step by step, and then say what could be learned from it. "
)


def has_processor(folder: str) -> bool:
    """Whether the repo holds files that a processor or a tokenizer is made from."""
    names = (
        "processor_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
    )
    return any((Path(folder) / name).exists() for name in names)


def make(
    folder: str,
    kind: str,
    length: int,
    seed: int,
    *,
    trust_remote_code: bool,
    room: int | None = None,
    marks: bool = True,
    frames: int = 0,
) -> dict[str, Any]:
    """Inputs of one kind with at least `length` tokens, at most the `room` that the model has for text (None: without end).

    `marks`: whether a placeholder in the text stands for pixels or sound. `frames`: how many pictures a model of videos that calls them
    pixel values takes at once. Raises whatever the processor raises when it cannot.
    """
    processor = _processor(folder, trust_remote_code)
    random = np.random.default_rng(seed)
    media: dict[str, Any] = {}
    if kind == "image":
        media["images"] = [random.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8) for _ in range(frames or 1)]
    elif kind == "video":
        media["videos"] = [random.integers(0, 256, (_FRAMES, _SIDE, _SIDE, 3), dtype=np.uint8)]
        media["do_sample_frames"] = False  # these frames are all there is: nobody could say of how many seconds
    elif kind == "audio":
        media["audio"] = [random.standard_normal(_RATE).astype(np.float32)]
    if not _reads(processor):
        return dict(processor(*media.values(), return_tensors="pt"))
    best: dict[str, Any] | None = None
    for text in _texts(room):
        prompt = _prompt(processor, kind, text, marks=marks)
        inputs = dict(processor(text=prompt, **media, return_tensors="pt"))
        inputs.pop("labels", None)  # text beside sound is what it should be written down as: no input
        if kind != "text" and not inputs.keys() - _OF_TEXT:  # a tokenizer alone: of a pair of encoders' files, say
            raise ValueError(f"the repo's processor makes nothing of {kind} input")
        if "input_ids" not in inputs:
            return inputs
        count = inputs["input_ids"].shape[-1]
        if room is not None and count > room and best is not None:
            return best
        if count >= length:
            return inputs
        best = inputs
    raise ValueError(f"the tokenizer makes fewer than {length} tokens of {len(text)} characters")


def left_out(folder: str, kinds: Sequence[str], *, trust_remote_code: bool) -> list[str]:
    """Those of the kinds of input that the repo's chat template has no place for: a chat that sends one loses it.

    None where there is no template, or no processor that can be made of the repo's files.
    """
    try:
        processor = _processor(folder, trust_remote_code)
    except Exception:  # noqa: BLE001  (whatever it raises is told where an input was to be made)
        return []
    template = ChatTemplate.of(processor)
    if template is None or not _reads(processor):
        return []
    return [kind for kind in kinds if kind in ("image", "video", "audio") and template.leaves_out(kind)]


@lru_cache(maxsize=1)
def _processor(folder: str, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def _texts(room: int | None) -> Iterator[str]:
    """Longer and longer texts; word by word where the model has little room."""
    words = (_SENTENCE * 64).split()
    step = len(_SENTENCE.split()) if room is None or room >= _ROOMY else 1
    for count in range(step, len(words) + 1, step):
        yield " ".join(words[:count])


def _reads(processor: Any) -> bool:
    """Whether it reads text: one for images or sound alone does not."""
    from transformers import FeatureExtractionMixin, ImageProcessingMixin

    return not isinstance(processor, FeatureExtractionMixin | ImageProcessingMixin)


def _prompt(processor: Any, kind: str, text: str, *, marks: bool) -> str:
    """The text that goes with the input, as a chat template makes it; one without a place for it gets the placeholder with the text."""
    template = ChatTemplate.of(processor)
    if kind == "text":
        made = text if template is None else template.text(text)
        if made is None:
            raise ValueError("the chat template can do nothing with a message of text")
        return made
    mixed = None if template is None else template.mixed(kind, text)
    if mixed is not None:
        return mixed
    placeholder = getattr(processor, f"{kind}_token", None)
    if isinstance(placeholder, str):
        return _prompt(processor, "text", placeholder + text, marks=marks)
    if not marks:  # a pair of encoders: each reads its own
        return text
    raise ValueError(
        f"no {'chat template' if template is None else 'place in the chat template'}, and no placeholder for {kind} input"
    )

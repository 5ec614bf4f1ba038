"""Inputs made by the repo's own processor and chat template, as its users make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_SIDE = 224
_FRAMES = 4
_RATE = 16000
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


def make(folder: str, kind: str, length: int, seed: int, *, trust_remote_code: bool) -> dict[str, Any]:
    """Inputs of one kind with at least `length` tokens. Raises whatever the processor raises when it cannot."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    random = np.random.default_rng(seed)
    parts: list[dict[str, Any]] = []
    media: dict[str, Any] = {}
    if kind == "image":
        media["images"] = [random.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)]
    elif kind == "video":
        media["videos"] = [random.integers(0, 256, (_FRAMES, _SIDE, _SIDE, 3), dtype=np.uint8)]
        media["do_sample_frames"] = False  # these frames are all there is: nobody could say of how many seconds
    elif kind == "audio":
        media["audio"] = [random.standard_normal(_RATE).astype(np.float32)]
    if kind != "text":
        parts.append({"type": kind})
    for repeat in range(1, 65):
        text = _SENTENCE * repeat
        prompt = _prompt(processor, [*parts, {"type": "text", "text": text}], kind, text)
        inputs = dict(processor(text=prompt, **media, return_tensors="pt"))
        if inputs["input_ids"].shape[-1] >= length:
            return inputs
    raise ValueError(f"the tokenizer makes fewer than {length} tokens of {len(text)} characters")


def _prompt(processor: Any, content: list[dict[str, Any]], kind: str, text: str) -> str:
    if getattr(processor, "chat_template", None):
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": content if kind != "text" or _takes_parts(processor) else text}
        ]
        prompt = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        return str(prompt)
    if kind == "text":
        return text
    placeholder = getattr(processor, f"{kind}_token", None)
    if not isinstance(placeholder, str):
        raise ValueError(f"no chat template, and no placeholder for {kind} input")
    return placeholder + text


def _takes_parts(processor: Any) -> bool:
    """Whether its template is a processor's, made for content in parts; a tokenizer's wants plain text."""
    return hasattr(processor, "tokenizer")

"""Row -> token ids, and which of them are scored. One definition for every side; see `docs/perplexity.md`."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import msgspec

from ckaudit.errors import EngineError, UsageError
from ckaudit.perplexity.data import Row, plain


class Encoded(msgspec.Struct, frozen=True):
    """One row as the model sees it: `ids` of the whole sequence, of which `ids[start:]` are scored; `text` before tokenising."""

    row: Row
    text: str
    ids: tuple[int, ...]
    start: int

    @property
    def scored(self) -> tuple[int, ...]:
        return self.ids[self.start :]


class Encoder:
    """Turns rows into tokens with the repo's own processor (or tokenizer) and chat template."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.picture = picture
        """bytes -> RGB picture; a planted fault replaces it."""
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.sees = hasattr(processor, "image_processor")
        self.template: str | None = getattr(processor, "chat_template", None) or getattr(
            self.tokenizer, "chat_template", None
        )

    @property
    def template_hash(self) -> str | None:
        """The first 16 hex digits of the chat template's sha256: part of every result."""
        return hashlib.sha256(str(self.template).encode()).hexdigest()[:16] if self.template else None

    def cannot(self, row: Row) -> str | None:
        """Why this repo cannot take `row`; None when it can."""
        if row.images and not self.sees:
            return "the row has a picture and the repo has no image processor"
        return None

    def encode(self, row: Row) -> Encoded:
        """Tokens of `row`; scored are the answer's, or for a text all but the first (nothing predicts that one).

        Where a token spans the border between prompt and answer, scoring begins at the first token that differs.
        Raises EngineError for an answer of no tokens.
        """
        if row.text is not None:
            ids = tuple(self.tokenizer(row.text)["input_ids"])
            encoded = Encoded(row, row.text, ids, 1)
        else:
            prompt, whole = self._render(row)
            ids, before = self._ids(whole, row), self._ids(prompt, row)
            start = next(
                (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before))
            )
            encoded = Encoded(row, whole, ids, max(start, 1))
        if not encoded.scored:
            raise EngineError(f"Row {row.id} has no token to score.", "Give it an answer of at least one token.")
        return encoded

    def inputs(self, rows: list[Encoded]) -> Any:
        """What the model takes for a batch: tensors of shape (rows, longest sequence), padded on the right, plus pixels.

        The rows of a batch are all texts, all conversations with pictures, or all without.
        """
        self.tokenizer.padding_side = "right"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token  # masked out, so any id does
        texts, images = [e.text for e in rows], [self.picture(image) for e in rows for image in e.row.images]
        options: dict[str, Any] = {"return_tensors": "pt", "padding": len(rows) > 1}
        if rows[0].row.text is None:
            options["add_special_tokens"] = self.template is None  # a template writes its own
        if images:
            return self.processor(text=texts, images=images, **options)
        return self.tokenizer(texts, **options)

    def _render(self, row: Row) -> tuple[str, str]:
        """Prompt and whole conversation as text, the answer last and not closed."""
        messages = [dict(m) for m in row.messages]
        if not self.sees:
            messages = [{**m, "content": plain(m["content"])} for m in messages]
        answer = row.answer
        if self.template is None:
            prompt = "\n".join(plain(m["content"]) for m in messages[:-1]) + "\n"
            return prompt, prompt + answer
        renderer = self.processor if self.sees else self.tokenizer
        prompt = renderer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        whole = renderer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
        if not whole.startswith(prompt):  # a template that writes past turns differently (thinking blocks)
            at = whole.rfind(answer)
            if at < 0:
                raise EngineError(f"The chat template alters the answer of row {row.id}.", "Score it as a text row.")
            prompt = whole[:at]
        return prompt, whole

    def _ids(self, text: str, row: Row) -> tuple[int, ...]:
        special = self.template is None
        if row.images:
            shown = list(map(self.picture, row.images))
            return tuple(self.processor(text=[text], images=shown, add_special_tokens=special)["input_ids"][0])
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])


def picture(data: bytes) -> Any:
    """Decoded RGB picture (PIL). Raises UsageError for bytes that are no picture, or one too large to decode safely."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"A picture of the data set cannot be decoded ({len(data):,} bytes).", "Give PNG or JPEG files."
        ) from error

"""A repo's chat template: what it makes of a message, and which kinds of input it has no place for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

Content = str | list[dict[str, Any]]
_STRANGE = "zzz"
"""A type of part that no template knows."""


class ChatTemplate:
    """The template of a processor, or of the tokenizer in it, which servers fall back on."""

    def __init__(self, owner: Any, placeholders: dict[str, str]) -> None:
        self._owner, self._placeholders = owner, placeholders

    @classmethod
    def of(cls, processor: Any) -> Self | None:
        """That of a processor; None where it has none."""
        for owner in (processor, getattr(processor, "tokenizer", None)):
            if getattr(owner, "chat_template", None):
                tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")}
                return cls(owner, {kind: token for kind, token in tokens.items() if isinstance(token, str)})
        return None

    def text(self, text: str) -> str | None:
        """The form of a message of text alone, in parts or plain, whichever it is made for; None where it can do neither."""
        for content in ([_words(text)], text):
            written = self._written(content)
            if written is not None and (isinstance(content, str) or not _as_data(content[0], written)):
                return written
        return None

    def mixed(self, kind: str, text: str) -> str | None:
        """The form of a message of such an input and text; None where there is no place for it, or nothing can be made."""
        plain = self.text(text)
        placeholder = self._placeholders.get(kind)
        if plain is not None and placeholder is not None and placeholder in plain:
            return plain  # it always has one
        for content, strange in _forms(kind, text):
            written = self._written(content)
            if written is None or written == plain or _as_data(_words(text), written):
                continue
            if placeholder is not None and placeholder in written:
                return written
            # What a part of any type is made into is no place for this one: a word of regret, say.
            if written.replace(kind, _STRANGE) != self._written(strange):
                return written
        return None

    def leaves_out(self, kind: str) -> bool:
        """Whether it has no place for this kind of input, although it can do something with text."""
        return self.mixed(kind, "x") is None and self.text("x") is not None

    def _written(self, content: Content) -> str | None:
        """What the template makes of a message, where it must after one of the system; None where it raises."""
        user = {"role": "user", "content": content}
        for conversation in ([user], [{"role": "system", "content": "x"}, user]):
            with suppress(Exception):  # a template raises whatever its author, Jinja or Python does
                return str(self._owner.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
        return None


def _forms(kind: str, text: str) -> Iterator[tuple[Content, Content]]:
    """Messages with a part of this kind, as chats write them, each beside the same with a part of a strange type."""
    for make in (
        lambda k: {"type": k},
        lambda k: {"type": k, k: "x"},
        lambda k: {"type": k, f"{k}_url": "x"},
        lambda k: {"type": f"{k}_url", f"{k}_url": {"url": "x"}},
        lambda k: {"type": f"input_{k}", f"input_{k}": {"data": "x"}},
    ):
        yield [make(kind), _words(text)], [make(_STRANGE), _words(text)]
        yield [_words(text), make(kind)], [_words(text), make(_STRANGE)]


def _as_data(part: dict[str, Any], written: str) -> bool:
    """Whether a template that was made for plain text wrote the part itself, as Python or as JSON."""
    return repr(part) in written or json.dumps(part) in written


def _words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}

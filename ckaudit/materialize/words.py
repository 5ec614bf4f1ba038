"""Ids for a text: of the model's vocabulary, of its decoder's, of several codes at once. Fixed by a seed."""

from __future__ import annotations

import re
from typing import Any

import torch

from ckaudit.materialize.classes import first_value, sub_configs

_OTHER = re.compile("image|video|audio|vision|pad|mask")
"""Ids that stand for other kinds of input, or for nothing."""
_ROOM = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
_POSITIONS = re.compile(r"(^|\.)(wpe|(embed_)?positions?(_embeddings?)?|pos_emb(ed|eddings?)?)$")
_NO_TEXT = re.compile("vision|visual|image|pixel|audio|speech|codec|relative")


class Words:
    """Makes ids for one model; `length` is how many a text has."""

    def __init__(self, model: Any, length: int, random: torch.Generator) -> None:
        self._model, self._config, self._random = model, model.config, random
        self.room = text_room(model)
        self.length = min(length, self.room or length)

    def ids(self, count: int, size: int | None = None) -> torch.Tensor:
        """(1, count) token ids, of a vocabulary of `size` (None: the model's)."""
        size = size or self.vocabulary()
        named = [item for part in sub_configs(self._config) for item in vars(part).items()]
        special = {v for k, v in named if k.endswith(("token_id", "token_index")) and isinstance(v, int)}
        drawn = torch.randint(0, size, (1, count), generator=self._random)
        plain = next((i for i in range(size) if i not in special), 0)
        for token in special:
            drawn[drawn == token] = plain
        return drawn

    def vocabulary(self) -> int:
        """How many ids have an embedding, in the model and in its text part: parts of a config may contradict each other."""
        named = first_value(getattr(self._config, "text_config", None) or self._config, "vocab_size")
        try:
            rows = int(self._model.get_input_embeddings().num_embeddings)
        except (AttributeError, NotImplementedError, TypeError):
            return int(named or 32)
        return min(rows, named) if isinstance(named, int) and named > 0 else rows

    def text(self) -> torch.Tensor:
        """(1, n) ids that stand for nothing special."""
        return self.ids(self.length)

    def marked(self) -> torch.Tensor:
        """(1, n) ids, first every one that the config has a word for, but for those of other kinds of input."""
        ids = self.text()
        named = [v for k, v in vars(self._config).items() if k.endswith("token_id") and not _OTHER.search(k)]
        marks = sorted({v for v in named if isinstance(v, int) and 0 <= v < self.vocabulary()})[: self.length]
        ids[0, : len(marks)] = torch.tensor(marks, dtype=torch.long)
        return ids

    def books(self) -> int:
        """Codes that the model reads and writes at once; 0 where there is one."""
        return int(first_value(self._config, "num_codebooks") or 0)

    def in_codebooks(self, more: int = 0) -> torch.Tensor:
        """(1, n, codebooks + more) ids."""
        keys = ("vocab_size", "codebook_vocab_size", "audio_vocab_size", "codebook_size")
        sizes = [self.vocabulary(), *(first_value(self._config, k) for k in keys)]
        size = min(v for v in sizes if isinstance(v, int))
        return torch.stack([self.ids(self.length, size) for _ in range(self.books() + more)], dim=-1)

    def of_decoder(self) -> torch.Tensor:
        """(1, n) ids of the decoder's own vocabulary; (codebooks, n) or (1, n, channels) where it writes sound in several at once."""
        decoder = getattr(self._config, "decoder", None) or getattr(self._config, "decoder_config", None)
        size = getattr(decoder, "vocab_size", None) or getattr(self._config, "decoder_vocab_size", None)
        codebooks = getattr(decoder, "num_codebooks", None)
        channels = getattr(decoder, "num_channels", None)
        limit = int(first_value(self._config, "max_target_positions", "max_position_embeddings") or self.length)
        if channels:  # the codes of each moment side by side
            return torch.stack([self.ids(min(self.length, limit), size) for _ in range(channels)], dim=-1)
        ids = torch.cat([self.ids(min(self.length, limit), size) for _ in range(codebooks or 1)])
        if codebooks is None:
            ids[0, 0] = first_value(self._config, "decoder_start_token_id", "bos_token_id", "pad_token_id") or 0
        return ids


def text_room(model: Any) -> int | None:
    """How many tokens of text a model has positions for: by its config, and by the tables that it looks them up in. None: without end."""
    config = getattr(model.config, "text_config", None) or model.config
    rooms = [getattr(config, key, None) for key in _ROOM]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and _POSITIONS.search(name) and not _NO_TEXT.search(name):
            # Some count from behind the padding's id (RoBERTa, its kin, and ESM).
            rooms.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    return min((room for room in rooms if isinstance(room, int) and room > 0), default=None)

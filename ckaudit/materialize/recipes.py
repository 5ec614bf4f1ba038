"""Inputs made from the config alone, by what a model's own methods take: ids, pixels, patches, sound. Fixed by a seed.

A vision or audio part tells itself how many placeholder tokens its output fills: it is run on the tensors first, and counted.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ckaudit.materialize import counting
from ckaudit.materialize.beside import Beside
from ckaudit.materialize.classes import first_value
from ckaudit.materialize.media import FRAMES, Media, Tensors, needed, parameters
from ckaudit.materialize.words import Words

_INPUT = re.compile(
    "pixel|patches|image|video|audio|visual|speaker|bbox|qformer|codes|_values$|feats$|features$|^states?$"
)
"""Parameters of a forward method that stand for something to look at or to hear."""
_FEW = 8
_SPECIAL = ("image", "video", "audio")
_PICTURES = {"pixel_values", "flattened_patches"}
_PATCHES = {"hidden_states", "grid_thw"}
_SOUNDS = {"input_features", "input_values", "input_audio_features"}
_SERIES = {"past_values", "returns_to_go"}
_OF_TEXT = {"input_ids", "decoder_input_ids", "attention_mask", "bbox"}


class Recipes:
    """Makes inputs for one model; `length` is the number of text tokens."""

    def __init__(self, model: Any, length: int, seed: int) -> None:
        self.model, self.config = model, model.config
        random = torch.Generator().manual_seed(seed)
        self._words = Words(model, length, random)
        self.room = self._words.room
        self.takes = set(parameters(model.forward))
        self._required = needed(model.forward)
        self._media = Media(model, self.takes, random)
        self._beside = Beside(model.config, random)
        self.frames = self._media.frames

    def kinds(self) -> tuple[str, ...]:
        """What the model takes: `text`, `image`, `video`, `audio`, `series`, in this order."""
        kinds = ["text"] if "input_ids" in self.takes or "decoder_input_ids" in self.takes else []
        sees, hears = self._has_part("vision_config"), self._has_part("audio_config")
        kinds += ["image"] if sees and (self.takes & _PICTURES or self.takes >= _PATCHES) else []
        kinds += ["video"] if sees and "pixel_values_videos" in self.takes else []
        kinds += ["audio"] if hears and self.takes & _SOUNDS else []
        kinds += ["series"] if self.takes & _SERIES else []
        if len(kinds) > 1 and self._needs_both():
            kinds.remove("text")
        return tuple(kinds)

    def _has_part(self, key: str) -> bool:
        """Whether the config does not say that this part was left out."""
        return getattr(self.config, key, key) is not None

    def _needs_both(self) -> bool:
        """Whether text alone is no input: a pair of encoders (CLIP), a decoder that writes down what it hears, or pixels that must be."""
        decodes = "input_ids" not in self.takes and "decoder_input_ids" in self.takes
        return hasattr(self.model, "get_text_features") or decodes or not self._required <= _OF_TEXT

    def candidates(self, kind: str) -> Iterator[Callable[[], Tensors]]:
        """Ways to make an input of this kind, the likeliest first; one that does not fit the model raises when it is made or run."""
        must = self._required | self._media.needed(kind)
        yield from self._with(kind, must)
        # What is given only where nothing works without it: parameters that the model could do without, says its signature.
        more = self.takes | self._media.own_parameters(kind)
        if self._beside.knows(more - must):
            yield from self._with(kind, more)
            if "bbox" in more:
                for make in self._with(kind, more):
                    yield partial(self._in_shares, make)

    def _in_shares(self, make: Callable[[], Tensors]) -> Tensors:
        """Boxes as shares of a page, in place of the thousandths that most models count in."""
        inputs = make()
        return inputs | {"bbox": inputs["bbox"] / 1000} if "bbox" in inputs else inputs

    def _with(self, kind: str, names: set[str]) -> Iterator[Callable[[], Tensors]]:
        """The candidates with those of these parameters that can be made."""
        for make in self._plain(kind, names):
            yield partial(self._filled, make, names)

    def _filled(self, make: Callable[[], Tensors], names: set[str]) -> Tensors:
        return self._beside.fill(names, make())

    def _plain(self, kind: str, names: set[str]) -> Iterator[Callable[[], Tensors]]:
        if kind == "text":
            yield self.text
            yield partial(self.text, self._words.marked)  # a question, say, has to end somewhere
            if self._words.books():
                yield partial(self.text, self._words.in_codebooks)
                yield partial(
                    self.text, partial(self._words.in_codebooks, 1)
                )  # a text, and the sound of each moment beside it
            return
        if kind == "series":
            for series in self._beside.series():
                yield partial(dict, series)
            return
        placeholder, way = self._placeholder(kind), kind
        if kind == "image" and placeholder is None and "pixel_values" in self._media.own_parameters("video"):
            placeholder, way = self._placeholder("video"), "video"  # a model of videos that calls them pixel values
        for tensors in self._media.of(kind):
            if placeholder is None or "input_ids" not in self.takes:
                yield partial(self._alone, tensors)
                if self.takes >= {"input_ids", "decoder_input_ids"}:  # some read them in place of a text
                    yield partial(self._alone, tensors, text=False)
                if hasattr(self.config, "decoder"):  # some read them in place of what the decoder has written so far
                    yield partial(self._alone, tensors, decoder=False)
                continue
            yield partial(self._mixed, way, tensors, placeholder, names)
            if kind == "video":
                yield from self._framed(tensors, placeholder, names)

    def _framed(self, tensors: Tensors, placeholder: int, names: set[str]) -> Iterator[Callable[[], Tensors]]:
        """Videos of which each frame stands between marks of its own, as the video that it is or as a picture in a video."""
        yield partial(self._mixed, "video", tensors, placeholder, names, groups=FRAMES)
        picture = self._placeholder("image")
        if picture is not None:
            yield partial(self._mixed, "video", tensors, picture, names, groups=FRAMES, inner="image")

    def text(self, ids: Callable[[], torch.Tensor] | None = None) -> Tensors:
        """Random ids that stand for nothing special, or these; the decoder of an encoder-decoder model gets some too."""
        inputs: Tensors = {}
        if "input_ids" in self.takes:
            drawn = (ids or self._words.text)()
            inputs = {"input_ids": drawn, "attention_mask": torch.ones(drawn.shape[:2], dtype=torch.long)}
        return self._with_decoder(inputs)

    def complete(self, inputs: Tensors) -> Tensors:
        """The inputs with what the decoder of an encoder-decoder model needs besides."""
        more: Tensors = {}
        if "decoder_input_ids" in self.takes and getattr(self.config, "is_encoder_decoder", False):
            more["decoder_input_ids"] = self._words.of_decoder()
        if "decoder_input_values" in self.takes:  # speech is what it writes, in the voice of a speaker
            more["decoder_input_values"] = self._media.noise(1, self._words.length, int(self.config.num_mel_bins))
            if "speaker_embeddings" in self.takes:
                more["speaker_embeddings"] = self._media.noise(1, int(self.config.speaker_embedding_dim))
        return {**more, **inputs}

    def _with_decoder(self, inputs: Tensors) -> Tensors:
        known = self.takes | ({"attention_mask"} if self._any_keyword() else set())
        return {k: v for k, v in self.complete(inputs).items() if k in known}

    def _any_keyword(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.model.forward).parameters.values())

    def _alone(self, tensors: Tensors, *, text: bool = True, decoder: bool = True) -> Tensors:
        """An input of a model without placeholders: pixels or sound, and text where it takes both (as CLIP does)."""
        words = self.text() if text and "input_ids" in self.takes else {}
        if not decoder:
            return {k: v for k, v in {**words, **tensors}.items() if not k.startswith("decoder_")}
        return self._with_decoder({**words, **tensors})

    def _mixed(
        self,
        kind: str,
        tensors: Tensors,
        placeholder: int,
        names: set[str],
        *,
        groups: int = 1,
        inner: str | None = None,
    ) -> Tensors:
        """Text with as many placeholders in it as the part for this kind fills, in so many groups."""
        tensors = self._beside.fill(names, tensors)

        def around(count: int) -> Tensors:
            inputs = self._around(kind, tensors, placeholder, count, groups, inner)
            return place(self._beside.fill(names, inputs), self.model)

        with torch.inference_mode():
            count = counting.count(self.model, kind, place(tensors, self.model), around)
            if count % groups:
                raise ValueError(f"{count} tokens are not {groups} groups")
            return self._around(kind, tensors, placeholder, count // groups, groups, inner)

    def _around(
        self, kind: str, tensors: Tensors, placeholder: int, count: int, groups: int = 1, inner: str | None = None
    ) -> Tensors:
        """Text before and after `groups` times `count` placeholders between marks; marks of kind `inner` stand inside those of `kind`."""
        length = self._words.length
        if (
            self.room is not None
        ):  # as many words as there are positions beside the placeholders, and a few where there are none
            length = min(length, max(self.room - groups * (count + 2) - 2, _FEW))
        before, after = self._words.ids(length // 4), self._words.ids(length - length // 4)
        start, end = self._brackets(inner or kind)
        if groups > 1 and not (start.numel() or end.numel()):
            end = self._words.ids(1)  # a word between them, or they are one
        group = torch.cat([start, torch.full((1, count), placeholder), end], dim=1)
        outer = self._brackets(kind) if inner else (start[:, :0], end[:, :0])
        ids = torch.cat([before, outer[0], *[group] * groups, outer[1], after], dim=1)
        inputs: Tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tensors}
        marks = (ids == placeholder).long()
        if "mm_token_type_ids" in self.takes:
            inputs["mm_token_type_ids"] = marks * (1 + _SPECIAL.index(kind))
        if "token_type_ids" in self.takes:
            inputs["token_type_ids"] = marks
        return self._with_decoder(inputs)

    def _brackets(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for side in ("start", "end"):
            token = first_value(
                self.config, *(f"{k}_{side}_token_id" for k in ("vision", kind) if k != "vision" or kind != "audio")
            )
            found.append(torch.tensor([[token]]) if isinstance(token, int) else torch.empty((1, 0), dtype=torch.long))
        return found[0], found[1]

    def marks(self, kind: str) -> bool:
        """Whether the config has a place for the id that stands for this kind of input in a text."""
        return kind in _SPECIAL and any(hasattr(self.config, f"{kind}_token_{end}") for end in ("id", "index"))

    def _placeholder(self, kind: str) -> int | None:
        """The id that stands for pixels or sound. Where the config has a place for it and nothing in it, one is chosen and put there."""
        names = (f"{kind}_token_id", f"{kind}_token_index")
        token = first_value(self.config, *names)
        if token is None and hasattr(self.config, names[0]):
            token = self._words.vocabulary() - 1 - _SPECIAL.index(kind)
            setattr(self.config, names[0], token)
        return token if isinstance(token, int) else None


def lacking(error: BaseException, inputs: Tensors, model: Any) -> bool:
    """Whether a model raised for want of an input that was not given: it names a parameter of its own, or meets None in its place.

    A model of text alone has been given all it takes: what it raises is about itself.
    """
    absent = {p for p in parameters(model.forward) if p not in inputs and _INPUT.search(p)}
    named = set(re.findall("[a-z_]+", str(error).lower()))
    return bool(absent) and (
        bool(absent & named) or (isinstance(error, TypeError | AttributeError) and "NoneType" in str(error))
    )


def accepted(inputs: Tensors, model: Any) -> Tensors:
    """The inputs without those that the model's forward method does not know: a tokenizer's `token_type_ids`, say."""
    known = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in known}


def known(inputs: Tensors, model: Any) -> None:
    """Raise IndexError for an id that has no embedding, as a lookup on a CPU does: on a GPU it would cost the device."""
    ids = inputs.get("input_ids")
    try:
        rows = int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError, TypeError):
        return
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.numel() and int(ids.max()) >= rows:
        raise IndexError(f"the id {int(ids.max())} has no row in the input embedding, which has {rows}")


def place(inputs: Tensors, model: Any) -> Tensors:
    """Inputs on the model's device, floats in its dtype."""
    try:
        anchor = next(p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    except StopIteration:
        return inputs
    placed = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            kind = anchor.dtype if value.is_floating_point() else value.dtype
            value = value.to(device=anchor.device, dtype=kind)
        placed[name] = value
    return placed

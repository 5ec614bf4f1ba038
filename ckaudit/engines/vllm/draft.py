"""The draft model (multi-token prediction) that a checkpoint carries beside its main model, loaded by the release's own class for it."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines import EngineOptions
from ckaudit.engines.vllm import faults, stubs
from ckaudit.engines.vllm.attempt import Attempt, attempt
from ckaudit.engines.vllm.design import parameter_by_design
from ckaudit.engines.vllm.faults import Story
from ckaudit.engines.vllm.words import message
from ckaudit.plan import Draft, DraftLayer

METHOD = {"method": "mtp", "num_speculative_tokens": 1}
_SHARED = re.compile(r"(^|\.)(embed_tokens|embedding|embeddings|lm_head|shared_head\.head)\.")
"""What the draft model takes from the main model after loading (vllm/v1/spec_decode/llm_base_proposer.py, `_maybe_share_*`)."""

_NUMBERED = re.compile(r"(^|.*?\.)\d+(?=\.|$)")


def architecture(config: Any) -> str | None:
    """The draft class that a release has for the model of `config`; None where it has none. By the release's own rewriting of configs."""
    try:
        from vllm.config.speculative import SpeculativeConfig

        held = copy.deepcopy(config.model_config.hf_config)
        was = list(held.architectures)
        now = list(SpeculativeConfig.hf_config_override(held).architectures)
    except Exception:  # noqa: BLE001  (a model that is not asked about speculation, in whatever way a release says that)
        return None
    return now[0] if now != was else None


class Drafting:
    """How the draft model of one checkpoint is loaded. `engine` is the session."""

    def __init__(self, engine: Any, folder: Path, options: EngineOptions, read: Callable[[str], bytes]) -> None:
        self._engine, self._folder, self._options, self._read = engine, folder, options, read

    def tell(self, tensors: Sequence[TensorSpec], main: Iterable[str], deadline: float) -> Draft | None:
        """What came of it; None where the release has no draft class for this model. `main` are the names that the main model loads."""
        name = architecture(self._engine.config(self._folder, self._options))
        if name is None:
            return None
        try:
            story = faults.tell(self._load, tensors, deadline)
        except Exception as error:  # noqa: BLE001  (raised before any weight was read)
            refused = stubs.touched(error) is None and isinstance(error, ValueError)
            return Draft(name, "fails" if refused else "not_judged", message(error))
        return _told(name, story, frozenset(main))

    def _load(self, tensors: Sequence[TensorSpec]) -> Attempt:
        config = self._config()
        self._engine.join(config)
        with self._engine.within(config):
            return attempt(config, tensors, self._folder, self._read, config.speculative_config.draft_model_config)

    def _config(self) -> Any:
        """The release's config with its draft. How many tokens are drafted must suit the model: a release works that out where it is
        given the checkpoint by name."""
        try:
            return self._engine.config(self._folder, self._options, speculative_config=dict(METHOD))
        except ValueError:
            named = {
                "method": "mtp",
                "model": str(self._folder),
                "quantization": self._options.vllm.get("quantization"),
            }
            return self._engine.config(self._folder, self._options, speculative_config=named)


def _told(name: str, story: Story, main: frozenset[str]) -> Draft:
    last = story.last
    raised = story.faults[0].raised if story.faults else last.raised
    layers = tuple(_layers(story, main))
    if raised is not None:
        return Draft(
            name, "fails" if raised.excuse is None else "not_judged", raised.excuse or message(raised.error), layers
        )
    return Draft(
        name, "loads" if all(layer.state == "complete" for layer in layers) else "loads_with_loss", None, layers
    )


def _layers(story: Story, main: frozenset[str]) -> Iterable[DraftLayer]:
    """The layers of the draft model, by the path of the tensors that fill them."""
    last = story.last
    read: dict[str, list[str]] = defaultdict(list)
    places: dict[str, set[str]] = defaultdict(set)
    for name, seen in last.result.tensors.items():
        if name not in main and seen.into and seen.read != 0:
            read[layer_of(name)].append(name)
            places[layer_of(name)].update(layer_of(p) for p in seen.into)
    gaps: dict[str, list[str]] = defaultdict(list)
    for name in last.result.parameters:
        if _unwritten(name, last):
            gaps[layer_of(name)].append(name)
    told: set[str] = set()
    for path, names in read.items():
        unwritten = tuple(n for place in sorted(places[path] - told) for n in gaps.get(place, ()))
        told |= places[path]
        yield DraftLayer(path, "partial" if unwritten else "complete", tuple(names), unwritten)
    for place, unwritten_ in gaps.items():
        if place not in told:
            yield DraftLayer(place, "dropped", (), tuple(unwritten_))


def _unwritten(name: str, last: Attempt) -> bool:
    held = last.result.parameters[name]
    if held.loaded >= held.elements or held.unknown or _SHARED.search(name):
        return False
    return parameter_by_design(name, held, last.layout[name][2], name in last.zeros, {}) is None


def layer_of(name: str) -> str:
    """The numbered layer that a tensor or parameter belongs to, else the first part of its name."""
    found = _NUMBERED.match(name)
    return found[0] if found else name.partition(".")[0]

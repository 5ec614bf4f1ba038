"""Shapes for an index-only checkpoint, borrowed from the model that is to take its tensors.

An index has names and no shapes. Where a name goes into one parameter as it is, the parameter's own shape is the only one that loads. Where
a conversion takes it (experts that are stacked, a fused projection that is cut), the shape comes from transformers' own way back:
`revert_weight_conversion` lays the model's parameters out as `save_pretrained` would write them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.core_model_loading as core

from ckaudit.engines.transformers.tensors import tag


class Shapes:
    """What each place of the model expects of a checkpoint tensor."""

    def __init__(self, model: Any, state: dict[str, Any], rules: list[Any]) -> None:
        self._model = model
        self._state = state
        self._rules = rules
        self._expected: dict[tuple[str, str], Any] | None = None

    def lend(self, transform: Any, sources: list[tuple[str, str]], target: str, shapeless: set[str]) -> bool:
        """Give every stand-in that `transform` has collected the shape it should have; False if one cannot be known."""
        position: dict[str, int] = {}
        for source, pattern in sources:
            index = position.get(pattern, 0)
            position[pattern] = index + 1
            if source not in shapeless:
                continue
            like = self._like(transform, target, pattern)
            if like is None:
                return False
            lent = tag(torch.empty_like(like, device="meta"), (source,))
            transform.collected_tensors[pattern][index] = lambda lent=lent: lent
        return True

    def _like(self, transform: Any, target: str, pattern: str) -> Any:
        if isinstance(transform, core.WeightRenaming):
            return self._state[target] if transform.quantization_operation is None else None
        if self._expected is None:
            self._expected = self._way_back()
        return self._expected.get((target, pattern))

    def _way_back(self) -> dict[tuple[str, str], Any]:
        """(parameter, source pattern) -> a tensor of the shape that the checkpoint should hold there."""
        try:
            written = core.revert_weight_conversion(self._model, dict(self._state))
        except Exception:  # noqa: BLE001  (a conversion without a way back: its tensors stay unknown)
            return {}
        renamings = [rule for rule in self._rules if isinstance(rule, core.WeightRenaming)]
        converters = [rule for rule in self._rules if isinstance(rule, core.WeightConverter)]
        out = {}
        for name, tensor in written.items():
            key = name
            for rule in renamings:
                key, _ = rule.rename_source_key(key)
            for rule in converters:
                renamed, pattern = rule.rename_source_key(key)
                if pattern is not None:
                    out[self._in_model(renamed), pattern] = tensor
                    break
        return out

    def _in_model(self, name: str) -> str:
        prefix = f"{self._model.base_model_prefix}."
        return next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in self._state), name)

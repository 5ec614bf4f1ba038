"""What the loader need not do on tensors without data, and what it cannot: replaced by the same effect on names and shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
import transformers.core_model_loading as core
import transformers.modeling_utils as modeling

from ckaudit.engines.transformers.observe import replacing

PRETENDED_CAPABILITY = (9, 0)
"""The compute capability of the accelerator that `--device cuda` pretends to have (Hopper: above every floor transformers 5.24 knows)."""


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ()))


def _clone(value: Any) -> Any:
    """What the loader's `deepcopy` of a conversion rule is for: fresh room for collected tensors.

    Operations and compiled patterns are shared. The loader copies a rule once per checkpoint name, which is more than half of its time
    on a mixture of experts.
    """
    if not isinstance(value, core.WeightTransform):
        return deepcopy(value)
    new = object.__new__(type(value))
    kind: Any = type(value)
    for name in _slots(kind):
        if hasattr(value, name):
            object.__setattr__(new, name, getattr(value, name))
    object.__setattr__(new, "collected_tensors", defaultdict(list))
    object.__setattr__(new, "layer_targets", defaultdict(set))
    return new


def _bnb_deserialize(self: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG001
    """bitsandbytes' 4-bit operation, which reads its quantisation state (a JSON blob) from a tensor's bytes."""
    if len(input_dict) == 1:
        return input_dict
    weight = input_dict["weight"]
    states = [name for name in input_dict if ".quant_state." in name]
    if len(states) != 1 or any(name not in input_dict for name in ("weight.absmax", "weight.quant_map")):
        raise ValueError(f"bitsandbytes 4-bit companions are incomplete: {', '.join(sorted(input_dict))}")
    return {"weight": weight[0] if isinstance(weight, list) else weight}


@contextmanager
def shortcuts(device: str) -> Iterator[None]:
    """The replacements, for the length of the block. `device` is `cpu` or `cuda`; the latter is pretended."""
    replaced: list[tuple[Any, str, Any]] = [
        (core, "deepcopy", _clone),
        # Random initialisation of what is missing: names and shapes do not depend on it, and some of it reads values.
        (modeling.PreTrainedModel, "_initialize_missing_keys", lambda self, *args, **kwargs: None),  # noqa: ARG005
    ]
    with ExitStack() as stack:
        stack.enter_context(replacing(replaced))
        import transformers.integrations.bitsandbytes as bitsandbytes

        if hasattr(bitsandbytes, "Bnb4bitDeserialize"):
            stack.enter_context(replacing([(bitsandbytes.Bnb4bitDeserialize, "convert", _bnb_deserialize)]))
        if device == "cuda":
            stack.enter_context(
                replacing(
                    [
                        (torch.cuda, "is_available", lambda: True),
                        (torch.cuda, "device_count", lambda: 1),
                        (torch.cuda, "current_device", lambda: 0),
                        (torch.cuda, "get_device_capability", lambda device=None: PRETENDED_CAPABILITY),  # noqa: ARG005
                        (torch.cuda, "get_device_name", lambda device=None: "pretended"),  # noqa: ARG005
                    ]
                )
            )
        yield

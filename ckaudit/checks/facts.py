"""What a checkpoint's names and config say by themselves, gathered once for all checks: stacks of layers, modules, declared numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import msgspec

from ckaudit.checkpoint import Checkpoint

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.)")
_SEGMENT = re.compile(r"(?<![^.])[0-9]+(?![^.])")

# Ways in which a quantiser names what belongs to a weight without giving it a path segment of its own (fused expert parameters).
_FUSED_TAIL = re.compile(r"(?<=[a-z0-9])(_blocks|_scales|_scale_inv|_scale|_packed|_shape|_bias)$")

LAYER_KEYS = (
    "num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_single_layers",
)  # fmt: skip
"""Config keys that count layers. Facts: the keys of `transformers` configurations."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DRAFT_KEYS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)
DRAFT = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block|nextn|eh_proj|enorm|hnorm|shared_head)(\.|$)", re.IGNORECASE)
"""Names of a draft model that is stored with the main one (multi-token prediction)."""
ADAPTER = re.compile(r"(^|\.)(lora_[A-Za-z_]+|base_layer|modules_to_save|original_module)(\.|$)")


class Stack(msgspec.Struct, frozen=True):
    """Modules that are numbered under one path: `members[7]` holds what follows `path.7.` in the names."""

    path: str
    members: dict[int, list[str]]

    @property
    def indices(self) -> list[int]:
        """The numbers that are there, ascending."""
        return sorted(self.members)

    @property
    def holes(self) -> list[int]:
        """The numbers below the highest that are not there."""
        top = max(self.members)
        return [] if top + 1 == len(self.members) or top > 100_000 else sorted(set(range(top)) - self.members.keys())

    def names(self, *indices: int) -> list[str]:
        """The full tensor names of these members."""
        return [f"{self.path}.{i}.{rest}" for i in indices for rest in sorted(self.members.get(i, ()))]


class Facts:
    """A checkpoint's facts, each computed when first asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config: dict[str, Any] = checkpoint.config or {}

    @cached_property
    def shapes(self) -> dict[str, list[str]]:
        """Tensor names by shape (every number that is a segment as `#`): some 60 of them stand for 45,000 names."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.checkpoint.tensors:
            found[shape(name)].append(name)
        return dict(found)

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """The tensor names in whose shape `pattern` is found."""
        return [n for text, names in self.shapes.items() if pattern.search(text) for n in names]

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """Every numbered stack by path, nested ones (`layers.3.mlp.experts`) too, one for each parent."""
        found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in self.checkpoint.tensors:
            for match in _NUMBER.finditer(name):
                found[name[: match.start() - 1]][int(match[0])].append(name[match.end() + 1 :])
        return {path: Stack(path, dict(members)) for path, members in found.items()}

    @cached_property
    def layers(self) -> dict[str, Stack]:
        """The stacks that hold whole layers: outermost, with at least three members of several modules each.

        A `Sequential` numbers single modules and skips those without weights, so it says nothing by its gaps.
        """
        return {
            path: stack
            for path, stack in self.stacks.items()
            if not _NUMBER.search(f".{path}.") and len(stack.members) > 2 and _is_layered(stack)
        }

    @cached_property
    def experts(self) -> dict[str, dict[str, Stack]]:
        """Stacks of experts: shape of the path (numbers as `#`) -> path -> stack."""
        found: dict[str, dict[str, Stack]] = defaultdict(dict)
        for path, stack in self.stacks.items():
            if path.rpartition(".")[2].lower() in ("experts", "local_experts", "mlp_experts"):
                found[shape(path)][path] = stack
        return dict(found)

    @cached_property
    def modules(self) -> dict[frozenset[str], list[str]]:
        """Modules by the set of their leaves: `{weight, weight_scale}` -> paths. A weight's leaf carries its dtype: `weight:F8_E4M3`."""
        leaves: dict[str, set[str]] = defaultdict(set)
        for name, tensor in self.checkpoint.tensors.items():
            module, leaf = split(name)
            leaves[module].add(f"{leaf}:{tensor.dtype}" if leaf == "weight" and tensor.dtype else leaf)
        found: dict[frozenset[str], list[str]] = defaultdict(list)
        for module, names in leaves.items():
            found[frozenset(names)].append(module)
        return dict(found)

    @cached_property
    def declared(self) -> list[tuple[str, int]]:
        """Every whole number in the config as (dotted key, value), outermost first; quantisation settings left out."""
        return list(_numbers(self.config))

    def values(self, keys: Iterable[str]) -> dict[str, int]:
        """Dotted key -> value of every config entry, at any depth, whose last key is one of `keys`."""
        wanted = frozenset(keys)
        return {path: value for path, value in self.declared if path.rpartition(".")[2] in wanted}

    @cached_property
    def has_headers(self) -> bool:
        """Whether dtypes and shapes are known of at least one tensor."""
        return any(t.dtype is not None for t in self.checkpoint.tensors.values())

    def size(self, names: Iterable[str]) -> int:
        """Bytes of these tensors together, as far as known."""
        tensors = self.checkpoint.tensors
        return sum(t.nbytes or 0 for n in names if (t := tensors.get(n)) is not None)


def shape(name: str) -> str:
    """`name` with every number that is a segment of its own as `#`."""
    return _SEGMENT.sub("#", name)


def split(name: str) -> tuple[str, str]:
    """The module of a tensor and its leaf, so that what belongs together shares a module.

    `x.q_proj.weight` -> (`x.q_proj`, `weight`), `x.weight.quant_state.nf4` -> (`x`, `weight.quant_state.nf4`),
    `experts.down_proj_scales` -> (`experts.down_proj`, `_scales`).
    """
    if ".weight." in name:
        module, _, rest = name.partition(".weight.")
        return module, f"weight.{rest}"
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" and "_proj" in leaf and (match := _FUSED_TAIL.search(leaf)):
        return f"{module}.{leaf[: match.start()]}", match[0]
    return (module, leaf) if "_proj" not in leaf else (name, "")


def _is_layered(stack: Stack) -> bool:
    sizes = sorted(len({rest.rpartition(".")[0] for rest in names}) for names in stack.members.values())
    return sizes[len(sizes) // 2] > 1


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    queue: list[tuple[str, dict[str, Any]]] = [("", config)]
    while queue:
        path, section = queue.pop(0)
        for key, value in section.items():
            if isinstance(value, dict) and "quant" not in str(key) and len(queue) < 200 and path.count(".") < 4:
                queue.append((f"{path}{key}.", value))
            elif isinstance(value, int) and not isinstance(value, bool):
                yield f"{path}{key}", value

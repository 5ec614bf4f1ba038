"""What a checkpoint's names and config say by themselves, gathered once for all checks: stacks of layers, modules, declared numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from ckaudit.checkpoint import Checkpoint
from ckaudit.naming import Alike, Places
from ckaudit.naming import shape as shape

_EXPERTS = re.compile(r"(?<![^.])(local_|mlp_)?experts(?=\.#\.)", re.IGNORECASE)

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
    """Modules that are numbered under one path, as `3` in `layers.3.mlp.up_proj.weight` under `layers`."""

    path: str
    numbers: frozenset[int]
    """Those that are there."""
    among: Stacks
    """It and those beside it."""

    @property
    def indices(self) -> list[int]:
        """The numbers that are there, ascending."""
        return sorted(self.numbers)

    @property
    def holes(self) -> list[int]:
        """The numbers below the highest that are not there."""
        top = max(self.numbers)
        return [] if top + 1 == len(self.numbers) or top > 100_000 else sorted(set(range(top)) - self.numbers)

    @property
    def members(self) -> dict[int, list[str]]:
        """What follows `path.7.` in the names, by number. Costs a look at every name of the stacks of this shape, once."""
        return self.among.members[self.path]

    def names(self, *indices: int) -> list[str]:
        """The full tensor names of these members."""
        return [f"{self.path}.{i}.{rest}" for i in indices for rest in sorted(self.members.get(i, ()))]

    @property
    def layered(self) -> bool:
        """Whether at least half of the members hold more than one module."""
        several = sorted(
            len(found) > 1 or (any("#" in m for m in found) and len(_modules(self.members[i])) > 1)
            for i, found in self.among.modules[self.path].items()
        )
        return several[len(several) // 2]


class Stacks(Mapping[str, Stack]):
    """The stacks whose paths have one shape (`model.layers.#.mlp.experts`), by path, out of `groups` of names by shape."""

    def __init__(self, shape: str, groups: Mapping[str, Alike]) -> None:
        self.shape = shape
        self._groups = {t[len(shape) + 3 :]: group for t, group in groups.items() if t.startswith(f"{shape}.#.")}
        self._places: list[Places] = []
        before: list[Alike] = []
        for group in self._groups.values():  # most groups are numbered alike: looked at once
            like = next((i for i, other in enumerate(before) if other.numbered_as(group)), None)
            before.append(group)
            self._places.append(group.places(shape.count("#") + 1) if like is None else self._places[like])
        first, *others = {id(places): places for places in self._places}.values()
        self.uniform = all(places.keys() == first.keys() for places in others)
        """Whether each member of each stack has tensors of the same names."""
        numbers: dict[tuple[str, ...], set[int]] = defaultdict(set)
        for places in (first, *others):
            for *outer, index in places:
                numbers[tuple(outer)].add(int(index))
        paths = {self._path(outer): frozenset(found) for outer, found in numbers.items()}
        self._stacks = {path: Stack(path, found, self) for path, found in paths.items()}

    def __getitem__(self, path: str) -> Stack:
        return self._stacks[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacks)

    def __len__(self) -> int:
        return len(self._stacks)

    @cached_property
    def members(self) -> dict[str, dict[int, list[str]]]:
        """Of each stack, what follows the number in the names, by number."""
        depth = self.shape.count(".") + 1
        found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for group in self._groups.values():
            for name in group.names:
                *path, index, rest = name.split(".", depth + 1)
                found[".".join(path)][int(index)].append(rest)
        return found

    @cached_property
    def modules(self) -> dict[str, dict[int, set[str]]]:
        """Of each stack, the shapes of the modules in each member."""
        found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for rest, places in zip(self._groups, self._places, strict=True):
            for *outer, index in places:
                found[self._path(outer)][int(index)] |= _modules([rest])
        return found

    def _path(self, numbers: Sequence[str]) -> str:
        """The shape with its `#` replaced by `numbers`."""
        texts = self.shape.split("#")
        return "".join(part for pair in zip(texts, (*numbers, ""), strict=True) for part in pair)


class Facts:
    """A checkpoint's facts, each computed when first asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config: dict[str, Any] = checkpoint.config or {}

    @cached_property
    def shapes(self) -> dict[str, list[str]]:
        """Tensor names by shape (every number that is a segment as `#`): some 60 of them stand for 45,000 names."""
        return {text: group.names for text, group in self.checkpoint.alike.items()}

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """The tensor names in whose shape `pattern` is found."""
        return [n for text, names in self.shapes.items() if pattern.search(text) for n in names]

    @cached_property
    def _numbered(self) -> dict[str, Alike]:
        """The shapes in which a number stands before a module."""
        return {
            text: group for text, group in self.checkpoint.alike.items()
            if ".#." in text and group.countable and len(group.numbers) == text.count("#") * len(group.names)
        }  # fmt: skip

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """Every outermost numbered stack by path."""
        shapes = dict.fromkeys(text[: text.index(".#.")] for text in self._numbered)
        return {path: stack for shape in shapes for path, stack in Stacks(shape, self._numbered).items()}

    @cached_property
    def layers(self) -> dict[str, Stack]:
        """The stacks that hold whole layers: outermost, with at least three members of several modules each.

        A `Sequential` numbers single modules and skips those without weights, so it says nothing by its gaps.
        """
        return {
            path: stack
            for path, stack in self.stacks.items()
            if len(stack.numbers) > 2 and "#" not in shape(path) and stack.layered
        }

    @cached_property
    def experts(self) -> dict[str, Stacks]:
        """Stacks of experts by the shape of their path."""
        shapes = dict.fromkeys(text[: m.end()] for text in self._numbered for m in _EXPERTS.finditer(text))
        return {shape: Stacks(shape, self._numbered) for shape in shapes}

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
    def dtypes(self) -> frozenset[str]:
        """The dtypes that are known of some tensor."""
        return frozenset(dtype for dtype, *_ in self.checkpoint.kinds if dtype is not None)

    @property
    def has_headers(self) -> bool:
        """Whether dtypes and shapes are known of at least one tensor."""
        return bool(self.dtypes)

    def size(self, names: Iterable[str]) -> int:
        """Bytes of these tensors together, as far as known."""
        tensors = self.checkpoint.tensors
        return sum(t.nbytes or 0 for n in names if (t := tensors.get(n)) is not None)


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def split(name: str) -> tuple[str, str]:
    """The module of a tensor and its leaf, so that what belongs together shares a module.

    `x.q_proj.weight` -> (`x.q_proj`, `weight`), `x.weight.quant_state.nf4` -> (`x`, `weight.quant_state.nf4`),
    `experts.down_proj_scales` -> (`experts.down_proj`, `_scales`).
    """
    if ".weight." in name:
        module, _, rest = name.partition(".weight.")
        return module, f"weight.{rest}"
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" and module.endswith("centroids"):  # VPTQ keeps its codebooks in embeddings below the module
        module, _, own = module.rpartition(".")
        return module, f"{own}.weight"
    if leaf != "weight" and "_proj" in leaf and (match := _FUSED_TAIL.search(leaf)):
        return f"{module}.{leaf[: match.start()]}", match[0]
    return (module, leaf) if "_proj" not in leaf else (name, "")


def joined(module: str, leaf: str) -> str:
    """The tensor name that `split` takes apart."""
    return module + leaf if not leaf or _FUSED_TAIL.fullmatch(f"x{leaf}", 1) else f"{module}.{leaf}"


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    queue: list[tuple[str, dict[str, Any]]] = [("", config)]
    while queue:
        path, section = queue.pop(0)
        for key, value in section.items():
            if isinstance(value, dict) and "quant" not in str(key) and len(queue) < 200 and path.count(".") < 4:
                queue.append((f"{path}{key}.", value))
            elif isinstance(value, int) and not isinstance(value, bool):
                yield f"{path}{key}", value

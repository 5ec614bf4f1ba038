"""The loader's own `from_pretrained`, given tensors that are already where they belong.

Only the reading of files is replaced: transformers opens each shard and slices each tensor as always, and gets a tensor on its device
instead of a copy made on the way. Its rules, checks and conversions run unchanged. Facts: transformers 5.17.0 and 5.24.0,
`modeling_utils.py` (`_load_pretrained_model`, `caching_allocator_warmup`) and `core_model_loading.py`
(`convert_and_load_state_dict_in_model`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Protocol, Self
from unittest.mock import patch

import torch

from ckaudit.materialize.dtypes import torch_dtype, torch_shape
from ckaudit.materialize.layout import Layout, Stored


class TensorSource(Protocol):
    """Where tensors come from: `stream.DeviceStream` or `hostmap.HostMap`."""

    def take(self, index: int) -> torch.Tensor:
        """The tensor of this index in the layout, the first time it is asked for. Raises what reading raised."""
        ...


Reread = Callable[[Stored], torch.Tensor]


class Slice:
    """What transformers takes for a safetensors slice: knows its shape and dtype, gives its tensor when indexed."""

    __slots__ = ("_index", "_joints", "_reread", "_source", "_stored")

    def __init__(
        self, stored: Stored, index: int | None, source: TensorSource, reread: Reread, joints: set[int] | None
    ) -> None:
        self._stored, self._index, self._source, self._reread, self._joints = stored, index, source, reread, joints

    def get_shape(self) -> list[int]:
        """The shape as the file declares it."""
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """The safetensors name of the dtype."""
        return self._stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as the file declares it."""
        return self._stored.shape

    def __getitem__(self, item: Any) -> torch.Tensor:
        index, self._index = self._index, None
        if index is not None:
            tensor = self._source.take(index)
            if self._joints is not None:
                self._joints.add(tensor.untyped_storage().data_ptr())
            return tensor if item is ... else tensor[item]
        # Asked for again, or not in the plan (the earlier of two tensors of one name): read on its own.
        data = self._reread(self._stored)
        return data.view(torch_dtype(self._stored.dtype)).view(torch_shape(self._stored.dtype, self._stored.shape))[
            item
        ]


class Shard:
    """What transformers takes for an open safetensors file."""

    def __init__(self, slices: Mapping[str, Slice]) -> None:
        self._slices = slices

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        """The names in the file."""
        return list(self._slices)

    def metadata(self) -> dict[str, str]:
        """What transformers wants to see in every file."""
        return {"format": "pt"}

    def get_slice(self, name: str) -> Slice:
        """A tensor that is not read yet."""
        return self._slices[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor."""
        return self._slices[name][...]


@contextmanager
def handed_over(
    layout: Layout, files: Sequence[str], every: Sequence[Stored], source: TensorSource, reread: Reread
) -> Iterator[None]:
    """Inside, transformers gets the tensors of `files` from `source`. `every` lists all tensors in them, the unwanted included."""
    import transformers.core_model_loading as loading
    import transformers.modeling_utils as modeling

    wanted = {(t.shard, t.name): i for i, t in enumerate(layout.tensors)}
    shared = [len(layout.arenas[arena].members) > 1 for arena, _ in layout.home]
    opened: list[dict[str, Slice]] = [{} for _ in files]
    joints: set[int] = set()
    for tensor in every:
        index = wanted.get((tensor.shard, tensor.name))
        where = joints if index is not None and shared[index] else None
        opened[tensor.shard][tensor.name] = Slice(tensor, index, source, reread, where)
    shards = {os.path.realpath(path): slices for path, slices in zip(files, opened, strict=True)}

    def safe_open(filename: Any, *_args: Any, **_kwargs: Any) -> Shard:
        # A file that is not in the plan (a trial of some shards) has nothing to give.
        return Shard(shards.get(os.path.realpath(filename), {}))

    with ExitStack() as stack:
        stack.enter_context(patch.object(modeling, "safe_open", safe_open))
        # It would allocate the model a second time: its tensors are on the device, or on the way.
        stack.enter_context(patch.object(modeling, "caching_allocator_warmup", lambda *_a, **_k: None))
        stack.enter_context(patch.object(modeling, "_is_on_hf_mount", lambda _path: False, create=True))
        stack.enter_context(patch.object(loading, "deepcopy", _light_copy))
        # One tensor after another, in order: a thread pool would ask for all at once and keep what conversions should free.
        stack.enter_context(patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        for name in ("stack", "cat"):
            stack.enter_context(
                patch.object(torch, name, _joining(getattr(torch, name), joints, new_axis=name == "stack"))
            )
        yield


def join_patterns(model_types: Sequence[str]) -> list[list[str]]:
    """Source patterns of the converters that join tensors, for models that contain these types; a hint for `layout.plan`."""
    from transformers import conversion_mapping as mapping
    from transformers import core_model_loading as loading

    joins: list[list[str]] = []
    for model_type in model_types:
        for rule in mapping.get_checkpoint_conversion_mapping(model_type) or ():
            kinds = [type(op) for op in getattr(rule, "operations", ())]
            if kinds and kinds[0] in (loading.MergeModulelist, loading.Concatenate):
                patterns = [str(p) for p in getattr(rule, "_original_source_patterns", rule.source_patterns)]
                if patterns not in joins:
                    joins.append(patterns)
    return joins


def _joining(original: Callable[..., torch.Tensor], joints: set[int], *, new_axis: bool) -> Callable[..., torch.Tensor]:
    """`torch.stack` or `torch.cat` that answers with a view where the tensors already lie in memory as the result would.

    Only for memory whose address is in `joints`: it was laid out for this, and nobody else holds it.
    """

    def join(tensors: Any, dim: Any = 0, **kwargs: Any) -> torch.Tensor:
        if not kwargs and joints and isinstance(tensors, list | tuple) and len(tensors) > 1:
            first = tensors[0]
            if isinstance(first, torch.Tensor) and not first.is_meta and first.untyped_storage().data_ptr() in joints:
                joined = joined_view(tensors, dim, new_axis=new_axis)
                if joined is not None:
                    return joined
        return original(tensors, dim, **kwargs)

    return join


def joined_view(tensors: Sequence[torch.Tensor], dim: int, *, new_axis: bool) -> torch.Tensor | None:
    """The tensors as one view of the memory they share, joined along `dim`; None where they do not lie that way.

    `new_axis`: as `torch.stack` joins, else as `torch.cat` does.
    """
    if len(tensors) < 2 or not all(isinstance(t, torch.Tensor) for t in tensors):
        return None
    first = tensors[0]
    if not isinstance(dim, int) or not first.numel() or first.is_meta or first.requires_grad:
        return None
    rank = first.dim() + int(new_axis)
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        return None
    if new_axis:
        step = tensors[1].storage_offset() - first.storage_offset()
        shape, strides = list(first.shape), list(first.stride())
        shape.insert(dim, len(tensors))
        strides.insert(dim, step)
        steps = [step] * len(tensors)
    else:
        shape, strides = list(first.shape), list(first.stride())
        shape[dim] = sum(t.shape[dim] for t in tensors)
        steps = [t.shape[dim] * strides[dim] for t in tensors]
    return first.as_strided(shape, strides) if _in_line(tensors, dim, steps, new_axis) else None


def _in_line(tensors: Sequence[torch.Tensor], dim: int, steps: Sequence[int], new_axis: bool) -> bool:
    """Whether each tensor starts `steps` elements behind the one before it, and is like it in everything else."""
    first = tensors[0]
    home, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor, step in zip(tensors, steps, strict=True):
        same = tensor.dtype == first.dtype and tensor.device == first.device and tensor.stride() == first.stride()
        sizes = [
            (a, b) for i, (a, b) in enumerate(zip(tensor.shape, first.shape, strict=False)) if new_axis or i != dim
        ]
        if not same or tensor.dim() != first.dim() or any(a != b for a, b in sizes) or step <= 0:
            return False
        if tensor.storage_offset() != offset or tensor.untyped_storage().data_ptr() != home:
            return False
        offset += step
    return True


def settle(model: Any) -> None:
    """Give every parameter that a join left with gaps memory of its own."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_contiguous() and not parameter.is_meta:
                module._parameters[name] = torch.nn.Parameter(parameter.data.contiguous(), parameter.requires_grad)


def _light_copy(value: Any) -> Any:
    """`copy.deepcopy`, cheap for a conversion rule: the loader copies one for each tensor in the file, to collect tensors in.

    What a copy is for is state of its own; the patterns and operations are shared.
    """
    import copy

    import transformers.core_model_loading as loading

    if not isinstance(value, loading.WeightTransform):
        return copy.deepcopy(value)
    new = object.__new__(type(value))
    kind: type = type(value)
    for slot in _slots(kind):
        if hasattr(value, slot):
            object.__setattr__(new, slot, getattr(value, slot))
    object.__setattr__(new, "collected_tensors", defaultdict(list))
    object.__setattr__(new, "layer_targets", defaultdict(set))
    return new


@cache
def _slots(kind: Hashable) -> tuple[str, ...]:
    """Everything that a conversion rule holds."""
    return tuple(slot for base in getattr(kind, "__mro__", ()) for slot in base.__dict__.get("__slots__", ()))

"""The loader's own `from_pretrained`, given tensors that are already where they belong.

Only the reading of files is replaced: transformers opens each shard and slices each tensor as always, and gets a tensor on its device
instead of a copy made on the way. Its rules, checks and conversions run unchanged. Facts: transformers 5.17.0 and 5.24.0,
`modeling_utils.py` (`_load_pretrained_model`, `caching_allocator_warmup`) and `core_model_loading.py`
(`convert_and_load_state_dict_in_model`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

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

    def __init__(self, stored: Stored, index: int | None, source: TensorSource, reread: Reread) -> None:
        self._stored, self._index, self._source, self._reread = stored, index, source, reread

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
            return self._source.take(index)[item]
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
    shards: dict[str, dict[str, Slice]] = {os.path.realpath(f): {} for f in files}
    for tensor in every:
        index = wanted.get((tensor.shard, tensor.name))
        shards[os.path.realpath(files[tensor.shard])][tensor.name] = Slice(tensor, index, source, reread)

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
        stack.enter_context(JoinInPlace())
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


class JoinInPlace(TorchFunctionMode):  # type: ignore[misc]
    """Answers `torch.stack` and `torch.cat` with a view, where the tensors already lie in memory as the result would."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (func is torch.stack or func is torch.cat) and args and "out" not in kwargs:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            joined = joined_view(args[0], dim, new_axis=func is torch.stack)
            if joined is not None:
                return joined
        return func(*args, **kwargs)


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
    for kind in type(value).__mro__:
        for slot in kind.__dict__.get("__slots__", ()):
            if hasattr(value, slot):
                object.__setattr__(new, slot, getattr(value, slot))
    for name, member in vars(value).items() if hasattr(value, "__dict__") else ():
        object.__setattr__(new, name, member)
    object.__setattr__(new, "collected_tensors", defaultdict(list))
    object.__setattr__(new, "layer_targets", defaultdict(set))
    return new

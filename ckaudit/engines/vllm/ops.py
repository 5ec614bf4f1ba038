"""What each operation of torch does to elements: moves them, computes with them, or depends on data. The table behind the observer.

Every handler gets the call after it ran on meta tensors and reports writes; shapes and strides are then torch's own, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ckaudit.engines.vllm.record import Mode
from ckaudit.engines.vllm.strided import MOST_BOXES

aten = torch.ops.aten


class Observer(Protocol):
    """What a handler reports to."""

    def write(self, mode: Mode, dest: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """`sources` went into `dest`; for the mode `copy` they are broadcast to its shape."""
        ...

    def constant(self, dest: torch.Tensor, scalars: Sequence[Any] = ()) -> None:
        """`dest` was filled with something that no tensor holds."""
        ...

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real content of a small tensor, if it can be known."""
        ...


Handler = Callable[[Observer, tuple[Any, ...], dict[str, Any], Any], None]


def tensors(values: Any) -> list[torch.Tensor]:
    """Every tensor among (nested) arguments, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [t for v in values for t in tensors(v)]


def elementwise(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Each element of the result from the elements in its place (scalars and tensors of one element broadcast)."""
    found = tensors(args) + [t for k, v in kwargs.items() if k != "out" for t in tensors(v)]
    for result in tensors(out):
        see.write("copy", result, found)


def in_place(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """`x.mul_(y)` and the like: the old value of `x` is one of the sources."""
    elementwise(see, args, kwargs, args[0] if args else out)


def mixed(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Each element of the result may depend on all elements of every argument (a sum, a matmul)."""
    found = tensors(args) + [t for k, v in kwargs.items() if k != "out" for t in tensors(v)]
    for result in tensors(out):
        see.write("mixed", result, found)


def moved(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """The result is made of elements of the arguments, in an order that is not followed."""
    for result in tensors(out):
        see.write("moved", result, tensors(args) + tensors(kwargs))


def unknown(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Which elements go where depends on data."""
    for result in tensors(out):
        see.write("unknown", result, tensors(args) + tensors(kwargs))


def copy(see: Observer, args: tuple[Any, ...], _kwargs: dict[str, Any], _out: Any) -> None:
    see.write("copy", args[0], [args[1]])


def fill(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """`fill_`, `zero_`, and random initialisation: from a tensor when one is given, else a constant."""
    target, values = args[0], tensors(args[1:])
    if values:
        see.write("copy", target, values)
    else:
        see.constant(target, args[1:])
    del kwargs, out


def foreach_copy(see: Observer, args: tuple[Any, ...], _kwargs: dict[str, Any], _out: Any) -> None:
    for dest, source in zip(args[0], args[1], strict=True):
        see.write("copy", dest, [source])


def foreach(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Any other `_foreach_` operation: element by element, list by list."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and tensors(a)]
    results = out if out is not None else args[0]
    for i, dest in enumerate(results):
        see.write("copy", dest, [x[i] for x in lists if len(x) == len(results)])


def cat(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    start = 0
    for part in args[0]:
        if part.dim() == 1 and part.numel() == 0:
            continue  # torch.cat skips legacy empty tensors whatever the other shapes
        see.write("copy", out.narrow(dim, start, part.shape[dim]), [part])
        start += part.shape[dim]


def stack(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, part in enumerate(args[0]):
        see.write("copy", out.select(dim, i), [part])


def pad(see: Observer, args: tuple[Any, ...], _kwargs: dict[str, Any], out: torch.Tensor) -> None:
    """constant_pad_nd: a constant, then the tensor on its region (a negative pad crops it)."""
    source, widths = args[0], args[1]
    see.constant(out)
    inside = out
    for i in range(len(widths) // 2):
        dim, before, after = out.dim() - 1 - i, widths[2 * i], widths[2 * i + 1]
        source = source.narrow(dim, max(0, -before), source.shape[dim] + min(0, before) + min(0, after))
        inside = inside.narrow(dim, max(0, before), source.shape[dim])
    see.write("copy", inside, [source])


def repeat(see: Observer, args: tuple[Any, ...], _kwargs: dict[str, Any], out: torch.Tensor) -> None:
    """Tensor.repeat: the result, its dimensions split into (times, size), is the tensor broadcast."""
    source, times = args[0], args[1]
    shape = (1,) * (len(times) - source.dim()) + tuple(source.shape)
    split = out.view([n for pair in zip(times, shape, strict=True) for n in pair])
    see.write("copy", split, [_spread(source, shape)])


def _spread(source: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for i in range(len(shape) - source.dim()):
        source = source.unsqueeze(i)
    for i in range(len(shape)):
        source = source.unsqueeze(2 * i)
    return source


def runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending runs of a list of indices: (position, first index, length)."""
    out: list[tuple[int, int, int]] = []
    for position, index in enumerate(indices):
        if out and out[-1][1] + out[-1][2] == index:
            start, first, n = out[-1]
            out[-1] = (start, first, n + 1)
        else:
            out.append((position, index, 1))
    return out


def _known(see: Observer, index: Any, size: int) -> list[tuple[int, int, int]] | None:
    """The runs of a one-dimensional index whose values are known and few enough; a bool mask is turned into indices."""
    if not isinstance(index, torch.Tensor) or index.dim() != 1:
        return None
    real = see.values(index)
    if real is None:
        return None
    if real.dtype in (torch.bool, torch.uint8):
        real = real.nonzero().flatten()
    found = runs([int(i) % size for i in real.tolist()])
    return found if len(found) <= MOST_BOXES else None


def _one_index(index: Sequence[Any]) -> tuple[int, Any] | None:
    """The dimension and the index of `x[:, :, index]`, when there is just one."""
    held = [(d, i) for d, i in enumerate(index) if i is not None]
    return held[0] if len(held) == 1 else None


def index(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    """`x[indices]`: exact for one known index, else `unknown` elements of `x`."""
    one = _one_index(args[1])
    found = _known(see, one[1], args[0].shape[one[0]]) if one else None
    if one is None or found is None:
        unknown(see, (args[0],), kwargs, out)
        return
    for position, first, n in found:
        see.write("copy", out.narrow(one[0], position, n), [args[0].narrow(one[0], first, n)])


def index_select(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    index(see, (args[0], [*[None] * (args[1] % max(args[0].dim(), 1)), args[2]]), kwargs, out)


def index_put(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    """`x[indices] = values`: exact for one known index, else `unknown` elements of `x`."""
    target, indices, values = args[0], args[1], args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    one = _one_index(indices)
    found = _known(see, one[1], target.shape[one[0]]) if one else None
    if one is None or found is None or accumulate:
        see.write("unknown", target, [values])
        return
    dim = one[0]
    count = sum(n for _, _, n in found)
    values = values.expand(*target.shape[:dim], count, *target.shape[dim + 1 :])
    for position, first, n in found:
        see.write("copy", target.narrow(dim, first, n), [values.narrow(dim, position, n)])
    del out


def index_copy(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    target, dim = args[0], args[1]
    index_put(see, (target, [*[None] * (dim % max(target.dim(), 1)), args[2]], args[3]), kwargs, out)


def index_fill(see: Observer, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
    """Some rows become a constant: exact for a known index; else what was there is unsure."""
    target, dim = args[0], args[1]
    found = _known(see, args[2], target.shape[dim])
    if found is None:
        see.write("unknown", target, tensors(args[3:]))
        return
    for _, first, n in found:
        see.constant(target.narrow(dim, first, n), args[3:])
    del kwargs, out


def partly(see: Observer, args: tuple[Any, ...], _kwargs: dict[str, Any], _out: Any) -> None:
    """Masked and scattered writes: the sources reach some elements of the first argument."""
    see.write("unknown", args[0], tensors(args[1:]))


def nothing(_see: Observer, _args: tuple[Any, ...], _kwargs: dict[str, Any], _out: Any) -> None:
    """A view, a change of metadata, or an allocation: no element moves."""


_BY_NAME: dict[str, Handler] = {
    "copy_": copy, "_foreach_copy_": foreach_copy, "clone": elementwise, "_to_copy": elementwise,
    "fill_": fill, "zero_": fill, "fill": elementwise, "lift_fresh_copy": elementwise, "contiguous": elementwise,
    "cat": cat, "concat": cat, "stack": stack, "constant_pad_nd": pad, "repeat": repeat,
    "index": index, "index_select": index_select, "index_put_": index_put, "_index_put_impl_": index_put,
    "index_copy_": index_copy, "index_fill_": index_fill,
    "masked_scatter_": partly, "masked_fill_": partly, "scatter_": partly, "scatter_add_": partly, "scatter_reduce_": partly,
    "index_add_": partly, "index_reduce_": partly, "put_": partly, "masked_select": unknown, "gather": unknown, "take": unknown,
    "nonzero": unknown, "where": elementwise, "masked_fill": elementwise, "tril": elementwise, "triu": elementwise,
    "flip": moved, "roll": moved, "rot90": moved, "sort": moved, "unfold_copy": moved, "im2col": moved,
    "_unsafe_view": nothing, "lift_fresh": nothing, "set_": nothing, "resize_": nothing, "_local_scalar_dense": nothing,
    "detach_": nothing, "t_": nothing, "transpose_": nothing, "squeeze_": nothing, "unsqueeze_": nothing, "as_strided_": nothing,
    "empty": nothing, "empty_like": nothing, "empty_strided": nothing, "new_empty": nothing, "new_empty_strided": nothing,
}  # fmt: skip

_CHANCE = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")


def is_question(func: Any) -> bool:
    """Whether an operation answers with a bool or a number instead of a tensor (`allclose`)."""
    returns = func._schema.returns
    return bool(returns) and all(r.type.kind() in ("BoolType", "IntType", "FloatType", "NumberType") for r in returns)


def handler(func: Any) -> Handler:
    """How one operation is observed. What is not in the table is taken by torch's own tags: views move nothing, pointwise operations go
    element by element, and anything else may depend on everything it was given."""
    name = func._schema.name.partition("::")[2]
    if func.is_view:
        return nothing
    if name.rpartition("_copy")[0] and hasattr(aten, name.removesuffix("_copy")) and name not in _BY_NAME:
        return moved  # `transpose_copy` and the like: a view, then a copy
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in _CHANCE:
        return fill
    if name.startswith("new_") or name.endswith("_like"):
        return nothing  # made after the shape of a tensor, not of its elements
    if name.startswith("_foreach_"):
        return foreach
    if torch.Tag.pointwise in func.tags:
        return in_place if name.endswith("_") and func._schema.is_mutable else elementwise
    return partly if name.endswith("_") and func._schema.is_mutable else mixed

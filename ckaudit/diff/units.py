"""Tensors as units: what is compared is a weight, and a quantised weight is all of its tensors together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import msgspec

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.checks.facts import Facts, split
from ckaudit.checks.quantisers import has, recognised
from ckaudit.header import DTYPE_BITS

_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""Bits of one quantised element, in the schemes that are known."""


class Unit(msgspec.Struct, frozen=True, gc=False):
    """One weight of a checkpoint: a tensor, or a quantised weight with its companions (`scheme` names how)."""

    name: str
    """The tensor's name; for a quantised weight the name that the plain weight would have."""
    members: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...] | None
    """None when unknown: no header was read, or the scheme packs elements."""
    scheme: str | None = None
    bits: int | None = None
    """Bits of data of a quantised weight itself, companions apart."""
    lacks: str | None = None
    """A companion that its scheme needs and that is not stored."""


def plain(tensor: TensorSpec) -> Unit:
    """One tensor as a unit."""
    return Unit(tensor.name, (tensor.name,), tensor.dtype, tensor.shape)


def quantised(facts: Facts) -> dict[str, Unit]:
    """The quantised weights of a checkpoint by the name of the plain weight."""
    tensors = facts.checkpoint.tensors
    schemes: dict[str, tuple[str, str | None]] = {}
    for scheme, kinds in recognised(facts).items():
        for leaves, modules in kinds.items():
            lacks = next((need[0].rstrip("*") for need in scheme.needs if not any(has(leaves, n) for n in need)), None)
            schemes |= dict.fromkeys(modules, (scheme.name, lacks))
    members: dict[str, list[str]] = {}
    for name in tensors if schemes else ():
        module, leaf = split(name)
        if module in schemes and leaf != "bias":
            members.setdefault(module, []).append(name)
    found = (
        _unit(module, [tensors[n] for n in names], *schemes[module])
        for module, names in members.items()
        if len(names) > 1  # bytes without a scale are a cast
    )
    return {unit.name: unit for unit in (*found, *_fused(tensors))}


_SCALES = ("_scale_inv", "_scale", "_weight_scale", "_weight_scale_inv")


def _fused(tensors: Mapping[str, TensorSpec]) -> Iterator[Unit]:
    """Fused expert parameters in eight bits, whose scales have names of their own: `experts.down_proj` and `experts.down_proj_scale`."""
    for name, tensor in tensors.items():
        if (
            tensor.dtype is not None
            and (tensor.dtype.startswith("F8_") or tensor.dtype == "I8")
            and not name.endswith(".weight")
        ):
            scales = [tensors[name + s] for s in _SCALES if name + s in tensors]
            if scales:
                yield _unit(name, [tensor, *scales], "FP8" if tensor.dtype != "I8" else "int8")


def _unit(module: str, tensors: list[TensorSpec], scheme: str, lacks: str | None = None) -> Unit:
    name = f"{module}.weight"
    stored = next((t for t in tensors if t.name == name), None)
    if stored is None:
        if any(t.name.startswith(f"{module}_") for t in tensors):
            name = module  # a fused parameter: `experts.down_proj_blocks`
        stored = max(tensors, key=lambda t: t.nbytes or 0)
    whole = stored.dtype is not None and (stored.dtype.startswith("F8_") or stored.dtype == "I8")
    bits = prod(stored.shape) * DTYPE_BITS[stored.dtype] if stored.shape is not None and stored.dtype else None
    return Unit(
        name, tuple(t.name for t in tensors), stored.dtype, stored.shape if whole else None, scheme, bits, lacks
    )  # fmt: skip


def same_weight(one: Unit, other: Unit) -> bool:
    """Whether two are quantised alike, so that each companion has to be on both sides: of one scheme, or one has lost its scales."""
    if one.scheme is None or other.scheme is None:
        return one.scheme != other.scheme and one.dtype is not None and one.dtype == other.dtype
    return one.scheme == other.scheme


def fits(weight: Unit, packed: Unit) -> bool:
    """Whether a plain `weight` can be what `packed` holds: the same shape, or so many whole bits for each element. True when unknown."""
    if weight.shape is None or packed.bits is None:
        return True
    if packed.shape is not None:
        return packed.shape == weight.shape
    elements = prod(weight.shape)
    return elements > 0 and any(packed.bits == width * elements for width in _WIDTHS)


def members(
    one: Unit, other: Unit, a: Checkpoint, b: Checkpoint
) -> tuple[list[tuple[Unit, Unit]], list[Unit], list[Unit]]:
    """Two weights of one scheme tensor by tensor: pairs, and what one side alone has."""
    ours, theirs = ({split(n)[1]: plain(c.tensors[n]) for n in u.members} for u, c in ((one, a), (other, b)))
    return (
        [(ours[leaf], theirs[leaf]) for leaf in ours if leaf in theirs],
        [ours[leaf] for leaf in ours if leaf not in theirs],
        [theirs[leaf] for leaf in theirs if leaf not in ours],
    )


def units(checkpoint: Checkpoint, names: Iterable[str], collapsed: Mapping[str, Unit]) -> dict[str, Unit]:
    """Units of these tensors by name: those of `collapsed` as they are, every other tensor as one of its own."""
    inside = {m for unit in collapsed.values() for m in unit.members}
    found = {name: plain(checkpoint.tensors[name]) for name in names if name not in inside}
    return found | dict(collapsed)

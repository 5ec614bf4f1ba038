"""The modules of a base model that an adapter can be laid on, as one piece of software names them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ckaudit.checkpoint import Checkpoint
from ckaudit.header import FLOATS
from ckaudit.plan import Plan

Shape = tuple[int, ...]


class Surface(msgspec.Struct, frozen=True):
    """Modules by path, each with the shape of its weight where that is known, and the parameters that are no module's `weight`."""

    modules: dict[str, Shape | None]
    parameters: frozenset[str] = frozenset()
    biased: frozenset[str] = frozenset()
    """Modules with a bias as long as the last side of their weight: layers that keep the weight transposed (`Conv1D`)."""
    flat: dict[str, str] = {}
    """Path with `_` for `.`, as kohya writes it -> path."""
    into: dict[str, str] = {}
    """Module -> the fused module that holds it in this software: `q_proj` -> `qkv_proj`."""

    def holds(self, path: str) -> bool:
        """Whether there is such a module."""
        return path in self.modules


def of_tensors(tensors: Iterable[tuple[str, Shape | None, str | None]], strip: str = "") -> Surface:
    """The modules that own these tensors (name, shape, dtype), taken as they are named; `strip` goes off their front."""
    modules: dict[str, Shape | None] = {}
    names: dict[str, Shape | None] = {}
    for name, shape, dtype in tensors:
        path = name.removeprefix(strip)
        module, _, leaf = path.rpartition(".")
        names[path] = shape
        if not module:
            continue
        plain = (
            leaf == "weight" and shape is not None and dtype in FLOATS
        )  # a packed weight is narrower than its module
        if plain or module not in modules:
            modules[module] = shape if plain else None
    biased = {
        m
        for m, shape in modules.items()
        if shape is not None and len(shape) == 2 and names.get(f"{m}.bias") == shape[-1:] and shape[0] != shape[1]
    }
    return Surface(modules, frozenset(names), frozenset(biased), {m.replace(".", "_"): m for m in modules})


def of_checkpoint(base: Checkpoint, strip: str = "") -> Surface:
    """The modules of `base` by the names in its files."""
    return of_tensors(((t.name, t.shape, t.dtype) for t in base.tensors.values()), strip)


def of_plan(plan: Plan) -> Surface:
    """The modules of the model that the engine of `plan` builds, by its parameters."""
    return of_tensors((p.name, p.shape, p.dtype) for p in plan.parameters)


def of_fused(plan: Plan, base: Checkpoint) -> Surface:
    """As `of_plan`, with the parts of fused modules under the names that an adapter uses for them, and their shapes from the files.

    vLLM looks for `q_proj` beside its own `qkv_proj` (`packed_modules_mapping`): the last segment of a part is that of the stored module,
    the rest is the fused module's. Experts keep what follows `experts` in the stored name.
    """
    own = of_plan(plan)
    modules, into = dict(own.modules), {}
    for fate in plan.names:
        if fate.fate != "loaded" or fate.into is None:
            continue
        stored, _, leaf = fate.name.rpartition(".")
        module = fate.into.rpartition(".")[0]
        tensor = base.tensors.get(fate.name)
        shape = tensor.shape if tensor is not None and leaf == "weight" and tensor.dtype in FLOATS else None
        if fate.shard is not None and stored:
            part = _part(stored, module, fate.into)
            if part is not None and part != module:
                into[part] = module
                module = part
        if module and (shape is not None or module not in modules):
            modules[module] = shape
    return Surface(modules, own.parameters, own.biased, {m.replace(".", "_"): m for m in modules}, into)


def _part(stored: str, module: str, parameter: str) -> str | None:
    if ".experts." in stored and "experts" in parameter.split("."):
        head = parameter.split(".")
        return ".".join((*head[: head.index("experts")], "experts", stored.partition(".experts.")[2]))
    last = stored.rpartition(".")[2]
    return f"{module.rpartition('.')[0]}.{last}".removeprefix(".")


def union(surfaces: Mapping[str, Surface]) -> Surface:
    """Several components as one: each module under its component's name and under its own."""
    modules: dict[str, Shape | None] = {}
    for name, surface in surfaces.items():
        modules |= {f"{name}.{m}" if name else m: s for m, s in surface.modules.items()}
    return Surface(modules, flat={m.replace(".", "_"): m for m in modules})

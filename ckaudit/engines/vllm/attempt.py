"""One load of one checkpoint by the release's own loader, on a fresh model, and everything that could be seen of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines.transformers.tensors import torch_dtype
from ckaudit.engines.vllm import platform, stubs
from ckaudit.engines.vllm.coverage import Result
from ckaudit.engines.vllm.files import Shards
from ckaudit.engines.vllm.onload import plainly
from ckaudit.engines.vllm.packing import Declared, declared
from ckaudit.engines.vllm.provenance import Provenance
from ckaudit.engines.vllm.rulewatch import RuleWatch
from ckaudit.engines.vllm.values import NoValues
from ckaudit.errors import is_own_slip


class Raised(NamedTuple):
    """How a load ended: the exception, the checkpoint tensors and the parameter in its frames (innermost first), and why it says nothing
    about the checkpoint, where it does not."""

    error: BaseException
    names: tuple[str, ...]
    parameter: str | None
    finished: bool
    """Whether every weight had been taken: the start-up check raised."""
    excuse: str | None
    wanted: tuple[int, ...] | None = None
    """The shape of the part of `parameter` that was to be written, where the raising frame holds it."""
    at: str = ""
    """The path of the module whose `load_weights` raised: names in its message start there."""


class Attempt(NamedTuple):
    """What one load showed."""

    architecture: str
    raised: Raised | None
    result: Result
    yielded: tuple[str, ...]
    claimed: frozenset[str] | None
    rules: RuleWatch
    shards: dict[str, str]
    layout: dict[str, tuple[tuple[int, ...], str, bool]]
    """Shape, dtype and whether it is a buffer, of each parameter by name."""
    looked_at: tuple[str, ...]
    zeros: frozenset[str]
    """Parameters that the constructor made as zeros."""
    opened: tuple[str, ...]
    """The files that the release chose to read."""
    packed: tuple[Declared, ...]


def attempt(config: Any, tensors: Collection[TensorSpec], folder: Path, read: Callable[[str], bytes],
            model_config: Any = None) -> Attempt:  # fmt: skip
    """Build the model that `config` asks for, or the one of another `model_config` beside it, and run the release's loader on `tensors`.

    Raises what construction raises.
    """
    observer = Provenance(read)
    model_config = config.model_config if model_config is None else model_config
    model = build(config, observer, model_config)
    layout = {}
    for name, tensor, buffer in held(model):
        observer.watch(name, tensor)
        held_as = torch.Tensor.dtype.__get__(tensor)  # a bitsandbytes weight says the type it computes in
        layout[name] = (tuple(tensor.shape), str(held_as).removeprefix("torch."), buffer)
    order: list[str] = []

    def give(spec: TensorSpec) -> torch.Tensor:
        order.append(spec.name)
        return observer.give(spec.name, spec.shape or (), torch_dtype(spec.dtype))

    paths = {id(m): path for path, m in model.named_modules()}
    rules = RuleWatch(_mapper_class(), observer.name_of, lambda module: paths.get(id(module)))
    shards = Shards(tensors, folder, give)
    claims: list[Any] = []
    raised = None
    try:
        with plainly(model), _reading(shards), _claiming(model, claims), rules.active():
            _load(config, model, observer, model_config)
    except Exception as error:  # noqa: BLE001  (whatever the loader raises is the finding)
        raised = ending(error, observer, paths, started=bool(order), finished=bool(claims))
    parameters = [(name, tensor) for name, tensor, _ in held(model)]
    return Attempt(type(model).__name__, raised, observer.result(parameters, beside(model)), tuple(order),
                   frozenset(claims[0]) if claims and claims[0] is not None else None, rules, observer.shards, layout,
                   observer.looked_at, frozenset(observer.zeros), tuple(shards.opened), declared(model))  # fmt: skip


def build(config: Any, observer: Provenance, model_config: Any) -> Any:
    """The model without data, as `BaseModelLoader.load_model` constructs it. The observer makes every tensor on `meta`, and knows the
    values of small ones, which some constructors look at."""
    from vllm.model_executor.model_loader.utils import initialize_model

    own = {} if model_config is config.model_config else {"model_config": model_config}
    with default_dtype(model_config.dtype), stubs.building(), observer, platform.on_meta():
        model = initialize_model(config, **own)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "meta":
            _to_meta(model, name, tensor)
    return model


def _to_meta(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
        new.__dict__.update(tensor.__dict__)
        owner._parameters[leaf] = new
    else:
        owner._buffers[leaf] = tensor.to("meta")


def held(model: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Parameters and persistent buffers of a model by name (a tied one by its first), and whether each is a buffer."""
    for name, tensor in model.named_parameters():
        yield name, tensor, False
    for path, module in model.named_modules():
        for leaf, tensor in module._buffers.items():
            if tensor is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, tensor, True


def beside(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the loader hung on parameters, under the parameters' names: the quantisation state of a bitsandbytes weight."""
    for name, tensor in model.named_parameters():
        for value in vars(tensor).values():
            yield from ((name, found) for found in _within(value, 4))


def _within(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            yield value
    elif depth > 0 and not callable(value) and not isinstance(value, type):
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for inner in value if isinstance(value, list | tuple) else held.values():
            yield from _within(inner, depth - 1)


def _load(config: Any, model: Any, observer: Provenance, model_config: Any) -> None:
    """The release's loader for this load format, weights only: what comes after (`process_weights_after_loading`) is out of scope."""
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config)
    with default_dtype(model_config.dtype), torch.no_grad(), observer:
        loader.load_weights(model, model_config)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype inside this context, as a release sets it."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@contextmanager
def _reading(shards: Shards) -> Iterator[None]:
    """The release's file iterators open `shards` instead of files."""
    from vllm.model_executor.model_loader import weight_utils

    real = weight_utils.safe_open
    weight_utils.safe_open = shards.open
    try:
        yield
    finally:
        weight_utils.safe_open = real


@contextmanager
def _claiming(model: Any, claims: list[Any]) -> Iterator[None]:
    """Keep what the model's `load_weights` returns: the names that it says it has loaded."""
    real = model.load_weights

    def load_weights(weights: Any) -> Any:
        out = real(weights)
        claims.append(None if out is None else set(out))
        return out

    model.load_weights = load_weights
    try:
        yield
    finally:
        del model.load_weights


def _mapper_class() -> Any:
    from vllm.model_executor.models.utils import WeightsMapper

    return WeightsMapper


def ending(
    error: BaseException, observer: Provenance, paths: Mapping[int, str], *, started: bool, finished: bool
) -> Raised:
    """How a load ended, told from the frames of its exception. `paths`: a module's path by its id."""
    names: dict[str, None] = {}
    parameter = None
    place: torch.Tensor | None = None
    for frame in _frames(error.__traceback__):
        views = []
        loop = "load_weights" in frame.f_code.co_name  # whose variables may be left from the weight before
        for value in list(frame.f_locals.values()):
            if not isinstance(value, torch.Tensor) or value.device.type != "meta":
                continue
            name, into = observer.name_of(value), observer.parameter_of(value)
            if name is not None:
                names[name] = None
            if loop and not observer.untouched(value):
                continue
            views += [value] if into is not None else []
            parameter = parameter or into
        if place is None and views:  # of a parameter and a view of it, the view is what was to be written
            place = min(views, key=torch.Tensor.numel)
    excuse = None
    if isinstance(error, NoValues):
        excuse = f"the loader looks at values: {error}"
    elif not started:
        excuse = f"{type(error).__name__} before the first weight was read: {error}"
    else:
        found = "ckaudit itself broke down" if is_own_slip(error) else stubs.touched(error)
        excuse = f"{found} ({type(error).__name__}: {error})" if found else None
    wanted = None if place is None else tuple(place.shape)
    return Raised(error, () if finished else tuple(names), parameter, finished, excuse, wanted, _at(error, paths))


def _at(error: BaseException, paths: Mapping[int, str]) -> str:
    """The path of the innermost module that was loading its weights, by itself or through a loader that holds it."""
    for frame in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        module = owner if isinstance(owner, torch.nn.Module) else getattr(owner, "module", None)
        if id(module) in paths and hasattr(module, "load_weights"):
            return paths[id(module)]
    return ""


def _frames(trace: TracebackType | None) -> Iterator[Any]:
    """The frames of a traceback, innermost first, without those of ckaudit and of torch."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        if not str(frame.f_globals.get("__name__", "")).startswith(("ckaudit.", "torch.")):
            yield frame

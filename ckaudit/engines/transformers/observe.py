"""Observers around transformers' loader: which rule rewrote a name, which tensor reached which parameter, what was left.

They look and never alter. They stand on names of `transformers/core_model_loading.py` and `modeling_utils.py` that are private to
transformers; releases 5.17.0 and 5.24.0 were read and run. A release that has moved one of them fails at `watch`, before anything is
judged, rather than in a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import transformers.core_model_loading as core
import transformers.modeling_utils as modeling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ckaudit.engines.transformers.classes import NotForUs
from ckaudit.engines.transformers.shapes import Shapes
from ckaudit.engines.transformers.tensors import Fed, tag, tags
from ckaudit.plan import Step


class Fired(msgspec.Struct):
    """One rule of the conversion mapping (a `WeightTransform`) and how many names it changed."""

    kind: str
    sources: list[str]
    targets: list[str]
    at: str
    base: str
    hits: int = 0


class Group(msgspec.Struct):
    """One conversion: the checkpoint tensors that went in, by pattern, and the parameters that came out."""

    target: str
    sources: list[tuple[str, str]]
    """(checkpoint name, source pattern that it was collected under), in the order of collection."""
    targets: list[str]
    """Every parameter that the rule fills from here, as far as its own patterns tell."""
    patterns: list[str]
    """The rule's own source patterns; the checkpoint name itself for a plain rename."""
    converter: bool
    outputs: dict[str, tuple[tuple[str, ...], int]] = {}
    """Parameter -> (checkpoint tensors that reached it, its number of elements)."""
    error: bool = False
    unknown: bool = False
    """Not run: the shapes of its tensors are not known and cannot be borrowed."""
    by_value: bool = False
    """A quantisation method's own operation took part: it may use companions by value, which leaves no trace."""


class Record:
    """What was seen of one load."""

    def __init__(self, fed: Fed) -> None:
        self.fed = fed
        self.stage = "construct"
        self.model: Any = None
        self.quantizer: Any = None
        self.info: Any = None
        self.expected: dict[str, Any] = {}
        self.buffers: frozenset[str] = frozenset()
        self.tied: dict[str, str] = {}
        self.rules: list[Fired] = []
        self.chains: dict[str, list[Step]] = {}
        self.renamed: dict[str, str] = {}
        self.collected: dict[str, list[tuple[str, str]]] = {}
        self.groups: list[Group] = []
        self.written: dict[str, torch.dtype] = {}
        self.reshaped: set[str] = set()
        """Targets that were given a tensor of another shape than their own."""
        self.unset: set[str] = set()
        """Targets that the module holds as None: the loader calls them unexpected after all."""
        self.raw_missing: set[str] = set()
        """Missing parameters before the loader takes those out that it lets be missing."""


_KINDS = {"WeightRenaming": "rename", "WeightConverter": "convert", "PrefixChange": "prefix"}


class _Watched:
    """A rule as the loader's renaming function sees it, reporting each name that it changes."""

    def __init__(self, transform: Any, record: Record) -> None:
        self._rename = transform.rename_source_key
        self._fired = Fired(
            kind=_KINDS.get(type(transform).__name__, type(transform).__name__),
            sources=list(transform.source_patterns),
            targets=list(transform.target_patterns),
            at=transform.scope_prefix or "",
            base=transform.base_model_prefix or "",
        )
        self._converter = isinstance(transform, core.WeightConverter)
        self.steps: list[Step] = []
        record.rules.append(self._fired)

    def rename_source_key(self, key: str) -> tuple[str, str | None]:
        renamed, pattern = self._rename(key)
        if pattern is not None and (renamed != key or self._converter):
            fired = self._fired
            fired.hits += 1
            self.steps.append(Step(rule=fired.kind, key=pattern, at=fired.at, before=key, after=renamed))
        return renamed, pattern


class _Flow(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed by mypy
    """Marks the result of every tensor operation with the checkpoint tensors that its inputs came from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        seen: dict[str, None] = {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                seen.update(dict.fromkeys(tags(value)))
        if seen:
            for value in tree_iter(out):
                if isinstance(value, torch.Tensor):
                    tag(value, (*dict.fromkeys((*tags(value), *seen)),))
        return out


def _materialize(tensor: Any, device: Any = None, dtype: Any = None) -> Any:  # noqa: ARG001  (stays on meta)
    """What `_materialize_copy` does to a tensor without data: the cast. Ten times cheaper, and the mark survives."""
    if dtype is None or dtype == tensor.dtype:
        return tensor
    return tag(torch.empty_like(tensor, dtype=dtype), tags(tensor))


class _Hooks:
    """The replacements, bound to one record; each calls what it replaces."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._rename: Callable[..., tuple[str, str | None]] = core.rename_source_key
        self.load = modeling.convert_and_load_state_dict_in_model
        self.add = core.WeightTransform.add_tensor
        self.set = core.set_param_for_module
        self.adjust = modeling.PreTrainedModel._adjust_missing_and_unexpected_keys
        self.report = modeling.log_state_dict_report
        self._lists: dict[int, list[_Watched]] = {}
        self._steps: list[Step] = []
        self._shapes: Shapes | None = None
        self._borrowing = False

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        record, model = self.record, kwargs["model"]
        record.model, record.quantizer = model, kwargs["load_config"].hf_quantizer
        record.expected = dict(model.state_dict())
        record.buffers = frozenset(name for name, _ in model.named_buffers())
        record.tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        if record.fed.shapeless:
            self._shapes = Shapes(model, record.expected, kwargs["load_config"].weight_mapping or [])
        record.stage = "convert"
        out = self.load(*args, **kwargs)
        record.info, record.stage = out[0], "finalize"
        return out

    def _watched(self, transforms: list[Any]) -> list[_Watched]:
        if id(transforms) not in self._lists:
            self._lists[id(transforms)] = watched = [_Watched(t, self.record) for t in transforms]
            for one in watched:
                one.steps = self._steps
        return self._lists[id(transforms)]

    def rename_source_key(
        self, source_key: str, weight_renamings: Any, weight_converters: Any, base_model_prefix: Any = None,
        meta_state_dict: Any = None, **kwargs: Any,
    ) -> tuple[str, str | None]:  # fmt: skip
        if kwargs.get("reverse"):
            return self._rename(
                source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict, **kwargs
            )
        steps = self._steps
        steps.clear()
        # The loader asks a second time, with no rules, for a name that is fine as it is; its two literals have no lasting identity.
        rules = (
            (self._watched(weight_renamings), self._watched(weight_converters))
            if weight_renamings or weight_converters
            else ([], [])
        )
        renamed, pattern = self._rename(source_key, *rules, base_model_prefix, meta_state_dict, **kwargs)
        last = steps[-1].after if steps else source_key
        if last != renamed:
            steps.append(Step(rule="base prefix", key=str(base_model_prefix), at="", before=str(last), after=renamed))
        if steps:
            self.record.chains[source_key] = steps.copy()
        else:
            self.record.chains.pop(source_key, None)
        self.record.renamed[source_key] = renamed
        return renamed, pattern

    def add_tensor(self, transform: Any, target: str, source: str, pattern: str, future: Any) -> Any:
        if not self._borrowing:
            self.record.collected.setdefault(target, []).append((source, pattern))
        return self.add(transform, target, source, pattern, future)

    def converting(self, original: Any, *, converter: bool) -> Any:
        """A replacement for one class's `convert` that follows the tensors through it."""

        def convert(transform: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
            if self._borrowing:
                return original(transform, layer_name, *args, **kwargs)
            operations = [*getattr(transform, "operations", ()), transform.quantization_operation]
            group = Group(
                target=layer_name,
                sources=self.record.collected[layer_name],
                targets=[layer_name.replace(transform.target_patterns[0], t) for t in transform.target_patterns],
                patterns=list(transform.source_patterns),
                converter=converter,
                by_value=any(op is not None and type(op).__module__ != core.__name__ for op in operations),
            )
            self.record.groups.append(group)
            if not self._lend(transform, group):
                group.unknown = True
                raise core.SkipParameters
            try:
                if converter or transform.quantization_operation is not None:
                    with _Flow():
                        out = original(transform, layer_name, *args, **kwargs)
                else:
                    out = original(transform, layer_name, *args, **kwargs)
            except BaseException:
                group.error = True
                raise
            for target, value in out.items():
                tensor = value[0] if isinstance(value, list) else value
                group.outputs[target] = (tags(tensor), tensor.numel())
            return out

        return convert

    def _lend(self, transform: Any, group: Group) -> bool:
        if self._shapes is None:
            return True
        self._borrowing = True  # the way back runs the same functions: not what this load does
        try:
            return self._shapes.lend(transform, group.sources, group.target, self.record.fed.shapeless)
        finally:
            self._borrowing = False

    def set_param(self, model: Any, target: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        dtype, ref = value.dtype, self.record.expected.get(target)
        if getattr(ref, "shape", value.shape) != value.shape:
            self.record.reshaped.add(target)
        out = self.set(model, target, value, *args, **kwargs)
        module, _, leaf = target.rpartition(".")
        if leaf != "_extra_state" and getattr(model.get_submodule(module) if module else model, leaf, None) is None:
            self.record.unset.add(target)
        else:
            self.record.written[target] = dtype
        return out

    def adjust_keys(self, model: Any, info: Any) -> Any:
        self.record.raw_missing = set(info.missing_keys)
        return self.adjust(model, info)

    def log_report(self, *args: Any, **kwargs: Any) -> Any:
        self.record.info = kwargs.get("loading_info", self.record.info)
        return self.report(*args, **kwargs)


@contextmanager
def watch(record: Record) -> Iterator[None]:
    """Observe every load inside the block. Raises NotForUs on a release whose loader is not built as those that were read."""
    try:
        hooks = _Hooks(record)
    except AttributeError as error:
        raise NotForUs(f"this release of transformers loads in a way that ckaudit does not know ({error})") from error
    rename, convert = core.WeightRenaming.convert, core.WeightConverter.convert
    replaced: list[tuple[Any, str, Any]] = [
        (core, "rename_source_key", hooks.rename_source_key),
        (core, "set_param_for_module", hooks.set_param),
        (core, "_materialize_copy", _materialize),
        (core.WeightTransform, "add_tensor", lambda self, *a: hooks.add_tensor(self, *a)),
        (core.WeightRenaming, "convert", hooks.converting(rename, converter=False)),
        (core.WeightConverter, "convert", hooks.converting(convert, converter=True)),
        (modeling, "convert_and_load_state_dict_in_model", hooks.load_state_dict),
        (modeling, "log_state_dict_report", hooks.log_report),
        (
            modeling.PreTrainedModel,
            "_adjust_missing_and_unexpected_keys",
            lambda self, info: hooks.adjust_keys(self, info),
        ),
    ]
    with replacing(replaced):
        yield


@contextmanager
def replacing(replaced: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes for the length of the block; an attribute that is not there is an AttributeError."""
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)

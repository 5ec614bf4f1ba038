"""The real content of small tensors, worked out only when a loader looks at it (`.item()`, a comparison, a list of indices).

Each small storage remembers the operations that wrote it. Asking for its content replays them on real tensors; where they begin at a
checkpoint tensor, its bytes are asked of the checkpoint. Parameters have no known content before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ckaudit.engines.vllm.record import Record

SMALL = 1 << 20
"""Bytes. Larger storages are never fetched or computed."""


class NoValues(Exception):  # noqa: N818  (a reason not to judge)
    """A loader looked at values that cannot be known here: nothing it does after that can be judged."""


class _Held(NamedTuple):
    """A tensor argument as it was at the time of the operation."""

    record: Record
    version: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Step(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    result: _Held


class Values:
    """The programs of small storages, by record."""

    def __init__(self, record_of: Callable[[torch.Tensor], Record], read: Callable[[str], bytes] | None) -> None:
        self._record_of = record_of
        self._read = read
        self._steps: dict[int, list[_Step | None]] = {}
        self._known: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._start: dict[int, torch.UntypedStorage] = {}
        self.looked_at: dict[str, None] = {}
        """Names of the checkpoint tensors whose real bytes were asked for."""

    def real(self, meta: torch.Tensor, real: torch.Tensor) -> None:
        """`meta` stands for this real tensor."""
        if real.untyped_storage().nbytes() <= SMALL:
            dense = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
            dense.copy_(real)
            self._start[id(self._record_of(meta))] = dense.untyped_storage()

    def before(self, given: Sequence[torch.Tensor]) -> dict[int, int]:
        """The number of writes that each storage had seen before an operation."""
        out = {}
        for tensor in given:
            record = self._record_of(tensor) if tensor.untyped_storage().nbytes() <= SMALL else None
            if record is not None:
                out[id(record)] = len(self._steps.get(id(record), ()))
        return out

    def after(self, func: Any, args: Any, kwargs: Any, out: Any, versions: dict[int, int]) -> None:
        """Remember an operation for each small storage that it made or changed."""
        mutable = func._schema.is_mutable
        for result in _tensors(out) if not mutable else _written(func, args, kwargs):
            if result.untyped_storage().nbytes() > SMALL:
                continue
            record = self._record_of(result)
            steps = self._steps.setdefault(id(record), [])
            try:
                held = (self._hold(args, versions), self._hold(kwargs, versions))
                steps.append(_Step(func, *held, self._one(result, versions, mutable)))
            except NoValues:
                steps.append(None)

    def _one(self, tensor: torch.Tensor, versions: dict[int, int], mutable: bool) -> _Held:
        record = self._record_of(tensor)
        version = versions.get(id(record), 0) if mutable else 0
        return _Held(record, version, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def _hold(self, value: Any, versions: dict[int, int]) -> Any:
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().nbytes() > SMALL:
                raise NoValues
            record = self._record_of(value)
            version = versions.get(id(record), 0)
            return _Held(record, version, tuple(value.shape), value.stride(), value.storage_offset(), value.dtype)
        if isinstance(value, dict):
            return {k: self._hold(v, versions) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._hold(v, versions) for v in value]
        return value

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real content of a tensor. Raises NoValues."""
        if tensor.device.type != "meta":
            return tensor
        record = self._record_of(tensor)
        held = _Held(record, len(self._steps.get(id(record), ())), tuple(tensor.shape), tensor.stride(),
                     tensor.storage_offset(), tensor.dtype)  # fmt: skip
        with torch.utils._python_dispatch._disable_current_modes():
            return self._view(held)

    def _view(self, held: _Held) -> torch.Tensor:
        storage = self._content(held.record, held.version)
        return _strided(storage, held)

    def _content(self, record: Record, version: int) -> torch.UntypedStorage:
        key = (id(record), version)
        if key not in self._known:
            self._known[key] = self._replay(record, version)
        return self._known[key]

    def _replay(self, record: Record, version: int) -> torch.UntypedStorage:
        if version == 0:
            return self._beginning(record)
        step = self._steps[id(record)][version - 1]
        if step is None:
            raise NoValues(f"values of {record.name or 'an intermediate tensor'} are not known")
        args, kwargs = self._fill(step.args), self._fill(step.kwargs)
        if not step.func._schema.is_mutable:
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu")
            out = step.func(*args, **kwargs)
            real = out if isinstance(out, torch.Tensor) else out[0]
            fresh = torch.empty_strided(step.result.shape, step.result.stride, dtype=step.result.dtype)
            fresh.copy_(real)
            return fresh.untyped_storage()
        storage = self._content(record, version - 1).clone()
        target = _strided(storage, step.result)
        step.func(*_retarget(step, args, target), **_retarget_named(step, kwargs, target))
        return storage

    def _beginning(self, record: Record) -> torch.UntypedStorage:
        if id(record) in self._start:
            return self._start[id(record)]
        if record.kind == "tensor" and self._read is not None and record.nbytes <= SMALL:
            try:
                data = self._read(record.name)
            except OSError as error:
                raise NoValues(f"{record.name} could not be read ({error})") from error
            self.looked_at[record.name] = None
            if len(data) != record.nbytes:
                raise NoValues(f"{record.name} could not be read")
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
        if record.kind == "unwritten":
            return torch.zeros(record.nbytes, dtype=torch.uint8).untyped_storage()
        raise NoValues(f"values of {record.name or 'an intermediate tensor'} are not known")

    def _fill(self, value: Any) -> Any:
        if isinstance(value, _Held):
            return self._view(value)
        if isinstance(value, dict):
            return {k: self._fill(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._fill(v) for v in value]
        return value

    def instead(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that meta tensors do not support (its shape depends on data), where its values are known."""
        try:
            real_args = self._real(args)
            real_kwargs = self._real(kwargs)
        except NoValues as error:
            raise NoValues(f"{func} depends on values that are not known ({error})") from None
        with torch.utils._python_dispatch._disable_current_modes():
            out = func(*real_args, **real_kwargs)
        return self._stand_in(out)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if isinstance(value, dict):
            return {k: self._real(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._real(v) for v in value]
        return value

    def _stand_in(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            meta = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
            self.real(meta, out)
            return meta
        if isinstance(out, list | tuple):
            return type(out)(self._stand_in(o) for o in out)
        return out


def _is_target(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _retarget(step: _Step, args: list[Any], target: torch.Tensor) -> list[Any]:
    """The arguments, the one that the operation writes into replaced (a list of targets is not followed)."""
    marked = [_is_target(a) for a in step.func._schema.arguments]
    if any(m and isinstance(a, list) for m, a in zip(marked, args, strict=False)):
        raise NoValues("an operation that writes several tensors")
    return [target if m else a for m, a in zip(marked, args, strict=False)]


def _retarget_named(step: _Step, kwargs: dict[str, Any], target: torch.Tensor) -> dict[str, Any]:
    marked = {a.name for a in step.func._schema.arguments if _is_target(a)}
    return {k: target if k in marked else v for k, v in kwargs.items()}


def _strided(storage: torch.UntypedStorage, held: _Held) -> torch.Tensor:
    empty = torch.empty(0, dtype=held.dtype)
    return empty.set_(storage, held.offset, held.shape, held.stride)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a mutating operation writes into."""
    return [
        tensor
        for position, name in _targets(func)
        for tensor in _tensors(args[position] if position < len(args) else kwargs.get(name))
    ]


@lru_cache(maxsize=4096)
def _targets(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes into, by its schema."""
    return tuple((i, a.name) for i, a in enumerate(func._schema.arguments) if _is_target(a))

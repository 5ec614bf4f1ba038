"""Watch a loader run on tensors without data, and keep which elements went where.

`Provenance` is a torch dispatch mode: while it is active every operation passes through it, whatever Python code called it, so a write
cannot be missed by its spelling. Each storage keeps an append-only log of its writes; at the end the logs are followed back from the
tensors that the model then holds (a parameter may have been replaced, or pointed at other data, on the way).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckaudit.engines.vllm import ops, shard_ids
from ckaudit.engines.vllm.coverage import Held, Result, cover
from ckaudit.engines.vllm.hooks import hooked
from ckaudit.engines.vllm.record import Mode, Record, Source, Write
from ckaudit.engines.vllm.storages import Storages, address, joint
from ckaudit.engines.vllm.strided import injective
from ckaudit.engines.vllm.trace import Tracer
from ckaudit.engines.vllm.values import NoValues, Values
from ckaudit.engines.vllm.views import Views

Read = Callable[[str], bytes]

_ZEROS = "zeros"
_ITEM = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default
_KINDS = (("float8_e8m0", "float"), ("float8", "float8"), ("float4", "float4"), ("float", "float"), ("bfloat", "float"),
          ("complex", "complex"), ("bool", "bool"))  # fmt: skip


def kind_of(dtype: torch.dtype) -> str:
    """float, float8, float4, complex, bool or int: a cast between two of these changes what the bits mean. E8M0, a power of two to scale
    by, is a float."""
    name = str(dtype).removeprefix("torch.")
    return next((kind for prefix, kind in _KINDS if name.startswith(prefix)), "int")


class Provenance(TorchDispatchMode):  # type: ignore[misc]
    """The observer. Register tensors with `watch` and `yielded`, run the loader inside `with`, then ask `result`."""

    def __init__(self, read: Read | None = None) -> None:
        super().__init__()
        self._storages = Storages()
        self._handlers: dict[Any, ops.Handler] = {}
        self._owners: dict[int, str] = {}
        self._former: dict[str, list[Record]] = {}
        self._yielded: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # held, so that an id is not given to another tensor
        self._scalars: dict[Any, tuple[str, ...]] = {}
        self._tracer = Tracer()
        self._values = Values(self._storages.of, read)
        self.zeros: set[str] = set()
        """What is watched and was made as zeros."""
        self.shards: dict[str, str] = {}
        """By checkpoint tensor: the part of a fused parameter that the loader says it is (`q`, `0`, `expert 3 w1`)."""
        self._views = Views()
        self._around = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs as much as an operation

    # -- what is watched

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter or buffer of the model, before loading. A storage that two names share is one storage."""
        record = self._storages.of(tensor)
        if record.kind != "parameter":
            if record.name == _ZEROS and not record.log:
                self.zeros.add(name)
            record.kind, record.name = "parameter", name
            record.log.clear()  # how the constructor filled it is not loading
            self._tracer = Tracer()
        self._former[name] = [record]
        self._owners[id(tensor)] = name
        self._kept.append(tensor)

    def yielded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A checkpoint tensor that is about to be given to the loader (again, under another name, is a new tensor)."""
        self._storages.make("tensor", name, tensor)
        self._yielded[name] = tensor
        return tensor

    def give(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        """A new checkpoint tensor without data."""
        with torch._C._DisableTorchDispatch():  # this one is not of the loader's making
            return self.yielded(name, torch.empty(shape, dtype=dtype, device="meta"))

    def __enter__(self) -> Any:
        self._around.enter_context(hooked(self))
        self._around.enter_context(self._views)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._around.close()

    # -- what happens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is None:
            if self._views.pass_by(func):
                return func(*args, **kwargs)
            handler = self._handlers[func] = ops.handler(func)
        if func is _LIFT:
            return self._lifted(args[0]) if args[0].device.type != "meta" else args[0]
        if func is _ITEM and args[0].device.type == "meta":
            return self._scalar(args[0])
        return self._run(func, handler, args, kwargs)

    def _run(self, func: Any, handler: ops.Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = ops.tensors(args) + ops.tensors(kwargs)
        if not all(t.is_meta for t in given):
            args, kwargs = self._on_meta(args), self._on_meta(kwargs)
            given = ops.tensors(args) + ops.tensors(kwargs)
        if "device" in kwargs and (not given or kwargs["device"] is not None):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        versions = self._values.before(given)
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:  # `equal` is not there for tensors without data, `allclose` fails in the middle
            if not isinstance(error, NotImplementedError) and not ops.is_question(func):
                raise
            out = self._values.instead(func, args, kwargs)
        name, mutable = func._schema.name, func._schema.is_mutable
        if "empty" in name and not mutable:
            for result in ops.tensors(out):
                self._storages.make("unwritten", "", result)
        elif name.endswith("zeros"):
            for result in ops.tensors(out):
                self._storages.make("constant", _ZEROS, result)
        elif (mutable and given) or any(
            t in self._storages for t in given
        ):  # else nothing that a log must know happened
            handler(self, args, kwargs, out)
        self._values.after(func, args, kwargs, out, versions)
        return out

    def _on_meta(self, values: Any) -> Any:
        """The arguments, real tensors replaced by meta tensors whose values are known (torch refuses to mix them)."""
        if isinstance(values, torch.Tensor):
            return values if values.device.type == "meta" else self._lifted(values)
        if isinstance(values, dict):
            return {k: self._on_meta(v) for k, v in values.items()}
        if isinstance(values, list | tuple) and any(isinstance(v, torch.Tensor | list | tuple) for v in values):
            return type(values)(self._on_meta(v) for v in values) if type(values) in (list, tuple) else values
        return values

    def _lifted(self, real: torch.Tensor) -> torch.Tensor:
        """A meta tensor in place of a real one, its values kept."""
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        self._storages.of(meta)
        self._values.real(meta, real)
        return meta

    def _scalar(self, tensor: torch.Tensor) -> Any:
        """`.item()`: the real value, asked of the checkpoint where it is one of its own."""
        real = self._values.of(tensor)
        value = real.item()
        record = self._storages.of(tensor)
        names = self._tracer.names(record, len(record.log))
        if names:
            self._scalars[value] = names
        return value

    @property
    def looked_at(self) -> tuple[str, ...]:
        """Checkpoint tensors whose real bytes the loader looked at."""
        return tuple(self._values.looked_at)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The checkpoint tensor that this tensor is a view of, or was made of alone."""
        record = self._storages.known(tensor)
        if record is None or record.kind == "parameter":
            return None
        if record.kind == "tensor" and not record.log:
            return record.name
        names = self._tracer.names(record, len(record.log))
        return names[0] if len(names) == 1 else None

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter that this tensor is a view of."""
        record = self._storages.known(tensor)
        return record.name if record is not None and record.kind == "parameter" else None

    def untouched(self, tensor: torch.Tensor) -> bool:
        """Whether nothing was written into the storage of this tensor."""
        record = self._storages.known(tensor)
        return record is None or not record.log

    def listed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real values of a tensor that is about to be read as a list. Raises NoValues."""
        return self._values.of(tensor)

    def replaced(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """A parameter is now another tensor, or has its data."""
        name = self._owners.get(id(old))
        if name is not None:
            self._former[name].append(self._storages.of(new))
            self._owners[id(new)] = name
            self._kept.append(new)

    # -- what handlers report

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real content of a small tensor, if it can be known."""
        try:
            return self._values.of(tensor)
        except NoValues:
            return None

    def constant(self, dest: torch.Tensor, scalars: Sequence[Any] = ()) -> None:
        """`dest` was filled with something that no tensor holds, or with a number that `.item()` gave."""
        names = next((self._scalars[s] for s in scalars if isinstance(s, int | float) and s in self._scalars), ())
        held = [self._yielded[n] for n in names if n in self._yielded]
        self.write("mixed" if held else "copy", dest, held)

    def write(self, mode: Mode, dest: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """`sources` went into `dest`; for the mode `copy` they are broadcast to its shape."""
        record = self._storages.of(dest)
        if mode == "copy" and record.kind == "constant" and not record.log and not sources:
            return
        if mode == "copy":
            sources = [s if s.shape == dest.shape else s.expand(dest.shape) for s in sources]
        known = [(tensor, self._storages.of(tensor)) for tensor in sources]
        known = [(tensor, k) for tensor, k in known if k.kind != "constant" or k.log]
        piece = joint([dest, *(tensor for tensor, _ in known)] if mode == "copy" else [dest])
        if not all(piece.sizes):
            return
        if mode != "unknown" and not injective(piece):
            mode, piece = "unknown", joint([dest])
        found = tuple(Source(k, len(k.log), tuple(tensor.shape), address(tensor)) for tensor, k in known)
        cast = _cast(dest, sources) if found else None
        if record.kind == "parameter":
            self._note_shard(found)
        record.log.append(Write(mode, piece, found, cast))

    def _note_shard(self, sources: Sequence[Source]) -> None:
        name = next((s.record.name for s in sources if s.record.kind == "tensor"), None)
        if name is not None and name not in self.shards and (shard := shard_ids.spoken()) is not None:
            self.shards[name] = shard

    # -- what came of it

    def result(
        self, model: Iterable[tuple[str, torch.Tensor]], beside: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> Result:
        """Coverage of every parameter that `model` now holds, and of every checkpoint tensor that was yielded. What is held `beside` a
        parameter, under its name, counts for the checkpoint tensors alone."""
        return cover(Held(model, beside), self._yielded, self._former, self._storages, self._tracer)


def _cast(dest: torch.Tensor, sources: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """The dtypes read and written, where they are of different kinds."""
    for tensor in sources:
        if tensor.dtype != dest.dtype and kind_of(tensor.dtype) != kind_of(dest.dtype):
            return str(tensor.dtype).removeprefix("torch."), str(dest.dtype).removeprefix("torch.")
    return None

"""Watch a loader run on tensors without data, and say which elements went where.

`Provenance` is a torch dispatch mode: while it is active every operation passes through it, whatever Python code called it, so a write
cannot be missed by its spelling. Each storage keeps an append-only log of its writes; at the end the logs are followed back from the
tensors that the model then holds (a parameter may have been replaced, or pointed at other data, on the way).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckaudit.engines.vllm import ops
from ckaudit.engines.vllm.hooks import hooked
from ckaudit.engines.vllm.record import Mode, Record, Source, Write
from ckaudit.engines.vllm.strided import Address, Inexpressible, Piece, injective, tidy, union_bytes
from ckaudit.engines.vllm.trace import Leaf, Lost, Tally, Tracer
from ckaudit.engines.vllm.values import NoValues, Values

Read = Callable[[str], bytes]

_SHARD_ARGUMENTS = frozenset(("loaded_shard_id", "shard_id", "expert_id"))
_ZEROS = "zeros"
_FRAMES = 12  # how far up a write looks for the loader that says which shard it is


class ParameterCoverage(NamedTuple):
    """How the elements of one parameter came about. `unknown` elements may or may not hold checkpoint data."""

    elements: int
    loaded: int
    constant: int
    unknown: int
    sources: tuple[str, ...]
    lost: tuple[Lost, ...]
    casts: tuple[tuple[str, str, str], ...]
    """Checkpoint tensor, its dtype, and the dtype of another kind that it became."""
    broadcast: tuple[str, ...]
    """Checkpoint tensors that filled more elements than they have."""


class TensorCoverage(NamedTuple):
    """How much of one checkpoint tensor lives in the model: `read` elements of `elements`, None when that cannot be told."""

    elements: int
    read: int | None
    into: tuple[str, ...]


class Result(NamedTuple):
    parameters: dict[str, ParameterCoverage]
    tensors: dict[str, TensorCoverage]


_KINDS = (("float8", "float8"), ("float4", "float4"), ("float", "float"), ("bfloat", "float"), ("complex", "complex"),
          ("bool", "bool"))  # fmt: skip


def kind_of(dtype: torch.dtype) -> str:
    """float, float8, float4, complex, bool or int: a cast between two of these changes what the bits mean."""
    name = str(dtype).removeprefix("torch.")
    return next((kind for prefix, kind in _KINDS if name.startswith(prefix)), "int")


class Provenance(TorchDispatchMode):  # type: ignore[misc]
    """The observer. Register tensors with `watch` and `yielded`, run the loader inside `with`, then ask `result`."""

    def __init__(self, read: Read | None = None) -> None:
        super().__init__()
        self._records: dict[int, Record] = {}
        self._handlers: dict[Any, ops.Handler] = {}
        self._watched: dict[str, torch.Tensor] = {}
        self._owners: dict[int, str] = {}
        self._former: dict[str, list[Record]] = {}
        self._yielded: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # held, so that an id is not given to another tensor
        self._scalars: dict[Any, tuple[str, ...]] = {}
        self._tracer = Tracer()
        self._making = False
        self._views: set[Any] = set()
        self._values = Values(self._record, read)
        self.zeros: set[str] = set()
        """What is watched and was made as zeros."""
        self.shards: dict[str, str] = {}
        """By checkpoint tensor: the part of a fused parameter that the loader says it is (`q`, `0`, `expert 3 w1`)."""
        self._hooks: AbstractContextManager[None] = nullcontext()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs as much as an operation

    # -- what is watched

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter or buffer of the model, before loading. A storage that two names share is one storage."""
        record = self._record(tensor)
        if record.kind != "parameter":
            if record.name == _ZEROS and not record.log:
                self.zeros.add(name)
            record.kind, record.name = "parameter", name
            record.log.clear()  # how the constructor filled it is not loading
            self._tracer = Tracer()
        self._watched[name] = tensor
        self._former[name] = [record]
        self._owners[id(tensor)] = name

    def yielded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A checkpoint tensor that is about to be given to the loader (again, under another name, is a new tensor)."""
        self._records[tensor.untyped_storage()._cdata] = self._make("tensor", name, tensor)
        self._yielded[name] = tensor
        return tensor

    def give(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        """A new checkpoint tensor without data."""
        self._making = True
        try:
            return self.yielded(name, torch.empty(shape, dtype=dtype, device="meta"))
        finally:
            self._making = False

    def __enter__(self) -> Any:
        self._hooks = hooked(self)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._hooks.__exit__(*exc)

    def _make(self, kind: Any, name: str, tensor: torch.Tensor) -> Record:
        storage = tensor.untyped_storage()
        return Record(kind, name, storage.nbytes(), str(tensor.dtype).removeprefix("torch."), storage)

    def _record(self, tensor: torch.Tensor) -> Record:
        """The record of a tensor's storage; one never seen before was made by the engine and holds constants."""
        key = tensor.untyped_storage()._cdata
        found = self._records.get(key)
        if found is None:
            found = self._records[key] = self._make("constant", "", tensor)
        return found

    # -- what happens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in self._views or self._making:
            return func(*args, **kwargs)
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = ops.handler(func)
            if func.is_view and not func._schema.is_mutable and func is not torch.ops.aten.lift_fresh.default:
                self._views.add(func)
                return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._lifted(args[0]) if args[0].device.type != "meta" else args[0]
        return self._run(func, handler, args, kwargs)

    def _run(self, func: Any, handler: ops.Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return self._scalar(args[0])
        args, kwargs = self._on_meta(args), self._on_meta(kwargs)
        given = ops.tensors(args) + ops.tensors(kwargs)
        if (not given and "device" in kwargs) or (
            kwargs.get("device") is not None and any(t.device.type == "meta" for t in given)
        ):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        versions = self._values.before(given)
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:
            out = self._values.instead(func, args, kwargs)
        results = ops.tensors(out)
        if "empty" in name and not func._schema.is_mutable:
            for result in results:
                self._records[result.untyped_storage()._cdata] = self._make("unwritten", "", result)
        elif name.endswith("zeros"):
            for result in results:
                self._records[result.untyped_storage()._cdata] = self._make("constant", _ZEROS, result)
        elif self._concerns(given, func):
            handler(self, args, kwargs, out)
        self._values.after(func, args, kwargs, out, versions)
        return out

    def _concerns(self, given: Sequence[torch.Tensor], func: Any) -> bool:
        """Whether anything that the logs must know can have happened."""
        if any(t.untyped_storage()._cdata in self._records for t in given):
            return True
        return bool(func._schema.is_mutable and given)

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
        self._record(meta)
        self._values.real(meta, real)
        return meta

    def _scalar(self, tensor: torch.Tensor) -> Any:
        """`.item()`: the real value, asked of the checkpoint where it is one of its own."""
        real = self._values.of(tensor)
        value = real.item()
        record = self._record(tensor)
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
        record = self._records.get(tensor.untyped_storage()._cdata)
        if record is None or record.kind == "parameter":
            return None
        names = self._tracer.names(record, len(record.log))
        return names[0] if len(names) == 1 else None

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter that this tensor is a view of."""
        record = self._records.get(tensor.untyped_storage()._cdata)
        return record.name if record is not None and record.kind == "parameter" else None

    def listed(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._values.of(tensor)

    def replaced(self, old: torch.Tensor, new: torch.Tensor) -> None:
        name = self._owners.get(id(old))
        if name is not None:
            self._former[name].append(self._record(new))
            self._owners[id(new)] = name
            self._kept.append(new)

    # -- what handlers report

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        try:
            return self._values.of(tensor)
        except NoValues:
            return None

    def constant(self, dest: torch.Tensor, scalars: Sequence[Any] = ()) -> None:
        names = next((self._scalars[s] for s in scalars if isinstance(s, int | float) and s in self._scalars), ())
        held = [self._yielded[n] for n in names if n in self._yielded]
        self.write("mixed" if held else "copy", dest, held)

    def write(self, mode: Mode, dest: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        record = self._record(dest)
        shape = tuple(dest.shape)
        place = _address(dest)
        if mode == "copy" and record.kind == "constant" and not record.log and not sources:
            return
        if mode != "unknown" and not injective(Piece(shape, (place,))):
            mode = "unknown"
        found = []
        for tensor in sources:
            if mode == "copy" and tuple(tensor.shape) != shape:
                tensor = tensor.expand(shape)
            known = self._record(tensor)
            if known.kind == "constant" and not known.log:
                continue
            found.append(Source(known, len(known.log), tuple(tensor.shape), _address(tensor)))
        cast = self._cast(dest, sources) if found else None
        at = (place, *(s.at for s in found)) if mode == "copy" else (place,)
        piece = Piece(shape, at)
        if record.kind == "parameter":
            self._note_shard(found)
        if all(piece.sizes):
            record.log.append(Write(mode, tidy(piece), tuple(found), cast))

    def _note_shard(self, sources: Sequence[Source]) -> None:
        """Which part of a fused parameter the loader says it is writing: the shard and expert ids of the frames that do it."""
        name = next((s.record.name for s in sources if s.record.kind == "tensor"), None)
        if name is None or name in self.shards:
            return
        frame: Any = sys._getframe(1)
        shard = expert = None
        for _ in range(_FRAMES):
            frame = frame.f_back
            if frame is None or name in self.shards:
                break
            # Only what a loader was called with: `load_weights` has loop variables of the same names, left from another weight.
            code = frame.f_code
            named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            local = frame.f_locals if _SHARD_ARGUMENTS.intersection(named) else {}
            shard = shard if shard is not None else local.get("loaded_shard_id", local.get("shard_id"))
            expert = expert if expert is not None else local.get("expert_id")
        if isinstance(shard, str | int | tuple):
            text = f"{shard[0]}-{shard[-1]}" if isinstance(shard, tuple) and shard else str(shard)
            self.shards[name] = f"expert {expert} {text}" if isinstance(expert, int) else text
        elif isinstance(expert, int):
            self.shards[name] = f"expert {expert}"

    def _cast(self, dest: torch.Tensor, sources: Sequence[torch.Tensor]) -> tuple[str, str] | None:
        for tensor in sources:
            if tensor.dtype != dest.dtype and kind_of(tensor.dtype) != kind_of(dest.dtype):
                return str(tensor.dtype).removeprefix("torch."), str(dest.dtype).removeprefix("torch.")
        return None

    # -- what came of it

    def result(
        self, model: Iterable[tuple[str, torch.Tensor]], beside: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> Result:
        """Coverage of every parameter that `model` now holds, and of every checkpoint tensor that was yielded. What is held `beside` a
        parameter, under its name, counts for the checkpoint tensors alone."""
        reads: dict[str, list[Piece] | None] = {name: [] for name in self._yielded}
        into: dict[str, dict[str, None]] = {name: {} for name in self._yielded}
        parameters = {}
        for name, tensor in model:
            parameters[name] = self._parameter(name, tensor, reads, into)
        for name, tensor in beside:
            self._parameter(name, tensor, reads, into)
        tensors = {}
        for name, tensor in self._yielded.items():
            places = reads[name]
            count = tensor.numel()
            read = None if places is None else _elements(places, tensor)
            tensors[name] = TensorCoverage(count, read, tuple(into[name]))
        return Result(parameters, tensors)

    def _parameter(self, name: str, tensor: torch.Tensor, reads: dict[str, list[Piece] | None],
                   into: dict[str, dict[str, None]]) -> ParameterCoverage:  # fmt: skip
        record, item = self._record(tensor), tensor.element_size()
        tally = Tally()
        order: dict[str, None] = {}
        casts: dict[tuple[str, str, str], None] = {}
        broadcast: dict[str, None] = {}
        try:
            for leaf in self._leaves(record, tensor):
                tally.add(leaf)
                if leaf.record is None or leaf.record.kind != "tensor":
                    continue
                source = leaf.record.name
                order[source] = None
                into.setdefault(source, {})[name] = None
                _note_read(reads, source, leaf)
                if leaf.cast:
                    casts[(source, *leaf.cast)] = None
                if leaf.broadcast:
                    broadcast[source] = None
            loaded, constant = tally.bytes("tensor") // item, tally.bytes("constant") // item
            unsure = tally.known_bytes(("tensor", "unknown")) // item - loaded if "unknown" in tally.places else 0
            lost = tuple(self._lost(name, record))
        except Inexpressible:
            names = self._tracer.names(record, len(record.log))
            for source in names:
                reads[source] = None
                into.setdefault(source, {})[name] = None
            return ParameterCoverage(tensor.numel(), 0, 0, tensor.numel(), names, (), (), ())
        return ParameterCoverage(tensor.numel(), loaded, min(constant, tensor.numel() - loaded), unsure, tuple(order), lost,
                                 tuple(casts), tuple(broadcast))  # fmt: skip

    def _leaves(self, record: Record, tensor: torch.Tensor) -> Iterable[Leaf]:
        address = _address(tensor)
        piece = Piece(tuple(tensor.shape), (address, address))
        if not all(piece.sizes):
            return ()
        return self._tracer.leaves(record, len(record.log), tidy(piece))

    def _lost(self, name: str, record: Record) -> Iterable[Lost]:
        yield from self._tracer.lost(record)
        kept = self._tracer.names(record, len(record.log))
        for former in self._former.get(name, []):
            gone = tuple(n for n in self._tracer.names(former, len(former.log)) if n not in kept)
            if former is not record and gone:
                yield Lost(gone, kept)


def _address(tensor: torch.Tensor) -> Address:
    item = tensor.element_size()
    return Address(tensor.storage_offset() * item, tuple(s * item for s in tensor.stride()), item)


def _note_read(reads: dict[str, list[Piece] | None], source: str, leaf: Leaf) -> None:
    held = reads.setdefault(source, [])
    if leaf.read is None:
        reads[source] = None
    elif held is not None:
        held.append(leaf.read)


def _elements(places: list[Piece], tensor: torch.Tensor) -> int | None:
    """Elements of a checkpoint tensor in the union of the places read; None if that cannot be told."""
    item: int = tensor.element_size()
    if len(places) == 1:
        return places[0].elements * places[0].at[0].item // item
    try:
        return union_bytes(places) // item
    except Inexpressible:
        return None

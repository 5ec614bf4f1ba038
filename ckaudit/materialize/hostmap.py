"""Tensors on the CPU: views of memory-mapped files, no second copy. Pages are read when something looks at them."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from ckaudit.errors import SourceError
from ckaudit.materialize.dtypes import torch_dtype, torch_shape
from ckaudit.materialize.layout import Layout, Stored
from ckaudit.materialize.reader import CHECK_FILE, cut_short
from ckaudit.materialize.stream import Ready


class MappedFiles:
    """Files mapped privately: what is written into a tensor never reaches the file."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read(self, tensor: Stored) -> torch.Tensor:
        """The bytes of a tensor, flat uint8. Raises SourceError where the file is shorter."""
        if not tensor.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            mapped = self._maps.get(tensor.shard) or self._map(tensor.shard)
        if tensor.stop > len(mapped):
            raise cut_short(self._files[tensor.shard], len(mapped), tensor.stop)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.start)

    def _map(self, shard: int) -> mmap.mmap:
        try:
            handle = os.open(self._files[shard], os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"Cannot open {self._files[shard]!r}: {error.strerror}.", CHECK_FILE) from error
        try:
            self._maps[shard] = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise SourceError(f"Cannot map {self._files[shard]!r}: {error}.", CHECK_FILE) from error
        finally:
            os.close(handle)
        return self._maps[shard]


class HostMap:
    """The tensors of a layout as views of their files; `ready` sees each once, in a thread of its own. A context manager."""

    def __init__(
        self,
        layout: Layout,
        files: MappedFiles,
        *,
        ready: Ready | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self._layout, self._files, self._ready, self._moved = layout, files, ready, moved
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._look, daemon=True) if ready is not None else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def take(self, index: int) -> torch.Tensor:
        """The tensor `layout.tensors[index]`, a view of its file. Raises SourceError."""
        tensor = self._layout.tensors[index]
        data = self._files.read(tensor)
        kind = torch_dtype(tensor.dtype)
        if data.data_ptr() % kind.itemsize:  # a header of odd length: no kernel takes a tensor that is not aligned
            data = data.clone()
        if self._ready is None and self._moved is not None:
            self._moved(tensor.nbytes)
        return data.view(kind).view(torch_shape(tensor.dtype, tensor.shape))

    def join(self) -> None:
        """Wait until `ready` has seen all. Raises what it raised."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(0.2)  # in steps, so that Ctrl-C is heard
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        try:
            for index, arena in enumerate(self._layout.arenas):
                if self._closed or self._ready is None:
                    return
                tensor = self._layout.tensors[arena.members[0][0]]
                data = self._files.read(tensor)
                if data.data_ptr() % 8:
                    data = data.clone()
                if tensor.nbytes:
                    self._ready(index, data, ())
                if self._moved is not None:
                    self._moved(tensor.nbytes)
        except BaseException as error:  # noqa: BLE001  (raised again by `join`)
            self._error = error

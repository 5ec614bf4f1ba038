"""The checkpoint as a folder that a release can read: its small files as they are, its shards as headers over a hole.

A shard is a sparse file with a true header and no data, so the release's own choice of files, its globs, sizes and indices all work;
`Shards` stands in for `safe_open` and gives tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines.transformers.classes import lay_out, leads_out
from ckaudit.header import DTYPE_BITS, TORCH_DTYPES

SAFETENSORS = {torch_name: name for name, torch_name in TORCH_DTYPES.items()}
"""torch's dtype name to safetensors'."""


def write_folder(texts: dict[str, bytes], tensors: Collection[TensorSpec], folder: Path, *, code: bool) -> None:
    """Lay the checkpoint out under `folder`. Paths that lead out of it are left out, as no loader could follow them."""
    lay_out(texts, folder, code=code)
    shards: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        shards.setdefault(tensor.shard, []).append(tensor)
    for name, held in shards.items():
        if leads_out(name):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _sparse(target, held)


def _sparse(path: Path, tensors: list[TensorSpec]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + (prod(tensor.shape or ()) * DTYPE_BITS.get(tensor.dtype or "", 8) + 7) // 8
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    data = msgspec.json.encode(header)
    data += b" " * (-len(data) % 8)
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)


class Shards:
    """`safe_open` for a release: the names of a shard in safetensors' order (sorted), and tensors without data for them."""

    def __init__(self, tensors: Collection[TensorSpec], folder: Path,
                 give: Callable[[TensorSpec], torch.Tensor]) -> None:  # fmt: skip
        self._folder = folder.resolve()
        self._give = give
        self._held: dict[str, dict[str, TensorSpec]] = {}
        self.opened: dict[str, None] = {}
        """The shards that the release chose to read, in its order."""
        for tensor in tensors:
            self._held.setdefault(tensor.shard, {})[tensor.name] = tensor

    def open(self, filename: str | Path, framework: str = "pt", device: Any = "cpu", **_: Any) -> _Shard:
        """As `safetensors.safe_open`. Raises FileNotFoundError for a file that is not of this checkpoint."""
        del framework, device
        path = Path(filename).resolve()
        shard = path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else str(filename)
        if shard not in self._held and not (path.is_relative_to(self._folder) and path.is_file()):
            raise FileNotFoundError(f"No such file or directory: {filename}")
        self.opened[shard] = None
        held = self._held.get(shard, {})  # of a shard that is there all tensors may have been set aside
        return _Shard(held, self._give)


class _Shard:
    def __init__(self, held: dict[str, TensorSpec], give: Callable[[TensorSpec], torch.Tensor]) -> None:
        self._held, self._give = held, give

    def __enter__(self) -> _Shard:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return sorted(self._held)

    def offset_keys(self) -> list[str]:
        return list(self._held)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def spec(self, name: str) -> TensorSpec:
        if name not in self._held:
            raise SafetensorError(f"File does not contain tensor {name}")  # as the real one does
        return self._held[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._give(self.spec(name))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name)


class _Slice:
    """`get_slice`: indexing gives a part of the tensor, its shape and type are known without it."""

    def __init__(self, shard: _Shard, name: str) -> None:
        self._shard, self._name = shard, name
        self._spec = shard.spec(name)

    def get_shape(self) -> list[int]:
        return list(self._spec.shape or ())

    def get_dtype(self) -> str:
        return self._spec.dtype or ""

    def __getitem__(self, item: Any) -> torch.Tensor:
        return self._shard.get_tensor(self._name)[item]

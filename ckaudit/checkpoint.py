"""Source -> Checkpoint: config, index and shard headers of a target. No tensor data is read."""

from __future__ import annotations

from typing import Any

import msgspec

from ckaudit.header import Defect, Header
from ckaudit.source import FileInfo


class Shard(msgspec.Struct, frozen=True):
    """One safetensors file. `header` is None where it was not there to read (an index-only target, an unreadable file)."""

    path: str
    size: int | None
    header: Header | None
    defects: tuple[Defect, ...] = ()
    """What is wrong with the file as a whole, header defects included."""


class Index(msgspec.Struct, frozen=True):
    """The `*.safetensors.index.json` that says which tensor lives in which shard."""

    path: str
    weight_map: dict[str, str]
    total_size: int | None
    metadata: dict[str, Any]
    defects: tuple[Defect, ...] = ()


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One checkpoint tensor: where it lives and what it is. `dtype`, `shape` and `nbytes` are None when no header was read."""

    name: str
    shard: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int | None


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything that can be known of a target without its tensor data."""

    name: str
    kind: str
    revision: str | None
    files: dict[str, FileInfo]
    config: dict[str, Any] | None
    """`config.json`, parsed; None where there is none or it is not JSON (then a defect says so)."""
    texts: dict[str, bytes]
    """Small files that decide loading, by path: config.json, hf_quant_config.json, adapter_config.json, model_index.json …"""
    index: Index | None
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorSpec]
    """By name, in shard order. A name stored in two shards keeps the later one, as loaders do; a defect says so."""
    defects: tuple[Defect, ...] = ()
    """What is wrong with the target as a whole (index against shards, stray files, no config)."""

    @property
    def index_only(self) -> bool:
        """Whether names come from the index alone, because no shard header could be read."""
        return self.index is not None and all(s.header is None for s in self.shards)

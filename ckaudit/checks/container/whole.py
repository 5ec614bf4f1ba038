"""The files of a checkpoint as a set, in the terms that the checks of this family share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from ckaudit.checkpoint import Checkpoint, Shard
from ckaudit.header import Header, TensorInfo
from ckaudit.index import Index


def what(info: TensorInfo) -> str:
    """Its dtype and shape as text."""
    return f"{info.dtype} {list(info.shape)}"


class Whole:
    """The set in the terms that its checks share. Paths are those in the audited folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.index: Index | None = checkpoint.index
        cut = len(checkpoint.folder)
        self.shards: dict[str, Shard] = {s.path[cut:]: s for s in checkpoint.shards}
        self.strays: dict[str, Shard] = {s.path[cut:]: s for s in checkpoint.strays}
        self.files = {p[cut:]: i for p, i in checkpoint.files.items() if p.startswith(checkpoint.folder)}
        own = checkpoint.name.rpartition("/")[2]
        self.one_file = own if own.endswith(".safetensors") and own in self.files else None
        """The file that the user named, when it was one."""

    @cached_property
    def headers(self) -> dict[str, Header]:
        """Of the shards that have one."""
        return {path: shard.header for path, shard in self.shards.items() if shard.header is not None}

    @cached_property
    def missing(self) -> list[str]:
        """Shards that the index names and the folder does not hold."""
        return [path for path in self.shards if path not in self.files]

    @cached_property
    def index_only(self) -> bool:
        """Whether a local target is an index without any weights: names alone were wanted."""
        here = any(path.endswith(".safetensors") for path in self.files)
        return self.index is not None and self.checkpoint.kind == "local" and not here

    @cached_property
    def obsolete(self) -> bool:
        """Whether the index names none of the files that are there, so that it cannot belong to them."""
        return bool(self.index and self.index.weight_map and self.headers) and not any(
            path in self.shards for path in self.named
        )

    @cached_property
    def named(self) -> dict[str, set[str]]:
        """Tensor names by file, as the index has them."""
        found: dict[str, set[str]] = {}
        for name, path in (self.index.weight_map if self.index else {}).items():
            found.setdefault(path, set()).add(name)
        return found

    @cached_property
    def absent(self) -> dict[str, str]:
        """Names that the index places in a shard whose header, though read, lacks them, and that shard."""
        found: dict[str, str] = {}
        for path, names in self.named.items():
            header = self.headers.get(path)
            if header is not None:
                found |= {name: path for name in names if name not in header.tensors}
        return found

    @cached_property
    def elsewhere(self) -> dict[str, str]:
        """Those of `absent` that another shard holds, and which."""
        return (
            {n: path for path, h in self.headers.items() for n in self.absent if n in h.tensors} if self.absent else {}
        )

    @cached_property
    def unindexed(self) -> dict[str, str]:
        """Names in shards that the index does not know at all, and their shard."""
        if self.index is None or not self.index.weight_map:
            return {}
        known = self.index.weight_map
        return {name: path for path, header in self.headers.items() for name in header.tensors if name not in known}

    @cached_property
    def foreign(self) -> bool:
        """Whether index and headers have so little in common that they are of different models."""
        listed = sum(len(names) for path, names in self.named.items() if path in self.headers)
        held = sum(len(header.tensors) for header in self.headers.values())
        lost = len(self.absent) - len(self.elsewhere)
        return lost > 1 and 2 * lost > listed and 2 * len(self.unindexed) > held

    @cached_property
    def rivals(self) -> list[str]:
        """Files that the index names while loaders take the one file beside it; none in most folders."""
        return [p for p in self.named if p in self.strays] if len(self.shards) == 1 and self.obsolete else []

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes of these tensors together, as far as headers tell."""
        tensors = self.checkpoint.tensors
        return sum(tensors[name].nbytes or 0 for name in names if name in tensors)

    def sizes(self, paths: Iterable[str]) -> int:
        """Bytes of these files together, as far as known."""
        return sum(info.size or 0 for path in paths if (info := self.files.get(path)))

"""The repos of a loopback Hub: files that may be sparse, commits, refs, and a large sharded checkpoint made on the spot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LFS = (".safetensors", ".bin", ".gguf", ".pt")


@dataclass(frozen=True)
class Sparse:
    """A file of `size` bytes that begins with `head`; the rest is zeros that are made when asked for."""

    head: bytes
    size: int

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.size)
        return self.head[start:stop].ljust(max(0, stop - start), b"\0")

    def __len__(self) -> int:
        return self.size


File = bytes | Sparse


@dataclass
class Repo:
    """One model repo: commits by sha, refs by name, and who may read it."""

    files: Mapping[str, File]
    gated: bool | str = False
    private: bool = False
    sizes: bool = True
    """Whether listings tell sizes, as some mirrors do not."""
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The listing of each commit, by path."""

    def __post_init__(self) -> None:
        self.push(self.files)

    @property
    def head(self) -> str:
        """The commit that `main` points at."""
        return self.refs["main"]

    def push(self, files: Mapping[str, File], ref: str = "main") -> str:
        """Adds a commit with exactly these files, moves `ref` to it, and returns its sha."""
        rows = {path: sibling(path, data) for path, data in files.items()}
        sha = hashlib.sha1(f"{len(self.commits)}{rows}".encode()).hexdigest()
        self.rows[sha] = rows
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit that a ref, a sha or the beginning of a sha stands for."""
        known = self.refs.get(revision) or next((s for s in self.commits if s == revision), None)
        return known or next((s for s in self.commits if len(revision) > 6 and s.startswith(revision)), None)


def sibling(path: str, data: File) -> dict[str, Any]:
    """One file in the listing. Bytes have their true sha256; a sparse file, one of its head and size."""
    content = data if isinstance(data, bytes) else data.head + str(data.size).encode()
    row: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(content).hexdigest()}
    if path.endswith(LFS):
        row["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(data), "pointerSize": 134}
    return row


def tree_entry(row: dict[str, Any]) -> dict[str, Any]:
    """The same file as the tree endpoint words it."""
    entry = {"type": "file", "oid": row["blobId"], "path": row["rfilename"], "size": row["size"]}
    if "lfs" in row:
        entry["lfs"] = {"oid": row["lfs"]["sha256"], "size": row["size"], "pointerSize": 134}
    return entry


def header(tensors: Mapping[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file's first bytes: the length prefix and the JSON of `{name: (dtype, shape, bytes)}`, data back to back."""
    entries, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sharded(shards: int, tensors: int) -> dict[str, File]:
    """A mixture-of-experts checkpoint: `shards` files of `tensors` 2048 x 768 BF16 matrices each, with config and index."""
    files: dict[str, File] = {"config.json": b'{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}'}
    weight_map: dict[str, str] = {}
    size = 2048 * 768 * 2
    for shard in range(shards):
        parts = ("gate_proj", "up_proj", "down_proj")
        names = [f"model.layers.{shard}.mlp.experts.{i // 3}.{parts[i % 3]}.weight" for i in range(tensors)]
        path = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        head = header({name: ("BF16", [2048, 768], size) for name in names})
        files[path] = Sparse(head, len(head) + tensors * size)
        weight_map |= dict.fromkeys(names, path)
    index = {"metadata": {"total_size": shards * tensors * size}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return files

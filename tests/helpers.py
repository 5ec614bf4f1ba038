"""Checkpoints made in memory, so that a case is one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckaudit.header import DTYPE_BITS
from ckaudit.source import MAX_WHOLE, FileInfo, Source, Span, Unreadable

Entries = Mapping[str, tuple[str, list[int]]]
"""Tensor name to safetensors dtype name and shape."""


def header_json(entries: Entries, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header as a dict, offsets in the order given, so that a test can spoil one field of it."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in entries.items():
        size = prod(shape) * DTYPE_BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return document


def encode(document: Any) -> bytes:
    """Prefix and header of `document`: JSON of a dict, or raw text or bytes that pretend to be some. Padded to 8 bytes, as files are."""
    raw = document if isinstance(document, bytes | str) else json.dumps(document, separators=(",", ":"))
    text = raw.encode() if isinstance(raw, str) else raw
    if not isinstance(document, bytes | str):
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header(entries: Entries, metadata: Mapping[str, str] | None = None) -> bytes:
    """Prefix and header of a sound file: `header({"a": ("BF16", [2, 2])})`."""
    return encode(header_json(entries, metadata))


def data_size(entries: Entries) -> int:
    """Bytes of data behind such a header."""
    return sum(prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in entries.values())


def safetensors_file(entries: Entries, metadata: Mapping[str, str] | None = {"format": "pt"}) -> bytes:
    """A whole sound file whose data is zero bytes."""
    return header(entries, metadata) + bytes(data_size(entries))


def index_file(weight_map: Mapping[str, str], total_size: int | None = None, **metadata: Any) -> bytes:
    """A `*.safetensors.index.json`."""
    if total_size is not None:
        metadata["total_size"] = total_size
    return json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}, indent=2).encode()


def checkpoint_files(
    shards: Mapping[str, Entries], config: Mapping[str, Any] | None = None, index: bool | None = None
) -> dict[str, bytes]:
    """A sound target: the shards, their index when there is more than one (or `index`), and `config.json`."""
    files = {name: safetensors_file(entries) for name, entries in shards.items()}
    if index if index is not None else len(shards) > 1:
        weight_map = {tensor: name for name, entries in shards.items() for tensor in entries}
        total = sum(data_size(entries) for entries in shards.values())
        files["model.safetensors.index.json"] = index_file(weight_map, total)
    files["config.json"] = json.dumps(
        dict(config or {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    ).encode()
    return files


def all_of(source: Source, path: str) -> bytes | Unreadable:
    """A (small) file of `source`, or why it cannot be read."""
    ((_, data),) = source.read_spans([Span(path, 0, MAX_WHOLE)])
    return data


class DictSource:
    """A Source over a dict of bytes. `unreadable` maps a path to why reading it fails; `sizes` lies about a size, None hides it.

    `reads` records every span, to count requests and bytes.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        name: str = "test/model",
        kind: str = "local",
        revision: str | None = None,
        unreadable: Mapping[str, str] | None = None,
        sizes: Mapping[str, int | None] | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.revision = revision
        self.data = dict(files)
        self.unreadable = dict(unreadable or {})
        self.sizes = dict(sizes or {})
        self.reads: list[Span] = []

    def files(self) -> dict[str, FileInfo]:
        return {path: FileInfo(path, self.sizes.get(path, len(self.data[path]))) for path in sorted(self.data)}

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes | Unreadable]]:
        for span in spans:
            self.reads.append(span)
            if span.path in self.unreadable:
                yield span, Unreadable(self.unreadable[span.path])
            else:
                yield span, self.data[span.path][span.start : span.stop]

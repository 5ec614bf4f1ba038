"""Source -> Checkpoint: config, index and shard headers of a target. No tensor data is read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec

from ckaudit import header, index, sniff
from ckaudit.checkpoint.layout import (
    INDEX,
    UNKNOWN_GUESS,
    Layout,
    candidates,
    choose,
    guess_from_index,
    guess_headers,
    other_weights,
)
from ckaudit.header import DTYPE_BITS, Defect, Header
from ckaudit.index import Index as Index
from ckaudit.naming import Alike, alike
from ckaudit.progress import NullProgress, Progress
from ckaudit.source import MAX_WHOLE, FileInfo, Source, Span, SpanQueue, Unreadable


class Shard(msgspec.Struct, frozen=True):
    """One safetensors file. `header` is None where it was not there to read (an index-only target, an unreadable file)."""

    path: str
    size: int | None
    header: Header | None
    defects: tuple[Defect, ...] = ()
    """What is wrong with the file as a whole, header defects included."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One checkpoint tensor: where it lives and what it is. `dtype`, `shape` and `nbytes` are None when no header was read."""

    name: str
    shard: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int | None


class Checkpoint(msgspec.Struct, frozen=True, dict=True):
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
    strays: tuple[Shard, ...] = ()
    """Safetensors files beside the shards that transformers does not read: their tensors are not in `tensors`."""
    folder: str = ""
    """The folder inside the target that is audited, `/` at its end; `texts` and messages leave it out, `shards` and `files` keep it."""

    @cached_property
    def alike(self) -> dict[str, Alike]:
        """The tensor names by shape: see `naming.alike`."""
        return alike(list(self.tensors))

    @cached_property
    def kinds(self) -> Counter[tuple[str | None, tuple[int, ...] | None, int | None]]:
        """How many tensors there are of each dtype, shape and number of bytes."""
        return Counter(map(attrgetter("dtype", "shape", "nbytes"), self.tensors.values()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor by name, where known."""
        found = dict(zip(self.tensors, map(attrgetter("nbytes"), self.tensors.values()), strict=True))
        known = all(nbytes is not None for _, _, nbytes in self.kinds)
        return found if known else {name: nbytes for name, nbytes in found.items() if nbytes is not None}

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes that the config names; none where `architectures` is no list of names."""
        named = (self.config or {}).get("architectures")
        return tuple(a for a in named if isinstance(a, str)) if isinstance(named, list) else ()

    @property
    def index_only(self) -> bool:
        """Whether names come from the index alone, because no shard header could be read."""
        return self.index is not None and all(s.header is None for s in self.shards)

    @property
    def unaudited(self) -> str | None:
        """Why there is nothing that an engine could load; None when there is something."""
        if self.tensors:
            return None
        if self.shards or self.index is not None:
            return "no tensor name can be read from what is here"
        files = [path.removeprefix(self.folder) for path in self.files if path.startswith(self.folder)]
        folders = components(files)
        if folders:
            return "the weights are in sub-folders, to be audited one by one: " + ", ".join(folders[:10])
        others = sorted({path.rpartition(".")[2].lower() for path in other_weights(files)})
        if others:
            return "no safetensors file is here, and ." + ", .".join(others) + " files are not read"
        return "no safetensors file is here"


TEXTS = (
    "config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json",
    "adapter_config.json", "model_index.json", "params.json", "modules.json",
)  # fmt: skip
"""Small files that decide how weights are loaded."""

_MODULE = re.compile(r"\d+_\w+/config\.json")
"""A module of a sentence-transformers model (`1_Pooling/config.json`): whether it is there decides which class vLLM builds."""

MAX_TEXT = 4_000_000
"""Bytes. A longer file of these names, or a longer Python file, is not read."""


def read_checkpoint(
    source: Source,
    *,
    progress: Progress | None = None,
    code: bool = False,
    jobs: int = 32,
    folder: str = "",
) -> Checkpoint:
    """Config, index and shard headers of `source`, or of one `folder` in it (a diffusers component). Reads no tensor data.

    `code`: the repo's `*.py` join `texts`, for engines that may run them. Raises SourceError when the target cannot be read;
    whatever is wrong with what it holds is a defect.
    """
    folder = folder.strip("/") + "/" if folder.strip("/") else ""
    every = source.files()
    files = {path.removeprefix(folder): info for path, info in every.items() if path.startswith(folder)}
    with header.without_collector():
        reading = _Reading(source.name, folder, files, code=code, jobs=jobs)
        with (progress or NullProgress()).task("Reading headers", len(reading.heads)) as task:
            for span, data in source.read_spans(reading.queue):
                if reading.take(span, data):
                    task.advance()
        found, layout, headers = reading.index, reading.layout, reading.done
        shards = tuple(_shard(folder + path, files.get(path), headers.get(path)) for path in layout.shards)
        tensors = _tensors(shards, found, folder)
    small, config, defects = reading.texts(), reading.config, reading.defects
    return Checkpoint(
        name=source.name,
        kind=source.kind,
        revision=source.revision,
        files=every,
        config=config,
        texts=small,
        index=found,
        shards=shards,
        tensors=tensors,
        defects=tuple(defects),
        strays=tuple(_shard(folder + path, files.get(path), headers.get(path)) for path in layout.strays),
        folder=folder,
    )


def components(files: Iterable[str]) -> tuple[str, ...]:
    """The folders that hold safetensors files of their own, sorted: what of a pipeline can be audited one by one."""
    return tuple(sorted({path.rpartition("/")[0] for path in files if path.endswith(".safetensors") and "/" in path}))


def _parse_config(data: bytes | None) -> tuple[dict[str, Any] | None, list[Defect]]:
    if data is None:
        return None, []
    try:
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        found = index.conflict(data) or sniff.not_json(data) or str(error)[:200]
        return None, [Defect("config-json", "config.json", "JSON", found)]
    if not isinstance(config, dict):
        return None, [
            Defect(
                "config-json",
                "config.json",
                "a JSON object",
                "null" if config is None else f"a {type(config).__name__}",
            )
        ]
    return config, []


def _decides(path: str, *, code: bool) -> bool:
    return path in TEXTS or _MODULE.fullmatch(path) is not None or (code and path.endswith(".py"))


class _Reading:
    """Everything that is read of a checkpoint, in one stream: no read waits for another that it does not need.

    The small files come first and the first headers beside them, with lengths guessed from the index's own size; once the index is
    here, the other headers follow with lengths guessed from the names.
    """

    def __init__(self, target: str, folder: str, files: Mapping[str, FileInfo], *, code: bool, jobs: int) -> None:
        self.target, self.folder, self.files = target, folder, files
        self.limits = {path: MAX_TEXT for path in files if _decides(path, code=code)}
        self.limits |= {path: MAX_WHOLE for path in files if INDEX.search(path) and "/" not in path}
        self.small: dict[str, bytes] = {}
        self.defects: list[Defect] = []
        self.config: dict[str, Any] | None = None
        self.index: Index | None = None
        self.layout = Layout(None, ())
        self.done: dict[str, Header | Unreadable] = {}
        self.begun: dict[str, bytes] = {}
        self.queue = SpanQueue(Span(folder + path, 0, limit) for path, limit in self.limits.items())
        self.waiting = set(self.limits)
        self.heads = candidates(files)
        early = guess_from_index(files, self.heads) if len(self.heads) > 2 * jobs else {}
        self.asked = set(list(early)[: 2 * jobs])
        self.queue.extend(Span(folder + path, 0, early[path]) for path in early if path in self.asked)
        if not self.waiting:
            self._arrange()

    def take(self, span: Span, data: bytes | Unreadable) -> bool:
        """Takes what was read; whether that completes a header."""
        path = span.path.removeprefix(self.folder)
        if path in self.waiting:
            self._take_small(path, span, data)
            return False
        if isinstance(data, Unreadable):
            self.done[path] = data
            return True
        start = self.begun.pop(path) + data if path in self.begun else data
        needed = header.needed(start, self.files[path].size)
        if span.start == 0 and needed > len(start):
            self.begun[path] = start
            self.queue.append(Span(span.path, len(start), needed))
            return False
        self.done[path] = header.parse(start, self.files[path].size)
        return True

    def texts(self) -> dict[str, bytes]:
        """The small files, indexes apart, in the order of the listing."""
        return {path: self.small[path] for path in self.limits if path in self.small and not INDEX.search(path)}

    def _take_small(self, path: str, span: Span, data: bytes | Unreadable) -> None:
        self.waiting.discard(path)
        if isinstance(data, Unreadable):
            self.defects.append(Defect("unreadable", path, "a readable file", data.reason))
        elif len(data) >= span.stop:
            self.defects.append(
                Defect(
                    "unreadable", path, f"fewer than {span.stop:,} bytes", f"{span.stop:,} bytes or more: left alone"
                )
            )
        else:
            self.small[path] = data
        if not self.waiting:
            self._arrange()

    def _arrange(self) -> None:
        """Once the small files are here: which files count, and the reads that are still to be asked for."""
        self.defects.sort(key=lambda defect: list(self.limits).index(defect.name or ""))
        self.config, faults = _parse_config(self.small.get("config.json"))
        self.defects += faults
        layout = choose(self.files, self.target, self.config)
        if layout.index in self.small:
            self.index = index.parse(layout.index, self.small[layout.index])
        self.layout = layout.with_index(self.index, self.files)
        weight_map = self.index.weight_map if self.index else {}
        guesses = guess_headers(weight_map, {path: info.size for path, info in self.files.items()})
        for path in (*self.layout.shards, *self.layout.strays):
            if path in self.files and path not in self.asked:
                self.queue.append(Span(self.folder + path, 0, guesses.get(path, UNKNOWN_GUESS)))


def _shard(path: str, info: FileInfo | None, found: Header | Unreadable | None) -> Shard:
    size = info.size if info else None
    if isinstance(found, Header):
        return Shard(path, size, found if found.tensors or not found.defects else None, found.defects)
    if isinstance(found, Unreadable):
        return Shard(path, size, None, (Defect("unreadable", None, "a readable file", found.reason),))
    return Shard(path, size, None, (Defect("shard-missing", None, "the file", "not there"),))


def _tensors(shards: tuple[Shard, ...], found: Index | None, folder: str) -> dict[str, TensorSpec]:
    """Every tensor of the headers, then those that the index places in a shard without one."""
    tensors: dict[str, TensorSpec] = {}
    for shard in shards:
        path = shard.path
        for name, info in shard.header.tensors.items() if shard.header else ():
            dtype = info.dtype if info.dtype in DTYPE_BITS else None
            tensors[name] = TensorSpec(name, path, dtype, info.shape, info.nbytes)
    unread = {shard.path for shard in shards if shard.header is None}
    for name, file in (found.weight_map if found and unread else {}).items():
        if folder + file in unread and name not in tensors:
            tensors[name] = TensorSpec(name, folder + file, None, None, None)
    return tensors

"""Source -> Checkpoint: config, index and shard headers of a target. No tensor data is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ckaudit import header, index, sniff
from ckaudit.header import DTYPE_BITS, Defect, Header
from ckaudit.index import Index as Index
from ckaudit.progress import NullProgress, Progress
from ckaudit.source import FileInfo, Source, Span, Unreadable


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
    strays: tuple[Shard, ...] = ()
    """Safetensors files beside the shards that transformers does not read: their tensors are not in `tensors`."""
    folder: str = ""
    """The folder inside the target that is audited, `/` at its end; `texts` and messages leave it out, `shards` and `files` keep it."""

    @property
    def index_only(self) -> bool:
        """Whether names come from the index alone, because no shard header could be read."""
        return self.index is not None and all(s.header is None for s in self.shards)


TEXTS = (
    "config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json",
    "adapter_config.json", "model_index.json", "params.json",
)  # fmt: skip
"""Small files that decide how weights are loaded."""

_MAX_TEXT = 16_000_000
_MAX_INDEX = 200_000_000
_INDEX = ".safetensors.index.json"

# Where loaders look, first hit wins: transformers `_get_resolved_checkpoint_files` (5.24), diffusers `ModelMixin.from_pretrained`
# (0.36), PEFT `load_peft_weights`. The rest are names that people give: Mistral's own format last, for it doubles the others.
_STEMS = ("model", "diffusion_pytorch_model", "adapter_model")

# Bytes of one entry besides its name: `"":{"dtype":"BF16","shape":[4096,14336],"data_offsets":[4831838208,4949278720]},`
_ENTRY_BYTES = 88
_UNKNOWN_GUESS = 131_072


def guess_header(names: Iterable[str], size: int | None = None) -> int:
    """Bytes, prefix included, in which the header of a shard that holds `names` very likely fits, with little to spare.

    `size` is the file's in bytes, where known: offsets grow with it.
    """
    digits = len(str(size)) if size else 10
    total = 0
    for name in names:
        total += len(name) + _ENTRY_BYTES - 20 + 2 * digits
    return 8 + 64 + total


def read_checkpoint(
    source: Source,
    *,
    progress: Progress | None = None,
    code: bool = False,
    jobs: int = 16,  # noqa: ARG001 - how many reads run at once is the source's to know
    folder: str = "",
) -> Checkpoint:
    """Config, index and shard headers of `source`, or of one `folder` in it (a diffusers component). Reads no tensor data.

    `code`: the repo's `*.py` join `texts`, for engines that may run them. Raises SourceError when the target cannot be read;
    whatever is wrong with what it holds is a defect.
    """
    progress = progress or NullProgress()
    folder = folder.strip("/") + "/" if folder.strip("/") else ""
    every = source.files()
    files = {path.removeprefix(folder): info for path, info in every.items() if path.startswith(folder)}
    texts, defects = _read_texts(source, folder, files, code=code)
    config, faults = _parse_config(texts.get("config.json"))
    defects += faults
    chosen = _choose(files, config)
    found = None
    if chosen.index is not None:
        found = index.parse(
            chosen.index, _read_small(source, folder + chosen.index, files[chosen.index], _MAX_INDEX) or b""
        )
    shards, strays = _files_of(found, chosen, files)
    guesses = _guesses(found, files)
    readable = [path for path in (*shards, *strays) if path in files]
    headers = dict(_read_headers(source, [(folder + p, files[p].size, guesses.get(p)) for p in readable], progress))
    shard_values = tuple(_shard(folder + path, files.get(path), headers.get(folder + path)) for path in shards)
    return Checkpoint(
        name=source.name,
        kind=source.kind,
        revision=source.revision,
        files=every,
        config=config,
        texts=texts,
        index=found,
        shards=shard_values,
        tensors=_tensors(shard_values, found, folder),
        defects=tuple(defects),
        strays=tuple(_shard(folder + path, files.get(path), headers.get(folder + path)) for path in strays),
        folder=folder,
    )


def _read_small(source: Source, path: str, info: FileInfo, limit: int) -> bytes | None:
    if info.size is not None and info.size > limit:
        return None
    for _, data in source.read_spans([Span(path, 0, limit)]):
        return data if isinstance(data, bytes) else None
    return None


def _read_texts(
    source: Source, folder: str, files: Mapping[str, FileInfo], *, code: bool
) -> tuple[dict[str, bytes], list[Defect]]:
    wanted = [path for path in files if path in TEXTS or (code and path.endswith(".py"))]
    texts: dict[str, bytes] = {}
    defects = []
    spans = {folder + path: path for path in wanted}
    for span, data in source.read_spans([Span(path, 0, _MAX_TEXT) for path in spans]):
        path = spans[span.path]
        if isinstance(data, Unreadable):
            defects.append(Defect("unreadable", path, "a readable file", data.reason))
        elif len(data) >= _MAX_TEXT:
            defects.append(Defect("unreadable", path, f"fewer than {_MAX_TEXT} bytes", "more"))
        else:
            texts[path] = data
    return {path: texts[path] for path in wanted if path in texts}, defects


def _parse_config(data: bytes | None) -> tuple[dict[str, Any] | None, list[Defect]]:
    if data is None:
        return None, []
    try:
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return None, [Defect("config-json", "config.json", "JSON", str(error)[:200])]
    if not isinstance(config, dict):
        return None, [Defect("config-json", "config.json", "a JSON object", type(config).__name__)]
    return config, []


class _Chosen(msgspec.Struct, frozen=True):
    """Which files count: an index, or single files; `others` are safetensors files of the same folder that do not."""

    index: str | None
    files: tuple[str, ...]


def _choose(files: Mapping[str, FileInfo], config: dict[str, Any] | None) -> _Chosen:
    named = (config or {}).get("transformers_weights")
    if isinstance(named, str) and named in files:
        return _Chosen(named, ()) if named.endswith(_INDEX) else _Chosen(None, (named,))
    for stem in _STEMS:
        if f"{stem}.safetensors" in files:
            return _Chosen(None, (f"{stem}.safetensors",))
        if stem + _INDEX in files:
            return _Chosen(stem + _INDEX, ())
    top = sorted(path for path in files if "/" not in path)
    for path in top:
        if path.endswith(_INDEX):
            return _Chosen(path, ())
    weights = [path for path in top if path.endswith(".safetensors")]
    first_class = [path for path in weights if not path.startswith("consolidated")]
    return _Chosen(None, tuple(first_class or weights))


def _files_of(found: Index | None, chosen: _Chosen, files: Mapping[str, FileInfo]) -> tuple[list[str], list[str]]:
    """The shards, in the order loaders take them, and the strays of the same folder worth a look."""
    shards = sorted(set(found.weight_map.values())) if found else list(chosen.files)
    strays = [
        path
        for path in sorted(files)
        if path.endswith(".safetensors")
        and "/" not in path
        and path not in shards
        and not path.startswith(("consolidated", "adapter_model"))
    ]
    return shards, strays


def _guesses(found: Index | None, files: Mapping[str, FileInfo]) -> dict[str, int]:
    names: dict[str, list[str]] = {}
    for name, path in (found.weight_map if found else {}).items():
        names.setdefault(path, []).append(name)
    return {path: guess_header(held, files[path].size) for path, held in names.items() if path in files}


def _read_headers(
    source: Source, wanted: list[tuple[str, int | None, int | None]], progress: Progress
) -> Iterator[tuple[str, Header | Unreadable]]:
    """The header of each (path, size, guess), in one read where the guess is enough, else in two."""
    sizes = {path: size for path, size, _ in wanted}
    begun: dict[str, bytes] = {}
    with progress.task("Reading headers", len(wanted)) as task:
        for span, data in source.read_spans([Span(path, 0, guess or _UNKNOWN_GUESS) for path, _, guess in wanted]):
            if isinstance(data, bytes) and _needed(data, sizes[span.path]) > len(data):
                begun[span.path] = data
                continue
            yield span.path, data if isinstance(data, Unreadable) else header.parse(data, sizes[span.path])
            task.advance()
        rest = [Span(path, len(data), _needed(data, sizes[path])) for path, data in begun.items()]
        for span, data in source.read_spans(rest) if rest else ():
            start = begun.pop(span.path)
            yield span.path, data if isinstance(data, Unreadable) else header.parse(start + data, sizes[span.path])
            task.advance()


def _needed(data: bytes, size: int | None) -> int:
    """How many bytes of the file must be there before its header can be judged."""
    length = header.declared_length(data)
    if length is None or sniff.foreign(data, size) is not None or length > 2 * header.MAX_HEADER:
        return 0
    return 8 + length if size is None else min(8 + length, size)


def _shard(path: str, info: FileInfo | None, found: Header | Unreadable | None) -> Shard:
    size = info.size if info else None
    if isinstance(found, Header):
        usable = found if found.tensors or not found.defects else None
        return Shard(path, size, usable, found.defects)
    if isinstance(found, Unreadable):
        return Shard(path, size, None, (Defect("unreadable", None, "a readable file", found.reason),))
    return Shard(path, size, None, (Defect("shard-missing", None, "the file", "not there"),))


def _tensors(shards: tuple[Shard, ...], found: Index | None, folder: str) -> dict[str, TensorSpec]:
    tensors: dict[str, TensorSpec] = {}
    unread = {shard.path for shard in shards if shard.header is None}
    for shard in shards:
        path = shard.path
        for name, info in shard.header.tensors.items() if shard.header else ():
            begin, end = info.data_offsets
            dtype = info.dtype if info.dtype in DTYPE_BITS else None
            tensors[name] = TensorSpec(name, path, dtype, info.shape, end - begin)
    for name, file in (found.weight_map if found else {}).items():
        if folder + file in unread and name not in tensors:
            tensors[name] = TensorSpec(name, folder + file, None, None, None)
    return tensors

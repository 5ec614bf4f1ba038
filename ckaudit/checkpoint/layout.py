"""Which files of a folder are its checkpoint, as loaders choose them, and how long their headers will be. Pure, no I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from typing import Any

import msgspec

from ckaudit.index import Index
from ckaudit.source import FileInfo

# Where loaders look, first hit wins: transformers `_get_resolved_checkpoint_files` (5.24: a single file wins over an index),
# diffusers `ModelMixin.from_pretrained`, PEFT `load_peft_weights`.
STEMS = ("model", "diffusion_pytorch_model", "adapter_model")

INDEX = re.compile(r"\.safetensors\.index(\.[\w-]+)?\.json$")
"""In paths of indexes, those of a variant (`model.safetensors.index.fp16.json`) included."""
_SEQUENCE = re.compile(r"(?P<stem>.*?)[-_](?P<number>\d+)-of-(?P<total>\d+)(?P<variant>\.[\w-]+)?\.safetensors")
_VARIANT = re.compile(
    rf"({'|'.join(STEMS)})\.(?!safetensors)[\w-]+(-\d+-of-\d+)?\.safetensors|.*-\d+-of-\d+\.[\w-]+\.safetensors"
)

UNKNOWN_GUESS = 131_072
"""Bytes read at first of a file of which no index tells anything: enough for about a thousand tensors."""

# One entry besides its name and the digits of its offsets: `"":{"dtype":"F8_E4M3","shape":[2048,7168],"data_offsets":[,]},` is 63.
# Real headers average 48 to 60. Too little costs a request, too much a few bytes.
_ENTRY = 63
# The prefix, `{"__metadata__":{"format":"pt"},…}` padded to a multiple of 8, and a little for a word more.
_FRAME = 8 + 48 + 32


class Layout(msgspec.Struct, frozen=True):
    """Paths in the audited folder: the index, the files that are loaded, in loading order, and others worth a look."""

    index: str | None
    shards: tuple[str, ...]
    strays: tuple[str, ...] = ()

    def with_index(self, found: Index | None, files: Mapping[str, FileInfo]) -> Layout:
        """The same once the index is read: a single file keeps its place; the shards are else those that the index names.

        An index none of whose shards is there, while others are, is one that nobody updated: then the files that are there count.
        """
        shards = self.shards
        top = [path for path in files if path.endswith(".safetensors") and "/" not in path]
        if self.index is not None and not shards:
            named = tuple(sorted(set(found.weight_map.values()))) if found else ()
            here = tuple(path for path in top if doubles(path) is None)
            shards = named if not here or any(path in files for path in named) else here
        strays = tuple(path for path in top if path not in shards and doubles(path) is None)
        return Layout(self.index, shards, strays)


def choose(files: Mapping[str, FileInfo], target: str, config: dict[str, Any] | None) -> Layout:
    """What of `files` (by path in the folder) a loader takes; `target` is what the user named, perhaps one of them."""
    own = target.rpartition("/")[2]
    if own in files and INDEX.search(own):
        return Layout(own, ())
    if own in files and own.endswith(".safetensors"):
        return Layout(None, (own,))
    named = (config or {}).get("transformers_weights")
    if isinstance(named, str) and named in files:
        return Layout(named, ()) if INDEX.search(named) else Layout(None, (named,))
    top = sorted(path for path in files if "/" not in path)
    indexes = [path for path in top if INDEX.search(path)]
    for stem in STEMS:
        beside = f"{stem}.safetensors.index.json"
        if f"{stem}.safetensors" in files:
            return Layout(beside if beside in files else None, (f"{stem}.safetensors",))
        if beside in files:
            return Layout(beside, ())
    if indexes:
        return Layout(indexes[0], ())
    weights = [path for path in top if path.endswith(".safetensors")]
    plain = [path for path in weights if doubles(path) is None]
    return Layout(None, tuple(plain or weights))


def loaded_by_name(path: str) -> bool:
    """Whether a loader finds a single file of this name without being told."""
    return path.removesuffix(".safetensors") in STEMS


_OTHER = re.compile(
    r".*\.(bin|pt|pth|ckpt|pkl|gguf|ggml|onnx|onnx_data|h5|msgpack|npz|tflite|mlmodel|ot|nemo)", re.IGNORECASE
)
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states).*|.*/(rng_state|optimizer).*"
)


def other_weights(paths: Iterable[str]) -> list[str]:
    """Those of `paths` that hold, by their names, weights in another format than safetensors."""
    return [path for path in paths if _OTHER.fullmatch(path) and not _NO_WEIGHTS.fullmatch(path)]


def doubles(path: str) -> str | None:
    """What a safetensors file holds that by its name doubles or extends the checkpoint without being part of it; None for others."""
    if path.startswith("consolidated"):
        return "the weights in Mistral's own format, which vLLM (0.24 and newer) loads in place of the others"
    if path.startswith("adapter_model"):
        return "an adapter"
    if _VARIANT.fullmatch(path):
        return "a variant in another precision"
    return None


class Sequence(msgspec.Struct, frozen=True):
    """Files numbered `STEM-00001-of-00004`: how many there should be and which are there."""

    stem: str
    total: int
    present: dict[int, str]

    @property
    def missing(self) -> list[int]:
        """The numbers from 1 to `total` without a file; the first hundred of them."""
        lacking = []
        for number in range(0 if 0 in self.present else 1, self.total + (0 not in self.present)):
            if number not in self.present:
                lacking.append(number)
            if len(lacking) >= 100:
                break
        return lacking


def sequences(paths: Iterable[str]) -> list[Sequence]:
    """The numbered sets among `paths`, by stem and total."""
    found: dict[tuple[str, str], Sequence] = {}
    for path in sorted(paths):
        match = _SEQUENCE.fullmatch(path)
        if match is None or len(match["total"]) > 9 or len(match["number"]) > 9:
            continue
        key = (match["stem"] + (match["variant"] or ""), match["total"])
        found.setdefault(key, Sequence(match["stem"], int(match["total"]), {})).present[int(match["number"])] = path
    return list(found.values())


def candidates(files: Iterable[str]) -> list[str]:
    """The files of which the header is read whatever an index says: the shards, or strays beside them."""
    return sorted(path for path in files if path.endswith(".safetensors") and "/" not in path and doubles(path) is None)


def guess_from_index(files: Mapping[str, FileInfo], heads: Sequence_[str]) -> dict[str, int]:
    """By file: the length of its header as the size of the index tells it, before that is read: it holds the same names.

    Only of files as large as most: those are alike inside too. A row of an index spells the name, the shard and 12 bytes more; the
    guess assumes names of 40 letters.
    """
    sizes = [info.size for path, info in files.items() if INDEX.search(path) and "/" not in path]
    if len(sizes) != 1 or not sizes[0]:
        return {}
    usual = sorted(files[path].size or 0 for path in heads)[len(heads) // 2]
    row = 40 + len(heads[0]) + 12
    guess = _FRAME + sizes[0] * (40 + _ENTRY + 20) // row // len(heads)
    return {path: guess for path in heads if 0.9 * usual <= (files[path].size or 0) <= 1.1 * usual}


def guess_headers(weight_map: Mapping[str, str], sizes: Mapping[str, int | None]) -> dict[str, int]:
    """By file: the first so many bytes that hold its whole header, very likely, with little to spare.

    `weight_map` tells which names a file holds; `sizes` are the files' own, where known: offsets grow with them.
    """
    counts = Counter(weight_map.values())
    letters = dict.fromkeys(counts, 0)
    for name, path in weight_map.items():
        letters[path] += len(name)
    return {path: guess_header(count, letters[path], sizes.get(path)) for path, count in counts.items()}


def guess_header(count: int, letters: int, size: int | None) -> int:
    """Bytes, prefix included, of a header of `count` tensors whose names have `letters` letters, in a file of `size` bytes."""
    digits = len(str(size)) if size else 10
    return _FRAME + letters + count * (_ENTRY + 2 * digits)

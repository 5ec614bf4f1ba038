"""Which files of a checkpoint a load needs in a folder, and which of them its loader has to be told of."""

from __future__ import annotations

from pathlib import PurePosixPath

from ckaudit.checkpoint import Checkpoint, Shard
from ckaudit.materialize.job import LoadOptions

# Configs, tokenizers, processors, chat templates. Everything else in a repo (pickles, other formats, pictures) stays where it is.
_SMALL = frozenset({".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".yaml", ".yml"})
_DEFAULTS = ("model.safetensors", "model.safetensors.index.json")
"""What `from_pretrained` looks for by itself, first to last."""


def chosen_shards(checkpoint: Checkpoint, options: LoadOptions) -> tuple[Shard, ...]:
    """The shards to load: those that could be read, up to `options.shards` of them."""
    readable = tuple(s for s in checkpoint.shards if s.header is not None)
    return readable if options.shards is None else readable[: options.shards]


def needed_files(checkpoint: Checkpoint, options: LoadOptions) -> tuple[str, ...]:
    """Paths of the files that have to be in the folder that `load` gets: the chosen shards and the small files beside them."""
    code = {".py"} if options.trust_remote_code else set()
    small = (p for p in checkpoint.files if PurePosixPath(p).suffix in _SMALL | code)
    return tuple(sorted({*small, *(s.path for s in chosen_shards(checkpoint, options))}))


def explicit_weights(checkpoint: Checkpoint) -> str | None:
    """The file or index to load, where it is not the one that `from_pretrained` finds by itself."""
    if checkpoint.index is not None:
        chosen = checkpoint.index.path
    elif len(checkpoint.shards) == 1:
        chosen = checkpoint.shards[0].path
    else:
        return None
    return None if chosen in _DEFAULTS else chosen

"""The architectures that a release of vLLM registers, and the config and header that a published checkpoint of one has.

Both come from transformers: the class is constructed on the meta device at the size that its config class gives (the number of layers may
be cut), and its own `save_pretrained` writes the config and names the tensors, as it did for those who published one. Nothing here is
vLLM's, so nothing that vLLM expects can leak into what it is given.

What published configs state and a config class leaves at another default is in `published.py`, each with its source.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines import EngineOptions, Job
from tests.helpers import encode, header_json
from tests.vllm.published import FACTS, Fact

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth", "num_encoder_layers",
    "num_decoder_layers",
)  # fmt: skip
PREVIOUS = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
"""Tables of the registry that say what it no longer has."""


class UnmakeableError(Exception):
    """Why no checkpoint of an architecture can be made here."""


class Made(NamedTuple):
    """The small files by path, `config.json` first, and, by name, the safetensors dtype and the shape of each tensor."""

    architecture: str
    files: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def registered(tree: Path) -> dict[str, str]:
    """Architecture -> table of the registry it stands in, for the release unpacked under `tree`. Read, not imported."""
    text = (tree / "vllm" / "model_executor" / "models" / "registry.py").read_text("utf-8")
    out: dict[str, str] = {}
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Dict) or not target.id.endswith("_MODELS"):
            continue
        if target.id not in PREVIOUS:
            for key in value.keys:
                if isinstance(key, ast.Constant):
                    out.setdefault(str(key.value), target.id)
    return out


def make(architecture: str, layers: int | None = None, **stated: Any) -> Made:
    """The checkpoint of an architecture, with `stated` fields of the config on top of what released ones state.

    `layers` cuts every count of layers to that many. Raises UnmakeableError.
    """
    import transformers

    known = FACTS.get(architecture, Fact())
    if known.without:
        raise UnmakeableError(known.without)
    found = getattr(transformers, architecture, None)
    if not isinstance(getattr(found, "config_class", None), type):
        raise UnmakeableError(f"transformers {transformers.__version__} has no class of this name")
    given = merged(known.config, stated)
    try:
        config = found.config_class(**given)
        if layers is not None:
            config = found.config_class(**merged(given, cut(config, layers)))
        written, tensors = saved(found, config)
    except Exception as error:  # a default config that its own class refuses
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnmakeableError(f"its class does not build from what its config class gives ({line[:120]})") from error
    written |= {"architectures": [architecture]}
    written = merged(written, known.written(written) if callable(known.written) else known.written)
    for pattern, replacement in known.renames:
        tensors = {re.sub(pattern, replacement, name): held for name, held in tensors.items()}
    if known.absent:
        tensors = {name: held for name, held in tensors.items() if not re.search(known.absent, name)}
    for ending in known.transposed:
        tensors |= {n: (d, (*s[:-2], s[-1], s[-2])) for n, (d, s) in tensors.items() if n.endswith(ending)}
    tensors |= {name: tensors[like] for name, like in known.also.items()}
    return Made(architecture, {"config.json": json.dumps(written), **known.files}, tensors)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the fields of `over`; tables within are merged too, and `...` takes a field away."""
    out = dict(under)
    for key, value in over.items():
        held = out.get(key)
        out[key] = merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return {key: value for key, value in out.items() if value is not ...}


def cut(config: Any, layers: int) -> dict[str, Any]:
    """Arguments for the config class that make every count of layers of `config`, and of the configs in it, at most `layers`."""
    out: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            inner = cut(value, layers)
            if inner:
                out[name] = {"model_type": value.model_type, **inner} if value.model_type else inner
        elif name in LAYER_COUNTS and isinstance(value, int) and value > layers:
            out[name] = layers
    return out


def saved(kind: Any, config: Any) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """What `save_pretrained` writes for a model of class `kind`: `config.json`, and the header that its file would have."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            model = kind._from_config(config, dtype=torch.bfloat16)
        # As after `from_pretrained`: without this note, saving leaves prefixes off that every published file has (`vision_model.`).
        rules = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [rule for rule in rules if _undone(rule)]
        with _headers_only() as header:
            model.save_pretrained(folder, max_shard_size="100TB")
        return json.loads((Path(folder) / "config.json").read_text("utf-8")), header


def _undone(rule: Any) -> bool:
    """Whether saving turns a rule round. One that takes a prefix off is for published files where it is a part's (`vision_model.` in a
    vision tower, but not behind itself), and for the files of some larger model where it is the whole model's."""
    removed, scope = getattr(rule, "prefix_to_remove", None), rule.scope_prefix or ""
    return removed is None or bool(scope and removed not in scope.split("."))


@contextlib.contextmanager
def _headers_only() -> Iterator[dict[str, tuple[str, tuple[int, ...]]]]:
    """transformers' writer of safetensors files notes the header instead."""
    import torch

    types = {
        torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
        torch.uint8: "U8", torch.complex64: "C64", torch.float64: "F64",
    }  # fmt: skip
    out: dict[str, tuple[str, tuple[int, ...]]] = {}

    def note(tensors: Mapping[str, Any], *_: Any, **__: Any) -> None:
        out.update({name: (types[t.dtype], tuple(t.shape)) for name, t in tensors.items()})

    with mock.patch("transformers.modeling_utils.safe_save_file", note):
        yield out


def write(made: Made, folder: Path) -> None:
    """Lay the checkpoint out under `folder`: its small files, and a file that has a header and no data."""
    for name, text in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    document = header_json(
        {name: (dtype, list(shape)) for name, (dtype, shape) in made.tensors.items()}, {"format": "pt"}
    )
    data = encode(document)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(data)
        file.truncate(
            len(data) + max((e["data_offsets"][1] for n, e in document.items() if n != "__metadata__"), default=0)
        )


def job(made: Made, release: str, **options: Any) -> Job:
    """The job that the engine `vllm` sends to its worker for this checkpoint."""
    return Job(
        engine="vllm",
        release=release,
        options=EngineOptions(**options),
        name=made.architecture,
        texts={name: text.encode() for name, text in made.files.items()},
        tensors=tuple(TensorSpec(n, "model.safetensors", d, s, 0) for n, (d, s) in made.tensors.items()),
    )

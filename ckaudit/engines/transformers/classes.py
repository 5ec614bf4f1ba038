"""Which configuration and which model class stand for a checkpoint, by transformers' own rules."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ckaudit.engines import Job


class NotForUs(Exception):  # noqa: N818  (not an error: the engine cannot judge, and says why)
    """Something other than the checkpoint keeps this engine from judging it; the message is the reason."""


class Chosen(msgspec.Struct, frozen=True):
    """The class that is built, its configuration, and how the class was found."""

    cls: Any
    config: Any
    how: str
    named: str | None = None
    """The config class that `model_type` names, where the model class reads config.json as another."""


def leads_out(name: str) -> bool:
    """Whether a path that a stranger gave is none inside a folder."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name or "\\" in name


def lay_out(texts: dict[str, bytes], folder: Path, *, code: bool) -> None:
    """Write the checkpoint's small files under `folder`. Names come from a stranger: none may lead out of it, code is opt-in."""
    for name, content in texts.items():
        path = PurePosixPath(name)
        if leads_out(name):
            continue
        if path.suffix in (".json", ".model", ".txt") or (code and path.suffix == ".py"):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def choose(job: Job, folder: Path) -> Chosen:
    """The class and config for the files laid out in `folder`. Raises NotForUs, or what transformers raises on the config."""
    if "config.json" not in job.texts:
        raise NotForUs(_no_config(job))
    return choose_in(folder, raw_config(job), job.options.class_name, trust=job.options.trust_remote_code)


def choose_in(folder: Path, raw: dict[str, Any], wanted: str | None, *, trust: bool) -> Chosen:
    """The class `wanted`, else the one that config.json in `folder`, whose content is `raw`, asks for. Raises as `choose` does."""
    if wanted is None and "_class_name" in raw and "model_type" not in raw:
        raise NotForUs(f"the config is of a diffusers model ({raw['_class_name']}), which transformers does not load")
    if wanted is not None:
        cls = _shipped(wanted)
        if cls is None:
            raise NotForUs(f"transformers has no class {wanted!r} (--class)")
        return Chosen(cls, _config_for(cls, folder), "--class")
    config = _auto_config(raw, folder, trust=trust)
    cls, how = _class_of(config, folder, trust=trust)
    if how == "auto_map":
        return Chosen(cls, config, how)
    own = _config_for(cls, folder)
    return Chosen(cls, own, how, None if type(own) is type(config) else type(config).__name__)


def _no_config(job: Job) -> str:
    if "adapter_config.json" in job.texts:
        return "this is a PEFT adapter: transformers loads its base model first; audit that one"
    if "model_index.json" in job.texts:
        return "this is a diffusers pipeline: audit the folder of one of its models"
    return "there is no config.json that could be read, so transformers has no class to build"


def raw_config(job: Job) -> dict[str, Any]:
    """config.json of the job as `read_config` reads it."""
    return read_config(job.texts["config.json"])


def read_config(content: bytes) -> dict[str, Any]:
    """config.json as transformers reads it: by Python's own parser, which takes NaN and Infinity (real configs hold them)."""
    try:
        raw = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise NotForUs(f"config.json is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise NotForUs("config.json is not a JSON object")
    return raw


def _auto_config(raw: dict[str, Any], folder: Path, *, trust: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, remote = raw.get("model_type"), raw.get("auto_map")
    if not (trust and remote) and (not isinstance(model_type, str) or model_type not in CONFIG_MAPPING):
        raise NotForUs(_unknown(raw, trust=trust))
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust)


def _unknown(raw: dict[str, Any], *, trust: bool) -> str:
    """Why the Auto classes would refuse this config, and what to do about it."""
    model_type = raw.get("model_type")
    said = (
        "config.json has no model_type"
        if model_type is None
        else f"transformers does not know model_type {model_type!r}"
    )
    if raw.get("auto_map") and not trust:
        return f"{said}; the repo brings its own code: --trust-remote-code runs it"
    named = [a for a in _architectures(raw.get("architectures")) if _shipped(a) is not None]
    if named:
        return f"{said}; it ships the class that the config names: --class {named[0]} loads with it"
    return f"{said}; a newer release may, or --class NAME picks a class by hand"


def _architectures(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _shipped(name: str) -> Any:
    """transformers' own model class `name`, or None. Raises ImportError where it needs a package that is not there."""
    import transformers

    cls: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(cls, type):
        return None
    if backends := getattr(cls, "_backends", ()):
        raise ImportError(f"{name} needs {', '.join(backends)}")
    return cls if issubclass(cls, transformers.PreTrainedModel) else None


def _config_for(cls: Any, folder: Path) -> Any:
    """The config that `cls.from_pretrained(folder)` reads: of a vision-language repo, a text class reads the text section."""
    if cls.config_class is None:
        raise NotForUs(f"{cls.__name__} names no config class")
    return cls.config_class.from_pretrained(folder)


def _class_of(config: Any, folder: Path, *, trust: bool) -> tuple[Any, str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    architectures = _architectures(getattr(config, "architectures", None))
    if trust and (reference := _remote_reference(getattr(config, "auto_map", None), architectures)):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(reference, os.fspath(folder)), "auto_map"
    for name in architectures:
        if (cls := _shipped(name)) is not None:
            return cls, "architectures"
    try:
        cls = MODEL_MAPPING[type(config)]
    except KeyError:
        raise NotForUs(f"transformers has no model class for {type(config).__name__}") from None
    return (cls[0] if isinstance(cls, (tuple, list)) else cls), "model_type"


def _remote_reference(auto_map: Any, architectures: list[str]) -> str | None:
    """The entry of `auto_map` for the architecture that the config names, else its most usual one for a whole model."""
    named = auto_map if isinstance(auto_map, dict) else {}
    models = {k: v for k, v in named.items() if k.startswith("AutoModel") and isinstance(v, str)}
    for reference in models.values():
        if reference.rpartition(".")[2] in architectures:
            return reference
    order = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModel")
    return next((models[k] for k in (*order, *models) if k in models), None)

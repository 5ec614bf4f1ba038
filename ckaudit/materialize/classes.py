"""Which class loads a checkpoint, and with which config: as transformers itself decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckaudit.errors import EngineError
from ckaudit.materialize.job import LoadOptions


def pick(folder: str, options: LoadOptions) -> tuple[Any, Any]:
    """The model class and its config. Raises EngineError where the installed transformers does not know the model."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except (ValueError, OSError, KeyError) as error:
        hint = "Give --trust-remote-code if you trust the code in the repo, or install a transformers that knows the model."
        raise EngineError(
            f"transformers {transformers.__version__} cannot read the config: {_first_line(error)}", hint
        ) from error
    cls = _remote_class(config, folder) if options.trust_remote_code and options.class_name is None else None
    if cls is None:
        cls = _native_class(transformers, config, options.class_name)
    # What `cls.from_pretrained(folder)` reads: such as the text part of the config for a text class.
    if getattr(cls, "config_class", None) is not None and not isinstance(config, cls.config_class):
        config = cls.config_class.from_pretrained(folder)
    return cls, config


def sub_configs(config: Any) -> Iterator[Any]:
    """The config and every config inside it."""
    yield config
    for key in getattr(config, "sub_configs", None) or ():
        inner = getattr(config, key, None)
        if hasattr(inner, "model_type"):
            yield from sub_configs(inner)


def first_value(config: Any, *keys: str) -> Any:
    """The first of these settings that the config or one of its parts has; None where none has."""
    for part in sub_configs(config):
        for key in keys:
            value = getattr(part, key, None)
            if value is not None:
                return value
    return None


def _native_class(transformers: Any, config: Any, name: str | None) -> Any:
    for wanted in [name] if name else getattr(config, "architectures", None) or []:
        cls = getattr(transformers, str(wanted), None)
        if cls is not None:
            return cls
    if name:
        raise EngineError(
            f"transformers {transformers.__version__} has no class {name!r}.", "See --class in `ckaudit load --help`."
        )
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        cls = MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise EngineError(
            f"transformers {transformers.__version__} has no model for {config.model_type!r}.", "Name one with --class."
        ) from error
    return cls[0] if isinstance(cls, tuple | list) else cls


def _remote_class(config: Any, folder: str) -> Any:
    """The class in the repo's own code; only asked for with --trust-remote-code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    places = getattr(config, "auto_map", None) or {}
    for key in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel"):
        if key in places:
            return get_class_from_dynamic_module(places[key], folder)
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Which class loads a checkpoint, and with which config: the choice of the transformers engine; and settings inside configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckaudit.engines.transformers.classes import NotForUs, choose_in, read_config
from ckaudit.errors import EngineError, words_of
from ckaudit.materialize.job import LoadOptions


def pick(folder: str, options: LoadOptions) -> tuple[Any, Any]:
    """The model class and its config. Raises EngineError where the installed transformers does not know the model."""
    import transformers

    path = Path(folder)
    try:
        raw = read_config((path / "config.json").read_bytes())
        chosen = choose_in(path, raw, options.class_name, trust=options.trust_remote_code)
    except (NotForUs, ValueError, OSError, KeyError) as error:
        raise EngineError(
            f"transformers {transformers.__version__} cannot load this: {_told(error)}.",
            "`ckaudit names` says more; --class NAME picks a class by hand, a newer transformers may know the model.",
        ) from error
    return chosen.cls, chosen.config


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


def _told(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"config.json: {error.strerror}"
    return words_of(error).rstrip(".")

"""An adapter repo as data: which modules it adapts, in which dialect, with which configuration. Pure, no I/O.

`dialects` reads one name, `binding` looks the modules up in a base model, `peft` and `vllm` hold what these two do to adapter names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from ckaudit.adapters.dialects import Dialect, Part, Role, read
from ckaudit.checkpoint import Checkpoint


class Unit(msgspec.Struct, frozen=True):
    """Everything that an adapter holds for one module of the base."""

    component: str
    module: str
    parts: tuple[Part, ...]

    def of(self, *roles: Role) -> list[Part]:
        """Its tensors in these roles."""
        return [p for p in self.parts if p.role in roles]

    @property
    def names(self) -> list[str]:
        """Names of all its tensors."""
        return [p.name for p in self.parts]

    @property
    def adapts(self) -> bool:
        """Whether it changes a module, rather than replacing a tensor of it."""
        return any(p.role not in ("full", "alpha", "shared") for p in self.parts)

    @property
    def path(self) -> str:
        """The module with its component, as messages name it."""
        return f"{self.component}.{self.module}" if self.component else self.module


class Adapter(msgspec.Struct, frozen=True):
    """An adapter. `config` is `adapter_config.json`, None where there is none that can be read."""

    checkpoint: Checkpoint
    dialect: Dialect
    units: tuple[Unit, ...]
    unknown: tuple[str, ...]
    """Tensors whose names no dialect explains."""
    config: dict[str, Any] | None

    @property
    def modules(self) -> tuple[Unit, ...]:
        """The units that adapt a module."""
        return tuple(u for u in self.units if u.adapts)

    @property
    def replaced(self) -> tuple[Unit, ...]:
        """The units that replace whole tensors: `modules_to_save`, biases."""
        return tuple(u for u in self.units if not u.adapts and u.of("full"))

    @property
    def method(self) -> str:
        """LORA, ADALORA, IA3 … as PEFT calls it; by the names where there is no configuration."""
        said = (self.config or {}).get("peft_type")
        if isinstance(said, str):
            return said.upper()
        return "LORA" if any(u.of("A", "B") for u in self.units) or not self.units else "OTHER"

    @property
    def base(self) -> str | None:
        """The base model that the configuration names."""
        said = (self.config or {}).get("base_model_name_or_path")
        return said if isinstance(said, str) and said else None

    @property
    def rank(self) -> int | None:
        """`r` of the configuration."""
        said = (self.config or {}).get("r")
        return said if isinstance(said, int) and not isinstance(said, bool) else None


def recognise(checkpoint: Checkpoint) -> Adapter | None:
    """The adapter that `checkpoint` is; None for anything else, a model with an adapter inside it (never merged) included."""
    config = _config(checkpoint.texts.get("adapter_config.json"))
    if "adapter_config.json" not in checkpoint.texts and not _looks_like_one(checkpoint):
        return None
    parts = [read(name) for name in checkpoint.tensors]
    known = [p for p in parts if p is not None]
    factors = sum(p.role not in ("full", "alpha") for p in known)
    # Of embeddings PEFT saves the base layer too: a few are no model.
    embedded = sum(".base_layer.w" in n or ".base_layer.qw" in n for n in checkpoint.tensors) > 4
    named = bool(checkpoint.shards) and all(
        s.path.rpartition("/")[2].startswith("adapter_model") for s in checkpoint.shards
    )
    alone = "adapter_config.json" in checkpoint.texts and (named or not checkpoint.tensors)
    if not alone and (not factors or embedded or 2 * factors < len(parts)):
        return None
    unknown = tuple(n for n, p in zip(checkpoint.tensors, parts, strict=True) if p is None)
    return Adapter(checkpoint, _dialect(known, config), _units(known), unknown, config)


def _looks_like_one(checkpoint: Checkpoint) -> bool:
    """Whether a factor is among some runs of names: at least half of an adapter's are, and a model of 45,000 is not to be read for it."""
    names = list(checkpoint.tensors)
    middle = len(names) // 2
    some = {*names[:32], *names[middle : middle + 32], *names[-32:]}
    return any(p is not None and p.role not in ("full", "alpha") for p in map(read, some))


def _config(data: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(data.decode("utf-8")) if data is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _dialect(parts: Iterable[Part], config: dict[str, Any] | None) -> Dialect:
    said = Counter(p.dialect for p in parts if p.dialect is not None)
    return said.most_common(1)[0][0] if said else "peft" if config is not None else "diffusers"


def _units(parts: Iterable[Part]) -> tuple[Unit, ...]:
    found: dict[tuple[str, str, bool], list[Part]] = {}
    for part in parts:
        found.setdefault((part.component, part.module, bool(part.doubled)), []).append(part)
    return tuple(Unit(component, module, tuple(held)) for (component, module, _), held in found.items())

"""One name's way through the loaders of a model: AutoWeightsLoader's recursion and hand-written loops, as data.

Source of the semantics: `AutoWeightsLoader` in vllm/model_executor/models/utils.py, 0.6.5 to 0.33.0. A loader that sits on a submodule is
given names with that module's path stripped; each loader maps, skips and descends on its own, and a shard id set on the way stays
with the tensor until a later mapper sets another.
"""

from __future__ import annotations

import msgspec

from ckaudit.mapper import Mapped, Rule, ShardId, shard_text
from ckaudit.plan import Fate, Step
from ckaudit.rulebook.model import Model, Seat


class Landing(msgspec.Struct, frozen=True):
    """Where one name ends: `into` is the parameter, or the full name it was last looked up by."""

    fate: Fate
    into: str | None
    shards: tuple[ShardId, ...] = ()
    chain: tuple[Step, ...] = ()
    by_design: str | None = None
    error: str | None = None
    """What the loader raises, in its own style."""
    canonical: str | None = None
    """The parameter that a skipped alias stands for; the loader raises at the end if that one is never loaded."""


def walk(model: Model, name: str) -> Landing:
    """What `model` does with the checkpoint tensor `name`."""
    return _Walk(model).load(model.seats[""], name)


def join(prefix: str, rest: str) -> str:
    """Two parts of a dotted name; either may be empty."""
    return f"{prefix}.{rest}" if prefix and rest else prefix or rest


class _Walk:
    """The state that follows one tensor: its shard ids and the steps so far."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.shards: tuple[ShardId, ...] = ()
        self.chain: list[Step] = []

    def end(self, fate: Fate, into: str | None, *, why: str | None = None, error: str | None = None) -> Landing:
        return Landing(fate, into, self.shards, tuple(self.chain), why, error)

    def load(self, seat: Seat, name: str) -> Landing:
        """The `load_weights` of one module, given `name` as that module sees it."""
        for prefix, count, why in seat.beyond:
            index = name.removeprefix(prefix).partition(".")[0]
            if name.startswith(prefix) and index.isdecimal() and int(index) >= count:
                return self.end("ignored", join(seat.at, name), why=why)
        return self.loop(seat, name) if seat.loader.style == "loop" else self.auto(seat, name)

    # ----- AutoWeightsLoader -----

    def auto(self, seat: Seat, name: str) -> Landing:
        for rule in seat.before:
            if rule.key in name:
                name = self.rewrite(seat, rule, name, name.replace(rule.key, rule.to or "", 1))
                break
        mapped = seat.mapper.map(name)
        self.follow(mapped)
        if mapped.name is None:
            return self.end("dropped", None, why=mapped.by_design)
        full = join(seat.at, mapped.name)
        if self.model.family.skip_first and (skipped := self.skipped(seat, mapped.name)):
            return self.end("ignored", full, why=skipped[0])
        if alias := self.alias(seat, full):
            return alias
        return self.descend(seat, mapped.name)

    def follow(self, mapped: Mapped) -> None:
        self.shards = mapped.shards or self.shards
        self.chain += mapped.steps

    def rewrite(self, seat: Seat, rule: Rule, before: str, after: str) -> str:
        self.shards = rule.shards or self.shards
        self.chain.append(Step(rule.kind, rule.key, seat.at, before, after, shard_text(rule.shards)))
        return after

    def skipped(self, seat: Seat, name: str) -> tuple[str | None] | None:
        """The reason (in a 1-tuple) why this loader skips `name`; None when it does not."""
        for keys, hit in (
            (seat.prefixes, name.startswith),
            (seat.substrings, name.__contains__),
            (seat.suffixes, name.endswith),
        ):
            for key, why in keys:
                if hit(key):
                    return (why,)
        return None

    def alias(self, seat: Seat, full: str) -> Landing | None:
        """The end of a name that is the later of two for one tied embedding, where the release skips those."""
        of = self.model.aliases.get(full)
        inside = f"{seat.at}." if seat.at else ""
        if not self.model.family.aliases or of is None or not of.startswith(inside):
            return None
        return msgspec.structs.replace(self.end("ignored", full, why=f"tied to {of}"), canonical=of)

    def descend(self, seat: Seat, name: str) -> Landing:
        """The walk through the modules below `seat`, one part of the name at a time."""
        base, rest = "", name
        while True:
            child, _, rest = rest.partition(".")
            path = join(base, child)
            full = join(seat.at, path)
            if child and full in self.model.modules:
                if skipped := self.skipped(seat, f"{path}."):
                    return self.end("ignored", join(full, rest), why=skipped[0])
                if below := self.model.seats.get(full):
                    return self.load(below, rest)
                if self.model.family.fused_load and full in self.model.fused:
                    return self.fused(full, rest)
                base = path
            elif child and self.loadable(full):
                return self.parameter(seat, path, rest)
            else:
                return self.missing(seat, path, rest)

    def fused(self, module: str, rest: str) -> Landing:
        """The loader of a fused layer: its own parameters, and a bias that it has not is left out (linear.py, from 0.25.0)."""
        full = join(module, rest)
        if rest and full in self.model.parameters:
            return self.end("loaded", full)
        if rest == "bias":
            return self.end("ignored", full)
        return self.end("unmatched", full, error=f"AttributeError: {module} has no {rest!r}")

    def loadable(self, full: str) -> bool:
        spec = self.model.parameters.get(self.model.aliases.get(full, full))
        return spec is not None and (self.model.family.buffers or not spec.buffer)

    def parameter(self, seat: Seat, path: str, rest: str) -> Landing:
        full = join(seat.at, path)
        if skipped := self.skipped(seat, path):
            return self.end("ignored", join(full, rest), why=skipped[0])
        if alias := self.alias(seat, full):
            return msgspec.structs.replace(alias, into=join(full, rest), canonical=None)
        if not rest:
            return self.end("loaded", self.model.aliases.get(full, full))
        if skipped := self.skipped(seat, join(path, rest)):
            return self.end("ignored", join(full, rest), why=skipped[0])
        if self.unexpected_ignored(seat, join(path, rest)):
            return self.end("ignored", join(full, rest))
        error = f"ValueError: Attempted to load nested weight {join(path, rest)!r} into a single parameter {path!r}"
        return self.end("unmatched", join(full, rest), error=error)

    def missing(self, seat: Seat, path: str, rest: str) -> Landing:
        full = join(join(seat.at, path), rest)
        if skipped := self.skipped(seat, f"{path}.") or self.skipped(seat, path):
            return self.end("ignored", full, why=skipped[0])
        if self.unexpected_ignored(seat, f"{path}.") or self.unexpected_ignored(seat, path):
            return self.end("ignored", full)
        where = seat.loader.class_name or "the model"
        return self.end(
            "unmatched", full, error=f"ValueError: There is no module or parameter named {path!r} in {where}"
        )

    def unexpected_ignored(self, seat: Seat, name: str) -> bool:
        return any(map(name.startswith, seat.loader.ignore_prefixes)) or any(map(name.endswith, seat.ignore_suffixes))

    # ----- hand-written loops -----

    def loop(self, seat: Seat, name: str) -> Landing:
        if skipped := self.skipped(seat, name):
            return self.end("ignored", join(seat.at, name), why=skipped[0])
        loader = seat.loader
        for rule in seat.mapper.rules:
            if rule.key not in name or rule.to is None:
                continue
            after = name.replace(rule.key, rule.to, 1 if loader.replace == "first" else -1)
            full = join(seat.at, after)
            if self.is_parameter(full):
                self.rewrite(seat, rule, name, after)
                return self.end("loaded", self.model.aliases.get(full, full))
            if loader.lands == "assume" or (loader.lands == "assume-but-bias" and not after.endswith(".bias")):
                self.rewrite(seat, rule, name, after)
                return self.end("unmatched", full, error=f"KeyError: {after!r}")
            if loader.carry:
                name = self.rewrite(seat, rule, name, after)
                self.shards = ()
        full = join(seat.at, name)
        if self.is_parameter(full):
            return self.end("loaded", self.model.aliases.get(full, full))
        if loader.unknown == "ignore" or (loader.unknown == "ignore-bias" and name.endswith(".bias")):
            return self.end("ignored", full)
        return self.end("unmatched", full, error=f"KeyError: {name!r}")

    def is_parameter(self, full: str) -> bool:
        spec = self.model.parameters.get(self.model.aliases.get(full, full))
        return spec is not None and not spec.buffer

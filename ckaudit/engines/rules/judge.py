"""Every tensor of a checkpoint through one resolved model: the Plan of the rules engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.engines.rules.ledger import Ledger
from ckaudit.engines.rules.walk import Landing, walk
from ckaudit.header import FLOATS
from ckaudit.mapper import Rule, shard_text
from ckaudit.plan import Failure, Mismatch, NameFate, Note, Plan, RuleHit, Unjudged
from ckaudit.rulebook.book import Book, Section
from ckaudit.rulebook.model import Model, Seat


def judge(checkpoint: Checkpoint, book: Book, section: Section, model: Model) -> Plan:
    """What `model` does with every tensor, in checkpoint order; the id is the caller's to set."""
    judged = _Judge(checkpoint, model)
    for tensor in checkpoint.tensors.values():
        judged.take(tensor)
    failures = judged.failures()
    bare = any(t.shape is None for t in checkpoint.tensors.values())
    unjudged = (Unjudged("shapes", "no header was read, so only names could be judged"),) if bare else ()
    return Plan(
        id="rules",
        engine=book.project,
        release=model.release,
        method="rules",
        environment={"rule book": book.architecture, "section": section.releases},
        architecture=book.architecture,
        error=f"predicted: {failures[0].message}" if failures else None,
        failures=failures,
        names=tuple(judged.names),
        parameters=judged.ledger.parameters(),
        collisions=judged.collisions(),
        mismatches=(*judged.mismatches,),
        rules=judged.hits(),
        notes=(*_notes(section, model), *judged.notes()),
        unjudged=unjudged,
    )


def _notes(section: Section, model: Model) -> list[Note]:
    notes = [Note("provisional", "looked up in a rule book, not observed: `--engine vllm==X` runs the loader itself")]
    if model.release not in section.read:
        text = f"{model.release} lies in {section.releases}, but its own sources were not read for this rule book"
        notes.append(Note("unread-release", text))
    return notes


class _Judge:
    """The state of one run over a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, model: Model) -> None:
        self.model = model
        self.dtype = _dtype(checkpoint.config or {})
        self.ledger = Ledger(model)
        self.names: list[NameFate] = []
        self.mismatches: list[Mismatch] = []
        self.errors: dict[tuple[str, str | None], list[str]] = {}
        self.fired: dict[tuple[str, str, str], int] = {}
        self.seen: dict[str, list[tuple[str, str]]] = {}
        """Module path -> (name as its loader saw it, checkpoint name), for loaders below the model."""
        self.aliased: dict[str, list[str]] = {}

    def take(self, tensor: TensorSpec) -> None:
        """One tensor through the model."""
        landing = walk(self.model, tensor.name)
        for key in {(step.at, step.rule, step.key) for step in landing.chain}:
            self.fired[key] = self.fired.get(key, 0) + 1
        self.note_seats(tensor.name, landing)
        if landing.canonical is not None:
            self.aliased.setdefault(landing.canonical, []).append(tensor.name)
        if landing.fate == "loaded":
            landing = self.place(tensor, landing)
        if landing.error is not None:
            parameter = landing.into if landing.into in self.model.parameters else None
            self.errors.setdefault((landing.error, parameter), []).append(tensor.name)
        self.names.append(
            NameFate(
                name=tensor.name,
                fate=landing.fate,
                into=landing.into,
                shard=shard_text(landing.shards),
                read=self.read(tensor, landing),
                by_design=landing.by_design,
                chain=landing.chain,
            )
        )

    def read(self, tensor: TensorSpec, landing: Landing) -> float | None:
        if landing.fate != "loaded":
            return 0.0
        return 1.0 if tensor.shape is not None else None

    def place(self, tensor: TensorSpec, landing: Landing) -> Landing:
        """Writes a tensor that found its parameter, or says why it does not fit."""
        assert landing.into is not None
        spec = self.model.parameters[landing.into]
        replace = msgspec.structs.replace
        if not spec.shards and landing.shards:
            landing = replace(landing, shards=())  # a plain parameter's loader never looks at the shard id
        parts = self.ledger.parts_of(spec, landing.shards)
        if parts is None:
            error = f"ValueError: Shard id {shard_text(landing.shards)} is not one of {', '.join(spec.shards)}"
            return replace(landing, fate="not_reached", error=error)
        if misfit := self.ledger.misfit(spec, parts, tensor):
            self.mismatches.append(misfit)
            error = f"AssertionError: Attempted to load weight ({misfit.found}) into parameter ({misfit.wanted})"
            return replace(landing, fate="not_reached", error=error)
        wanted = spec.dtype or self.dtype
        if tensor.dtype is not None and (tensor.dtype in FLOATS) != (wanted is None or wanted in FLOATS):
            self.mismatches.append(Mismatch("dtype", spec.name, (tensor.name,), wanted or "a float", tensor.dtype))
        self.ledger.write(spec, parts, tensor.name)
        return landing

    def failures(self) -> tuple[Failure, ...]:
        """What the loader raises, in the order it comes to it; the start-up check and the check of tied names last."""
        found = [Failure(message, tuple(names), parameter) for (message, parameter), names in self.errors.items()]
        for canonical, names in self.aliased.items():
            if canonical not in self.ledger.parts:
                text = f"ValueError: a name was skipped because it is tied to {canonical!r}, but {canonical!r} was not found"
                found.append(Failure(text, tuple(names), canonical))
        unwritten = [s.name for s in self.model.parameters.values() if s.checked and s.name not in self.ledger.parts]
        if unwritten:
            shown = ", ".join(repr(n) for n in unwritten[:5]) + (
                f" and {len(unwritten) - 5} more" if unwritten[5:] else ""
            )
            found.append(Failure(f"ValueError: Following weights were not initialized from checkpoint: {shown}"))
        return tuple(found)

    def note_seats(self, name: str, landing: Landing) -> None:
        """Remembers how each loader below the model saw this name, for rules that never fire."""
        if landing.into is None:
            return
        for at in self.model.seats:
            if at and landing.into.startswith(f"{at}."):
                first = next((step.before for step in landing.chain if step.at == at), landing.into[len(at) + 1 :])
                self.seen.setdefault(at, []).append((first, name))

    def collisions(self) -> tuple[Any, ...]:
        """Tensors written over others, without the pairs that are one embedding by its two names."""
        tied = set(self.model.aliases.values())
        return tuple(c for c in self.ledger.collisions() if c.parameter not in tied)

    def hits(self) -> tuple[RuleHit, ...]:
        """Every rule with the number of names it fired on; rules built into the loader only where they did."""
        counts: dict[tuple[str, str, str, str | None, str], int] = {}
        for seat in self.model.seats.values():
            for rule in (*seat.before, *seat.mapper.rules):
                key = (rule.kind, rule.key, seat.loader.at, rule.to, rule.source)
                counts[key] = counts.get(key, 0) + self.fired.get((seat.at, rule.kind, rule.key), 0)
        return tuple(
            RuleHit(kind, key, to, at, hits, source)
            for (kind, key, at, to, source), hits in counts.items()
            if hits or source != "built in"
        )

    def notes(self) -> list[Note]:
        """Rules that can never fire where they sit, and tied embeddings that are stored twice."""
        dead = (
            note
            for seat in self.model.seats.values()
            if seat.at
            for rule in seat.mapper.rules
            if (note := self.dead(seat, rule))
        )
        tied = set(self.model.aliases.values())
        twice = (
            Note(
                "tied-twice",
                f"{c.kept} and {', '.join(c.lost)} are one embedding; the later one wins",
                (*c.lost, c.kept),
            )
            for c in self.ledger.collisions()
            if c.parameter in tied
        )
        return [*dead, *twice]

    def dead(self, seat: Seat, rule: Rule) -> Note | None:
        """The note on a rule whose key begins with a dot that no name at this module can have."""
        bare = rule.key.removeprefix(".")
        if (
            rule.kind not in ("substring", "stacked")
            or bare == rule.key
            or self.fired.get((seat.at, rule.kind, rule.key))
        ):
            return None
        names = tuple(name for seen, name in self.seen.get(seat.at, ()) if seen.startswith(bare))
        if not names:
            return None
        text = (
            f"the {rule.kind} rule {rule.key!r} can never fire in {seat.at}: the loader there sees names without their parent path, "
            f"{next(s for s, n in self.seen[seat.at] if n == names[0])!r}, so nothing stands before the dot"
        )
        return Note("dead-rule", text, names)


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The safetensors name of the dtype that the config asks for; None when it names none."""
    text = config.get("text_config")
    for held in (config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            found = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}.get(str(held.get(key)))
            if found:
                return found
    return None

"""The seam between engines and checks: what one engine does with one checkpoint. Types only, and what follows from them.

A Plan crosses a process border as JSON (msgspec), so every field is plain data. See "Words" in the README for the vocabulary.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import msgspec

Fate = Literal["loaded", "dropped", "ignored", "unmatched", "not_reached"]
Coverage = Literal["full", "partial", "none", "unknown"]
Verdict = Literal["loads", "loads_with_loss", "fails", "not_judged"]
Method = Literal["replay", "live", "rules"]


class Step(msgspec.Struct, frozen=True, gc=False):
    """One rule that changed a name: its kind, its key, the module path it ran at (`""` is the model), and the text before and after.

    `after` is None when the rule drops the name. Names are as that module saw them, its own prefix stripped.
    """

    rule: str
    key: str
    at: str
    before: str = msgspec.field(name="from")
    after: str | None = msgspec.field(name="to")
    shard: str | None = None


class NameFate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What happened to one checkpoint tensor."""

    name: str
    fate: Fate
    into: str | None = None
    """The parameter it was written into (the first, when a conversion splits it), or the last name it was looked up by."""
    also: tuple[str, ...] = ()
    """Further parameters that hold a part of it."""
    shard: str | None = None
    """Which part of a fused parameter: `q`, `k`, `v`, `0`, `expert 3` …"""
    read: float | None = None
    """Share of its elements that reached a parameter, 0 to 1; None when unknown."""
    by_design: str | None = None
    """Why not being loaded is meant (tied, computed, metadata, draft model …); None when it is not."""
    chain: tuple[Step, ...] = ()


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One parameter or persistent buffer of the engine's model and how much of it was written."""

    name: str
    coverage: Coverage
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    """A safetensors dtype name (`BF16`)."""
    share: float | None = None
    """Share of its elements that were written, 0 to 1; None when unknown."""
    sources: tuple[str, ...] = ()
    """The checkpoint tensors that were written into it, in order."""
    by_design: str | None = None
    """Why staying unwritten is meant (tied to another, default-valued, computed …)."""
    buffer: bool = False


class Collision(msgspec.Struct, frozen=True):
    """Several checkpoint tensors on one place: `kept` won, `lost` were overwritten or skipped."""

    parameter: str
    kept: str
    lost: tuple[str, ...]


class Mismatch(msgspec.Struct, frozen=True):
    """A tensor that does not fit its parameter. `kind`: `shape`, or `dtype` for a cast between kinds (int8 into bf16)."""

    kind: Literal["shape", "dtype"]
    parameter: str
    names: tuple[str, ...]
    wanted: str
    found: str


class Failure(msgspec.Struct, frozen=True):
    """One error of the loader itself, in its own words, with the tensors it was working on."""

    message: str
    names: tuple[str, ...] = ()
    parameter: str | None = None


class RuleHit(msgspec.Struct, frozen=True):
    """How often one rule fired: `at` is the module path it sits on, `hits` the number of names it changed."""

    rule: str
    key: str
    to: str | None
    at: str
    hits: int
    source: str = ""
    """Where the rule stands (project, release, path), when the engine can say."""


class Note(msgspec.Struct, frozen=True):
    """A fact worth telling that is neither loss nor failure (a loader that claims wrongly, a config from a newer release)."""

    kind: str
    text: str
    names: tuple[str, ...] = ()


class Unjudged(msgspec.Struct, frozen=True):
    """A question this engine could not answer for this checkpoint, and why. `topic`: `shapes`, `tied`, `values` …"""

    topic: str
    reason: str


class DraftLayer(msgspec.Struct, frozen=True):
    """One layer of a draft model: `complete`, `partial` (some parameters stay unwritten), or `dropped` (none of its tensors is read)."""

    path: str
    state: Literal["complete", "partial", "dropped"]
    names: tuple[str, ...]
    """The checkpoint tensors that the draft model reads for it and the main model does not."""
    unwritten: tuple[str, ...] = ()


class Draft(msgspec.Struct, frozen=True):
    """What the engine's own draft class (multi-token prediction) does with the checkpoint that it shares with the main model."""

    architecture: str
    verdict: Verdict
    error: str | None = None
    """The loader's own first message, or why it was not judged."""
    layers: tuple[DraftLayer, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What one engine does with one checkpoint."""

    id: str
    """As in `--engine`: `transformers`, `vllm==0.25.1`, `rules:vllm==0.25.1`."""
    engine: str
    """The software: `transformers`, `vllm`, or the project of one's own rule book."""
    release: str | None
    method: Method
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    architecture: str | None = None
    """The class that was built."""
    not_judged: str | None = None
    """Why nothing could be said (environment, stub, budget); the verdict is then `not_judged`, whatever else is filled in."""
    error: str | None = None
    """The loader's own first message, when it raises."""
    failures: tuple[Failure, ...] = ()
    names: tuple[NameFate, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    collisions: tuple[Collision, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    rules: tuple[RuleHit, ...] = ()
    notes: tuple[Note, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    tp: tuple[dict[str, Any], ...] = ()
    draft: Draft | None = None

    @cached_property  # a pass over all names, of which most checks and reports want but these
    def not_plain(self) -> tuple[NameFate, ...]:
        """The names that were not simply loaded, read whole or to an unknown share: all that a loss can be among."""
        return tuple(
            n
            for n in self.names
            if n.fate != "loaded" or n.by_design is not None or (n.read is not None and n.read < 1)
        )

    @cached_property
    def verdict(self) -> Verdict:
        """What raises decides `fails`; what was observed decides loss; by-design gaps never lower a verdict."""
        if self.not_judged is not None:
            return "not_judged"
        if self.error is not None:
            return "fails"
        lost = any(n.by_design is None for n in self.not_plain)
        unwritten = any(p.coverage in ("none", "partial") and p.by_design is None for p in self.parameters)
        cast = any(m.kind == "dtype" for m in self.mismatches)  # what the stored numbers stand for is lost
        return "loads_with_loss" if lost or unwritten or cast or self.collisions else "loads"

"""What the checks find, and the Report that carries it. A finding holds facts; text is made from them once."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ckaudit.plan import Plan

Severity = Literal["error", "warning", "note"]
Blame = Literal["checkpoint", "config", "engine", "environment", "undecidable"]


class Check(msgspec.Struct, frozen=True):
    """One row of the catalogue: a stable id that is never reused, the name of the defect, and its usual severity."""

    id: str
    title: str
    severity: Severity


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One root cause, whatever the number of tensors it touches."""

    check: str
    title: str
    severity: Severity
    blame: Blame
    engine: str | None = None
    """The engine id it holds for; None when it holds for the files themselves."""
    names: tuple[str, ...] = ()
    """Every tensor, parameter or file it concerns, in natural order; reports fold them."""
    count: int = 0
    bytes: int = 0
    wanted: str = ""
    found: str = ""
    message: str = ""
    """One sentence: what is wrong and where."""
    mend: str = ""
    """The smallest cure, as something to do; empty when there is none to give."""
    suppressed_by: str | None = None


class Skip(msgspec.Struct, frozen=True):
    """A check that could not be judged, with the reason. Never counts as passed."""

    check: str
    reason: str
    engine: str | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What was audited, in numbers: the `target` section of the JSON report."""

    name: str
    revision: str | None
    source: str
    architectures: tuple[str, ...]
    model_type: str | None
    tensors: int
    parameters: int | None
    bytes: int | None
    shards: int
    dtypes: dict[str, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result of an audit; formats render it, the command line turns it into an exit code."""

    target: Target
    plans: tuple[Plan, ...]
    requested: frozenset[str] = frozenset()
    """Ids of the engines that the user asked for by name."""
    sizes: dict[str, int] = {}
    """Bytes of every checkpoint tensor by name, where known."""
    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()
    load: dict[str, Any] | None = None
    forward: dict[str, Any] | None = None
    perplexity: dict[str, Any] | None = None

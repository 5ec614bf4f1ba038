"""What the checks find, and the Report that carries it. A finding holds facts; text is made from them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ckaudit.changes import Diff
from ckaudit.naming import natural_key
from ckaudit.plan import Plan

Severity = Literal["error", "warning", "note"]
FailOn = Literal["error", "warning", "note", "never"]
Blame = Literal["checkpoint", "config", "engine", "environment", "undecidable"]


SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""


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


def finding(
    check: Check, message: str, names: Iterable[str] = (), *, engine: str | None = None, severity: Severity | None = None,
    blame: Blame = "checkpoint", count: int | None = None, bytes: int = 0, wanted: str = "", found: str = "", mend: str = "",
) -> Finding:  # fmt: skip
    """A finding of `check`, with its own severity unless another is given, and each of `names` once."""
    listed = tuple(sorted(set(names), key=natural_key))
    return Finding(
        check=check.id, title=check.title, severity=severity or check.severity, blame=blame, engine=engine, names=listed,
        count=len(listed) if count is None else count, bytes=bytes, wanted=wanted, found=found, message=message, mend=mend,
    )  # fmt: skip


class Skip(msgspec.Struct, frozen=True):
    """A check that could not be judged, with the reason. Never counts as passed."""

    check: str
    reason: str
    engine: str | None = None


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """One plan in numbers. Every tensor is in exactly one of the first six counts, every parameter in one of the coverage counts."""

    loaded: int
    dropped: int
    ignored: int
    unmatched: int
    not_reached: int
    by_design: int
    bytes_lost: int
    parameters: int
    full: int
    partial: int
    none: int
    unknown: int
    unwritten_by_design: int


def tally(plan: Plan, sizes: Mapping[str, int]) -> Tally:
    """Counts `plan`; `sizes` are the bytes of each tensor by name, where known.

    Lost are the bytes that reach no parameter although they were meant to: those of tensors the loader had not come to are not.
    """
    fates: Counter[str] = Counter()
    lost = 0.0
    fates["loaded"] = len(plan.names) - len(plan.not_plain)
    for n in plan.not_plain:
        fates[n.fate if n.fate == "loaded" or n.by_design is None else "by_design"] += 1
        if n.by_design is None and n.fate != "not_reached":
            unread = 1.0 if n.fate != "loaded" else 1.0 - (1.0 if n.read is None else n.read)
            lost += unread * sizes.get(n.name, 0)
    coverage = Counter(p.coverage for p in plan.parameters)
    return Tally(
        loaded=fates["loaded"],
        dropped=fates["dropped"],
        ignored=fates["ignored"],
        unmatched=fates["unmatched"],
        not_reached=fates["not_reached"],
        by_design=fates["by_design"],
        bytes_lost=round(lost),
        parameters=len(plan.parameters),
        full=coverage["full"],
        partial=coverage["partial"],
        none=coverage["none"],
        unknown=coverage["unknown"],
        unwritten_by_design=sum(p.coverage in ("none", "partial") and p.by_design is not None for p in plan.parameters),
    )


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What was audited, in numbers: the `target` section of the JSON report."""

    name: str
    revision: str | None
    source: str
    architectures: tuple[str, ...]
    model_type: str | None
    tensors: int
    parameters: int | None
    """Elements of all tensors together, as stored (a packed tensor counts its packed elements); None when a header is missing."""
    bytes: int | None
    """Bytes of tensor data of all tensors together; None when a header is missing."""
    shards: int
    dtypes: dict[str, int]
    """Number of tensors by safetensors dtype."""


class Quantised(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that are quantised alike: what is on disk, in the config, and in each engine."""

    modules: tuple[str, ...]
    """Their paths, folded."""
    count: int
    on_disk: str
    """The scheme that the stored tensors show, or `plain`."""
    declared: str
    """What the config says of them."""
    built: dict[str, str]
    """Engine id -> `quantised`, `dequantised`, `plain` or `nothing`."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings of each severity stand, how many were suppressed, and what was not judged."""

    errors: int
    warnings: int
    notes: int
    skips: int
    suppressed: int
    not_judged: tuple[str, ...]
    """Ids of the engines whose verdict is `not_judged`."""


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
    source: Target | None = None
    """What the target was compared with."""
    diff: Diff | None = None
    quantisation: tuple[Quantised, ...] = ()
    """What is quantised, where anything is."""
    adapter: dict[str, Any] | None = None
    """What the target adapts and where that binds, where it is an adapter."""
    fail_on: FailOn = "error"
    """The mildest severity that makes `exit_code` 1."""
    allow_not_judged: bool = False
    """Whether something asked for that could not be judged leaves `exit_code` at 0."""
    unanswered: bool = False
    """Whether an option asked for what no engine here judges (a skip says what)."""
    stopped: bool = False
    """Whether circumstances (no such device, too little memory) broke off a load: what was known by then is all that is here."""

    @property
    def standing(self) -> tuple[Finding, ...]:
        """The findings that nobody suppressed."""
        return tuple(f for f in self.findings if f.suppressed_by is None)

    @property
    def worst(self) -> Severity | None:
        """The worst severity among the standing findings; None when there is none."""
        found = {f.severity for f in self.standing}
        return next((s for s in SEVERITIES if s in found), None)

    @property
    def summary(self) -> Summary:
        """Counts of everything in the report. Suppressed findings are counted apart and nowhere else."""
        standing = self.standing
        errors, warnings, notes = (sum(f.severity == s for f in standing) for s in SEVERITIES)
        return Summary(
            errors=errors,
            warnings=warnings,
            notes=notes,
            skips=len(self.skips),
            suppressed=len(self.findings) - len(standing),
            not_judged=tuple(p.id for p in self.plans if p.verdict == "not_judged"),
        )

    @property
    def exit_code(self) -> int:
        """0 judged and clean, 1 findings at or above `fail_on`, 2 a load that was stopped, 3 something asked for was not judged.

        2 comes before 1, 1 before 3. Other usage errors and crashes (2 as well) never make a Report.
        """
        if self.stopped:
            return 2
        if fails(self.findings, self.fail_on):
            return 1
        unjudged = set(self.summary.not_judged)
        nothing_judged = (
            len(unjudged) == len(self.plans) and self.load is None and self.perplexity is None and self.diff is None
        )
        in_part = self.diff is not None and self.diff.roundtrip and bool(self.diff.unjudged)
        begun = self.load is None or self.load.get("status") != "not_begun"
        in_part = in_part or not (begun or any(p.verdict == "fails" for p in self.plans))
        ranks = any(row["verdict"] == "not_judged" for p in self.plans for row in p.tp)
        asked = self.unanswered or bool(self.requested & unjudged)
        if not self.allow_not_judged and (nothing_judged or in_part or ranks or asked):
            return 3
        return 0


def fails(findings: Iterable[Finding], fail_on: FailOn) -> bool:
    """Whether a finding that stands is at or above `fail_on`."""
    if fail_on == "never":
        return False
    bad = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return any(f.severity in bad and f.suppressed_by is None for f in findings)


def ordered(findings: Iterable[Finding], engines: Sequence[str]) -> tuple[Finding, ...]:
    """The findings worst first; within a severity those of the files, then engine by engine as in `engines`, by check id and names."""
    place = {engine: i for i, engine in enumerate(engines)}

    def key(finding: Finding) -> tuple[int, int, str, tuple[str, ...], str]:
        engine = -1 if finding.engine is None else place.get(finding.engine, len(place))
        return SEVERITIES.index(finding.severity), engine, finding.check, finding.names, finding.message

    return tuple(sorted(findings, key=key))

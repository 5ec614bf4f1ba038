"""Report -> JSON, version 1. The format itself is in `schema_v1`."""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec
from msgspec import UNSET

from ckaudit import __version__, findings, plan
from ckaudit.report import schema_v1 as v1

T = TypeVar("T", bound=msgspec.Struct)

_RANKS = {"pp": 1, "ep": False, "error": None, "bytes_per_rank": None, "ranks": (), "lost": ()}


def render(report: findings.Report, *, names: bool = False) -> str:
    """The report as indented ASCII JSON with a final newline; `names` adds every tensor's fate and rule chain."""
    return json.dumps(msgspec.to_builtins(document(report, names=names)), indent=2, allow_nan=False) + "\n"


def document(report: findings.Report, *, names: bool = False) -> v1.Document:
    """The report in the shape of the format."""
    summary = report.summary
    return v1.Document(
        schema_version=1,
        tool=v1.Tool(name="ckaudit", version=__version__),
        target=_like(v1.Target, report.target),
        engines=tuple(_engine(p, report, names=names) for p in report.plans),
        findings=tuple(_like(v1.Finding, f) for f in report.findings),
        skips=tuple(_like(v1.Skip, s) for s in report.skips),
        load=report.load,
        forward=report.forward,
        perplexity=report.perplexity,
        quantisation=tuple(_like(v1.Quantised, q) for q in report.quantisation),
        adapter=None if report.adapter is None else msgspec.convert(report.adapter, v1.Adapter),
        diff=_diff(report),
        summary=_like(v1.Summary, summary),
        exit_code=report.exit_code,  # type: ignore[arg-type]  # a Report knows no other code
    )


def _like(kind: type[T], value: msgspec.Struct) -> T:
    """`value` as the format's own struct; a field that the program has renamed fails here, never in a consumer."""
    return kind(**{field: getattr(value, field) for field in kind.__struct_fields__})


def _engine(p: plan.Plan, report: findings.Report, *, names: bool) -> v1.Engine:
    return v1.Engine(
        id=p.id,
        engine=p.engine,
        release=p.release,
        method=p.method,
        requested=p.id in report.requested,
        verdict=p.verdict,
        error=p.error,
        not_judged=p.not_judged,
        architecture=p.architecture,
        options=p.options,
        environment=p.environment,
        summary=_like(v1.EngineSummary, findings.tally(p, report.sizes)),
        tp=tuple(msgspec.convert({**_RANKS, **row}, v1.TensorParallel) for row in p.tp),
        draft=None if p.draft is None else msgspec.convert(msgspec.to_builtins(p.draft), v1.Draft),
        names=tuple(_name(n) for n in p.names) if names else UNSET,
    )


def _diff(report: findings.Report) -> v1.Diff | None:
    found = report.diff
    if found is None or report.source is None:
        return None
    return v1.Diff(
        source=_like(v1.Target, report.source),
        roundtrip=found.roundtrip,
        identical=found.identical,
        identical_bytes=found.identical_bytes,
        changes=tuple(
            v1.Change(
                kind=c.kind,
                rule=c.rule,
                text=c.text,
                from_count=len(set(c.old)),
                to_count=len(set(c.new)),
                from_bytes=c.old_bytes,
                to_bytes=c.new_bytes,
                engines=c.engines,
                links=tuple(v1.Link(before=link.old, after=link.new) for link in c.links),
            )
            for c in found.changes
        ),
    )


def _name(n: plan.NameFate) -> v1.Name:
    return v1.Name(
        name=n.name,
        fate=n.fate,
        into=n.into,
        also=n.also,
        shard=n.shard,
        read=n.read,
        by_design=n.by_design,
        chain=tuple(_like(v1.Step, step) for step in n.chain),
    )

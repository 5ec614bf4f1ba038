"""two targets -> Report: `ckaudit diff`."""

from __future__ import annotations

from ckaudit.changes import Diff
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.findings import FailOn, Report, Skip, ordered
from ckaudit.pipeline.stages import describe, side_by_side
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress, Progress
from ckaudit.source import open_source


def diff(
    source: str,
    target: str,
    *,
    roundtrip: bool = False,
    jobs: int = 32,
    offline: bool = False,
    fail_on: FailOn = "error",
    allow_not_judged: bool = False,
    progress: Progress | None = None,
) -> Report:
    """What the checkpoint `target` has otherwise than its `source`, told from both headers: the report's `diff` section.

    Either is a target as for `audit`; two revisions of one repo are `org/name@one` and `org/name@other`. Differences that a rule
    explains (a rename, a layout, a cast, a tied head …) are in the section alone, every other one is a finding too; with `roundtrip`
    every one is. Where names changed, engines are asked whether they have a place for the new ones: a rule book, and transformers where
    that does not settle it. Raises SourceError for a target that cannot be read.
    """
    from ckaudit.checks import differences
    from ckaudit.diff import compare

    progress = progress or NullProgress()
    a, b = side_by_side(
        (source, target),
        lambda t: read_checkpoint(
            open_source(t, jobs=jobs, offline=offline, progress=progress), progress=progress, jobs=jobs
        ),
    )
    empty = [Skip("diff", f"{side}: {c.unaudited}") for side, c in (("A", a), ("B", b)) if c.unaudited is not None]
    found = None if empty else compare(a, b, roundtrip=roundtrip)
    if found is not None and not roundtrip:
        found = _placed(found, a, b, progress, offline=offline)
    findings, skips = differences.run(found) if found is not None else ((), ())
    return Report(
        target=describe(b),
        source=describe(a),
        plans=(),
        diff=found,
        findings=ordered(findings, ()),
        skips=(*empty, *skips),
        sizes={t.name: t.nbytes or 0 for c in (a, b) for t in c.tensors.values()},
        fail_on=fail_on,
        allow_not_judged=allow_not_judged,
    )


def _placed(found: Diff, a: Checkpoint, b: Checkpoint, progress: Progress, *, offline: bool) -> Diff:
    """`found`, with what engines say of the names that B gave. The rule book is asked first: it answers in milliseconds."""
    from ckaudit.diff import places

    names = places.new_names(found)
    if not names:
        return found
    from ckaudit.adapters import recognise
    from ckaudit.engines import EngineOptions, rules, select

    plans: list[Plan] = []
    for spec in (rules.default_spec(b), "transformers") if recognise(b) is None else ():
        for engine in select(spec) if spec is not None else ():
            plans.append(engine.plan(b, EngineOptions(offline=offline), progress))
            if places.without_place(plans[-1], names) == frozenset():
                return places.placed(found, plans, a, b)
    return places.placed(found, plans, a, b)

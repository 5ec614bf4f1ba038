"""two targets -> Report: `ckaudit diff`."""

from __future__ import annotations

from ckaudit.checkpoint import read_checkpoint
from ckaudit.findings import FailOn, Report, Skip, ordered
from ckaudit.pipeline.stages import describe, side_by_side
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
    every one is. Raises SourceError for a target that cannot be read.
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

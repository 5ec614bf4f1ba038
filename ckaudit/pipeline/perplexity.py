"""target -> Report, by what it predicts: `ckaudit ppl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.findings import FailOn, Report, ordered
from ckaudit.pipeline.stages import describe
from ckaudit.progress import NullProgress, Progress
from ckaudit.scores import PplOptions
from ckaudit.source import open_source

if TYPE_CHECKING:
    from ckaudit.perplexity.run import Repo


def measure(
    target: str,
    options: PplOptions,
    *,
    jobs: int = 32,
    offline: bool = False,
    fail_on: FailOn = "error",
    progress: Progress | None = None,
) -> Report:
    """Perplexity of `target` as `options` say: the report's `perplexity` section, with findings and skips of its own.

    Files of a Hub target are downloaded first. Raises a CkauditError for what stops it: a target or data set that cannot be read, a
    model that does not load, a server without log-probabilities, a reference made on other rows.
    """
    from ckaudit.checks import perplexity as checks
    from ckaudit.engines import cache
    from ckaudit.perplexity.run import run

    progress = progress or NullProgress()
    checkpoint, repo = _whole(target, options.settings.trust_remote_code, jobs, offline, progress)
    other = None
    if options.candidate is not None:
        _, other = _whole(options.candidate, options.settings.trust_remote_code, jobs, offline, progress)
    outcome = run(repo, options, progress, candidate=other, cache=cache.home() / "perplexity")
    findings, skips = checks.run(outcome)
    return Report(
        target=describe(checkpoint),
        plans=(),
        findings=ordered(findings, ()),
        skips=skips,
        perplexity=msgspec.to_builtins(outcome),
        fail_on=fail_on,
        unanswered=outcome.nothing_compared,
    )


def _whole(target: str, code: bool, jobs: int, offline: bool, progress: Progress) -> tuple[Checkpoint, Repo]:
    """The target with its files on this machine."""
    from ckaudit.materialize import LoadOptions
    from ckaudit.materialize.files import needed_files
    from ckaudit.perplexity.run import Repo

    source = open_source(target, jobs=jobs, offline=offline, progress=progress)
    checkpoint = read_checkpoint(source, progress=progress, code=code, jobs=jobs)
    wanted = needed_files(checkpoint, LoadOptions(trust_remote_code=code))
    folder = source.folder(wanted)
    stamps = [(p, (folder / p).stat().st_size, (folder / p).stat().st_mtime_ns) for p in wanted]
    return checkpoint, Repo(source.name, folder, source.revision or repr((str(folder), stamps)))

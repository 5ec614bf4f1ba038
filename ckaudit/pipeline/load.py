"""target -> Report, by loading it for real: `ckaudit load`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from ckaudit.checkpoint import read_checkpoint
from ckaudit.checks.observed import Observed
from ckaudit.engines import EngineOptions, select
from ckaudit.errors import EngineError, UsageError
from ckaudit.findings import FailOn, Report, Skip, ordered
from ckaudit.pipeline.stages import describe, refused, side_by_side
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress, Progress
from ckaudit.source import open_source

if TYPE_CHECKING:
    from ckaudit.materialize import LoadOptions, LoadResult


_UNHEARD = {
    "class_name": "--class",
    "shards": "--shards",
    "expect": "--expect",
    "modalities": "--modality",
    "tp": "--tp",
}
"""What a load by vLLM cannot answer, by the field of LoadOptions: passed over, it would pass for answered."""


class Loaded(msgspec.Struct, frozen=True):
    """The end of a load: the report, every tensor's statistics, and why it was stopped by circumstances (exit code 2), if it was."""

    report: Report
    observed: Observed | None = None
    stopped: str | None = None


def load(
    target: str,
    options: LoadOptions,
    *,
    engine: str = "transformers",
    force: bool = False,
    jobs: int = 32,
    offline: bool = False,
    fail_on: FailOn = "error",
    progress: Progress | None = None,
) -> Loaded:
    """Audit the names of `target`, then load it for real as `options` say: the report's `load` and `forward` sections, with findings.

    A load that the audit says cannot work is not begun unless `force`. `engine` is `transformers`, or `vllm` where that is installed:
    then its own loader and one generation step decide, next to what a replay of the same release predicts. Files of a Hub target are
    downloaded first. Raises a CkauditError for a target that cannot be read or options that make no sense.
    """
    from ckaudit import checks
    from ckaudit.materialize import files, waiting
    from ckaudit.materialize import load as materialize
    from ckaudit.materialize.live import disagreements, load_vllm

    progress = progress or NullProgress()
    if engine not in ("transformers", "vllm"):
        raise EngineError(f"`ckaudit load` knows no engine {engine!r}.", "Use transformers or vllm.")
    if engine == "vllm" and (unheard := [flag for field, flag in _UNHEARD.items() if getattr(options, field)]):
        raise UsageError(
            f"vLLM's own load does not go by {' and '.join(unheard)}.", "Leave it out, or load with transformers."
        )
    source = open_source(target, jobs=jobs, offline=offline, progress=progress)
    checkpoint = read_checkpoint(source, progress=progress, code=options.trust_remote_code, jobs=jobs)
    asked = EngineOptions(trust_remote_code=options.trust_remote_code, class_name=options.class_name, offline=offline)
    loaded: LoadResult | None = None
    section: dict[str, Any] = {"status": "not_begun", "error": None}
    # The child starts, and imports what it needs, while the names are audited.
    with waiting(options) if engine == "transformers" else nullcontext() as child:
        plans = side_by_side(select("transformers"), lambda one: one.plan(checkpoint, asked, progress))
        findings, skips = checks.run(checkpoint, plans)
        plans = refused(plans, findings, checkpoint)
        if any(p.verdict == "fails" for p in plans) and not force and engine == "transformers":
            section["error"] = "the audit of names says that it cannot load; --force loads all the same"
        elif all(s.header is None for s in checkpoint.shards):
            section["error"] = checkpoint.unaudited or "only the index is here, and none of the files that it names"
        else:
            folder = source.folder(files.needed_files(checkpoint, options))
            if engine == "vllm":
                live = load_vllm(checkpoint, folder, options, progress=progress)
                predicted: tuple[Plan, ...] = ()
                if live.plan.release is not None:
                    predicted = side_by_side(select(live.plan.id), lambda one: one.plan(checkpoint, asked, progress))
                    predicted = refused(predicted, findings, checkpoint)
                plans, section = (*predicted, live.plan), {"engine": "vllm", **live.section}
                findings, skips = checks.run(checkpoint, plans)
                findings = (*findings, *disagreements(live.plan, predicted))
            else:
                unused = tuple(n.name for p in plans for n in p.names if n.fate != "loaded")
                loaded = materialize(checkpoint, folder, options, progress=progress, unused=unused, child=child)
                section = loaded.load
                if loaded.observed is not None:  # then the values are judged after all
                    skips = tuple(s for s in skips if not (s.check == "CK501" and s.engine is None))
                    skips = (*skips, *_unread(plans))
                findings, skips = (*findings, *loaded.findings), (*skips, *loaded.skips)
    begun = section["status"] in ("complete", "partial")
    stopped = f"{loaded.error} {loaded.hint}" if loaded is not None and loaded.environment else None
    report = Report(
        target=describe(checkpoint),
        plans=plans,
        requested=frozenset() if begun else frozenset(p.id for p in plans),
        sizes={t.name: t.nbytes for t in checkpoint.tensors.values() if t.nbytes is not None},
        findings=ordered(findings, [p.id for p in plans]),
        skips=skips,
        load=section,
        forward=loaded.forward if loaded else None,
        fail_on=fail_on,
        unanswered=loaded is not None and loaded.unanswered,
        stopped=stopped is not None,
    )
    return Loaded(report, loaded.observed if loaded else None, stopped)


def _unread(plans: tuple[Plan, ...]) -> Iterator[Skip]:
    """What the loader did not take, although nothing says that it is meant so, was not looked at either."""
    for plan in plans:
        left = sum(1 for name in plan.names if name.fate != "loaded" and name.by_design is None)
        if left:
            yield Skip(
                "CK501", f"{left:,} tensor{'s' * (left > 1)} that the loader does not take: values not read", plan.id
            )

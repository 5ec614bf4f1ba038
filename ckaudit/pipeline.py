"""target -> Report: the only module that names every stage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from ckaudit.adapters import Adapter, recognise
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.checks.observed import Observed
from ckaudit.engines import Engine, EngineOptions, select
from ckaudit.errors import EngineError, UsageError
from ckaudit.findings import FailOn, Finding, Report, Skip, Target, ordered
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress, Progress
from ckaudit.scores import PplOptions
from ckaudit.source import open_source
from ckaudit.suppressions import Suppressions
from ckaudit.suppressions import apply as suppress

if TYPE_CHECKING:
    from ckaudit.materialize import LoadOptions, LoadResult
    from ckaudit.perplexity.run import Repo

T = TypeVar("T")
R = TypeVar("R")

SIDE_BY_SIDE = 4
"""Engines that run at once; each is a process that may hold a few GB."""


def audit(
    target: str,
    engines: Sequence[str | Engine] | None = None,
    *,
    base: str | None = None,
    jobs: int = 16,
    trust_remote_code: bool = False,
    offline: bool = False,
    class_name: str | None = None,
    device: str = "cpu",
    budget: float = 600.0,
    cache: bool = True,
    tp: Sequence[int] = (),
    vllm: Mapping[str, Any] | None = None,
    fail_on: FailOn = "error",
    allow_not_judged: bool = False,
    suppressions: Suppressions | None = None,
    progress: Progress | None = None,
) -> Report:
    """What each engine would do with the checkpoint `target`, told from its headers alone; no tensor data is downloaded.

    `target` is `org/name[@revision]` on the Hub, a folder, a `.safetensors` file or an index file. `engines` are specs as in `--engine`
    (`transformers`, `vllm==0.25.1`, `rules:vllm==0.25.1`, `rules:mine.toml`) or Engine objects; None asks `transformers` and the
    newest vLLM release for which a shipped rule book knows the architecture. `base` is the target that an adapter is to be laid on:
    the engines judge that, and the report tells where the adapter's modules bind in it. `jobs` headers are read at once; `budget` is
    in seconds for one engine. `tp` are tensor-parallel sizes to load over besides 1, `vllm` serving options under vLLM's own names.
    Nothing from the target is executed unless `trust_remote_code`. `suppressions` (`ckaudit.suppressions.read`) are findings to live
    with: they stay in the report, apart.

    Bad input (a broken header, a lying index) is in the report as findings. Raises a `CkauditError` for what stops an audit:
    SourceError for a target that cannot be read, EngineError for an engine that does not exist, RuleError for a bad rule book.
    """
    from ckaudit import checks
    from ckaudit.checks import schemes

    progress = progress or NullProgress()
    asked = None if engines is None else _selected(engines)  # a misspelt engine must not cost a download
    options = EngineOptions(
        trust_remote_code=trust_remote_code,
        device=device,
        class_name=class_name,
        budget=budget,
        offline=offline,
        cache=cache,
        tp=tuple(tp),
        vllm=dict(vllm or {}),
    )
    source = open_source(target, jobs=jobs, offline=offline, progress=progress)
    checkpoint = read_checkpoint(source, progress=progress, code=trust_remote_code, jobs=jobs)
    adapter = recognise(checkpoint)
    if adapter is not None:
        report = _audit_adapter(adapter, base, asked, options, jobs, progress)
        found = _suppressed(report.findings, suppressions, checkpoint, report.sizes, progress)
        return replace(report, findings=found, fail_on=fail_on, allow_not_judged=allow_not_judged)
    if base is not None:
        raise UsageError(f"--base is for adapters, and {target} is none.", "Leave --base out.")
    chosen, skipped = _default(checkpoint) if asked is None else (asked, ())
    plans = _side_by_side(chosen, lambda engine: engine.plan(checkpoint, options, progress))
    findings, skips = checks.run(checkpoint, plans, tp)
    plans = _refused(plans, findings)
    sizes = {t.name: t.nbytes for t in checkpoint.tensors.values() if t.nbytes is not None}
    if suppressions is not None:
        findings = _suppressed(findings, suppressions, checkpoint, sizes, progress)
    return Report(
        target=describe(checkpoint),
        plans=plans,
        requested=frozenset(e.id for e in asked or ()),
        sizes=sizes,
        findings=ordered(findings, [p.id for p in plans]),
        skips=(*skipped, *skips, *checks.headers_alone(checkpoint)),
        quantisation=schemes.table(checkpoint, plans),
        fail_on=fail_on,
        allow_not_judged=allow_not_judged,
    )


def _audit_adapter(
    adapter: Adapter, base: str | None, asked: tuple[Engine, ...] | None, options: EngineOptions, jobs: int, progress: Progress
) -> Report:  # fmt: skip
    """The report on an adapter, laid on `base` where that is given: engines judge the base, and its modules are looked up there."""
    from ckaudit.adapters import binding
    from ckaudit.adapters.base import read_base
    from ckaudit.checks import adapters as checks

    checkpoint, laid = adapter.checkpoint, None
    skipped: tuple[Skip, ...] = ()
    bindings: list[binding.Binding] = []
    if base is not None:
        source = open_source(base, jobs=jobs, offline=options.offline, progress=progress)
        laid = read_base(source, adapter, progress=progress, code=options.trust_remote_code, jobs=jobs)
        chosen, skipped = (asked, ()) if asked is not None else _default(laid.checkpoint) if laid.is_model else ((), ())
        judged = _side_by_side(chosen, lambda engine: engine.plan(laid.checkpoint, options, progress))
        bindings = binding.bind_all(adapter, laid, judged)
    plans = tuple(b.plan for b in bindings)
    findings, skips = checks.run(adapter, laid, bindings)
    return Report(
        target=describe(checkpoint), plans=plans, requested=frozenset(e.id for e in asked or ()),
        sizes={t.name: t.nbytes for t in checkpoint.tensors.values() if t.nbytes is not None},
        findings=ordered(findings, [p.id for p in plans]), skips=(*skipped, *skips),
        adapter=binding.summary(adapter, laid, bindings),
    )  # fmt: skip


def _suppressed(
    findings: tuple[Finding, ...],
    rules: Suppressions | None,
    checkpoint: Checkpoint,
    sizes: dict[str, int],
    progress: Progress,
) -> tuple[Finding, ...]:
    if rules is None:
        return findings
    found, unused = suppress(findings, rules, checkpoint.name, sizes)
    for rule in unused:
        progress.note(f"the ignore rule for {rule.check} on {rule.names} matched nothing")
    return tuple(found)


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
    jobs: int = 16,
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
    from ckaudit.materialize import files
    from ckaudit.materialize import load as materialize
    from ckaudit.materialize.live import disagreements, load_vllm

    progress = progress or NullProgress()
    if engine not in ("transformers", "vllm"):
        raise EngineError(f"`ckaudit load` knows no engine {engine!r}.", "Use transformers or vllm.")
    source = open_source(target, jobs=jobs, offline=offline, progress=progress)
    checkpoint = read_checkpoint(source, progress=progress, code=options.trust_remote_code, jobs=jobs)
    asked = EngineOptions(trust_remote_code=options.trust_remote_code, class_name=options.class_name, offline=offline)
    plans = _side_by_side(select("transformers"), lambda one: one.plan(checkpoint, asked, progress))
    findings, skips = checks.run(checkpoint, plans)
    plans = _refused(plans, findings)
    loaded: LoadResult | None = None
    section: dict[str, Any] = {"status": "not_begun", "error": None}
    if any(p.verdict == "fails" for p in plans) and not force and engine == "transformers":
        section["error"] = "the audit of names says that it cannot load; --force loads all the same"
    elif checkpoint.unaudited is not None and not checkpoint.shards:
        section["error"] = checkpoint.unaudited
    else:
        folder = source.folder(files.needed_files(checkpoint, options))
        if engine == "vllm":
            live = load_vllm(checkpoint, folder, options, progress=progress)
            predicted: tuple[Plan, ...] = ()
            if live.plan.release is not None:
                predicted = _side_by_side(select(live.plan.id), lambda one: one.plan(checkpoint, asked, progress))
            plans, section = (*predicted, live.plan), {"engine": "vllm", **live.section}
            findings, skips = checks.run(checkpoint, plans)
            findings = (*findings, *disagreements(live.plan, predicted))
        else:
            unused = tuple(n.name for p in plans for n in p.names if n.fate != "loaded")
            loaded = materialize(checkpoint, folder, options, progress=progress, unused=unused)
            section = loaded.load
            if loaded.observed is not None:  # then the values are judged after all
                skips = tuple(s for s in skips if not (s.check == "CK501" and s.engine is None))
            findings, skips = (*findings, *loaded.findings), (*skips, *loaded.skips)
    begun = section["status"] in ("complete", "partial")
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
    )
    stopped = f"{loaded.error} {loaded.hint}" if loaded is not None and loaded.environment else None
    return Loaded(report, loaded.observed if loaded else None, stopped)


def measure(
    target: str,
    options: PplOptions,
    *,
    jobs: int = 16,
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
    )


def diff(
    source: str,
    target: str,
    *,
    roundtrip: bool = False,
    jobs: int = 16,
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
    a, b = _side_by_side(
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


def describe(checkpoint: Checkpoint) -> Target:
    """The checkpoint in numbers. A sum that a missing header would falsify is None."""
    tensors = checkpoint.tensors.values()
    config = checkpoint.config or {}
    architectures, model_type = config.get("architectures"), config.get("model_type")
    sizes = [t.nbytes for t in tensors if t.nbytes is not None]
    elements = [prod(t.shape) for t in tensors if t.shape is not None]
    return Target(
        name=checkpoint.name,
        revision=checkpoint.revision,
        source=checkpoint.kind,
        architectures=tuple(a for a in architectures if isinstance(a, str)) if isinstance(architectures, list) else (),
        model_type=model_type if isinstance(model_type, str) else None,
        tensors=len(tensors),
        parameters=sum(elements) if len(elements) == len(tensors) else None,
        bytes=sum(sizes) if len(sizes) == len(tensors) else None,
        shards=len(checkpoint.shards),
        dtypes=dict(sorted(Counter(t.dtype for t in tensors if t.dtype is not None).items())),
    )


def _refused(plans: tuple[Plan, ...], findings: Iterable[Finding]) -> tuple[Plan, ...]:
    """The plans, failing where files are such that no engine gets to see a name: what would raise decides the verdict."""
    from ckaudit.checks.container import INCOMPLETE, UNREADABLE

    errors = [f for f in findings if f.severity == "error" and f.engine is None]
    told = []
    for plan in plans:
        refuses = UNREADABLE if plan.engine == "vllm" else UNREADABLE | INCOMPLETE
        worst = next((f for f in errors if f.check in refuses), None)
        if worst is not None and plan.error is None and plan.not_judged is None:
            said = f"the files are refused before any name is looked at: {worst.check} {worst.title}"
            plan = msgspec.structs.replace(plan, error=said)
        told.append(plan)
    return tuple(told)


def _selected(specs: Sequence[str | Engine]) -> tuple[Engine, ...]:
    """The engines that `specs` name, each once."""
    found = [e for spec in specs for e in (select(spec) if isinstance(spec, str) else (spec,))]
    return tuple({e.id: e for e in found}.values())


def _default(checkpoint: Checkpoint) -> tuple[tuple[Engine, ...], tuple[Skip, ...]]:
    """The engines of an audit that names none, and what it leaves out."""
    from ckaudit.engines import rules

    spec = rules.default_spec(checkpoint)
    if spec is not None:
        return (*select("transformers"), *select(spec)), ()
    known = ", ".join(describe(checkpoint).architectures) or "this architecture"
    reason = f"no rule book knows {known}; --engine vllm==X asks that release's own loader"
    return select("transformers"), (Skip(check="rules", engine="vllm", reason=reason),)


def _side_by_side(items: Sequence[T], run: Callable[[T], R]) -> tuple[R, ...]:
    """What `run` makes of each item, in their order, a few at a time. Raises the first item's error, if one raised.

    Daemon threads: an interrupt must end the program without waiting for the workers that they talk to.
    """
    done: dict[int, R | BaseException] = {}
    slots = threading.Semaphore(SIDE_BY_SIDE)

    def work(place: int) -> None:
        with slots:
            try:
                done[place] = run(items[place])
            except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
                done[place] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results: list[R] = []
    for place in range(len(items)):
        result = done[place]
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return tuple(results)

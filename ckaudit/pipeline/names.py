"""target -> Report, from headers alone: `ckaudit names`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from msgspec.structs import replace

from ckaudit.adapters import Adapter, recognise
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.engines import Engine, EngineOptions, select
from ckaudit.errors import UsageError
from ckaudit.findings import SEVERITIES, FailOn, Finding, Report, Skip, ordered
from ckaudit.naming import printable
from ckaudit.pipeline.stages import describe, refused, side_by_side
from ckaudit.progress import NullProgress, Progress
from ckaudit.source import Source, open_source
from ckaudit.suppressions import Suppressions
from ckaudit.suppressions import apply as suppress


def audit(
    target: str | PathLike[str],
    engines: str | Sequence[str | Engine] | None = None,
    *,
    base: str | None = None,
    jobs: int = 32,
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
    verify_hash: bool = False,
    progress: Progress | None = None,
) -> Report:
    """What each engine would do with the checkpoint `target`, told from its headers alone; no tensor data is downloaded.

    `target` is `org/name[@revision]` on the Hub, a folder, a `.safetensors` file or an index file. `engines` are specs as in `--engine`
    (`transformers`, `vllm==0.25.1`, `rules:vllm==0.25.1`, `rules:mine.toml`) or Engine objects, or one; None asks `transformers` and the
    newest vLLM release for which a shipped rule book knows the architecture. `base` is the target that an adapter is to be laid on:
    the engines judge that, and the report tells where the adapter's modules bind in it. `jobs` headers are read at once; `budget` is
    in seconds for one engine. `tp` are tensor-parallel sizes to load over besides 1, `vllm` serving options under vLLM's own names: both
    need an engine of vLLM.
    Nothing from the target is executed unless `trust_remote_code`. `suppressions` (`ckaudit.suppressions.read`) are findings to live
    with: they stay in the report, apart. `verify_hash` reads every byte of the weights and compares their SHA-256 with the Hub's.

    Bad input (a broken header, a lying index) is in the report as findings. Raises a `CkauditError` for what stops an audit:
    SourceError for a target that cannot be read, EngineError for an engine that does not exist, RuleError for a bad rule book.
    """
    from ckaudit import checks
    from ckaudit.checks import schemes

    progress = progress or NullProgress()
    target = fspath(target)
    engines = [engines] if isinstance(engines, str) else engines
    if wrong := [size for size in tp if size < 1]:
        raise UsageError(f"{wrong[0]} is no number of ranks.", "Give tp=(2, 4).")
    if fail_on not in (*SEVERITIES, "never"):
        raise UsageError(f"fail_on={fail_on!r} is no severity.", "Use error, warning, note or never.")
    asked = None if engines is None else _selected(engines)  # a misspelt engine must not cost a download
    if vllm and _deaf(asked):
        raise UsageError(
            f"{', '.join(sorted(vllm))}: only vLLM has such options, and no release of it is asked.",
            "Add --engine vllm==X, or leave them out.",
        )
    if class_name and asked is not None and all(e.id.startswith(("rules:", "vllm")) for e in asked):
        raise UsageError(
            f"Only transformers can be asked to load as {printable(class_name)}, and it is not asked.",
            "Add --engine transformers, or leave the class out.",
        )
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
    bytes_found, bytes_skipped = _verified(source, checkpoint, progress) if verify_hash else ((), ())
    adapter = recognise(checkpoint)
    if adapter is not None:
        report = _audit_adapter(adapter, base, asked, options, jobs, progress)
        every = ordered((*bytes_found, *report.findings), [p.id for p in report.plans])
        ranks = _ranks(options, "an adapter's base is judged on one rank alone; audit the base by itself")
        report = replace(report, findings=every, skips=(*report.skips, *ranks, *bytes_skipped), unanswered=bool(ranks))
        found = _suppressed(report.findings, suppressions, checkpoint, report.sizes, progress)
        return replace(report, findings=found, fail_on=fail_on, allow_not_judged=allow_not_judged)
    if base is not None:
        raise UsageError(f"--base is for adapters, and {target} is none.", "Leave --base out.")
    chosen, skipped = _default(checkpoint, class_name) if asked is None else (asked, ())
    plans = side_by_side(chosen, lambda engine: engine.plan(checkpoint, options, progress))
    findings, skips = checks.run(checkpoint, plans, tp)
    plans = refused(plans, findings, checkpoint)
    findings = _suppressed((*bytes_found, *findings), suppressions, checkpoint, checkpoint.sizes, progress)
    ranks = _ranks(options, "no engine asked loads over ranks; --engine vllm==X does") if _deaf(asked) else ()
    return Report(
        target=describe(checkpoint),
        plans=plans,
        requested=frozenset(e.id for e in asked or ()),
        sizes=checkpoint.sizes,
        findings=ordered(findings, [p.id for p in plans]),
        skips=(*skipped, *skips, *ranks, *bytes_skipped, *checks.headers_alone(checkpoint)),
        quantisation=schemes.table(checkpoint, plans),
        fail_on=fail_on,
        allow_not_judged=allow_not_judged,
        unanswered=bool(ranks),
    )


def _deaf(asked: Sequence[Engine] | None) -> bool:
    """Whether every engine asked (None: those of an audit that names none) passes over the options for vLLM."""
    return all(e.id == "transformers" or e.id.startswith("rules:") for e in asked or ())


def _ranks(options: EngineOptions, reason: str) -> tuple[Skip, ...]:
    """That nobody judged what was asked about several ranks, where something was."""
    stages, experts = options.vllm.get("pipeline_parallel_size") or 1, options.vllm.get("enable_expert_parallel")
    spread = max((*options.tp, stages)) > 1 or experts
    return (Skip("CK310", f"whether it loads over several ranks: {reason}"),) if spread else ()


def _verified(
    source: Source, checkpoint: Checkpoint, progress: Progress
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """The weights against the hashes that the Hub has of them. Raises UsageError where none is known."""
    from ckaudit.checks.container import hashes
    from ckaudit.source.hashes import sha256

    wanted = hashes.known(checkpoint)
    if not wanted:
        raise UsageError(
            f"Nothing says which SHA-256 the weights of {checkpoint.name} should have, so there is nothing to verify.",
            "Give a Hub repo, a snapshot of the Hub's cache, or a folder that `hf download --local-dir` made.",
        )
    found = sha256(source, wanted, progress)
    return hashes.run(checkpoint, found), tuple(hashes.skips(checkpoint, found))


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
        if asked is None and laid.is_model:
            chosen, skipped = _default(laid.checkpoint, options.class_name)
        else:
            chosen = asked or ()
        judged = side_by_side(chosen, lambda engine: engine.plan(laid.checkpoint, options, progress))
        bindings = binding.bind_all(adapter, laid, judged)
    plans = tuple(b.plan for b in bindings)
    findings, skips = checks.run(adapter, laid, bindings, asked=asked is not None)
    return Report(
        target=describe(checkpoint), plans=plans, requested=frozenset(e.id for e in asked or ()),
        sizes=checkpoint.sizes,
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


def _selected(specs: Sequence[str | Engine]) -> tuple[Engine, ...]:
    """The engines that `specs` name, each once."""
    found = [e for spec in specs for e in (select(spec) if isinstance(spec, str) else (spec,))]
    return tuple({e.id: e for e in found}.values())


def _default(checkpoint: Checkpoint, class_name: str | None) -> tuple[tuple[Engine, ...], tuple[Skip, ...]]:
    """The engines of an audit that names none, and what it leaves out."""
    from ckaudit.engines import rules

    if class_name:
        reason = f"rule books go by the class that config.json names, not by {printable(class_name)}"
        return select("transformers"), (Skip(check="rules", engine="vllm", reason=reason),)
    spec = rules.default_spec(checkpoint)
    if spec is not None:
        return (*select("transformers"), *select(spec)), ()
    known = ", ".join(describe(checkpoint).architectures) or "this architecture"
    reason = f"no rule book knows {known}; --engine vllm==X asks that release's own loader"
    return select("transformers"), (Skip(check="rules", engine="vllm", reason=reason),)

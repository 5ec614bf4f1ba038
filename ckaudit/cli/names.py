"""`ckaudit names`: what would happen to every tensor, told from headers alone."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckaudit.cli.options import (
    AllowNotJudged,
    Budget,
    ClassName,
    Debug,
    Device,
    Engines,
    ExitFrom,
    ExpertParallel,
    FailOn,
    HfOverrides,
    Jobs,
    Json,
    LoadFormat,
    NoCache,
    Offline,
    PipelineParallel,
    Platform,
    Quantization,
    TargetArg,
    TensorParallel,
    TrustRemoteCode,
    serving,
    sizes,
)
from ckaudit.progress import Progress


def names(
    target: TargetArg,
    engine: Engines = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="First store every release on the package index that 'vllm>=X' allows.")
    ] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="TARGET", help="Of an adapter: the model that it is to be laid on.")
    ] = None,
    json: Json = None,
    names_: Annotated[
        bool, typer.Option("--names", help="Tell every tensor's fate, and in the JSON its rules.")
    ] = False,
    fail_on: ExitFrom = FailOn.error,
    allow_not_judged: AllowNotJudged = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK[:GLOB]=REASON", help="Suppress a check, for the names that match; repeatable."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Suppress what this earlier JSON report already had.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ignore rules. [default: ckaudit.toml, where there is one]")
    ] = None,
    verify_hash: Annotated[
        bool,
        typer.Option("--verify-hash", help="Read every byte of the weights and compare their SHA-256 with the Hub's."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the verdicts and the summary; no progress.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Every name, what is left by design, notes, rules with hits, versions."),
    ] = False,
    jobs: Jobs = 32,
    trust_remote_code: TrustRemoteCode = False,
    offline: Offline = False,
    class_: ClassName = None,
    device: Device = "cpu",
    budget: Budget = 600.0,
    no_cache: NoCache = False,
    tp: TensorParallel = None,
    pp: PipelineParallel = None,
    ep: ExpertParallel = False,
    quantization: Quantization = None,
    hf_overrides: HfOverrides = None,
    load_format: LoadFormat = None,
    platform: Platform = None,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """Audit a checkpoint's names, shapes and files by its headers."""
    from ckaudit.cli import console
    from ckaudit.pipeline.names import audit
    from ckaudit.suppressions import read

    console.check(json, quiet=quiet, verbose=verbose)
    flags = serving(
        pp=pp,
        ep=ep,
        quantization=quantization,
        hf_overrides=hf_overrides,
        load_format=load_format,
        platform=platform,
    )
    suppressions = read(ignore or (), config, baseline)
    with console.watched(quiet=quiet) as progress:
        if fetch:
            _fetch(engine or (), progress, offline=offline)
        report = audit(
            target,
            engine or None,
            base=base,
            jobs=jobs,
            trust_remote_code=trust_remote_code,
            offline=offline,
            class_name=class_,
            device=device,
            budget=budget,
            cache=not no_cache,
            tp=sizes(tp, spread=ep or (pp or 1) > 1),
            vllm=flags,
            fail_on=fail_on.value,
            allow_not_judged=allow_not_judged,
            suppressions=suppressions,
            verify_hash=verify_hash,
            progress=progress,
        )

    def document() -> str:
        from ckaudit.report import json_v1

        return json_v1.render(report, names=names_)

    def view() -> str:
        from ckaudit.report import terminal

        return terminal.render(
            report,
            width=console.width(),
            colour=console.colour(),
            quiet=quiet,
            verbose=verbose,
            names=names_ and json is None,
        )

    console.tell(json, document, view)
    raise typer.Exit(report.exit_code)


def _fetch(engines: Sequence[str], progress: Progress, *, offline: bool) -> None:
    """Store the releases that ranges among `engines` allow. Raises UsageError where there is no range."""
    from ckaudit.engines import vllm
    from ckaudit.errors import UsageError

    # One release by its number is fetched anyway, when its turn comes.
    ranges = [spec.removeprefix("vllm") for spec in engines if re.match(r"vllm\s*([<>!~]|==[^,]*[*,])", spec)]
    if not ranges:
        raise UsageError("--fetch wants a range of releases.", "Give one: --engine 'vllm>=0.30'.")
    if offline:
        raise UsageError("--fetch and --offline contradict each other.", "Use one of them.")
    for rest in ranges:
        vllm.fetch(rest.strip(), progress=progress)

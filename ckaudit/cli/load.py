"""`ckaudit load`: does it load for real, are its values sound, does it run?"""

import os
from pathlib import Path
from typing import Annotated

import typer

from ckaudit.cli.options import ClassName, Debug, ExitFrom, FailOn, Jobs, Json, Offline, TargetArg, TrustRemoteCode
from ckaudit.errors import UsageError


def load(
    target: TargetArg,
    device: Annotated[str, typer.Option(help="Where to load: cpu, cuda, cuda:1 …")] = "cpu",
    devices: Annotated[int, typer.Option(min=1, help="GPUs to spread the model over (accelerate's device map).")] = 1,
    tp: Annotated[bool, typer.Option("--tp", help="Under torchrun: transformers' tensor-parallel plan.")] = False,
    engine: Annotated[
        str, typer.Option("--engine", "-e", help="transformers, or vllm where it is installed.")
    ] = "transformers",
    force: Annotated[
        bool, typer.Option("--force", help="Load although the audit of names says it cannot work.")
    ] = False,
    shards: Annotated[int | None, typer.Option(min=1, help="Load only this many shards, as a trial.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Load in this dtype.  [default: the config's]")] = None,
    values: Annotated[bool, typer.Option("--values/--no-values", help="Look at every value.")] = True,
    forward: Annotated[bool, typer.Option("--forward/--no-forward", help="Run one forward pass.")] = True,
    attention: Annotated[str, typer.Option(help="Attention of the forward pass.")] = "eager",
    tokens: Annotated[int, typer.Option(min=64, help="Length of its text input.")] = 64,
    modality: Annotated[
        list[str] | None,
        typer.Option(help="Kinds of input: text, image, video, audio, series.  [default: all it takes]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of its inputs.")] = 0,
    expect: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare the outputs with an earlier JSON report.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest relative difference of logits.")] = 1e-2,
    stats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Statistics of every tensor as .csv or .parquet.")
    ] = None,
    json: Json = None,
    fail_on: ExitFrom = FailOn.error,
    class_: ClassName = None,
    jobs: Jobs = 32,
    trust_remote_code: TrustRemoteCode = False,
    offline: Offline = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only verdicts and summary; no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every layer, every name, every stage.")] = False,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """Load a checkpoint, look at every value, run one forward pass."""
    from ckaudit.cli import console
    from ckaudit.materialize import LoadOptions
    from ckaudit.materialize import stats as table
    from ckaudit.pipeline.load import load as run
    from ckaudit.report import json_v1, terminal

    console.check(json, quiet=quiet, verbose=verbose)
    if stats is not None:
        if engine == "vllm":
            raise UsageError("vLLM's own load looks at no values for --stats.", "Load with transformers.")
        if not values:
            raise UsageError("--stats writes what --no-values leaves out.", "Give one of the two.")
        table.check_target(stats)
    options = LoadOptions(
        device=device,
        devices=devices,
        tp=tp,
        dtype=dtype,
        class_name=class_,
        trust_remote_code=trust_remote_code,
        values=values,
        forward=forward,
        attention=attention,
        tokens=tokens,
        seed=seed,
        modalities=tuple(modality or ()),
        shards=shards,
        expect=str(expect) if expect else None,
        tolerance=tolerance,
    )
    with console.watched(quiet=quiet) as progress:
        done = run(
            target,
            options,
            engine=engine,
            force=force,
            jobs=jobs,
            offline=offline,
            fail_on=fail_on.value,
            progress=progress,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun the first process tells for all
        raise typer.Exit(done.report.exit_code)
    seen = done.observed.stats if done.observed is not None else ()
    if stats is not None:
        table.write(seen, stats)

    def view() -> str:
        return terminal.render_load(
            done.report,
            table.by_layer(s for s in seen if len(s.shape) > 1),
            width=console.width(),
            colour=console.colour(),
            quiet=quiet,
            verbose=verbose,
        )

    console.tell(json, lambda: json_v1.render(done.report), view)
    if done.stopped:
        typer.echo(f"ckaudit: {' '.join(done.stopped.split())}", err=True)
    raise typer.Exit(done.report.exit_code)

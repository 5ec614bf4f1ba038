"""`ckaudit diff`: what a checkpoint has otherwise than its source."""

from pathlib import Path
from typing import Annotated

import typer

from ckaudit.cli.options import Debug, FailOn, Jobs, Offline


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="The source: org/name[@revision], a folder, a .safetensors file or an index."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What was made of it, or another revision.")],
    roundtrip: Annotated[
        bool,
        typer.Option(
            "--roundtrip", help="Allow no difference at all, explained or not. How tensors are sharded is none."
        ),
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-", help="Write the report as JSON to FILE; - writes it to stdout instead of the text."
        ),
    ] = None,
    fail_on: Annotated[FailOn, typer.Option(help="Exit 1 from this severity on.")] = FailOn.error,
    allow_not_judged: Annotated[
        bool, typer.Option("--allow-not-judged", help="Exit 0, not 3, when something asked for could not be judged.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the table and the summary; no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every name of every difference.")] = False,
    jobs: Jobs = 32,
    offline: Offline = False,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """Compare two checkpoints by their headers.

    What was lost, added, renamed, reshaped or retyped on the way from A to B, and what explains it.
    """
    from ckaudit.cli import console
    from ckaudit.errors import UsageError
    from ckaudit.pipeline.diff import diff as run
    from ckaudit.report import json_v1, terminal

    if quiet and verbose:
        raise UsageError("--quiet and --verbose contradict each other.", "Use one of them.")
    file = None if json in (None, "-") else console.writable(Path(str(json)))
    with console.watched(quiet=quiet) as progress:
        report = run(
            a,
            b,
            roundtrip=roundtrip,
            jobs=jobs,
            offline=offline,
            fail_on=fail_on.value,
            allow_not_judged=allow_not_judged,
            progress=progress,
        )
    if file is not None:
        console.write(file, json_v1.render(report))
    if json == "-":
        console.emit(json_v1.render(report))
    else:
        shown = terminal.render_diff(
            report, width=console.width(), colour=console.colour(), quiet=quiet, verbose=verbose
        )
        console.emit(shown)
    raise typer.Exit(report.exit_code)

"""`ckaudit diff`: what a checkpoint has otherwise than its source."""

from typing import Annotated

import typer

from ckaudit.cli.options import AllowNotJudged, Debug, ExitFrom, FailOn, Jobs, Json, Offline


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
    json: Json = None,
    fail_on: ExitFrom = FailOn.error,
    allow_not_judged: AllowNotJudged = False,
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
    from ckaudit.pipeline.diff import diff as run
    from ckaudit.report import json_v1, terminal

    console.check(json, quiet=quiet, verbose=verbose)
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

    def view() -> str:
        return terminal.render_diff(
            report, width=console.width(), colour=console.colour(), quiet=quiet, verbose=verbose
        )

    console.tell(json, lambda: json_v1.render(report), view)
    raise typer.Exit(report.exit_code)

"""`ckaudit ppl`: does it compute what it should?"""

from pathlib import Path
from typing import Annotated

import typer

from ckaudit.cli.options import Debug, ExitFrom, FailOn, Jobs, Json, Offline, TargetArg, TrustRemoteCode

DType = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2 …")]


def ppl(
    target: TargetArg,
    data: Annotated[
        str, typer.Option(metavar="SET", help="Rows to score: builtin, hub:ORG/NAME, or a JSONL file of conversations.")
    ] = "builtin",
    rows: Annotated[int | None, typer.Option(min=1, help="Only this many rows.")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with a reference kept by --save-reference.")
    ] = None,
    save_reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the result as a reference in FILE.")
    ] = None,
    entry: Annotated[str | None, typer.Option(help="Name in the reference file.  [default: TARGET]")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare with a running server: http://HOST:PORT/v1.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Model name to ask that server for.  [default: its first]")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Compare with another repo: quantised, or another revision.")
    ] = None,
    candidate_dtype: Annotated[str | None, typer.Option(help="Compare with the same weights in this dtype.")] = None,
    candidate_attention: Annotated[str | None, typer.Option(help="Compare with this attention.")] = None,
    candidate_device: Annotated[str | None, typer.Option(help="Compare with this device.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative difference.  [default: the reference's, or 0.01]")
    ] = None,
    tolerance_reason: Annotated[str, typer.Option(help="Why the tolerance is not the default.")] = "",
    prove: Annotated[bool, typer.Option("--prove", help="Plant faults and see whether each would be noticed.")] = False,
    dtype: DType = "auto",
    attention: Attention = "sdpa",
    device: Annotated[str, typer.Option(help="Where it runs: cpu, cuda, cuda:1 …")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Rows a forward pass.")] = 1,
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smallest picture, in pixels.")] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Largest picture, in pixels.")] = None,
    json: Json = None,
    fail_on: ExitFrom = FailOn.error,
    jobs: Jobs = 32,
    trust_remote_code: TrustRemoteCode = False,
    offline: Offline = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the number and the summary; no progress.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every row, not those alone that moved most.")
    ] = False,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """Measure perplexity on pictures and texts, and compare it.

    With a reference kept earlier, other settings, another repo or a running server; without one, the number alone is told.
    """
    from ckaudit.cli import console
    from ckaudit.pipeline.perplexity import measure
    from ckaudit.report import json_v1, terminal
    from ckaudit.scores import PplOptions, Settings

    console.check(json, quiet=quiet, verbose=verbose)
    settings = Settings(
        dtype=dtype, attention=attention, device=device, batch=batch, trust_remote_code=trust_remote_code
    )
    other = Settings(
        dtype=candidate_dtype or dtype,
        attention=candidate_attention or attention,
        device=candidate_device or device,
        batch=batch,
        trust_remote_code=trust_remote_code,
    )
    with console.watched(quiet=quiet) as progress:
        report = measure(
            target,
            PplOptions(
                data=data,
                rows=rows,
                settings=settings,
                min_pixels=min_pixels,
                max_pixels=max_pixels,
                reference=reference,
                save_reference=save_reference,
                entry=entry,
                against=against,
                served_model=served_model,
                candidate=candidate,
                candidate_settings=other if other != settings else None,
                tolerance=tolerance,
                tolerance_reason=tolerance_reason,
                prove=prove,
            ),
            jobs=jobs,
            offline=offline,
            fail_on=fail_on.value,
            progress=progress,
        )

    def view() -> str:
        return terminal.render_perplexity(
            report, width=console.width(), colour=console.colour(), quiet=quiet, verbose=verbose
        )

    console.tell(json, lambda: json_v1.render(report), view)
    raise typer.Exit(report.exit_code)

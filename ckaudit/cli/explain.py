"""`ckaudit explain`: one name's way through every rule, per engine."""

from typing import Annotated

import typer

from ckaudit.cli.options import Budget, ClassName, Debug, Engines, Jobs, NoCache, Offline, TargetArg, TrustRemoteCode


def explain(
    target: TargetArg,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A tensor of the checkpoint, or a parameter of the engine's model.")
    ],
    engine: Engines = None,
    jobs: Jobs = 32,
    trust_remote_code: TrustRemoteCode = False,
    offline: Offline = False,
    class_: ClassName = None,
    budget: Budget = 600.0,
    no_cache: NoCache = False,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """Show one tensor's way through every rule of every engine."""
    from ckaudit.cli import console
    from ckaudit.errors import UsageError
    from ckaudit.naming import nearest
    from ckaudit.pipeline.names import audit
    from ckaudit.report.terminal import explain as view

    with console.watched() as progress:
        report = audit(
            target,
            engine or None,
            jobs=jobs,
            trust_remote_code=trust_remote_code,
            offline=offline,
            class_name=class_,
            budget=budget,
            cache=not no_cache,
            progress=progress,
        )
    report = view.about(report, name)
    if not view.known(report, name):
        close = nearest(name, view.all_names(report))
        raise UsageError(f"No tensor or parameter is called {name!r}.", f"Did you mean {close!r}?" if close else "")
    console.emit(view.render(report, name, width=console.width(), colour=console.colour()))
    raise typer.Exit(report.exit_code)

"""`ckaudit checks`: the catalogue, and each check's page."""

from typing import Annotated

import typer

from ckaudit.cli.options import Debug


def checks(
    check: Annotated[str | None, typer.Argument(metavar="ID", help="Show this check's page.")] = None,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """List every check, or show one check's page."""
    from rich.console import RenderableType
    from rich.markdown import Markdown

    from ckaudit.checks.catalogue import CHECKS
    from ckaudit.cli import console
    from ckaudit.errors import UsageError
    from ckaudit.report.terminal.layout import catalogue, text
    from ckaudit.resources import folder

    parts: list[RenderableType]
    if check is None:
        parts = [catalogue(CHECKS)]
    elif check.upper() not in {c.id for c in CHECKS}:
        raise UsageError(f"No check is called {check!r}.", "`ckaudit checks` lists them.")
    else:
        page = folder("docs").joinpath("checks", f"{check.upper()}.md").read_text(encoding="utf-8")
        parts = [Markdown(page)]
    console.emit(text(parts, width=console.width(), colour=console.colour()))

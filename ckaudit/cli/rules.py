"""`ckaudit rules`: work on rule books."""

from pathlib import Path
from typing import Annotated

import typer

from ckaudit.cli.guard import guarded
from ckaudit.cli.options import Debug, ExitFrom, FailOn, Jobs, Offline

rules = typer.Typer(help="Work on rule books.", no_args_is_help=True, rich_markup_mode=None)


def lint(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A rule book, TOML.")],
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Try the rules on this checkpoint's names.")
    ] = None,
    names_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Try the rules on the names in FILE, one a line.")
    ] = None,
    fail_on: ExitFrom = FailOn.error,
    jobs: Jobs = 32,
    offline: Offline = False,
    debug: Debug = False,  # noqa: ARG001  (read by `guarded`)
) -> None:
    """Find rules that cascade, shadow, collide or can never fire."""
    from ckaudit import rulebook
    from ckaudit.checks import rules as checks
    from ckaudit.cli import console
    from ckaudit.errors import UsageError
    from ckaudit.findings import fails, ordered
    from ckaudit.report.terminal import lint as view

    if target is not None and names_file is not None:
        raise UsageError("--target and --names-file both give names.", "Use one of them.")
    book = rulebook.read(file)
    names: tuple[str, ...] = ()
    if target is not None:
        names = _names_of(target, jobs=jobs, offline=offline)
    elif names_file is not None:
        names = _lines_of(names_file)
    findings, skips = checks.lint(book, names)
    findings = ordered(findings, ())
    shown = view.render(
        str(file),
        len(names),
        findings,
        skips,
        fail_on=fail_on.value,
        width=console.width(),
        colour=console.colour(),
    )
    console.emit(shown)
    raise typer.Exit(int(fails(findings, fail_on.value)))


def _names_of(target: str, *, jobs: int, offline: bool) -> tuple[str, ...]:
    from ckaudit.checkpoint import read_checkpoint
    from ckaudit.cli import console
    from ckaudit.source import open_source

    with console.watched() as progress:
        source = open_source(target, jobs=jobs, offline=offline, progress=progress)
        return tuple(read_checkpoint(source, progress=progress, jobs=jobs).tensors)


def _lines_of(path: Path) -> tuple[str, ...]:
    from ckaudit.errors import UsageError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"Cannot read {path}: {why}.", "Give a text file with one name a line.") from None
    return tuple(dict.fromkeys(line for line in text.splitlines() if line.strip()))


rules.command()(guarded(lint))

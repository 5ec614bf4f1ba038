"""The command line: options -> pipeline -> report -> exit code. The one place that prints and exits.

One module a command, each a plain function; a new command is a function and a line here. Nothing heavy is imported before a command runs:
`--help` costs typer alone. The commands' annotations are evaluated where they stand: typer would compile each as text at every start.
"""

import gc
import os
import signal
import sys

# typer makes models of pydantic, which at the first of them asks every installed package whether it has a plugin.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import typer

from ckaudit.cli import streams
from ckaudit.cli.checks import checks
from ckaudit.cli.diff import diff
from ckaudit.cli.engines import engines
from ckaudit.cli.explain import explain
from ckaudit.cli.guard import ENVIRONMENT, guarded
from ckaudit.cli.load import load
from ckaudit.cli.names import names
from ckaudit.cli.ppl import ppl
from ckaudit.cli.rules import rules

EXIT_CODES = """Exit codes: 0 judged, nothing at or above --fail-on; 1 findings; 2 usage or environment error, or a crash of ckaudit itself;
3 something asked for could not be judged."""

app = typer.Typer(
    name="ckaudit",
    help="Tell, before a weight is downloaded, whether a checkpoint will load into the software that will serve it.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # plain help: the rich one costs three times as much to import, and pipes badly
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

for command in (names, load, ppl, diff, explain, checks):
    app.command()(guarded(command))
app.add_typer(rules, name="rules")
app.add_typer(engines, name="engines")


def _version(asked: bool) -> None:
    if asked:
        from ckaudit import __version__

        typer.echo(f"ckaudit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def _terminated(number: int, _: object) -> None:
    for one in {number, signal.SIGTERM}:
        signal.signal(one, signal.SIG_IGN)  # once is enough: a second one must not break off what is due at exit
    sys.exit(128 + number)


def main() -> None:
    """The program `ckaudit`."""
    # A CI that ends the job, or a connection that drops, must not leave engine workers behind: exit in order, which closes them.
    signal.signal(signal.SIGTERM, _terminated)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` has it ignored
        signal.signal(signal.SIGHUP, _terminated)
    # What a command reads are some hundred thousand small values that live until it ends: looking for garbage among them finds none.
    gc.set_threshold(500_000, 50, 50)
    streams.prepare()
    try:
        app(prog_name="ckaudit")
    except OSError as error:  # of what typer itself writes, such as help
        streams.discard()
        why = (error.strerror or str(error)).lower()
        print(f"ckaudit: Cannot write to stdout: {why}. {streams.ELSEWHERE}", file=sys.stderr)
        sys.exit(ENVIRONMENT)
    finally:
        gc.freeze()  # the process ends, and all that is left with it: nor is there anything to find in it now

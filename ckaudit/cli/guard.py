"""Every way in which a command can end, as an exit code and at most one line on stderr."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from ckaudit.errors import CkauditError

ENVIRONMENT = 2
"""Exit code of a usage or environment error, or a crash of ckaudit itself."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it (128 + SIGINT)."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its errors mapped: no traceback without --debug, and never exit code 1, which means findings."""

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except CkauditError as error:
            _say(str(error), debug=options.get("debug", False))
            raise typer.Exit(ENVIRONMENT) from None
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not break off what is due at exit
            _say("interrupted", debug=options.get("debug", False))
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001  (a bug must not read as findings)
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            _say(f"crashed: {what}; run with --debug to see where", debug=options.get("debug", False))
            raise typer.Exit(ENVIRONMENT) from None

    return run


def _say(line: str, *, debug: bool) -> None:
    from ckaudit.naming import printable

    if debug:
        traceback.print_exc()
    safe = " ".join(printable(part) for part in line.split("\n") if part.strip())
    print(f"ckaudit: {safe}", file=sys.stderr)

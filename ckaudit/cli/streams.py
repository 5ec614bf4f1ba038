"""stdin, stdout and stderr as they are handed over: closed, full or with nobody behind them.

What a caller did with them must not read as a verdict (exit code 1), nor keep the report in a file from being written.
"""

from __future__ import annotations

import errno
import io
import os
import sys

OUT, ERR = 1, 2
ELSEWHERE = "Make room there, or send it elsewhere."
"""What to do about a stream or a file that takes no more."""


_closed = False


class _Stream(io.FileIO):
    """Writes to a descriptor; a reader that has gone (`| head`) is no error, and on stderr nothing is."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if self.fileno() == ERR or error.errno == errno.EPIPE:
                return memoryview(data).nbytes  # type: ignore[arg-type]
            raise


def prepare() -> None:
    """Make the three streams fit to be written to, whatever they are. Those that a program put in their place are left alone."""
    global _closed
    _closed = sys.stdout is None
    while (spare := os.open(os.devnull, os.O_RDWR)) <= ERR:  # no file of ours may get the number of a closed stream
        pass
    os.close(spare)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (as long as the program)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(OUT, sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(ERR, sys.stderr)


def closed() -> bool:
    """Whether stdout was handed over closed: what is written to it goes nowhere, without an error."""
    return _closed


def discard() -> None:
    """Let what is still to be written to stdout go nowhere, for Python writes it once more at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, OUT)
    os.close(nowhere)


def _text(number: int, like: object) -> io.TextIOWrapper:
    raw = _Stream(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if number == ERR else io.BufferedWriter(raw),
        encoding=getattr(like, "encoding", None) or "utf-8",
        errors="backslashreplace" if number == ERR else getattr(like, "errors", None),
        line_buffering=number == ERR or bool(getattr(like, "line_buffering", False)),
        write_through=number == ERR,
    )

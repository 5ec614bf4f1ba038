"""stdout, stderr and what is known about the terminal behind them."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckaudit.cli import streams
from ckaudit.errors import UsageError
from ckaudit.progress import NullProgress, Progress, Task

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

WIDEST = 120


def emit(text: str) -> None:
    """Write to stdout. Raises UsageError where it takes no more."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 shows \\u2713, not a crash
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        streams.discard()
        raise UsageError(
            f"Cannot write to stdout: {(error.strerror or str(error)).lower()}.", streams.ELSEWHERE
        ) from None


def colour() -> bool:
    """Whether stdout takes colours: a terminal that is not dumb, unless NO_COLOR or FORCE_COLOR say otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns to lay a report out in: the terminal's (stderr's where stdout goes to a pager) or COLUMNS, 100 where neither says."""
    columns = 100
    with suppress(OSError, ValueError):  # no terminal, or a stream that is closed
        columns = os.get_terminal_size(2).columns or columns
    return max(40, min(shutil.get_terminal_size((columns, 24)).columns, WIDEST))


def check(json: str | None, *, quiet: bool, verbose: bool) -> None:
    """Make sure before the work that its report can be told as `--json`, `--quiet` and `--verbose` ask. Raises UsageError."""
    if quiet and verbose:
        raise UsageError("--quiet and --verbose contradict each other.", "Use one of them.")
    if json is not None and json != "-":
        writable(Path(json))
    if json == "-" and streams.closed():
        raise UsageError("Cannot write to stdout: it is closed.", streams.ELSEWHERE)


def tell(json: str | None, document: Callable[[], str], view: Callable[[], str]) -> None:
    """The report: as JSON (`document`) where `--json` wants it, and as text (`view`) on stdout unless the JSON went there."""
    if json is not None and json != "-":
        write(Path(json), document())
    emit(document() if json == "-" else view())


def writable(path: Path) -> Path:
    """`path`, after making sure before the work that a file can be put there. Raises UsageError."""
    try:
        through = path.exists() and _in_place(path)
        at = path if through else Path(os.path.realpath(path)).parent
        fit = not path.is_dir() and (through or at.is_dir()) and os.access(at, os.W_OK)
    except OSError:  # a name that is too long
        fit = False
    if not fit:
        raise UsageError(f"Cannot write {path}.", "Name a file in a folder that exists and is writable.")
    return path


def _in_place(path: Path) -> bool:
    """Whether what is at `path` is to be written through, as the shell's `>` would: a link, a device, a pipe, a file of a locked folder."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(kind) or not os.access(path.parent, os.W_OK)


def write(path: Path, text: str) -> None:
    """Put `text` at `path`, in one step where a plain file is or will be: its reader sees the old or the new one. Raises UsageError."""
    try:
        if _in_place(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except BrokenPipeError:
        return
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {(error.strerror or str(error)).lower()}.", streams.ELSEWHERE) from None


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".ckaudit-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # what a plain open() would have given
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def watched(*, quiet: bool = False) -> Iterator[Progress]:
    """Progress on stderr while the block runs: bars on a terminal, notes alone elsewhere, nothing with `quiet`."""
    if quiet:
        yield NullProgress()
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _Notes()
        return
    from rich import progress as rp
    from rich.console import Console
    from rich.text import Text

    class Count(rp.MofNCompleteColumn):
        def render(self, task: rp.Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = (
        rp.SpinnerColumn(),
        rp.TextColumn("{task.description}", markup=False),
        rp.BarColumn(24),
        Count(),
    )
    with rp.Progress(*columns, rp.TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        yield _Bars(bars)


class _Notes(NullProgress):
    """The progress of a log: no bars, but what is worth a line."""

    def note(self, text: str) -> None:
        from ckaudit.naming import printable

        print(f"ckaudit: {printable(text)}", file=sys.stderr)


class _Bars:
    """`progress.Progress` over rich's bars."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars

    @contextmanager
    def task(self, label: str, total: int | None = None) -> Iterator[Task]:
        from ckaudit.naming import printable

        number = self._bars.add_task(printable(label), total=total)
        try:
            yield _Bar(self._bars, number)
        finally:
            self._bars.remove_task(number)

    def note(self, text: str) -> None:
        from rich.text import Text

        from ckaudit.naming import printable

        self._bars.console.print(Text(printable(text), style="dim"))


class _Bar:
    def __init__(self, bars: Bars, number: TaskID) -> None:
        self._bars, self._number = bars, number

    def advance(self, steps: int = 1) -> None:
        self._bars.advance(self._number, steps)

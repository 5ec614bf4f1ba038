"""How the core tells a person that it is alive, without knowing a console."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Task(Protocol):
    """One running piece of work with a known or unknown number of steps."""

    def advance(self, steps: int = 1) -> None: ...


class Progress(Protocol):
    """Where work reports to. `task` opens one line; `note` says one thing (a release is fetched, a retry waits)."""

    def task(self, label: str, total: int | None = None) -> AbstractContextManager[Task]: ...

    def note(self, text: str) -> None: ...


class _Silent:
    def advance(self, steps: int = 1) -> None:
        pass


class NullProgress:
    """The progress of a program that is not watched: says nothing."""

    def task(self, label: str, total: int | None = None) -> AbstractContextManager[Task]:  # noqa: ARG002
        return nullcontext(_Silent())

    def note(self, text: str) -> None:
        pass

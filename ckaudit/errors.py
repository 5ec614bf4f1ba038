"""What ckaudit raises when circumstances, not the checkpoint, are bad.

Bad input (a broken header, an index that lies) is never an exception: it is a finding, and the audit goes on.
Every message is one line that says what is wrong, where, and what to do next; the command line prints it and exits 2.
"""

from __future__ import annotations


class CkauditError(Exception):
    """A circumstance that stops the audit: `message` says what is wrong and `hint` the next step to take."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        stop = "" if self.message.endswith((".", "!", "?", ":")) else "."  # a library's words may end without one
        return f"{self.message}{stop} {self.hint}"


class UsageError(CkauditError):
    """An option or a target that makes no sense as given."""


class SourceError(CkauditError):
    """The target cannot be read: no such repo, gated, rate-limited, no network, a folder that is not there."""


class EngineError(CkauditError):
    """An engine that does not exist or cannot be started as asked."""


class RuleError(CkauditError):
    """A rule book that is not well formed; the message names the file and the row."""

"""What ckaudit raises when circumstances, not the checkpoint, are bad.

Bad input (a broken header, an index that lies) is never an exception: it is a finding, and the audit goes on.
Every message is one line that says what is wrong, where, and what to do next; the command line prints it and exits 2.
"""

from __future__ import annotations

_LONGEST = 500
"""Characters of another program's words that are repeated."""


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


_SLIPS = (AttributeError, TypeError, KeyError, NameError, AssertionError)
"""What a mistake in a program raises. Other errors may be meant, or be torch's, which has no frame of its own."""


def is_own_slip(error: BaseException) -> bool:
    """Whether an exception that came out of a loader is a mistake of ckaudit, which watches it: no checkpoint is to be blamed for that."""
    trace, module = error.__traceback__, ""
    while trace is not None:
        module, trace = str(trace.tb_frame.f_globals.get("__name__", "")), trace.tb_next
    return isinstance(error, _SLIPS) and module.startswith("ckaudit.")


def words_of(error: BaseException, limit: int = _LONGEST) -> str:
    """What an exception says, on one line that ends with a whole word; its type where it says nothing."""
    text = " ".join(str(error).split())
    if len(text) > limit:
        text = f"{text[:limit].rpartition(' ')[0] or text[:limit]} …"
    return text or type(error).__name__


def in_one_line(error: BaseException, limit: int = _LONGEST) -> str:
    """`Type: message`, on one line."""
    name, text = type(error).__name__, words_of(error, limit)
    return text if text == name else f"{name}: {text}"

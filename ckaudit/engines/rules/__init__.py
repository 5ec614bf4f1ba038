"""The engine `rules`: a verdict in milliseconds from rule books, offline and without torch.

Spellings: `rules:vllm==0.25.1`, `rules:vllm` (the newest release that the architecture's book covers), `rules:FILE.toml` (one's own).

Note kinds of its plans, for checks and reports:

- `provisional`: always there; the verdict was looked up, not observed.
- `unread-release`: the release lies in a section's range, but its own sources were not read.
- `dead-rule`: a rule can never fire where it sits: its key begins with a dot, and the module's loader sees names whose parent path is
  stripped. `names` are the checkpoint tensors that reached that module and would match without the dot.
- `loads-elsewhere`: this release fails, and by the same book other releases load the checkpoint whole; the text is their ranges.
- `tied-twice`: both names of a tied embedding are stored and the release loads both into one parameter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from ckaudit import rulebook
from ckaudit.checkpoint import Checkpoint
from ckaudit.engines import Engine, EngineOptions
from ckaudit.errors import EngineError, RuleError
from ckaudit.plan import Note, Plan
from ckaudit.progress import Progress
from ckaudit.rulebook.book import Book, Section
from ckaudit.rulebook.model import UnresolvedError, resolve

_RELEASE = re.compile(r"vllm(?:==([\w.!+]+))?")


def select(rest: str) -> tuple[Engine, ...]:
    """The engine that `rules:REST` names. Raises EngineError for another spelling, RuleError for a book that is not well formed."""
    if match := _RELEASE.fullmatch(rest):
        return (RulesEngine(f"rules:{rest}", match[1]),)
    if rest.endswith(".toml"):
        return (RulesEngine(f"rules:{rest}", None, rulebook.read(Path(rest))),)
    raise EngineError(f"No rules are called {rest!r}.", "Use rules:vllm==X, rules:vllm or rules:FILE.toml.")


def default_spec(checkpoint: Checkpoint) -> str | None:
    """The rules engine for the newest release that a shipped book covers for this architecture; None when there is no book."""
    book = _shipped(checkpoint)
    return None if book is None else f"rules:{book.project}=={book.newest}"


def _shipped(checkpoint: Checkpoint) -> Book | None:
    found = (rulebook.find(name) for name in checkpoint.architectures)
    return next((book for book in found if book is not None), None)


class RulesEngine:
    """One release as its rule book describes it, or a user's own book."""

    def __init__(self, spec: str, release: str | None, book: Book | None = None) -> None:
        self.id = spec
        self.release = release
        self.book = book

    def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
        """What the book says this release does with `checkpoint`; `not_judged` where it cannot say."""
        del options, progress
        book = self.book or _shipped(checkpoint)
        if reason := _unjudged(checkpoint, book, own=self.book is not None):
            return self._not_judged(reason)
        assert book is not None
        release = self.release or book.newest
        section = book.section(release)
        if section is None:
            return self._not_judged(
                f"no section of the rule book covers {release}; nearest is {_nearest(book, release)}"
            )
        return self._judged(checkpoint, book, section, release)

    def _judged(self, checkpoint: Checkpoint, book: Book, section: Section, release: str) -> Plan:
        from ckaudit.engines.rules.judge import judge

        try:
            model = resolve(book, section, release, checkpoint.config or {})
        except (UnresolvedError, RuleError) as error:
            return self._not_judged(str(error))
        name = self.id if self.book or self.release else f"rules:{book.project}=={release}"
        plan = judge(checkpoint, book, section, model)
        notes = plan.notes
        if plan.verdict == "fails" and (whole := _whole(checkpoint, book)):
            notes = (*notes, Note(kind="loads-elsewhere", text=" or ".join(whole)))
        return msgspec.structs.replace(plan, id=name, release=release, notes=notes)

    def _not_judged(self, reason: str) -> Plan:
        project = self.book.project if self.book else "vllm"
        return Plan(id=self.id, engine=project, release=self.release, method="rules", not_judged=reason)


def _whole(checkpoint: Checkpoint, book: Book) -> list[str]:
    """The ranges of releases that load the checkpoint whole, by the book; neighbours are joined, oldest first."""
    from ckaudit.engines.rules.judge import judge

    ranges: list[str] = []
    for section in sorted((s for s in book.sections if s.read), key=lambda s: Version(s.read[0])):
        try:
            plan = judge(checkpoint, book, section, resolve(book, section, section.read[0], checkpoint.config or {}))
        except (UnresolvedError, RuleError):
            continue
        if plan.verdict != "loads":
            continue
        this = section.releases.replace(" ", "")
        low, _, high = this.partition(",")
        before, _, last = ranges[-1].partition(",") if ranges else ("", "", "")
        if high and last and last == low.replace(">=", "<"):
            ranges.pop()
            this = f"{before},{high}"
        ranges.append(this)
    return ranges


def _unjudged(checkpoint: Checkpoint, book: Book | None, *, own: bool) -> str | None:
    """Why nothing can be said of this checkpoint with this book, before any name is looked at."""
    named = checkpoint.architectures
    if checkpoint.config is None:
        return "there is no config.json that can be read, so the architecture is not known"
    if not named:
        return "config.json names no architecture"
    if book is None:
        return f"no rule book knows {named[0]}; `--engine vllm==X` runs that release's own loader"
    if own and book.architecture != "*" and not {book.architecture, *book.also} & set(named):
        return f"the rule book is for {book.architecture}, the checkpoint is {named[0]}"
    if not book.parameters:
        return "the rule book lists no parameters, so it cannot say where names land; `ckaudit rules lint` checks its rules"
    if scheme := _quantised(checkpoint):
        return f"the checkpoint is quantised ({scheme}) and rule books describe unquantised weights; use `--engine vllm==X`"
    if not checkpoint.tensors:
        return "no tensor names could be read"
    return None


def _quantised(checkpoint: Checkpoint) -> str | None:
    config: dict[str, Any] = checkpoint.config or {}
    text = config.get("text_config")
    for held in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = held.get(key)
            if isinstance(found, dict):
                return str(found.get("quant_method") or found.get("quant_type") or key)
    return "hf_quant_config.json" if "hf_quant_config.json" in checkpoint.texts else None


def _nearest(book: Book, release: str) -> str:
    """The release read for the book that is next to `release`, with the range of its section."""
    wanted = Version(release)
    read = sorted((Version(r), s.releases) for s in book.sections for r in s.read)
    below = [item for item in read if item[0] < wanted]
    version, span = below[-1] if below else read[0]
    return f"{version} (section {span})"

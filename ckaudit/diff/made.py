"""Changes with their bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ckaudit.changes import Change, Kind, Link, Rule
from ckaudit.checks.facts import Facts


class Sizes:
    """The bytes of both checkpoints' tensors, to make changes that know theirs."""

    def __init__(self, a: Facts, b: Facts) -> None:
        self.a, self.b = a, b

    def change(
        self, kind: Kind, rule: Rule | None, text: str, links: Iterable[Link], *, wanted: str = "", found: str = "",
        undecidable: bool = False, nearest: str | None = None,
    ) -> Change:  # fmt: skip
        """A change over these tensors; one that two links share counts once."""
        kept = tuple(links)
        return Change(
            kind=kind,
            rule=rule,
            text=text,
            links=kept,
            old_bytes=self.a.size({n for link in kept for n in link.old}),
            new_bytes=self.b.size({n for link in kept for n in link.new}),
            wanted=wanted,
            found=found,
            undecidable=undecidable,
            nearest=nearest,
        )  # fmt: skip

"""What became of one module of an adapter in one piece of software."""

from __future__ import annotations

from typing import Literal

import msgspec

from ckaudit.adapters import Unit
from ckaudit.plan import Step

State = Literal["bound", "absent", "untargeted", "converted", "form", "open"]
"""bound · absent: no such module · untargeted: `target_modules` does not name it · converted: its target is taken for one of the
experts · form: the software has no place for adapters of this form · open: not known."""


class Outcome(msgspec.Struct, frozen=True):
    """One module of the adapter in one piece of software."""

    unit: Unit
    state: State
    looked: str
    """The path that was looked for."""
    into: str | None = None
    chain: tuple[Step, ...] = ()
    raises: str = ""
    """What the software says, where it does not pass over this in silence."""
    why: str = ""

    @property
    def fate(self) -> Literal["loaded", "unmatched", "ignored"]:
        """The fate of its tensors, in the words of plans."""
        if self.state == "bound":
            return "loaded"
        return "ignored" if self.state in ("untargeted", "converted", "form", "open") else "unmatched"

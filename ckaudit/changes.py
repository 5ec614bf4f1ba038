"""What differs between two checkpoints, as values: types only. `diff` makes them, `checks.differences` judges them, reports show them."""

from __future__ import annotations

from typing import Literal

import msgspec

from ckaudit.plan import Unjudged

Kind = Literal["renamed", "relaid", "quantised", "retyped", "reshaped", "removed", "added"]
Rule = Literal[
    "rename", "legacy", "fused", "stacked", "quantised", "cast", "vocabulary", "positions", "experts", "layers", "tied", "draft", "buffer"
]  # fmt: skip


class Link(msgspec.Struct, frozen=True, gc=False):
    """Tensors of A and the tensors of B that hold the same weights; one side is empty where tensors were removed or added."""

    old: tuple[str, ...]
    new: tuple[str, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference, whatever the number of tensors that share it.

    A tensor is in one change for each way in which it differs: one may be renamed and cast.
    """

    kind: Kind
    rule: Rule | None = None
    """What explains it; None when nothing does."""
    text: str = ""
    """The rule in words, or what can be said of a change without one."""
    links: tuple[Link, ...] = ()
    old_bytes: int = 0
    """Bytes of the tensors of A, as far as known."""
    new_bytes: int = 0
    wanted: str = ""
    """Retyped and reshaped: the dtype or shape in A; in `found` that in B."""
    found: str = ""
    undecidable: bool = False
    """Whether headers cannot tell if weights were lost."""
    nearest: str | None = None
    """The name on the other side that is most like the first one's."""
    apart: bool = False
    """Removed: whether the model is whole without these (a draft model that B does not announce)."""
    engines: tuple[str, ...] = ()
    """Renamed and relaid: ids of engines that have a place for B's names, or where there is no rule, that have none."""

    @property
    def old(self) -> tuple[str, ...]:
        """Its tensors in A."""
        return tuple(n for link in self.links for n in link.old)

    @property
    def new(self) -> tuple[str, ...]:
        """Its tensors in B."""
        return tuple(n for link in self.links for n in link.new)


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint B against checkpoint A. How tensors are spread over files is no difference."""

    roundtrip: bool
    """Whether no difference is allowed, explained or not."""
    identical: int
    """Tensors of one name, dtype and shape on both sides (of one name, where a header was not there to read)."""
    identical_bytes: int
    changes: tuple[Change, ...]
    unjudged: tuple[Unjudged, ...] = ()
    """What could not be compared and why. `topic`: `shapes` (a header was not there to read), `files` (a file is faulty)
    or `places` (no engine could say whether the new names load)."""

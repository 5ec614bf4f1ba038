"""The seam between scoring and its checks: the perplexity of one side, and what a comparison of two gave. Types only."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec


class RowScore(msgspec.Struct, frozen=True):
    """One row: the negative log likelihood of its scored tokens summed (nats; None when not finite), how many, and a hash of all ids."""

    id: str
    nll: float | None
    tokens: int
    ids_hash: str


class Skipped(msgspec.Struct, frozen=True):
    """One row that could not be scored, and why. Never counts as passed."""

    id: str
    reason: str


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One side's result. `perplexity` = exp(sum of nll / sum of tokens) over all rows; None when a row is not finite."""

    side: str
    """What was scored: the model's name, or the server's address."""
    perplexity: float | None
    tokens: int
    rows: tuple[RowScore, ...]
    skipped: tuple[Skipped, ...] = ()
    data: str
    data_hash: str
    settings: dict[str, Any] = {}
    """dtype, attention, device, batch, template_hash, min_pixels, max_pixels: what the number depends on."""
    versions: dict[str, str] = {}
    seconds: float = 0.0


def ids_hash(ids: tuple[int, ...]) -> str:
    """16 hex digits that stand for one sequence of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def perplexity(rows: tuple[RowScore, ...]) -> float | None:
    """exp of the token-weighted mean negative log likelihood; None when there is no row or one is not finite."""
    tokens = sum(row.tokens for row in rows)
    if not tokens or any(row.nll is None for row in rows):
        return None
    mean = sum(row.nll or 0.0 for row in rows) / tokens
    return math.exp(mean) if mean < 700 else None  # past that, exp overflows: as good as not finite


class Drift(msgspec.Struct, frozen=True):
    """The server's tokens differ from the repo's own: another tokenizer, chat template or pixel limit."""

    id: str
    position: int
    ours: int | None
    theirs: int | None


class Moved(msgspec.Struct, frozen=True):
    """One row on both sides: perplexity of its scored tokens, and the relative difference."""

    id: str
    reference: float | None
    candidate: float | None
    relative: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`relative` = candidate / reference - 1 over the rows that both sides scored; negative when the candidate is less surprised."""

    reference: float | None
    candidate: float | None
    relative: float | None
    tolerance: float
    tolerance_reason: str = ""
    noise: float | None = None
    """Half the width of `interval`: a tolerance below it cannot be told from chance."""
    interval: tuple[float, float] | None = None
    """95 % interval of `relative`, from a bootstrap over paired rows."""
    moved: tuple[Moved, ...] = ()
    """Every row, the one that moved most first."""
    drifted: tuple[str, ...] = ()
    """Rows whose token ids differ between the sides: they are compared nowhere."""

    @property
    def within(self) -> bool:
        """Whether the difference is known and no larger than the tolerance."""
        return self.relative is not None and abs(self.relative) <= self.tolerance


class Planted(msgspec.Struct, frozen=True):
    """One planted fault: how far it moved perplexity, or why it has no place in this model. `seen`: beyond the tolerance."""

    fault: str
    relative: float | None
    seen: bool
    not_applicable: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The `perplexity` section of the report."""

    score: Score
    """The side under test: the target itself, or the candidate where there is one."""
    reference: Score | None = None
    comparison: Comparison | None = None
    drifts: tuple[Drift, ...] = ()
    faults: tuple[Planted, ...] = ()

    @property
    def nothing_compared(self) -> bool:
        """Whether two sides were to be compared and there is no number to show for it."""
        return self.comparison is not None and self.comparison.relative is None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a side is run. `dtype`: `auto` (the checkpoint's), float32, bfloat16, float16; `attention`: a name that transformers knows."""

    dtype: str = "auto"
    attention: str = "sdpa"
    device: str = "cpu"
    batch: int = 1
    trust_remote_code: bool = False


class PplOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked of `ckaudit ppl`."""

    data: str = "builtin"
    rows: int | None = None
    settings: Settings = Settings()
    min_pixels: int | None = None
    max_pixels: int | None = None
    reference: Path | None = None
    """A reference file to compare with."""
    candidate: str | None = None
    """Another target (quantised, another revision) to compare with."""
    candidate_settings: Settings | None = None
    """The same weights under other settings."""
    against: str | None = None
    """Address of a running server to compare with the target."""
    served_model: str | None = None
    entry: str | None = None
    tolerance: float | None = None
    tolerance_reason: str = ""
    prove: bool = False
    save_reference: Path | None = None
    """Where to keep the score as a reference."""

"""Two scores of the same rows: the relative difference with its sign, how much of it is noise, and which rows moved."""

from __future__ import annotations

import math
import random

from ckaudit.errors import UsageError
from ckaudit.scores import Comparison, Moved, RowScore, Score, perplexity

RESAMPLES = 2000


def compare(reference: Score, candidate: Score, tolerance: float, reason: str = "") -> Comparison:
    """Compare two scores of one data set. Raises UsageError when the data sets differ: that is no drift, it is another question."""
    if reference.data_hash != candidate.data_hash:
        raise UsageError(
            f"The reference was made on other rows: {reference.data} {reference.data_hash[:12]}, "
            f"now {candidate.data} {candidate.data_hash[:12]}.",
            "Score the reference again with --save-reference, or give the same --data and --rows.",
        )
    theirs = {row.id: row for row in candidate.rows}
    both = [(row, theirs[row.id]) for row in reference.rows if row.id in theirs]
    same = [(a, b) for a, b in both if a.ids_hash == b.ids_hash]
    drifted = tuple(a.id for a, b in both if a.ids_hash != b.ids_hash)
    left, right = perplexity(tuple(a for a, _ in same)), perplexity(tuple(b for _, b in same))
    relative = right / left - 1 if left and right else None
    interval = _interval(same) if relative is not None else None
    moved = [Moved(a.id, _own(a), _own(b), _ratio(_own(a), _own(b))) for a, b in same]
    moved.sort(key=lambda m: (m.relative is not None, -abs(m.relative or 0.0), m.id))
    return Comparison(
        reference=left,
        candidate=right,
        relative=relative,
        tolerance=tolerance,
        tolerance_reason=reason,
        noise=(interval[1] - interval[0]) / 2 if interval else None,
        interval=interval,
        moved=tuple(moved),
        drifted=drifted,
    )


def _own(row: RowScore) -> float | None:
    return perplexity((row,))


def _ratio(left: float | None, right: float | None) -> float | None:
    return right / left - 1 if left and right else None


def _interval(pairs: list[tuple[RowScore, RowScore]]) -> tuple[float, float] | None:
    """95 % of `relative` when the rows are drawn anew, pairs kept together; None for fewer than two rows. Seed fixed."""
    if len(pairs) < 2:
        return None
    facts = [((b.nll or 0.0) - (a.nll or 0.0), a.tokens) for a, b in pairs]
    rng = random.Random(0)
    drawn = []
    for _ in range(RESAMPLES):
        sample = rng.choices(facts, k=len(facts))
        drawn.append(math.expm1(min(sum(d for d, _ in sample) / sum(n for _, n in sample), 700.0)))
    drawn.sort()
    return drawn[int(RESAMPLES * 0.025)], drawn[int(RESAMPLES * 0.975)]

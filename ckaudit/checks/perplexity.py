"""CK65x: what perplexity says of a model that loads."""

from __future__ import annotations

from collections.abc import Iterator

from ckaudit.findings import Check, Finding, Skip
from ckaudit.scores import Outcome, Score

MOVED = Check("CK651", "perplexity beyond the tolerance", "error")
DRIFT = Check("CK652", "the two sides see different tokens", "error")
NOT_FINITE = Check("CK653", "perplexity is not finite", "error")
HIDDEN = Check("CK654", "a planted fault stays hidden", "error")
NOISE = Check("CK655", "tolerance tighter than the noise", "warning")
CHECKS = (MOVED, DRIFT, NOT_FINITE, HIDDEN, NOISE)


def _finding(
    check: Check, names: tuple[str, ...], message: str, mend: str, wanted: str = "", found: str = ""
) -> Finding:
    return Finding(
        check=check.id,
        title=check.title,
        severity=check.severity,
        blame="undecidable",
        names=names,
        count=len(names) or 1,
        wanted=wanted,
        found=found,
        message=message,
        mend=mend,
    )


def run(outcome: Outcome) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Findings and skips of one `ckaudit ppl`."""
    findings: list[Finding] = []
    findings += _not_finite(outcome.score, "")
    if outcome.reference is not None:
        findings += _not_finite(outcome.reference, " of the reference")
    findings += _compared(outcome)
    for planted in outcome.faults:
        if not planted.seen and planted.not_applicable is None:
            size = f"{planted.relative or 0:+.3%}"
            message = f"This check cannot see it: {planted.fault} moves perplexity by {size}."
            findings.append(
                _finding(HIDDEN, (planted.fault,), message, "Give more rows of the kind that it hurts.", found=size)
            )
    skips = [Skip("CK651", f"row {row.id}: {row.reason}") for row in outcome.score.skipped]
    here = {row.id for row in outcome.score.skipped}
    theirs = outcome.reference.skipped if outcome.reference is not None else ()
    skips += [Skip("CK651", f"row {row.id} of the reference: {row.reason}") for row in theirs if row.id not in here]
    if outcome.nothing_compared:
        skips.append(Skip("CK651", "nothing was compared: the sides have no rows in common that give a number on both"))
    skips += [Skip("CK654", f"{p.fault}: {p.not_applicable}") for p in outcome.faults if p.not_applicable]
    return tuple(findings), tuple(skips)


def _not_finite(score: Score, side: str) -> Iterator[Finding]:
    endless = tuple(row.id for row in score.rows if row.nll is None)
    mend = "Run `ckaudit load` to see the first layer that is not finite."
    if endless:
        yield _finding(NOT_FINITE, endless, f"{len(endless)} of {len(score.rows)} rows{side} give NaN or Inf.", mend)
    elif score.rows and score.perplexity is None:
        yield _finding(NOT_FINITE, (), f"The perplexity{side} is too large for a number.", mend)


def _compared(outcome: Outcome) -> list[Finding]:
    compared, found = outcome.comparison, []
    if compared is None:
        return []
    drifted = compared.drifted + tuple(d.id for d in outcome.drifts)
    if drifted:
        first = next((d for d in outcome.drifts), None)
        where = (
            f" First in {first.id}, token {first.position}: ours {first.ours}, theirs {first.theirs}." if first else ""
        )
        mend = "Give both sides the same tokenizer, chat template and pixel limits."
        found.append(_finding(DRIFT, drifted, f"{len(drifted)} rows have other token ids.{where}", mend))
    if compared.relative is not None and not compared.within:
        moved = tuple(m.id for m in compared.moved if m.relative is not None and abs(m.relative) > compared.tolerance)
        direction = "higher" if compared.relative > 0 else "lower"
        message = f"Perplexity is {abs(compared.relative):.2%} {direction} than the reference"
        message += f"; {len(moved)} of {len(compared.moved)} rows moved."
        mend = "Look at the rows that moved most; a lower perplexity is no less wrong."
        wanted, got = (
            f"{compared.reference:.5g} ± {compared.tolerance:.2%}",
            f"{compared.candidate:.5g} ({compared.relative:+.2%})",
        )
        found.append(_finding(MOVED, moved, message, mend, wanted, got))
    if compared.noise is not None and compared.noise > compared.tolerance:
        message = f"The tolerance {compared.tolerance:.2%} is tighter than the noise of {len(compared.moved)} rows, ±{compared.noise:.2%}."
        found.append(_finding(NOISE, (), message, "Score more rows, or widen the tolerance with a reason."))
    return found

"""CK50x: what the values of a checkpoint's tensors say. Pure functions over statistics; whoever reads tensors makes those."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from ckaudit.checks.observed import Observed, TensorStats, is_buffer, is_matrix, weight_scales
from ckaudit.findings import Check, Finding, Severity, Skip, finding
from ckaudit.header import FLOATS
from ckaudit.naming import printable

NOT_FINITE = Check("CK501", "NaN or Inf in a tensor", "error")
ALL_ZERO = Check("CK502", "all-zero weight matrix", "error")
CONSTANT = Check("CK503", "constant weight matrix", "error")
OUTLIER = Check("CK504", "layer far from its siblings", "warning")
NEVER_WRITTEN = Check("CK505", "parameter never written", "error")
UNTRAINED = Check("CK506", "weights as initialised", "warning")
SAME_BYTES = Check("CK507", "same bytes under two names", "warning")
TIE_DIFFERS = Check("CK508", "tied pair that differs", "warning")
CHECKS = (NOT_FINITE, ALL_ZERO, CONSTANT, OUTLIER, NEVER_WRITTEN, UNTRAINED, SAME_BYTES, TIE_DIFFERS)


# Weights that start at zero by design and stay there where training did not reach them.
_ZERO_BY_DESIGN = re.compile(
    r"lora_B|lora_embedding_B|zero_conv|adaLN|adaln|controlnet_(down|mid)|token_type_embeddings|position_embedding|pos_embed"
)
_EMBEDDING = re.compile(r"(^|[._])(lm_head|embed|shared|wte|output|word_embeddings)")
# Positions that are computed, not learned, are the same in an encoder and its decoder.
_POSITIONS = re.compile(r"position|pos_emb|sinusoid", re.IGNORECASE)
_LIMIT = re.compile(r"(^|[._])(min|max|limit|bound|clip)$")
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])")

_FRACTIONS = FLOATS | {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"}
_SIBLINGS = 8
"""Fewer layers than this do not say what is usual."""
_FAR_RATIO = 10.0
_FAR_DEVIATIONS = 5.0
"""Layers of trained models differ by a factor of 2 or 3 from the median; a lost scale or a wrong dtype moves them by far more than ten."""
_UNTRAINED_ELEMENTS = 1 << 16
_SMALLEST_SCALE = 2.0**-127
"""What a byte of zero says in E8M0, which has no zero: nothing is left of a weight that it multiplies."""


def run(seen: Observed) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Findings on values, and what could not be judged."""
    found = [
        *_not_finite(seen),
        *_flat(seen),
        *_zero_scales(seen),
        *_far(seen),
        *_never_written(seen),
        *_untrained(seen),
        *_same(seen),
        *_ties(seen),
    ]
    skips: list[Skip] = []
    if not seen.stats:
        skips = [Skip(c.id, "no tensor's values were read", seen.engine) for c in CHECKS if c is not NEVER_WRITTEN]
    else:
        if seen.initializer_range is None:
            skips.append(Skip(UNTRAINED.id, "the config names no initializer_range", seen.engine))
        if not seen.compared:
            reason = "the loader read the files for itself: tensors of the file were not compared with each other"
            skips += [Skip(c.id, reason, seen.engine) for c in (SAME_BYTES, TIE_DIFFERS)]
    if seen.partial:
        skips.append(Skip(NEVER_WRITTEN.id, "only some of the shards were loaded", seen.engine))
    return tuple(found), tuple(skips)


def _finding(
    check: Check, seen: Observed, names: Iterable[str], message: str, mend: str, *,
    wanted: str = "", found: str = "", severity: Severity | None = None,
) -> Finding:  # fmt: skip
    listed = set(names)
    elements = sum(s.count for s in seen.stats if s.name in listed)
    return finding(
        check, message, listed, severity=severity, mend=mend, wanted=wanted, found=found or f"{elements:,} elements",
        engine=seen.engine if check is NEVER_WRITTEN else None,
    )  # fmt: skip


def _not_finite(seen: Observed) -> list[Finding]:
    bad = [s for s in seen.stats if s.nan or (s.inf and not is_buffer(s.name) and not _no_limit(s))]
    if not bad:
        return []
    nan, inf = sum(s.nan for s in bad), sum(s.inf for s in bad)
    message = f"{_tensors(bad)} hold{'s' if len(bad) == 1 else ''} {nan:,} NaN and {inf:,} Inf."
    mend = "Save the checkpoint again from a run that is finite; a cast to float16 makes Inf of anything above 65504."
    return [
        _finding(
            NOT_FINITE,
            seen,
            (s.name for s in bad),
            message,
            mend,
            wanted="finite values",
            found=f"{nan} NaN, {inf} Inf",
        )
    ]


def _no_limit(tensor: TensorStats) -> bool:
    """Whether a number bounds what goes through a layer, and Inf says that nothing is cut off."""
    return tensor.count == 1 and _LIMIT.search(tensor.name) is not None


def _flat(seen: Observed) -> list[Finding]:
    found = []
    matrices = [s for s in seen.stats if is_matrix(s)]
    for severity, group in _by_design([s for s in matrices if s.all_zero]):
        message = f"{_tensors(group)} {'is' if len(group) == 1 else 'are'} zero in every element."
        if severity == "note":
            message += " Such a weight starts at zero: it was never trained."
        mend = "Look at the step that wrote it: a merge, a resume or a sharded save that gathered nothing."
        found.append(_finding(ALL_ZERO, seen, (s.name for s in group), message, mend, severity=severity))
    constant = [s for s in matrices if s.constant and not s.all_zero]
    if constant:
        message = f"{_tensors(constant)} hold{'s' if len(constant) == 1 else ''} one value in every element."
        mend = "Look at the step that wrote it: memory that was allocated and never filled looks like this."
        values = ", ".join(f"{s.low:g}" for s in constant[:3])
        found.append(_finding(CONSTANT, seen, (s.name for s in constant), message, mend, found=f"value {values}"))
    return found


def _zero_scales(seen: Observed) -> list[Finding]:
    """Scales of which no element is other than zero. Single ones may be: of a row or a block of the weight that is zero."""
    zero = [s for s in weight_scales(seen.stats) if s.count and not s.nan and not s.inf and s.absmax <= _SMALLEST_SCALE]
    mend = "Quantise the original weights again: a scale that was allocated and never filled, or rounded to nothing, looks like this."
    found = []
    for severity, group in _by_design(zero):
        verb, rest = ("is", "weight that it scales") if len(group) == 1 else ("are", "weights that they scale")
        message = f"{_tensors(group)} {verb} zero in every element: nothing is left of the {rest}."
        found.append(_finding(ALL_ZERO, seen, (s.name for s in group), message, mend, severity=severity))
    return found


def _by_design(zero: Sequence[TensorStats]) -> list[tuple[Severity, list[TensorStats]]]:
    """Tensors that are zero: by error, and because they belong to a weight that starts so."""
    kinds: tuple[tuple[Severity, list[TensorStats]], ...] = (
        ("error", [s for s in zero if not _ZERO_BY_DESIGN.search(s.name)]),
        ("note", [s for s in zero if _ZERO_BY_DESIGN.search(s.name)]),
    )
    return [kind for kind in kinds if kind[1]]


def _far(seen: Observed) -> list[Finding]:
    """A matrix whose deviation is far from that of the same matrix in the other layers."""
    families: dict[tuple[str, str, tuple[int, ...]], list[TensorStats]] = defaultdict(list)
    for tensor in seen.stats:
        if is_matrix(tensor) and tensor.dtype in _FRACTIONS and tensor.std > 0 and not tensor.nan and not tensor.inf:
            families[_NUMBER.sub("#", tensor.name), tensor.dtype, tensor.shape].append(tensor)
    far: list[tuple[TensorStats, float]] = []
    for family in families.values():
        if len(family) >= _SIBLINGS:
            far += _outliers(family)
    if not far:
        return []
    worst, usual = max(far, key=lambda pair: abs(math.log(pair[0].std / pair[1])))
    ratio = max(worst.std / usual, usual / worst.std)
    way = "larger" if worst.std > usual else "smaller"
    message = f"{_tensors([t for t, _ in far])}: the deviation {worst.std:.3g} is {ratio:.0f} times {way} than the median of its siblings."
    mend = "Compare with the source of the checkpoint: a scale that was lost or applied twice, or a layer of another model."
    return [
        _finding(
            OUTLIER,
            seen,
            (t.name for t, _ in far),
            message,
            mend,
            wanted=f"about {usual:.3g}",
            found=f"{worst.std:.3g}",
        )
    ]


def _outliers(family: Sequence[TensorStats]) -> list[tuple[TensorStats, float]]:
    logs = [math.log(t.std) for t in family]
    middle = median(logs)
    spread = median(abs(v - middle) for v in logs)
    limit = max(math.log(_FAR_RATIO), _FAR_DEVIATIONS * spread)
    return [(t, math.exp(middle)) for t, v in zip(family, logs, strict=True) if abs(v - middle) > limit]


def _never_written(seen: Observed) -> list[Finding]:
    if not seen.never_written:
        return []
    some = (
        f"{len(seen.never_written)} parameters of the model hold"
        if len(seen.never_written) > 1
        else "One parameter of the model holds"
    )
    message = f"{some} what initialisation left there."
    return [
        _finding(
            NEVER_WRITTEN, seen, seen.never_written, message, "`ckaudit names` says which tensors were meant for them."
        )
    ]


def _untrained(seen: Observed) -> list[Finding]:
    """Matrices that no training touched: the deviation, the mean and the shape of the distribution are those of the initialiser."""
    scale = seen.initializer_range
    fresh = [
        s
        for s in seen.stats
        if is_matrix(s) and s.dtype in FLOATS and s.count >= _UNTRAINED_ELEMENTS and _as_drawn(s, scale)
    ]
    if not fresh:
        return []
    matrices = sum(1 for s in seen.stats if is_matrix(s))
    verb = "is" if len(fresh) == 1 else "are"
    message = (
        f"{_tensors(fresh)}, of {matrices} weight matrices, {verb} distributed exactly as initialised: never trained."
    )
    mend = "Load the weights that were trained; a module that was added after training looks like this."
    return [_finding(UNTRAINED, seen, (s.name for s in fresh), message, mend)]


def _as_drawn(tensor: TensorStats, scale: float | None) -> bool:
    """Whether a tensor looks drawn from normal(0, scale), or from torch's default for a linear layer, uniform within 1/sqrt(inputs).

    Each limit is about five standard errors of the estimate from that many elements, and a rounding to 8 bits of mantissa.
    """
    n = tensor.count
    tail = tensor.kurtosis_count or n
    error = 5 / math.sqrt(2 * n) + 5e-4
    if tensor.kurtosis is None or tensor.nan or tensor.inf or abs(tensor.mean) > 5 * tensor.std / math.sqrt(n):
        return False
    if scale and abs(tensor.std / scale - 1) < error and abs(tensor.kurtosis - 3) < 5 * math.sqrt(24 / tail) + 2e-3:
        return True
    bound = 1 / math.sqrt(math.prod(tensor.shape[1:]))
    uniform = (
        abs(tensor.std * math.sqrt(3) / bound - 1) < error and abs(tensor.kurtosis - 1.8) < 5 / math.sqrt(tail) + 2e-3
    )
    return uniform and tensor.absmax <= bound * 1.005


def _same(seen: Observed) -> list[Finding]:
    tied = [set(group) for group in seen.tied]
    groups = [g for g in seen.equal if not any(set(g) <= t for t in tied) and not all(_POSITIONS.search(n) for n in g)]
    if not groups:
        return []
    heads = [g for g in groups if all(_EMBEDDING.search(n) for n in g)]
    mend = "If they are meant to be one weight, tie them in the config; if not, save the right one again."
    found = []
    for check_groups, severity in ((heads, "note"), ([g for g in groups if g not in heads], None)):
        names = [n for g in check_groups for n in g]
        if names:
            pairs = "; ".join(" = ".join(map(printable, g[:3])) for g in check_groups[:2])
            sets = "the same values" if len(check_groups) == 1 else f"only {len(check_groups)} different sets of values"
            message = f"{len(names)} tensors hold {sets}: {pairs}{'; …' if len(check_groups) > 2 else '.'}"
            found.append(_finding(SAME_BYTES, seen, names, message, mend, severity="note" if severity else None))
    return found


def _ties(seen: Observed) -> list[Finding]:
    if not seen.tie_differs:
        return []
    one, other = seen.tie_differs[0]
    message = (
        f"The config ties {printable(one)} to {printable(other)}, and the checkpoint stores both with different values."
    )
    mend = "Set tie_word_embeddings to false if both were trained; else drop the copy that is out of date."
    names = [n for pair in seen.tie_differs for n in pair]
    return [
        _finding(
            TIE_DIFFERS,
            seen,
            names,
            message,
            mend,
            wanted="one value for both",
            found=f"{len(seen.tie_differs)} pairs differ",
        )
    ]


def _tensors(group: Sequence[TensorStats]) -> str:
    return printable(group[0].name) if len(group) == 1 else f"{len(group)} tensors"

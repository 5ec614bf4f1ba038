"""CK80x: what a checkpoint has otherwise than its source, and no rule explains."""

from __future__ import annotations

from ckaudit.changes import Change, Diff, Kind
from ckaudit.checks.case import many
from ckaudit.findings import Check, Finding, Severity, Skip, finding
from ckaudit.naming import printable

LOST = Check("CK801", "tensors lost", "error")
ADDED = Check("CK802", "tensors added", "warning")
RESHAPED = Check("CK803", "tensors reshaped", "error")
RETYPED = Check("CK804", "tensors retyped", "warning")
NOT_IDENTICAL = Check("CK805", "not identical, as a round trip has to be", "error")
NO_PLACE = Check("CK806", "new names that nothing loads", "error")
CHECKS = (LOST, ADDED, RESHAPED, RETYPED, NOT_IDENTICAL, NO_PLACE)

CHECK_OF: dict[Kind, Check] = {
    "removed": LOST,
    "quantised": LOST,
    "added": ADDED,
    "reshaped": RESHAPED,
    "retyped": RETYPED,
    "renamed": NO_PLACE,
    "relaid": NO_PLACE,
}
"""Which check tells of a change without a rule."""
_LEAVES_OPEN = {"shapes": (RESHAPED.id, RETYPED.id), "files": ("files",), "places": (NO_PLACE.id,)}
_MENDS: dict[Kind, str] = {
    "removed": "Copy them from A, or save again.",
    "added": "Leave them out when saving, unless B is meant to have more than A.",
    "reshaped": "Save again in the shapes of A, unless B is meant to be another model.",
    "retyped": "Save again with one dtype for all, or with that of each tensor in A.",
    "renamed": "Save under the names of A; transformers: save_pretrained(…, save_original_format=True).",
    "relaid": "Save in the layout of A; transformers: save_pretrained(…, save_original_format=True).",
    "quantised": "Compare a quantised checkpoint without --roundtrip.",
}
_ROUNDTRIP: dict[Kind, str] = _MENDS | {
    "removed": "Save these too.",
    "added": "Leave them out when saving.",
    "retyped": "Save in the dtypes of A: from_pretrained(…, dtype='auto').",
}
_SCALES = "Quantise again, or take the companions from where B was made."
_DRAFT = "Copy them from A, if speculative decoding is wanted."
_UNDECIDABLE = "Compare what the two compute: ckaudit ppl A --candidate B."


def run(diff: Diff) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """A finding for every change without a rule, and with `roundtrip` for every other one; and what could not be compared."""
    findings = [
        _unexplained(c, diff) if c.rule is None else _explained(c)
        for c in diff.changes
        if c.rule is None or diff.roundtrip
    ]
    skips = [Skip(check, u.reason) for u in diff.unjudged for check in _LEAVES_OPEN[u.topic]]
    return tuple(findings), tuple(skips)


def _unexplained(change: Change, diff: Diff) -> Finding:
    check = CHECK_OF[change.kind]
    names = change.old if check is LOST else change.new
    count = many(len(names), "tensor")
    verb = "is" if len(names) == 1 else "are"
    what = f": {change.text}" if change.text else ""
    nobody = f"{' and '.join(change.engines)} {'has' if len(change.engines) == 1 else 'have'}"
    message = {
        "removed": f"{count} of A {verb} not in B{what}.",
        "quantised": f"{count} of A {verb} {change.text} in B.",
        "added": f"{count} of B {verb} not in A{what}.",
        "reshaped": f"{count} {verb} {change.text}.",
        "retyped": f"{change.text[:1].upper()}{change.text[1:]}.",
        "renamed": f"{count} of B {verb} under names that {nobody} no place for: {change.text}.",
        "relaid": f"{count} of B {verb} in a layout that {nobody} no place for: {change.text}.",
    }[change.kind]
    if change.nearest is not None:
        message += f" Most alike on the other side: `{printable(change.nearest)}`."
    mend = (
        _DRAFT
        if change.apart
        else _UNDECIDABLE
        if change.undecidable
        else _SCALES
        if change.kind == "quantised"
        else _MENDS[change.kind]
    )
    return _finding(change, check, names, message, _severity(change, check, diff), mend)


def _severity(change: Change, check: Check, diff: Diff) -> Severity:
    if diff.roundtrip:
        return "error"
    if change.undecidable or change.apart:
        return "warning"
    floats = ("F", "BF")
    numbers = change.kind == "retyped" and change.wanted.startswith(floats) != change.found.startswith(floats)
    return "error" if numbers else check.severity


def _explained(change: Change) -> Finding:
    one, other = len(set(change.old)), len(set(change.new))
    count = (
        many(one or other, "tensor") if one == other or not one or not other else f"{many(one, 'tensor')} into {other}"
    )
    message = f"{count} {change.kind}: {change.text}."
    return _finding(change, NOT_IDENTICAL, change.new or change.old, message, "error", _ROUNDTRIP[change.kind])


def _finding(
    change: Change, check: Check, names: tuple[str, ...], message: str, severity: Severity, mend: str
) -> Finding:
    return finding(
        check, message, names, severity=severity, mend=mend, wanted=change.wanted, found=change.found,
        engine=change.engines[0] if check is NO_PLACE and len(change.engines) == 1 else None,
        blame="undecidable" if change.undecidable else "checkpoint",
        bytes=change.old_bytes if check is LOST or not change.new else change.new_bytes,
    )  # fmt: skip

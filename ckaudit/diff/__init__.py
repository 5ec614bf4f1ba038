"""Two checkpoints -> their differences, each explained by at most one rule. Pure: from names, shapes, dtypes and configs alone.

Units (a tensor, or a quantised weight with its companions) are brought together by `pairing`; `within` tells what changed in those that
have a partner, `reasons` why others may have none, and `gone` what is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckaudit.changes import Change, Diff, Link
from ckaudit.checkpoint import Checkpoint
from ckaudit.checks import container
from ckaudit.checks.facts import Facts
from ckaudit.diff.gone import unexplained
from ckaudit.diff.made import Sizes
from ckaudit.diff.pairing import Pairing
from ckaudit.diff.reasons import one_sided
from ckaudit.diff.within import within
from ckaudit.header import without_collector
from ckaudit.plan import Unjudged


def compare(a: Checkpoint, b: Checkpoint, *, roundtrip: bool = False) -> Diff:
    """What `b` has otherwise than its source `a`. `roundtrip` only marks the result: then nothing may differ."""
    with without_collector():
        changes = tuple(_changes(Facts(a), Facts(b)))
    touched = {n for change in changes for n in change.old}
    same = [t for n, t in a.tensors.items() if n not in touched]
    return Diff(
        roundtrip=roundtrip,
        identical=len(same),
        identical_bytes=sum(t.nbytes or 0 for t in same),
        changes=changes,
        unjudged=tuple(_unjudged(a, b)),
    )


def _changes(a: Facts, b: Facts) -> Iterator[Change]:
    """Names and layouts, then what changed within pairs, then what one side alone has."""
    pairing, sizes = Pairing(a, b), Sizes(a, b)
    for (rule, text), links in pairing.renamed.items():
        yield sizes.change("renamed", rule, text, links)
    for (rule, text), groups in pairing.relaid.items():
        links = [Link(*(tuple(m for u in side for m in u.members) for side in (g.old, g.new))) for g in groups]
        if links:
            yield sizes.change("relaid", rule, text, links)
    yield from within(pairing, sizes)
    yield from _one_sided(pairing, sizes, removed=True)
    yield from _one_sided(pairing, sizes, removed=False)


def _one_sided(pairing: Pairing, sizes: Sizes, *, removed: bool) -> Iterator[Change]:
    """What A alone has (`removed`) or B alone: first what there is a reason for."""
    here, there, loose, other = pairing.a, pairing.b, pairing.old, pairing.new
    if not removed:
        here, there, loose, other = there, here, other, loose
    left = dict(loose)
    for reason in one_sided(loose, here, there, removed=removed):
        names = [m for unit in reason.units for m in unit.members]
        links = [Link((n,), ()) if removed else Link((), (n,)) for n in names]
        yield sizes.change("removed" if removed else "added", reason.rule, reason.text, links)
        for unit in reason.units:
            del left[unit.name]
    absent = {m for unit in loose.values() for m in unit.members}
    yield from unexplained("removed" if removed else "added", left, absent, here, there, other, sizes)


def _unjudged(a: Checkpoint, b: Checkpoint) -> Iterator[Unjudged]:
    """Files that could not be read, so that what they hold is compared by name alone or not at all; and files that are faulty."""
    if a.index_only and b.index_only:
        yield Unjudged("shapes", "only an index of A and of B was there to read: shapes and dtypes are not compared")
        return
    for side, checkpoint in (("A", a), ("B", b)):
        paths = [s.path for s in checkpoint.shards if s.header is None]
        if paths:
            more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
            yield Unjudged(
                "shapes",
                f"{paths[0]}{more} of {side} could not be read: compared by the names in the index, where there is one",
            )
        elif checkpoint.defects or any(s.defects for s in checkpoint.shards):
            faults = sorted({f.check for f in container.run(checkpoint)[0] if f.severity == "error"})
            if faults:
                yield Unjudged(
                    "files",
                    f"the files of {side} are faulty themselves ({' '.join(faults)}): `ckaudit names` tells how",
                )

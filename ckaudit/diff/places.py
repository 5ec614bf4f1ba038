"""Whether the names that B gave are ones that an engine has a place for: a change of names is no loss only where they load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ckaudit.changes import Change, Diff
from ckaudit.checkpoint import Checkpoint
from ckaudit.checks.facts import Facts
from ckaudit.diff.made import Sizes
from ckaudit.naming import printable
from ckaudit.plan import Plan, Unjudged

_KINDS = ("renamed", "relaid")
"""Changes that give weights other names."""


def new_names(found: Diff) -> frozenset[str]:
    """The names that B gave to weights of A."""
    links = (link for change in found.changes if change.kind in _KINDS for link in change.links)
    return frozenset(n for link in links for n in link.new if n not in link.old)


def without_place(plan: Plan, names: frozenset[str]) -> frozenset[str] | None:
    """Those of `names` for which the engine of `plan` (of B) has no place; None where it does not know.

    What it leaves out by design has its place in other software.
    """
    if plan.not_judged is not None or any(n.fate == "not_reached" and n.name in names for n in plan.names):
        return None
    return frozenset(n.name for n in plan.names if n.fate != "loaded" and n.by_design is None and n.name in names)


def placed(found: Diff, plans: Sequence[Plan], a: Checkpoint, b: Checkpoint) -> Diff:
    """`found`, where a change to names that no engine of `plans` has a place for is explained no more.

    Of several engines the one counts that has a place for the most of them: a checkpoint is made for one. Where none knows, that is said.
    """
    names = new_names(found)
    if not names:
        return found
    known = {p.id: lost for p in plans if (lost := without_place(p, names)) is not None}
    if not known:
        reasons = [f"{p.id}: {p.not_judged or 'its loader stops before it comes to them'}" for p in plans]
        why = "; ".join(reasons) or "an adapter is judged on its base alone (ckaudit names B --base TARGET)"
        return replace(found, unjudged=(*found.unjudged, Unjudged("places", f"whether the new names load: {why}")))
    lost = min(known.values(), key=len)
    engines = tuple(i for i, names in known.items() if names == lost)
    sizes = Sizes(Facts(a), Facts(b))
    changes = tuple(part for change in found.changes for part in _parts(change, engines, lost, sizes))
    return replace(found, changes=changes)


def _parts(change: Change, engines: tuple[str, ...], lost: frozenset[str], sizes: Sizes) -> Iterator[Change]:
    """A change in two: what has a place in these engines, and what has none and so no reason."""
    if change.kind not in _KINDS:
        yield change
        return
    for rule, links in (
        (change.rule, [link for link in change.links if lost.isdisjoint(link.new)]),
        (None, [link for link in change.links if not lost.isdisjoint(link.new)]),
    ):
        if links:
            first = (links[0].old[0], links[0].new[0]) if rule is None else ("", "")
            wanted, held = map(printable, first)
            yield replace(
                sizes.change(change.kind, rule, change.text, links, wanted=wanted, found=held), engines=engines
            )

"""What is wrong with a checkpoint, and with what each engine does with it: every check, and the order in which they explain a loss.

One root cause is one finding. First the files are judged by themselves (`ON_FILES`). Then, for each engine, the checks of `EXPLAIN` run in
order over what the engine lost (`case.Case`): each takes out what it recognises, so that the general ones at the end (a tensor without
a parameter, a parameter without a tensor) tell only what nothing more particular explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks import (
    classes,
    companions,
    config,
    container,
    coverage,
    drafts,
    joined,
    layout,
    names,
    parallel,
    prefixes,
    quantisation,
    rewrites,
    sizes,
    tensors,
    ties,
)
from ckaudit.checks.case import Case, Explain
from ckaudit.checks.facts import Facts
from ckaudit.findings import Finding, Skip
from ckaudit.plan import Plan

OnFiles = Callable[[Facts], Iterator[Finding]]

ON_FILES: tuple[OnFiles, ...] = (
    config.readable, prefixes.repeated, prefixes.unmerged, layout.layer_holes, layout.expert_holes, layout.experts_twice, drafts.draft,
    ties.ties, companions.companions, companions.schemes, quantisation.ignore_list, coverage.plain,
    tensors.saved_dtype, tensors.square_experts, tensors.fused_rows, tensors.global_scales,
)  # fmt: skip
"""What can be told from names, shapes and config alone."""

WITHOUT_ENGINE: tuple[OnFiles, ...] = (
    config.own_code, config.layer_counts, config.expert_counts, config.vocabulary, prefixes.wrapped,
)  # fmt: skip
"""What an engine knows better; told from the files where none could be judged."""

EXPLAIN: tuple[Explain, ...] = (
    # an ignore list that the engine does not go by looks like a rule that it lacks
    coverage.quantised_here,
    # what the engine's own rules did
    rewrites.spoiled, rewrites.never_fires, rewrites.forgotten, names.collisions,
    # what was found on the files explains what is lost here
    names.not_in_the_files, names.harmless, prefixes.unmerged_here, layout.experts_twice_here, layout.experts_lost,
    config.experts_pruned, companions.companions_here,
    # one cause for many names
    companions.mlx_only, companions.unquantised_modules, joined.joined, prefixes.repeated_here,
    classes.wrong_class, prefixes.wrong_prefix, ties.followers,
    sizes.shapes, tensors.casts,
    companions.unquantised_here, layout.experts_otherwise, layout.numbered_from_one, config.layers_too_many, layout.layers_lost,
    classes.whole_parts, classes.other_task, ties.head_lost,
    # one finding for what is left, kind by kind
    names.likely_renames, names.silent, names.unmatched, names.missing, names.partly, tensors.read_in_part,
    names.raises,
    # what costs nothing here
    parallel.refused, prefixes.accepted, drafts.draft_left_out, names.claims, config.newer, tensors.unchecked,
)  # fmt: skip
"""From the particular to the general."""

UNJUDGED = {"shapes": sizes.SHAPE, "dtypes": tensors.DTYPE, "tied": ties.TIES}
"""Which check an engine's own `Unjudged.topic` belongs to."""

_NEEDS_ENGINE = ("CK203", "CK204", "CK301")
"""The checks that a plan without a verdict leaves open, as far as a reader must know."""


def run(
    checkpoint: Checkpoint, plans: Sequence[Plan], tp: Sequence[int] = ()
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Everything that is wrong with `checkpoint`, by itself and for each engine of `plans`, and what could not be judged.

    `tp` are numbers of tensor-parallel ranks that it is to be served over.
    """
    container_findings, skips = container.run(checkpoint)
    facts = Facts(checkpoint)
    judged = [p for p in plans if p.not_judged is None]
    suspected = [f for check in (ON_FILES if judged else (*ON_FILES, *WITHOUT_ENGINE)) for f in check(facts)]
    suspected += parallel.splits(facts, tp)
    found: list[Finding] = []
    for plan in judged:
        case = Case(facts, plan, judged, (*container_findings, *suspected))
        for explain in EXPLAIN:
            case.found += explain(case)
        found += case.found
    standing = [f for f in suspected if not _refuted(f, judged) and not _surpassed(f, found)]
    return (*container_findings, *standing, *_shared(found, judged)), (*skips, *_skips(facts, plans))


def headers_alone(checkpoint: Checkpoint) -> tuple[Skip, ...]:
    """What no audit of names can judge: a file whose header and size are right may still hold other bytes than were saved."""
    if not any(shard.header is not None for shard in checkpoint.shards):
        return ()
    return (Skip("CK501", "headers alone were read, not the values: `ckaudit load` reads those"),)


def _shared(found: list[Finding], judged: Sequence[Plan]) -> list[Finding]:
    """`found`, where what every engine says of the same tensors and nobody blames on an engine is told once, of the files."""
    if len(judged) < 2:
        return found
    engines: dict[tuple[object, ...], set[str | None]] = defaultdict(set)
    for f in found:
        engines[_cause(f)].add(f.engine)
    out: dict[tuple[object, ...], Finding] = {}
    for f in found:
        shared = f.blame not in ("engine", "environment") and len(engines[_cause(f)]) == len(judged)
        out.setdefault(
            _cause(f) if shared else (f.engine, *_cause(f), f.message), structs.replace(f, engine=None) if shared else f
        )
    return _once(list(out.values()), {p.id for p in judged})


def _once(found: list[Finding], engines: set[str]) -> list[Finding]:
    """`found`, where tensors that have no place in any engine are told once, whether it warns of them or passes over them."""
    groups: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for f in found:
        if f.check in ("CK203", "CK206") and f.engine and f.severity == "error" and f.blame == "checkpoint":
            groups[f.names].append(f)
    merged: dict[int, Finding] = {}
    taken: set[int] = set()
    for group in groups.values():
        loud = [f for f in group if f.check == "CK203"]
        if loud and len(group) > len(loud) and {f.engine for f in group} == engines:
            quiet = " and ".join(str(f.engine) for f in group if f.check == "CK206")
            verb = "passes" if len(group) == len(loud) + 1 else "pass"
            told = f"{loud[0].message} {quiet} {verb} over them without a word."
            merged[id(loud[0])] = structs.replace(loud[0], engine=None, message=told)
            taken |= {id(f) for f in group if f is not loud[0]}
    return [merged.get(id(f), f) for f in found if id(f) not in taken]


def _cause(finding: Finding) -> tuple[object, ...]:
    # Engines name what a layer holds differently: there the layers are what is told.
    names = finding.names if finding.check != "CK210" else (finding.message,)
    return finding.check, finding.severity, finding.blame, names


_REFUTABLE = frozenset({"CK210", "CK216", "CK305"})
"""Suspicions that an engine's clean load proves wrong: were they true, it would have lost something. Not CK304: engines exempt quantised
modules from their checks, and a weight without its scale loads."""


def _refuted(finding: Finding, judged: Sequence[Plan]) -> bool:
    return finding.check in _REFUTABLE and any(p.verdict == "loads" for p in judged)


def _surpassed(finding: Finding, found: Sequence[Finding]) -> bool:
    """Whether an engine trips over what is only a warning from the files: then that is told, with the engine. Of a draft model its own
    class tells more, and never an error, since the main model loads."""
    if finding.check == drafts.DRAFT_PART.id and finding.severity == "warning" and finding.engine is None:
        return any(f.check == finding.check and f.severity == "warning" for f in found)
    return finding.severity != "error" and any(
        f.check == finding.check
        and f.severity == "error"
        and {n.removesuffix(".weight") for n in f.names} >= {n.removesuffix(".weight") for n in finding.names}
        for f in found
    )


def _skips(facts: Facts, plans: Sequence[Plan]) -> Iterator[Skip]:
    if not facts.has_headers and facts.checkpoint.tensors:
        for check in ("CK301", "CK302", "CK306"):
            yield Skip(check, "no shard header could be read: shapes and dtypes are not known")
    for plan in plans:
        if plan.not_judged is not None:
            for check in _NEEDS_ENGINE:
                yield Skip(check, plan.not_judged, plan.id)
        for ranks in plan.tp:
            if ranks["verdict"] == "not_judged":
                yield Skip(
                    parallel.REFUSED.id, f"{parallel.layout(ranks)}: {ranks.get('error') or 'not judged'}", plan.id
                )
        for topic in plan.unjudged:
            row = UNJUDGED.get(topic.topic)
            yield Skip(row.id if row else topic.topic, topic.reason, plan.id)

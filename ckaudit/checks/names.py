"""CK203 to CK207, CK215, CK218: what one engine lost and nothing more particular explains."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from ckaudit.checks.case import Case, by_stack, listed, many, under
from ckaudit.checks.facts import shape, split
from ckaudit.checks.quantisers import TAIL
from ckaudit.findings import Check, Finding
from ckaudit.naming import Nearest, printable
from ckaudit.plan import Failure

UNMATCHED = Check("CK203", "tensor without a parameter", "error")
MISSING = Check("CK204", "parameter without a tensor", "error")
PARTLY = Check("CK205", "parameter written only in part", "error")
SILENT = Check("CK206", "tensor dropped in silence", "error")
COLLISION = Check("CK207", "two tensors on one parameter", "error")
CLAIM = Check("CK215", "the loader's own report is wrong", "note")
RAISES = Check("CK218", "the loader refuses the checkpoint", "error")
CHECKS = (UNMATCHED, MISSING, PARTLY, SILENT, COLLISION, CLAIM, RAISES)

# Tables that every engine computes, and counters that only training reads. Old releases of transformers and torch saved them.
HARMLESS = re.compile(
    r"rotary\S*\.(inv_freq|cos_cached|sin_cached)$|(^|\.)(position_ids|num_batches_tracked|masked_bias)$|rotary_emb\.scaling_factor$"
)

_ENDS = ("inv_freq", "_cached", "position_ids", "num_batches_tracked", "masked_bias", "scaling_factor")
"""What `HARMLESS` can end in: a quick look at names that are not the files'."""


def not_in_the_files(case: Case) -> Iterator[Finding]:
    """Takes the parameters whose tensors the index promises and no shard holds: the container's findings tell of those."""
    index, tensors = case.facts.checkpoint.index, case.facts.checkpoint.tensors
    absent = {n for n in (*index.weight_map, *index.broken) if n not in tensors} if index is not None else set()
    if absent:
        tails = {_place(n) for n in absent}
        whole = {_place(n) for n in tensors}
        case.take(
            (),
            [
                g
                for g in case.gaps
                if _place(g) in tails and (g in absent or _place(g) not in whole or case.gaps[g].coverage == "partial")
            ],
            because="CK1",
        )
    return iter(())


def _place(name: str) -> tuple[str, ...]:
    """The module two levels above a tensor from its innermost stack on (`layers.3.mlp`): alike in the names of files and of engines."""
    segments = name.split(".")[:-1]
    number = next((i for i, s in enumerate(segments) if s.isdecimal()), None)
    return tuple(segments[max(0, number - 1) : number + 2]) if number is not None else tuple(segments[-1:])


def harmless(case: Case) -> Iterator[Finding]:
    """Takes stored tables that every engine computes by itself: a note, since nothing is lost."""
    known = set(case.facts.matching(HARMLESS))
    tensors = case.facts.checkpoint.tensors
    extra = [n for n in case.strays if n in known or (n in tensors and is_causal_mask(n, tensors[n].shape))]
    absent = [g for g in case.gaps if g.endswith(_ENDS) and HARMLESS.search(g)]
    if extra:
        yield case.finding(
            SILENT,
            f"{many(len(extra), 'stored tensor')} hold tables that the engine computes; leaving them out loses nothing.", names=extra,
            severity="note", blame="checkpoint",
        )  # fmt: skip
    case.take(extra, absent)


def is_causal_mask(name: str, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor is a causal mask, a [1, 1, N, N] table: GPT-2 and its kin stored one as `attn.bias`, GPT-Neo as `attention.bias`."""
    table = shape is not None and name.endswith(".bias") and len(shape) == 4 and shape[:2] == (1, 1)
    return shape is not None and table and shape[2] == shape[3] > 1


def collisions(case: Case) -> Iterator[Finding]:
    """Several tensors on one place: one won, the others are lost. Told once for each pair of stacks that meet."""
    groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = defaultdict(list)
    several = {p for p, n in Counter(c.parameter for c in case.plan.collisions).items() if n > 1}
    for collision in case.plan.collisions:
        for lost in collision.lost:
            # A fused tensor meets each of its parts, before some and behind others: that is told once for all such parameters.
            fused = collision.parameter in several
            key = (shape(collision.parameter),) if fused else _common(collision.kept, lost)
            groups[key].append((collision.kept, lost, collision.parameter))
    for pairs in groups.values():
        kept, lost, parameter = pairs[0]
        companions = all(TAIL.search(p[1]) and not TAIL.search(p[0]) for p in pairs)
        names = [n for p in pairs for n in p[:2]]
        if set(names) & {n for f in case.on_files for n in f.names if f.check in ("CK212", "CK214")}:
            continue
        yield case.finding(
            COLLISION,
            f"{many(len({p for *_, p in pairs}), 'parameter')} would get two tensors each: `{printable(lost)}` and "
            f"`{printable(kept)}` both become "
            f"`{printable(parameter)}`, and the second wins.",
            names=names, blame="engine" if companions else None,
            mend="Let the engine's pattern end where the weight's name does: it caught what stands beside it."
            if companions
            else "Keep one of each pair, or give this engine rules that keep the two trees apart.",
            wanted="one tensor", found=f"{printable(lost)} and {printable(kept)}",
        )  # fmt: skip
        modules = {split(p)[0] for *_, p in pairs} if companions else set()
        case.take(
            [lost for _, lost, _ in pairs], [*(p for *_, p in pairs), *(g for g in case.gaps if split(g)[0] in modules)]
        )


def _common(kept: str, lost: str) -> tuple[str, str]:
    """The heads of two names, the tail that they share taken off and numbers as `#`: what makes them meet."""
    a, b = kept.split("."), lost.split(".")
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    text = [".".join("#" if s.isdecimal() else s for s in x) for x in (a, b)]
    return text[0], text[1]


def silent(case: Case) -> Iterator[Finding]:
    """Tensors left out without raising or telling: ignored (any unexpected `.bias` in some releases) or dropped by a rule."""
    quiet = {n: f for n, f in case.strays.items() if f.fate in ("ignored", "dropped")}
    for fate in ("ignored", "dropped"):
        for stack, names in by_stack(n for n, f in quiet.items() if f.fate == fate).items():
            how = "by a rule" if fate == "dropped" else "without a word"
            beside = _quantised_biases(case, names)
            yield case.finding(
                SILENT,
                f"{many(len(names), 'tensor')}{under(stack)} {'is' if len(names) == 1 else 'are'} {fate} {how}: {listed(names)}.",
                names=names,
                severity="warning" if len(beside) == len(names) else "error",
                blame="engine" if fate == "dropped" else None,
                mend=_cure(case, names) or (_ZERO_BIAS if beside else _NO_PLACE),
            )  # fmt: skip
    case.take(quiet)


_ZERO_BIAS = "Some quantisers write zero biases for layers that have none: drop those."
_NO_PLACE = "If they are not zero, this class computes another model: use an engine that has a place for them."


def _quantised_biases(case: Case, names: Iterable[str]) -> list[str]:
    tensors = case.facts.checkpoint.tensors
    return [n for n in names if n.endswith(".bias") and f"{n.removesuffix('bias')}qweight" in tensors]


def likely_renames(case: Case) -> Iterator[Finding]:
    """Strays and gaps that pair up by likeness, stack by stack: each pair is one rename, so one finding tells both."""
    missing = {g for g, p in case.gaps.items() if p.coverage == "none"}
    strays = {n: f for n, f in case.strays.items() if f.fate in ("unmatched", "ignored")}
    if not strays or not missing:
        return
    finder = Nearest(missing)
    pairs: dict[str, str] = {}
    used: set[str] = set()
    for name, fate in strays.items():
        near = finder.find(fate.into or next((s.after for s in reversed(fate.chain) if s.after), name))
        if near is None or near in used or not _fits(case, name, near):
            continue
        if (
            fate.fate == "unmatched" or case.gaps[near].shape is not None
        ):  # what is ignored may be meant so: the shape must agree
            pairs[name] = near
            used.add(near)
    for stack, names in by_stack(pairs).items():
        example = names[0]
        yield case.finding(
            UNMATCHED,
            f"{many(len(names), 'tensor')}{under(stack)} without a parameter, and as many parameters like them without a tensor: "
            f"{listed(names)}.",
            names=names, mend=_cure(case, names) or f"Rename `{printable(example)}` to `{printable(pairs[example])}`"
            + (" and the others alike." if len(names) > 1 else "."),
            wanted=printable(pairs[example]), found=printable(example),
        )  # fmt: skip
        case.take(names, [pairs[n] for n in names])


def _fits(case: Case, name: str, parameter: str) -> bool:
    tensor, wanted = case.facts.checkpoint.tensors.get(name), case.gaps[parameter].shape
    numbers = re.findall(r"(?<=\.)[0-9]+(?=\.)", name) == re.findall(r"(?<=\.)[0-9]+(?=\.)", parameter)
    # sorted: a matrix that the loader transposes fits too
    return numbers and (
        tensor is None or tensor.shape is None or wanted is None or sorted(tensor.shape) == sorted(wanted)
    )


def unmatched(case: Case) -> Iterator[Finding]:
    """Tensors that no parameter of the engine's model is called like."""
    names = [n for n, f in case.strays.items() if f.fate == "unmatched"]
    if not names:
        return
    finder = Nearest(p.name for p in case.plan.parameters)
    built = {p.name.rpartition(".")[0] for p in case.plan.parameters}
    for stack, group in by_stack(names).items():
        fate = case.strays[group[0]]
        near = finder.find(fate.into or fate.name)
        asked = f", looked up as `{printable(fate.into)}`" if fate.into and fate.into != fate.name else ""
        yield case.finding(
            UNMATCHED, f"{many(len(group), 'tensor')}{under(stack)} without a parameter: {listed(group)}{asked}.", names=group,
            blame="engine" if all(_by_its_rule(case, n, built) for n in group) else None,
            mend=_cure(case, group) or "Take them out, or name the class that has them in `architectures`.",
            wanted=f"nearest: {printable(near)}" if near else "no such parameter", found=printable(fate.into or fate.name),
        )  # fmt: skip
    case.take(names)


def _by_its_rule(case: Case, name: str, built: set[str]) -> bool:
    """Whether a rule of the engine gave the tensor a last segment of the engine's own (`w13_bias`), in a module that it built without."""
    fate = case.strays[name]
    return bool(
        fate.chain
        and fate.into
        and fate.into.rpartition(".")[2] != name.rpartition(".")[2]
        and fate.into.rpartition(".")[0] in built
    )


def missing(case: Case) -> Iterator[Finding]:
    """Parameters that no tensor fills: they keep whatever they were initialised with."""
    lacking = _lacking(case)
    for stack, group in by_stack(lacking).items():
        elsewhere = case.loads_elsewhere(())
        yield case.finding(
            MISSING, f"{many(len(group), 'parameter')}{under(stack)} not in any tensor, so left as initialised: {listed(group)}.",
            parameters=group, blame="engine" if elsewhere else "checkpoint",
            mend=f"Use {elsewhere.id}, which loads the checkpoint whole." if elsewhere else "Take them from the source of this checkpoint.",
            wanted=printable(group[0]), found="nothing stored",
        )  # fmt: skip
    case.take((), lacking.values())


def _lacking(case: Case) -> dict[str, str]:
    """What no tensor fills -> the parameter here: parts of a fused one by their own names, where an engine that fuses nothing lacks them
    too, so that one loss is told of all engines alike."""
    apart = {p.name for o in case.others for p in o.parameters if p.coverage == "none" and p.by_design is None}
    parts: dict[str, list[str]] = defaultdict(list)
    for part, owner in case.parts.items() if apart else ():
        parts[owner].append(part)
    found: dict[str, str] = {}
    for name, parameter in case.gaps.items():
        shared = [p for p in parts[name] if p in apart]
        if shared and (parameter.coverage == "partial" or len(shared) == len(parts[name])):
            found |= dict.fromkeys(shared, name)
        elif parameter.coverage == "none":
            found[name] = name
    return found


def partly(case: Case) -> Iterator[Finding]:
    """Fused parameters of which a part was never written."""
    gaps = [g for g, p in case.gaps.items() if p.coverage == "partial"]
    for stack, group in by_stack(gaps).items():
        first = case.gaps[group[0]]
        share = f"{first.share:.0%}" if first.share is not None else "a part"
        yield case.finding(
            PARTLY, f"{many(len(group), 'parameter')}{under(stack)} written only in part ({share} of `{printable(first.name)}`).",
            parameters=group, mend="Look for the missing parts (q, k, v; gate, up; single experts) in the source of this checkpoint.",
            wanted="all elements", found=f"{share} from {len(first.sources)} tensors",
        )  # fmt: skip
    case.take((), gaps)


_CLAIMS = {
    "claims-too-little": "The loader's list of what it loaded lacks {count} that it wrote whole: {names}.",
    "claims-too-much": "The loader's list of what it loaded has {count} into which it wrote nothing: {names}.",
}
"""By the kind of the engine's note."""


def claims(case: Case) -> Iterator[Finding]:
    """What the loader says of itself and observation denies."""
    for note in case.plan.notes:
        if says := _CLAIMS.get(note.kind):
            message = says.format(count=many(len(note.names), "parameter"), names=listed(note.names))
            yield case.finding(CLAIM, message, parameters=note.names, blame="engine")


def raises(case: Case) -> Iterator[Finding]:
    """The loader's own errors that no other finding is about; whatever was not reached because of them is told with them."""
    errors: dict[str, set[str]] = defaultdict(set)
    for failure in case.failures:
        if _explained(case, failure):
            continue
        errors[re.sub(r"[0-9]+", "#", failure.message)] |= set(failure.names)
    shown = {re.sub(r"[0-9]+", "#", f.message): f.message for f in reversed(case.failures)}
    # An engine that was told to build a class and came to no tensor stumbled over the config, unless another engine builds it.
    early = not case.plan.parameters and all(n.fate == "not_reached" for n in case.plan.names)
    config = early and case.loads_elsewhere(()) is None
    for text, names in errors.items():
        first = shown[text]
        yield case.finding(
            RAISES,
            f"The loader raises{' at the config, before any tensor' if config and not names else ''}: {printable(first)}",
            names=names,
            blame=None if names else "config" if config else "undecidable",
            mend="Correct config.json in that point." if config and not names else "",
            found=printable(first),
        )
    if case.plan.error is not None and not errors and not case.in_error:
        yield case.finding(
            RAISES, f"The loader raises: {printable(case.plan.error)}", blame="undecidable", found=printable(case.plan.error)
        )  # fmt: skip
    if case.not_reached and case.plan.error is None:
        names = set(case.not_reached)
        yield case.finding(
            SILENT, f"{many(len(names), 'tensor')} never asked for by the loader: {listed(names)}.", names=names
        )
    case.take(case.not_reached)


def _explained(case: Case, failure: Failure) -> bool:
    """Whether an error that is about no tensor names parameters alone whose absence was told."""
    if failure.names or not case.in_error:
        return False
    unwritten = {p.name for p in case.plan.parameters if p.coverage != "full"}
    named = unwritten.intersection(re.findall(r"'([^']+)'", failure.message))
    return bool(named) and named.isdisjoint(case.gaps)


def _cure(case: Case, names: Iterable[str]) -> str:
    elsewhere = case.loads_elsewhere(names)
    return f"Use {elsewhere.id}, which loads them." if elsewhere else ""

"""CK209, CK213, CK216: what trainers, wrappers and adapters leave in the names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from ckaudit.checks.case import Case, many, on_files
from ckaudit.checks.facts import ADAPTER, Facts, shape
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable
from ckaudit.renames import Inferred, Rename

WRONG = Check("CK209", "wrong prefix or segment in the names", "error")
REPEATED = Check("CK213", "repeated path segment", "warning")
UNMERGED = Check("CK216", "unmerged adapter inside a full model", "error")
CHECKS = (WRONG, REPEATED, UNMERGED)

WRAPPERS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_module",
    "module",
    "base_model",
)
"""Segments that torch.compile, FSDP, activation checkpointing, DeepSpeed, DDP and PEFT put into names; no model has them of its own
at the root. Used only where no engine can be asked."""
_WRAPPED = re.compile(r"(^|\.)(" + "|".join(WRAPPERS) + r")\.")


def wrong_prefix(case: Case) -> Iterator[Finding]:
    """Strays that one change of the path turns into the parameters that nobody wrote: one finding for each such change."""
    for _ in range(4):
        seen, found = case.rename()
        if found is None or not (len(found.pairs) > 2 or 2 * len(found.pairs) >= len(seen)):
            return
        if len(found.pairs) < 3 and not _alike(case, found, seen):
            return  # one or two likenesses may be chance
        yield _renamed(case, found, seen)


def _alike(case: Case, found: Inferred, seen: dict[str, list[str]]) -> bool:
    """Whether more than one tensor (or one under another prefix) would get its right name, and each the shape that is wanted there."""
    tensors = case.facts.checkpoint.tensors
    pairs = [(tensors.get(n), case.gaps.get(right)) for stray, right in found.pairs.items() for n in seen[stray]]
    return (len(pairs) > 1 or found.rename.kind == "root") and all(
        t is None or g is None or None in (t.shape, g.shape) or t.shape == g.shape for t, g in pairs
    )


def _renamed(case: Case, found: Inferred, seen: dict[str, list[str]]) -> Finding:
    stray, right = next(iter(found.pairs.items()))
    first = seen[stray][0]
    wanted = {case.parts.get(right, right) for right in found.pairs.values()}
    beside, joined = _joined(case, found, seen)
    names = [*(n for stray in found.pairs for n in seen[stray]), *beside]
    wanted |= joined
    lacking = sum(p in case.gaps for p in wanted)
    elsewhere = case.loads_elsewhere(names)
    copies = len(found.pairs) > len(set(found.pairs.values()))
    mend = (f"Use {elsewhere.id}, which loads them. Or: " if elsewhere else "") + _mend(
        case, found, first == stray, len(names)
    )
    if copies:
        mend = f"Keep one copy, and with it {found.rename.text}."
    finding = case.finding(
        WRONG,
        f"{many(len(names), 'tensor')} without a parameter and {many(lacking, 'parameter')} without a tensor, for one reason: "
        f"`{printable(first)}`{'' if first == stray else f' (looked up as `{printable(stray)}`)'} would have to be `{printable(right)}`."
        + (" There are several copies, and only one of them can be it." if copies else ""),
        names=names, blame="engine" if elsewhere else "checkpoint", wanted=printable(right), found=printable(stray),
        mend=mend,
    )  # fmt: skip
    case.take(names, wanted)
    return finding


def _joined(case: Case, found: Inferred, seen: dict[str, list[str]]) -> tuple[list[str], set[str]]:
    """Tensors under the same prefix that have no parameter's name without it either, since the engine has its own names for them (q, k
    and v joined, experts stacked): those in whose place of the model something is unwritten, and all that begin alike where nothing in
    the model does. With what is unwritten there."""
    if found.rename.kind != "root":
        return [], set()
    paired = set(found.pairs.values())
    unwritten = [n for n, p in case.gaps.items() if p.coverage == "none" and n not in paired]
    moved = {s: new for s in seen if s not in found.pairs and (new := found.rename.apply(s)) != s}
    root = ".".join((*found.rename.old[:1], ""))
    under = [s for s in seen if s.startswith(root) and s not in found.pairs] if found.rename.old else []
    foreign = 4 * len(found.pairs) >= len(under) > 0 and not any(p.name.startswith(root) for p in case.plan.parameters)
    if foreign:
        moved = {s: moved.get(s, s.removeprefix(root)) for s in under}
    marks = _marks if foreign else _place
    places = {mark for n in unwritten for mark in marks(n)}
    beside = [s for s, new in moved.items() if foreign or not places.isdisjoint(marks(new))]
    taken = {mark for s in beside for mark in marks(moved[s])}
    lacking = {n for n in unwritten if not taken.isdisjoint(marks(n))}
    if foreign:
        lacking |= _alone(
            case, [n for s in beside if places.isdisjoint(marks(moved[s])) for n in seen[s]], {*unwritten} - lacking
        )
    return [n for s in beside for n in seen[s]], lacking


def _alone(case: Case, names: list[str], unwritten: set[str]) -> set[str]:
    """What is unwritten and has the shape of just one of these tensors: a head that the engine calls otherwise."""
    shapes = Counter(t.shape for n in names if (t := case.facts.checkpoint.tensors.get(n)) is not None and t.shape)
    return {n for n in unwritten if (size := case.gaps[n].shape) is not None and shapes[size] == 1}


def _place(name: str) -> set[str]:
    """The path that the module of a tensor stands in, without the number of an expert."""
    segments = name.split(".")[:-2]
    while segments and segments[-1].isdecimal():
        segments.pop()
    return {".".join(segments)}


def _marks(name: str) -> set[str]:
    """By what a tensor is known under another root: its layer (`model.layers.3`), the end of its name, the end of the path it stands in."""
    segments = name.split(".")
    number = next((i for i, s in enumerate(segments) if s.isdecimal()), 0)
    ends = {".".join(path.split(".")[-2:]) for path in (name, *_place(name)) if "." in path}
    return {".".join(segments[: number + 1]), *ends}


def _mend(case: Case, found: Inferred, plain: bool, count: int) -> str:
    """What to do; as an argument of `from_pretrained` too, where the names reach the lookup as they are stored."""
    text = found.rename.text
    if not plain:
        return f"In the names as this engine looks them up, {text}: then all {count} are found."
    mend = f"{text[0].upper()}{text[1:]}: then all {count} are found."
    if case.plan.engine == "transformers":
        pattern, replacement = map(printable, found.rename.pattern)
        mend += f' For one load: from_pretrained(…, key_mapping={{"{pattern}": "{replacement}"}}).'
    return mend


def wrapped(facts: Facts) -> Iterator[Finding]:
    """A wrapper's segment at the root of every name, or anywhere inside: told from the files where no engine could be asked."""
    names = list(facts.checkpoint.tensors)
    if (
        not names
        or not facts.matching(_WRAPPED)
        or facts.config.get("peft_type")
        or "adapter_config.json" in facts.checkpoint.texts
    ):
        return
    for wrapper in WRAPPERS:
        root = f"{wrapper}."
        rooted = all(n.startswith(root) for n in names)
        inside = [n for n in names if f".{wrapper}." in f".{n}"] if wrapper.startswith("_") else []
        if not rooted and not inside:
            continue
        rename = Rename("root", (wrapper,)) if rooted and len(inside) in (0, len(names)) else Rename("drop", (wrapper,))
        if wrapper == "base_model" and all(n.startswith("base_model.model.") for n in names):
            rename = Rename("root", ("base_model", "model"))
        hit = [n for n in names if rename.apply(n) != n]
        text = rename.text
        yield on_files(
            facts, WRONG, f"{len(hit)} of {len(names)} names hold `{wrapper}.`, which the training wrapper added and no model has.", hit,
            mend=f"{text[0].upper()}{text[1:]}; save the unwrapped model next time.",
            wanted=printable(rename.apply(hit[0])), found=printable(hit[0]),
        )  # fmt: skip
        return


_LEAVES = (".weight.weight", ".bias.bias")


def repeated(facts: Facts) -> Iterator[Finding]:
    """A run of segments that stands twice in a row (`model.model.`, `layers.0.layers.0.`): some loaders forgive it, others do not.

    From the files alone only what no module tree would have is told: a run with a number in it, one three times over, or a leaf twice.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in _repeating(facts):
        run = repeat(name)
        if run is not None and (run[1] > 2 or any(s.isdecimal() for s in run[0]) or name.endswith(_LEAVES)):
            groups[shape(".".join(run[0]))].append(name)
    for run_text, names in groups.items():
        if len(names) > 1:
            yield on_files(
                facts, REPEATED, f"{len(names)} names repeat `{printable(run_text)}.` in a row.", names,
                mend="Keep the first and take the others out, unless the model's own module tree is built so.",
                wanted=printable(_once(names[0])), found=printable(names[0]),
            )  # fmt: skip


def repeated_here(case: Case) -> Iterator[Finding]:
    """Strays whose names repeat a run of segments, and that would be found without it: an error where an engine trips over it."""
    lacking = {*case.gaps, *case.parts}
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name, fate in case.strays.items():
        known = fate.into or name
        run = repeat(known) or repeat(name)
        right = _once(known) if repeat(known) else _once(name)
        if run is not None and right in lacking:
            groups[shape(".".join(run[0]))][name] = right
    for run_text, found in groups.items():
        names = list(found)
        if len(names) > 1 and any(s == "#" for s in run_text.split(".")):  # others are a wrong prefix like any
            yield case.finding(
                REPEATED, f"{len(names)} names repeat `{printable(run_text)}.` in a row, and are not found for that.", names=names,
                severity="error", mend="Keep the first and take the others out.", wanted=printable(found[names[0]]),
                found=printable(names[0]),
            )  # fmt: skip
            case.take(names, {case.parts.get(right, right) for right in found.values()})


def _repeating(facts: Facts) -> list[str]:
    """The names in whose shape some run of segments stands twice in a row: the only ones worth a closer look."""
    return [n for text, names in facts.shapes.items() if repeat(text) is not None for n in names]


def repeat(name: str) -> tuple[tuple[str, ...], int] | None:
    """The first run of segments of `name` that follows itself, and how many times it stands there; None when there is none."""
    segments = name.split(".")
    if len(set(segments)) == len(segments) or len(segments) > 64:
        return None
    for start in range(len(segments)):
        for length in range(1, (len(segments) - start) // 2 + 1):
            run = segments[start : start + length]
            times = 1
            while segments[start + times * length : start + (times + 1) * length] == run:
                times += 1
            if times > 1 and not all(s.isdecimal() or not s for s in run):
                return tuple(run), times
    return None


def _once(name: str) -> str:
    """`name` with its first repeated run standing once."""
    found = repeat(name)
    if found is None:
        return name
    run, times = (".".join(found[0]), found[1])
    return name.replace(".".join([run] * times), run, 1)


def accepted(case: Case) -> Iterator[Finding]:
    """Names with a repeated run that this engine loads into parameters without it: the next loader may take them literally."""
    groups: dict[str, list[str]] = defaultdict(list)
    forgiven = {n for note in case.plan.notes if note.kind == "doubled-prefix" for n in note.names}
    candidates = set(_repeating(case.facts))
    for fate in case.plan.names if candidates else ():
        if (
            fate.name in candidates
            and fate.fate == "loaded"
            and (fate.name in forgiven or _once(fate.name) == fate.into)
        ):
            run = repeat(fate.name)
            if run is not None:
                groups[shape(".".join(run[0]))].append(fate.name)
    told = {n for f in case.on_files if f.check == REPEATED.id for n in f.names}
    for text, names in groups.items():
        if not told.issuperset(names):
            yield case.finding(
                REPEATED, f"{len(names)} names repeat `{printable(text)}.`; this engine forgives it, others take names literally.",
                names=names, blame="checkpoint", mend=f"Save the names with one `{printable(text)}.`.",
                wanted=printable(_once(names[0])), found=printable(names[0]),
            )  # fmt: skip


def unmerged(facts: Facts) -> Iterator[Finding]:
    """Adapter tensors beside full weights: the model was saved before its adapter was merged."""
    tensors = facts.checkpoint.tensors
    hit = facts.matching(ADAPTER)
    if not hit or "adapter_config.json" in facts.checkpoint.texts or len(hit) == len(tensors):
        return
    kinds = sorted({m[2] for n in hit if (m := ADAPTER.search(n))})
    yield on_files(
        facts, UNMERGED, f"{len(hit)} tensors belong to an adapter that was never merged ({', '.join(map(printable, kinds))}).", hit,
        mend="Merge before saving: model = model.merge_and_unload(); model.save_pretrained(…).",
        wanted=printable(_without_adapter(hit[0])), found=printable(hit[0]),
    )  # fmt: skip


def unmerged_here(case: Case) -> Iterator[Finding]:
    """Takes the losses that `unmerged` explains: the adapter's tensors, and the parameters whose weight it moved into `base_layer`."""
    if any(f.check == UNMERGED.id for f in case.on_files):
        names = [n for n in case.strays if ADAPTER.search(n)]
        plain = {_without_adapter(case.strays[n].into or n) for n in names} | {_without_adapter(n) for n in names}
        case.take(names, [g for g in case.gaps if g in plain], UNMERGED.id)
    return iter(())


def _without_adapter(name: str) -> str:
    return ".".join(s for s in name.split(".") if not ADAPTER.match(s) and s != "default")

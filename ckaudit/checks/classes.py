"""CK405: one class named for another, seen as whole parts without a place, and the renames that go with them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckaudit.checks import ties
from ckaudit.checks.case import Case, many
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable
from ckaudit.renames import Inferred

WRONG_CLASS = Check("CK405", "class that does not fit the tensors", "error")
CHECKS = (WRONG_CLASS,)


def wrong_class(case: Case) -> Iterator[Finding]:
    """A text-only class on the tensors of a vision-language model, or the other way round: one word of the config, thousands of names.

    Told when one rename explains some of the losses and all the rest is whole parts that only one of the two sides has.
    """
    seen, found = case.rename()
    if found is None or len(found.pairs) < 3:
        return
    strays = {n for into, names in seen.items() if into not in found.pairs for n in names}
    gaps = {g for g in case.gaps.keys() - set(found.pairs.values()) if not ties.may_follow(case, g)}
    foreign, absent = _stray_parts(case, strays), _gap_parts(case, gaps)
    if foreign and absent:
        return  # the same part under two names: another rename, no other class
    whole = {n for parts in (foreign, absent) for names in parts.values() for n in names}
    if not whole or not whole.issuperset(strays | gaps):
        return
    yield _mistaken(case, found, foreign, absent)
    case.take(list(case.strays), list(case.gaps))


def _mistaken(case: Case, found: Inferred, foreign: dict[str, list[str]], absent: dict[str, list[str]]) -> Finding:
    arch = printable(case.plan.architecture or "the class")
    stray, right = next(iter(found.pairs.items()))
    facts = [f"`{printable(stray)}` would have to be `{printable(right)}`"]
    facts += [f"{_told(foreign, 'tensor')} {'has' if len(foreign) == 1 else 'have'} no place in it"] if foreign else []
    facts += [f"nothing is stored of its {_told(absent, 'parameter')}"] if absent else []
    facts += [note.text for note in case.plan.notes if note.kind == "config-class"]
    return case.finding(
        WRONG_CLASS, f"{arch} is not the class that these tensors were saved from: {'; '.join(facts)}.",
        names=list(case.strays), blame="config",
        mend="Name the class that the tensors belong to in `architectures`, with the config that goes with it.",
        wanted=printable(right), found=printable(stray),
    )  # fmt: skip


def whole_parts(case: Case) -> Iterator[Finding]:
    """Whole parts of the checkpoint that the class has no place for, and whole parts of the class that the checkpoint does not hold."""
    arch = printable(case.plan.architecture or "the class")
    strays = _stray_parts(case, case.strays)
    if strays:
        names = [n for part in strays.values() for n in part]
        yield case.finding(
            WRONG_CLASS, f"{_told(strays, 'tensor')} {'has' if len(strays) == 1 else 'have'} no place in {arch}.", names=names,
            blame=None if case.loads_elsewhere(names) else "config",
            mend="Name the class that has this part in `architectures`, or take the part out.",
            wanted=f"a class with {_first(strays)}", found=arch,
        )  # fmt: skip
        case.take(names)
    gaps = _gap_parts(case, (g for g, p in case.gaps.items() if p.coverage == "none"))
    if gaps:
        names = [n for part in gaps.values() for n in part]
        yield case.finding(
            WRONG_CLASS, f"{arch} has parts of which nothing is stored: {_told(gaps, 'parameter')}.", parameters=names, blame="config",
            mend="Name the class without this part in `architectures`, or add its weights.",
            wanted=f"{_first(gaps)}*", found="nothing stored",
        )  # fmt: skip
        case.take((), names)


_TASKS = re.compile(
    r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|ImageClassification|Reward\w*)$"
)


def other_task(case: Case) -> Iterator[Finding]:
    """A class for a task on the weights of another task or of none: only heads lack, and only heads are left over."""
    arch = case.plan.architecture or ""
    lacking = [g for g, p in case.gaps.items() if p.coverage == "none"]
    if not _TASKS.search(arch) or not lacking or len(lacking) != len(case.gaps):
        return
    strays = list(case.strays)
    if any(s.isdecimal() for n in (*lacking, *strays) for s in n.split(".")):
        return
    left = f", and `{printable(strays[0])}` is left over" if strays else ""
    yield case.finding(
        WRONG_CLASS, f"{printable(arch)} has a head of its own, and nothing is stored of it: `{printable(lacking[-1])}`{left}. "
        "It would be as initialised.", names=strays, parameters=lacking, blame="config",
        mend="Name the class that was saved in `architectures`; or train this head first.",
        wanted=printable(lacking[-1]), found=printable(strays[0]) if strays else "nothing stored",
    )  # fmt: skip
    case.take(strays, lacking)


def _stray_parts(case: Case, strays: Iterable[str]) -> dict[str, list[str]]:
    return _parts(strays, (n.name for n in case.plan.names)) if case.strays else {}


def _gap_parts(case: Case, gaps: Iterable[str]) -> dict[str, list[str]]:
    return _parts(gaps, (p.name for p in case.plan.parameters)) if case.gaps else {}


def _told(parts: dict[str, list[str]], word: str) -> str:
    return ", ".join(f"`{printable(p)}.` ({many(len(names), word)})" for p, names in parts.items())


def _first(parts: dict[str, list[str]]) -> str:
    return f"{printable(next(iter(parts)))}."


def _parts(some: Iterable[str], every: Iterable[str]) -> dict[str, list[str]]:
    """The outermost paths (without numbers, at most three segments) of which everything is in `some`: at least 8 names in 3 modules, and
    beside such a part smaller ones too (the projector of a vision tower)."""
    chosen = set(some)
    sizes: dict[str, int] = defaultdict(int)
    inside: dict[str, list[str]] = defaultdict(list)
    known: dict[str, list[str]] = {}
    for name in every:
        head = ".".join(name.split(".", 3)[:3]) if name.count(".") > 2 else name.rpartition(".")[0]
        if head not in known:
            known[head] = list(_heads(head))
        for path in known[head]:
            sizes[path] += 1
            if name in chosen:
                inside[path].append(name)
    whole = {p for p, names in inside.items() if len(names) == sizes[p]}
    large = {p for p in whole if _is_part(inside[p])}
    whole = {p for p in whole if p in large or not any(q.startswith(f"{p}.") for q in large)} if large else large
    return {p: inside[p] for p in sorted(whole) if not any(p.startswith(f"{q}.") for q in whole)}


def _heads(module: str) -> Iterator[str]:
    """`module` and the paths above it, up to the first number."""
    segments = module.split(".")
    for i, segment in enumerate(segments):
        if segment.isdecimal() or not segment:
            return
        yield ".".join(segments[: i + 1])


def _is_part(names: list[str]) -> bool:
    return len(names) >= 8 and len({n.rpartition(".")[0] for n in names}) > 2

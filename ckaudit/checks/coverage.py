"""CK308, and CK307 of an engine: plain weights where the declared quantisation is for quantised ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckaudit.checks.case import Case, listed, many, on_files
from ckaudit.checks.facts import Facts, shape, split
from ckaudit.checks.homes import Homes, by_owner
from ckaudit.checks.quantisation import IGNORE_LIST, JOINED, declared, ignored_by, misnamed, targeted
from ckaudit.checks.quantisers import FULL, TAIL, recognised
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable
from ckaudit.plan import Step

PLAIN = Check("CK308", "plain weights in a quantised checkpoint", "warning")
CHECKS = (PLAIN,)


def plain(facts: Facts) -> Iterator[Finding]:
    """Plain weights whose like in other layers are quantised and that no config entry exempts; and experts that are all exempt."""
    config = declared(facts)
    quantised = {
        m for s, kinds in recognised(facts).items() if s.name != "MLX" for group in kinds.values() for m in group
    }
    if not config or not quantised:
        return
    found = dense(facts)
    like = {shape(m) for m in quantised}
    odd = [m for m in found if shape(m) in like and targeted(config, m)]
    if odd:  # not those that the ignore list means and misspells: that is told of the list
        _, wrong = misnamed(facts)
        meant = set(wrong.pairs.values()) if wrong is not None else set()
        odd = [m for m in odd if meant.isdisjoint(_paths(m))]
    if odd:
        yield on_files(
            facts, PLAIN,
            f"{many(len(odd), 'module')} with plain weights: the same in other layers are quantised, and the config exempts none of them.",
            [f"{m}.weight" for m in odd], blame="config",
            mend="Add them to the ignore list of the quantisation, or take the quantised tensors from the source of this checkpoint.",
            wanted="quantised, or in the ignore list", found="plain",
        )  # fmt: skip
    yield from _experts(facts, found)


def _paths(module: str) -> Iterator[str]:
    """The module and every path above it."""
    yield module
    yield from (module[:i] for i, c in enumerate(module) if c == ".")


def dense(facts: Facts) -> list[str]:
    """The modules that hold one plain matrix (and maybe a bias)."""
    tensors = facts.checkpoint.tensors
    leaves = [
        group for kind, group in facts.modules.items() if {n.partition(":")[0] for n in kind} <= {"weight", "bias"}
    ]
    found = (tensors.get(f"{m}.weight") for group in leaves for m in group)
    return [
        t.name.removesuffix(".weight") for t in found
        if t is not None and t.dtype in (None, *FULL) and (t.shape is None or len(t.shape) == 2)
    ]  # fmt: skip


def _experts(facts: Facts, plain: list[str]) -> Iterator[Finding]:
    """Routed experts that are most of the checkpoint and all in the ignore list: quantised in name only."""
    config = declared(facts)
    routed = [m for m in plain if re.search(r"(^|\.)experts\.[0-9]+\.", m)]
    entry = ignored_by(config, routed[0]) if routed else None
    if entry is None or not all(ignored_by(config, m) for m in routed):
        return
    names = [f"{m}.weight" for m in routed]
    size, whole = facts.size(names), facts.size(facts.checkpoint.tensors)
    share = size / whole if whole else len(names) / len(facts.checkpoint.tensors)
    if share > 0.5:
        yield on_files(
            facts, PLAIN,
            f"The ignore list exempts every routed expert (`{printable(entry)}`): {int(100 * share)}% of the checkpoint stays plain.",
            names, blame="config", mend="Quantise again with the experts among the targets, if that was meant.",
            wanted="quantised experts", found=f"{many(len(names), 'plain tensor')}",
        )  # fmt: skip


def quantised_here(case: Case) -> Iterator[Finding]:
    """Plain weights for modules that this engine builds quantised: they have no place, do not fit, or are cast without a scale."""
    config = declared(case.facts)
    lacking = config and any(TAIL.search(g) for g in case.gaps)
    cast = {n for m in case.mismatches if m.kind == "dtype" for n in m.names}
    tensors = case.facts.checkpoint.tensors
    plain = [
        n for n in (*case.strays, *case.not_reached, *cast) if n.endswith(".weight") and tensors[n].dtype in (None, *FULL)
    ] if lacking else []  # fmt: skip
    if not plain:
        return
    homes, owned = Homes(case.plan), by_owner(case.gaps)
    gaps = {n: found for n in plain if (found := _lacks(case, homes, owned, n))}
    exempt = [n for n in gaps if ignored_by(config, n.removesuffix(".weight"))]
    if exempt:
        yield _lost_entry(case, exempt)
    rest = [n for n in gaps if n not in set(exempt)]
    idle = {n for f in case.on_files if f.check == IGNORE_LIST.id for n in f.names}
    wrong = [n for n in rest if n.removesuffix(".weight") in idle]
    for names, check, why in (
        (wrong, IGNORE_LIST, "and the ignore list names them as no module is called"),
        ([n for n in rest if n not in set(wrong)], PLAIN, "and nothing in the config exempts them"),
    ):
        if names:
            yield case.finding(
                check,
                f"{many(len(names), 'plain weight')} for modules that this engine builds quantised, {why}: {listed(names)}.",
                names=names, severity="error", blame="config", wanted=_first(case, names[0]), found=printable(names[0]),
                mend="Write the ignore list with the names of these modules.",
            )  # fmt: skip
    case.take(gaps, {g for found in gaps.values() for g in found})


def _lacks(case: Case, homes: Homes, owned: Mapping[str, list[str]], name: str) -> list[str]:
    """The companions that the engine built for the module of a plain weight and found nothing for, and with them its weight."""
    module = name.removesuffix(".weight")
    inside = homes.among(owned, module)
    if not homes.of(module):
        stem, _, leaf = module.rpartition(".")
        known = {module, (_into(case, name) or name).removesuffix(".weight"), f"{stem}.{JOINED.get(leaf, leaf)}"}
        inside = [(g, split(g)[1]) for m in known for g in _inside(owned, m)]
    if not any(TAIL.search(leaf) for _, leaf in inside):
        return []
    return [g for g, leaf in inside if leaf == "weight" or TAIL.search(leaf)]


def _inside(owned: Mapping[str, list[str]], module: str) -> Iterator[str]:
    """The parameters of a module, those of a fused stack (`experts.down_proj_scales`) too."""
    yield from owned.get(module, ())
    yield from (g for g in owned.get(module.rpartition(".")[0], ()) if split(g)[0] == module)


def _into(case: Case, name: str) -> str | None:
    fate = case.strays.get(name) or case.not_reached.get(name)
    return fate.into if fate is not None else None


def _lost_entry(case: Case, names: list[str]) -> Finding:
    name = names[0]
    module, right = name.removesuffix(".weight"), (_into(case, name) or name).removesuffix(".weight")
    entry = ignored_by(declared(case.facts), module) or ""
    chain = case.strays[name].chain if name in case.strays else ()
    moved = _through(chain, module)
    why = (
        f"its rules make `{printable(right)}` of the tensor's module and `{printable(moved)}` of the entry"
        if chain and moved != right
        else f"it looks for `{printable(right)}` in the list"
    )
    config = declared(case.facts)
    if (
        config.get("quant_method") == "compressed-tensors"
        and not entry.startswith("re:")
        and entry.count(".") < module.count(".")
    ):
        return case.finding(
            IGNORE_LIST,
            f"{many(len(names), 'plain weight')} meant by `{printable(entry)}` in the ignore list: compressed-tensors takes whole names "
            "of modules, or `re:` and a pattern.",
            names=names, severity="error", blame="config", wanted=printable(module), found=printable(entry),
            mend=f"Write `re:.*{printable(entry)}.*`, or each module.",
        )  # fmt: skip
    return case.finding(
        IGNORE_LIST,
        f"{many(len(names), 'plain weight')} in the ignore list (`{printable(entry)}`), and this engine builds their modules quantised: "
        f"{why}.",
        names=names, severity="error", blame="engine", wanted=printable(right), found=printable(entry),
        mend=f"Use a release that applies the ignore list to its own names, or add `{printable(right)}` to it.",
    )  # fmt: skip


def _through(chain: tuple[Step, ...], module: str) -> str:
    """What the rules that renamed a tensor make of its module's name by itself; those that join modules are left out."""
    for step in chain:
        if step.rule == "prefix" and module.startswith(step.key):
            module = (step.after or "")[: len(step.after or "") - len(step.before) + len(step.key)] + module[
                len(step.key) :
            ]
        elif step.rule == "substring" and step.key in module and step.after is not None:
            start = step.before.find(step.key)
            new = step.after[start : len(step.after) - (len(step.before) - start - len(step.key))]
            module = module.replace(step.key, new, 1)
    return module


def _first(case: Case, name: str) -> str:
    right = (_into(case, name) or name).removesuffix(".weight")
    return printable(next((g for g in case.gaps if split(g)[0] == right), right))

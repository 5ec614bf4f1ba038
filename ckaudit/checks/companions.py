"""CK304, CK305: what belongs to a quantised weight, and the scheme on disk against the one that the config declares."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ckaudit.checks.case import Case, listed, many, on_files
from ckaudit.checks.facts import Facts, joined, split
from ckaudit.checks.homes import Homes, by_owner
from ckaudit.checks.quantisation import declared, elsewhere, ignored_by
from ckaudit.checks.quantisers import BASES, SCHEMES, TAIL, Scheme, certain, has, may_be_quantised, recognised
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable

COMPANION = Check("CK304", "quantised weight without its companion", "error")
SCHEME = Check("CK305", "quantisation on disk against the config", "error")
CHECKS = (COMPANION, SCHEME)


_ORPHANS = re.compile(
    r"(weight_scale|weight_scale_inv|weight_zero_point|weight_shape|weight_g_idx|weight_global_scale|qzeros|g_idx)$"
)
_KV = re.compile(r"(^|\.)(k_scale|v_scale|q_scale|kv_scale|prob_scale|output_scale|kv_cache_scaling_factor)$")


def companions(facts: Facts) -> Iterator[Finding]:
    """Modules that lack what their scheme needs, or what all the others of their kind have; and companions whose weight is not there."""
    told: set[str] = set()
    for scheme, kinds in recognised(facts).items():
        total = sum(map(len, kinds.values()))
        counts: Counter[str] = Counter()
        for leaves, modules in kinds.items():
            counts.update({leaf: len(modules) for leaf in leaves})
        usual = {leaf for leaf in scheme.usual if 10 * counts[leaf] >= 9 * total}
        scaled = _declares(facts) or any(counts[leaf] for need in scheme.needs for leaf in need)
        lacking: dict[str, list[str]] = defaultdict(list)
        for leaves, modules in kinds.items():
            needs = [need for need in scheme.needs if not any(has(leaves, n) for n in need)] if scaled else []
            for text in [_likely(need, counts) for need in needs] + sorted(usual - leaves):
                lacking[text] += modules
        for leaf, modules in lacking.items():
            told.update(modules)
            yield _lacks(facts, scheme, leaf, modules)
    if not may_be_quantised(facts):
        return
    orphans = [
        joined(m, leaf)
        for leaves, modules in facts.modules.items()
        if not any(n.partition(":")[0] in BASES for n in leaves)
        for leaf in leaves
        if _ORPHANS.match(leaf)
        for m in modules
        if m not in told
    ]
    if orphans:
        yield on_files(
            facts, COMPANION, f"{len(orphans)} scales or indices have no weight beside them: {listed(orphans)}.", orphans,
            mend="Take the weights from the source of this checkpoint, or the companions out.",
            wanted="a weight", found=printable(orphans[0]),
        )  # fmt: skip


def companions_here(case: Case) -> Iterator[Finding]:
    """Takes what `companions` explains: the parameters that the tensors which are not there would have filled."""
    lacking: dict[str, set[str]] = defaultdict(set)
    for name in (n for f in case.on_files if f.check == COMPANION.id for n in f.names):
        module, leaf = split(name)
        lacking[module].update(BASES if name in case.facts.checkpoint.tensors else (leaf,))
    cast = [n for m in case.mismatches if m.kind == "dtype" for n in m.names if split(n)[0] in lacking]
    case.take(
        cast, because=COMPANION.id
    )  # without its companion the stored integers are read as if they were the weight
    if lacking and case.gaps:
        homes, owned = Homes(case.plan), by_owner(case.gaps)
        for module, leaves in lacking.items():
            inside = homes.among(owned, module)
            exact = [g for g, leaf in inside if leaf in leaves]
            case.take((), exact or [g for g, leaf in inside if TAIL.search(leaf)], because=COMPANION.id)
    return iter(())


def _declares(facts: Facts) -> bool:
    return bool(declared(facts)) or bool(elsewhere(facts))


def _likely(need: tuple[str, ...], counts: Counter[str]) -> str:
    return max(need, key=lambda leaf: counts[leaf])


def _lacks(facts: Facts, scheme: Scheme, leaf: str, modules: list[str]) -> Finding:
    shown = leaf.rstrip("*")
    names = [joined(m, shown) for m in modules]
    natural = shown.endswith("g_idx") and not declared(facts).get("desc_act")  # loaders then count the groups
    return on_files(
        facts, COMPANION, f"{many(len(modules), 'module')} quantised as {scheme.name} without `{shown}`: {listed(names)}.", names,
        mend="Take the tensors from the source of this checkpoint, or quantise it again.", wanted=shown, found="nothing stored",
        severity="warning" if natural else None,
    )  # fmt: skip


_LATER = frozenset("bitsandbytes fp8 torchao hqq quanto eetq higgs fp_quant sinq mxfp4 metal four_over_six".split())  # noqa: SIM905
"""Methods that also quantise plain weights while loading: nothing quantised on disk is then as it should be."""


def schemes(facts: Facts) -> Iterator[Finding]:
    """Quantised tensors that no config declares, a declared quantisation of which nothing is on disk, and one declared as another."""
    on_disk = recognised(facts)
    found = {s: kinds for s, kinds in on_disk.items() if certain(s, kinds)}
    config = declared(facts)
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    modules = {m for kinds in found.values() for group in kinds.values() for m in group}
    names = [n for n in facts.checkpoint.tensors if split(n)[0] in modules] if modules else []
    stored = ", ".join(s.name for s in found)
    if found and not config:
        other = elsewhere(facts)
        yield on_files(
            facts, SCHEME, f"{len(modules)} modules are quantised ({stored}), and config.json has no quantization_config"
            + (f"; the scheme stands in {printable(other)}, which not every loader reads." if other else "."),
            names, blame="config",
            mend=f"Copy the scheme {f'from {printable(other)} ' if other else ''}into config.json as quantization_config.",
            wanted="quantization_config", found="none",
        )  # fmt: skip
    elif method and not found and facts.checkpoint.tensors and method not in _LATER and not _dense(config):
        known = {m for s in SCHEMES for m in s.methods}
        if method in known and not any(method in s.methods for s in on_disk):
            yield on_files(
                facts, SCHEME, f"The config declares {printable(method)} quantisation, and no tensor is quantised.", blame="config",
                mend="Take quantization_config out of config.json, or store the quantised tensors.",
                wanted=printable(method), found="plain tensors",
            )  # fmt: skip
    elif method and found and not any(method in s.methods for s in found) and any(method in s.methods for s in SCHEMES):
        yield on_files(
            facts, SCHEME, f"The config declares {printable(method)}, and the tensors are stored as {stored}.", names, blame="config",
            mend="Declare the scheme that is on disk.", wanted=printable(method), found=stored,
        )  # fmt: skip


def _dense(config: dict[str, Any]) -> bool:
    """Whether the declared quantisation leaves the weights alone (only the KV cache, or not compressed yet)."""
    groups = config.get("config_groups")
    return config.get("format") == "dense" or config.get("quantization_status") == "frozen" or groups == {}


def mlx_only(case: Case) -> Iterator[Finding]:
    """Weights that MLX quantised, on an engine that does not know them: its error or its losses have this one cause."""
    modules = [
        m for s, kinds in recognised(case.facts).items() if s.name == "MLX" for group in kinds.values() for m in group
    ]
    lost = case.plan.error is not None or any(TAIL.search(n) for n in case.strays)
    if modules and lost and case.plan.engine != "mlx":
        yield case.finding(
            SCHEME, f"{len(modules)} modules are quantised by MLX, in a format that {case.plan.id} does not read.",
            names=[f"{m}.scales" for m in modules], blame="checkpoint",
            mend="Load it with MLX (mlx-lm, mlx-vlm), or take the original weights.", wanted="a scheme of the engine's own", found="MLX",
        )  # fmt: skip
        case.take([*case.strays, *case.not_reached], list(case.gaps))
        case.failures.clear()


_OTHER_ENGINE = "Use an engine that reads this scheme for these modules, or the checkpoint that was quantised."


def unquantised_modules(case: Case) -> Iterator[Finding]:
    """The same as `unquantised_here`, only of modules that the engine has under the looked-up name: no rename could mend those."""
    if not any(n in case.strays for n in case.facts.matching(TAIL)):
        return iter(())
    built = {split(p.name)[0] for p in case.plan.parameters}
    return _unquantised(case, {n for n, f in case.strays.items() if split(f.into or n)[0] in built})


def unquantised_here(case: Case) -> Iterator[Finding]:
    """Strays that belong to a quantised weight: this engine builds those modules unquantised, or knows no such companions."""
    return _unquantised(case, set(case.strays))


def _unquantised(case: Case, among: set[str]) -> Iterator[Finding]:
    told = {n for f in case.on_files if f.check in (COMPANION.id, SCHEME.id) for n in f.names}
    known = told.union(case.facts.matching(TAIL), _of_common_names(case.facts))
    strays = [n for n in case.strays if n in among and n in known]
    cache = [n for n in case.facts.matching(_KV) if n in among]
    if cache:
        yield case.finding(
            SCHEME, f"{len(cache)} scales of the KV cache are left out; a quantised cache then uses 1.0: {listed(cache)}.", names=cache,
            severity="warning", mend="Load with the KV cache in its full dtype, or use an engine that reads these scales.",
        )  # fmt: skip
        case.take(cache)
    explained = [n for n in strays if n in told]
    case.take(explained, _same_modules(case, explained), because="CK30")
    rest = [n for n in strays if n in case.strays]
    if rest:
        entry = ignored_by(declared(case.facts), split(rest[0])[0])
        why = f" (the ignore list's {printable(entry)} matches them)" if entry else ""
        gaps = _same_modules(case, rest)
        modules = {split(n)[0] for n in rest}
        cast = [n for m in case.mismatches for n in m.names if split(n)[0] in modules]
        yield case.finding(
            SCHEME,
            f"{len(rest)} companions of quantised weights have no place in this model, built without them{why}: {listed(rest)}.",
            names=rest, blame="config" if entry else None if case.loads_elsewhere(rest) else "engine",
            mend="Take the entry out of the ignore list." if entry else _OTHER_ENGINE,
            wanted="modules built for this scheme", found="modules without",
        )  # fmt: skip
        case.take([*rest, *cast], gaps)


def _of_common_names(facts: Facts) -> Iterator[str]:
    """Companions that only their module tells from tensors of other models."""
    for scheme, kinds in recognised(facts).items():
        if scheme.common:
            yield from (
                joined(m, leaf)
                for leaves, ms in kinds.items()
                for leaf in leaves - {"bias"}
                if ":" not in leaf
                for m in ms
            )


def _same_modules(case: Case, names: Iterable[str]) -> list[str]:
    """Gaps in the modules of these tensors, under the names the engine knows them by; for experts, in the stack they would join."""
    modules: set[str] = set()
    for name in names:
        for known in (name, case.strays[name].into if name in case.strays else None):
            if known is not None:
                head, experts, _ = known.partition(".experts.")
                modules |= {split(known)[0], f"{head}.experts"} if experts else {split(known)[0]}
    return [g for g in case.gaps if split(g)[0] in modules or g.rpartition(".")[0] in modules]

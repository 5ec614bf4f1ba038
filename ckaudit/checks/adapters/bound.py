"""CK901, CK902: modules for which the base has no place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckaudit.adapters import Adapter
from ckaudit.adapters.base import Base
from ckaudit.adapters.binding import Binding, Outcome, expected, head_of_task, would_bind
from ckaudit.adapters.dialects import ROOT
from ckaudit.checks.adapters.rows import (
    NOTHING,
    PARTLY,
    finding,
    names_of,
)
from ckaudit.checks.case import many
from ckaudit.findings import Finding
from ckaudit.naming import printable
from ckaudit.renames import infer_rename


def unbound(adapter: Adapter, base: Base, judged: Sequence[Binding]) -> Iterator[Finding]:
    """Modules that the base has not; what every engine misses alike is told once."""
    groups: dict[tuple[str, ...], list[Binding]] = {}
    for binding in judged:
        names = names_of(o.unit for o in _absent(binding))
        groups.setdefault((str(binding.bound), *names), []).append(binding)
    for bindings in groups.values():
        if not (absent := _absent(bindings[0])):
            continue
        elsewhere = _binds_elsewhere(absent, judged)
        if len(bindings) > 1 and len(bindings) == len(judged):
            yield _missing(adapter, base, bindings, absent, None)
        else:
            for binding in bindings:
                yield _missing(adapter, base, [binding], _absent(binding), elsewhere)


def _absent(binding: Binding) -> list[Outcome]:
    return [o for o in binding.outcomes if o.state == "absent" and not o.unit.parts[0].doubled]


def _missing(
    adapter: Adapter, base: Base, bindings: Sequence[Binding], absent: Sequence[Outcome], elsewhere: Binding | None
) -> Finding:  # fmt: skip
    mend, wanted = _mend(base, bindings[0], absent)
    if elsewhere is not None:
        mend = f"Use {elsewhere.plan.id}, where they bind. Or: {mend}"
    nothing, first = not bindings[0].bound, absent[0]
    looked = "" if first.looked == first.unit.path else f" (looked up as `{printable(first.looked)}`)"
    said = " ".join(dict.fromkeys(_consequence(b, nothing) for b in bindings))
    return finding(
        adapter, NOTHING if nothing else PARTLY,
        f"{bindings[0].bound} of {many(len(adapter.modules), 'module')} bind: "
        f"the base has no `{printable(first.unit.path)}`{looked}. {said}",
        names_of(o.unit for o in absent), engine=bindings[0].plan.id if len(bindings) == 1 else None,
        blame="engine" if elsewhere else "checkpoint", mend=mend, wanted=wanted, found=printable(first.unit.names[0]),
    )  # fmt: skip


def bare(adapter: Adapter, binding: Binding) -> Iterator[Finding]:
    """Names without PEFT's root: what loads adapters into the model itself finds them, `PeftModel` does not."""
    units = [o.unit for o in binding.outcomes if o.state == "bound" and not o.unit.parts[0].rooted]
    if binding.kind == "peft" and units:
        first = printable(units[0].names[0])
        yield finding(
            adapter, PARTLY, f"{many(len(units), 'module')} of {len(adapter.modules)} have names without `{ROOT}`: "
            "PeftModel.from_pretrained passes over them and runs the base model; model.load_adapter and vLLM find them.", names_of(units),
            engine=binding.plan.id, severity="warning", mend=f"Add the prefix `{ROOT}` to the names, or load with model.load_adapter.",
            wanted=f"{ROOT}{first}", found=first,
        )  # fmt: skip


def replaced(adapter: Adapter, binding: Binding) -> Iterator[Finding]:
    lost = [u for u in adapter.replaced if not binding.surface.holds(u.path) and not u.parts[0].doubled]
    if binding.kind != "vllm" and lost and head_of_task(adapter) is None:
        yield finding(
            adapter, PARTLY, f"The base lacks {many(len(lost), 'module')} that the adapter replaces: `{printable(lost[0].path)}`.",
            names_of(lost), engine=binding.plan.id, severity="warning", wanted="a module of the base", found=printable(lost[0].path),
            mend="Load the base as the class that the adapter was trained on.",
        )  # fmt: skip


def _consequence(binding: Binding, nothing: bool) -> str:
    what = "the base model alone" if nothing else "the base model in their places"
    if binding.kind == "peft":
        return f"PEFT warns of missing keys and runs {what}."
    if binding.kind == "vllm":
        raises = any(o.raises for o in _absent(binding))
        return "vLLM raises." if raises else f"vLLM says nothing and answers with {what}."
    return f"What loads it runs {what}."


def _binds_elsewhere(absent: Sequence[Outcome], judged: Sequence[Binding]) -> Binding | None:
    wanted = {id(o.unit) for o in absent}
    return next(
        (b for b in judged if wanted <= {id(o.unit) for o in b.outcomes if o.state == "bound"}),
        None,
    )


def _mend(base: Base, binding: Binding, absent: Sequence[Outcome]) -> tuple[str, str]:
    """The change of names that makes the most modules bind, verified; and the name that the first one would have."""
    paths = [o.unit.path for o in absent if not o.unit.parts[0].flat]
    inferred = infer_rename(paths, expected(binding, base)) if paths else None
    good = {p: q for p, q in inferred.pairs.items() if would_bind(binding, q)} if inferred else {}
    if inferred is None or 2 * len(good) < len(absent):
        named = "base_model_name_or_path in adapter_config.json names the model that it was trained on."
        return f"Check that this is the adapter's base: {named}", "a module of the base"
    text = inferred.rename.text
    rooted = next(o for o in absent if o.unit.path in good).unit.parts[0].rooted
    after = f" after `{ROOT}`" if rooted else ""
    mend = f"{text[0].upper()}{text[1:]}{after}: then {len(good)} of the {len(absent)} bind."
    if binding.kind == "peft" and rooted:
        pattern, replacement = map(printable, inferred.rename.pattern)  # PEFT maps names without its root
        mend += f' For one load: PeftModel.from_pretrained(…, key_mapping={{"{pattern}": "{replacement}"}}).'
    stray, right = next(iter(good.items()))
    unit = next(o.unit for o in absent if o.unit.path == stray)
    return mend, printable(unit.names[0].replace(stray, right, 1))

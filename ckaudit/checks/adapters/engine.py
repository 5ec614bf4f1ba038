"""CK904, CK907, CK909, CK910: what one engine does not take of an adapter that binds."""

from __future__ import annotations

from collections.abc import Iterator

from ckaudit.adapters import Adapter, peft, shapes, vllm
from ckaudit.adapters.binding import Binding
from ckaudit.adapters.dialects import FUSED, ROOT, Part
from ckaudit.checks.adapters.rows import (
    FORM,
    REFUSED,
    UNSERVED,
    UNTARGETED,
    finding,
    names_of,
)
from ckaudit.checks.case import many
from ckaudit.findings import Blame, Finding
from ckaudit.naming import printable
from ckaudit.plan import Plan

MERGE = "Merge the adapter into the base and serve that."
MAX_LORA_RANK = 16
"""vLLM's default for `--max-lora-rank` (vllm/config/lora.py, 0.24 to 0.33)."""


def refuses(adapter: Adapter, binding: Binding) -> bool:
    """Whether the software does not get as far as the names."""
    return (
        binding.kind == "vllm" and binding.of_base is not None and bool(vllm.refused(adapter.config, binding.of_base))
    )


def forms(adapter: Adapter, binding: Binding) -> Iterator[Finding]:
    lost = [o for o in binding.outcomes if o.state == "form"]
    fused = [o for o in lost if FUSED.fullmatch(o.looked) and not o.raises.endswith("is unsupported LoRA weight")]
    if fused:
        names = names_of(o.unit for o in fused)
        what = "raises" if any(o.raises for o in fused) else "drops them or breaks on them"
        yield finding(
            adapter, FORM, f"{many(len(names), 'tensor')} adapt fused experts (`target_parameters`), for which {binding.plan.id} has no "
            f"place in this architecture: it {what}.", names, engine=binding.plan.id, severity="error", blame="engine",
            mend="Merge the adapter into the base, or use a release and options that take it (--enable-mixed-moe-lora-format).",
            wanted="adapters of single experts, or an architecture that takes fused ones", found=printable(names[0]),
        )  # fmt: skip
    if binding.kind != "vllm" or binding.of_base is None or refuses(adapter, binding):
        return
    parts = [p for o in lost if o not in fused for p in o.unit.parts]
    names = [p.name for p in parts if not vllm.reads(p.name)] or [p.name for p in parts]
    names += vllm.unread(adapter, binding.of_base)
    if names:
        own = all(_as_peft_saves(p) for u in adapter.units for p in u.parts if p.name in set(names))
        yield finding(
            adapter, FORM, f"{binding.plan.id} cannot read {many(len(names), 'name')}, such as `{printable(names[0])}`: it raises.", names,
            engine=binding.plan.id, severity="error", blame="engine" if own else "checkpoint",
            mend=MERGE if own else "Save the adapter with PEFT's save_pretrained: it writes the names that engines read.",
            wanted="….lora_A.weight, ….lora_B.weight", found=printable(names[0]),
        )  # fmt: skip


def _as_peft_saves(part: Part) -> bool:
    """Whether PEFT writes this name: with its root, and without the adapter's label (`lora_A.default.weight`)."""
    return part.rooted and part.name.endswith((part.leaf, f"{part.leaf}.weight", f"{part.leaf}.bias"))


def fused(adapter: Adapter, *, bound: bool) -> Iterator[Finding]:
    """Without an engine that would know: adapters of fused experts are of a form that only some software reads."""
    names = names_of(u for u in adapter.modules if FUSED.fullmatch(u.path))
    if names:
        yield finding(
            adapter, FORM, f"{many(len(names), 'tensor')} adapt fused experts (`target_parameters`): PEFT 0.17 and newer reads them, vLLM "
            "only for a few architectures; elsewhere they are dropped.", names, severity="note" if bound else None,
            mend="Ask the engine that will serve it: --engine vllm==X. Or merge the adapter into the base.",
            wanted="adapters of modules", found=printable(names[0]),
        )  # fmt: skip


def targets(adapter: Adapter, binding: Binding) -> Iterator[Finding]:
    for state in ("untargeted", "converted"):
        lost = [o for o in binding.outcomes if o.state == state]
        if not lost:
            continue
        names = names_of(o.unit for o in lost)
        engine = state == "converted"
        why = (
            f"{lost[0].why}: no adapter is put on the module itself" if engine else "`target_modules` does not name it"
        )
        yield finding(
            adapter, UNTARGETED, f"{many(len(lost), 'module')} of {len(adapter.modules)} get no adapter, such as "
            f"`{printable(lost[0].unit.path)}`: {printable(why)}. PEFT passes over their {many(len(names), 'tensor')}.", names,
            engine=binding.plan.id, blame="engine" if engine else "config",
            mend="Merge the adapter with the releases that it was trained with (transformers 4)." if engine
            else "Add them to `target_modules` in adapter_config.json.",
            wanted=printable(lost[0].unit.path), found=", ".join(sorted(map(printable, _asked(adapter))))[:200],
        )  # fmt: skip


def _asked(adapter: Adapter) -> list[str]:
    asked = (adapter.config or {}).get("target_modules")
    return [asked] if isinstance(asked, str) else [t for t in asked or () if isinstance(t, str)]


def unserved(adapter: Adapter, binding: Binding) -> Iterator[Finding]:
    """Modules that PEFT gives an adapter because of the configuration, and that the files hold nothing for."""
    if (
        binding.kind != "peft"
        or adapter.method != "LORA"
        or any(o.state in ("absent", "converted") for o in binding.outcomes)
    ):
        return
    served = {o.unit.path for o in binding.outcomes} | {o.into for o in binding.outcomes}
    fused = any(FUSED.fullmatch(u.path) or ".experts." in u.path for u in adapter.modules)
    lacking = [
        m
        for m, shape in binding.surface.modules.items()
        if m not in served
        and (shape is None or len(shape) > 1)
        and f"{m}.weight" in binding.surface.parameters
        and not (fused and "experts" in m.split("."))
        and peft.targets(adapter.config, m)
    ]
    if lacking and binding.bound:
        yield finding(
            adapter, UNSERVED, f"`target_modules` names {many(len(lacking), 'module')} for which the adapter has no tensors, such as "
            f"`{printable(lacking[0])}`: they stay as they are in the base.", lacking, engine=binding.plan.id,
            mend="Look for a part of the adapter that was not saved; if it was trained without them, say so in `target_modules`.",
            wanted=printable(f"{ROOT}{lacking[0]}.lora_A.weight"), found="nothing",
        )  # fmt: skip


def unconfigured(adapter: Adapter) -> Finding:
    """Without a configuration; what loads adapters into pipelines needs none."""
    return finding(
        adapter, REFUSED, "PEFT and vLLM load no adapter without an adapter_config.json that they can read.",
        mend="Put the adapter_config.json of the training run beside the weights.", wanted="adapter_config.json",
        found="none" if "adapter_config.json" not in adapter.checkpoint.texts else "one that is no JSON object",
    )  # fmt: skip


def _refused(adapter: Adapter, of_base: Plan, engine: str) -> Iterator[Finding]:
    """What the engine raises of the configuration, in one finding for its one cause."""
    texts = vllm.refused(adapter.config, of_base)
    if not texts:
        return
    said, config = " ".join(map(printable, texts)), adapter.config or {}
    blame: Blame = "engine"
    why, mend = f"{engine} refuses the adapter: {said}", MERGE
    if adapter.method != "LORA":
        why = f"{engine} takes adapters of the method LoRA, and this one is {printable(adapter.method)}: it raises. {said}"
    elif lacking := vllm.lacks(config):
        blame, mend = "config", f"Add {', '.join(lacking)} to adapter_config.json, with the values of the training run."
    yield finding(
        adapter, REFUSED, why, engine=engine, blame=blame, mend=mend, wanted="a plain LoRA with adapter_config.json", found=said,
    )  # fmt: skip


def settings(adapter: Adapter, binding: Binding) -> Iterator[Finding]:
    if adapter.config is None:
        return
    said = peft.refused(adapter.config) if binding.kind == "peft" else None
    if said is not None:
        yield finding(
            adapter, REFUSED, f"PEFT does not know the method that `peft_type` names: {printable(said)}.", engine=binding.plan.id,
            blame="config", mend='Write "peft_type": "LORA", or what the adapter is, in adapter_config.json.' ,
            wanted="a method of PEFT 0.21.2", found=printable(said),
        )  # fmt: skip
    if binding.kind == "peft" and (lacking := peft.unsaved(adapter, binding.surface)):
        yield finding(
            adapter, UNSERVED, f"`modules_to_save` names {many(len(lacking), 'tensor')} that the adapter has not, such as "
            f"`{printable(lacking[0])}`: PEFT raises.", lacking, engine=binding.plan.id, severity="error",
            mend="Save the adapter with PEFT's save_pretrained, or take the modules out of `modules_to_save`.",
            wanted=printable(lacking[0]), found="nothing",
        )  # fmt: skip
    if binding.kind != "vllm" or binding.of_base is None:
        return
    engine = binding.plan.id
    yield from _refused(adapter, binding.of_base, engine)
    for key in vllm.ignored(adapter.config, binding.of_base):
        scale = key.endswith("_pattern")
        what = (
            "modules that it names are scaled by the general values" if scale else "it answers as if it were not there"
        )
        yield finding(
            adapter, REFUSED, f"{engine} does not follow `{key}`: {what}.", engine=engine, severity="warning", blame="engine",
            mend="Use vLLM 0.32.0 or newer, or merge the adapter into the base." if scale else MERGE, wanted=key,
            found="r, lora_alpha" if scale else "a plain LoRA",
        )  # fmt: skip
    rank = max([r for r in (adapter.rank, *shapes.ranks(adapter)) if r is not None], default=0)
    if rank > MAX_LORA_RANK and not refuses(adapter, binding):
        yield finding(
            adapter, REFUSED, f"Its rank {rank} is above vLLM's default of {MAX_LORA_RANK}.", engine=engine, severity="note",
            blame="environment", mend=f"Start vLLM with --max-lora-rank {rank}.", wanted=f"at most {MAX_LORA_RANK}", found=str(rank),
        )  # fmt: skip

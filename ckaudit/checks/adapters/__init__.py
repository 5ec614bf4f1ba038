"""CK901 to CK910: an adapter, by itself and on the base that it is to be laid on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ckaudit.adapters import Adapter
from ckaudit.adapters.base import Base
from ckaudit.adapters.binding import Binding
from ckaudit.checks import container
from ckaudit.checks.adapters.alone import alone, fits
from ckaudit.checks.adapters.bound import bare, replaced, unbound
from ckaudit.checks.adapters.engine import forms, fused, refuses, settings, targets, unconfigured, unserved
from ckaudit.checks.adapters.rows import CHECKS as CHECKS
from ckaudit.checks.adapters.rows import EMPTY, NOTHING, SHAPE
from ckaudit.checks.case import many
from ckaudit.findings import Finding, Skip
from ckaudit.naming import printable


def run(
    adapter: Adapter, base: Base | None, bindings: Sequence[Binding], *, asked: bool = True
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """What is wrong with `adapter`, by itself and in each of `bindings`, and what could not be judged.

    `asked`: whether the user named the engines. What one of the usual ones lacks is no error for an adapter that PEFT lays on whole.
    """
    judged = [b for b in bindings if b.plan.not_judged is None]
    files, skips = container.run(adapter.checkpoint)
    own = list(alone(adapter))
    apart = {
        "CK113",
        "CK117",
        "CK135",
    }  # adapters are read under any name, and without a look at the format in the metadata
    if any(f.check == EMPTY.id for f in own):
        apart.add("CK138")  # one absence, told once
    found = [*(f for f in files if f.check not in apart), *own, *fits(adapter, judged)]
    if not any(b.kind == "vllm" for b in judged):
        found += fused(adapter, bound=any(b.bound for b in judged))
    if base is not None:
        found += unbound(adapter, base, [b for b in judged if not refuses(adapter, b)])
    if adapter.config is None and any(b.kind != "names" for b in judged):
        found.append(unconfigured(adapter))
    for binding in judged:
        found += [
            *bare(adapter, binding), *replaced(adapter, binding), *forms(adapter, binding), *targets(adapter, binding),
            *unserved(adapter, binding), *settings(adapter, binding),
        ]  # fmt: skip
    if not asked and any(b.kind == "peft" and b.plan.verdict == "loads" for b in judged):
        found = [replace(f, severity="warning") if f.blame == "engine" and f.severity == "error" else f for f in found]
    return tuple(found), (*skips, *_skips(adapter, base, bindings))


def _skips(adapter: Adapter, base: Base | None, bindings: Sequence[Binding]) -> Iterator[Skip]:
    if base is None:
        named = f"adapter_config.json names {printable(adapter.base)}" if adapter.base else "nothing names it"
        give = printable(adapter.base) if adapter.base and not adapter.base.startswith(("/", ".", "~")) else "TARGET"
        yield Skip(NOTHING.id, f"an adapter is judged on its base ({named}): give it with --base {give}")
    if adapter.method != "LORA" and adapter.modules:
        yield Skip(SHAPE.id, f"ranks and shapes are judged of LoRA alone, and this is {printable(adapter.method)}")
    if adapter.unknown:
        first = printable(adapter.unknown[0])
        yield Skip(NOTHING.id, f"{many(len(adapter.unknown), 'name')} is of no dialect that is known, such as {first}")
    for binding in bindings:
        if binding.plan.not_judged is not None:
            yield Skip(NOTHING.id, binding.plan.not_judged, binding.plan.id)
            continue
        still = [o for o in binding.outcomes if o.state == "open"]
        if still:
            yield Skip(NOTHING.id, f"{many(len(still), 'module')}: {still[0].why}", binding.plan.id)
        if binding.of_base is not None and binding.of_base.verdict in ("fails", "loads_with_loss"):
            yield Skip(
                "base",
                f"the base itself {binding.of_base.verdict.replace('_', ' ')} here: audit it too",
                binding.plan.id,
            )

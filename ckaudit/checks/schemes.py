"""The table of quantised modules: what is on disk, what the config declares, and what each engine builds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks.coverage import dense
from ckaudit.checks.facts import Facts, split
from ckaudit.checks.quantisation import declared, elsewhere, ignored_by, targeted, weights_of
from ckaudit.checks.quantisers import FULL, TAIL, recognised
from ckaudit.findings import Quantised
from ckaudit.naming import fold
from ckaudit.plan import Plan

PLAIN = "plain"


def table(checkpoint: Checkpoint, plans: Sequence[Plan]) -> tuple[Quantised, ...]:
    """One row for all modules that are alike on disk, in the config and in every engine; empty where nothing is quantised.

    Plain modules are in it where the ignore list names them or where modules of that name are quantised elsewhere.
    """
    facts = Facts(checkpoint)
    on_disk = {m: s.name for s, kinds in recognised(facts).items() for group in kinds.values() for m in group}
    if not on_disk:
        return ()
    config = declared(facts)
    leaves = {m.rpartition(".")[2] for m in on_disk}
    on_disk |= {
        m: PLAIN
        for m in dense(facts)
        if m not in on_disk and (m.rpartition(".")[2] in leaves or ignored_by(config, m) is not None)
    }
    judged = [(p.id, _Built(p)) for p in plans if p.not_judged is None and p.parameters]
    rows: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]] = defaultdict(list)
    for module, scheme in on_disk.items():
        built = tuple((engine, found.of(module, scheme)) for engine, found in judged)
        rows[scheme, _declared(facts, config, module), built].append(module)
    return tuple(
        Quantised(modules=tuple(fold(modules)), count=len(modules), on_disk=scheme, declared=said, built=dict(built))
        for (scheme, said, built), modules in sorted(rows.items(), key=lambda r: (-len(r[1]), r[0]))
    )


def _declared(facts: Facts, config: dict[str, Any], module: str) -> str:
    if not config:
        other = elsewhere(facts)
        return f"in {other} alone" if other else "nothing"
    if ignored_by(config, module) is not None:
        return f"{PLAIN} (ignore list)"
    if not targeted(config, module):
        return f"{PLAIN} (no target)"
    unnamed = "mlx" if "quantization" in facts.config else "a method without a name"
    method = str(config.get("quant_method") or config.get("quant_algo") or unnamed).lower()
    return " ".join([method, *_sizes({**config, **weights_of(config, module)})])


def _sizes(config: dict[str, Any]) -> Iterator[str]:
    """Bits, group and block, whichever way the quantiser calls them."""
    bits = next((v for k in ("bits", "w_bit", "num_bits") if isinstance(v := config.get(k), int)), None)
    bits = 4 if config.get("load_in_4bit") else 8 if config.get("load_in_8bit") else bits
    group = next((v for k in ("group_size", "q_group_size") if isinstance(v := config.get(k), int)), None)
    block = config.get("weight_block_size") or config.get("block_structure")
    if bits:
        yield f"{bits}-bit"
    if group and group > 0:
        yield f"groups of {group}"
    if isinstance(block, list) and block:
        yield f"blocks of {'×'.join(map(str, block))}"


class _Built:
    """How one engine built the modules that the tensors were looked up in."""

    def __init__(self, plan: Plan) -> None:
        self._dequantised = any(note.kind == "dequantized" for note in plan.notes)
        self._kinds: dict[str, str] = {}
        for p in plan.parameters:
            module = split(p.name)[0]
            if TAIL.search(p.name) or p.dtype not in (None, *FULL):
                self._kinds[module] = "quantised"
            else:
                self._kinds.setdefault(module, PLAIN)
        self._into: dict[str, str] = {}
        for fate in plan.names:
            self._into.setdefault(split(fate.name)[0], split(fate.into or fate.name)[0])

    def of(self, module: str, scheme: str) -> str:
        """`quantised`, `plain`, `dequantised` where that is done on loading, or `nothing` where the engine has no such module."""
        found = self._kinds.get(self._into.get(module, module), "nothing")
        return "dequantised" if found == PLAIN != scheme and self._dequantised else found

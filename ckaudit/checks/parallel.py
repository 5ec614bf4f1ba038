"""CK309 and CK310: what does not spread over several ranks, by arithmetic over the shapes of scales and by an engine's own word."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckaudit.checks.case import Case, many, on_files
from ckaudit.checks.facts import Facts
from ckaudit.checks.quantisation import declared, weight_block
from ckaudit.findings import Check, Finding
from ckaudit.naming import fold, printable

SPLIT = Check("CK309", "groups or blocks that do not split over the ranks", "error")
REFUSED = Check("CK310", "does not load over these ranks", "error")
CHECKS = (SPLIT, REFUSED)

_ROWS = re.compile(r"(^|\.)(down_proj|o_proj|out_proj|w2|wo|fc2|dense_4h_to_h|linear_fc2)$")
"""Modules whose input is spread over the ranks. Query, key and value are left out: their heads are repeated where they are too few."""
_COLUMNS = re.compile(r"(^|\.)(gate_proj|up_proj|w1|w3|fc1|dense_h_to_4h)$")
"""Modules whose output is."""


def splits(facts: Facts, sizes: Sequence[int]) -> Iterator[Finding]:
    """Whether the groups of each quantised weight can be spread evenly over each number of ranks in `sizes`, cut only between two groups.

    Facts: vLLM 0.29.0 refuses anything else (`fp8_utils.validate_fp8_block_shape`, `create_weights` of GPTQ, AWQ and Marlin).
    """
    asked = sorted({n for n in sizes if n > 1})
    if not asked or not facts.has_headers:
        return
    kinds: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for name, what, length, unit in _parts(facts):
        kinds[what, length, unit].append(name)
    bad = {k: [n for n in asked if not _fits(k[1], k[2], n)] for k in kinds}
    usual = {*asked, *(2**i for i in range(asked[-1].bit_length()))}
    best = max((n for n in usual if n <= asked[-1] and all(_fits(k[1], k[2], n) for k in kinds)), default=1)
    for what in dict.fromkeys(k[0] for k in kinds):
        hit = [k for k in kinds if k[0] == what and bad[k]]
        if not hit:
            continue
        worst = max(hit, key=lambda k: len(bad[k]))
        at, shown = bad[worst][0], printable(fold(kinds[worst])[0])
        names = [n for k in hit for n in kinds[k]]
        refused = ", ".join(str(n) for n in sorted({n for k in hit for n in bad[k]}))
        yield on_files(
            facts, SPLIT,
            f"{many(len(names), 'module')} cannot be spread over {refused} ranks: `{shown}` has {worst[1]} {what} in groups of {worst[2]}, "
            f"and {worst[1]} / {at} = {worst[1] / at:g} is no multiple of that.",
            names, blame="environment", wanted=f"a multiple of {worst[2]} on every rank",
            found=f"{worst[1] / at:g} on each of {at}",
            mend=f"Serve it over {many(best, 'rank')}, the most up to {asked[-1]} that fits every module"
            + (", or spread whole experts (expert parallel)." if any(".experts." in n for n in names) else "."),
        )  # fmt: skip


def _fits(length: int, unit: int, ranks: int) -> bool:
    return ranks == 1 or length % (ranks * unit) == 0


def _parts(facts: Facts) -> Iterator[tuple[str, str, int, int]]:
    """(module, what is split, its length, the size of a group) of every quantised matrix that a group or block can be cut in."""
    tensors = facts.checkpoint.tensors
    block = weight_block(facts)
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        size = tensor.shape
        if size is None or len(size) != 2 or leaf not in ("weight", "scales", "weight_scale"):
            continue
        if leaf == "weight":
            if block is None or (f"{name}_scale_inv" not in tensors and f"{module}.scale" not in tensors):
                continue
            if _ROWS.search(module):
                yield module, "inputs", size[1], block[1]
            elif _COLUMNS.search(module):
                yield module, "outputs", size[0], block[0]
        elif leaf == "scales" and f"{module}.qweight" not in tensors:
            continue  # MLX's, which knows no ranks
        elif _ROWS.search(module) and (inputs := _inputs(facts, module)) is not None:
            groups = size[0] if leaf == "scales" else size[1]
            if groups > 1 and inputs % groups == 0:
                yield module, "inputs", inputs, inputs // groups


def _inputs(facts: Facts, module: str) -> int | None:
    """How many inputs a packed weight has; None when its layout is not known."""
    tensors, config = facts.checkpoint.tensors, declared(facts)
    bits = next((b for b in (config.get("bits"), config.get("w_bit")) if isinstance(b, int) and b > 0), 4)
    if (packed := tensors.get(f"{module}.qweight")) is not None and packed.shape is not None and len(packed.shape) == 2:
        scales = tensors[f"{module}.scales"].shape
        whole = (
            scales is not None and len(scales) == 2 and packed.shape[1] == scales[1]
        )  # GPTQ packs the inputs, AWQ the outputs
        return packed.shape[0] * 32 // bits if whole else packed.shape[0]
    found = tensors.get(f"{module}.weight_packed") or tensors.get(f"{module}.weight")
    if found is None or found.shape is None or len(found.shape) != 2:
        return None
    if found.dtype == "U8":
        return found.shape[1] * 2
    if found.dtype == "I32":
        return found.shape[1] * 32 // _weight_bits(config)
    return found.shape[1]


def _weight_bits(config: dict[str, object]) -> int:
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and isinstance(bits := weights.get("num_bits"), int) and bits > 0:
            return bits
    return 4


def refused(case: Case) -> Iterator[Finding]:
    """Layouts over several ranks that were asked for and do not load although one rank does, or that lose what one rank keeps."""
    if case.plan.error is not None:
        return
    told = any(f.check == SPLIT.id for f in case.on_files)
    failing: dict[str, list[str]] = defaultdict(list)
    for row in case.plan.tp:
        where = layout(row)
        if row["verdict"] == "fails" and not (told and row["size"] > 1):
            failing[row["error"] or "the loader raises"].append(where)
        lost = row.get("lost") or ()
        if lost:
            yield case.finding(
                REFUSED, f"Over {where}, {many(len(lost), 'name')} that one rank loads, such as `{printable(lost[0])}`, reach no rank.",
                names=lost, blame="engine", wanted="every tensor on a rank", found="on none", mend="Serve it on fewer ranks.",
            )  # fmt: skip
    good = [layout(row) for row in case.plan.tp if row["verdict"] == "loads"]
    mend = f"Serve it over {good[-1]}, which loads." if good else "Serve it on one rank, which loads."
    for error, places in failing.items():
        yield case.finding(
            REFUSED, f"It loads on one rank and not over {' or '.join(places)}: {printable(error)}", names=(), blame="environment",
            wanted="a layout that the engine takes", found=", ".join(places), mend=mend,
        )  # fmt: skip


def layout(row: Mapping[str, Any]) -> str:
    """`tp 2`, `tp 2, pp 4, ep`."""
    parts = [f"tp {row['size']}"]
    if row.get("pp", 1) > 1:
        parts.append(f"pp {row['pp']}")
    return ", ".join([*parts, "ep"] if row.get("ep") else parts)

"""CK219: a draft model (multi-token prediction) that is announced: stored, half there, or left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ckaudit.checks.case import Case, many, on_files
from ckaudit.checks.facts import DRAFT, DRAFT_KEYS, LAYER_KEYS, Facts, Stack, split
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable

DRAFT_PART = Check("CK219", "draft layers (MTP)", "note")
CHECKS = (DRAFT_PART,)

_SOURCE = "copy the draft layers from the source if speculative decoding is wanted"


def draft(facts: Facts) -> Iterator[Finding]:
    """Draft layers that are announced and not stored (a note, since the main model loads without them), or stored in part."""
    announced = {k: v for k, v in facts.values(DRAFT_KEYS).items() if v > 0}
    names = facts.matching(DRAFT)
    stored = _layers(facts, max(announced.values(), default=0))
    if announced and not names and not stored and facts.checkpoint.tensors:
        key, count = next(iter(announced.items()))
        yield on_files(
            facts, DRAFT_PART, f"The config announces a draft model ({key}: {count}), and no tensor of one is stored.",
            blame="config", mend=f"Set {key} to 0, or {_SOURCE}.", wanted=many(count, "draft layer"), found="none",
        )  # fmt: skip
        return
    if len(announced) == 1 and 0 < len(stored) < next(iter(announced.values())):
        key, count = next(iter(announced.items()))
        yield on_files(
            facts, DRAFT_PART, f"The config announces {many(count, 'draft layer')} ({key}), and {len(stored)} of them are stored.",
            sorted(stored), severity="warning", mend=f"Set {key} to {len(stored)}, or {_SOURCE}.", wanted=str(count),
            found=str(len(stored)),
        )  # fmt: skip
    lacking = [f"{path}.{part}" for path, parts in _incomplete(facts, stored) for part in parts]
    if lacking:
        yield on_files(
            facts, DRAFT_PART, f"Draft layers lack parts that every layer of the main model has, such as `{printable(lacking[0])}`.",
            lacking, severity="warning", mend=f"{_SOURCE[:1].upper()}{_SOURCE[1:]}: what was saved is a part.",
            wanted="whole layers", found="parts of them",
        )  # fmt: skip


def _layers(facts: Facts, announced: int) -> dict[str, set[str]]:
    """Path of each draft layer -> the modules in it: numbered ones of a draft model, or those behind the main model's last."""
    main = set(facts.values(LAYER_KEYS[:1]).values())
    found: dict[str, set[str]] = {}
    for path, stack in facts.stacks.items():
        if re.search(r"\.[0-9]+(\.|$)", path):
            continue
        own = DRAFT.search(path) is not None
        for i in stack.indices:
            if own or (path in facts.layers and any(n <= i < n + announced for n in main)):
                found[f"{path}.{i}"] = _modules(stack, i)
    return found


def _modules(stack: Stack, index: int) -> set[str]:
    """The modules of one member, experts left out: their layout may differ from block to block."""
    return {split(rest)[0] for rest in stack.members[index] if "experts" not in rest}


def _incomplete(facts: Facts, stored: dict[str, set[str]]) -> Iterator[tuple[str, list[str]]]:
    """Draft layers with a part of a block only (`mlp.gate_proj` and no `mlp.down_proj`). Blocks of another make, which have modules that
    no main layer has, are left alone."""
    stacks = [s for p, s in facts.layers.items() if not DRAFT.search(p)]
    if not stored or not stacks:
        return
    main = max(stacks, key=lambda s: len(s.numbers))
    layers = [_modules(main, i) for i in main.indices if f"{main.path}.{i}" not in stored]
    if not layers:
        return
    common, known = set.intersection(*layers), set.union(*layers)
    blocks: dict[str, set[str]] = defaultdict(set)
    for module in common:
        blocks[module.rpartition(".")[0]].add(module)
    for path, modules in stored.items():
        lacking = [
            m
            for block, wanted in blocks.items()
            if block and wanted & modules and {x for x in modules if x.startswith(f"{block}.")} <= known
            for m in sorted(wanted - modules)
        ]
        if lacking:
            yield path, sorted(lacking)


def draft_left_out(case: Case) -> Iterator[Finding]:
    """Draft tensors that this engine leaves out by design, where its draft class, if it has one, leaves them out too; and draft layers that
    the draft class finds incomplete."""
    draft = case.plan.draft
    taken = {name for layer in draft.layers for name in layer.names} if draft else set()
    left = [
        n.name
        for n in case.plan.not_plain
        if n.fate != "loaded" and n.by_design is not None and DRAFT.search(n.name) and n.name not in taken
    ]
    if left:
        who = (
            ": this class has no draft model" if case.facts.has_headers else ""
        )  # of an index alone no draft class is asked
        who = f": {draft.architecture} does not read them either" if draft else who
        yield case.finding(
            DRAFT_PART, f"{many(len(left), 'tensor')} of a draft model are stored and left out{who}.", names=left, blame="engine",
        )  # fmt: skip
    if draft is None or not taken:
        return
    gaps = [name for layer in draft.layers for name in layer.unwritten]
    if draft.verdict in ("fails", "loads_with_loss") and (gaps or draft.error):
        what = (
            f"leaves {many(len(gaps), 'parameter')} unwritten, such as `{printable(gaps[0])}`"
            if gaps
            else "does not load"
        )
        said = f": {printable(draft.error)}" if draft.error else ""
        yield case.finding(
            DRAFT_PART, f"The draft model {draft.architecture} {what}{said}", parameters=gaps, severity="warning", blame="checkpoint",
            wanted="whole draft layers", found="parts of them", mend=f"{_SOURCE[:1].upper()}{_SOURCE[1:]}.",
        )  # fmt: skip

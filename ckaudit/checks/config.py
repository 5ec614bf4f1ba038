"""CK401 to CK404: the config against the tensors, and whether it can be read at all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ckaudit.checks.case import Case, on_files
from ckaudit.checks.facts import DRAFT_KEYS, EXPERT_KEYS, LAYER_KEYS, Facts
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable

CONTRADICTION = Check("CK401", "config that contradicts the tensors", "error")
NEWER = Check("CK402", "config saved by a newer transformers", "warning")
NO_CONFIG = Check("CK403", "no config.json", "error")
NO_CLASS = Check("CK404", "no class named", "warning")
CHECKS = (CONTRADICTION, NEWER, NO_CONFIG, NO_CLASS)

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|lm_head|embed_out)\.weight$")
_TEXT = re.compile(
    r"(^|\.)(language_model|text_model|model|llm|transformer|decoder)\.(.*\.)?(layers|layer|blocks|block|h)$"
)


def readable(facts: Facts) -> Iterator[Finding]:
    """Whether there is a config, and whether it names a class."""
    checkpoint = facts.checkpoint
    names = (*checkpoint.files, *checkpoint.texts)
    if checkpoint.config is None:
        if not any(p.endswith(("config.json", "model_index.json")) and "tokenizer" not in p for p in names):
            lone = len(checkpoint.files) <= 1 and checkpoint.index is None
            yield on_files(
                facts, NO_CONFIG, "There is no config.json beside the weights, so no engine can tell what model they are.",
                severity="note" if lone else "error", mend="Copy config.json from the model that these weights were trained from.",
            )  # fmt: skip
        return
    if not checkpoint.architectures and "_class_name" not in checkpoint.config and "peft_type" not in checkpoint.config:
        yield on_files(
            facts, NO_CLASS, "config.json names no class (`architectures`): engines have to guess which head the model has.",
            blame="config", mend='Add "architectures": ["…"] as in the model that these weights were trained from.',
        )  # fmt: skip


def own_code(facts: Facts) -> Iterator[Finding]:
    """A class that is code of the repo: no engine has it of its own, or not under this name."""
    if isinstance(auto := facts.config.get("auto_map"), dict) and auto:
        yield on_files(
            facts, NO_CLASS, "The model's class is code of the repo (auto_map); it runs only where that code is trusted.", severity="note",
            blame="config", mend="Audit with --trust-remote-code if you trust it.",
        )  # fmt: skip


def layer_counts(facts: Facts) -> Iterator[Finding]:
    """The number of layers of the one stack that the config's text part describes, against what it says."""
    declared = facts.values(LAYER_KEYS)
    drafts = sum(facts.values(DRAFT_KEYS).values())
    stacks = [s for p, s in facts.layers.items() if not s.holes]
    if not declared or not stacks:
        return
    key, said = min(declared.items(), key=lambda d: ("text" not in d[0], d[0].count("."), d[0]))
    known = set(declared.values())
    largest = max(stacks, key=lambda s: (sum(map(len, s.members.values())), s.path))
    count = len(largest.numbers)
    if (
        said < 1
        or any(len(s.numbers) in {v, v + drafts} for s in stacks for v in known)
        or not _TEXT.search(largest.path)
    ):
        return
    more = count > said
    yield on_files(
        facts, CONTRADICTION, f"The config says {key}: {said}, and `{printable(largest.path)}` holds {count} layers.",
        [f"{largest.path}.{i}" for i in (range(said, count) if more else range(count, min(said, count + 1000)))],
        blame="config" if more else "undecidable",
        mend=f"Set {key} to {count}" + ("." if more else ", or take the lost layers from the source of this checkpoint."),
        wanted=str(said), found=str(count),
    )  # fmt: skip


def expert_counts(facts: Facts) -> Iterator[Finding]:
    """Number of experts in the stacks against the config: pruned experts, or a config that was not changed with them."""
    declared = facts.values(EXPERT_KEYS)
    counts: dict[int, list[str]] = defaultdict(list)
    for stacks in facts.experts.values():
        for path, stack in stacks.items():
            counts[max(stack.numbers) + 1].append(path)
    said = set(declared.values()) - {0, 1}
    if not said or not counts:
        return
    count, paths = max(counts.items(), key=lambda c: len(c[1]))
    if not said & counts.keys():
        key, value = next((k, v) for k, v in declared.items() if v in said)
        yield on_files(
            facts, CONTRADICTION, f"The config says {key}: {value}, and {len(paths)} layers hold {count} experts each.", paths,
            blame="config", mend=f"Set {key} to {count}.", wanted=str(value), found=str(count),
        )  # fmt: skip


def experts_pruned(case: Case) -> Iterator[Finding]:
    """Takes what an engine loses of experts, and of the routers beside them, because the config counts others than all layers hold."""
    for finding in expert_counts(case.facts):
        owners = tuple(f"{path.rpartition('.')[0]}." for path in finding.names)
        inside = [f for f in case.plan.names if f.name.startswith(owners)]
        routers = [t for f in inside if _ROUTER.search(f.name) and (t := case.facts.checkpoint.tensors[f.name]).shape]
        mine = {f.name for f in inside if _EXPERT.search(f.name)}
        mine |= {t.name for t in routers if any(t.name in m.names for m in case.mismatches)}
        filled = {p for f in inside if f.name in mine for p in (f.into, *f.also) if p}
        if not (
            mine & case.strays.keys() or filled & case.gaps.keys() or any(mine & set(m.names) for m in case.mismatches)
        ):
            continue
        lost = any(t.shape and t.shape[0] == int(finding.wanted) for t in routers) and int(finding.found) < int(
            finding.wanted
        )
        told = case.finding(
            CONTRADICTION, finding.message + (" The routers choose among as many as the config says." if lost else ""),
            names=finding.names, blame="checkpoint" if lost else "config", wanted=finding.wanted, found=finding.found,
            mend="Take the lost experts from the source of this checkpoint." if lost else finding.mend,
        )  # fmt: skip
        case.take(mine, filled)
        yield told


_EXPERT = re.compile(r"(^|\.)(local_)?experts\.")
_ROUTER = re.compile(r"(^|\.)(gate|router)\.(?!.*experts\.)")


def vocabulary(facts: Facts) -> Iterator[Finding]:
    """Rows of the embedding and of the head against each other and against vocab_size. More rows than the tokenizer has are normal."""
    declared = {k: v for k, v in facts.values(("vocab_size", "padded_vocab_size")).items() if v > 0}
    rows = {
        t.name: t.shape[0] for t in map(facts.checkpoint.tensors.__getitem__, facts.matching(_EMBEDDING))
        if t.shape is not None and len(t.shape) == 2 and t.dtype in ("F32", "F16", "BF16")
    }  # fmt: skip
    wrong = {n: r for n, r in rows.items() if r not in declared.values() and r < max(declared.values(), default=0)}
    if not wrong or len(wrong) < len(rows):
        return
    key, value = max(declared.items(), key=lambda d: d[1])
    yield on_files(
        facts, CONTRADICTION, f"The config says {key}: {value}, and the embedding has {next(iter(wrong.values()))} rows.", wrong,
        blame="config" if len(set(wrong.values())) == 1 else "checkpoint", mend=f"Set {key} to the number of rows.",
        wanted=str(value), found=str(next(iter(wrong.values()))),
    )  # fmt: skip


def layers_too_many(case: Case) -> Iterator[Finding]:
    """Whole layers that are stored behind the last one of the engine's model: the config cuts them off."""
    if not case.strays:
        return
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for fate in case.plan.names:
        if match := re.match(r"(.*?)\.([0-9]{1,6})\.", fate.name):
            stacks[match[1]][int(match[2])].append(fate.name)
    for path, members in stacks.items():
        cut = sorted(i for i, names in members.items() if all(n in case.strays for n in names))
        kept = sorted(members.keys() - set(cut))
        if not cut or not kept or cut[0] <= kept[-1]:
            continue
        key = next((k for k, v in case.facts.values(LAYER_KEYS).items() if v in (cut[0], len(kept))), None)
        names = [n for i in cut for n in members[i]]
        says = f"the config says {key}: {len(kept)}" if key else f"the model is built with {len(kept)}"
        yield case.finding(
            CONTRADICTION, f"`{printable(path)}` holds {len(members)} layers and {says}: {len(cut)} layers are left out.", names=names,
            blame="config", mend=f"Set {key or 'the number of layers'} to {len(members)}.", wanted=str(len(kept)), found=str(len(members)),
        )  # fmt: skip
        case.take(names)


def newer(case: Case) -> Iterator[Finding]:
    """The config was saved by a newer transformers than the one that read it: new keys are silently taken for defaults."""
    for note in case.plan.notes:
        if note.kind == "config-newer":
            yield case.finding(
                NEWER,
                f"{note.text}.",
                blame="environment",
                mend="Install the release that saved the config, and audit again.",
            )

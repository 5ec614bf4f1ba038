"""Why tensors may be on one side alone, and why a shape may have changed: what the names and the two configs say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ckaudit.changes import Rule
from ckaudit.checks.facts import DRAFT, DRAFT_KEYS, EXPERT_KEYS, LAYER_KEYS, Facts
from ckaudit.checks.layout import numbers
from ckaudit.checks.names import HARMLESS, is_causal_mask
from ckaudit.checks.ties import flags
from ckaudit.diff.renumber import renumbered
from ckaudit.diff.units import Unit
from ckaudit.naming import printable

EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings|embedding|shared)\.weight$"
)
HEAD = re.compile(
    r"(^|\.)(lm_head|embed_out|output_projection|generator_lm_head|predictions\.decoder|lm_head\.decoder|output|head)\.(weight|bias)$"
)
_POSITIONS = re.compile(
    r"(^|\.)(wpe|embed_positions|position_embeddings?|position_embedding_table|pos_embed)(\.weight)?$"
)
_EXPERT = re.compile(r"(^|\.)(\w*experts?|gate|router|mlp|block_sparse_moe|feed_forward)\.")


class Reason(msgspec.Struct, frozen=True):
    """Units that one side alone has, and why that loses nothing."""

    rule: Rule
    text: str
    units: tuple[Unit, ...]


class Reshaped(msgspec.Struct, frozen=True):
    """A reason for pairs of units whose shapes differ."""

    rule: Rule
    text: str


def one_sided(loose: Mapping[str, Unit], here: Facts, there: Facts, *, removed: bool) -> Iterator[Reason]:
    """Reasons for units that `here` alone has, from the particular to the general; a unit is in one of them at most.

    `loose` are the units by their own names.
    """
    left = dict(loose)
    if not left:
        return
    drafts = _draft_retired if removed else _draft
    for reason in (_buffers, _tied, drafts, _layers, _experts):
        for found in reason(left, here, there):
            yield found
            for unit in found.units:
                del left[unit.name]


def _buffers(left: Mapping[str, Unit], here: Facts, there: Facts) -> Iterator[Reason]:  # noqa: ARG001
    hit = tuple(u for n, u in left.items() if HARMLESS.search(n) or is_causal_mask(n, u.shape))
    if hit:
        yield Reason("buffer", "tables that every loader computes by itself", hit)


def _tied(left: Mapping[str, Unit], here: Facts, there: Facts) -> Iterator[Reason]:  # noqa: ARG001
    """A head or an embedding whose twin the other side keeps, where that side's config ties the two."""
    kept = [t for t in there.checkpoint.tensors.values() if EMBEDDING.search(t.name) or HEAD.search(t.name)]
    said = flags(there)
    coder = there.config.get("is_encoder_decoder") is True
    groups: dict[str, list[Unit]] = defaultdict(list)
    for name, unit in left.items():
        head, embedding = HEAD.search(name), EMBEDDING.search(name)
        if not (head or embedding) or unit.scheme is not None:
            continue
        told = all(said.values()) if said else coder
        if not told or name.endswith("bias"):
            continue
        twins = [t for t in kept if t.name not in left and (None in (t.shape, unit.shape) or t.shape == unit.shape)]
        # An embedding is the head's twin, or one of several of an encoder and its decoder; other embeddings are other weights.
        twin = next((t for t in twins if (EMBEDDING if head or coder else HEAD).search(t.name)), None)
        if twin is not None:
            groups[twin.name].append(unit)
    for name, found in groups.items():
        yield Reason("tied", f"tied to `{printable(name)}`, as the config of the side without it says", tuple(found))


def _draft(left: Mapping[str, Unit], here: Facts, there: Facts) -> Iterator[Reason]:
    """A whole draft model; a part of one is a loss."""
    own = draft(here)
    if own and own <= {m for u in left.values() for m in u.members} and not draft(there):
        yield Reason(
            "draft", "draft layers (MTP), all of them", tuple(u for u in left.values() if own.issuperset(u.members))
        )


def _draft_retired(left: Mapping[str, Unit], here: Facts, there: Facts) -> Iterator[Reason]:
    """A whole draft model that B's config does not announce any more."""
    before, after = (sum(f.values(DRAFT_KEYS).values()) for f in (here, there))
    if before and not after:
        key = next(iter(here.values(DRAFT_KEYS)))
        for found in _draft(left, here, there):
            yield Reason("draft", f"{found.text}, as {key} (0 against {before}) says", found.units)


def draft(facts: Facts) -> frozenset[str]:
    """The tensors of a draft model: by their names, or in numbered layers behind those that the config counts."""
    names = set(facts.matching(DRAFT))
    announced = sum(facts.values(DRAFT_KEYS).values())
    for count in set(facts.values(LAYER_KEYS[:1]).values()) if announced else ():
        for stack in facts.layers.values():
            behind = [i for i in stack.indices if count <= i < count + announced]
            if len(stack.members) == count + len(behind):
                names.update(stack.names(*behind))
    layers = {match[0] for n in names if (match := re.match(r".*?\.[0-9]+\.", n)) and not DRAFT.search(match[0])}
    if layers:  # a layer that holds `eh_proj` is draft as a whole
        names.update(n for n in facts.checkpoint.tensors if (m := re.match(r".*?\.[0-9]+\.", n)) and m[0] in layers)
    return frozenset(names)


def _layers(left: Mapping[str, Unit], here: Facts, there: Facts) -> Iterator[Reason]:
    """Layers of a stack, whole, where each config counts its own side's."""
    for path, stack in here.layers.items():
        other = there.layers.get(path)
        if other is None or stack.holes or other.holes or len(other.members) >= len(stack.members):
            continue
        cut = sorted(set(stack.indices) - set(renumbered(stack, other).values()))
        units = _inside(left, stack.names(*cut))
        changed = _changed(here, there, LAYER_KEYS, len(stack.members), len(other.members))
        if units and changed:
            which = f"layer{'s' if len(cut) > 1 else ''} {numbers(cut)} of `{printable(path)}`"
            yield Reason(
                "layers", f"{which} (or others just like {'them' if len(cut) > 1 else 'it'}), as {changed} says", units
            )


def _experts(left: Mapping[str, Unit], here: Facts, there: Facts) -> Iterator[Reason]:
    """Experts that were pruned or added, the last of every stack, where each config counts its own side's."""
    for shape, stacks in here.experts.items():
        lost: list[str] = []
        text = ""
        for path, stack in stacks.items():
            other = there.experts[shape].get(path) if shape in there.experts else None
            if other is None or stack.holes or other.holes or len(other.members) >= len(stack.members):
                continue
            changed = _changed(here, there, EXPERT_KEYS, len(stack.members), len(other.members))
            if changed:
                cut = range(len(other.members), len(stack.members))
                lost += stack.names(*cut)
                text = f"experts {numbers(cut)}, as {changed} says"
        if units := _inside(left, lost):
            yield Reason("experts", text, units)


def _inside(left: Mapping[str, Unit], names: Iterable[str]) -> tuple[Unit, ...]:
    """The loose units all of whose tensors are among `names`."""
    chosen = set(names)
    return tuple(u for u in left.values() if chosen.issuperset(u.members)) if chosen else ()


def _changed(here: Facts, there: Facts, keys: Iterable[str], ours: int, theirs: int) -> str | None:
    """The config key that is `ours` here and `theirs` there, as text; None when no key says so."""
    before, after = here.values(keys), there.values(keys)
    for key, value in before.items():
        if value == ours and after.get(key) == theirs:
            return f"{key} ({min(ours, theirs)} against {max(ours, theirs)})"
    return None


def reshaped(pairs: Iterable[tuple[Unit, Unit]], old: Facts, new: Facts) -> dict[int, Reshaped]:
    """Reasons for pairs whose shapes differ, by their place in `pairs`: rows of the vocabulary, of positions, of experts."""
    pairs = list(pairs)
    rows = {
        i: (a.shape[0], b.shape[0])
        for i, (a, b) in enumerate(pairs)
        if a.shape and b.shape and len(a.shape) == len(b.shape) and a.shape[1:] == b.shape[1:]
    }
    found: dict[int, Reshaped] = {}
    vocabulary = {i for i in rows if EMBEDDING.search(pairs[i][0].name) or HEAD.search(pairs[i][0].name)}
    changes = {rows[i] for i in vocabulary}
    if len(changes) == 1:
        before, after = next(iter(changes))
        declared = {v for k, v in new.values(("vocab_size", "padded_vocab_size")).items()}
        if (not declared or after in declared) and _whole_vocabulary(vocabulary, pairs, new, before):
            text = f"vocabulary of {before:,} → {after:,} rows"
            found |= {i: Reshaped("vocabulary", text) for i in vocabulary}
    for i, (before, after) in rows.items():
        if i in found:
            continue
        name = pairs[i][0].name
        if _EXPERT.search(f"{name}.") and (changed := _changed(old, new, EXPERT_KEYS, before, after)):
            found[i] = Reshaped("experts", f"rows for each expert, as {changed} says")
        elif _POSITIONS.search(name):
            before_said, after_said = (
                f.values(("max_position_embeddings", "n_positions", "max_source_positions")) for f in (old, new)
            )
            if any(after_said.get(k, v) - v == after - before != 0 for k, v in before_said.items()):
                found[i] = Reshaped("positions", f"positions {before:,} → {after:,}, as the config says")
    return found


def _whole_vocabulary(changed: set[int], pairs: list[tuple[Unit, Unit]], new: Facts, before: int) -> bool:
    """Whether no embedding or head keeps as many rows as the others had."""
    names = {m for i in changed for m in pairs[i][1].members}
    rest = [t for n, t in new.checkpoint.tensors.items() if n not in names and (EMBEDDING.search(n) or HEAD.search(n))]
    return not any(t.shape and t.shape[0] == before for t in rest)

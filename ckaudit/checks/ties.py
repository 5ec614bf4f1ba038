"""CK214: the output head and the embedding, stored or not, against what the config says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckaudit.checks.case import Case, on_files
from ckaudit.checks.facts import Facts
from ckaudit.findings import Check, Finding
from ckaudit.naming import printable

TIES = Check("CK214", "tied weights against the config", "error")
CHECKS = (TIES,)

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight$")


def flags(facts: Facts) -> dict[str, bool]:
    """`tie_word_embeddings` wherever the config has it: at the top, and in the part for text."""
    found = {}
    for path, section in (("", facts.config), *_text_parts(facts)):
        value = section.get("tie_word_embeddings")
        if isinstance(value, bool):
            found[f"{path}tie_word_embeddings"] = value
    return found


def _text_parts(facts: Facts) -> Iterator[tuple[str, dict[str, object]]]:
    for key in ("text_config", "llm_config", "language_config"):
        part = facts.config.get(key)
        if isinstance(part, dict):
            yield f"{key}.", part


def ties(facts: Facts) -> Iterator[Finding]:
    """The states that can be told from the files: two levels that disagree while a head is stored, and a tied pair that is stored twice."""
    tensors = facts.checkpoint.tensors
    heads, embeddings = facts.matching(_HEAD), facts.matching(_EMBEDDING)
    said = flags(facts)
    if not heads or not embeddings:
        return
    if len(set(said.values())) > 1:
        yield on_files(
            facts, TIES, f"A head is stored, and the config both ties it and does not: {said}.".replace("'", ""), heads, severity="warning",
            blame="config", mend="Set tie_word_embeddings to the same value on both levels: false if this head was trained by itself.",
            wanted="one value", found=", ".join(f"{k}: {str(v).lower()}" for k, v in said.items()),
        )  # fmt: skip
    elif said and all(said.values()):
        head, embedding = tensors[heads[0]], tensors[embeddings[0]]
        if head.shape is not None and embedding.shape is not None and head.shape != embedding.shape:
            yield on_files(
                facts, TIES, f"The config ties `{printable(head.name)}` to `{printable(embedding.name)}`, and they differ in shape.",
                [head.name, embedding.name], blame="config", mend="Set tie_word_embeddings to false, or drop the head.",
                wanted=str(list(embedding.shape)), found=str(list(head.shape)),
            )  # fmt: skip
        else:
            yield on_files(
                facts, TIES,
                f"The config ties `{printable(head.name)}` to `{printable(embedding.name)}`, and both are stored: one replaces the other "
                "on loading. Headers cannot tell whether they are equal.",
                [head.name, embedding.name], severity="note", blame="undecidable",
                mend="If the head was trained by itself, set tie_word_embeddings to false; otherwise the copy can go.",
            )  # fmt: skip


_FOLLOWS = re.compile(r"(^|\.)(lm_head|embed_out|output_projection|predictions\.decoder|decoder)\.(weight|bias)$")


def may_follow(case: Case, name: str) -> bool:
    """Whether a head that nothing is stored of may be tied to the embedding: neither the files nor the config are against it."""
    return bool(_FOLLOWS.search(name)) and not case.facts.matching(_FOLLOWS) and False not in flags(case.facts).values()


def followers(case: Case) -> Iterator[Finding]:
    """Takes heads that are tied to an embedding of which is told why nothing was written into it: they stay as they are with it."""
    explained = [
        p
        for p in case.plan.parameters
        if p.coverage == "none" and p.by_design is None and p.name not in case.gaps and p.shape
    ]
    rows = {p.shape[0] for p in explained if p.shape and re.search(r"embed|wte|shared", p.name)}
    if rows and not case.facts.matching(_FOLLOWS) and False not in flags(case.facts).values():
        case.take(
            (),
            [
                g
                for g, p in case.gaps.items()
                if p.coverage == "none" and _FOLLOWS.search(g) and p.shape and p.shape[0] in rows
            ],
        )
    return iter(())


def head_lost(case: Case) -> Iterator[Finding]:
    """No head is stored, and the model's own is not tied: it stays random. Or a stored one is dropped because the engine ties it."""
    missing = [g for g in case.gaps if _HEAD.search(g) and case.gaps[g].coverage == "none"]
    stored = case.facts.matching(_HEAD)
    said = ", ".join(f"{k}: {str(v).lower()}" for k, v in flags(case.facts).items()) or "nothing about it"
    if missing and not stored:
        yield case.finding(
            TIES, f"`{printable(missing[0])}` is not stored, and it is not tied to the embedding (the config says {said}).",
            parameters=missing, blame="undecidable",
            mend="If the model was trained tied, set tie_word_embeddings to true; otherwise take the head from the source: it was lost.",
            wanted=missing[0], found="nothing stored",
        )  # fmt: skip
        case.take((), missing)
    dropped = [n for n in case.strays if _HEAD.search(n)]
    if dropped and not missing:
        tied = any(flags(case.facts).values()) and len(set(flags(case.facts).values())) == 1
        refused = tied and case.plan.error is not None
        elsewhere = case.loads_elsewhere(dropped)
        yield case.finding(
            TIES, f"`{printable(dropped[0])}` is stored and not loaded: this class has no head of its own (the config says {said}).",
            names=dropped, severity="warning" if tied and not refused else "error",
            blame="engine" if (elsewhere and case.facts.checkpoint.architectures) or refused else "config",
            mend=(f"Use {elsewhere.id}, which loads it; or drop" if elsewhere else "Drop")
            + " the head if it equals the embedding; if it was trained by itself, set tie_word_embeddings to false on every level.",
        )  # fmt: skip
        case.take(dropped)

"""CK301 and CK401: tensors whose shape is not their parameter's, and the one number of the config that may account for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from ckaudit.checks.case import Case, many
from ckaudit.checks.config import CONTRADICTION
from ckaudit.checks.facts import EXPERT_KEYS, Facts, shape
from ckaudit.findings import Check, Finding
from ckaudit.naming import fold
from ckaudit.plan import Mismatch

SHAPE = Check("CK301", "shape that does not fit its parameter", "error")
CHECKS = (SHAPE,)

Pairs = tuple[tuple[int, int], ...]
"""The (wanted, found) pairs of the sizes in which a tensor differs, each once."""


class Cause(msgspec.Struct, frozen=True):
    """A number in the config, what it would have to be, and what does not fit because of it."""

    key: str
    said: int
    held: int
    members: tuple[Mismatch, ...]


def shapes(case: Case) -> Iterator[Finding]:
    """Tensors whose shape is not their parameter's. When one number of the config accounts for it, that number is the finding."""
    left = [m for m in case.mismatches if m.kind == "shape"]
    for explain in (_vocabulary, _width, _head_width, _heads):
        for cause in list(explain(case.facts, left)):
            if not _others_fit(case, [n for m in cause.members for n in m.names]):
                yield _contradiction(case, cause)
                left = [m for m in left if m not in cause.members]
    groups: dict[Pairs | tuple[str, str], list[Mismatch]] = defaultdict(list)
    for mismatch in left:
        groups[_differing(mismatch) or (mismatch.wanted, mismatch.found)].append(mismatch)
    for members in groups.values():
        names = [n for m in members for n in m.names]
        key = None if _others_fit(case, names) else _key(case.facts, _differing(members[0]))
        if key is not None:
            (said, held) = _differing(members[0])[0]
            yield _contradiction(case, Cause(key, said, held, tuple(members)))
        else:
            yield _misfits(case, members, names)


def _contradiction(case: Case, cause: Cause) -> Finding:
    names = [n for m in cause.members for n in m.names]
    parameters = [m.parameter for m in cause.members]
    lines = ", ".join(f"`{line}`" for line in fold(names or parameters)[:3])
    finding = case.finding(
        CONTRADICTION, f"The config says {cause.key}: {cause.said}, and {many(len(cause.members), 'tensor')} "
        f"{'has' if len(cause.members) == 1 else 'have'} {cause.held} there: "
        f"{lines}.", names=names, parameters=parameters, blame="config" if len(cause.members) > 1 else "undecidable",
        mend=f"Set {cause.key} to {cause.held} if the tensors are right.", wanted=str(cause.said), found=str(cause.held),
    )  # fmt: skip
    case.take(names, parameters)
    return finding


def _misfits(case: Case, members: list[Mismatch], names: list[str]) -> Finding:
    first, parameters = members[0], [m.parameter for m in members]
    lines = ", ".join(f"`{line}`" for line in fold(names or parameters)[:3])
    finding = case.finding(
        SHAPE, f"{many(len(members), 'tensor')} of a shape that does not fit, {first.wanted} wanted and {first.found} stored: {lines}."
        + (" It is the same transposed." if _transposed(first) else ""),
        names=names, parameters=parameters, wanted=first.wanted, found=first.found,
        mend=_cure(case, names, transposed=_transposed(first)),
    )  # fmt: skip
    case.take(names, parameters)
    return finding


def _transposed(mismatch: Mismatch) -> bool:
    """Whether the stored shape is the wanted one with its last two sizes exchanged."""
    wanted, found = _numbers(mismatch.wanted), _numbers(mismatch.found)
    return len(wanted) > 1 and wanted != found and [*wanted[:-2], wanted[-1], wanted[-2]] == found


def _cure(case: Case, names: list[str], *, transposed: bool) -> str:
    elsewhere = case.loads_elsewhere(names) if names else None
    if elsewhere:
        return f"Use {elsewhere.id}, which loads them."
    if any(0 in (t.shape or ()) for n in names if (t := case.facts.checkpoint.tensors.get(n)) is not None):
        return "Gather the parameters before saving (ZeRO-3: stage3_gather_16bit_weights_on_model_save): one rank's part was saved."
    if transposed:
        return "Transpose the last two axes when saving, or use software that reads this layout."
    return "Take them from the source of this checkpoint, or mend the config."


def _others_fit(case: Case, names: list[str]) -> bool:
    """Whether the same tensor of another layer fits: then the config is not to blame."""
    wrong = {n for m in case.plan.mismatches for n in m.names}
    return any(other not in wrong for n in names for other in case.facts.shapes.get(shape(n), ()))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"[0-9]+", text)]


def _differing(mismatch: Mismatch) -> Pairs:
    """Empty when the shapes have different ranks."""
    wanted, found = _numbers(mismatch.wanted), _numbers(mismatch.found)
    if len(wanted) != len(found):
        return ()
    return tuple(sorted({(w, f) for w, f in zip(wanted, found, strict=True) if w != f}))


def _in_step(mismatch: Mismatch, said: int, held: int) -> bool:
    """Whether every size that differs does so by the same factor."""
    pairs = _differing(mismatch)
    return bool(pairs) and all(w * held == f * said for w, f in pairs)


_ROWS = re.compile(r"(^|[._])(embed_tokens|wte|word_embeddings|embed_in|shared|lm_head|embed_out)\.(weight|bias)$")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim")
_QUERIES = re.compile(r"(^|[._])(q|o|query|out)(_proj)?\.(weight|bias)$")
_KEYS = re.compile(r"(^|[._])(k|v|key|value|kv)(_proj)?\.(weight|bias)$")
_NORMS = re.compile(r"(^|[._])(q_norm|k_norm)\.weight$")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_Q_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def _vocabulary(facts: Facts, left: list[Mismatch]) -> Iterator[Cause]:
    """The size of the vocabulary, which vLLM pads to a multiple of 64."""
    members = tuple(_named(left, _ROWS))
    pairs = {p for m in members for p in _differing(m)}
    for key, said in facts.values(("vocab_size",)).items() if len(pairs) == 1 else ():
        wanted, found = next(iter(pairs))
        if wanted in (said, -(-said // 64) * 64) and found != said:
            yield Cause(key, said, found, members)
            return


def _width(facts: Facts, left: list[Mismatch]) -> Iterator[Cause]:
    """The model's width, which embeddings and norms have and from which the size of a head may follow."""
    for key, said in facts.values(_WIDTHS).items():
        plain = {f for m in left if not _KEYS.search(_name(m)) for w, f in _differing(m) if w == said and f}
        others = [k for k, v in facts.declared if v == said and _named_size(k) and k.rpartition(".")[2] not in _WIDTHS]
        if len(plain) != 1 or others:
            continue
        held = next(iter(plain))
        members = tuple(m for m in left if _in_step(m, said, held))
        if any((said, held) in _differing(m) and not _QUERIES.search(_name(m)) for m in members):
            yield Cause(key, said, held, members)
            return


def _head_width(facts: Facts, left: list[Mismatch]) -> Iterator[Cause]:
    """The size of a head, where queries and keys differ by one factor."""
    for key, said in facts.values(("head_dim",)).items():
        for queries in (m for m in left if _QUERIES.search(_name(m))):
            wanted, found = (_differing(queries) or ((0, 0),))[0]
            held = said * found // wanted if wanted and said * found % wanted == 0 else 0
            members = tuple(m for m in _named(left, _QUERIES, _KEYS, _NORMS) if held and _in_step(m, said, held))
            if any(_KEYS.search(_name(m)) for m in members):
                yield Cause(key, said, held, members)
                return


def _heads(facts: Facts, left: list[Mismatch]) -> Iterator[Cause]:
    """The number of heads, where keys and values alone, or queries alone, differ by whole heads."""
    for pattern, keys in ((_KEYS, _KV_HEADS), (_QUERIES, _Q_HEADS)):
        members = tuple(_named(left, pattern))
        pairs = {p for m in members for p in _differing(m)}
        for key, said in facts.values(keys).items() if len(pairs) == 1 else ():
            wanted, found = next(iter(pairs))
            each = wanted // said if said and wanted % said == 0 else 0
            if each and found and found % each == 0:
                yield Cause(key, said, found // each, members)
                break


def _name(mismatch: Mismatch) -> str:
    return mismatch.names[0] if mismatch.names else mismatch.parameter


def _named(left: Iterable[Mismatch], *patterns: re.Pattern[str]) -> list[Mismatch]:
    return [m for m in left if any(p.search(_name(m)) for p in patterns)]


def _named_size(key: str) -> bool:
    return re.search(r"(vocab|size|dim|num|(^|[._])n_|hidden|heads|experts)", key) is not None


def _key(facts: Facts, pairs: Pairs) -> str | None:
    """The one config entry that holds the wanted size where all that differs is one size."""
    if len(pairs) != 1 or not pairs[0][1]:
        return None
    wanted = pairs[0][0]
    keys = [k for k, v in facts.declared if v == wanted and not k.endswith("_id") and wanted > 3]
    named = [k for k in keys if _named_size(k)]
    last = {k.rpartition(".")[2] for k in named}
    return named[0] if len(last) == 1 or (last and last <= set(EXPERT_KEYS)) else None

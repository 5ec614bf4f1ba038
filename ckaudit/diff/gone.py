"""What one side alone has for no known reason, told by what it has in common: whole shards, whole layers, whole parts of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain

from msgspec.structs import replace

from ckaudit.changes import Change, Kind, Link
from ckaudit.checks.facts import ADAPTER, DRAFT_KEYS, Facts
from ckaudit.checks.layout import numbers
from ckaudit.checks.ties import flags
from ckaudit.diff.made import Sizes
from ckaudit.diff.reasons import EMBEDDING, HEAD, draft
from ckaudit.diff.units import Unit
from ckaudit.naming import Nearest, fold, folds, natural_key, printable

_FEW = 3
"""Parts, layers or kinds that a sentence names."""


def unexplained(
    kind: Kind,
    left: Mapping[str, Unit],
    absent: Set[str],
    here: Facts,
    there: Facts,
    spare: Iterable[str],
    sizes: Sizes,
) -> Iterator[Change]:
    """Changes for the units `left`, which `here` alone has. `absent` are all its tensors without a partner, explained ones too;
    `spare` are the other side's, among which a name may be found that is much alike.
    """
    finder = Nearest(spare)
    names = [m for unit in left.values() for m in unit.members]
    if kind == "removed":
        for text, hit, apart in _drafts(names, here, there):
            yield _change(kind, text, hit, finder, sizes, apart=apart)
            names = _without(names, hit)
        for text, hit in _shards(names, absent, here):
            yield _change(kind, text, hit, finder, sizes)
            names = _without(names, hit)
        for text, hit in (*_adapter(names, here, there), *_head(names, there)):
            yield _change(kind, text, hit, finder, sizes, undecidable=True)
            names = _without(names, hit)
    elif hit := [n for n in names if ADAPTER.search(n)]:
        yield _change(kind, "an adapter that was never merged", hit, finder, sizes)
        names = _without(names, hit)
    if names:
        yield _change(kind, _where(names, here), names, finder, sizes)


def _change(
    kind: Kind, text: str, names: list[str], finder: Nearest, sizes: Sizes, *, undecidable: bool = False, apart: bool = False
) -> Change:  # fmt: skip
    names = sorted(names, key=natural_key)
    links = [Link((n,), ()) if kind == "removed" else Link((), (n,)) for n in names]
    alike = finder.find(names[0]) if text.startswith("`") else None  # whole parts and layers have no likes
    return replace(sizes.change(kind, None, text, links, undecidable=undecidable, nearest=alike), apart=apart)


def _without(names: list[str], taken: Iterable[str]) -> list[str]:
    gone = set(taken)
    return [n for n in names if n not in gone]


def _adapter(names: list[str], here: Facts, there: Facts) -> Iterator[tuple[str, list[str]]]:
    """An unmerged adapter that B does not have any more."""
    hit = [n for n in names if ADAPTER.search(n)]
    own = [n for n in here.matching(ADAPTER) if ".base_layer." not in n]
    if hit and len(hit) == len(own) and not there.matching(ADAPTER):
        yield "an adapter: merged into the weights, or left out; headers cannot tell which", hit


def _head(names: list[str], there: Facts) -> Iterator[tuple[str, list[str]]]:
    """A head that may be tied: the config does not say."""
    hit = [n for n in names if HEAD.search(n) and n.endswith(".weight")]
    if hit and not flags(there) and there.matching(EMBEDDING) and not there.matching(HEAD):
        yield "the head, which may be tied to the embedding: the config of B does not say", hit


def _drafts(names: list[str], here: Facts, there: Facts) -> Iterator[tuple[str, list[str], bool]]:
    """Draft layers, all of them or a part; and whether B's config leaves the model whole without them."""
    drafts = draft(here)
    if hit := [n for n in names if n in drafts]:
        promised = {k: v for k, v in there.values(DRAFT_KEYS).items() if v}
        part = f"a part of the draft layers (MTP), {len(hit)} of {len(drafts)} tensors"
        text = "draft layers (MTP), all of them" if len(hit) == len(drafts) else part
        also = "".join(f", which the config of B announces ({k}: {v})" for k, v in list(promised.items())[:1])
        yield text + also, hit, len(hit) == len(drafts) and not promised


def _shards(names: list[str], absent: Set[str], here: Facts) -> Iterator[tuple[str, list[str]]]:
    """Source shards of which nothing arrived: an exporter that writes whole shards, or a download, lost them."""
    tensors = here.checkpoint.tensors
    total = Counter(t.shard for t in tensors.values())
    gone = Counter(tensors[n].shard for n in absent)
    whole = [s for s in total if gone[s] == total[s] and total[s] > 1]
    if not whole or len(whole) == len(total):
        return
    hit = [n for n in names if tensors[n].shard in whole]
    shards = sorted({tensors[n].shard for n in hit}, key=natural_key)
    if shards:
        others = sum(total[s] for s in shards) - len(hit)
        also = f", of which {others} more are told apart" if others else ""
        yield f"all of source shard {_listed(fold(shards))}{also}", hit


def _where(names: list[str], here: Facts) -> str:
    """Where these tensors are: whole parts of their checkpoint, whole layers, and for what is left the names, folded."""
    told: list[str] = []
    covered = 0
    for text, hit in _places(names, here):
        if len(told) == _FEW:
            break
        told.append(text)
        covered += len(hit)
    return ", ".join(told) + (f" and {len(names) - covered} more" if covered < len(names) else "")


def _places(names: list[str], here: Facts) -> Iterator[tuple[str, list[str]]]:
    for path, hit in _parts(names, here):
        yield f"all of `{printable(path)}.` ({len(hit)})", hit
        names = _without(names, hit)
    chosen = set(names)
    for path, stack in here.layers.items():
        whole = [i for i in stack.indices if chosen.issuperset(stack.names(i))]
        if whole:
            hit = stack.names(*whole)
            yield f"layer{'s' if len(whole) > 1 else ''} {numbers(whole)} of `{printable(path)}`", hit
            chosen.difference_update(hit)
    for kind in folds(chosen):
        yield f"`{kind.text}`", kind.members()


def _listed(words: list[str]) -> str:
    return ", ".join(words[:_FEW]) + (f" and {len(words) - _FEW} more" if len(words) > _FEW else "")


def _parts(names: list[str], here: Facts) -> list[tuple[str, list[str]]]:
    """The outermost paths (no number in them, at least three tensors) of which every tensor is among `names`, largest first."""
    chosen = Counter(chain.from_iterable(map(_paths, names)))
    total = Counter(p for p in chain.from_iterable(map(_paths, here.checkpoint.tensors)) if p in chosen)
    whole = {p for p, n in chosen.items() if n == total[p] and n > 2}
    outer = [p for p in whole if p.rpartition(".")[0] not in whole]
    held = {p: [n for n in names if n.startswith(f"{p}.")] for p in outer}
    return sorted(held.items(), key=lambda item: (-len(item[1]), item[0]))


def _paths(name: str) -> Iterator[str]:
    """The paths above a tensor, down to its first number."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        following = name.find(".", at + 1)
        if following >= 0 and name[at + 1 : following].isdecimal():
            return
        at = following

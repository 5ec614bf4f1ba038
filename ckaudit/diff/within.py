"""What changed within pairs: quantisation, dtypes, shapes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from ckaudit.changes import Change, Link
from ckaudit.checks.names import HARMLESS
from ckaudit.diff.made import Sizes
from ckaudit.diff.pairing import Pairing
from ckaudit.diff.reasons import reshaped as reasons
from ckaudit.diff.units import Unit, fits
from ckaudit.header import FLOATS

Pair = tuple[Unit, Unit]


def within(pairing: Pairing, sizes: Sizes) -> Iterator[Change]:
    """Every change of what two sides have in common."""
    parts = [
        (one, other)
        for groups in pairing.relaid.values()
        for group in groups
        for one in group.old
        for other in group.new
    ]
    told = list(_quantised(pairing.pairs, parts, sizes))
    yield from told
    plain = [p for p in pairing.pairs if _plain(p)]
    lost = {n for change in told if change.rule is None for n in change.old}
    casts, cast_parts = ([p for p in some if _plain(p) and p[0].name not in lost] for some in (plain, parts))
    yield from _retyped(casts, cast_parts, pairing.same, sizes)
    differing = [p for p in plain if None not in (p[0].shape, p[1].shape) and p[0].shape != p[1].shape]
    yield from _reshaped(differing, pairing, sizes)


def _plain(pair: Pair) -> bool:
    return pair[0].scheme is None and pair[1].scheme is None


def _quantised(pairs: Sequence[Pair], parts: Sequence[Pair], sizes: Sizes) -> Iterator[Change]:
    """Weights that are quantised on one side, or otherwise on the other; told by scheme."""
    groups: dict[str, list[Link]] = defaultdict(list)
    wrong: dict[str, list[Pair]] = defaultdict(list)
    lacking: dict[str, list[Link]] = defaultdict(list)
    scaled = any(other.scheme is not None and _eight_bits(other) for _, other in pairs)
    for i, (one, other) in enumerate((*pairs, *parts)):
        if one.scheme == other.scheme:
            if scaled and other.scheme is None and _eight_bits(other) and one.dtype in FLOATS:
                lacking[f"quantised ({one.dtype} → {other.dtype}) without the scale that others have"].append(
                    _link(one, other)
                )
            continue
        text = f"{one.scheme or one.dtype or 'plain'} → {other.scheme or other.dtype or 'plain'}"
        weight, packed = (one, other) if one.scheme is None else (other, one)
        if other.lacks is not None:
            lacking[f"quantised ({text}) without `{other.lacks}`"].append(_link(one, other))
        elif i < len(pairs) and weight.scheme is None and not fits(weight, packed):
            wrong[text].append((one, other))
        else:
            groups[text].append(_link(one, other))
    for text, links in groups.items():
        yield sizes.change("quantised", "quantised", text, links)
    for text, links in lacking.items():
        yield sizes.change("quantised", None, text, links)
    for text, bad in wrong.items():
        one, other = bad[0]
        yield sizes.change(
            "reshaped", None, f"quantised ({text}), and what is stored is not of the weight's size", _links(bad),
            wanted=_shape(one), found=_shape(other),
        )  # fmt: skip


def _eight_bits(unit: Unit) -> bool:
    return unit.dtype is not None and unit.dtype.startswith("F8_")


def _retyped(pairs: list[Pair], parts: list[Pair], same: Mapping[str | None, int], sizes: Sizes) -> Iterator[Change]:
    """Casts. One is explained where every tensor of a dtype took part in it, and most of the checkpoint did."""
    links: dict[tuple[str, str], list[Link]] = defaultdict(list)
    counts: Counter[tuple[str | None, str | None]] = Counter({(d, d): n for d, n in same.items()})
    quiet: list[Link] = []
    for one, other in (*pairs, *parts):
        if None in (one.dtype, other.dtype):
            continue
        if one.dtype != other.dtype and HARMLESS.search(one.name):
            quiet.append(_link(one, other))
            continue
        counts[one.dtype, other.dtype] += 1
        if one.dtype != other.dtype:
            links[str(one.dtype), str(other.dtype)].append(_link(one, other))
    if quiet:
        yield sizes.change("retyped", "buffer", "tables that every loader computes by itself", quiet)
    most = 2 * sum(n for (x, y), n in counts.items() if x != y) >= sum(counts.values())
    for (before, after), changed in links.items():
        rest = sum(n for (x, y), n in counts.items() if x == before and y != after)
        uniform = most and not rest and {before, after} <= FLOATS
        text = f"{before} → {after}"
        if not uniform:
            kept = counts[before, before]
            text = f"{len(changed)} of {len(changed) + rest} {before} tensors are {after} in B" + (
                f", {kept} kept their dtype" if kept else ""
            )
            if not rest:
                text = f"the only {before} tensors are {after} in B, and most tensors kept their dtype"
        yield sizes.change("retyped", "cast" if uniform else None, text, changed, wanted=before, found=after)


def _reshaped(pairs: list[Pair], pairing: Pairing, sizes: Sizes) -> Iterator[Change]:
    found = reasons(pairs, pairing.a, pairing.b)
    explained: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    left: dict[str, list[Pair]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if i in found:
            explained[found[i].rule, found[i].text].append(pair)
        else:
            left[_how(pair)].append(pair)
    for reason in found.values():
        if group := explained.pop((reason.rule, reason.text), None):
            yield sizes.change(
                "reshaped",
                reason.rule,
                reason.text,
                _links(group),
                wanted=_shape(group[0][0]),
                found=_shape(group[0][1]),
            )
    for text, bad in left.items():
        yield sizes.change("reshaped", None, text, _links(bad), wanted=_shape(bad[0][0]), found=_shape(bad[0][1]))


def _how(pair: Pair) -> str:
    one, other = pair[0].shape or (), pair[1].shape or ()
    if (len(one) > 1 and one[::-1] == other) or (
        len(one) == len(other) == 3 and (*one[:-2], one[-1], one[-2]) == other
    ):
        return "transposed"
    return "laid out otherwise, with the same number of elements" if prod(one) == prod(other) else "of another size"


def _links(pairs: Iterable[Pair]) -> list[Link]:
    return [_link(a, b) for a, b in pairs]


def _link(one: Unit, other: Unit) -> Link:
    return Link(one.members, other.members)


def _shape(unit: Unit) -> str:
    return (
        "unknown"
        if unit.shape is None and unit.bits is None
        else str(list(unit.shape))
        if unit.shape is not None
        else f"{unit.bits // 8 if unit.bits else 0} bytes"
    )

"""CK120 to CK129 and CK132 to CK134: the index by itself and against the headers of its shards."""

from __future__ import annotations

from collections.abc import Iterator

from ckaudit.checkpoint.layout import sequences
from ckaudit.checks.container.whole import Whole, what
from ckaudit.findings import Check, Finding, Severity, Skip, finding
from ckaudit.naming import natural_key

INDEX_TEXT = Check("CK120", "index is not JSON", "error")
INDEX_FORM = Check("CK121", "malformed index", "error")
INDEX_EMPTY = Check("CK122", "index without tensors", "error")
INDEX_TWICE = Check("CK123", "tensor twice in the index", "error")
SHARD_NAME = Check("CK124", "index points outside the folder", "error")
SHARD_MISSING = Check("CK125", "shard missing", "error")
ABSENT = Check("CK126", "tensor not in the shard that the index names", "error")
ELSEWHERE = Check("CK127", "tensor in another shard than the index says", "warning")
UNINDEXED = Check("CK128", "tensor that the index does not list", "warning")
DUPLICATE = Check("CK129", "tensor in two shards", "error")
TOTAL_SIZE = Check("CK132", "total_size is wrong", "warning")
STALE = Check("CK133", "index of another split", "error")
FOREIGN = Check("CK134", "index of another model", "error")

_OF_BOTH = (ABSENT, ELSEWHERE, UNINDEXED, DUPLICATE, TOTAL_SIZE, STALE, FOREIGN)
"""What needs the headers beside the index."""
CHECKS = (
    INDEX_TEXT, INDEX_FORM, INDEX_EMPTY, INDEX_TWICE, SHARD_NAME, SHARD_MISSING, ABSENT, ELSEWHERE, UNINDEXED, DUPLICATE, TOTAL_SIZE,
    STALE, FOREIGN,
)  # fmt: skip


def run(whole: Whole) -> Iterator[Finding]:
    """What is wrong with the index, or with the shards by its word."""
    yield from _index(whole)
    yield from _wrong_index(whole)
    yield from _missing(whole)
    yield from _disagreements(whole)
    yield from _duplicates(whole)
    yield from _total(whole)


def skips(whole: Whole) -> Iterator[Skip]:
    """Which of these checks want headers, or files, that are not there."""
    if whole.one_file:
        if any(s.total > 1 for s in sequences([whole.one_file])):
            yield Skip(SHARD_MISSING.id, "one file of a set was named, and the others were left alone")
        return
    unread = len(whole.shards) - len(whole.headers)
    if whole.index_only:
        yield Skip(SHARD_MISSING.id, "no weights are here beside the index")
    if whole.index is not None and unread:
        few = "no header was" if unread == len(whole.shards) else f"{unread} of {len(whole.shards)} headers were not"
        for check in _OF_BOTH:
            yield Skip(check.id, f"{few} there to hold against the index")


_KINDS = {
    "index-json": (INDEX_TEXT, "Write the index again from the headers of the shards."),
    "index-form": (INDEX_FORM, "Write the index again from the headers of the shards."),
    "index-twice": (INDEX_FORM, "Write the index again from the headers of the shards."),
    "index-metadata": (INDEX_FORM, 'Add "metadata": {"total_size": BYTES} to it.'),
    "index-empty": (INDEX_EMPTY, "Write the index from the headers of the shards."),
    "index-duplicate": (INDEX_TWICE, "Keep the entry whose shard holds the tensor."),
    "shard-name": (SHARD_NAME, "Name each shard by its plain file name, beside the index."),
}
_SAYS = {
    "index-json": "{path} cannot be parsed: {found}.",
    "index-form": "{path} has {found} where {wanted} should be.",
    "index-twice": "{path} has a key twice; readers keep the last.",
    "index-metadata": "{path} has no metadata object, which transformers asks for before anything else.",
    "index-empty": "{path} lists no tensors, so loaders that follow it load nothing.",
    "index-duplicate": "{path} lists a tensor twice; readers keep the last ({found}).",
    "shard-name": "{path} names a file that is not in its folder by a plain name: {found}.",
}


def _index(whole: Whole) -> Iterator[Finding]:
    index = whole.index
    if index is None:
        return
    codes = dict.fromkeys(defect.code for defect in index.defects)
    for code in codes:
        if code not in _KINDS:
            continue
        check, mend = _KINDS[code]
        cases = [d for d in index.defects if d.code == code]
        message = _SAYS[code].format(path=index.path, found=cases[0].found, wanted=cases[0].wanted)
        names = {d.name if d.name and code in ("index-duplicate", "shard-name") else index.path for d in cases}
        mild: Severity | None = "warning" if code == "index-twice" else None  # every reader keeps the last
        yield finding(
            check,
            message,
            names,
            severity=mild,
            count=len(cases),
            wanted=cases[0].wanted,
            found=cases[0].found,
            mend=mend,
        )


def _wrong_index(whole: Whole) -> Iterator[Finding]:
    """An index that does not belong to the files, told as that and not as the thousand contradictions that follow."""
    index = whole.index
    if index is None or not (whole.obsolete or whole.foreign) or whole.one_file:
        return
    held = {name for header in whole.headers.values() for name in header.tensors}
    covered = sum(name in held for name in index.weight_map)
    facts = f"{covered:,} of its {len(index.weight_map):,} names are among the {len(held):,} in the files"
    stale = 2 * covered >= len(index.weight_map)
    if whole.rivals:
        return
    lead = f"{index.path} names " + (
        "files that are not here" if whole.obsolete else "tensors that its files do not hold"
    )
    yield finding(
        STALE if stale else FOREIGN,
        f"{lead}; {facts}.",
        [index.path],
        wanted=", ".join(sorted(whole.named)[:3]),
        found=", ".join(sorted(whole.headers)[:3]),
        mend="Write the index again from the headers of the files that are here."
        + ("" if stale else " First make sure that these are the files of the model."),
    )


def _missing(whole: Whole) -> Iterator[Finding]:
    named = (whole.checkpoint.config or {}).get("transformers_weights")
    if isinstance(named, str) and named not in whole.files and not whole.one_file:
        yield finding(
            SHARD_MISSING,
            f"config.json says that the weights are in {named}, and there is no such file.",
            [named],
            blame="config",
            mend="Correct transformers_weights in config.json, or take it out.",
        )
    if whole.missing and not whole.index_only:
        lost = [name for path in whole.missing for name in whole.named.get(path, ())]
        yield finding(
            SHARD_MISSING,
            f"{whole.missing[0]} is not there, and {len(lost):,} tensors with it"
            + (f" and with {len(whole.missing) - 1} more." if whole.missing[1:] else "."),
            whole.missing,
            wanted=f"{len(whole.shards)} shards",
            found=f"{len(whole.shards) - len(whole.missing)}",
            mend="Fetch or save the missing files.",
        )


def _disagreements(whole: Whole) -> Iterator[Finding]:
    if whole.obsolete or whole.foreign or whole.index is None:
        return
    lost = {name: path for name, path in whole.absent.items() if name not in whole.elsewhere}
    if lost:
        name, path = min(lost.items(), key=lambda item: natural_key(item[0]))
        kept = {p for p, s in whole.strays.items() if s.header and any(n in s.header.tensors for n in lost)}
        yield finding(
            ABSENT,
            f"{whole.index.path} lists tensors that the shard it names does not hold ({name} in {path})"
            + (f"; {min(kept)} has some, which the index does not name." if kept else "."),
            lost,
            wanted=f"{name} in {path}",
            found="not in its header",
            mend="Save the shard with them, or take them out of the index if the model does not need them.",
        )
    moved = {name: path for name, path in whole.elsewhere.items() if name in whole.index.weight_map}
    if moved:
        name, path = min(moved.items(), key=lambda item: natural_key(item[0]))
        yield finding(
            ELSEWHERE,
            f"{whole.index.path} lists {name} in {whole.absent[name]}, and {path} holds it; readers that open one tensor fail.",
            moved,
            bytes=whole.nbytes(moved),
            wanted=whole.absent[name],
            found=path,
            mend="Write the index again from the headers of the shards.",
        )
    if whole.unindexed:
        name, path = min(whole.unindexed.items(), key=lambda item: natural_key(item[0]))
        yield finding(
            UNINDEXED,
            f"{path} holds tensors that {whole.index.path} does not list ({name}); readers that go by the index drop them.",
            whole.unindexed,
            bytes=whole.nbytes(whole.unindexed),
            mend="Write the index again from the headers of the shards.",
        )


def _duplicates(whole: Whole) -> Iterator[Finding]:
    if len(whole.headers) < 2:
        return
    first: dict[str, str] = {}
    twice: dict[str, tuple[str, str]] = {}
    for path, header in whole.headers.items():
        for name in header.tensors:
            if name in first:
                twice[name] = (first[name], path)
            else:
                first[name] = path
    if not twice:
        return
    name, (one, other) = min(twice.items(), key=lambda item: natural_key(item[0]))
    a, b = whole.headers[one].tensors[name], whole.headers[other].tensors[name]
    splits = [s for s in sequences(whole.headers) if len(s.present) > 1]
    sets = f" {len(splits)} splits lie side by side." if len(splits) > 1 else ""
    yield finding(
        DUPLICATE,
        f"{name} is in {one} and in {other}; loaders keep the one that they read last.{sets}",
        twice,
        bytes=whole.nbytes(twice),
        wanted=f"{what(a)} in {one}",
        found=f"{what(b)} in {other}",
        mend="Remove the files of the other split." if sets else "Keep one of them.",
    )


def _total(whole: Whole) -> Iterator[Finding]:
    index = whole.index
    if index is None or not index.weight_map or whole.obsolete or whole.foreign or index.broken:
        return
    if any(d.code == "index-metadata" for d in index.defects):
        return  # told as that
    wrong = [d for d in index.defects if d.code == "total-size"]
    if wrong:
        message = f"total_size of {index.path} is not a number of bytes."
        yield finding(
            TOTAL_SIZE, message, [index.path], wanted=wrong[0].wanted, found=wrong[0].found, mend="Correct it."
        )
        return
    if index.total_size is None:
        message = f"{index.path} has no total_size; few readers ask for it."
        yield finding(TOTAL_SIZE, message, [index.path], severity="note", mend="Add it when the index is next written.")
        return
    total = sum(t.nbytes for t in whole.checkpoint.tensors.values() if t.nbytes is not None)
    known = len(whole.headers) == len(whole.shards)
    if index.total_size <= 0 or (known and not _explained(whole, index.total_size - total)):
        yield finding(
            TOTAL_SIZE,
            f"{index.path} counts {index.total_size:,} bytes, and "
            + (f"the tensors have {total:,}." if known else "lists tensors."),
            [index.path],
            bytes=abs(total - index.total_size) if known else 0,
            wanted=f"{total}" if known else "the bytes of its tensors",
            found=f"{index.total_size}",
            mend="Correct total_size; tools that plan memory or show progress go by it.",
        )


def _explained(whole: Whole, surplus: int) -> bool:
    """Whether what the index counts too much (or, below 0, too little) comes from tensors that are already told of."""
    if surplus > 0 and len(whole.absent) > len(whole.elsewhere):
        return True
    twice = sum(i.nbytes for h in whole.headers.values() for i in h.tensors.values()) if surplus > 0 else 0
    return surplus in (0, -whole.nbytes(whole.unindexed), twice - whole.nbytes(whole.checkpoint.tensors))

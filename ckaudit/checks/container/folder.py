"""CK130, CK131 and CK135 to CK138: what lies in the folder against what loaders look for there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckaudit.checkpoint import components
from ckaudit.checkpoint.layout import doubles, loaded_by_name, other_weights, sequences
from ckaudit.checks.container.whole import Whole, what
from ckaudit.findings import Check, Finding, finding
from ckaudit.naming import natural_key

STRAY = Check("CK130", "safetensors file outside the checkpoint", "warning")
RIVALS = Check("CK131", "two checkpoints in one folder", "error")
NO_INDEX = Check("CK135", "weights that loaders do not find", "error")
GAP = Check("CK136", "gap in the numbered shards", "error")
SUBFOLDER = Check("CK137", "more weights in sub-folders", "note")
NOT_AUDITED = Check("CK138", "no safetensors weights", "error")
CHECKS = (STRAY, RIVALS, NO_INDEX, GAP, SUBFOLDER, NOT_AUDITED)


def run(whole: Whole) -> Iterator[Finding]:
    """Files that lack, that nobody finds, and that are too many."""
    yield from _gaps(whole)
    yield from _unfound(whole)
    yield from _rivals(whole)
    yield from _strays(whole)
    yield from _subfolders(whole)
    yield from _nothing(whole)


def _gaps(whole: Whole) -> Iterator[Finding]:
    """Numbered files that lack one of their number, where the index does not already say so."""
    if whole.one_file or whole.index_only or whole.obsolete:
        return
    for sequence in sequences({*whole.shards, *whole.strays}):
        lacking = sequence.missing
        if not lacking or any(path in whole.missing for path in sequence.present.values()):
            continue
        indexed = any(path in whole.named for path in sequence.present.values())
        numbers = ", ".join(str(n) for n in lacking[:10]) + (", …" if lacking[10:] else "")
        yield finding(
            GAP,
            f"Of the {sequence.total:,} files that {next(iter(sequence.present.values()))} counts, {numbers} "
            + ("is" if len(lacking) == 1 else "are")
            + (
                " not there, and the index does not ask for it."
                if indexed
                else " not there, and no index says what was in it."
            ),
            sequence.present.values(),
            severity="warning" if indexed else "error",
            count=len(lacking),
            wanted=f"{sequence.total} files",
            found=f"{len(sequence.present)}",
            mend="Save or fetch the whole set.",
        )


def _unfound(whole: Whole) -> Iterator[Finding]:
    """Weights under names that no loader looks for: shards without an index, one file of another name."""
    if whole.index is not None or whole.one_file or not whole.shards or _named_for_loaders(whole):
        return
    if any(s.missing for s in sequences(whole.shards)):
        return  # told as a gap
    paths = list(whole.shards)
    config = whole.checkpoint.config or {}
    expected = bool(config.get("architectures") or config.get("model_type"))
    several = len(paths) > 1
    pickles = [p for p in ("pytorch_model.bin", "pytorch_model.bin.index.json") if p in whole.files]
    yield finding(
        NO_INDEX,
        (f"{len(paths)} files and no index: " if several else f"{paths[0]} is not called model.safetensors: ")
        + (f"transformers loads {pickles[0]} instead" if pickles else "transformers finds no weights here")
        + ", though engines that take every safetensors file find them.",
        paths,
        severity="error" if expected else "warning",
        bytes=whole.sizes(paths),
        wanted="model.safetensors.index.json" if several else "model.safetensors",
        found="no index" if several else paths[0],
        mend="Write an index from the headers of the files." if several else "Rename it to model.safetensors.",
    )


def _named_for_loaders(whole: Whole) -> bool:
    named = (whole.checkpoint.config or {}).get("transformers_weights")
    return len(whole.shards) == 1 and (loaded_by_name(next(iter(whole.shards))) or next(iter(whole.shards)) == named)


def _rivals(whole: Whole) -> Iterator[Finding]:
    if not whole.rivals or whole.index is None:
        return
    path = next(iter(whole.shards))
    others = whole.rivals
    same, example = _compare(whole, others)
    yield finding(
        RIVALS,
        f"{path} lies beside {whole.index.path}, which names other files: transformers loads the one, vLLM the others.{example}",
        [path, *others],
        severity="warning" if same else "error",
        bytes=whole.sizes([path]),
        wanted="one of them",
        found="both, with the same tensors" if same else "both, and they differ",
        mend=f"Remove {path}, or the index and its files.",
    )


def _compare(whole: Whole, paths: Iterable[str]) -> tuple[bool, str]:
    """Whether the strays `paths` hold the very tensors of the checkpoint, and a pair that differs."""
    theirs = {n: i for p in paths if (h := whole.strays[p].header) for n, i in h.tensors.items()}
    ours = {n: i for header in whole.headers.values() for n, i in header.tensors.items()}
    for name in sorted(theirs.keys() & ours.keys(), key=natural_key):
        if (ours[name].dtype, ours[name].shape) != (theirs[name].dtype, theirs[name].shape):
            return False, f" {name} is {what(ours[name])} in the one and {what(theirs[name])} in the other."
    return theirs.keys() == ours.keys(), ""


def _strays(whole: Whole) -> Iterator[Finding]:
    """Safetensors files beside the checkpoint that loaders which take every file would read too."""
    broken = whole.index.broken if whole.index is not None else frozenset()
    named = {p for p, s in whole.strays.items() if broken and s.header and not broken.isdisjoint(s.header.tensors)}
    paths = [p for p in whole.strays if p not in whole.rivals and p not in named]
    if paths and not whole.one_file:
        theirs = {n for p in paths if (h := whole.strays[p].header) for n in h.tensors}
        ours = whole.checkpoint.tensors
        both = sum(name in ours for name in theirs)
        _, example = _compare(whole, paths)
        safe = whole.index is not None and bool(whole.named)
        yield finding(
            STRAY,
            f"{paths[0]} is not part of the checkpoint, and loaders that take every file read it; "
            f"{both:,} of its {len(theirs):,} names are in the checkpoint too.{example}",
            paths,
            severity="warning" if safe or not both else "error",
            bytes=whole.sizes(paths),
            wanted=f"{len(whole.shards)} files",
            found=f"{len(paths)} more",
            mend="Move it out of the folder.",
        )
    known = [
        p for p in whole.files if "/" not in p and p.endswith(".safetensors") and doubles(p) and p not in whole.shards
    ]
    if known and not whole.one_file:
        yield finding(
            STRAY,
            f"{known[0]} is not audited: by its name it holds {doubles(known[0])}.",
            known,
            severity="note",
            bytes=whole.sizes(known),
            mend="Nothing, if it is meant to be there; a download that takes every file takes it too.",
        )


def _subfolders(whole: Whole) -> Iterator[Finding]:
    if whole.one_file or not whole.shards:
        return
    paths = [p for p in whole.files if "/" in p and p.endswith(".safetensors") and p not in whole.shards]
    if paths:
        extra, main = whole.sizes(paths), whole.sizes(whole.shards)
        yield finding(
            SUBFOLDER,
            f"Sub-folders hold more safetensors files ({paths[0]}), which are not part of this audit.",
            paths,
            severity="warning" if 2 * extra >= main > 0 else "note",
            bytes=extra,
            mend="Audit such a folder by itself, or leave it out of downloads.",
        )


def _nothing(whole: Whole) -> Iterator[Finding]:
    if whole.shards or whole.index is not None:
        return
    folders = components(whole.files)
    others = [] if folders else other_weights(whole.files)
    mend = "Save or upload the weights as model.safetensors."
    if folders:
        mend = f"Audit each folder by itself, such as {whole.checkpoint.name}/{folders[0]}."
    elif others:
        mend = "Convert the weights to safetensors."
    yield finding(
        NOT_AUDITED,
        f"Nothing was audited: {whole.checkpoint.unaudited}.",
        folders or others,
        severity="warning" if folders or others else "error",
        bytes=whole.sizes(others),
        wanted="safetensors files",
        mend=mend,
    )

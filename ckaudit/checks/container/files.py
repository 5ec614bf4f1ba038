"""CK101 to CK116: each file by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckaudit.checkpoint import Checkpoint, Shard
from ckaudit.findings import Check, Finding, Skip, finding
from ckaudit.header import Defect

NOT_SAFETENSORS = Check("CK101", "not a safetensors file", "error")
OVER_CAP = Check("CK102", "header longer than readers allow", "error")
CUT_SHORT = Check("CK103", "file cut short", "error")
HEADER_TEXT = Check("CK104", "header is not valid JSON", "error")
NAME_TWICE = Check("CK105", "tensor stored twice in one file", "error")
BAD_ENTRY = Check("CK106", "malformed tensor entry", "error")
BAD_DTYPE = Check("CK107", "unknown dtype", "error")
BAD_PLACE = Check("CK108", "tensors overlap or leave a gap", "error")
BAD_SIZE = Check("CK109", "shape does not fit the stored bytes", "error")
TRAILING = Check("CK110", "bytes after the last tensor", "error")
BAD_METADATA = Check("CK111", "metadata is not text", "error")
SURPLUS = Check("CK112", "header says more than the format allows", "warning")
NO_FORMAT = Check("CK113", "no format in the metadata", "warning")
EMPTY = Check("CK114", "file without tensors", "note")
UNREADABLE = Check("CK115", "file cannot be read", "error")
BAD_CONFIG = Check("CK116", "config.json is not JSON", "error")

_OF_HEADERS = (
    NOT_SAFETENSORS, OVER_CAP, CUT_SHORT, HEADER_TEXT, NAME_TWICE, BAD_ENTRY, BAD_DTYPE, BAD_PLACE, BAD_SIZE, TRAILING,
    BAD_METADATA, SURPLUS, NO_FORMAT, EMPTY,
)  # fmt: skip
CHECKS = (*_OF_HEADERS, UNREADABLE, BAD_CONFIG)


class _Kind(NamedTuple):
    """What defects of one code mean, and the cure."""

    check: Check
    meaning: str
    mend: str


_FETCH = "Fetch the file again, and compare its size with the source's."
_SAVE = "Save the file again with the safetensors library."

# For CK101, by what the file is (a part of what `ckaudit.sniff` says).
_INSTEAD = {
    "Git LFS pointer": "Run `git lfs pull`, or download the repo with the Hub's own client.",
    "torch.save": "Convert the checkpoint to safetensors; another name is not enough.",
    "pickle": "Convert the checkpoint to safetensors; another name is not enough.",
    "GGUF": "Give the file its own ending, and the safetensors files to the engines that read those.",
    "page": "Open it to see what the server had to say, and fetch the file again.",
    "saved in place": "Open it to see what the server had to say, and fetch the file again.",
}

# By `Defect.code`, as `ckaudit.header` gives them.
_KINDS: dict[str, _Kind] = {
    "not-safetensors": _Kind(NOT_SAFETENSORS, "{where} is {found}.", _FETCH),
    "header-over-cap": _Kind(
        OVER_CAP, "The header of {where} has {found}; the safetensors library refuses more than 100,000,000.",
        "Split the file into shards.",
    ),
    "header-truncated": _Kind(CUT_SHORT, "{where} ends inside its header.", _FETCH),
    "data-truncated": _Kind(CUT_SHORT, "{where} ends before its data does: {lost} are not whole.", _FETCH),
    "header-json": _Kind(HEADER_TEXT, "The header of {where} cannot be read to its end: {found}.", _SAVE),
    "name": _Kind(HEADER_TEXT, "The header of {where} has a name that is not text: {found}.", _SAVE),
    "duplicate-name": _Kind(
        NAME_TWICE, "The header of {where} has an entry of one name twice; readers keep the last without a word.",
        "Find out which one is meant, and save the file again without the other.",
    ),
    "entry": _Kind(BAD_ENTRY, "The header of {where} has an entry that readers refuse.", _SAVE),
    "offsets": _Kind(BAD_ENTRY, "The header of {where} has a tensor that ends before it begins.", _SAVE),
    "overflow": _Kind(BAD_ENTRY, "The header of {where} has a tensor too large to count in 64 bits.", _SAVE),
    "more-defects": _Kind(BAD_ENTRY, "The header of {where} has {found}; the rest is not listed.", _SAVE),
    "dtype": _Kind(
        BAD_DTYPE, "{where} has a dtype that the safetensors format does not know.",
        "Save the tensor in a dtype of the format, or name the reader that is meant to understand it.",
    ),
    "overlap": _Kind(BAD_PLACE, "In {where} a tensor begins inside another.", _SAVE),
    "hole": _Kind(BAD_PLACE, "In {where} bytes before a tensor belong to none; readers refuse the file.", _SAVE),
    "shape": _Kind(BAD_SIZE, "In {where} dtype and shape need another number of bytes than the offsets span.", _SAVE),
    "sub-byte": _Kind(BAD_SIZE, "In {where} a tensor of a dtype below 8 bits does not end on a whole byte.", _SAVE),
    "trailing-bytes": _Kind(
        TRAILING, "{where} goes on after its last tensor; readers refuse it.",
        "Cut the file where its last tensor ends, or fetch it again.",
    ),
    "metadata": _Kind(BAD_METADATA, "__metadata__ of {where} is not an object of strings; readers refuse it.", _SAVE),
    "duplicate-metadata": _Kind(SURPLUS, "__metadata__ of {where} has a key twice; readers keep one of them.", _SAVE),
    "metadata-length": _Kind(SURPLUS, "__metadata__ of {where} has so many pairs that not all were looked at.", _SAVE),
    "extra-field": _Kind(SURPLUS, "{where} has entries with fields that readers ignore.", _SAVE),
}  # fmt: skip


def run(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is wrong with each file by itself."""
    yield from _headers(checkpoint)
    yield from _unmarked(checkpoint)
    yield from _empty(checkpoint)
    yield from _unreadable(checkpoint)


def _headers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One finding for each check, and for each kind of thing that a file is instead of safetensors."""
    groups: dict[tuple[str, str], list[tuple[Shard, Defect]]] = {}
    for shard in (*checkpoint.shards, *checkpoint.strays):
        for defect in shard.defects:
            kind = _KINDS.get(defect.code)
            if kind is not None:
                cause = defect.found if kind.check is NOT_SAFETENSORS else ""
                groups.setdefault((kind.check.id, cause), []).append((shard, defect))
    for (_, cause), cases in sorted(groups.items()):
        shard, first = cases[0]
        kind = _KINDS[first.code]
        yield finding(
            kind.check,
            _sentence(kind.meaning, shard, first, {case.path for case, _ in cases}),
            {defect.name or case.path for case, defect in cases},
            count=len(cases),
            bytes=sum(_at_stake(case, defect) for case, defect in cases),
            wanted=first.wanted,
            found=first.found,
            mend=next((mend for word, mend in _INSTEAD.items() if cause and word in first.found), kind.mend),
        )


def _sentence(meaning: str, shard: Shard, defect: Defect, paths: set[str]) -> str:
    """The meaning with its file and, where there are several tensors or files, the first as an example."""
    text = meaning.format(where=shard.path, found=defect.found, lost=_lost(shard))
    if defect.name is not None:
        text = f"{text.removesuffix('.')} ({defect.name})."
    others = len(paths) - 1
    return text if not others else f"{text} The same holds for {others} more file{'s' * (others > 1)}."


def _lost(shard: Shard) -> str:
    """How many of the tensors of a file that is cut short end behind its end."""
    if shard.header is None or shard.size is None:
        return "tensors"
    there = shard.size - 8 - shard.header.length
    lost = sum(info.end > there for info in shard.header.tensors.values())
    return f"{lost:,} of {len(shard.header.tensors):,} tensors"


def _at_stake(shard: Shard, defect: Defect) -> int:
    """Bytes that the defect concerns: of its tensor, missing or left over at the end of the file, else of the whole file."""
    header = shard.header
    if defect.name is not None:
        info = header.tensors.get(defect.name) if header else None
        return max(0, info.nbytes) if info else 0
    if header is None or shard.size is None or defect.code not in ("data-truncated", "trailing-bytes"):
        return shard.size or 0
    end = max((info.end for info in header.tensors.values()), default=0)
    return abs(shard.size - 8 - header.length - end)


# transformers 4.57 `modeling_utils.load_state_dict`: another value is refused; up to 4.40 so is a file without metadata.
_FORMATS = frozenset({"pt", "tf", "flax", "mlx"})


def _unmarked(checkpoint: Checkpoint) -> Iterator[Finding]:
    read = [
        s
        for s in checkpoint.shards
        if s.header and s.header.tensors and not any(d.code == "metadata" for d in s.defects)
    ]
    bare = {s.path: s.header.metadata.get("format") for s in read if s.header}
    bare = {path: value for path, value in bare.items() if value not in _FORMATS}
    if bare:
        path, value = next(iter(bare.items()))
        says = "does not say which framework wrote it" if value is None else f"says format {value[:40]!r}"
        yield finding(
            NO_FORMAT,
            f"__metadata__ of {path} {says}; transformers 4 refuses such a file, 5 does not care.",
            bare,
            severity="warning" if checkpoint.config else "note",
            wanted='"format": "pt"',
            found="no format" if value is None else f'"format": {value[:40]!r}',
            mend='Save with metadata={"format": "pt"}.',
        )


def _empty(checkpoint: Checkpoint) -> Iterator[Finding]:
    bare = [s.path for s in checkpoint.shards if s.header and not s.header.tensors and not s.defects]
    if bare:
        yield finding(
            EMPTY,
            f"{bare[0]} is sound and holds no tensors.",
            bare,
            severity="note" if checkpoint.tensors else "warning",
            mend="Leave it out, unless something reads its metadata.",
        )


_LINKS = ("a link", "not a regular file")
"""How reasons begin that lie in the target itself; the others lie in the circumstances (see `source`)."""


def _unreadable(checkpoint: Checkpoint) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for shard in (*checkpoint.shards, *checkpoint.strays):
        for defect in shard.defects:
            if defect.code == "unreadable":
                reasons.setdefault(defect.found, []).append(shard.path)
    for defect in checkpoint.defects:
        if defect.code == "unreadable":
            reasons.setdefault(defect.found, []).append(defect.name or "")
        if defect.code == "config-json":
            yield finding(
                BAD_CONFIG,
                f"config.json cannot be parsed: {defect.found}.",
                ["config.json"],
                blame="config",
                wanted=defect.wanted,
                found=defect.found,
                mend="Restore config.json from the model's source.",
            )
    for reason, paths in sorted(reasons.items()):
        own = reason.startswith(_LINKS)
        yield finding(
            UNREADABLE,
            f"{paths[0]} could not be read: {reason}.",
            paths,
            severity="error" if own else "warning",
            blame="checkpoint" if own else "environment",
            found=reason,
            mend="Put the file itself in its place." if own else "Make the file readable, and audit again.",
        )


def skips(checkpoint: Checkpoint) -> Iterator[Skip]:
    """Every check of headers, where some header is not there to check; those of file sizes, where a size is not known."""
    unread = [s.path for s in checkpoint.shards if s.header is None and not any(d.code in _KINDS for d in s.defects)]
    if not checkpoint.shards:
        reason = "there is no safetensors file to read"
    elif unread and len(unread) == len(checkpoint.shards):
        reason = "no header could be read, so names come from the index alone"
    elif unread:
        reason = (
            f"the header of {unread[0]}"
            + (f" and {len(unread) - 1} more" if unread[1:] else "")
            + " was not there to read"
        )
    else:
        unsized = [s.path for s in checkpoint.shards if s.header is not None and s.size is None]
        for check in (CUT_SHORT, TRAILING) if unsized else ():
            yield Skip(check.id, f"the size of {unsized[0]} is not known")
        return
    for check in _OF_HEADERS:
        yield Skip(check.id, reason)

"""CK118: files whose bytes are not those that the Hub has. Every byte has to be read, so it is done on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckaudit.checkpoint import Checkpoint
from ckaudit.findings import Check, Finding, Skip, finding
from ckaudit.naming import printable
from ckaudit.source import Unreadable

OTHER_BYTES = Check("CK118", "file that is not the one on the Hub", "error")
CHECKS = (OTHER_BYTES,)


def known(checkpoint: Checkpoint) -> dict[str, str]:
    """The weight files of `checkpoint` of which the Hub's SHA-256 is known -> that: from the listing, the cache's blob, or what a
    download into a folder wrote beside it."""
    infos = (checkpoint.files.get(shard.path) for shard in checkpoint.shards)
    return {i.path: i.sha256 for i in infos if i is not None and i.sha256 is not None}


def run(checkpoint: Checkpoint, found: Mapping[str, str | Unreadable]) -> tuple[Finding, ...]:
    """One finding for all files whose SHA-256 is not the Hub's."""
    wanted = known(checkpoint)
    wrong = {p: h for p, h in found.items() if isinstance(h, str) and h != wanted[p]}
    if not wrong:
        return ()
    first = next(iter(wrong))
    sizes = (checkpoint.files[p].size or 0 for p in wrong)
    more = f" and {len(wrong) - 1} more are" if len(wrong) > 1 else " is"
    return (
        finding(
            OTHER_BYTES, f"{printable(first)}{more} not what the Hub has: other bytes under the right name.", wrong, bytes=sum(sizes),
            blame="environment", wanted=f"SHA-256 {wanted[first]}", found=f"SHA-256 {wrong[first]}",
            mend="Fetch again: `hf download REPO FILE --force-download`. If the file was changed on purpose, it is another model.",
        ),
    )  # fmt: skip


def skips(checkpoint: Checkpoint, found: Mapping[str, str | Unreadable]) -> Iterator[Skip]:
    """Files that could not be read, or of which nothing says what they should be."""
    wanted = known(checkpoint)
    for path, digest in found.items():
        if isinstance(digest, Unreadable):
            yield Skip(OTHER_BYTES.id, f"{printable(path)}: {digest.reason}")
    rest = [s.path for s in checkpoint.shards if s.path not in wanted]
    if rest:
        more = f" and {len(rest) - 1} more" if rest[1:] else ""
        yield Skip(OTHER_BYTES.id, f"nothing says which SHA-256 {printable(rest[0])}{more} should have")

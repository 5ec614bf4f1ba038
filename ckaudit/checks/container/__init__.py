"""CK1xx: whether the files are what they claim to be, each by itself and all together. Knows no engine."""

from __future__ import annotations

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks.container import files, folder, index
from ckaudit.checks.container.whole import Whole
from ckaudit.findings import Finding, Skip

CHECKS = tuple(sorted((*files.CHECKS, *index.CHECKS, *folder.CHECKS), key=lambda check: check.id))

UNREADABLE = frozenset(f"CK{n}" for n in (101, 102, 103, 104, 106, 107, 108, 109, 110, 111))
"""The checks whose defect the safetensors library (0.8.0) refuses, before any name is looked at."""

INCOMPLETE = frozenset(("CK120", "CK125", "CK133", "CK135"))
"""Those for which transformers raises when it gathers the files; vLLM differs by release, and its replay says so itself."""


def run(checkpoint: Checkpoint) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """What is wrong with the files and with them as a set, and what could not be judged of them."""
    whole = Whole(checkpoint)
    if not checkpoint.shards and checkpoint.index is None:
        skipped = (c for c in CHECKS if c is not folder.NOT_AUDITED)
        return tuple(folder.run(whole)), tuple(Skip(c.id, "there is no safetensors file to read") for c in skipped)
    found = (*files.run(checkpoint), *index.run(whole), *folder.run(whole))
    return found, (*files.skips(checkpoint), *index.skips(whole))

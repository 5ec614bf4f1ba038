"""CK1xx: whether the files are what they claim to be, each by itself and all together. Knows no engine."""

from __future__ import annotations

from contextlib import suppress

from packaging.version import InvalidVersion, Version

from ckaudit.checkpoint import Checkpoint
from ckaudit.checks.container import files, folder, hashes, index, settings
from ckaudit.checks.container.whole import Whole
from ckaudit.findings import Finding, Skip

CHECKS = tuple(
    sorted((*files.CHECKS, *settings.CHECKS, *hashes.CHECKS, *index.CHECKS, *folder.CHECKS), key=lambda check: check.id)
)

UNREADABLE = frozenset(f"CK{n}" for n in (101, 102, 103, 104, 106, 107, 108, 109, 110, 111))
"""The checks whose defect the safetensors library (0.8.0) refuses, before any name is looked at."""

_GATHERING = {
    "transformers": frozenset(("CK117", "CK120", "CK121", "CK122", "CK124", "CK125", "CK133", "CK135")),
    "vllm": frozenset(("CK120", "CK121", "CK122", "CK124", "CK125", "CK133")),
}
"""Those for which a loader raises when it gathers the files, or reads what lies beside them. Facts: transformers 5.24.0, `utils/hub.py`;
vLLM 0.24.0 to 0.33.0, `model_executor/model_loader/weight_utils.py`."""
_FILES_CHECKED = Version("0.26.0")
"""The release of vLLM from which on it raises for files that the index names and that are not there."""
_NOT_LOOKED_AT = {"transformers": {"index-twice"}, "vllm": {"index-twice", "index-metadata"}}
"""Defects of CK121 that a loader does not mind."""
_OUTSIDE = ("leaves the folder", "an absolute path")


def refusing(checkpoint: Checkpoint, loader: str, release: str | None) -> frozenset[str]:
    """The checks whose errors make `loader` (`transformers` or `vllm`) raise before it looks at a name."""
    found = UNREADABLE | _GATHERING[loader]
    named = set(checkpoint.index.weight_map.values()) if checkpoint.index is not None else set()
    if any(checkpoint.folder + file not in checkpoint.files for file in named):
        found |= {"CK134"}
    with suppress(InvalidVersion):
        if loader == "vllm" and release is not None and Version(release) < _FILES_CHECKED:
            found -= {"CK124", "CK125", "CK133", "CK134"}
    codes = {d.code for d in checkpoint.index.defects} if checkpoint.index is not None else set()
    if not codes & ({"index-form", "index-metadata", "index-twice"} - _NOT_LOOKED_AT[loader]):
        found -= {"CK121"}
    return found


def looks_outside(checkpoint: Checkpoint) -> bool:
    """Whether the index of a local folder names files elsewhere on this machine: a loader may find them, and they are not read here."""
    defects = checkpoint.index.defects if checkpoint.index is not None and checkpoint.kind == "local" else ()
    return any(d.code == "shard-name" and d.found.endswith(_OUTSIDE) for d in defects)


def run(checkpoint: Checkpoint) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """What is wrong with the files and with them as a set, and what could not be judged of them."""
    whole = Whole(checkpoint)
    if not checkpoint.shards and checkpoint.index is None:
        skipped = (c for c in CHECKS if c is not folder.NOT_AUDITED)
        return tuple(folder.run(whole)), tuple(Skip(c.id, "there is no safetensors file to read") for c in skipped)
    found = (*files.run(checkpoint), *settings.run(checkpoint), *index.run(whole), *folder.run(whole))
    return found, (*files.skips(checkpoint), *index.skips(whole))

"""The examples on the pages of the container checks are what the program prints for a case of `test_container`.

Run as a program (`python tests/test_container_pages.py`), it writes them anew.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import DictSource, encode, header
from test_container import FILES, SETS, SOUND, TOTAL, WHOLE, A, one

from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.checks import container
from ckaudit.findings import Finding, Report
from ckaudit.header import MAX_HEADER
from ckaudit.pipeline import describe
from ckaudit.report.terminal.findings import findings
from ckaudit.report.terminal.layout import text
from ckaudit.resources import folder

CASES = {
    "CK101": "LFS pointers", "CK103": "cut in its data", "CK104": "broken JSON", "CK105": "a name twice",
    "CK106": "an entry without shape", "CK107": "an unknown dtype", "CK108": "an overlap", "CK109": "declares more than it spans",
    "CK110": "trailing bytes", "CK111": "metadata of numbers", "CK112": "a field too many", "CK113": "no metadata",
    "CK114": "no tensors", "CK116": "config in a merge conflict", "CK117": "generation settings that are none",
    "CK120": "merge conflict", "CK121": "no metadata", "CK122": "empty",
    "CK123": "a name twice", "CK124": "path traversal", "CK125": "a shard missing", "CK126": "index lists scales that no shard has",
    "CK127": "index has two tensors in each other's shard", "CK128": "a shard has what the index lacks",
    "CK129": "a tensor in two shards", "CK130": "a file more than the index has",
    "CK131": "a 4-bit model.safetensors beside the shards of an index", "CK132": "total_size lies",
    "CK133": "index of a 30-shard split beside 15 shards", "CK134": "the base model's index beside other files",
    "CK135": "shards without an index", "CK136": "two of four shards and no index", "CK137": "a second copy in a sub-folder",
    "CK138": "only .bin",
}  # fmt: skip


def files_of(check: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The target of the example, and how its source misbehaves."""
    if check == "CK102":
        return one(encode(header(WHOLE, {"format": "pt"})[8:].ljust(MAX_HEADER + 1)) + bytes(TOTAL)), {}
    if check == "CK118":
        return SOUND, {}
    if check == "CK115":
        return SOUND, {"unreadable": {A: "a link to nothing"}}
    return (FILES if check < "CK12" else SETS)[CASES[check]][0], {}


def of_other_bytes(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[Finding, ...]]:
    """A shard whose bytes are not those that the listing of its repo tells."""
    info = msgspec.structs.replace(checkpoint.files[A], sha256=hashlib.sha256(b"as it was saved").hexdigest())
    known = msgspec.structs.replace(checkpoint, files=checkpoint.files | {A: info})
    return known, container.hashes.run(known, {A: hashlib.sha256(b"as it came").hexdigest()})


def printed(check: str) -> str:
    files, options = files_of(check)
    checkpoint = read_checkpoint(DictSource(files, **options))
    if check == "CK118":
        checkpoint, findings_ = of_other_bytes(checkpoint)
    else:
        findings_ = container.run(checkpoint)[0]
    found = [f for f in findings_ if f.check == check][:1]
    sizes = {name: t.nbytes or 0 for name, t in checkpoint.tensors.items()}
    report = Report(target=describe(checkpoint), plans=(), findings=tuple(found), sizes=sizes)
    out = text(findings(report, verbose=False), width=110, colour=False)
    return "\n".join(line.rstrip() for line in out.strip("\n").splitlines())


_EXAMPLE = re.compile(r"(?<=## Example\n\n```\n).*?(?=\n```)", re.DOTALL)


@pytest.mark.parametrize("check", [c.id for c in container.CHECKS])
def test_the_example_is_real(check: str) -> None:
    page = folder("docs/checks").joinpath(f"{check}.md").read_text(encoding="utf-8")
    example = _EXAMPLE.search(page)
    assert example is not None
    assert example[0] == printed(check)


if __name__ == "__main__":
    for row in container.CHECKS:
        path = Path(__file__).parent.parent / "docs" / "checks" / f"{row.id}.md"
        said = printed(row.id)
        path.write_text(_EXAMPLE.sub(lambda _, said=said: said, path.read_text(encoding="utf-8")), encoding="utf-8")

"""`docs/known-faults.md`, from the table. `python -m tests.known_faults.page` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckaudit.checks.catalogue import CHECKS
from tests.known_faults.cases import Elsewhere, Fault, Kind, Row
from tests.known_faults.table import ELSEWHERE, FAULTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "known-faults.md"
TITLES = {c.id: c.title for c in CHECKS}
HEAD = """# Known faults

Faults of checkpoints that were reported in public, and what ckaudit says of each. A test holds every row: a case of names, sizes and
config as the report gives them, with what the engine of the report did, must give these findings and no others. Rows in which nothing is
wrong are reports of false alarms, which must not be repeated. What the headers of one checkpoint cannot tell is at the end of its kind,
with the reason.
"""


def render() -> str:
    """The page."""
    return HEAD + "".join(line for kind in Kind for line in _kind(kind))


def _kind(kind: Kind) -> Iterator[str]:
    yield f"\n## {kind.value}\n\n| Report | What was seen | What ckaudit says |\n|---|---|---|\n"
    for fault in FAULTS:
        if fault.kind is kind:
            yield _row(fault, _says(fault))
    for other in ELSEWHERE:
        if other.kind is kind:
            yield _row(other, f"Not from headers: {other.why}." + (f" Told by {other.by}." if other.by else ""))


def _row(report: Fault | Elsewhere, says: str) -> str:
    return f"| {', '.join(map(_link, report.links))} | {report.what} | {says} |\n"


def _link(path: str) -> str:
    owner, name, _, number = path.split("/")
    return f"[{name}#{number}](https://github.com/{path})" if owner else path


def _says(fault: Fault) -> str:
    return "<br>".join(_finding(row) for row in _once(fault.says)) or "Nothing: no fault."


def _once(rows: Iterable[Row]) -> list[Row]:
    return list({row[:3]: row for row in rows}.values())


def _finding(row: Row) -> str:
    check, severity, blame, _ = row
    return f"[{check}](checks/{check}.md) {TITLES[check]} ({severity}, blame: {blame})"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

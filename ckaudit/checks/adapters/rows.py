"""The checks on adapters, and how they make a finding."""

from __future__ import annotations

from collections.abc import Iterable

from ckaudit.adapters import Adapter, Unit
from ckaudit.findings import Blame, Check, Finding, Severity
from ckaudit.findings import finding as made

NOTHING = Check("CK901", "adapter binds to nothing", "error")
PARTLY = Check("CK902", "adapter binds in part", "error")
SHAPE = Check("CK903", "adapter tensor of a wrong rank or shape", "error")
FORM = Check("CK904", "adapter tensors of a form that is dropped", "warning")
PAIR = Check("CK905", "incomplete pair of adapter tensors", "error")
DOUBLED = Check("CK906", "prefix twice in adapter names", "error")
UNSERVED = Check("CK907", "targeted module without adapter tensors", "warning")
EMPTY = Check("CK908", "adapter without weights", "error")
UNTARGETED = Check("CK909", "adapter tensors that the configuration does not target", "error")
REFUSED = Check("CK910", "adapter setting that the engine refuses or ignores", "error")
CHECKS = (NOTHING, PARTLY, SHAPE, FORM, PAIR, DOUBLED, UNSERVED, EMPTY, UNTARGETED, REFUSED)


def finding(
    adapter: Adapter, check: Check, message: str, names: Iterable[str] = (), *, mend: str = "", engine: str | None = None,
    severity: Severity | None = None, blame: Blame = "checkpoint", wanted: str = "", found: str = "",
) -> Finding:  # fmt: skip
    """A finding on the adapter's files, or of one engine."""
    listed, tensors = set(names), adapter.checkpoint.tensors
    return made(
        check, message, listed, engine=engine, severity=severity, blame=blame,
        bytes=sum(tensors[n].nbytes or 0 for n in listed if n in tensors), wanted=wanted, found=found, mend=mend,
    )  # fmt: skip


def names_of(units: Iterable[Unit]) -> list[str]:
    return [name for unit in units for name in unit.names]

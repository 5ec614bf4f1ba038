"""Findings that a person has decided to live with: ignore rules, each with its reason, and the baseline of an earlier report.

They are read from options and from the folder that ckaudit is started in, never from the target: a repo must not hush its own faults.
A suppressed finding stays in the report, is counted apart, and does not fail the audit. A finding of which some names are suppressed is
split, so that new names of an old fault stand.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from ckaudit.errors import UsageError
from ckaudit.findings import Finding

CONFIG = Path("ckaudit.toml")
_ID = re.compile(r"CK[0-9](xx|[0-9]x|[0-9]{2})")
_SPELLING = "Write CK205:PATTERN=REASON; CK2xx means the whole family, PATTERN is a glob over names."


class Ignore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision: which check (`CK205`, or `CK2xx` for a family), which names (a glob), and why; for one engine or target if so said."""

    check: str
    reason: str
    names: str = "*"
    engine: str = "*"
    target: str = "*"

    def covers(self, finding: Finding, target: str) -> bool:
        """Whether it speaks of this finding, whatever its names."""
        wanted = self.check.rstrip("x")
        return (
            finding.check.startswith(wanted)
            and fnmatchcase(finding.engine or "", self.engine)
            and fnmatchcase(target, self.target)
        )


class _Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ignore: tuple[Ignore, ...] = ()


class _Old(msgspec.Struct, frozen=True):
    """What a baseline needs to know of a finding in an earlier report."""

    check: str
    engine: str | None
    names: tuple[str, ...]
    message: str


class _OldReport(msgspec.Struct, frozen=True):
    schema_version: int
    findings: tuple[_Old, ...]


class Suppressions(msgspec.Struct, frozen=True):
    """Everything that suppresses: ignore rules, and the names that an earlier report had by check and engine."""

    ignores: tuple[Ignore, ...] = ()
    baseline: Mapping[tuple[str, str | None], frozenset[str]] = {}


def parse(option: str) -> Ignore:
    """The rule in `--ignore CK205:PATTERN=REASON` (`CK205=REASON` for every name). Raises UsageError."""
    what, found, reason = option.partition("=")
    check, _, names = what.partition(":")
    return _checked(Ignore(check, reason.strip() if found else "", names or "*"), f"--ignore {option}")


def read(ignore: Sequence[str] = (), config: Path | None = None, baseline: Path | None = None) -> Suppressions:
    """What the options say, with the rules of `config`, or of `ckaudit.toml` in the working directory where there is one.

    Raises UsageError.
    """
    rules = tuple(parse(option) for option in ignore)
    if config is not None or CONFIG.is_file():
        rules += _read_config(config or CONFIG)
    return Suppressions(rules, _read_baseline(baseline) if baseline is not None else {})


def apply(
    findings: Iterable[Finding], by: Suppressions, target: str, sizes: Mapping[str, int]
) -> tuple[tuple[Finding, ...], tuple[Ignore, ...]]:
    """The findings with `suppressed_by` filled in, and the ignore rules that suppressed nothing."""
    used: set[Ignore] = set()
    out: list[Finding] = []
    for finding in findings:
        rest: Finding | None = finding
        for rule in by.ignores:
            if rest is not None and rule.covers(rest, target):
                hit = {n for n in rest.names or (rest.message,) if fnmatchcase(n, rule.names)}
                hushed, rest = _split(rest, hit, rule.reason, sizes)
                if hushed is not None:
                    used.add(rule)
                    out.append(hushed)
        known = by.baseline.get((finding.check, finding.engine))
        if rest is not None and known is not None:
            hushed, rest = _split(rest, known, "in the baseline", sizes)
            out += [hushed] if hushed is not None else []
        out += [rest] if rest is not None else []
    return tuple(out), tuple(rule for rule in by.ignores if rule not in used)


def _split(
    finding: Finding, known: Set[str], why: str, sizes: Mapping[str, int]
) -> tuple[Finding | None, Finding | None]:
    """(the suppressed part, the standing part) of a finding, by which of its names are `known`. One without names goes by its message."""
    names = finding.names or (finding.message,)
    hit = tuple(n for n in names if n in known)
    if len(hit) == len(names):
        return msgspec.structs.replace(finding, suppressed_by=why), None
    if not hit:
        return None, finding
    rest = tuple(n for n in names if n not in known)
    hushed = msgspec.structs.replace(_only(finding, hit, sizes), suppressed_by=why)
    return hushed, _only(finding, rest, sizes)


def _only(finding: Finding, names: tuple[str, ...], sizes: Mapping[str, int]) -> Finding:
    size = sum(sizes.get(n, 0) for n in names) if finding.bytes else 0
    return msgspec.structs.replace(finding, names=names, count=len(names), bytes=size)


def _checked(rule: Ignore, where: str) -> Ignore:
    if not _ID.fullmatch(rule.check):
        raise UsageError(f"{where}: {rule.check!r} is no check.", _SPELLING)
    if not rule.reason.strip():
        raise UsageError(f"{where}: a reason is required.", _SPELLING)
    return rule


def _read_config(path: Path) -> tuple[Ignore, ...]:
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Config)
    except OSError as error:
        raise UsageError(
            f"Cannot read {path}: {error.strerror}.", "Give the path of a TOML file with ignore rules."
        ) from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}.", "See 'Suppressing findings' in docs/ci.md for the format.") from None
    return tuple(_checked(rule, f"{path}, ignore {i}") for i, rule in enumerate(found.ignore, 1))


def _read_baseline(path: Path) -> dict[tuple[str, str | None], frozenset[str]]:
    try:
        old = msgspec.convert(json.loads(path.read_bytes()), _OldReport)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Make a report with --json FILE.") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UsageError(f"{path} is no ckaudit report: {error}.", "Make one with --json FILE.") from None
    known: dict[tuple[str, str | None], set[str]] = {}
    for f in old.findings:
        known.setdefault((f.check, f.engine), set()).update(f.names or (f.message,))
    return {key: frozenset(names) for key, names in known.items()}

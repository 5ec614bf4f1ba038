"""How one root cause becomes one finding: every check takes, in order, what it can explain of one engine's losses and leaves the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import prod

from ckaudit.checks.facts import Facts
from ckaudit.findings import Blame, Check, Finding, Severity
from ckaudit.findings import finding as made
from ckaudit.header import DTYPE_BITS
from ckaudit.naming import fold, printable
from ckaudit.plan import Failure, Mismatch, NameFate, Parameter, Plan
from ckaudit.renames import Inferred, infer_rename

_PARTS = {".qkv_proj": (".q_proj", ".k_proj", ".v_proj"), ".gate_up_proj": (".gate_proj", ".up_proj")}
"""What nearly every model of vLLM fuses, for loaders that did not come as far as their rules."""
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


class Case:
    """What one engine lost of one checkpoint and nothing has explained yet.

    `strays` are tensors that reached no parameter, `gaps` parameters that were not (or only partly) written; what is so by design is
    in neither. A check reports what it recognises and takes it out; the checks after it see only the rest.
    """

    def __init__(self, facts: Facts, plan: Plan, others: Sequence[Plan] = (), on_files: Sequence[Finding] = ()) -> None:
        self.facts = facts
        self.plan = plan
        self.others = [p for p in others if p.id != plan.id and p.not_judged is None]
        self.on_files = list(on_files)
        """Findings on the files themselves, which may explain losses here."""
        lost = [n for n in plan.not_plain if n.fate != "loaded" and n.by_design is None]
        self.strays: dict[str, NameFate] = {n.name: n for n in lost if n.fate != "not_reached"}
        self.not_reached: dict[str, NameFate] = {n.name: n for n in lost if n.fate == "not_reached"}
        self.gaps: dict[str, Parameter] = {
            p.name: p for p in plan.parameters if p.coverage in ("none", "partial") and p.by_design is None
        }
        self.failures: list[Failure] = list(plan.failures)
        self.mismatches: list[Mismatch] = list(plan.mismatches)
        self.found: list[Finding] = []
        """What the checks so far have found of this engine."""
        self._causes: set[str] = set()
        self._renames: tuple[dict[str, list[str]], Inferred | None] | None = None

    def take(self, names: Iterable[str] = (), parameters: Iterable[str] = (), because: str = "") -> None:
        """Mark tensors and parameters as explained, and with them the loader's errors that are about them.

        `because` is the check (or the beginning of its id) whose finding on the files explains them.
        """
        taken, filled = set(names), set(parameters)
        self._renames = None
        if because and (taken or filled):
            self._causes.add(because)
        for name in taken:
            self.strays.pop(name, None)
            self.not_reached.pop(name, None)
        for name in filled:
            self.gaps.pop(name, None)
        self.mismatches = [m for m in self.mismatches if not (taken & set(m.names) or m.parameter in filled)]
        self.failures = [f for f in self.failures if not (taken & set(f.names) or f.parameter in filled)]

    def rename(self) -> tuple[dict[str, list[str]], Inferred | None]:
        """The strays by the name they were last looked up by (experts that are stacked share one), and the one rename that turns the most
        of these into parameters that nobody wrote; None when there is none."""
        if self._renames is None:
            seen: dict[str, list[str]] = {}
            for name, fate in self.strays.items():
                replayed = self.plan.engine == "vllm" and self.plan.method != "rules"
                seen.setdefault(_looked_up(fate) if replayed else fate.into or name, []).append(name)
            unwritten = [name for name, p in self.gaps.items() if p.coverage == "none"] if seen else []
            unwritten += self.parts if seen else ()
            self._renames = seen, infer_rename(seen, unwritten) if unwritten else None
        return self._renames

    @cached_property
    def parts(self) -> dict[str, str]:
        """Names that tensors of fused parameters would have and none has, as the engine looks them up -> the parameter.

        Told by its rules, as far as they are known: `.q_proj` and `.k_proj` both lead to `.qkv_proj`, into which none was written, or
        one of them.
        """
        if self.plan.engine == "transformers":
            return self._experts()
        rules = [(r.key, str(r.to)) for r in self.plan.rules if r.rule == "stacked" and r.to]
        known = {to for _, to in rules}
        rules += [(key, to) for to, keys in _PARTS.items() if to not in known for key in keys]
        fates = {n.name: n for n in self.plan.names}
        found: dict[str, str] = {}
        for parameter in self.gaps.values():
            written = {s.key for n in parameter.sources if n in fates for s in fates[n].chain if s.rule == "stacked"}
            for key, to in rules:
                if to in parameter.name and key not in written:
                    found[re.sub(rf"{re.escape(to)}(?=\.|$)", key, parameter.name)] = parameter.name
            if "experts" in parameter.name and parameter.shape:
                found |= _single_experts(parameter.name, parameter.shape[0])
        return {part: name for part, name in found.items() if part != name}

    def _experts(self) -> dict[str, str]:
        """The single experts of parameters that transformers stacks them into, by the conversions that it has."""
        found: dict[str, str] = {}
        stacked = [
            (k, r.to)
            for r in self.plan.rules
            if r.rule == "convert" and r.to
            for k in r.key.split(" | ")
            if k.count("*") == 1
        ]
        for name, parameter in self.gaps.items() if stacked else ():
            for key, to in stacked:
                if parameter.shape and name.endswith(f".{to}"):
                    start, (before, after) = name.removesuffix(to), key.split("*")
                    found |= {f"{start}{before}{i}{after}": name for i in range(parameter.shape[0])}
        return found

    @property
    def in_error(self) -> bool:
        """Whether an error was found that accounts for what happened here."""
        causes = tuple(self._causes)
        return any(f.severity == "error" for f in self.found) or any(
            f.severity == "error" and f.check.startswith(causes) for f in self.on_files
        )

    @cached_property
    def _loaded_by(self) -> list[tuple[Plan, frozenset[str]]]:
        return [(p, frozenset(n.name for n in p.names if n.fate == "loaded")) for p in self.others]

    def use_instead(self, names: Iterable[str]) -> str:
        """`Use …, which loads them`, where another judged engine does, or other releases by the same rule book; else nothing."""
        plan = self.loads_elsewhere(names)
        note = next((n.text for n in self.plan.notes if n.kind == "loads-elsewhere"), None)
        if plan is None and note is None:
            return ""
        return f"Use {f'vLLM {note}' if note else plan.id if plan else ''}, which loads them"

    def loads_elsewhere(self, names: Iterable[str]) -> Plan | None:
        """Another engine that loads all of these tensors (or, given none, the whole checkpoint); the same software first."""
        wanted = set(names)
        fits = [p for p, loaded in self._loaded_by if (wanted <= loaded if wanted else p.verdict == "loads")]
        fits.sort(key=lambda p: (p.engine != self.plan.engine, p.verdict != "loads"))
        return fits[0] if fits else None

    def finding(
        self, check: Check, message: str, *, names: Iterable[str] = (), parameters: Iterable[str] = (), mend: str = "",
        severity: Severity | None = None, blame: Blame | None = None, wanted: str = "", found: str = "",
    ) -> Finding:  # fmt: skip
        """A finding of this engine. Without a `blame` it is the engine's fault when another engine loads the same tensors.

        `names` are tensors, `parameters` what the model lacks; a finding lists the tensors, and the parameters where there are none.
        """
        tensors, lacking = set(names), set(parameters)
        elsewhere = self.loads_elsewhere(tensors) if blame is None else None
        if elsewhere is not None and not mend:
            mend = f"Use {elsewhere.id}, which loads {'them' if len(tensors or lacking) > 1 else 'it'}."
        return made(
            check, message, tensors or lacking, engine=self.plan.id, severity=severity,
            blame=blame or ("engine" if elsewhere else "checkpoint"),
            bytes=self.facts.size(tensors) if tensors else sum(map(_bytes, self._parameters(lacking))),
            wanted=wanted, found=found, mend=mend,
        )  # fmt: skip

    def _parameters(self, names: Iterable[str]) -> Iterator[Parameter]:
        known = self._by_name
        return (known[n] for n in names if n in known)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.plan.parameters}


def _single_experts(parameter: str, count: int) -> dict[str, str]:
    """The names that single experts have in most models, for what vLLM stacks them into."""
    path, _, rest = parameter.partition(".experts.")
    leaf = rest.rpartition(".")[2]
    return {f"{path}.experts.{i}.{p}.weight": parameter for p in _EXPERTS.get(leaf, ()) for i in range(count)}


def _looked_up(fate: NameFate) -> str:
    """The name that a stray was last looked up by, whole: vLLM's error tells of the module at which it stopped."""
    into, segments = (fate.into or fate.name), fate.name.split(".")
    last = into.split(".")[-2:]
    places = (i for i in range(len(segments)) if segments[max(0, i - len(last) + 1) : i + 1] == last)
    at = next(places, len(segments) - 1)
    return ".".join((into, *segments[at + 1 :]))


Explain = Callable[[Case], Iterator[Finding]]
"""A check of one engine's losses."""


def _bytes(parameter: Parameter) -> int:
    """Bytes of what a parameter lacks, 0 where its size is not known."""
    if parameter.shape is None or parameter.dtype not in DTYPE_BITS:
        return 0
    return round(prod(parameter.shape) * DTYPE_BITS[parameter.dtype] / 8 * (1 - (parameter.share or 0)))


def on_files(
    facts: Facts, check: Check, message: str, names: Iterable[str] = (), *, mend: str = "", severity: Severity | None = None,
    blame: Blame = "checkpoint", wanted: str = "", found: str = "",
) -> Finding:  # fmt: skip
    """A finding that holds for the files themselves, whatever loads them."""
    listed = set(names)
    return made(
        check, message, listed, severity=severity, blame=blame, bytes=facts.size(listed), wanted=wanted, found=found, mend=mend
    )  # fmt: skip


def stack_of(name: str) -> str:
    """The path before the first number of `name`, empty where there is none: what shares it is told together."""
    segments = name.split(".")
    number = next((i for i, s in enumerate(segments) if s.isdecimal()), 0)
    return ".".join(segments[:number])


def by_stack(names: Iterable[str]) -> dict[str, list[str]]:
    """`names` by `stack_of`, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(stack_of(name), []).append(name)
    return groups


def many(count: int, word: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def listed(names: Iterable[str]) -> str:
    """`names` for a sentence: folded, the first three kinds, and how many more there are."""
    lines = fold(names)
    more = f" and {len(lines) - 3} more kinds" if len(lines) > 3 else ""
    return ", ".join(f"`{line}`" for line in lines[:3]) + more


def under(stack: str) -> str:
    """` under `model.layers``, or nothing for what stands in no stack."""
    return f" under `{printable(stack)}`" if stack else ""

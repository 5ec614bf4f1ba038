"""Every fault of a checkpoint in one run: the tensor that the loader raised at is set aside, and it runs again on a new model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines.vllm.attempt import Attempt, Raised
from ckaudit.plan import Step

MOST_ATTEMPTS = 40
_DIGITS = re.compile(r"(?<![^.])\d+(?![^.])")


class Fault(NamedTuple):
    """One error of the loader and the tensors that were set aside for it, in order; the first was seen, the others are its siblings."""

    raised: Raised
    names: tuple[str, ...]
    assumed: tuple[str, ...]
    chain: tuple[Step, ...] = ()
    """The rules that had changed the first name when the loader raised."""


class Story(NamedTuple):
    """All loads of one checkpoint. `last` is the load without every tensor set aside; `stopped` says why the search ended early."""

    faults: tuple[Fault, ...]
    last: Attempt
    stopped: str | None
    shapes: dict[str, tuple[int, ...] | None]


Load = Callable[[Sequence[TensorSpec]], Attempt]


def family(name: str) -> str:
    """A name without its layer and expert numbers: siblings have the same."""
    return _DIGITS.sub("{}", name)


def tell(load: Load, tensors: Sequence[TensorSpec], deadline: float) -> Story:
    """Load, set the offender aside, and load again, until it loads, nothing can be set aside, or `deadline` (`time.monotonic`) is near."""
    left = list(tensors)
    shapes = {t.name: t.shape for t in tensors}
    faults: list[Fault] = []
    while True:
        began = time.monotonic()
        seen = load(left)
        raised = seen.raised
        if raised is None or raised.excuse is not None or raised.finished:
            stopped = raised.excuse if raised is not None and raised.excuse is not None and faults else None
            return Story(tuple(faults), seen, stopped, shapes)
        culprit = _culprit(raised, seen, faults)
        if culprit is None:
            return Story(
                (*faults, Fault(raised, (), ())), seen, "the tensor that the loader raised at was not found", shapes
            )
        aside = _siblings(culprit, left, seen, faults)
        faults.append(Fault(raised, (culprit,), tuple(n for n in aside if n != culprit),
                            tuple(seen.rules.chains.get(culprit, ()))))  # fmt: skip
        gone = set(aside)
        left = [t for t in left if t.name not in gone]
        if len(faults) >= MOST_ATTEMPTS or time.monotonic() + (time.monotonic() - began) > deadline:
            return Story(tuple(faults), seen, "the budget of time for further loads is used up", shapes)


def _culprit(raised: Raised, seen: Attempt, faults: Sequence[Fault]) -> str | None:
    """The tensor in the raising frames, else the last one given out that is not yet set aside."""
    for name in (*raised.names, *reversed(seen.yielded[-1:])):
        if all(name not in fault.names for fault in faults):
            return name
    return None


def _siblings(culprit: str, left: Sequence[TensorSpec], seen: Attempt, faults: Sequence[Fault]) -> list[str]:
    """The culprit alone the first time; with its second sibling the family counts as a pattern, and all of it that was not loaded goes."""
    kind = family(culprit)
    if not any(family(f.names[0]) == kind for f in faults if f.names):
        return [culprit]
    loaded = {name for name, c in seen.result.tensors.items() if c.read}
    return [t.name for t in left if family(t.name) == kind and (t.name == culprit or t.name not in loaded)]

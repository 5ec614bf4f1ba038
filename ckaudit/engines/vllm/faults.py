"""Every fault of a checkpoint in one run: the tensor that the loader raised at is set aside, and it runs again on a new model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ckaudit.checkpoint import TensorSpec
from ckaudit.engines.vllm.attempt import Attempt, Raised
from ckaudit.engines.vllm.words import looked_up
from ckaudit.naming import shape as family  # siblings share it
from ckaudit.plan import Step

MOST_ATTEMPTS = 40


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


class _OutOfTime(Exception):  # noqa: N818  (an end, not an error)
    """There is no time for another load."""


def tell(load: Load, tensors: Sequence[TensorSpec], deadline: float) -> Story:
    """Load, set the offender aside, and load again, until it loads, nothing can be set aside, or `deadline` (`time.monotonic`) is near."""
    left = list(tensors)
    shapes = {t.name: t.shape for t in tensors}
    faults: list[Fault] = []
    timed = _timed(load, deadline)
    seen = timed(left)
    while True:
        raised = seen.raised
        if raised is None or raised.excuse is not None or raised.finished:
            stopped = raised.excuse if raised is not None and raised.excuse is not None and faults else None
            return Story(tuple(faults), seen, stopped, shapes)
        if len(faults) >= MOST_ATTEMPTS:
            return Story(tuple(faults), seen, f"{MOST_ATTEMPTS} faults were set aside: no further loads", shapes)
        try:
            found = _next(timed, left, seen, faults)
        except _OutOfTime as late:
            known = [f for f in late.args if isinstance(f, Fault)]
            return Story((*faults, *known), seen, "the budget of time for further loads is used up", shapes)
        if found is None:
            nobody = Fault(raised, (), ())
            return Story((*faults, nobody), seen, "the tensor that the loader raised at was not found", shapes)
        fault, left, seen = found
        faults.append(fault)


def _timed(load: Load, deadline: float) -> Load:
    """`load`, which raises _OutOfTime instead where a load as long as the longest so far would end behind the deadline."""
    longest = [0.0]

    def timed(tensors: Sequence[TensorSpec]) -> Attempt:
        began = time.monotonic()
        if longest[0] and began + longest[0] > deadline:
            raise _OutOfTime
        seen = load(tensors)
        longest[0] = max(longest[0], time.monotonic() - began)
        return seen

    return timed


def _next(
    load: Load, left: list[TensorSpec], seen: Attempt, faults: Sequence[Fault]
) -> tuple[Fault, list[TensorSpec], Attempt] | None:
    """The next fault, the tensors without it, and their load; None if no tensor can be found whose absence ends the error.

    Raises _OutOfTime, with the fault that is known without another load.
    """
    raised = seen.raised
    assert raised is not None
    for guess in _guesses(raised, seen, faults):
        fault, rest = _aside(guess, left, seen, faults)
        try:
            again = load(rest)
        except _OutOfTime:
            raise _OutOfTime(fault) from None
        if _certain(raised, guess, seen) or not _same(raised, again.raised):
            return fault, rest, again
    guess_found = _bisected(load, left, seen, raised)
    if guess_found is None:
        return None
    fault, rest = _aside(guess_found, left, seen, faults)
    return fault, rest, load(rest)


def _guesses(raised: Raised, seen: Attempt, faults: Sequence[Fault]) -> Iterator[str]:
    """Tensors that the loader may have raised at: the one whose name it quotes (a loader that sorts names holds another one by then),
    those in its frames, innermost first, then the last one that was given out."""
    gone = {name for fault in faults for name in (*fault.names, *fault.assumed)}
    yield from dict.fromkeys(n for n in (*_quoted(raised, seen), *raised.names, *seen.yielded[-1:]) if n not in gone)


def _quoted(raised: Raised, seen: Attempt) -> list[str]:
    text = looked_up(raised.error)
    if text is None:
        return []
    chains = seen.rules.chains
    asked = {n: (chains[n][-1].after if chains.get(n) else None) or n for n in (*raised.names, *reversed(seen.yielded))}
    whole = f"{raised.at}.{text}" if raised.at else text
    exact = [n for n, name in asked.items() if name in (whole, text)]
    return (exact or [n for n, name in asked.items() if name.endswith(f".{text}")])[:1]


def _certain(raised: Raised, guess: str, seen: Attempt) -> bool:
    """Whether the error is about this tensor for sure: the loader had a parameter in hand with it, or speaks of its name."""
    if raised.parameter is not None and guess in raised.names:
        return True
    text = str(raised.error)
    names = [guess, *(s.after for s in seen.rules.chains.get(guess, ()) if s.after)]
    return any(name.split(".", 1)[-1] in text or ".".join(name.split(".")[-2:]) in text for name in names)


def _same(one: Raised, other: Raised | None) -> bool:
    """Whether two loads ended with the same words."""
    return other is not None and type(one.error) is type(other.error) and str(one.error) == str(other.error)


def _bisected(load: Load, left: Sequence[TensorSpec], seen: Attempt, raised: Raised) -> str | None:
    """The last tensor, in the order given out, without which and all before it the loader no longer says the same. None if there is none.

    That one is an offender even where others are too.
    """
    by_name = {t.name: t for t in left}
    given = [by_name[name] for name in dict.fromkeys(seen.yielded) if name in by_name]
    low, high = 0, len(given)  # with the first `low` gone it still says so, with the first `high` gone it does not
    if _same(raised, load([]).raised):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _same(raised, load(given[middle:]).raised):
            low = middle
        else:
            high = middle
    return given[low].name


def _aside(
    culprit: str, left: Sequence[TensorSpec], seen: Attempt, faults: Sequence[Fault]
) -> tuple[Fault, list[TensorSpec]]:
    assert seen.raised is not None
    gone = dict.fromkeys(_siblings(culprit, left, seen, faults))
    assumed = tuple(n for n in gone if n != culprit)
    fault = Fault(seen.raised, (culprit,), assumed, tuple(seen.rules.chains.get(culprit, ())))
    return fault, [t for t in left if t.name not in gone]


def _siblings(culprit: str, left: Sequence[TensorSpec], seen: Attempt, faults: Sequence[Fault]) -> list[str]:
    """The culprit alone the first time; with its second sibling the family counts as a pattern, and all of it that was not loaded goes:
    what has the same name but for the numbers, or what stands under the same module that the model has not."""
    kind, module = family(culprit), looked_up(seen.raised.error) if seen.raised is not None else None
    if module is not None and culprit.startswith(f"{module}."):
        again = any(looked_up(f.raised.error) == module for f in faults)
        return [t.name for t in left if t.name.startswith(f"{module}.")] if again else [culprit]
    if not any(family(f.names[0]) == kind for f in faults if f.names):
        return [culprit]
    loaded = {name for name, c in seen.result.tensors.items() if c.read}
    return [t.name for t in left if family(t.name) == kind and (t.name == culprit or t.name not in loaded)]

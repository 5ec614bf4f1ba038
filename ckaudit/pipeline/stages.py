"""What several pipelines share: a target in numbers, engines side by side, files that no loader reads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TypeVar

import msgspec

from ckaudit.checkpoint import Checkpoint
from ckaudit.findings import Finding, Target
from ckaudit.plan import Plan

T = TypeVar("T")
R = TypeVar("R")

SIDE_BY_SIDE = 4
"""Engines that run at once; each is a process that may hold a few GB."""


def describe(checkpoint: Checkpoint) -> Target:
    """The checkpoint in numbers. A sum that a missing header would falsify is None."""
    kinds = checkpoint.kinds
    dtypes: Counter[str] = Counter()
    for (dtype, _, _), count in kinds.items():
        if dtype is not None:
            dtypes[dtype] += count
    model_type = (checkpoint.config or {}).get("model_type")
    return Target(
        name=checkpoint.name,
        revision=checkpoint.revision,
        source=checkpoint.kind,
        architectures=checkpoint.architectures,
        model_type=model_type if isinstance(model_type, str) else None,
        tensors=len(checkpoint.tensors),
        parameters=_sum((None if shape is None else prod(shape), n) for (_, shape, _), n in kinds.items()),
        bytes=_sum((nbytes, n) for (_, _, nbytes), n in kinds.items()),
        shards=len(checkpoint.shards),
        dtypes=dict(sorted(dtypes.items())),
    )


def _sum(amounts: Iterable[tuple[int | None, int]]) -> int | None:
    """Amount times count of each, together; None where one is not known."""
    total = 0
    for amount, count in amounts:
        if amount is None:
            return None
        total += amount * count
    return total


def refused(plans: tuple[Plan, ...], findings: Iterable[Finding], checkpoint: Checkpoint) -> tuple[Plan, ...]:
    """The plans, failing where files are such that no engine gets to see a name: what would raise decides the verdict."""
    from ckaudit.checks.container import looks_outside, refusing

    errors = [f for f in findings if f.severity == "error" and f.engine is None]
    told = []
    for plan in plans:
        loader = "vllm" if plan.engine == "vllm" else "transformers"
        refuses = refusing(checkpoint, loader, plan.release)
        worst = next((f for f in errors if f.check in refuses), None)
        if worst is not None and plan.error is None and plan.not_judged is None:
            if worst.check == "CK124" and looks_outside(checkpoint):
                plan = msgspec.structs.replace(
                    plan, not_judged="the index names files outside of the folder, which are not read"
                )
            else:
                when = (
                    "the files are refused before any name is looked at"
                    if worst.check != "CK117"
                    else "the loader stops"
                )
                said = f"{when}: {worst.check} {worst.title}"
                plan = msgspec.structs.replace(plan, error=said)
        told.append(plan)
    return tuple(told)


def side_by_side(items: Sequence[T], run: Callable[[T], R]) -> tuple[R, ...]:
    """What `run` makes of each item, in their order, a few at a time. Raises the first item's error, if one raised.

    Daemon threads: an interrupt must end the program without waiting for the workers that they talk to.
    """
    done: dict[int, R | BaseException] = {}
    slots = threading.Semaphore(SIDE_BY_SIDE)

    def work(place: int) -> None:
        with slots:
            try:
                done[place] = run(items[place])
            except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
                done[place] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results: list[R] = []
    for place in range(len(items)):
        result = done[place]
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return tuple(results)

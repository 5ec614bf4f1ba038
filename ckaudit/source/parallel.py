"""Work done side by side by threads, fed and consumed by one: what ranged reads over a network need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T, threading.Event], R], items: Iterable[T], jobs: int) -> Iterator[tuple[T, R]]:
    """Each item with `work(item, stop)`, in the order the results arrive, at most `jobs` of them running at once.

    `items` is asked for more, up to `jobs` waiting items ahead, each time a result has been handled, even if it had run dry: whoever
    consumes the results may add to it. The first exception of any `work` ends everything: it is raised here, `stop` is set so that
    running work can end early, and nothing further starts. The same holds for a consumer that stops early or is interrupted.
    """
    feed = iter(items)
    todo: SimpleQueue[tuple[T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[T, R | None, BaseException | None]] = SimpleQueue()
    stop = threading.Event()
    threads = pending = 0
    try:
        while True:
            while pending < 2 * jobs and (item := _next(feed)) is not None:
                if threads < min(jobs, pending + 1):
                    # Daemon threads: a read that hangs on a silent server must not keep an interrupted program alive.
                    threading.Thread(
                        target=_run, args=(work, todo, done, stop), name="ckaudit-read", daemon=True
                    ).start()
                    threads += 1
                todo.put(item)
                pending += 1
            if not pending:
                return
            (finished, result, error) = done.get()
            pending -= 1
            if error is not None:
                raise error
            yield finished, result  # type: ignore[misc]
    finally:
        stop.set()
        for _ in range(threads):
            todo.put(None)


def _next(feed: Iterator[T]) -> tuple[T] | None:
    for item in feed:
        return (item,)
    return None


def _run(
    work: Callable[[T, threading.Event], R],
    todo: SimpleQueue[tuple[T] | None],
    done: SimpleQueue[tuple[T, R | None, BaseException | None]],
    stop: threading.Event,
) -> None:
    while (item := todo.get()) is not None and not stop.is_set():
        try:
            done.put((item[0], work(item[0], stop), None))
        except BaseException as error:  # noqa: BLE001  handed to the consumer, which raises it
            done.put((item[0], None, error))

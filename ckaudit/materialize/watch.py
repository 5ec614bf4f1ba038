"""The child's side of progress: which stage runs, how long each took, how many bytes moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckaudit.materialize.job import Event

Emit = Callable[[Event], None]
_EVERY = 0.1
"""Seconds between two reports of moved bytes."""


class Watch:
    """Times stages and tells `emit` about them; `moved` may be called from any thread."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.seconds: dict[str, float] = {}
        self.current = ""
        self._lock = threading.Lock()
        self._pending = 0
        self._told = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage: told when it begins, its seconds kept even when it fails."""
        self.current = name
        self.emit(Event(stage=name))
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.flush()

    def moved(self, size: int) -> None:
        """`size` more bytes are where they belong."""
        now = time.monotonic()
        with self._lock:
            self._pending += size
            if now - self._told < _EVERY:
                return
            size, self._pending, self._told = self._pending, 0, now
        self.emit(Event(moved=size))

    def flush(self) -> None:
        """Tell what has not been told yet."""
        with self._lock:
            size, self._pending = self._pending, 0
        if size:
            self.emit(Event(moved=size))

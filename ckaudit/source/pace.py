"""How fast reads may go: waits between tries, and a rate limit that holds all of them back together."""

from __future__ import annotations

import threading
import time

from ckaudit.errors import SourceError
from ckaudit.progress import Progress

TRIES = 5
MAX_WAIT = 300.0
"""Seconds that rate limits may hold up one source in all; the Hub counts requests in windows of five minutes."""

_BACKOFF = (0.5, 1.0, 2.0, 4.0)
_LONGEST = 60.0
"""Seconds between two tries at most, whatever a failing server asks for."""


class Clock:
    """Time as reads see it; tests put one in its place that does not sleep."""

    def now(self) -> float:
        """Seconds since some point in the past."""
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Sleeps, unless `stop` is set meanwhile."""
        stop.wait(seconds)


class Pace:
    """The waits of all reads of one source."""

    def __init__(self, progress: Progress, clock: Clock | None = None) -> None:
        self._progress, self._clock = progress, clock or Clock()
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._waited = 0.0
        self._told = 1

    def hold(self, stop: threading.Event) -> None:
        """Waits until the rate limit allows a request."""
        if (delay := self._not_before - self._clock.now()) > 0:
            self._clock.wait(delay, stop)

    def back_off(self, failed: int, error: SourceError, after: float | None, stop: threading.Event) -> None:
        """Waits after the try number `failed`, `after` seconds if the server asks for them. Raises `error` after the last."""
        if failed >= TRIES:
            raise SourceError(f"{error.message.rstrip('.')} (tried {TRIES} times).", error.hint) from error
        if failed > self._told:  # once for all files that fail together
            self._told = failed
            self._progress.note(f"{error.message.rstrip('.')}: try {failed + 1} of {TRIES}.")
        self._clock.wait(max(_BACKOFF[failed - 1], min(after or 0.0, _LONGEST)), stop)

    def limit(self, after: float | None, met: int, host: str) -> None:
        """Holds every read back for `after` seconds; without a word from `host`, for longer each time one read has `met` the limit.

        Raises SourceError when that goes beyond what is worth waiting for.
        """
        after = after or min(2.0 ** min(met, 10), _LONGEST)
        with self._lock:
            now = self._clock.now()
            more = now + after - max(now, self._not_before)
            if more <= 0:
                return
            if self._waited + more > MAX_WAIT:
                raise SourceError(
                    f"{host} limits the rate of requests and asks to wait {after:,.0f} s.",
                    "Try again later, with fewer --jobs; with HF_TOKEN set, the limit is higher.",
                )
            self._waited += more
            self._not_before = now + after
        self._progress.note(f"{host} limits the rate of requests: waiting {after:,.0f} s.")

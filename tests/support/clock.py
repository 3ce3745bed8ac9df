"""A clock for tests: time passes only where they say so."""

from __future__ import annotations


class ManualClock:
    """In the place of ``time.perf_counter``, or of the module ``time``.

    >>> clock = ManualClock()
    >>> clock.now += 2
    >>> clock.sleep(0.5)
    >>> clock(), clock.perf_counter()
    (102.5, 102.5)
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

"""What the kernel counts, by steps of a loop."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Meter"]

_INTERVAL_NS = 20_000_000  # looking takes some hundred microseconds


class Meter:
    """By how much a counter grows in steps, without what happens between epochs.

    It is looked at after some of the steps only: those after the last look of an epoch do not count, as
    nobody tells which one is the last.

    Args:
        read: the counter; None where it is not known.

    >>> counter = iter([100, 130, 900, 910])
    >>> meter = Meter(lambda: next(counter))
    >>> meter.start(0)
    >>> for now in (10_000_000, 20_000_000, 30_000_000):
    ...     meter.step(now)
    >>> meter.pause()  # the epoch is over
    >>> meter.step(500_000_000)
    >>> meter.step(530_000_000)
    >>> meter.per_step  # (30 + 10) / (3 + 1)
    10
    """

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self._seen: int | None = None
        self._total = self._steps = self._pending = self._looked = 0
        self._is_paused = True

    def start(self, now: int) -> None:
        """Count from here on, at a time in nanoseconds."""
        self._seen, self._looked, self._pending, self._is_paused = self._read(), now, 0, False

    def step(self, now: int) -> None:
        """A step has ended; the first after a pause does not count."""
        if self._is_paused:
            self.start(now)
            return
        self._pending += 1
        if now - self._looked > _INTERVAL_NS:
            self._look(now)

    def pause(self) -> None:
        """What comes until the next step has ended is no step."""
        self._is_paused = True

    def finish(self, now: int) -> None:
        """Look a last time."""
        if not self._is_paused and self._pending:
            self._look(now)

    @property
    def per_step(self) -> int | None:
        """Of a step; None where it is not known."""
        return self._total // self._steps if self._steps else None

    def _look(self, now: int) -> None:
        value = self._read()
        if value is not None and self._seen is not None:
            self._total += value - self._seen
            self._steps += self._pending
        self._seen, self._looked, self._pending = value, now, 0

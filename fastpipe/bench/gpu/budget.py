"""Windows and rounds that end in time: a run that has less of it measures fewer rounds, for shorter."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastpipe.bench.gpu.sizes import Sizes
from fastpipe.bench.runner import Plan

__all__ = ["Budget", "Share"]

# Rounds that there is to be time for, and windows that a row's start and warm-up take.
_ROUNDS, _WARM = 5, 3
# The part of a section's time after which no further row is started: one round of the others is to follow.
_STARTING = 0.7
_SETTLE_S = 0.2


class Share:
    """What a section may take, from now on.

    Args:
        seconds: so long.
        sizes: how long a measurement is at most, and how many rounds there are.
        now: the clock.

    Attributes:
        window: seconds of a measurement.
    """

    def __init__(self, seconds: float, sizes: Sizes, now: Callable[[], float]) -> None:
        self._seconds, self._sizes, self._now, self._began = seconds, sizes, now, now()
        self.divide(1)

    def divide(self, rows: int) -> None:
        """Choose the window for so many rows."""
        self.window = min(self._sizes.window_s, self._left() / (max(1, rows) * (_WARM + _ROUNDS)))

    def may_start(self) -> bool:
        """Whether there is time for another row."""
        return self._now() - self._began <= _STARTING * self._seconds

    def plan(self) -> Plan:
        """Rounds for what is left: at least one, as rows that are warm are not to be for nothing."""
        settle = min(_SETTLE_S, self.window / 4)
        return Plan(self._sizes.rounds, self._left(), self.window, settle, least=1)

    def _left(self) -> float:
        return max(0.0, self._seconds - (self._now() - self._began))


class Budget:
    """Seconds of a run, from when it is told to begin.

    Args:
        seconds: so many.
        sizes: of the run.
        now: the clock, for tests.
    """

    def __init__(self, seconds: float, sizes: Sizes, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._sizes, self._now = sizes, now
        self.begin()

    def begin(self) -> None:
        """They begin now."""
        self._began = self._now()

    def left(self) -> float:
        """Seconds that are left; below zero when too many were taken."""
        return self.seconds - (self._now() - self._began)

    def share(self, part: float) -> Share:
        """What a section may take of what is left.

        Args:
            part: of it, 0 to 1.
        """
        return Share(max(0.0, self.left()) * part, self._sizes, self._now)

"""Where the time goes: nanoseconds by stage, summed over all threads."""

from __future__ import annotations

import threading

__all__ = ["StageClock"]


class StageClock:
    """Time spent in each stage, summed over the threads that worked in it.

    ``"read"`` reads files, ``"decode"`` makes pixels or chunks, ``"transform"`` resamples and
    converts, ``"copy"`` takes samples from decoded chunks, ``"wait"`` is the time that the consumer
    waited for a batch.

    >>> clock = StageClock()
    >>> clock.add("read", 1_500_000_000)
    >>> clock.totals()
    {'read': 1.5}
    """

    def __init__(self) -> None:
        # Each thread adds to a dictionary of its own: no lock, on a path taken for every sample.
        self._local = threading.local()
        self._all: list[dict[str, int]] = []

    def add(self, stage: str, nanoseconds: int) -> None:
        """Add a duration.

        Args:
            stage: the stage's name.
            nanoseconds: how long one piece of work took in it.
        """
        try:
            mine: dict[str, int] = self._local.nanoseconds
        except AttributeError:
            mine = self._local.nanoseconds = {}
            self._all.append(mine)
        mine[stage] = mine.get(stage, 0) + nanoseconds

    def totals(self) -> dict[str, float]:
        """Seconds by stage since the clock was made or reset."""
        totals: dict[str, float] = {}
        for one in list(self._all):
            for stage, nanoseconds in list(one.items()):
                totals[stage] = totals.get(stage, 0.0) + nanoseconds / 1e9
        return totals

    def reset(self) -> None:
        """Start again from zero."""
        for one in list(self._all):
            one.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return (StageClock, ())

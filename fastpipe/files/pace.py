"""How fast work goes, and how long it will take."""

from __future__ import annotations

import time

from fastpipe._sizes import in_bytes
from fastpipe.bench.progress import Progress

__all__ = ["Pace"]


class Pace:
    """The moving line of some work that is measured in bytes.

    Args:
        progress: to show it.
        what: is done.
        nbytes: that are to be done.
    """

    def __init__(self, progress: Progress, what: str, nbytes: int) -> None:
        self._progress, self._what, self._nbytes = progress, what, nbytes
        self._begun, self._done = time.monotonic(), 0

    def skip(self, nbytes: int) -> None:
        """So much less is to be done."""
        self._nbytes -= nbytes

    def add(self, nbytes: int, where: str) -> None:
        """So much more is done.

        Args:
            nbytes: of it.
            where: the work is, in words.
        """
        self._done += nbytes
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        left = (self._nbytes - self._done) / max(rate, 1e-9)
        share = self._done / max(self._nbytes, 1)
        self._progress.now(
            f"{self._what} {where}: {share:.0%}, {in_bytes(rate)}/s, {in_time(max(left, 0.0))} left"
        )


def in_time(seconds: float) -> str:
    """A time for people.

    >>> in_time(7.4), in_time(200), in_time(9000)
    ('7 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

"""How many requests are to be under way at a time: as many as latency and bandwidth need.

By Little's law n requests that are answered after L seconds each are n / L objects a second.  So the rate
shows whether more requests bring more, or only wait longer: more are tried, and kept where the rate rises
nearly as they do; then fewer, and kept where the rate stays.  Networks and stores change, so both are tried
again and again.
"""

from __future__ import annotations

import threading

__all__ = ["Pace"]

_FIRST, _LEAST, _MOST = 32, 8, 128
_UP, _DOWN = 2.0, 0.75
# More requests are worth it where the rate rises by this part of what they do; fewer where so much of it
# stays.
_WORTH, _STAYS = 0.3, 0.96
_REST = 6  # windows between trials; a window is as many answers as there may be requests


class Pace:
    """A limit for the number of requests under way; may be used from any thread.

    Args:
        connections: the limit, or ``"auto"`` to follow what is measured.

    Attributes:
        limit: how many there may be now.
        most: how many there may ever be.

    >>> pace = Pace("auto")
    >>> for _ in range(100):
    ...     pace.note(0.03, busy=pace.limit)
    >>> pace.limit > 32
    True
    """

    def __init__(self, connections: int | str) -> None:
        self._follows = connections == "auto"
        self.limit = _FIRST if connections == "auto" else int(connections)
        self.most = _MOST if connections == "auto" else self.limit
        self._lock = threading.Lock()
        self._sum, self._count, self._full = 0.0, 0, 0
        self._trial: tuple[int, float] | None = None  # the limit before it, and the rate
        self._rest, self._goes_up = 0, True
        self._is_first = False  # of the answers after a change: to requests of before

    def note(self, seconds: float, busy: int) -> None:
        """Hear how long an answer took, and how many requests were under way."""
        if not self._follows:
            return
        with self._lock:
            self._sum += seconds
            self._count += 1
            self._full += busy >= self.limit * 0.9
            if self._count >= self.limit:
                mean, is_full = self._sum / self._count, self._full * 2 > self._count
                self._sum, self._count, self._full = 0.0, 0, 0
                if self._is_first:
                    self._is_first = False
                elif is_full and mean > 0:  # else nobody asks for more
                    self._adapt(self.limit / mean)

    def _adapt(self, rate: float) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            before, rate_before = trial
            more = self.limit / before - 1
            needed = 1 + _WORTH * more if more > 0 else _STAYS
            if rate < rate_before * needed:
                self._set(before)
                self._goes_up = more < 0
                self._rest = _REST
                return
            self._rest = 0 if more > 0 else 1
        if self._rest:
            self._rest -= 1
            return
        limit = int(self.limit * (_UP if self._goes_up else _DOWN))
        limit = max(_LEAST, min(self.most, limit))
        if limit == self.limit:
            self._goes_up = not self._goes_up
            self._rest = _REST
            return
        self._trial = self.limit, rate
        self._set(limit)

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._is_first = True

"""How long steps take on a CUDA device, and how long it has nothing to do between them.

Python goes on while a GPU computes: that a step waits for its batch need not mean that the GPU does.  Events
on the current stream tell.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, NamedTuple

__all__ = ["DeviceClock", "DeviceTimes", "synchronized"]

_EVERY = 4  # steps of which one is measured
_MOST_PENDING = 64  # measurements that the device has not come to: more than it lets Python be ahead


def synchronized() -> bool:
    """Wait until a CUDA device that is in use has done what it was asked for.

    Returns:
        Whether there is one.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    try:
        cuda.synchronize()
    except RuntimeError:  # while a graph is captured, or of a device that failed: the script's own to tell
        return False
    return True


class DeviceTimes(NamedTuple):
    """Means of the steps that were measured.

    Attributes:
        wait_s: seconds that lie, on the device, between a step's end and the next one's begin.
        busy_s: seconds from a step's begin to its end there.
    """

    wait_s: float
    busy_s: float


class DeviceClock:
    """Measures every fourth step by three events; nobody waits for them.

    An event is noted by the device when it has done all that was asked of it before.  They are looked at some
    steps later, if the device has come to them, and at the end.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._events: list[Any] = []  # of the step that is being measured
        self._pending: deque[list[Any]] = deque()
        self._milliseconds: list[tuple[float, float]] = []
        self._is_over = False

    def asked(self) -> None:
        """A step has ended, as far as Python knows, and the next one's batch is asked for."""
        if len(self._events) == 2:
            self._mark()
            self._pending.append(self._events)
        self._events = []
        self._collect()
        if self._steps % _EVERY == 0 and len(self._pending) < _MOST_PENDING:
            self._mark()
        self._steps += 1

    def got(self) -> None:
        """The batch is there."""
        if len(self._events) == 1:
            self._mark()

    def skip(self) -> None:
        """What goes on belongs to no step."""
        self._events = []

    def close(self) -> None:
        """Let go of events."""
        self._is_over, self._events = True, []
        self._pending.clear()

    def times(self) -> DeviceTimes | None:
        """What was measured; None where there is no such device, or nothing was asked of it."""
        self._collect()
        count = len(self._milliseconds)
        if not count:
            return None
        wait, busy = (sum(values) / count / 1e3 for values in zip(*self._milliseconds, strict=True))
        return DeviceTimes(wait, busy)

    def _mark(self) -> None:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if self._is_over or cuda is None or not cuda.is_initialized():
            return
        try:
            event = cuda.Event(enable_timing=True)
            event.record()
        except RuntimeError:  # where it may not be done: the script's own work goes on
            self.close()
            return
        self._events.append(event)

    def _collect(self) -> None:
        """Take the times of what the device has come to."""
        try:
            while self._pending and self._pending[0][-1].query():
                asked, got, ended = self._pending.popleft()
                self._milliseconds.append((asked.elapsed_time(got), got.elapsed_time(ended)))
        except RuntimeError:  # of events of two devices
            self.close()

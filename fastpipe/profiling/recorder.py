"""A thread that looks, some hundred times a second, at what another one is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import CodeType
from typing import Any

from fastpipe.profiling.frames import current_stacks, native_ids
from fastpipe.profiling.looking import LookingThread
from fastpipe.profiling.stacks import Boundary, Line, Stacks
from fastpipe.profiling.times import NOTHING, Spent, ThreadClock

__all__ = ["OUTSIDE", "Recorder", "Tally"]

OUTSIDE = "outside"  # the kind of what is in no loop over a loader

_INTERVAL_S = 0.005  # a look costs about 30 µs
_TELL_S = 0.5


class Tally:
    """Nanoseconds by kind, stage and line.

    >>> tally = Tally()
    >>> tally.add("dataset", "read", Line("a.py", 3, "load"), Spent(5, 1, 0))
    >>> tally.stages("dataset")["read"].idle
    4
    >>> Tally.from_json(tally.as_json()).stages("dataset") == tally.stages("dataset")
    True
    """

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str, Line], Spent] = {}

    def add(self, kind: str, stage: str, line: Line, spent: Spent) -> None:
        """Add what a thread did for a while."""
        key = kind, stage, line
        self.spent[key] = self.spent.get(key, NOTHING).plus(spent)

    def merge(self, other: Tally) -> None:
        """Add all of another one."""
        for (kind, stage, line), spent in other.spent.items():
            self.add(kind, stage, line, spent)

    def stages(self, kind: str) -> dict[str, Spent]:
        """By stage, of one kind."""
        found: dict[str, Spent] = {}
        for (one, stage, _), spent in list(self.spent.items()):
            if one == kind:
                found[stage] = found.get(stage, NOTHING).plus(spent)
        return found

    def lines(self, *kinds: str) -> list[tuple[Line, str, Spent]]:
        """Lines with their stages, the one that took longest first; of some kinds."""
        found: dict[tuple[Line, str], Spent] = {}
        for (kind, stage, line), spent in list(self.spent.items()):
            if kind in kinds:
                found[line, stage] = found.get((line, stage), NOTHING).plus(spent)
        ordered = sorted(found.items(), key=lambda item: -item[1].wall)
        return [(line, stage, spent) for (line, stage), spent in ordered]

    def as_json(self) -> list[Any]:
        """For a file."""
        return [
            [kind, stage, list(line), list(spent)] for (kind, stage, line), spent in list(self.spent.items())
        ]

    @classmethod
    def from_json(cls, content: list[Any]) -> Tally:
        """As `as_json` gives it."""
        found = cls()
        for kind, stage, line, spent in content:
            found.add(kind, stage, Line(*line), Spent(*spent))
        return found


class Recorder:
    """Looks at threads of this process while it is open.

    Attributes:
        tally: of what was seen.
        outside: nanoseconds outside of loops, by file and name of the script's functions that ran, with all
            that they called.
        own_cpu_ns: what looking has cost so far.

    Args:
        boundaries: as of :class:`Stacks`.
        threads: idents of those that are looked at; None for all but this recorder's own.
        tell: called from time to time, and at the end.
        kind: says of what kind it is where a thread is below no boundary.
        counts: says whether what is seen now is to count.

    >>> import threading
    >>> with Recorder({}, [threading.get_ident()]) as recorder:
    ...     _ = sum(number * number for number in range(3_000_000))
    >>> sum(spent.cpu for spent in recorder.tally.stages("").values()) > 0
    True
    """

    def __init__(
        self,
        boundaries: dict[CodeType, Boundary],
        threads: list[int] | None = None,
        tell: Callable[[], None] | None = None,
        *,
        kind: Callable[[], str] = str,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        self.tally = Tally()
        self.outside: dict[tuple[str, str], int] = {}
        self.own_cpu_ns = 0
        self._stacks = Stacks(boundaries)
        self._threads, self._tell, self._kind, self._counts = threads, tell, kind, counts
        self._clocks: dict[int, tuple[ThreadClock, Spent]] = {}
        self._told_s = time.monotonic()
        self._thread = LookingThread("fastpipe-profile", _INTERVAL_S, self._look_and_tell, self._close)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End, after a last look; or the rest of it, where an earlier call was ended by an exception."""
        self._thread.stop()
        self._kind, self._tell, self._counts = str, None, bool  # which refer to whoever has this recorder

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _look_and_tell(self, is_last: bool) -> None:
        self._look()
        self.own_cpu_ns = time.thread_time_ns()
        now = time.monotonic()  # where cores are taken, looks are rare
        if self._tell is not None and (is_last or now >= self._told_s + _TELL_S):
            self._told_s = now
            self._tell()

    def _close(self) -> None:
        for clock, _ in self._clocks.values():
            clock.close()

    def _look(self) -> None:
        # All of them first: reading clocks lets the threads go on.
        stacks = current_stacks(self._threads)
        natives = native_ids()
        for ident, stack in stacks.items():
            if ident not in natives:  # it has ended
                continue
            clock, before = self._clock(ident, natives[ident])
            now = clock.read()
            self._clocks[ident] = clock, now
            if not self._counts():
                continue
            below, stage, line = self._stacks.look(stack)
            kind = below or self._kind()
            self.tally.add(kind, stage, line, now - before)
            if kind == OUTSIDE:
                for function in self._stacks.functions(stack):
                    self.outside[function] = self.outside.get(function, 0) + (now - before).wall

    def _clock(self, ident: int, native: int) -> tuple[ThreadClock, Spent]:
        found = self._clocks.get(ident)
        if found is None or found[0].native_id != native:  # that of a thread which has ended is given again
            if found is not None:
                found[0].close()
            clock = ThreadClock(native)
            found = self._clocks[ident] = clock, clock.read()
        return found

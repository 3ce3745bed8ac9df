"""What the kernel knows of threads and processes: how long they ran, waited for a core, and slept."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from fastpipe.core.processes import process_tree

__all__ = ["NOTHING", "Spent", "ThreadClock", "processes_cpu_ns", "threads_delay_ns"]


class Spent(NamedTuple):
    """Nanoseconds of a thread.

    Attributes:
        wall: that went by.
        cpu: in which it ran.
        delay: in which it was ready to run, and others had the cores.
    """

    wall: int
    cpu: int
    delay: int

    @property
    def idle(self) -> int:
        """In which it waited for something else: a disk, a network, a lock, another thread."""
        return max(0, self.wall - self.cpu - self.delay)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu, self.delay - other.delay)

    def plus(self, other: Spent) -> Spent:
        """Both together; a tuple's ``+`` is another thing."""
        return Spent(self.wall + other.wall, self.cpu + other.cpu, self.delay + other.delay)

    def each(self, count: int) -> Spent:
        """Of one, if this is of so many."""
        return Spent(self.wall // count, self.cpu // count, self.delay // count)


NOTHING = Spent(0, 0, 0)
_TASKS = Path("/proc/self/task")


class ThreadClock:
    """The times of one thread of this process, read by any other.

    Where there is no ``/proc`` all of the time counts as running.

    Args:
        native_id: of the thread; None for the one that calls.

    Attributes:
        native_id: the same.

    >>> clock = ThreadClock()
    >>> before = clock.read()
    >>> (clock.read() - before).wall > 0
    True
    >>> clock.close()
    """

    def __init__(self, native_id: int | None = None) -> None:
        self.native_id = threading.get_native_id() if native_id is None else native_id
        try:
            self._descriptor = os.open(
                f"/proc/self/task/{self.native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            self._descriptor = -1

    def read(self) -> Spent:
        """Since the thread began; of ``wall``, only differences have a meaning."""
        now = time.perf_counter_ns()
        if self._descriptor < 0:
            return Spent(now, now, 0)
        try:
            cpu, delay, _ = os.pread(self._descriptor, 100, 0).split()
        except (OSError, ValueError):  # the thread has ended
            return Spent(now, 0, 0)
        return Spent(now, int(cpu), int(delay))

    def close(self) -> None:
        """Let go of the descriptor; the clock may be closed again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def processes_cpu_ns() -> int | None:
    """Nanoseconds in which this process, and those that it started and theirs, have run.

    Those that have ended and were waited for count as well, so that it never falls.

    Returns:
        Nanoseconds, in steps of the kernel's tick (10 ms as a rule); None where there is no ``/proc``.

    >>> processes_cpu_ns() is None or processes_cpu_ns() > 0
    True
    """
    ticks: dict[int, int] = {}
    tree = process_tree(os.getpid(), ticks)
    if os.getpid() not in ticks:
        return None
    return sum(ticks[number] for number in tree) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def threads_delay_ns() -> int | None:
    """Nanoseconds in which threads of this process were ready to run, and others had the cores; their sum.

    Those of threads that have ended are not counted, so that it may fall.

    Returns:
        Nanoseconds; None where the kernel does not tell.

    >>> delay = threads_delay_ns()
    >>> delay is None or delay >= 0
    True
    """
    total = None
    for path in _TASKS.glob("*/schedstat"):
        try:
            delay = int(path.read_bytes().split()[1])
        except (OSError, IndexError):  # it has just ended; a kernel without these figures
            continue
        total = delay + (total or 0)
    return total

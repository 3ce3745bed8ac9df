"""Clocks for threads, processes and CUDA devices."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fastpipe.core.processes import process_tree

_TASKS = Path("/proc/self/task")
_INTERVAL_NS = 20_000_000  # least time between readings of a meter; a reading takes some hundred microseconds
_EVERY = 4  # every fourth step is measured on the device
_MOST_PENDING = 64  # most measurements that the device has not finished; its queue holds fewer


class Spent(NamedTuple):
    """Times of a thread in nanoseconds: elapsed time, CPU time, and the time that it waits for a core."""

    wall: int
    cpu: int
    delay: int

    @property
    def idle(self) -> int:
        return max(0, self.wall - self.cpu - self.delay)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu, self.delay - other.delay)

    def plus(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu, self.delay + other.delay)

    def each(self, count: int) -> Spent:
        return Spent(self.wall // count, self.cpu // count, self.delay // count)


NOTHING = Spent(0, 0, 0)


class ThreadClock:
    def __init__(self, native_id: int | None = None) -> None:
        self.native_id = threading.get_native_id() if native_id is None else native_id
        try:
            path = f"/proc/self/task/{self.native_id}/schedstat"
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> Spent:
        """Return the thread's times since its start.  Only differences of ``wall`` are meaningful."""
        now = time.perf_counter_ns()
        if self._descriptor < 0:
            return Spent(now, now, 0)
        try:
            cpu, delay, _ = os.pread(self._descriptor, 100, 0).split()
        except (OSError, ValueError):  # the thread has ended
            return Spent(now, 0, 0)
        return Spent(now, int(cpu), int(delay))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def processes_cpu_ns() -> int | None:
    """Return the CPU time of this process and all its descendants, in nanoseconds; None if unknown."""
    ticks: dict[int, int] = {}
    tree = process_tree(os.getpid(), ticks)
    if os.getpid() not in ticks:
        return None
    return sum(ticks[number] for number in tree) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def threads_delay_ns() -> int | None:
    total = None
    for path in _TASKS.glob("*/schedstat"):
        try:
            delay = int(path.read_bytes().split()[1])
        except (OSError, IndexError):  # the thread has ended, or the kernel lacks these figures
            continue
        total = delay + (total or 0)
    return total


class Meter:
    """Measures how much a counter increases during the steps of a loop.

    Increases between epochs are not counted.
    """

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self._value: int | None = None
        self._total = self._steps = self._pending = self._when = 0
        self._is_paused = True

    def start(self, now: int) -> None:
        self._value, self._when, self._pending, self._is_paused = self._read(), now, 0, False

    def step(self, now: int) -> None:
        if self._is_paused:
            self.start(now)
            return
        self._pending += 1
        if now - self._when > _INTERVAL_NS:
            self._update(now)

    def pause(self) -> None:
        self._is_paused = True

    def finish(self, now: int) -> None:
        if not self._is_paused and self._pending:
            self._update(now)

    @property
    def per_step(self) -> int | None:
        return self._total // self._steps if self._steps else None

    def _update(self, now: int) -> None:
        value = self._read()
        if value is not None and self._value is not None:
            self._total += value - self._value
            self._steps += self._pending
        self._value, self._when, self._pending = value, now, 0


def _cuda() -> Any:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def uses_cuda() -> bool:
    return _cuda() is not None


def synchronized() -> bool:
    cuda = _cuda()
    if cuda is None:
        return False
    try:
        cuda.synchronize()
    except RuntimeError:  # a graph is being captured, or the device has failed
        return False
    return True


class DeviceTimes(NamedTuple):
    wait_s: float
    busy_s: float


class DeviceClock:
    """Measures every fourth step on a CUDA device, by three CUDA events.  Does not wait for the device."""

    def __init__(self) -> None:
        self._steps = 0
        self._events: list[Any] = []  # the events of the step that is being measured
        self._pending: deque[list[Any]] = deque()
        self._milliseconds: list[tuple[float, float]] = []
        self._is_over = False

    def asked(self) -> None:
        if len(self._events) == 2:
            self._mark()
            self._pending.append(self._events)
        self._events = []
        self._collect()
        if self._steps % _EVERY == 0 and len(self._pending) < _MOST_PENDING:
            self._mark()
        self._steps += 1

    def got(self) -> None:
        if len(self._events) == 1:
            self._mark()

    def skip(self) -> None:
        self._events = []

    def close(self) -> None:
        self._is_over, self._events = True, []
        self._pending.clear()

    def times(self) -> DeviceTimes | None:
        self._collect()
        count = len(self._milliseconds)
        if not count:
            return None
        wait, busy = (sum(values) / count / 1e3 for values in zip(*self._milliseconds, strict=True))
        return DeviceTimes(wait, busy)

    def _mark(self) -> None:
        cuda = None if self._is_over else _cuda()
        if cuda is None:
            return
        try:
            event = cuda.Event(enable_timing=True)
            event.record()
        except RuntimeError:  # events are not allowed at present, as in a graph capture
            self.close()
            return
        self._events.append(event)

    def _collect(self) -> None:
        try:
            while self._pending and self._pending[0][-1].query():
                asked, got, ended = self._pending.popleft()
                self._milliseconds.append((asked.elapsed_time(got), got.elapsed_time(ended)))
        except RuntimeError:  # the events belong to two devices
            self.close()

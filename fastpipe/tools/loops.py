"""Measure how long each step of a training loop waits for its batch, and how long it uses the batch."""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from time import perf_counter_ns
from typing import Any

import numpy as np

from fastpipe.tools.batches import Replay, rebuilt
from fastpipe.tools.thread_times import (
    DeviceClock,
    Meter,
    processes_cpu_ns,
    synchronized,
    threads_delay_ns,
    uses_cuda,
)

_WARM = 2  # warm-up steps
_MOST_STEPS = 400
_LEAST_STEPS = 5
_SETTLE_S, _MOST_SETTLE_S = 0.2, 8.0
_TRAINING_S = 12.0  # observe a loop without gradients this much longer: a training may follow
# A step that works this many times as long as the median step, and at least so long, does other work, too.
_UNLIKE, _UNLIKE_NS = 20, 50_000_000
_KNOWN_STEPS, _UNLIKE_SHARE = 8, 0.1  # least steps for a median; largest share of such steps


class Enough(BaseException):
    """Raised to end a measured training loop.  ``except Exception`` in a script does not catch this error."""


class Phase(str, Enum):
    WARMING = "warming"
    AS_IT_IS = "as it is"
    SETTLING = "settling"
    INSTANT = "instant data"
    ADAPTING = "adapting"
    TRIED = "tried"


class Steps:
    """The nanoseconds of each step.  Use the mean, because batches of several workers may arrive together.

    Rare steps that are busy for many times as long as the median step do other work than training on a batch,
    such as saving a checkpoint.  The means do not include these steps.  On a GPU there are no such steps: one
    step may wait for the work of many.
    """

    def __init__(self) -> None:
        self.waits, self.busy = array("q"), array("q")

    def add(self, wait: int, busy: int) -> None:
        self.waits.append(wait)
        self.busy.append(busy)

    def __len__(self) -> int:
        return len(self.waits)

    @property
    def seconds(self) -> float:
        return self.wait_s + self.busy_s

    @property
    def wait_s(self) -> float:
        return self._mean(self.waits)

    @property
    def busy_s(self) -> float:
        return self._mean(self.busy)

    @property
    def unlike(self) -> tuple[int, int]:
        """Return the number of steps that are not included in the means, and their nanoseconds."""
        busy = np.array(self.busy)
        found = busy[busy >= self._limit_ns]
        return len(found), int(found.sum())

    @property
    def _limit_ns(self) -> float:
        busy = np.array(self.busy)
        if len(busy) < _KNOWN_STEPS or uses_cuda():
            return math.inf
        limit = max(_UNLIKE_NS, _UNLIKE * float(np.median(busy)))
        return limit if np.count_nonzero(busy >= limit) <= _UNLIKE_SHARE * len(busy) else math.inf

    def _mean(self, values: array[int]) -> float:
        kept = np.array(values)[np.array(self.busy) < self._limit_ns]
        return float(kept.mean()) / 1e9 if len(kept) else 0.0


class Loop:
    """The steps of one training loop of a script, and their batches.

    The loop is measured for ``seconds`` without a change.  With ``is_replayed``, its steps then get the same
    batch again and again for half as long, and after that the batches that ``next_phase`` returns.  An epoch
    never gets more batches than its loader has, so a phase may continue in later epochs.

    A step that iterates another loader from the beginning to the end, such as a validation, is not part of
    ``steps``.  ``aside`` contains the number of these steps and their nanoseconds, for the loop of each such
    loader.
    ``step_delay_ns`` is the time for which all threads together wait for cores during a step of the unchanged
    loop, minus the same time with the repeated batch.  The first step of an epoch does not count.  With
    ``counts_starts``, it counts in all epochs except the first.  ``others`` are all loops of the script.
    """

    def __init__(
        self, seconds: float, is_replayed: bool,
        next_phase: Callable[[], Iterator[Any] | None] | None = None, may_judge: bool = False,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._seconds, self._is_replayed, self._next_phase = seconds, is_replayed, next_phase
        self._may_judge, self._say = may_judge, say
        self.phase = Phase.WARMING
        self.steps: dict[Phase, Steps] = {phase: Steps() for phase in Phase}
        self.epoch_starts: list[float] = []
        self.step_cpu_ns: int | None = None
        self.step_delay_ns: int | None = None
        self.device = DeviceClock()
        self.batch: Any = None
        self._source: Iterator[Any] | None = None  # batches instead of the loader's
        self.others: Sequence[Loop] = ()
        self.place = ""  # the line that iterates the loader
        self.aside: dict[Loop, tuple[int, int]] = {}
        self._length_of: Callable[[], int | None] = lambda: None
        self._length: int | None = None  # number of batches of an epoch, if an epoch has ended
        self._given, self._most = 0, math.inf  # batches of this epoch: given, and at most
        self._began = self._ended = 0  # times of the last epoch; ``_ended`` is 0 during an epoch
        self._thread = self._elsewhere = self._waited = self._waited_elsewhere = 0
        self.ahead, self.is_serial = 0, False  # a serial loader prefetches nothing
        self.counts_starts = False
        self.is_over = self.has_ended = self._is_finishing = False
        self.spans: list[tuple[str, int, int, int]] = []  # phase; times of request, arrival, end
        self._asked = self._got = self._start = 0
        self._cut: tuple[int, int] | None = None  # wait and work of the last step, if the loop was left in it
        self._phase_began = perf_counter_ns()
        self._cpu = Meter(processes_cpu_ns)
        self._delay, self._delay_instant = Meter(threads_delay_ns), Meter(threads_delay_ns)
        self._meters = {Phase.AS_IT_IS: [self._delay], Phase.INSTANT: [self._delay_instant, self._cpu]}
        self._is_first, self._is_ending, self._is_idle = True, False, False

    @property
    def is_replaying(self) -> bool:
        """True if the loop gets other batches than its loader's."""
        return self._source is not None

    def close(self) -> None:
        self.is_over, self._next_phase, self._source, self.batch = True, None, None, None
        self.has_ended = False  # the script may continue with an iterator that it has kept
        self.others, self._length_of, self._say = (), lambda: None, lambda _: None
        self.device.close()

    @property
    def total_s(self) -> float:
        return sum(len(steps) * steps.seconds for steps in self.steps.values())

    def next(self, take: Callable[[], Any]) -> Any:
        if self._is_finishing:  # a measurement iterates the loader of this loop
            return take()
        self.end_again()
        now = perf_counter_ns()
        if self._got:
            self._step_ended(now)
            now = perf_counter_ns()
        if self._source is not None and self._given >= self._most:
            self.end_epoch()
            raise StopIteration
        is_measured = self.phase is Phase.AS_IT_IS and not self._is_first
        if is_measured:
            self.device.asked()
        self._asked = now
        batch = self._taken(take) if self._source is None else next(self._source)
        self._got = perf_counter_ns()
        self._given += 1
        if len(self.others) > 1:
            self._tell_others(self._got - now)
        if is_measured:
            self.device.got()
        if self._is_first and self.phase in (Phase.WARMING, Phase.AS_IT_IS):
            self._asked -= self._start
            self.epoch_starts.append((self._got - self._asked) / 1e9)
        return batch

    def end_again(self) -> None:
        """Raise ``Enough`` again if the script has caught it (for example with ``except:``) and continues."""
        if self.has_ended or (len(self.others) > 1 and any(loop.has_ended for loop in self.others)):
            raise Enough

    @property
    def is_in_step(self) -> bool:
        return self._got != 0

    @property
    def first_step_s(self) -> tuple[float, float] | None:
        """Return the seconds for which the first step waits and works, even if it has not ended.

        None if no batch has arrived.
        """
        found = self._cut
        if self.spans:
            _, asked, got, end = self.spans[0]
            found = got - asked, end - got
        elif self._got > self._asked:
            found = self._got - self._asked, perf_counter_ns() - self._got
        return None if found is None else (found[0] / 1e9, found[1] / 1e9)

    def begin_epoch(
        self, took: int = 0, length: Callable[[], int | None] = lambda: None, *, is_idle: bool = False
    ) -> None:
        """Begin an epoch of ``length()`` batches; with ``is_idle``, its loader does not make any of them."""
        self._got, self._is_first, self._start, self._is_ending = 0, True, took, False
        self._length_of, self._given = length, 0
        if self._source is not None:
            self._limit()
        self._began, self._ended, self._is_idle = perf_counter_ns(), 0, is_idle
        self._thread = threading.get_ident()
        self._pause_meters()

    def end_epoch(self) -> None:
        now = perf_counter_ns()
        if self._got > self._asked:  # the loop is left within a step
            self._cut = self._got - self._asked, now - self._got
        self._got, self._ended = 0, self._ended or now

    def _limit(self) -> None:
        # Only if the loop gets other batches: torch then no longer warns about a dataset with a wrong length.
        length = self._length_of()
        known = self._length if length is None else length
        self._most = math.inf if known is None else known

    def _pause_meters(self) -> None:
        self.device.skip()
        for meter in chain(*self._meters.values()):
            meter.pause()

    def ends_soon(self) -> None:
        self._is_ending = self._is_replayed

    def _tell_others(self, took: int) -> None:
        for loop in self.others:
            if loop is not self and loop.is_in_step and loop._thread == self._thread:
                loop._elsewhere += took

    def _taken(self, take: Callable[[], Any]) -> Any:
        try:
            batch = take()
        except BaseException as error:
            self.end_epoch()  # the time between epochs does not belong to a step
            if isinstance(error, StopIteration):
                self._length = self._given
            raise
        if self._is_replayed:
            self.batch = rebuilt(batch)  # new containers, because the script may change its own
        return batch

    def _step_ended(self, now: int) -> None:
        # The first step of an epoch often includes the start of workers, so it does not count.
        is_start = self._is_first and not self._is_idle
        if self._is_aside(now):
            self._phase_began += now - self._asked
            self._pause_meters()
        elif not is_start or (self.counts_starts and len(self.epoch_starts) > 1):
            wait, elsewhere = self._got - self._asked, min(self._elsewhere, now - self._got)
            self.steps[self.phase].add(wait + elsewhere, now - self._got - elsewhere)
            if self.phase is Phase.AS_IT_IS:
                self._waited, self._waited_elsewhere = self._waited + wait, self._waited_elsewhere + elsewhere
        if len(self.spans) < 4 * _MOST_STEPS:
            self.spans.append((self.phase.value, self._asked, self._got, now))
        self._is_first, self._elsewhere = False, 0
        for meter in self._meters.get(self.phase, ()):
            meter.step(now)
        if not self.is_over:
            self._advance(now)

    def _is_aside(self, now: int) -> bool:
        inner = next((loop for loop in self.others if loop is not self and loop._was_within(self, now)), None)
        if inner is None:
            return False
        count, total = self.aside.get(inner, (0, 0))
        self.aside[inner] = count + 1, total + now - self._got
        return True

    def _was_within(self, outer: Loop, now: int) -> bool:
        """Return whether an epoch of this loop began and ended within the current step of another loop."""
        return outer._got <= self._began < self._ended <= now and self._thread == outer._thread

    def _advance(self, now: int) -> None:
        count, seconds = len(self.steps[self.phase]), (now - self._phase_began) / 1e9
        if self.phase is Phase.WARMING and count >= _WARM:
            self._enter(Phase.AS_IT_IS)
        elif self.phase is Phase.AS_IT_IS and (
            self._has_enough(count, seconds, self._seconds) or (self._is_ending and count >= _LEAST_STEPS)
        ):
            if self._waited_elsewhere > self._waited:
                return  # steps wait mostly for the loader of another loop, which is measured
            if self._may_judge and seconds < self._seconds + _TRAINING_S and not _trains():
                return
            for meter in self._meters.get(self.phase, ()):
                meter.finish(now)
            if self._is_replayed:
                self._enter(Phase.SETTLING)
                self._settle()
            else:
                self.finish()
        elif self.phase is Phase.SETTLING and count:
            self._enter(Phase.INSTANT)
        elif self.phase is Phase.INSTANT and self._has_enough(count, seconds, self._seconds / 2):
            for meter in self._meters.get(self.phase, ()):
                meter.finish(now)
            self.step_cpu_ns = self._cpu.per_step
            if self._delay.per_step is not None:
                self.step_delay_ns = max(0, self._delay.per_step - (self._delay_instant.per_step or 0))
            self.finish()
        elif self.phase is Phase.ADAPTING and count >= _WARM:
            self._enter(Phase.TRIED)
        elif self.phase is Phase.TRIED and self._has_enough(count, seconds, self._seconds / 2):
            self.finish()

    def _wait_for_device(self) -> None:
        began = perf_counter_ns()
        steps = self.steps[self.phase]
        if synchronized() and len(steps):
            steps.busy[-1] += perf_counter_ns() - began

    def _has_enough(self, count: int, seconds: float, wanted: float) -> bool:
        if count >= _MOST_STEPS:
            return True
        return (seconds >= wanted and count >= _LEAST_STEPS) or (seconds >= 3 * wanted and count >= 2)

    def _settle(self) -> None:
        """Wait until the loader has made all batches that it prefetches, because this slows the steps."""
        if not self.is_serial:
            time.sleep(min(_SETTLE_S + self.ahead * self.steps[Phase.AS_IT_IS].seconds, _MOST_SETTLE_S))

    def finish(self) -> None:
        self._wait_for_device()
        self._is_finishing = True
        try:
            self._source = None if self._next_phase is None else self._next_phase()
        finally:
            self._is_finishing = False
        if self._source is None:
            self.is_over = True
            if self._next_phase is not None:
                self.has_ended = True
                raise Enough
            return
        self.steps[Phase.ADAPTING], self.steps[Phase.TRIED] = Steps(), Steps()
        self.phase = Phase.ADAPTING  # the time until now does not belong to a step
        self._enter(Phase.ADAPTING)

    def _enter(self, phase: Phase) -> None:
        if self.phase is not Phase.WARMING:
            self._wait_for_device()
        if phase is Phase.AS_IT_IS:
            self._say(f"measuring steps of the loop at {self.place or 'an unknown line'}, unchanged")
        elif phase is Phase.SETTLING:
            self._say("measuring steps with data ready: the loop gets the same batch again and again")
        self.phase, self._phase_began = phase, perf_counter_ns()
        if phase is Phase.SETTLING:
            self._source = Replay(self.batch)
            self._limit()
        for meter in self._meters.get(self.phase, ()):
            meter.start(self._phase_began)


def _trains() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or torch.is_grad_enabled()


class LateIterator(Iterator[Any]):
    """An iterator that is created when it is first used."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    @functools.cached_property
    def _inner(self) -> Iterator[Any]:
        return self._begin()

    def __next__(self) -> Any:
        return next(self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("_begin", "_inner"):  # this object is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)


class WatchedIterator:
    def __init__(
        self, inner: Iterator[Any], loop: Loop, took: int = 0,
        length: Callable[[], int | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._inner, self._loop = inner, loop
        self._take = inner.__next__
        loop.begin_epoch(took, length, is_idle=isinstance(inner, LateIterator))

    def __iter__(self) -> WatchedIterator:
        return self

    def __next__(self) -> Any:
        return self._loop.next(self._take)

    def __del__(self) -> None:
        self._loop.end_epoch()

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # this object is being unpickled, or __init__ has failed
            raise AttributeError(name)
        return getattr(self._inner, name)

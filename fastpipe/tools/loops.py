"""Measure how long each step of a training loop waits for its batch, and how long it uses the batch."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from time import perf_counter_ns
from typing import Any

from fastpipe.tools.batches import Replay, rebuilt
from fastpipe.tools.thread_times import DeviceClock, Meter, processes_cpu_ns, synchronized, threads_delay_ns

_WARM = 2  # warm-up steps
_MOST_STEPS = 400
_LEAST_STEPS = 5
_SETTLE_S, _MOST_SETTLE_S = 0.2, 8.0
_TRAINING_S = 12.0  # observe a loop without gradients this much longer: a training may follow


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
    """The nanoseconds of each step.  Use the mean, because batches of several workers may arrive together."""

    def __init__(self) -> None:
        self.waits, self.busy = array("q"), array("q")

    def add(self, wait: int, busy: int) -> None:
        self.waits.append(wait)
        self.busy.append(busy)

    def __len__(self) -> int:
        return len(self.waits)

    @property
    def seconds(self) -> float:
        return (sum(self.waits) + sum(self.busy)) / max(1, len(self)) / 1e9

    @property
    def wait_s(self) -> float:
        return sum(self.waits) / max(1, len(self)) / 1e9

    @property
    def busy_s(self) -> float:
        return sum(self.busy) / max(1, len(self)) / 1e9


class Loop:
    """The steps of one training loop of a script, and their batches.

    The loop is measured for ``seconds`` without a change.  With ``is_replayed``, its steps then get the same
    batch again and again for half as long, and after that the batches that ``next_phase`` returns.
    ``step_delay_ns`` is the time for which all threads together wait for cores during a step of the unchanged
    loop, minus the same time with the repeated batch.  The first step of an epoch does not count.  With
    ``counts_starts``, it counts in all epochs except the first.  ``others`` are all loops of the script.
    """

    def __init__(
        self, seconds: float, is_replayed: bool,
        next_phase: Callable[[], Iterator[Any] | None] | None = None, may_judge: bool = False,
    ) -> None:  # fmt: skip
        self._seconds, self._is_replayed, self._next_phase = seconds, is_replayed, next_phase
        self._may_judge = may_judge
        self.phase = Phase.WARMING
        self.steps: dict[Phase, Steps] = {phase: Steps() for phase in Phase}
        self.epoch_starts: list[float] = []
        self.step_cpu_ns: int | None = None
        self.step_delay_ns: int | None = None
        self.device = DeviceClock()
        self.batch: Any = None
        self._source: Iterator[Any] | None = None  # batches instead of the loader's
        self.others: Sequence[Loop] = ()
        self._thread = self._elsewhere = self._waited = self._waited_elsewhere = 0
        self.ahead = 0
        self.counts_starts = False
        self.is_over = self.has_ended = self._is_finishing = False
        self.spans: list[tuple[str, int, int, int]] = []  # phase; times of request, arrival, end
        self._asked = self._got = self._start = 0
        self._phase_began = perf_counter_ns()
        self._cpu = Meter(processes_cpu_ns)
        self._delay, self._delay_instant = Meter(threads_delay_ns), Meter(threads_delay_ns)
        self._meters = {Phase.AS_IT_IS: [self._delay], Phase.INSTANT: [self._delay_instant, self._cpu]}
        self._is_first, self._is_ending = True, False

    def close(self) -> None:
        self.is_over, self._next_phase, self._source, self.batch = True, None, None, None
        self.has_ended = False  # the script may continue with an iterator that it has kept
        self.others = ()
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
        is_measured = self.phase is Phase.AS_IT_IS and not self._is_first
        if is_measured:
            self.device.asked()
        self._asked = now
        batch = self._taken(take) if self._source is None else next(self._source)
        self._got = perf_counter_ns()
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

    def begin_epoch(self, took: int = 0) -> None:
        self._got, self._is_first, self._start, self._is_ending = 0, True, took, False
        self.device.skip()
        for meter in chain(*self._meters.values()):
            meter.pause()

    def end_epoch(self) -> None:
        self._got = 0

    def ends_soon(self) -> None:
        self._is_ending = self._is_replayed

    def _tell_others(self, took: int) -> None:
        self._thread = threading.get_ident()
        for loop in self.others:
            if loop is not self and loop.is_in_step and loop._thread == self._thread:
                loop._elsewhere += took

    def _taken(self, take: Callable[[], Any]) -> Any:
        try:
            batch = take()
        except BaseException:
            self._got = 0  # the time between epochs does not belong to a step
            raise
        if self._is_replayed:
            self.batch = rebuilt(batch)  # new containers, because the script may change its own
        return batch

    def _step_ended(self, now: int) -> None:
        # The first step of an epoch often includes the start of workers, so it does not count.
        if not self._is_first or (self.counts_starts and len(self.epoch_starts) > 1):
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
            else:
                self.finish()
        elif self.phase is Phase.SETTLING and count and self._is_settled(seconds):
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

    def _is_settled(self, seconds: float) -> bool:  # whether the loader has prefetched all its batches
        return seconds > min(_SETTLE_S + self.ahead * self.steps[Phase.AS_IT_IS].seconds, _MOST_SETTLE_S)

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
        self.phase, self._phase_began = phase, perf_counter_ns()
        if phase is Phase.SETTLING:
            self._source = Replay(self.batch)
        for meter in self._meters.get(self.phase, ()):
            meter.start(self._phase_began)


def _trains() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or torch.is_grad_enabled()


class WatchedIterator:
    def __init__(self, inner: Iterator[Any], loop: Loop, took: int = 0) -> None:
        self._inner, self._loop = inner, loop
        self._take = inner.__next__
        loop.begin_epoch(took)

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

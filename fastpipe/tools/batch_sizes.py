"""``autotune_batch_size``: find the batch sizes that fit into memory, and the fastest batch size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from rich.console import Console

from fastpipe.console import PlainTable, TextReport, print_line
from fastpipe.core.text import in_duration
from fastpipe.errors import OptionError
from fastpipe.tools.batches import Replay, resized, size_of
from fastpipe.tools.steps import DeviceMemory, learning_rate_rule

_ROUNDS, _ROUND_S = 3, 0.1
_EQUAL = 0.05  # a smaller gain in samples per second does not justify a larger size
_REFINED = 2  # number of sizes to try between the largest that fits and the smallest that does not fit


@dataclass(frozen=True)
class SizeTrial:
    """A tried batch size: the seconds of a step, the peak memory in bytes, and why the size does not fit."""

    size: int
    step_s: float | None = None
    memory: int | None = None
    why: str = ""

    @property
    def rate(self) -> float:
        return self.size / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, repr=False)
class BatchSizes(TextReport):
    """The result of :func:`fastpipe.autotune_batch_size`.  ``print(result)`` shows it.

    Attributes:
        now: the loader's batch size.
        best: the smallest size with at least 95 % of the samples per second of the fastest size.
        largest: the largest tried size that fits into memory.
        target: number of samples for one update of the model's weights.
        trials: the tried sizes, in increasing order.
        notes: the reasons why no larger size was tried.
    """

    now: int
    best: int
    largest: int
    target: int
    trials: tuple[SizeTrial, ...]
    notes: tuple[str, ...]

    @property
    def accumulation(self) -> tuple[int, int]:
        """The batch size, and the number of batches whose gradients are accumulated for one update.

        The product of the two numbers is ``target``.  The batch size is the largest divisor of ``target``
        that is at most ``best``.
        """
        size = max(one for one in range(1, min(self.best, self.target) + 1) if self.target % one == 0)
        return size, self.target // size

    def show(self, console: Console) -> None:
        """Print the result on a console, in the width and colours of the console."""
        rates = {one.size: one.rate for one in self.trials}
        gain = rates[self.best] / rates[self.now] if rates.get(self.now) else None
        more = "" if gain is None else f", {gain:.2f}× as many samples a second as with {self.now}"
        print_line(console, f"batch_size={self.best}{more}", style="bold")
        if self.best != self.now:
            print_line(console, learning_rate_rule(self.best / self.now))
        size, steps = self.accumulation
        if steps > 1:
            print_line(console, f"{self.target} samples an update: {steps} batches of {size}")
        for note in self.notes:
            print_line(console, note)
        table = PlainTable()
        for name in ("batch size", "a step in", "samples/s", "memory"):
            table.add_column(name, justify="right")
        for one in self.trials:
            memory = "" if one.memory is None else f"{one.memory / 1e6:,.0f} MB"
            time = one.why if one.step_s is None else in_duration(one.step_s)
            rate = f"{one.rate:,.1f}" if one.step_s else ""
            table.add_row(str(one.size), time, rate, memory, style="bold" if one.size == self.best else "")
        console.print(table)

    def as_json(self) -> dict[str, Any]:
        """Return the whole result as dicts, lists, strings and numbers that JSON can represent."""
        return {**asdict(self), "accumulation": list(self.accumulation)}


def autotune_batch_size(
    step: Callable[[Any], object], loader: Iterable[Any], *, target: int | None = None,
    largest: int | None = None, memory_budget: int | None = None, seconds: float = 30.0,
) -> BatchSizes:  # fmt: skip
    """Find the batch sizes that fit into memory, and the batch size with the most samples per second.

    The loader's first batch is doubled repeatedly, by repeating its samples.  The search ends when a batch no
    longer fits, when larger batches are no faster, or when the time is over.  If a batch did not fit, sizes
    between this size and the largest size that fits are tried as well.  The loader itself is not measured.

    If a step fails for lack of memory, no larger size is tried, and the memory of the step is released.  On
    the CPU, the operating system may kill a process that lacks memory.  Therefore a size is not tried if the
    memory used by smaller sizes shows that this size would exceed the limit.

    Args:
        step: function that trains on a batch: forward, backward, and the update.  The search changes the
            weights of its model: create the model again before the real training.
        loader: an iterable of batches.  A batch consists of arrays or tensors of shape (N, …), also in
            tuples, lists and dictionaries.
        target: number of samples for one update of the weights.  If they do not fit into one batch, several
            batches are used for one update.  The default is the loader's batch size.
        largest: the largest size to try.
        memory_budget: maximum number of bytes to use, of the GPU's memory or of this process's memory.  The
            default is nine tenths of the available memory.
        seconds: number of seconds after which no further size is tried.

    Raises:
        OptionError: an argument is invalid, the loader has no batch, the batch has no array, or no size fits.
        Exception: ``step`` raised an error other than lack of memory.

    >>> import torch
    >>> model = torch.nn.Linear(8, 1)
    >>> def step(batch):
    ...     model(batch).sum().backward()
    >>> found = autotune_batch_size(step, [torch.zeros(4, 8)], largest=8, target=128, seconds=5)
    >>> size, steps = found.accumulation
    >>> found.largest, size * steps
    (8, 128)
    """
    for name, value in (("target", target), ("largest", largest), ("memory_budget", memory_budget)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise OptionError(f"{name} must be from 1, got {value!r}")
    if not seconds > 0:
        raise OptionError(f"seconds must be above 0, got {seconds!r}")
    batch = next(iter(loader), None)
    if batch is None:
        raise OptionError(f"the {type(loader).__name__} has no batch")
    now = size_of(batch)
    search = _Sizes(step, batch, memory_budget, perf_counter() + seconds)
    search.run(now, largest or 1 << 62)
    fitting = [one for one in search.trials.values() if one.step_s is not None]
    if not fitting:
        raise OptionError(f"no batch fits, not even one sample: {search.trials[min(search.trials)].why}")
    most = max(one.rate for one in fitting)
    best = min(one.size for one in fitting if one.rate >= most * (1 - _EQUAL))
    return BatchSizes(
        now, best, max(one.size for one in fitting), target or now,
        tuple(sorted(search.trials.values(), key=lambda one: one.size)), tuple(search.notes),
    )  # fmt: skip


class _Sizes:
    def __init__(self, step: Callable[[Any], object], batch: Any, budget: int | None, until: float) -> None:
        self._step, self._batch, self._until = step, batch, until
        self._memory = DeviceMemory(batch, budget)
        self.trials: dict[int, SizeTrial] = {}
        self.notes: list[str] = []

    def run(self, now: int, largest: int) -> None:
        size = min(now, largest)
        while self._try(size).step_s is None and size > 1:
            size //= 2
        if self.trials[size].step_s is None:
            return
        while 2 * size <= largest and 2 * size not in self.trials:
            if perf_counter() > self._until:
                self.notes.append(f"no larger size than {size} was tried: the time limit was reached")
                return
            rates = [one.rate for one in sorted(self.trials.values(), key=lambda one: one.size) if one.step_s]
            if len(rates) > 2 and max(rates[-2:]) < rates[-3] * (1 + _EQUAL):
                self.notes.append(f"no larger size than {size} was tried: it would not be faster")
                return
            if self._try(2 * size).step_s is None:
                break
            size *= 2
        above = min((one.size for one in self.trials.values() if one.why), default=None)
        for _ in range(_REFINED):
            middle = size + ((above or size) - size) // 2
            if middle in self.trials or perf_counter() > self._until:
                break
            if self._try(middle).step_s is None:
                above = middle
            else:
                size = middle

    def _try(self, size: int) -> SizeTrial:
        self.trials[size] = trial = self._tried(size)
        return trial

    def _tried(self, size: int) -> SizeTrial:
        likely, limit = self._likely(size), self._memory.limit
        if likely is not None and limit is not None and likely > limit:
            return SizeTrial(size, why=f"would take about {likely / 1e6:,.0f} MB of {limit / 1e6:,.0f}")
        self._memory.begin()
        try:
            trial = SizeTrial(size, self._time(resized(self._batch, size)), self._memory.peak())
        except Exception as error:
            if not self._memory.is_shortage(error):
                raise
            trial = SizeTrial(size, why=f"out of memory ({type(error).__name__})")
        if trial.why:
            self._memory.release()
        if limit is not None and trial.memory is not None and trial.memory > limit:
            why = f"took {trial.memory / 1e6:,.0f} MB of {limit / 1e6:,.0f}"
            return SizeTrial(size, None, trial.memory, why)
        return trial

    def _time(self, batch: Any) -> float:
        batches = Replay(batch)
        self._step(next(batches))
        rounds: list[float] = []
        while len(rounds) < _ROUNDS:
            self._memory.synchronize()
            begin, steps = perf_counter(), 0
            while not steps or (perf_counter() - begin < _ROUND_S and perf_counter() < self._until):
                self._step(next(batches))
                steps += 1
            self._memory.synchronize()
            rounds.append((perf_counter() - begin) / steps)
            if perf_counter() > self._until:
                break
        return statistics.median(rounds)

    def _likely(self, size: int) -> int | None:
        trials = self.trials.values()
        known = sorted((one.size, one.memory) for one in trials if one.memory is not None and one.size < size)
        if len(known) < 2:
            return None
        (small, less), (large, more) = known[-2:]
        return more + max(0, more - less) * (size - large) // (large - small)

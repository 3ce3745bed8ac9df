"""Measurements in interleaved rounds, and their statistics."""

from __future__ import annotations

import gc
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# ---- Rounds ----------------------------------------------------------------------------------------
#
# The speed of a machine changes with clocks, temperature and other programs.  Measuring A for a minute and
# then B for a minute would compare two states of the machine.  So every round measures all contenders one
# after the other.  Each round has another order, and ratios are computed within a round.


class ContenderError(Exception):
    """A contender (an object to measure) cannot continue.  The run goes on without this contender."""


class Contender(ABC):
    """An object to measure, which processes samples or whole files of samples."""

    key: str  # name of the contender in the results
    chunk: int  # samples are requested in multiples of this number, so that no worker idles at the end
    workers: int = 0  # number of processes that it forks; contenders with more processes are warmed up first

    @abstractmethod
    def measure(self, count: int) -> float:
        """Process ``count`` samples from start to end; return the duration in seconds.

        Raises:
            ContenderError: the contender cannot continue.
        """

    def stage_seconds(self) -> Mapping[str, float]:
        """Return how many seconds a loader has spent in each of its stages so far."""
        return {}

    def close(self) -> None:  # noqa: B027 (many have nothing to end)
        """End all threads and processes.  This method may be called twice."""


@dataclass(frozen=True)
class Sample:
    """One measurement in a round: the number of processed samples, and the seconds for all of them."""

    round: int
    count: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


class Summary(NamedTuple):
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Plan:
    """How long a run takes: a number of rounds, or a time budget.

    If both are given, the run ends as soon as one of them is reached.
    """

    rounds: int | None = 7
    budget_s: float | None = None
    seconds: float = 2.5  # least duration of a measurement
    settle_s: float = 0.2  # pause before each measurement, in which the previous prefetch ends
    least: int = 3  # least number of rounds, even if the time budget is used up


@dataclass
class Session:
    """The results of a run: measurements of each contender, and the reasons why contenders have failed."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rounds: int = 0


def round_order(count: int, number: int) -> list[int]:
    """Return the order of ``count`` contenders in round ``number``.

    Each round begins with the next contender, and every second round goes backwards.  So a contender is not
    always measured after the same other contender.

    >>> [round_order(3, number) for number in range(4)]
    [[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 2, 1]]
    """
    step = 1 if number % 2 == 0 else -1
    return [(number + step * i) % count for i in range(count)]


def calibrate(contender: Contender, seconds: float) -> int:
    """Warm up a contender; return how many samples, in multiples of its chunk, take ``seconds``."""
    count = contender.chunk
    contender.measure(count)  # the first call includes the warm-up and compilation, so it is not timed
    while True:
        took = max(contender.measure(count), 1e-9)
        chunks = math.ceil(count / took * seconds * 1.05 / contender.chunk)
        wanted = max(1, chunks) * contender.chunk
        if took >= seconds / 2:
            return wanted
        # Short measurements are inexact: let the count grow by a factor from 2 to 8 only.
        count = min(max(wanted, 2 * count), 8 * count)


def interleave(
    contenders: Sequence[Contender],
    counts: Mapping[str, int],
    plan: Plan,
    *,
    on_sample: Callable[[Contender, Sample], None] = lambda contender, sample: None,
    now: Callable[[], float] = time.perf_counter,
    pause: Callable[[float], None] = time.sleep,
) -> Session:
    """Measure all contenders, round after round; a contender that raises ``ContenderError`` is removed.

    ``counts`` maps the key of each contender to its number of samples in a measurement (from `calibrate`).
    """
    session = Session(samples={contender.key: [] for contender in contenders})
    alive = list(contenders)
    started = now()
    while alive and not _enough(session.rounds, now() - started, plan):
        for place in round_order(len(alive), session.rounds):
            contender = alive[place]
            gc.collect()
            pause(plan.settle_s)
            try:
                seconds = contender.measure(counts[contender.key])
            except ContenderError as error:
                session.failures[contender.key] = str(error)
                continue
            sample = Sample(session.rounds, counts[contender.key], seconds)
            session.samples[contender.key].append(sample)
            on_sample(contender, sample)
        for key in session.failures:
            session.samples.pop(key, None)
        alive = [contender for contender in alive if contender.key not in session.failures]
        session.rounds += 1
    return session


def summarise(figures: Iterable[float]) -> Summary:
    """Return the median, the smallest and the largest figure.

    >>> summarise([3.0, 1.0, 2.0])
    Summary(median=2.0, low=1.0, high=3.0)
    """
    values = list(figures)
    return Summary(statistics.median(values), min(values), max(values))


def rates_by_round(samples: Iterable[Sample]) -> dict[int, float]:
    return {sample.round: sample.rate for sample in samples}


def ratios(samples: Mapping[str, Sequence[Sample]], key: str, reference: Iterable[str]) -> list[float]:
    """Return, for each round, the rate of ``key`` divided by the highest rate of those in ``reference``.

    >>> base = [Sample(0, 100, 1.0), Sample(1, 100, 2.0)]
    >>> fast = [Sample(0, 300, 1.0), Sample(1, 100, 1.0)]
    >>> ratios({"base": base, "fast": fast}, "fast", ["base"])
    [3.0, 2.0]
    """
    others = [rates_by_round(samples[name]) for name in reference]
    return [
        rate / max(other[number] for other in others) for number, rate in rates_by_round(samples[key]).items()
    ]


def _enough(rounds: int, elapsed: float, plan: Plan) -> bool:
    if plan.rounds is not None and (rounds >= plan.rounds or plan.budget_s is None):
        return rounds >= plan.rounds
    if rounds < plan.least:
        return False
    return elapsed + elapsed / rounds > (plan.budget_s or 0.0)


class Draws:
    """A sampler that makes epochs of any length from a few samples.

    The sampler yields all samples in random order, then all samples in another random order, and so on, until
    ``length`` samples have been yielded.  So a small folder makes a long epoch, in which each photo appears
    about equally often.  ``length`` may be changed between epochs.
    """

    def __init__(self, indices: Sequence[int], length: int) -> None:
        self.length = length
        self._indices, self._rng = np.asarray(indices), np.random.default_rng(0)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        left = self.length
        while left > 0:
            drawn = self._rng.permutation(self._indices)[:left]
            left -= len(drawn)
            yield from drawn.tolist()


def touch(batch: Any, *, any_number: bool = False) -> int:
    """Read only the first and the last number of a batch, and return the length of the batch.

    Raises a ValueError for a NaN, unless ``any_number`` is true.
    """
    values = batch[0] if isinstance(batch, (list, tuple)) else batch
    first, last = values[(0,) * values.ndim], values[(-1,) * values.ndim]  # no copy in any memory layout
    if (first != first or last != last) and not any_number:
        raise ValueError("a batch holds a value that is not a number")
    return len(values)


def consume(batches: Iterable[Any], count: int, *, any_number: bool = False) -> float:
    """Iterate all batches, which must have ``count`` samples in all; return the duration in seconds."""
    seen = 0
    start = time.perf_counter()
    for batch in batches:
        seen += touch(batch, any_number=any_number)
    seconds = time.perf_counter() - start
    if seen != count:
        raise RuntimeError(f"an epoch has {seen} samples of {count}")
    return seconds


class DrawnRow(Contender):
    """Measures an epoch of a loader (a `Contender`); the sampler `Draws` sets the length of the epoch.

    The clock runs from the request for an iterator until the end of the iteration.  No batch is prefetched
    before the clock starts, and no batch is left when the clock stops.
    """

    loader: Any
    draws: Draws

    def measure(self, count: int) -> float:
        return consume(self.batches(count), count)

    def batches(self, count: int) -> Any:
        self.draws.length = count
        return self.loader

    def stage_seconds(self) -> Mapping[str, float]:
        return dict(self.loader.clock.totals())

    def close(self) -> None:
        self.loader = None
        gc.collect()  # ends worker processes and threads


class Timeline(NamedTuple):
    """Durations in seconds of the steps of an epoch, or only of the epoch's first steps."""

    wait_s: tuple[float, ...]  # time for which each step waits for its batch
    busy_s: tuple[float, ...]  # busy time of each step
    end_s: float = 0.0  # wait for the end of the epoch after the last step

    @property
    def total_s(self) -> float:
        """Seconds from the request for an iterator to the end of the last step.  If the epoch was iterated to
        its end, the wait for this end is included."""
        return sum(self.wait_s) + sum(self.busy_s) + self.end_s

    @property
    def share(self) -> float:
        """Fraction of the time that was spent waiting."""
        return (sum(self.wait_s) + self.end_s) / self.total_s

    def as_json(self) -> dict[str, Any]:
        waits, busy = ([round(one, 5) for one in times] for times in (self.wait_s, self.busy_s))
        share = round(self.share, 4)
        return {"wait_s": waits, "busy_s": busy, "total_s": round(self.total_s, 5), "share": share}


def timeline_of(batches: Iterable[Any], busy_s: Callable[[Any], float], steps: int | None = None) -> Timeline:
    """Simulate training: iterate batches, and sleep for ``busy_s(batch)`` seconds after each batch.

    There are ``steps`` batches; if ``steps`` is None, all batches of an epoch are iterated.
    """
    waits, busy, end = list[float](), list[float](), 0.0
    asked = time.perf_counter()
    iterator = iter(batches)
    while steps is None or len(waits) < steps:
        batch = next(iterator, None)
        got = time.perf_counter()
        if batch is None:
            end = got - asked
            break
        waits.append(got - asked)
        time.sleep(busy_s(batch))
        asked = time.perf_counter()
        busy.append(asked - got)
    return Timeline(tuple(waits), tuple(busy), end)

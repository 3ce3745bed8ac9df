"""Measure what each stage of a loader's work costs, and predict the time of a training step with a loader."""

from __future__ import annotations

import statistics
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from fastpipe.tools.batches import leaves
from fastpipe.tools.loaders import limit_waiting
from fastpipe.tools.recorder import Tally
from fastpipe.tools.stacks import COLLATE, GRAPH, READ, TRANSFER, Line
from fastpipe.tools.thread_times import NOTHING, Spent, processes_cpu_ns
from fastpipe.tools.witness import Account

_LINES, _LEAST_SHARE = 6, 0.02
# A measurement takes at least this many batches of each worker.  The first batch of each does not count.
_TURNS = 4
_PATIENCE_S = 30.0  # the longest wait for a batch of a worker process
_ROUNDS = 5  # number of measured copies


@dataclass(frozen=True)
class LoaderCosts:
    stages: dict[str, Spent] = field(default_factory=dict)
    lines: tuple[tuple[Line, str, Spent], ...] = ()
    batches: int = 0
    samples: int = 0
    makers: int = 0

    @property
    def wall_s(self) -> float:
        return sum(spent.wall for stage, spent in self.stages.items() if stage != TRANSFER) / 1e9

    @property
    def cpu_s(self) -> float:
        return sum(spent.cpu for spent in self.stages.values()) / 1e9

    @property
    def delay_share(self) -> float:
        return sum(spent.delay for spent in self.stages.values()) / max(1.0, self.wall_s * 1e9)

    @property
    def read_idle_s(self) -> float:
        return self.stages.get(READ, NOTHING).idle / 1e9

    def without(self, *stages: str) -> LoaderCosts:
        left = {stage: spent for stage, spent in self.stages.items() if stage not in stages}
        return replace(self, stages=left)

    def without_waiting(self) -> LoaderCosts:
        read = self.stages.get(READ, NOTHING)
        in_memory = Spent(read.wall - read.idle, read.cpu, read.delay)
        return replace(self, stages={**self.stages, READ: in_memory} if read.wall else self.stages)

    def top_lines(self) -> Iterator[tuple[Line, str, float]]:
        total = self.wall_s * 1e9
        for line, stage, spent in self.lines[:_LINES]:
            if total and spent.wall > _LEAST_SHARE * total:
                yield line, stage, spent.wall / total

    def with_others(self, cpu_s: float | None) -> LoaderCosts:
        rest = 0 if cpu_s is None else int(max(0.0, cpu_s - self.cpu_s) * 1e9)
        return replace(self, stages={**self.stages, GRAPH: Spent(rest, rest, 0)} if rest else self.stages)

    def shares(self) -> dict[str, float]:
        total = sum(spent.wall for spent in self.stages.values()) or 1
        found = {stage: spent.wall / total for stage, spent in self.stages.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def costs_of(accounts: Iterable[Account]) -> LoaderCosts:
    known = [account for account in accounts if account.batches]
    batches = sum(account.batches for account in known)
    if not batches:
        return LoaderCosts()
    tally, collate, sent = Tally(), NOTHING, NOTHING
    for account in known:
        for key, spent in account.tally.items():
            tally.add(*key, spent)
        seen = account.tally.stages("collate").get(COLLATE, NOTHING)
        # The total time is measured exactly.  Samples of the stacks give the shares of CPU time and delay.
        factor = account.collate_ns / seen.wall if seen.wall else 0.0
        collate = collate.plus(Spent(account.collate_ns, int(seen.cpu * factor), int(seen.delay * factor)))
        if account.worker >= 0:  # the rest of the CPU time: another thread of the worker sends the batch
            in_main = sum(spent.cpu for spent in account.tally.values())
            rest = max(0, account.cpu_ns - in_main)
            sent = sent.plus(Spent(rest, rest, 0))
    stages = tally.stages("dataset")
    for stage, more in ((COLLATE, collate), (TRANSFER, sent)):
        if more.wall:
            stages[stage] = stages.get(stage, NOTHING).plus(more)
    lines = tally.lines("dataset", "collate")
    return LoaderCosts(
        {stage: spent.each(batches) for stage, spent in stages.items()},
        tuple((line, stage, spent.each(batches)) for line, stage, spent in lines if line.file),
        batches,
        sum(account.samples for account in known),
        len({account.worker for account in known} - {-1}),
    )


def costs_of_clock(before: dict[str, float], after: dict[str, float], batches: int) -> LoaderCosts:
    stages = {}
    for stage, seconds in after.items():
        spent = int((seconds - before.get(stage, 0.0)) * 1e9 / max(1, batches))
        if stage != "wait" and spent > 0:
            stages["collate" if stage == "copy" else stage] = Spent(spent, spent, 0)
    return LoaderCosts(stages, (), batches)


@dataclass(frozen=True)
class Alone:
    batch_s: float
    cpu_s: float | None
    batches: int
    taken: int = 0

    def with_more(self, rest: Spent | None, is_beside: bool = False) -> Alone:
        """Return the costs of a loader with additional work ``rest`` for each batch.

        The additional work is done after the batch is made or, with ``is_beside``, while it is made.
        """
        if rest is None:
            return self
        cpu = None if self.cpu_s is None else self.cpu_s + rest.cpu / 1e9
        after = 0.0 if is_beside else (rest.cpu + rest.idle) / 1e9
        return Alone(self.batch_s + after, cpu, self.batches)


def alone(begin: Callable[[], Iterator[Any]], skipped: int, seconds: float) -> Alone | None:
    took, batches, taken, cpu = 0.0, 0, 0, 0
    knows_cpu = True
    for epoch in epochs(begin, skipped, seconds, look=processes_cpu_ns):
        used = processes_cpu_ns()
        taken += epoch.taken
        if epoch.batches < 2:
            break
        took, batches = took + epoch.seconds, batches + epoch.batches
        if used is None or epoch.began is None:
            knows_cpu = False
        else:
            cpu += used - epoch.began
    if not batches:
        return None
    return Alone(took / batches, cpu / batches / 1e9 if knows_cpu else None, batches, taken)


def step_with(instant_s: float, step_cpu_s: float | None, loader: Alone, cores: int) -> float:
    """Return the predicted time of a step with a loader.

    It is the largest of three times: the time of a step whose batch is available at once, the time to make a
    batch, and the sum of the CPU times of the step and the batch, divided by ``cores``.
    """
    wanted = [instant_s, loader.batch_s]
    if step_cpu_s is not None and loader.cpu_s is not None:
        wanted.append((step_cpu_s + loader.cpu_s) / cores)
    return max(wanted)


@dataclass(frozen=True)
class Epoch:
    """Those batches of one iterator that count in a measurement.

    ``seconds`` begins with the request for the first of these batches.  If all batches of the iterator count,
    ``seconds`` begins before the iterator is created.
    """

    batches: int
    seconds: float
    waited: float
    taken: int
    is_over: bool
    began: Any


def epochs(
    begin: Callable[[], Iterator[Any]], skipped: int, seconds: float, *,
    step: Callable[[Any], object] | None = None, look: Callable[[], Any] = lambda: None,
    limit: float = 4.0, counts_start: bool = False,
) -> Iterator[Epoch]:  # fmt: skip
    """Measure batches for ``seconds``, in as many epochs as necessary.  Yield an ``Epoch`` for each iterator.

    The first ``skipped`` batches of an iterator do not count.  These first batches do count if the epoch was
    iterated to its end and one of two conditions is true: ``counts_start`` is True, or the epoch has fewer
    than four times ``skipped`` batches.  ``look`` is called before an iterator is created, and before the
    first batch that counts.  Each iterator is kept until the caller requests the next ``Epoch``.
    """
    took, taken, deadline = 0.0, 0, perf_counter() + limit * seconds
    while took < seconds and perf_counter() < deadline:
        first = last = look()
        opened, is_over = perf_counter(), True
        moments = array("d")  # two times for each batch: request and arrival
        iterator = begin()
        limit_waiting(iterator, _PATIENCE_S)
        while True:
            asked = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            moments.extend((asked, perf_counter()))
            if step is not None:
                step(batch)
            del batch
            now, count = perf_counter(), len(moments) // 2
            if not taken and count == 1:  # the time limit does not include the start of workers
                deadline = now + limit * seconds
            if count == skipped:
                last = look()
            since = moments[2 * skipped] if count > skipped else now
            if (count >= _TURNS * skipped and took + now - since > seconds) or now > deadline:
                is_over = False
                break
        count, end = len(moments) // 2, perf_counter()
        is_whole = is_over and (counts_start or count < _TURNS * skipped)
        left_out = 0 if is_whole or count <= skipped else skipped
        start = moments[2 * left_out] if left_out else opened
        stepped = sum([*moments[2 * left_out + 2 :: 2], end]) - sum(moments[2 * left_out + 1 :: 2])
        taken += count
        took += end - start
        yield Epoch(
            count - left_out, end - start, end - start - (stepped if count else 0.0), count,
            is_over, last if left_out else first,
        )  # fmt: skip
        del iterator
        if not count:
            return


class Copies(NamedTuple):
    nbytes: int
    as_it_is_s: float
    pinned_s: float


def copies_of(batch: Any) -> Copies | None:
    """Measure the time to copy a batch to the GPU.  Return None if no GPU is used or no tensor is copied."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    tensors = [
        one for one in leaves(batch)
        if isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.numel()
    ]  # fmt: skip
    if not tensors:
        return None
    try:
        pinned = [one if one.is_pinned() else one.pin_memory() for one in tensors]
        return Copies(
            sum(one.numel() * one.element_size() for one in tensors),
            _copy_s(torch.cuda, lambda: [one.to("cuda") for one in tensors]),
            _copy_s(torch.cuda, lambda: [one.to("cuda", non_blocking=True) for one in pinned]),
        )
    except RuntimeError:  # the GPU has too little memory, or memory cannot be pinned
        return None


def _copy_s(cuda: Any, copy: Callable[[], object]) -> float:
    found = []
    for _ in range(1 + _ROUNDS):
        cuda.synchronize()
        begin = perf_counter()
        copy()
        cuda.synchronize()
        found.append(perf_counter() - begin)
    return statistics.median(found[1:])

"""What a loader's batch costs, stage by stage, and how long a step will take with a loader of given costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastpipe.profiling.recorder import Tally
from fastpipe.profiling.stacks import Line
from fastpipe.profiling.stages import COLLATE, GRAPH, READ, TRANSFER
from fastpipe.profiling.taking import epochs
from fastpipe.profiling.timed import Account
from fastpipe.profiling.times import NOTHING, Spent, processes_cpu_ns

__all__ = ["Alone", "LoaderCosts", "alone", "costs_of", "costs_of_clock", "step_with"]

_LINES, _LEAST_SHARE = 6, 0.02


@dataclass(frozen=True)
class Alone:
    """A loader without anybody who uses its batches.

    Attributes:
        batch_s: seconds between two batches.
        cpu_s: seconds of processors that one takes, in all processes; None where that is not known.
        batches: of which that is known.
        taken: batches that were taken in all, with those that it had ready.
    """

    batch_s: float
    cpu_s: float | None
    batches: int
    taken: int = 0

    def with_more(self, rest: Spent | None, is_beside: bool = False) -> Alone:
        """The same, if a batch took so much more: after it is made, or beside that."""
        if rest is None:
            return self
        cpu = None if self.cpu_s is None else self.cpu_s + rest.cpu / 1e9
        after = 0.0 if is_beside else (rest.cpu + rest.idle) / 1e9
        return Alone(self.batch_s + after, cpu, self.batches)


@dataclass(frozen=True)
class LoaderCosts:
    """What a batch costs the process, or the threads, that make it.

    Attributes:
        stages: by stage; ``wall``, ``cpu``, ``delay`` in nanoseconds of a batch.
        lines: of the script, with stages, that take longest; the same.
        batches, samples: of which that is known.
        makers: processes that made them; 0 for the one that trains.
    """

    stages: dict[str, Spent] = field(default_factory=dict)
    lines: tuple[tuple[Line, str, Spent], ...] = ()
    batches: int = 0
    samples: int = 0
    makers: int = 0

    @property
    def wall_s(self) -> float:
        """Seconds in which a batch is made, by one of those who make them."""
        return sum(spent.wall for stage, spent in self.stages.items() if stage != TRANSFER) / 1e9

    @property
    def cpu_s(self) -> float:
        """Seconds of processors."""
        return sum(spent.cpu for spent in self.stages.values()) / 1e9

    @property
    def delay_share(self) -> float:
        """Which part of the time whoever makes a batch was ready to run, and others had the cores."""
        return sum(spent.delay for spent in self.stages.values()) / max(1.0, self.wall_s * 1e9)

    @property
    def read_idle_s(self) -> float:
        """Seconds of a batch in which it is waited for disk or network."""
        return self.stages.get(READ, NOTHING).idle / 1e9

    def without(self, *stages: str) -> LoaderCosts:
        """The same, if some stages took no time."""
        left = {stage: spent for stage, spent in self.stages.items() if stage not in stages}
        return replace(self, stages=left)

    def without_waiting(self) -> LoaderCosts:
        """The same, if what it reads were in memory."""
        read = self.stages.get(READ, NOTHING)
        in_memory = Spent(read.wall - read.idle, read.cpu, read.delay)
        return replace(self, stages={**self.stages, READ: in_memory} if read.wall else self.stages)

    def top_lines(self) -> Iterator[tuple[Line, str, float]]:
        """The script's lines in which a batch's time goes, with stages and shares."""
        total = self.wall_s * 1e9
        for line, stage, spent in self.lines[:_LINES]:
            if total and spent.wall > _LEAST_SHARE * total:
                yield line, stage, spent.wall / total

    def with_others(self, cpu_s: float | None) -> LoaderCosts:
        """The same, with what runs outside of Python, as part of all that a batch takes of processors."""
        rest = 0 if cpu_s is None else int(max(0.0, cpu_s - self.cpu_s) * 1e9)
        return replace(self, stages={**self.stages, GRAPH: Spent(rest, rest, 0)} if rest else self.stages)

    def shares(self) -> dict[str, float]:
        """Of the time in which a batch is made, by stage, the largest first."""
        total = sum(spent.wall for spent in self.stages.values()) or 1
        found = {stage: spent.wall / total for stage, spent in self.stages.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def costs_of(accounts: Iterable[Account]) -> LoaderCosts:
    """Costs of a stock loader, from what its processes tell."""
    known = [account for account in accounts if account.batches]
    batches = sum(account.batches for account in known)
    if not batches:
        return LoaderCosts()
    tally, collate, sent = Tally(), NOTHING, NOTHING
    for account in known:
        tally.merge(account.tally)
        seen = account.tally.stages("collate").get(COLLATE, NOTHING)
        # How long it took is known exactly, and of what kind that time was from what was seen.
        factor = account.collate_ns / seen.wall if seen.wall else 0.0
        collate = collate.plus(Spent(account.collate_ns, int(seen.cpu * factor), int(seen.delay * factor)))
        if account.worker >= 0:  # another thread there sends what was made
            in_main = sum(spent.cpu for spent in account.tally.spent.values())
            rest = max(0, account.cpu_ns - in_main)
            sent = sent.plus(Spent(rest, rest, 0))
    stages = tally.stages("dataset")
    for stage, more in ((COLLATE, collate), (TRANSFER, sent)):
        if more.wall:
            stages[stage] = stages.get(stage, NOTHING).plus(more)
    return LoaderCosts(
        {stage: spent.each(batches) for stage, spent in stages.items()},
        tuple(
            (line, stage, spent.each(batches))
            for line, stage, spent in tally.lines("dataset", "collate")
            if line.file
        ),
        batches,
        sum(account.samples for account in known),
        len({account.worker for account in known} - {-1}),
    )


def costs_of_clock(before: dict[str, float], after: dict[str, float], batches: int) -> LoaderCosts:
    """Costs of a loader of fastpipe's, from its clock; its threads run nearly all of that time."""
    stages = {}
    for stage, seconds in after.items():
        spent = int((seconds - before.get(stage, 0.0)) * 1e9 / max(1, batches))
        if stage != "wait" and spent > 0:
            stages["collate" if stage == "copy" else stage] = Spent(spent, spent, 0)
    return LoaderCosts(stages, (), batches)


def alone(begin: Callable[[], Iterator[Any]], skipped: int, seconds: float) -> Alone | None:
    """Take batches of a loader and do nothing with them.

    Args:
        begin: makes an iterator of it.
        skipped, seconds: as of `epochs`.

    Returns:
        What was seen; None where it has fewer than two batches.
    """
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
    """How long a step takes beside a loader.

    The slowest of three decides: the step with data at once, the loader, and the processors, if both together
    want more of them than there are.

    Args:
        instant_s: seconds of a step that has its data at once.
        step_cpu_s: seconds of processors that it takes; None where that is not known.
        loader: which makes the batches ahead.
        cores: that both have.

    >>> step_with(0.1, 0.2, Alone(0.3, 0.5, 10), cores=2)
    0.35
    """
    wanted = [instant_s, loader.batch_s]
    if step_cpu_s is not None and loader.cpu_s is not None:
        wanted.append((step_cpu_s + loader.cpu_s) / cores)
    return max(wanted)

"""From a watched loop to a report: what its loader costs, what a step would be without, what may help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastpipe._cpus import available_cpus
from fastpipe.profiling.candidates import Candidate, candidates
from fastpipe.profiling.costs import (
    Alone,
    LoaderCosts,
    alone,
    costs_of,
    costs_of_clock,
    step_with,
    without_decoding,
    without_waiting,
)
from fastpipe.profiling.findings import Advice, LoaderNote, Part
from fastpipe.profiling.loops import Phase
from fastpipe.profiling.report import Report
from fastpipe.profiling.stacks import Line
from fastpipe.profiling.timed import Account
from fastpipe.profiling.watching import Watch, Watched

__all__ = ["Diagnosis"]

_GAIN = 1.05  # less is not worth a change
_MOST_TRIED = 2


class Diagnosis:
    """Finds out about one loop.

    Args:
        seconds: for each measurement.
        tries: whether advice is tried on the script's own step.
    """

    def __init__(self, seconds: float, tries: bool) -> None:
        self._seconds, self._tries = seconds, tries
        self._watched: Watched | None = None
        self._alone: Alone | None = None
        self._accounts: list[Account] = []
        self._costs = LoaderCosts()
        self._measured: list[tuple[Candidate, Alone]] = []
        self._tried: dict[int, float] = {}
        self._queue: list[int] | None = None
        self._now: int | None = None
        self.cores = available_cpus()

    @property
    def is_known(self) -> bool:
        """Whether there is anything to report."""
        return self._watched is not None

    def see(self, watched: Watched) -> None:
        """Take what was seen of a loop; nothing more is measured."""
        self._watched = watched
        if watched.witness is not None:
            self._accounts = watched.witness.accounts()
            self._costs = costs_of(self._accounts)

    def look(self, watched: Watched) -> None:
        """Measure what can be measured beside the loop: the loader alone, and others in its place."""
        self.see(watched)
        loader = watched.loader
        serial = not getattr(loader, "num_workers", 1) and watched.witness is not None
        skipped = 0 if serial else watched.loop.ahead + getattr(loader, "num_workers", 0)
        clock = getattr(loader, "clock", None)
        before = clock.totals() if clock is not None else {}
        self._alone = alone(loader.__iter__, skipped, self._seconds)
        if clock is not None and self._alone is not None and not self._costs.batches:
            self._costs = costs_of_clock(before, clock.totals(), self._alone.batches + skipped)
        if not self._report().is_loader_bound:
            return
        for candidate in candidates(watched, self._costs, self.cores):
            measured = alone(candidate.begin, candidate.skipped, self._seconds)
            if measured is not None:
                self._measured.append((candidate, measured))

    def next_phase(self, watch: Watch, loader: Any) -> Iterator[Any] | None:
        """Batches of another loader for the script's step; None when everything is known.

        Args:
            watch: has the loops.
            loader: whose loop has come so far.
        """
        watched = watch.of(loader)
        assert watched is not None  # it is its loop that asks
        with watch.paused():
            if self._queue is None:
                self.look(watched)
                self._queue = self._ranked()[:_MOST_TRIED] if self._tries else []
            elif self._now is not None:
                self._tried[self._now] = watched.loop.steps[Phase.TRIED].seconds
            self._now = self._queue.pop(0) if self._queue else None
            return None if self._now is None else _endless(self._measured[self._now][0], watch)

    def report(self) -> Report:
        """What was found."""
        return replace(self._report(), advice=tuple(self._advice()))

    def _report(self) -> Report:
        assert self._watched is not None
        loop = self._watched.loop
        steps = loop.steps[Phase.AS_IT_IS]
        if not len(steps):
            steps = loop.steps[Phase.WARMING]
        instant = loop.steps[Phase.INSTANT]
        starts = loop.epoch_starts
        found = Report(
            _note(self._watched), len(steps), steps.seconds, steps.wait_s, steps.busy_s,
            instant.seconds if len(instant) else None,
            None if loop.step_cpu_ns is None else loop.step_cpu_ns / 1e9,
            starts[-1] if starts else None, self._alone, self._costs, cores=self.cores,
            spans=tuple(loop.spans),
            worker_spans=tuple((account.worker, tuple(account.spans)) for account in self._accounts),
        )  # fmt: skip
        return replace(found, stall=tuple(self._stall(found)), cases=tuple(self._cases(found)))

    def _stall(self, report: Report) -> Iterator[Part]:
        lost = report.lost_s
        shares = self._costs.shares() or {"loader": 1.0}
        for stage, share in shares.items():
            yield Part(stage, share * lost)

    def _cases(self, report: Report) -> Iterator[Part]:
        """The step with less and less of the loader's work."""
        if report.instant_s is None:
            return
        yield Part("with data at once", report.base_s)
        if self._alone is not None and self._costs.wall_s:
            for name, costs in (
                ("without decoding", without_decoding(self._costs)),
                ("with files in memory", without_waiting(self._costs)),
            ):
                yield Part(name, min(report.step_s, self._step_with_costs(report, costs)))
        yield Part("as it is", report.step_s)

    def _step_with_costs(self, report: Report, costs: LoaderCosts) -> float:
        """A step's seconds beside a loader that costs less than this one."""
        assert self._alone is not None
        cpu = self._alone.cpu_s
        loader = Alone(
            self._alone.batch_s * costs.wall_s / self._costs.wall_s,
            None if cpu is None else cpu * costs.cpu_s / max(self._costs.cpu_s, 1e-9),
            self._alone.batches,
        )
        if report.loader is not None and not report.loader.ahead:
            return report.base_s + loader.batch_s
        return step_with(report.base_s, report.step_cpu_s, loader, self.cores)

    def _predicted(self, at: int) -> float:
        report, (candidate, measured) = self._report(), self._measured[at]
        if candidate.is_serial:
            return report.base_s + measured.batch_s
        return step_with(report.base_s, report.step_cpu_s, measured, self.cores)

    def _gain(self, at: int) -> float:
        return self._report().step_s / max(self._predicted(at), 1e-9)

    def _ranked(self) -> list[int]:
        """Those of what was measured that are worth a change, the best first."""
        found = [at for at in range(len(self._measured)) if self._gain(at) > _GAIN]
        return sorted(found, key=lambda at: self._tried.get(at, self._predicted(at)))

    def _advice(self) -> Iterator[Advice]:
        for at in self._ranked():
            candidate = self._measured[at][0]
            yield Advice(candidate.what, candidate.why, self._predicted(at), self._tried.get(at))


def _endless(candidate: Candidate, watch: Watch) -> Iterator[Any]:
    while True:
        with watch.paused():
            batches = candidate.begin()
        yield from batches


def _note(watched: Watched) -> LoaderNote:
    loader = watched.loader
    dataset = getattr(loader, "dataset", None)
    kind = type(loader).__name__
    if dataset is not None:
        kind += f" over {type(dataset).__name__}"
    workers = getattr(loader, "num_workers", 0) or 0
    is_stock = watched.witness is not None
    return LoaderNote(
        kind, workers, 0 if is_stock and not workers else watched.loop.ahead,
        getattr(loader, "batch_size", None), _shown(watched.made_at), _shown(watched.used_at),
    )  # fmt: skip


def _shown(line: Line | None) -> str:
    return str(line) if line is not None and line.file else ""

"""An estimate before a long run: how long, how large, where the time goes, what workers bring."""

from __future__ import annotations

import cProfile
import pstats
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from fastpipe.console import in_time
from fastpipe.core.text import in_bytes, in_duration
from fastpipe.generation.rows import Maker, Task
from fastpipe.generation.workers import Done, Processes, ThisThread, Threads, Workers

__all__ = ["Probe", "ProbeReport", "TopFunction"]

_ALONE_S, _PROFILED_S, _TOGETHER_S = 0.8, 0.6, 1.6
_BLOCK_S = 0.05  # at least, of a block of quick rows
_MANY_CORES = 1.2
_TOP, _LEAST_SHARE = 6, 0.03
_HOURS_S = 3600.0
_GAIN = 1.1  # of workers, from which on they are worth their memory


@dataclass(frozen=True)
class TopFunction:
    """A function in which time goes.

    Attributes:
        where: file, line and name.
        share: of all time, with what it calls.
        calls: of it for each row.
    """

    where: str
    share: float
    calls: float


@dataclass(frozen=True)
class ProbeReport:
    """What a look has shown; ``print`` it.

    Attributes:
        rows: that are to be made.
        row_nbytes: about how large one is.
        alone: rows a second in this thread, as libraries like it.
        cores: that were busy meanwhile.
        single: rows a second in this thread, with one thread for each library.
        workers, together: so many workers make so many rows a second.
        free_nbytes: of the disk.
        top: where the time goes.
    """

    rows: int
    row_nbytes: int
    alone: float
    cores: float
    single: float
    workers: int
    together: float
    free_nbytes: int
    top: tuple[TopFunction, ...] = field(default=())

    @property
    def best_workers(self) -> int:
        """Workers that are worth starting; 0 for none."""
        return self.workers if self.together > _GAIN * self.single else 0

    @property
    def rate(self) -> float:
        """Rows a second, with them."""
        return self.together if self.best_workers else self.single

    @property
    def seconds(self) -> float:
        """How long all rows will take."""
        return self.rows / self.rate

    @property
    def nbytes(self) -> int:
        """How large all rows will be."""
        return self.rows * self.row_nbytes

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"{self.rows:,} rows will take {in_time(self.seconds)} and {in_bytes(self.nbytes)}: a row takes "
            f"{in_duration(1 / self.single)}, {in_bytes(self.row_nbytes)}"
        )
        if self.cores > _MANY_CORES:
            yield (
                f"alone it keeps {self.cores:.1f} cores busy, {self.alone:.3g} rows/s; with one thread for "
                f"each library, as in workers, {self.single:.3g} rows/s"
            )
        gain, note = self.together / self.alone, "" if self.best_workers else "; they are not worth starting"
        yield f"{self.workers} workers: {self.together:.3g} rows/s, {gain:.2f} × a loop{note}"
        if self.nbytes > self.free_nbytes:
            free = in_bytes(self.free_nbytes)
            yield f"WARNING: {in_bytes(self.nbytes)} do not fit the disk, where {free} are free"
        if self.seconds > _HOURS_S:
            yield f"WARNING: this takes {in_time(self.seconds)}. Of the time of a row goes:"
        elif self.top:
            yield "of the time of a row goes:"
        for one in self.top:
            yield f"  {one.share:4.0%} into {one.where}, called {one.calls:,.4g} times"

    def __str__(self) -> str:
        return "\n".join(self.lines())


class Probe:
    """A look at a function.

    Args:
        task: what is made.
        rows: how many are to be made.
        row_nbytes: about how large one is.
        workers: that may be started.
        are_threads: whether they are, or processes.
        out: where rows will go.
    """

    def __init__(
        self, task: Task, rows: int, row_nbytes: int, workers: int, are_threads: bool, out: Path
    ) -> None:
        self._task, self._rows, self._row_nbytes = task, rows, row_nbytes
        self._workers, self._are_threads, self._out = workers, are_threads, out
        self._step = max(task.batch_rows, 1)

    def run(self) -> ProbeReport:
        """Look; takes about three seconds, or a few rows."""
        alone, cores = self._alone()
        single = self._rate(ThisThread(self._task, None), _ALONE_S) if cores > _MANY_CORES else alone
        top = tuple(self._profiled())
        together = self._rate(self._started(), _TOGETHER_S)
        free, workers = shutil.disk_usage(self._out.parent).free, max(self._workers, 1)
        return ProbeReport(
            self._rows, self._row_nbytes, alone, cores, single, workers, together, free, top
        )  # fmt: skip

    def _started(self) -> Workers:
        if not self._workers:
            return ThisThread(self._task, None)
        if self._are_threads:
            return Threads(self._task, None, self._workers)
        return Processes(self._task, None, self._workers)

    def _alone(self) -> tuple[float, float]:
        """Rows a second in this thread, and how many cores are busy."""
        maker, made = Maker(self._task), 0
        begun, used = time.perf_counter(), time.process_time()
        while made == 0 or time.perf_counter() - begun < _ALONE_S:
            first, last = self._block(made)
            start = time.perf_counter()
            maker.block(first, last)
            made += last - first
            if time.perf_counter() - start < _BLOCK_S / 2:  # what a block costs beside its rows is not theirs
                self._step *= 2
        seconds = max(time.perf_counter() - begun, 1e-9)
        return made / seconds, (time.process_time() - used) / seconds

    def _rate(self, workers: Workers, seconds: float) -> float:
        """Rows a second, from when all workers have begun; what they make is thrown away."""
        with workers:
            # The first block of each has its start in it.
            wait([workers.submit(*self._block(number * self._step)) for number in range(workers.count)])
            flying: dict[Future[Done], int] = {}
            begun, done, at = time.perf_counter(), 0, 0
            while True:
                while len(flying) < workers.slots and time.perf_counter() - begun < seconds:
                    first, last = self._block(at)
                    flying[workers.submit(first, last)] = last - first
                    at += last - first
                if not flying:
                    return done / max(time.perf_counter() - begun, 1e-9)
                ready, _ = wait(flying, return_when=FIRST_COMPLETED)
                for future in ready:
                    future.result()
                    done += flying.pop(future)

    def _block(self, at: int) -> tuple[int, int]:
        """Some rows, beginning anew behind the last."""
        first = at // self._step % max(self._rows // self._step, 1) * self._step
        return first, min(first + self._step, self._rows)

    def _profiled(self) -> Iterator[TopFunction]:
        """Where the time of a row goes."""
        maker, profile, at = Maker(self._task), cProfile.Profile(), 0
        begun = time.perf_counter()
        profile.enable()
        try:
            while at == 0 or time.perf_counter() - begun < _PROFILED_S:
                first, last = self._block(at)
                maker.block(first, last)
                at += last - first
        finally:
            profile.disable()
        stats = pstats.Stats(profile)
        total = max(getattr(stats, "total_tt", 0.0), 1e-9)
        own, shown = Path(__file__).parent, 0
        found = sorted(getattr(stats, "stats", {}).items(), key=lambda item: -item[1][3])
        for (file, line, name), (_, calls, _, cumulative, _) in found:
            if shown == _TOP or cumulative / total < _LEAST_SHARE:
                return
            if Path(file).parent == own or name.startswith("<method 'disable'"):
                continue
            shown += 1
            where = name if file.startswith(("~", "<")) else f"{name} ({Path(file).name}:{line})"
            yield TopFunction(where, cumulative / total, calls / at)

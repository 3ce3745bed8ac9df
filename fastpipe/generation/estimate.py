"""Estimate a run of ``generate``: duration, size of the file, slowest functions, speed-up by workers."""

from __future__ import annotations

import cProfile
import pstats
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from fastpipe.console import in_time
from fastpipe.core.text import in_bytes, in_duration
from fastpipe.generation.rows import Maker, Task
from fastpipe.generation.workers import Done, Processes, ThisThread, Threads, Workers

_ALONE_S, _PROFILED_S, _TOGETHER_S = 0.8, 0.6, 1.6
_BLOCK_S = 0.05  # blocks of quick rows grow until a block takes about this many seconds
_MANY_CORES = 1.2
_TOP, _LEAST_SHARE = 6, 0.03
_HOURS_S = 3600.0
_GAIN = 1.1  # least speed-up by workers that is worth their memory


@dataclass(frozen=True)
class TopFunction:
    """A function that takes a large part of the time in which rows are made.

    Attributes:
        where: name, file and line of the function.
        share: fraction of the whole time.  The time of functions that this function calls is included.
        calls: average number of calls for one row.
    """

    where: str
    share: float
    calls: float


@dataclass(frozen=True)
class ProbeReport:
    """The result of ``probe``: measurements and estimates, which ``print`` shows as text.

    Attributes:
        rows: number of rows for which the estimate is made.
        row_nbytes: approximate bytes of a row.
        alone: rows per second in this thread, if libraries use as many threads as they do by default.
        cores: average number of busy cores during the measurement of ``alone``.
        single: rows per second in this thread, if each library uses one thread.
        workers: number of workers that were measured.
        together: rows per second of all workers together.
        free_nbytes: free bytes on the disk.
        top: the functions that take the most time.
    """

    rows: int
    row_nbytes: int
    alone: float
    cores: float
    single: float
    workers: int
    together: float
    free_nbytes: int
    top: tuple[TopFunction, ...] = ()

    @property
    def best_workers(self) -> int:
        """Number of workers to start; 0 if they gain too little to be worth their memory."""
        return self.workers if self.together > _GAIN * self.single else 0

    @property
    def rate(self) -> float:
        """Rows per second with ``best_workers`` workers."""
        return self.together if self.best_workers else self.single

    @property
    def seconds(self) -> float:
        """Estimated seconds to make all rows."""
        return self.rows / self.rate

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all rows."""
        return self.rows * self.row_nbytes

    def lines(self) -> Iterator[str]:
        """Yield the lines of a readable report."""
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


def look(
    task: Task, rows: int, row_nbytes: int, count: int, are_threads: bool, out: Path
) -> ProbeReport:  # fmt: skip
    """Measure the function of ``task`` for about three seconds, or longer if a row takes long.

    The estimate is for ``rows`` rows of about ``row_nbytes`` bytes each.  ``count`` is the number of workers
    to measure; 0 starts no workers.  The workers are threads if ``are_threads`` is true, otherwise processes.
    The disk of the file ``out`` is the one whose free bytes are reported.
    """
    blocks = _Blocks(rows, max(task.batch_rows, 1))
    alone, cores = blocks.alone(Maker(task))
    single = blocks.rate(ThisThread(task, None), _ALONE_S) if cores > _MANY_CORES else alone
    top = tuple(blocks.profiled(Maker(task)))
    if not count:
        workers: Workers = ThisThread(task, None)
    else:
        workers = Threads(task, None, count) if are_threads else Processes(task, None, count)
    together, free = blocks.rate(workers, _TOGETHER_S), shutil.disk_usage(out.parent).free
    return ProbeReport(rows, row_nbytes, alone, cores, single, max(count, 1), together, free, top)


class _Blocks:
    """Makes blocks of a few rows again and again to measure the speed, and discards the rows."""

    def __init__(self, rows: int, step: int) -> None:
        self._rows, self._step = rows, step

    def _block(self, at: int) -> tuple[int, int]:
        first = at // self._step % max(self._rows // self._step, 1) * self._step
        return first, min(first + self._step, self._rows)

    def _make(self, maker: Maker, at: int) -> int:
        """Make one more block after ``at`` rows; return the new number of rows."""
        first, last = self._block(at)
        maker.block(first, last)
        return at + last - first

    def alone(self, maker: Maker) -> tuple[float, float]:
        """Measure in this thread; return the rows per second, and the average number of busy cores."""
        made, begun, used = 0, time.perf_counter(), time.process_time()
        while made == 0 or time.perf_counter() - begun < _ALONE_S:
            start = time.perf_counter()
            made = self._make(maker, made)
            if time.perf_counter() - start < _BLOCK_S / 2:  # exclude a block's fixed cost
                self._step *= 2
        seconds = max(time.perf_counter() - begun, 1e-9)
        return made / seconds, (time.process_time() - used) / seconds

    def rate(self, workers: Workers, seconds: float) -> float:
        """Return the rows per second of ``workers``, measured for ``seconds`` after all have started."""
        with workers:
            # The first block of a worker includes the start of the worker.
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
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    future.result()
                    done += flying.pop(future)

    def profiled(self, maker: Maker) -> Iterator[TopFunction]:
        """Yield the functions that take the most time when rows are made."""
        made, begun = 0, time.perf_counter()
        with cProfile.Profile() as profile:
            while made == 0 or time.perf_counter() - begun < _PROFILED_S:
                made = self._make(maker, made)
        stats = pstats.Stats(profile)
        total = max(getattr(stats, "total_tt", 0.0), 1e-9)
        own, shown = Path(__file__).parent, 0
        found = sorted(getattr(stats, "stats", {}).items(), key=lambda item: -item[1][3])
        for (file, line, name), (_, calls, _, cumulative, _) in found:
            if shown == _TOP or cumulative / total < _LEAST_SHARE:
                return
            if Path(file).parent == own or name.startswith("<method 'disable'") or file == cProfile.__file__:
                continue
            shown += 1
            where = name if file.startswith(("~", "<")) else f"{name} ({Path(file).name}:{line})"
            yield TopFunction(where, cumulative / total, calls / made)

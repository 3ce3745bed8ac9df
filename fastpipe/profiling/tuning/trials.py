"""How fast a loader with given settings is, measured, and how much memory it takes."""

from __future__ import annotations

import os
import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from fastpipe.cache.budget import free_memory
from fastpipe.profiling.costs import TURNS
from fastpipe.profiling.times import process_tree
from fastpipe.profiling.tuning.settings import Settings

__all__ = ["Measured", "OverBudgetError", "Trial", "measure", "memory_of_processes"]

_PROC = Path("/proc")
_CHECK_S = 0.25


class OverBudgetError(Exception):
    """A loader took more memory than it may."""


@dataclass(frozen=True)
class Measured:
    """A loader for a while.

    Attributes:
        batch_s: seconds of a batch, with the step if there is one.
        wait_s: of these, seconds until it was there.
        memory: bytes more than before, of this process and those below it; None where nobody knows.
    """

    batch_s: float
    wait_s: float
    memory: int | None


@dataclass
class Trial:
    """Settings that were tried.

    Attributes:
        settings: these.
        measured: each time.
        why: nothing was measured; empty if something was.
    """

    settings: Settings
    measured: list[Measured] = field(default_factory=list)
    why: str = ""

    @property
    def batch_s(self) -> float:
        """Seconds of a batch: the median; infinite where nothing was measured."""
        if self.why or not self.measured:
            return float("inf")
        return statistics.median(one.batch_s for one in self.measured)

    @property
    def spread(self) -> float:
        """Median deviation from it, as a part of it."""
        middle = self.batch_s
        if middle == float("inf"):
            return 0.0
        return statistics.median(abs(one.batch_s - middle) for one in self.measured) / middle

    @property
    def stall(self) -> float:
        """Which part of a batch's time is waiting for it."""
        return statistics.median(one.wait_s / one.batch_s for one in self.measured)

    @property
    def memory(self) -> int | None:
        """The most bytes that it took."""
        return max((one.memory for one in self.measured if one.memory is not None), default=None)


def measure(
    loader: Any,
    step: Callable[[Any], object] | None,
    seconds: float,
    skipped: int,
    budget: int | None,
) -> Measured | None:
    """Take batches of a loader.

    Args:
        loader: whose batches are taken, in as many epochs as it takes.
        step: called with each; None for nothing.
        seconds: that are measured, or some batches of each worker.
        skipped: batches of each epoch, as workers start and files are opened.  An epoch that is over before
            enough was seen is measured as a whole.
        budget: bytes that may be taken.

    Returns:
        What was seen; None where an epoch has no batch.

    Raises:
        OverBudgetError: more memory was taken than there may be.
    """
    before, free, most = memory_of_processes(), free_memory(), 0
    took = waited = 0.0
    count, deadline, checked = 0, perf_counter() + 6 * seconds, perf_counter()
    while took < seconds and perf_counter() < deadline:
        begin, is_whole = perf_counter(), True
        moments = array("d")  # of each batch: when it was asked for, and when it was there
        iterator = _Asked(loader, moments)  # whose workers end with it, which takes a while
        for batch in iterator:
            if step is not None:
                step(batch)
            del batch
            now, number = perf_counter(), len(moments) // 2
            if number == skipped or now - checked > _CHECK_S:
                checked = now
                # To be sure takes long, in which workers would get ahead.
                if before is not None and _is_short(free, budget):
                    most = max(most, _taken(before, budget))
            first = moments[2 * skipped] if number > skipped else now
            if (number >= TURNS * skipped and took + now - first >= seconds) or now > deadline:
                is_whole = False
                break
        number, end = len(moments) // 2, perf_counter()
        if not number:
            return None
        # At its end workers have nothing ahead: only with its start it is what an epoch takes.
        left_out = 0 if is_whole or number <= skipped else skipped
        spent = end - (moments[2 * left_out] if left_out else begin)
        took += spent
        waited += spent - (sum([*moments[2 * left_out + 2 :: 2], end]) - sum(moments[2 * left_out + 1 :: 2]))
        count += number - left_out
        if before is not None and (took >= seconds or end > deadline or end - checked > _CHECK_S):
            most, checked = max(most, _taken(before, budget)), perf_counter()  # while its workers are there
        del iterator
    if before is not None and is_whole and loader.num_workers:  # with the epoch its workers had ended
        most = max(most, _taken_by_workers(loader, skipped, before, budget))
    return Measured(took / count, waited / count, None if before is None else most)


class _Asked:
    """An iterator of a loader that notes when a batch was asked for, and when it was there."""

    def __init__(self, loader: Any, moments: array[float]) -> None:
        self._inner, self._note = iter(loader), moments.extend

    def __iter__(self) -> _Asked:
        return self

    def __next__(self) -> Any:
        asked = perf_counter()
        batch = next(self._inner)
        self._note((asked, perf_counter()))
        return batch


def _taken_by_workers(loader: Any, count: int, before: int, budget: int | None) -> int:
    """Bytes of memory beyond those of before, when each worker has made a batch."""
    iterator = iter(loader)
    for _ in zip(range(count), iterator, strict=False):
        pass
    return _taken(before, budget)


def _is_short(free: int | None, budget: int | None) -> bool:
    """Whether the machine has so much less memory free than before that a budget may be exceeded."""
    now = free_memory()
    return budget is not None and free is not None and now is not None and free - now > budget


def _taken(before: int, budget: int | None) -> int:
    """Bytes of memory beyond those of before."""
    taken = max(0, (memory_of_processes() or 0) - before)
    if budget is not None and taken > budget:
        raise OverBudgetError(f"took {taken / 1e6:,.0f} MB, and may take {budget / 1e6:,.0f}")
    return taken


def memory_of_processes() -> int | None:
    """Bytes of memory of this process and those below it, each shared page counted once: their PSS.

    Returns:
        Bytes; None where there is no ``/proc``.

    >>> memory_of_processes() is None or memory_of_processes() > 1 << 20
    True
    """
    total, is_known = 0, False
    for number in process_tree(os.getpid()):
        try:
            lines = (_PROC / str(number) / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        is_known = True
    return total if is_known else None

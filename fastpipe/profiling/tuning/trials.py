"""How fast a loader with given settings is, measured, and how much memory it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fastpipe.core.machine import free_memory
from fastpipe.core.processes import memory_of_processes
from fastpipe.profiling.taking import epochs
from fastpipe.profiling.tuning.settings import Settings

__all__ = ["Measured", "OverBudgetError", "Trial", "measure", "warm_up"]

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
        skipped: as of `epochs`.
        budget: bytes that may be taken.

    Returns:
        What was seen; None where an epoch has no batch.

    Raises:
        OverBudgetError: more memory was taken than there may be.
    """
    memory = _Memory(budget)

    def stepped(batch: Any) -> None:
        if step is not None:
            step(batch)
        memory.guard()

    took = waited = 0.0
    count, is_over = 0, False
    for epoch in epochs(
        loader.__iter__, skipped, seconds, step=stepped, look=lambda: memory.guard(now=True), limit=6.0,
        counts_start=True,
    ):  # fmt: skip
        if not epoch.taken:
            return None
        took, waited, count = took + epoch.seconds, waited + epoch.waited, count + epoch.batches
        is_over = epoch.is_over
        if not is_over:
            memory.look()  # while its workers are there
    if is_over:
        iterator = iter(loader)
        for _ in zip(range(skipped), iterator, strict=False):  # until each worker has made a batch
            pass
        memory.look()
    return Measured(took / count, waited / count, memory.most)


def warm_up(loader: Any) -> None:
    """Take a batch that nobody counts."""
    next(iter(loader), None)


class _Memory:
    """What this process and those below it take beyond what they had.

    Attributes:
        most: bytes at the most, where it was looked; None where nobody knows.

    Args:
        budget: bytes that may be taken.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget, self._before, self._free = budget, memory_of_processes(), free_memory()
        self._next = 0.0
        self.most = None if self._before is None else 0

    def look(self) -> None:
        """Look, which takes a while for each process.

        Raises:
            OverBudgetError: it is more than may be taken.
        """
        if self._before is None or self.most is None:
            return
        taken = max(0, (memory_of_processes() or 0) - self._before)
        self.most = max(self.most, taken)
        if self._budget is not None and taken > self._budget:
            raise OverBudgetError(f"took {taken / 1e6:,.0f} MB, and may take {self._budget / 1e6:,.0f}")

    def guard(self, *, now: bool = False) -> None:
        """Look if the machine has so much less memory free that it may be too much: meanwhile workers would
        get ahead.

        Args:
            now: whether to ask, however short ago that was.
        """
        at = perf_counter()
        if self._budget is None or self._free is None or (at < self._next and not now):
            return
        self._next = at + _CHECK_S
        free = free_memory()
        if free is not None and self._free - free > self._budget:
            self.look()

"""Batches of samples that are parts of arrays, made ahead by threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_samples import BatchReader
from fastpipe.core.bad_samples import why_nothing_is_left
from fastpipe.core.clock import StageClock
from fastpipe.core.machine import default_threads
from fastpipe.core.order import Arrangement, order_of
from fastpipe.core.pool import Process, ThreadPool
from fastpipe.core.reads import PendingRead
from fastpipe.core.types import Key
from fastpipe.tf.array_form import ArrayForm
from fastpipe.tf.streaming import AHEAD, IN_FLIGHT, Batching, Begun, Made, Stream

__all__ = ["ArrayStream", "this_process"]

Int64Array = npt.NDArray[np.int64]


def this_process(threads: int | str, name: str) -> Process:
    """This process, with the threads of a dataset: batches are used where they are made."""
    return Process(ThreadPool(default_threads() if threads == "auto" else int(threads), name))


class ArrayStream(Stream):
    """Makes the batches of rows of HDF5 datasets, or of patches of volumes.

    Args:
        samples: all of them.
        rows: int64 (N,): those that an epoch has, as positions in ``samples``.
        batching: how they become batches.
        arrangement: by which these are shuffled; None for samples.
        form: of the elements.
        stock: gives the same samples one by one, as batches of one, in their order, as the formats' own
            libraries read them.

    Attributes:
        of: the samples.
        stock, form: as given.
    """

    def __init__(
        self,
        samples: BatchReader,
        rows: Int64Array,
        batching: Batching,
        arrangement: Arrangement | None,
        form: ArrayForm,
        stock: Callable[[], Iterator[Any]],
    ) -> None:
        super().__init__(batching)
        self.of, self.stock, self.form = samples, stock, form
        self._rows, self._arrangement = rows, arrangement

    @property
    def count(self) -> int:
        """Samples of an epoch."""
        return len(self._rows)

    @property
    def clock(self) -> StageClock:
        """Time spent in this process, by stage, summed over the threads."""
        clock: StageClock = self._running().clock
        return clock

    def element(self, made: Made) -> Any:
        """A batch in the form that the dataset's elements have."""
        return self.form.of(made.arrays)

    def signature(self, batch: int | None) -> Any:
        """The type of such elements of ``batch`` samples; None for any number."""
        return self.form.signature(batch)

    def describe(self) -> list[str]:
        """What is read how, in lines."""
        pool = self._running().pool
        lines = [f"threads  →  {1 if pool is None else pool.threads}", *self.of.plan.lines]
        if not self.batching.shuffle:
            return [*lines, "order  →  the dataset's"]
        how = "" if self._arrangement is None else f", by {self._arrangement.describe()}"
        return [*lines, f"order  →  shuffled by seed={self.batching.seed}{how}"]

    def _order(self, epoch: int) -> Int64Array:
        seed = self.batching.seed if self.batching.shuffle else None
        return self._rows[np.asarray(order_of(self.count, seed, epoch, self._arrangement), np.int64)]

    def _expect(self, batches: Callable[[], Iterator[Int64Array]], epoch: int) -> None:
        self.of.follow(batches, self.batching.seed, epoch)

    def _begin(self, samples: Int64Array, draws: Int64Array, epoch: int) -> Begun:
        runtime = self._running()
        arrays = [
            np.empty((len(samples), *value.shape), value.dtype)
            if value.dtype.hasobject
            else slots.take((len(samples), *value.shape), value.dtype)
            for value, slots in zip(self.form.values, runtime.slots, strict=True)
        ]
        key = Key(self.batching.seed, epoch, draws)
        reading = self.of._reading(samples, samples, key, True, runtime, arrays)
        pending = PendingRead(
            runtime.threads, reading.start, reading.read_alone, reading.samples, reading.policy,
            reading.substitute, reading.heard,
        )  # fmt: skip
        return _Reading(pending, Made(arrays, samples, draws, epoch))

    def _running(self) -> Any:
        runtime = self.of._running()
        for slots in runtime.slots:
            slots.keep = max(slots.keep, AHEAD + IN_FLIGHT)
        return runtime


class _Reading:
    """A batch that is being read."""

    def __init__(self, pending: PendingRead, made: Made) -> None:
        self._pending, self._made = pending, made

    def finish(self) -> Made:
        """Wait for it."""
        pending, made = self._pending, self._made
        there: Sequence[int] = pending.wait()
        count = len(made.samples)
        if len(there) == count:
            return made
        if not there and (error := why_nothing_is_left(pending.left_out, count)):
            raise error
        return made.some(np.asarray(there, np.int64))

    def cancel(self) -> None:
        """Give it up."""
        self._pending.cancel()

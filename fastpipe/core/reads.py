"""Batches whose samples are read in parallel into existing memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import BadSampleLog, Item, bad_sample_error, no_replacement
from fastpipe.core.files import read_at
from fastpipe.core.native import native
from fastpipe.core.pool import Job, NativeJob, ThreadPool
from fastpipe.errors import BadSampleError, ClosedError

Int64Array = npt.NDArray[np.int64]

MADE, DECLINED = 1, 2  # values of the enum of outcomes in fastpipe/native/status.h


class Task(NamedTuple):
    """A part of a batch that Python reads.  ``run`` reads the batch's rows ``rows``, int64 (N,)."""

    rows: Int64Array
    run: Callable[[], None]


class Started(NamedTuple):
    """The work of reading some samples.

    Attributes:
        batch: the native core's batch, or None.
        statuses: the native core's status of each row, uint8 (rows, 8).
        tasks: the tasks that run in Python.
        keep: the function that stores the chunks decoded by the core in the cache.
    """

    batch: Any
    statuses: npt.NDArray[np.uint8]
    tasks: Sequence[Task]
    keep: Callable[[], None] | None = None


class ReadThreads(NamedTuple):
    """A dataset's Python threads in this process.  ``channel`` (``native.Channel``) limits the number of
    native threads."""

    pool: ThreadPool
    channel: Any

    @classmethod
    def of(cls, pool: ThreadPool | None) -> ReadThreads | None:
        """Return as many native threads as ``pool`` has Python threads; None if there is no pool."""
        return None if pool is None else cls(pool, native.Channel(pool.threads))


class ReadPolicy(NamedTuple):
    """The policy for unreadable samples.

    Attributes:
        policy: the name of the policy.
        log: the log of unreadable samples.
        is_bad: tests whether an error is about a sample, and not about the machine or the whole file.
        item: returns the description of a sample for the sample's number.
    """

    policy: str
    log: BadSampleLog
    is_bad: Callable[[BaseException], bool]
    item: Callable[[int], Item]


class Reading(NamedTuple):
    """The settings for reading a batch.

    Attributes:
        start: returns the work of reading samples into rows of the batch; its arguments are the samples
            and the rows.
        read_alone: reads one sample into a row, and raises the sample's error.
        substitute: returns another sample for the policy ``"replace"``; its arguments are a row and the
            number of the attempt, from 1.  It returns None if no sample is left.
        heard: is called with the native core's batch when the core has finished its part.
        where: returns the location of the batch's first sample.
    """

    start: Callable[[Int64Array, Int64Array], Started]
    read_alone: Callable[[int, int], None]
    samples: Int64Array
    policy: ReadPolicy
    substitute: Callable[[int, int], int | None] | None
    heard: Callable[[Any], None]
    where: Callable[[], str]


class PendingRead:
    """A batch that is being read by threads.  Without threads, the constructor reads the batch."""

    def __init__(self, threads: ReadThreads | None, reading: Reading) -> None:
        self.samples, self._reading, self._policy = reading.samples, reading, reading.policy
        self._started: Started | None = reading.start(self.samples, np.arange(len(self.samples)))
        self._failed: dict[int, BaseException] = {}
        self._left_out: dict[int, BadSampleError] = {}
        self._is_given_up = False
        # A loader waits only until the last job has begun, because threads would then become idle.
        self.jobs: list[Job] = []
        if threads is None:
            self._read_here(self._started)
        else:
            self._begin(self._started, threads)

    def _read_here(self, started: Started) -> None:
        if started.batch is not None:
            native.run_here(started.batch)
            self._reading.heard(started.batch)
            if started.keep is not None:
                started.keep()
        if started.tasks:
            self.jobs = [Job(self._run, len(started.tasks))]
            self.jobs[0].run_here()

    def _begin(self, started: Started, threads: ReadThreads) -> None:
        batch, _, tasks, keep = started
        pool, rest = threads.pool, None
        if tasks:
            self.jobs.append(pool.submit(self._run, len(tasks)))
        if batch is None:
            return
        if keep is not None:
            rest = Job(lambda _: keep(), 1)
            self.jobs.append(rest)

        def last() -> None:
            try:
                self._reading.heard(batch)
                if rest is not None:
                    rest.expect(int(batch.has_chunks))
                    if not rest.done():
                        pool.go_on_with(rest)
            except BaseException as error:
                if rest is not None:
                    rest.cancel(error)
                raise

        try:
            self.jobs.append(NativeJob(batch, threads.channel, pool.threads, last))
        except BaseException:
            self.cancel()
            raise

    def wait(self) -> Sequence[int]:
        """Wait until the batch is read, and return the rows that were read.

        With the policy ``"skip"``, the rows of bad samples are missing in the result.

        Raises:
            BadSampleError: according to the policy, for the first bad sample of the batch.
            Exception: an error of the machine, or of the whole file.
        """
        for job in self.jobs:
            job.wait()
        started, self._started = self._started, None
        if started is None:
            return self._rows()
        if started.batch is not None and not started.batch.is_complete:
            raise ClosedError("the interpreter ends before the batch is read")
        failed, self._failed = self._failed, {}
        is_made = started.statuses[: len(self.samples), 0] == MADE
        if started.batch is None:
            is_made[:] = True
        if failed or not is_made.all():
            self._settle(started.tasks, failed, np.flatnonzero(~is_made))
        return self._rows()

    def _rows(self) -> Sequence[int]:
        if not self._left_out:
            return range(len(self.samples))
        return [row for row in range(len(self.samples)) if row not in self._left_out]

    @property
    def left_out(self) -> Mapping[int, BadSampleError]:
        """The errors of the samples that the policy left out, by row.  Valid after ``wait``."""
        return self._left_out

    def item(self, row: int) -> Item:
        return self._policy.item(int(self.samples[row]))

    def cancel(self) -> None:
        """Cancel the batch, so that work that has not begun never begins."""
        self._is_given_up = True
        for job in self.jobs:
            job.cancel()
        self._failed.clear()  # a traceback refers to this batch and its memory

    def _run(self, number: int) -> None:
        try:
            assert self._started is not None
            self._started.tasks[number].run()
        except BaseException as error:  # ``wait`` handles it
            if not self._is_given_up:
                self._failed[number] = error

    def _settle(self, tasks: Sequence[Task], failed: dict[int, BaseException], declined: Int64Array) -> None:
        """Read the samples of failed tasks and of ``declined`` rows one by one, to find the bad samples.
        ``declined`` are the rows that the native core did not read."""
        others = [failed[number] for number in sorted(failed) if not self._policy.is_bad(failed[number])]
        if others:
            failed.clear()  # a traceback refers to this batch and its memory
            try:
                raise others[0]
            finally:
                others.clear()
        rows = np.unique(np.concatenate([declined, *(tasks[number].rows for number in failed)]))
        failed.clear()
        for row in rows.tolist():
            self._read_alone(row)

    def _read_alone(self, row: int) -> None:
        sample: int | None = int(self.samples[row])
        for attempt in itertools.count(1):
            if sample is None:
                raise no_replacement(self.item(row), attempt - 2)
            try:
                self._reading.read_alone(sample, row)
                return
            except Exception as cause:
                if not self._policy.is_bad(cause):
                    raise
                self._refuse(sample, row, cause)
            if self._policy.policy == "skip":
                return
            assert self._reading.substitute is not None
            sample = self._reading.substitute(row, attempt)

    def _refuse(self, sample: int, row: int, cause: Exception) -> None:
        """Apply the policy to a bad sample.

        This method is separate from ``_read_alone``, because the traceback of ``cause`` refers to the frame
        of ``_read_alone``.  If that frame had a variable for an error with this cause, the reference cycle
        would keep the batch until the next garbage collection.
        """
        item = self._policy.item(sample)
        error = bad_sample_error(item, cause)
        try:
            if self._policy.policy == "raise":
                raise error from cause
            self._policy.log.record(item, error)
            if self._policy.policy == "skip":
                self._left_out[row] = BadSampleError(str(error), path=item.path, index=item.index)
        finally:
            del error, cause


UNKNOWN_CODEC = 7
_NO_MEMORY = 8
_PROBLEMS = {  # enum Problem of fastpipe/native/codecs.h
    1: "its header is cut off, or is none",
    2: "it is not the {nbytes} bytes that were expected",
    3: "its blocks have an impossible size",
    4: "its data end too early",
    5: "damaged data, or not the {nbytes} bytes that were expected",
    6: "the checksum is not that of the data",
    UNKNOWN_CODEC: "it is compressed by a codec that fastpipe does not have",
}


class ChunkError(ValueError):
    """A chunk's bytes are incomplete, or are not valid output of its filters or codec."""


def chunk_error(codec: str, problem: int, nbytes: int) -> ChunkError | MemoryError:
    """Return the error for ``problem``, the native core's number for why it could not decode a chunk.
    ``nbytes`` is the size of the decoded chunk."""
    if problem == _NO_MEMORY:  # not an error of the chunk
        return MemoryError(f"{codec}: there is no memory for a chunk of {nbytes} bytes")
    return ChunkError(f"{codec}: {_PROBLEMS[problem].format(nbytes=nbytes)}")


def read_fully(descriptor: int, memory: Any, offset: int) -> None:
    """Fill ``memory`` (uint8, C-contiguous) with bytes of a file.  Raise a ChunkError if the file is too
    short."""
    if read_at(descriptor, memory, offset) < len(memory):
        raise ChunkError("the file ends within it")


def read_bytes(descriptor: int, offset: int, size: int) -> bytes:
    """Return ``size`` bytes of a file from ``offset`` on; raise a ChunkError if the file is too short."""
    if offset + size > os.fstat(descriptor).st_size:  # checked before memory is allocated
        raise ChunkError("the file ends within it")
    stored = bytearray(size)
    read_fully(descriptor, stored, offset)
    return bytes(stored)

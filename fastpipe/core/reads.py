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
    """A part of a batch that Python code reads.  ``run`` reads the samples of the batch whose numbers in
    the batch are ``rows``, int64 (N,)."""

    rows: Int64Array
    run: Callable[[], None]


class Started(NamedTuple):
    """The work of reading some samples, divided between the native core and Python.

    Attributes:
        batch: the part that the native core reads; None if Python reads all samples.
        statuses: the native core's status of each sample, uint8 (samples, 8).
        tasks: the parts that Python reads.
        keep: the function that stores the chunks decoded by the core in the cache; None without a cache.
    """

    batch: Any
    statuses: npt.NDArray[np.uint8]
    tasks: Sequence[Task]
    keep: Callable[[], None] | None = None


class ReadThreads(NamedTuple):
    """The threads in this process that read a dataset's batches.  ``pool`` has the Python threads, and
    ``channel`` (``native.Channel``) limits the number of native threads."""

    pool: ThreadPool
    channel: Any

    @classmethod
    def of(cls, pool: ThreadPool | None) -> ReadThreads | None:
        """Allow as many native threads as ``pool`` has Python threads.  Return None if ``pool`` is None."""
        return None if pool is None else cls(pool, native.Channel(pool.threads))


class ReadPolicy(NamedTuple):
    """The handling of unreadable samples.

    Attributes:
        policy: ``"raise"``, ``"skip"`` or ``"replace"``.
        log: the log of unreadable samples.
        is_bad: tests whether an error is about a sample, and not about the machine or the whole file.
        item: gets the number of a sample, and returns a description of the sample.
    """

    policy: str
    log: BadSampleLog
    is_bad: Callable[[BaseException], bool]
    item: Callable[[int], Item]


class Reading(NamedTuple):
    """A batch that ``PendingRead`` reads.  A row is a sample's place in the batch.

    Attributes:
        start: gets the numbers of samples and their rows, and returns the work of reading these samples.
        read_alone: gets the number of a sample and its row, reads the sample, and raises the sample's error.
        samples: the numbers of the batch's samples, as ``start`` and ``read_alone`` expect them.
        policy: what to do with unreadable samples.
        substitute: returns another sample for the policy ``"replace"``, or None if no sample is left.  Its
            arguments are a row and the number of the attempt, from 1.  Other policies do not need it.
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
    """A batch that threads are reading.  If ``threads`` is None, the constructor reads the batch itself."""

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
        """Wait until the batch is read, and return the rows (places in the batch) of its samples.

        With the policy ``"skip"``, the rows of unreadable samples are missing in the result.

        Raises:
            BadSampleError: the first unreadable sample of the batch, if the policy is ``"raise"``, or if no
                replacement is left.
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
        """The errors of the samples that the policy ``"skip"`` left out.  The keys are the samples' rows
        (places in the batch).  Valid after ``wait``."""
        return self._left_out

    def item(self, row: int) -> Item:
        return self._policy.item(int(self.samples[row]))

    def cancel(self) -> None:
        """Cancel the batch.  Work that has not begun never begins."""
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
        """Read the samples of failed tasks and of ``declined`` one by one, to find the unreadable samples.
        ``declined`` are the rows (places in the batch) that the native core did not read."""
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
        """Apply the policy to an unreadable sample.

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
    """The bytes of a chunk are incomplete, or its filters or its codec cannot have produced them."""


def chunk_error(codec: str, problem: int, nbytes: int) -> ChunkError | MemoryError:
    """Return the error for a chunk that the native core could not decode.  ``problem`` is the core's number
    for the reason.  ``nbytes`` is the size of the decoded chunk."""
    if problem == _NO_MEMORY:  # not an error of the chunk
        return MemoryError(f"{codec}: there is no memory for a chunk of {nbytes} bytes")
    return ChunkError(f"{codec}: {_PROBLEMS[problem].format(nbytes=nbytes)}")


def read_fully(descriptor: int, memory: Any, offset: int) -> None:
    """Fill ``memory`` (uint8, C-contiguous) with the bytes of a file from ``offset`` on.  Raise a ChunkError
    if the file is too short."""
    if read_at(descriptor, memory, offset) < len(memory):
        raise ChunkError("the file ends within it")


def read_bytes(descriptor: int, offset: int, size: int) -> bytes:
    """Return ``size`` bytes of a file from ``offset`` on.  Raise a ChunkError if the file is too short."""
    if offset + size > os.fstat(descriptor).st_size:  # checked before memory is allocated
        raise ChunkError("the file ends within it")
    stored = bytearray(size)
    read_fully(descriptor, stored, offset)
    return bytes(stored)

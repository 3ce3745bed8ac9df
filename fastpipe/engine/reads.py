"""Batches whose samples are read side by side into memory that is there already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.engine.bad import BadSampleLog, Item, bad_sample_error
from fastpipe.engine.pool import Job, ThreadPool
from fastpipe.errors import BadSampleError

__all__ = ["NativeRead", "PendingRead", "ReadPolicy", "Task"]

Int64Array = npt.NDArray[np.int64]


class Task(Protocol):
    """Some of the work for a batch.

    Attributes:
        rows: the batch's rows into which it reads.
        run: does it.
    """

    @property
    def rows(self) -> Int64Array: ...

    @property
    def run(self) -> Callable[[], None]: ...


class NativeRead(Protocol):
    """What the native engine reads of a batch."""

    def begin(self, last: Callable[[], None]) -> Job:
        """Begin it in the engine's threads; ``last`` is called when it is done."""

    def run_here(self) -> None:
        """Do it in the calling thread."""

    def left(self) -> Sequence[Task]:
        """When it is done, the tasks that read in Python what the engine has declined."""


class ReadPolicy(NamedTuple):
    """What is done about samples that cannot be read.

    Attributes:
        policy: ``"raise"``, ``"replace"`` or ``"skip"``.
        log: where they are recorded.
        is_bad: whether an error is about a sample, and not about the machine or the whole file.
        item: a sample's number to what is said of it.
    """

    policy: str
    log: BadSampleLog
    is_bad: Callable[[BaseException], bool]
    item: Callable[[int], Item]


class PendingRead:
    """A batch that is being read.

    Args:
        pool: threads to work in; None works in the calling thread at once.
        read: samples, and the rows where they belong, to the tasks that read them there.
        samples: int64 (N,): the batch's.
        policy: what is done about those that cannot be read.
        substitute: for the policy ``"replace"``: a row's number and the attempt, from 1, to another sample;
            None when there is none left to try.
        native: what the native engine reads of it, and what is left for Python then; None reads all in
            Python.

    Attributes:
        jobs: what threads have to do for it.
    """

    def __init__(
        self,
        pool: ThreadPool | None,
        read: Callable[[Int64Array, Int64Array], Sequence[Task]],
        samples: Int64Array,
        policy: ReadPolicy,
        substitute: Callable[[int, int], int | None] | None = None,
        native: NativeRead | None = None,
    ) -> None:
        self.samples = samples
        self._read, self._policy, self._substitute = read, policy, substitute
        self._tasks: Sequence[Task] = ()
        self._failed: dict[int, BaseException] = {}
        self._left_out: dict[int, BadSampleError] = {}
        self._is_given_up = False
        self.jobs: list[Job] = []
        if native is not None and pool is not None:
            self._begin_natively(native, pool)
            return
        if native is not None:
            native.run_here()
        self._tasks = native.left() if native is not None else read(samples, np.arange(len(samples)))
        if pool is None:
            self.jobs.append(Job(self._run, len(self._tasks)))
            self.jobs[0].run_here()
        else:
            self.jobs.append(pool.submit(self._run, len(self._tasks)))

    def _begin_natively(self, native: NativeRead, pool: ThreadPool) -> None:
        rest = Job(self._run, 1)

        def go_on() -> None:
            try:
                self._tasks = native.left()
                rest.expect(len(self._tasks))
                if self._tasks:
                    pool.go_on_with(rest)
            except BaseException as error:
                rest.cancel(error)
                raise

        # The last one's beginning is waited for: then threads have nothing to do.
        self.jobs += [rest, native.begin(go_on)]

    def wait(self) -> Sequence[int]:
        """Wait until the batch is read.

        Returns:
            The numbers of the samples that are there: all, but for the policy ``"skip"``.

        Raises:
            BadSampleError: as the policy says, for the first bad sample of the batch.
            Others: what is wrong with the machine, or with the whole file.
        """
        for job in self.jobs:
            job.wait()
        failed, self._failed = self._failed, {}
        if failed:
            self._settle(failed)
        self._tasks = ()
        if not self._left_out:
            return range(len(self.samples))
        return [row for row in range(len(self.samples)) if row not in self._left_out]

    @property
    def left_out(self) -> Mapping[int, BadSampleError]:
        """The errors of the samples that the policy left out, by their numbers, after ``wait``."""
        return self._left_out

    def item(self, row: int) -> Item:
        """What is said of the sample asked for at a row."""
        return self._policy.item(int(self.samples[row]))

    def cancel(self) -> None:
        """Give the batch up: tasks that have not been begun never are."""
        self._is_given_up = True
        for job in self.jobs:
            job.cancel()
        self._failed.clear()  # a traceback refers to this batch and its memory

    def _run(self, number: int) -> None:
        try:
            self._tasks[number].run()
        except BaseException as error:  # ``wait`` sees to it
            if not self._is_given_up:
                self._failed[number] = error

    def _settle(self, failed: dict[int, BaseException]) -> None:
        """Read the samples of tasks that failed one by one, to know which of them are bad."""
        others = [failed[number] for number in sorted(failed) if not self._policy.is_bad(failed[number])]
        if others:
            failed.clear()  # a traceback refers to this batch and its memory
            try:
                raise others[0]
            finally:
                others.clear()
        rows = np.unique(np.concatenate([self._tasks[number].rows for number in failed]))
        failed.clear()
        for row in rows.tolist():
            self._read_alone(row)

    def _read_alone(self, row: int) -> None:
        """Read one sample, or what the policy puts in its place."""
        sample: int | None = int(self.samples[row])
        for attempt in itertools.count(1):
            if sample is None:
                raise self._no_replacement(row, attempt - 2)
            try:
                for task in self._read(np.array([sample]), np.array([row])):
                    task.run()
                return
            except Exception as cause:
                if not self._policy.is_bad(cause):
                    raise
                self._refuse(sample, row, cause)
            if self._policy.policy == "skip":
                return
            assert self._substitute is not None
            sample = self._substitute(row, attempt)

    def _refuse(self, sample: int, row: int, cause: Exception) -> None:
        """Do what the policy says of a bad sample.

        Not a part of ``_read_alone``, to whose frame the traceback of the cause refers: an error that has
        this cause must not be among its variables, or the batch is kept until garbage is collected.
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

    def _no_replacement(self, row: int, tried: int) -> BadSampleError:
        item = self.item(row)
        return BadSampleError(
            f"sample {item.index} ({item.path!r}) could not be read, nor could any of {tried} tried in its "
            "place. The warnings logged for each say why; restore the file from a copy.",
            path=item.path,
            index=item.index,
        )

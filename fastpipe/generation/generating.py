"""One call of ``generate``: what is there, what is missing, who makes it, what it is called in the end."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastpipe._sizes import in_bytes
from fastpipe.errors import FastpipeError, GenerationError, OptionError, WorkerError
from fastpipe.files.growing import folder_of
from fastpipe.files.pace import in_time
from fastpipe.generation.asked import Asked
from fastpipe.generation.crews import Cluster, HeldCrew, Here, Separate, Threads
from fastpipe.generation.finishing import OldRows, damaged, finish, name_files, places_of
from fastpipe.generation.first import First, first_row
from fastpipe.generation.interrupts import Interrupts
from fastpipe.generation.job import (
    Folder,
    Job,
    differences,
    finished_paths,
    header_of,
    job_named,
    versions,
)
from fastpipe.generation.journal import Journal
from fastpipe.generation.probing import Probe
from fastpipe.generation.reporting import Report
from fastpipe.generation.scheduling import Missing, Schedule
from fastpipe.generation.storing import Places, Stored, Stores
from fastpipe.generation.work import Task

__all__ = ["Generated", "Generation"]

_SHORT_S = 1.0  # of work, for which processes are not worth starting
_PROBED_S = 20.0  # of work, from which on it is worth a look before
_COPIED_NBYTES = 32 << 20
_BY_VALUE = "<dynamic-code>"  # what cloudpickle says that a function's file is


@dataclass(frozen=True)
class Generated:
    """What ``generate`` has made.

    Attributes:
        paths: the files, in the order of their rows.
        rows: that they have.
        failed: rows that are left out, with what was wrong.
        nan_rows: how many rows have a NaN.
        made: rows that were made by this call; the others were there.
        seconds: this call took.
    """

    paths: tuple[Path, ...]
    rows: int
    failed: tuple[tuple[int, str], ...] = ()
    nan_rows: int = 0
    made: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        nbytes = sum(path.stat().st_size for path in self.paths)
        files = (
            str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files from {self.paths[0]}"
        )
        if not self.made:
            return f"{files}: {self.rows:,} rows, {in_bytes(nbytes)}, all there already"
        rate = f"{self.made / max(self.seconds, 1e-9):,.3g} rows/s"
        took = f"{self.seconds:.1f} s" if self.seconds < 60 else in_time(self.seconds)
        return f"{files}: {self.rows:,} rows, {in_bytes(nbytes)}; {self.made:,} made in {took}, {rate}"


class Generation:
    """One call.

    Args:
        asked: for what.
        report: is told how far it is.
    """

    def __init__(self, asked: Asked, report: Report) -> None:
        self._asked, self._report = asked, report
        self._name, self._code, self._parts = job_named(asked.function)

    def run(self) -> Generated:
        """Make what is missing.

        Raises:
            As ``generate``.
        """
        out = self._asked.out
        finished = finished_paths(out)
        if finished and not folder_of(out).exists() and (there := self._there(finished)) is not None:
            return there
        with Folder(out) as folder, ExitStack() as stack:
            finished = finished_paths(out)  # nobody else can have made them from here on
            journal = Journal(folder.folder)
            stack.callback(journal.close)
            is_begun = bool(journal.blocks) or journal.is_naming  # else there is nothing that could be lost
            if not self._asked.resume or not is_begun:
                # Also where nothing but the folder is left of a job whose files have their names.
                if finished and (there := self._there(finished)) is not None:
                    folder.remove()
                    return there
                folder.clear()
                try:
                    self._begin(journal, finished)
                except BaseException:
                    folder.remove()  # nothing is lost with it
                    raise
            job = self._checked_journal(journal)
            made = self._made(job, folder, journal, finished if job.extends else ())
            folder.remove()
        if job.rows < self._asked.rows:  # what was begun is finished; what is asked for is more
            more = self.run()
            return replace(more, made=made.made + more.made)
        return made

    def _there(self, finished: Sequence[Path]) -> Generated | None:
        """What is there, if it is all that is asked for; None if it has fewer rows.

        Raises:
            As `_checked_finished`.
        """
        job, skipped = self._checked_finished(finished)
        if job.rows < self._asked.rows:
            return None
        failed = tuple((index, "left out before") for index in skipped)
        return Generated(tuple(finished), job.rows - len(skipped), failed)

    def _checked_finished(self, paths: Sequence[Path]) -> tuple[Job, list[int]]:
        """What finished files are of, if it is the same job, of no more rows.

        Raises:
            OptionError: they are something else.
            GenerationError: they are of another job.
        """
        heads = [header_of(path) for path in paths]
        job = heads[0][0]
        if not self._asked.resume:
            raise OptionError(f"{paths[0]} exists; remove it to make it anew, or name another file")
        found = differences(job, self._wanted(job))
        if self._asked.resume == "changed" and job.code != self._code:
            found = found[1:]
        self._refuse(found, f"{paths[0]} exists, and", "Name another file, or remove it")
        if job.rows > self._asked.rows:
            raise GenerationError(
                f"{paths[0]} has {job.rows:,} rows, and n={self._asked.rows:,} is less: read its first ones, "
                "or name another file"
            )
        return job, [index for _, skipped in heads for index in skipped]

    def _checked_journal(self, journal: Journal) -> Job:
        """The job of a journal, if it is the same, of no more rows."""
        assert journal.job is not None
        job, folder = Job.from_json(journal.job), folder_of(self._asked.out)
        remedy = (
            "Go on with the arguments that it was begun with; or begin anew with resume=False, which removes "
            f"{_rows(journal.blocks):,} rows"
        )
        found = differences(job, self._wanted(job))
        if self._asked.resume == "changed" and job.code != self._code:
            found, job = found[1:], replace(job, code=self._code, parts=self._parts)
        elif job.code != self._code:
            remedy += (
                "; or, if the rows are as good as those of the function as it is now, give resume='changed'"
            )
        self._refuse(found, f"{folder} is of a job that was not finished, and", remedy)
        if job.rows > self._asked.rows:
            raise GenerationError(
                f"{folder} is of a job of {job.rows:,} rows that was not finished, and n="
                f"{self._asked.rows:,} is less. {remedy}"
            )
        return job

    def _refuse(self, found: Sequence[str], what: str, remedy: str) -> None:
        if found:
            raise GenerationError(f"{what} {', '.join(found)}. {remedy}")

    def _wanted(self, like: Job) -> Job:
        """The job that is asked for, of the form of one that is there."""
        asked = self._asked
        return replace(
            like, function=self._name, code=self._code, parts=self._parts, seed=asked.seed, rows=asked.rows,
            columns=asked.columns_noted, chunk_rows=asked.chunk_rows, max_bytes=asked.max_bytes,
            policy=asked.policy, seeds_globals=asked.seeds_globals,
        )  # fmt: skip

    def _begin(self, journal: Journal, finished: Sequence[Path]) -> None:
        """Note what is to be made."""
        if finished:
            job, _ = header_of(finished[0])
            journal.begin(replace(self._wanted(job), extends=job.rows, versions=versions()).as_json())
            return
        asked = self._asked
        first = first_row(asked)
        shard_rows = None if asked.max_bytes is None else max(1, asked.max_bytes // first.row_nbytes)
        journal.begin(
            Job(
                self._name, self._code, self._parts, asked.seed, asked.rows, first.form, asked.columns_noted,
                asked.chunk_rows, asked.max_bytes, asked.policy, asked.seeds_globals, shard_rows,
                first.batch_rows, versions(),
            ).as_json()
        )  # fmt: skip
        self._first = first

    def _made(self, job: Job, folder: Folder, journal: Journal, old: Sequence[Path]) -> Generated:
        """Make the missing rows of a job, and the files of them."""
        try:
            return self._all_made(job, folder, journal, old)
        except (KeyboardInterrupt, OSError) as error:
            told = self._told(error, journal, job)
            raise told from told.__cause__

    def _all_made(self, job: Job, folder: Folder, journal: Journal, old: Sequence[Path]) -> Generated:
        places = places_of(job, folder.folder)
        stores = Stores(places)
        try:
            if not journal.is_naming:
                self._check_stored(journal, places, stores)
                folder.tidy(journal.blocks)
                self._take_over(job, journal, stores, old)
                made = self._make(job, folder.folder, journal, places, stores)
                finish(job, places, journal.blocks, stores, self._report.step)
            else:
                made = 0
        finally:
            stores.close()
        paths = name_files(self._asked.out, places, journal, old)
        return self._generated(job, journal, paths, made)

    def _generated(self, job: Job, journal: Journal, paths: Sequence[Path], made: int) -> Generated:
        failed = tuple(sorted(pair for one in journal.blocks for pair in one.failed))
        nan_rows = sum(one.nonfinite for one in journal.blocks)
        if nan_rows:
            first = sorted(index for one in journal.blocks for index in one.nonfinite_rows)[:5]
            text = f"{nan_rows:,} rows have NaN, which are kept; the first: {', '.join(map(str, first))}"
            self._report.say(text, logging.WARNING)
        if failed:
            text = f"{len(failed):,} rows are left out; the first: row {failed[0][0]}, {failed[0][1]}"
            self._report.say(text, logging.WARNING)
        return Generated(tuple(paths), job.rows - len(failed), failed, nan_rows, made)

    def _check_stored(self, journal: Journal, places: Places, stores: Stores) -> None:
        """Look at what was made before."""
        if not journal.blocks:
            return
        self._report.step("reading what is there")
        if lost := damaged(journal.blocks, places, stores):
            journal.drop(lost)
            text = f"{_rows(lost):,} rows are not as they were noted, and are made again"
            self._report.say(text, logging.WARNING)
        self._report.say(f"going on: {_rows(journal.blocks):,} of {places.rows:,} rows are there")

    def _take_over(self, job: Job, journal: Journal, stores: Stores, old: Sequence[Path]) -> None:
        """Copy the rows of files that are finished, but for a last batch that was not a whole one."""
        if not old:
            return
        align = max(job.batch_rows, 1)
        missing = Missing(
            job.extends // align * align, [(one.first, one.last) for one in journal.blocks], align
        )
        rows = OldRows(old, job.form)
        try:
            size = sum(path.stat().st_size for path in old) // max(job.extends, 1)
            while (block := missing.take(max(1, _COPIED_NBYTES // max(size, 1)))) is not None:
                stored = stores.put(rows.block(*block))
                stores.sync([stored])
                journal.add([stored])
        finally:
            rows.close()

    def _make(self, job: Job, folder: Path, journal: Journal, places: Places, stores: Stores) -> int:
        """Make the missing rows; how many these are."""
        asked = self._asked
        missing = Missing(job.rows, [(one.first, one.last) for one in journal.blocks], max(job.batch_rows, 1))
        count = missing.left
        if not count:
            return 0
        task = Task(asked.function, job.seed, job.form, job.batch_rows, job.policy, job.seeds_globals)
        first: First | None = getattr(self, "_first", None)
        row_s, nbytes = (first.row_s, first.row_nbytes) if first else (0.0, 0)
        try:
            crew_of_job = self._crew(task, folder, places, stores, count, row_s, nbytes)
            with crew_of_job as crew, Interrupts(is_here=isinstance(crew, Here)) as interrupts:
                self._report.begin(job.rows - count)
                Schedule(
                    crew, missing, journal, stores, job.form, folder, self._report, interrupts,
                    row_s or 0.1, nbytes,
                ).run()  # fmt: skip
        except GenerationError as error:
            told = self._told(error, journal, job)
            raise told from told.__cause__
        return count

    def _crew(
        self, task: Task, folder: Path, places: Places, stores: Stores, rows: int, row_s: float, nbytes: int
    ) -> HeldCrew:
        """Who makes rows."""
        asked, workers = self._asked, self._asked.most_workers
        if isinstance(asked.executor, Executor) or asked.executor not in (None, "processes", "threads"):
            return Cluster(task, folder, asked.executor, None if asked.workers == "auto" else asked.workers)  # type: ignore[arg-type]
        is_short = asked.workers == "auto" and 0 < rows * row_s < _SHORT_S
        if workers == 0 or is_short:
            return Here(task, stores)
        if asked.probe and rows * row_s / workers > _PROBED_S:
            try:
                found = Probe(task, rows, nbytes, workers, asked.executor or "processes", asked.out).run()
            except WorkerError:  # the row that ends a worker is found when it is kept apart
                return Separate(task, places, workers)
            for line in found.lines():
                self._report.say(line)
            if asked.workers == "auto" and found.best_workers == 0:
                return Here(task, stores)
        if asked.executor == "threads":
            return Threads(task, stores, 1 if task.seeds_globals else workers)
        return Separate(task, places, workers)

    def _told(self, error: BaseException, journal: Journal, job: Job) -> BaseException:
        """An error that says what is kept, and how to go on."""
        kept = f"{_rows(journal.blocks):,} of {job.rows:,} rows are kept in {folder_of(self._asked.out)}"
        again = f"{kept}; the same call goes on from there"
        if isinstance(error, KeyboardInterrupt):
            self._report.say(f"interrupted: {again}", logging.WARNING)
            return KeyboardInterrupt(f"interrupted: {again}")
        if isinstance(error, GenerationError):
            alone, policy = "", ""
            if error.trace:
                name, index = job.function.split(":")[-1], error.index
                alone = f" Alone it is {name}({index}, np.random.default_rng([{job.seed}, {index}]))."
                policy = ". bad_samples='skip' leaves such rows out, and 'retry' draws again"
            trace = error.trace.replace(
                _BY_VALUE, inspect.getsourcefile(_plain(self._asked.function)) or _BY_VALUE
            )
            told = GenerationError(
                f"{str(error).rstrip('.')}.{alone} {again}{policy}", index=error.index, trace=trace
            )
            told.__cause__ = error.__cause__ or (_WorkerTraceError(trace) if trace else None)
            return told
        if isinstance(error, OSError) and not isinstance(error, FastpipeError):
            text, is_full = error.strerror or str(error), error.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_full:  # of HDF5 the text has many lines
                free = in_bytes(shutil.disk_usage(self._asked.out.parent).free)
                text = f"{os.strerror(error.errno or 0)} ({free} are free)"
            text = f"{text}; {again}"
            return type(error)(text) if error.errno is None else type(error)(error.errno, text)
        return error


class _WorkerTraceError(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _plain(function: Callable[..., Any]) -> Any:
    """The function itself, of one that is an object, or part of another."""
    function = getattr(function, "func", function)
    return function if inspect.isfunction(inspect.unwrap(function)) else type(function)


def _rows(blocks: Sequence[Stored]) -> int:
    return sum(one.last - one.first for one in blocks)

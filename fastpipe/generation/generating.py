"""One call of ``generate``: what is there, what is missing, who makes it, what it is called in the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fastpipe.errors import GenerationError, OptionError, WorkerError
from fastpipe.generation.asked import Asked
from fastpipe.generation.crews import Cluster, Crew, Here, Separate, Threads
from fastpipe.generation.finishing import LEFT_OUT, OldRows, damaged, finish, name_files, places_of
from fastpipe.generation.first import First, first_row
from fastpipe.generation.interrupts import Interrupts
from fastpipe.generation.job import Finished, Folder, Job, differences, job_named, paths_of, versions
from fastpipe.generation.journal import Journal
from fastpipe.generation.outcome import Generated, rows_of, told
from fastpipe.generation.probing import Probe, ProbeReport
from fastpipe.generation.reporting import Report
from fastpipe.generation.scheduling import Missing, Schedule
from fastpipe.generation.storing import Places, Stores
from fastpipe.generation.work import Task
from fastpipe.hdf5.growing import folder_of, opened_folder

__all__ = ["Generation"]

_SHORT_S = 1.0  # of work, for which processes are not worth starting
_PROBED_S = 20.0  # of work, from which on it is worth a look before
_COPIED_NBYTES = 32 << 20


class Generation:
    """One call.

    Args:
        asked: for what.
        report: is told how far it is.
    """

    def __init__(self, asked: Asked, report: Report) -> None:
        self._asked, self._report = asked, report
        self._name, self._code, self._parts = job_named(asked.function)
        self._first: First | None = None  # of rows that are there nobody knows how long one takes

    def run(self) -> Generated:
        """Make what is missing.

        Raises:
            As ``generate``.
        """
        out = self._asked.out
        if not folder_of(out).exists() and (there := self._there(Finished.at(out))) is not None:
            return there
        with Folder(out) as folder, ExitStack() as stack:
            journal = Journal(folder.folder)
            stack.callback(journal.close)
            is_begun = bool(journal.blocks) or journal.is_naming  # else there is nothing that could be lost
            if not self._asked.resume or not is_begun:
                finished = Finished.at(out)  # nobody else can have made them from here on
                # Also where nothing but the folder is left of a job whose files have their names.
                if (there := self._there(finished)) is not None:
                    folder.remove()
                    return there
                folder.clear()
                try:
                    self._begin(journal, finished)
                except BaseException:
                    folder.remove()  # nothing is lost with it
                    raise
            job = self._checked_journal(journal)
            made = self._made(job, folder, journal, self._old(job, journal))
            folder.remove()
        if job.rows < self._asked.rows:  # what was begun is finished; what is asked for is more
            more = self.run()
            return replace(more, made=made.made + more.made)
        return made

    def _old(self, job: Job, journal: Journal) -> tuple[Path, ...]:
        """The files whose rows a job takes over, and whose place its own take."""
        if not job.extends:
            return ()
        if journal.is_naming:  # some of them may be of this job already
            return paths_of(self._asked.out)
        finished = Finished.at(self._asked.out)
        return finished.paths if finished else ()

    def _there(self, finished: Finished | None) -> Generated | None:
        """What is there, if it is all that is asked for; None if it has fewer rows.

        Raises:
            OptionError: there are finished files, and all is to be made anew.
            GenerationError: they are of another job, or have more rows.
        """
        if finished is None:
            return None
        path, job = finished.paths[0], finished.job
        if not self._asked.resume:
            raise OptionError(f"{path} exists; remove it to make it anew, or name another file")
        found = self._differences(job)
        if found:
            raise GenerationError(f"{path} exists, and {', '.join(found)}. Name another file, or remove it")
        if job.rows > self._asked.rows:
            raise GenerationError(
                f"{path} has {job.rows:,} rows, and n={self._asked.rows:,} is less: read its first ones, or "
                "name another file"
            )
        if job.rows < self._asked.rows:
            return None
        failed = tuple((index, LEFT_OUT) for index in finished.skipped)
        return Generated(finished.paths, job.rows - len(failed), failed, finished.nan_rows)

    def _differences(self, job: Job) -> list[str]:
        """In what a job that is there differs from what is asked for, as far as that is not accepted."""
        wanted = self._wanted(job)
        if self._asked.resume == "changed":
            job = replace(job, code=wanted.code)
        return differences(job, wanted)

    def _checked_journal(self, journal: Journal) -> Job:
        """The job of a journal, if it is the same, of no more rows."""
        folder = folder_of(self._asked.out)
        remedy = (
            "Go on with the arguments that it was begun with; or begin anew with resume=False, which removes "
            f"{rows_of(journal.blocks):,} rows"
        )
        if journal.job is None:
            raise GenerationError(
                f"{folder} is of a job, and its journal, which says of which, is damaged. Begin anew with "
                f"resume=False, which removes {rows_of(journal.blocks):,} rows"
            )
        job = Job.from_json(journal.job)
        if found := self._differences(job):
            if job.code != self._code:
                remedy += "; or, if rows are as good as those of the function as it is, give resume='changed'"
            raise GenerationError(
                f"{folder} is of a job that was not finished, and {', '.join(found)}. {remedy}"
            )
        if job.rows > self._asked.rows:
            raise GenerationError(
                f"{folder} is of a job of {job.rows:,} rows that was not finished, and n="
                f"{self._asked.rows:,} is less. {remedy}"
            )
        return replace(job, code=self._code, parts=self._parts)

    def _wanted(self, like: Job) -> Job:
        """The job that is asked for, of the form of one that is there."""
        asked = self._asked
        return replace(
            like, function=self._name, code=self._code, parts=self._parts, seed=asked.seed, rows=asked.rows,
            columns=asked.columns_noted, chunk_rows=asked.chunk_rows, max_bytes=asked.max_bytes,
            policy=asked.policy, seeds_globals=asked.seeds_globals,
        )  # fmt: skip

    def _begin(self, journal: Journal, finished: Finished | None) -> None:
        """Note what is to be made."""
        if finished is not None:
            wanted = self._wanted(finished.job)
            journal.begin(replace(wanted, extends=finished.job.rows, versions=versions()).as_json())
            return
        asked = self._asked
        first = self._first = first_row(asked)
        shard_rows = None if asked.max_bytes is None else max(1, asked.max_bytes // first.row_nbytes)
        job = Job(
            self._name, self._code, self._parts, asked.seed, asked.rows, first.form, asked.columns_noted,
            asked.chunk_rows, asked.max_bytes, asked.policy, asked.seeds_globals, shard_rows,
            first.batch_rows, versions(),
        )  # fmt: skip
        journal.begin(job.as_json())

    def _made(self, job: Job, folder: Folder, journal: Journal, old: Sequence[Path]) -> Generated:
        """Make the missing rows of a job, and the files of them."""
        try:
            return self._all_made(job, folder, journal, old)
        except (KeyboardInterrupt, OSError, GenerationError) as error:
            found = told(error, journal.blocks, job, self._asked.out, self._asked.function)
            if isinstance(error, KeyboardInterrupt):
                self._report.say(str(found), logging.WARNING)
            raise found from found.__cause__

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
        with opened_folder(self._asked.out) as here:
            paths = name_files(self._asked.out, replace(places, folder=Path(here)), journal, old)
        return self._generated(job, journal, paths, made)

    def _generated(self, job: Job, journal: Journal, paths: Sequence[Path], made: int) -> Generated:
        failed = tuple(sorted(pair for one in journal.blocks for pair in one.failed))
        nan_rows = sum(one.with_nan for one in journal.blocks)
        if nan_rows:
            first = sorted(index for one in journal.blocks for index in one.first_with_nan)[:5]
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
        if journal.damaged:
            text = f"{journal.damaged:,} lines of the journal are damaged; the rows of these are made again"
            self._report.say(text, logging.WARNING)
        self._report.step("reading what is there")
        if lost := damaged(journal.blocks, places, stores):
            journal.drop(lost)
            text = f"{rows_of(lost):,} rows are not as they were noted, and are made again"
            self._report.say(text, logging.WARNING)
        self._report.say(f"going on: {rows_of(journal.blocks):,} of {places.rows:,} rows are there")

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
        crew_of_job = self._crew(task, folder, places, stores, count)
        with crew_of_job as crew, Interrupts(is_here=isinstance(crew, Here)) as interrupts:
            self._report.begin(job.rows - count)
            Schedule(
                crew, missing, journal, stores, job.form, folder, self._report, interrupts, self._first
            ).run()
        return count

    def _crew(self, task: Task, folder: Path, places: Places, stores: Stores, rows: int) -> Crew:
        """Who makes rows."""
        asked, workers = self._asked, self._asked.most_workers
        if asked.executor is not None and not isinstance(asked.executor, str):
            return Cluster(task, folder, asked.executor, None if asked.workers == "auto" else asked.workers)
        seconds = self._first.row_s * rows if self._first else math.inf
        if workers == 0 or (asked.workers == "auto" and seconds < _SHORT_S):
            return Here(task, stores)
        if self._first and asked.probe and seconds / workers > _PROBED_S:
            found = self._probed(task, rows, self._first.row_nbytes, workers)
            if asked.workers == "auto" and found is not None and not found.best_workers:
                return Here(task, stores)
        if asked.executor == "threads":
            return Threads(task, stores, workers)
        try:
            return Separate(task, places, workers)
        except OSError as error:
            if asked.workers != "auto":
                raise
            text = f"no worker processes can be started ({error}): this one makes the rows"
            self._report.say(text, logging.WARNING)
            return Here(task, stores)

    def _probed(self, task: Task, rows: int, row_nbytes: int, workers: int) -> ProbeReport | None:
        """Look, and say what was seen; None where that needs a worker that died or cannot start,
        as both are found later."""
        try:
            found = Probe(
                task, rows, row_nbytes, workers, self._asked.executor == "threads", self._asked.out
            ).run()
        except (WorkerError, OSError):
            return None
        for line in found.lines():
            self._report.say(line)
        return found

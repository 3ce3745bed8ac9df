"""``generate`` makes samples with a function and stores them in files; ``probe`` estimates the duration."""

from __future__ import annotations

import errno
import inspect
import logging
import math
import operator
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fastpipe.console import in_time
from fastpipe.core.growing_folder import folder_of, opened_folder
from fastpipe.core.machine import default_threads
from fastpipe.core.processes import why_no_processes
from fastpipe.core.text import in_bytes
from fastpipe.errors import FastpipeError, GenerationError, MissingDependencyError, OptionError, WorkerError
from fastpipe.generation.code import code_name, code_version
from fastpipe.generation.columns import Columns, SampleError, Schema, declared
from fastpipe.generation.estimate import ProbeReport, look
from fastpipe.generation.files import (
    LEFT_OUT,
    Finished,
    Folder,
    Job,
    OldRows,
    damaged,
    differences,
    finish,
    layout_of,
    name_files,
    paths_of,
    versions,
)
from fastpipe.generation.rows import FAILURES, Failure, Maker, Policy, Task
from fastpipe.generation.schedule import Interrupts, Missing, Report, Schedule
from fastpipe.generation.storage import Journal, Layout, Stored, Writer
from fastpipe.generation.workers import Cluster, Kind, OneThreadEach, Processes, ThisThread, Threads, Workers

# ---- public functions -----------------------------------------------------------------------------


def generate(
    fn: Callable[..., Any],
    n: int,
    out: str | os.PathLike[str],
    *,
    seed: int,
    workers: int | Literal["auto"] = "auto",
    executor: Executor | Kind | None = None,
    columns: Columns = None,
    chunk_rows: int | Literal["auto"] = "auto",
    resume: bool | Literal["changed"] = True,
    probe: bool = True,
    max_bytes: int | None = None,
    bad_samples: Policy = "raise",
    seed_globals: bool = False,
    progress: bool = True,
) -> Generated:
    """Make each sample once with a function, and store it in an HDF5 file for :class:`FastHDF5Dataset`.

    Each sample is a row of the file.  Row ``i`` is the result of ``fn(i, np.random.default_rng([seed, i]))``,
    and depends on nothing else.  The content of the file does not depend on the number of workers, on the
    executor or on interruptions.  If the process is killed, repeat the call to continue.  A call with a
    larger ``n`` makes only the missing rows.

    Args:
        fn: a function ``fn(index, rng)`` that returns a sample: an array, a number, a string or bytes, or a
            dict or a tuple of these types.  ``index`` is an int from 0 to ``n - 1``, and ``rng`` is a
            ``np.random.Generator``.  If ``fn`` has an attribute ``batch``, ``fn.batch(indices, rng)`` makes
            several rows at once.  ``indices`` is int64 (B,).  Each method of this ``rng`` returns an array
            (B, …) with one result for each row.  ``batch`` returns arrays (B, …), too.
        n: number of rows.
        out: path of the file.  While the file grows, its rows are in the folder ``out.partial`` next to it.
        seed: seed of all random numbers, a whole number from 0.
        workers: number of workers, each of which makes a row at a time.  With 0, this thread makes all rows.
            ``"auto"`` starts a worker for each core that this process may use, unless the rows take less than
            a second, or a measurement of the function shows that workers gain nothing.
        executor: ``"processes"`` (the default), ``"threads"``, or any ``concurrent.futures.Executor``, such
            as Dask's ``client.get_executor()``.  The executor's workers must see the folder of ``out``.
        columns: names for the values of a tuple, or a dict that gives some columns a type (``str``,
            ``"float32"``) or a type and a shape.  For example, ``{"motion": ("float32", (None, 25, 3))}``
            declares arrays whose first length varies between samples.  Columns without a type get the type
            and the shape of the value in the first row.
        chunk_rows: number of rows in a chunk.  With ``"auto"``, a chunk has at most 64 KiB, or one row.
        resume: True continues from existing rows, and False starts again.  ``"changed"`` also continues if
            the code of ``fn`` has changed: use this for changes of the code that do not change the rows.
        probe: before long work, measure for three seconds, and report how long the work will take and which
            functions take the time.
        max_bytes: approximate largest size of a file in bytes.  Rows that do not fit go to further files:
            ``out-00000.h5``, ``out-00001.h5`` and so on.
        bad_samples: what happens if ``fn`` raises an error for a row.  ``"raise"`` stops and keeps all
            finished rows.  ``"skip"`` leaves the row out of the file.  ``"retry"`` calls ``fn`` up to ten
            times for a row, each time with other random numbers.
        seed_globals: also seed the global generators of ``random``, ``np.random`` and torch for each row, for
            code that draws from these generators.
        progress: show the progress on standard error; in a terminal as a bar.

    Returns:
        The files, the number of rows, and the rows that failed.

    If lengths vary in a column, its rows are padded with zeros to the longest row.  The lengths are in the
    dataset ``NAME_length``.  Rows with NaN are kept and counted.  While rows are made, each library uses one
    thread, so that sums are equal on machines with different numbers of cores.

    Raises:
        GenerationError: a row failed, or the existing rows were made with another function, seed or option,
            or more than ``n`` rows exist.
        OptionError: an option is invalid, or ``out`` exists and was not made by ``generate``.
        OSError: rows cannot be written, for instance because the disk is full.  Repeat the call to continue.
        KeyboardInterrupt: the user interrupted the call.  Rows in flight were finished and kept; a second
            interrupt does not wait for them.

    >>> import h5py, os, tempfile
    >>> def sample(index, rng):
    ...     return {"wave": rng.normal(size=8).astype("float32"), "index": index}
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "waves.h5")
    >>> made = generate(sample, 100, path, seed=0, progress=False)
    >>> with h5py.File(path) as file:
    ...     file["wave"].shape, int(file["index"][99])
    ((100, 8), 99)
    >>> folder.cleanup()
    """
    begun = time.monotonic()
    options = Options(
        fn, operator.index(n), Path(out).absolute(), operator.index(seed), workers, executor, columns,
        None if chunk_rows == "auto" else chunk_rows, resume, probe, max_bytes, bad_samples, seed_globals,
    )  # fmt: skip
    with Report(Path(out).name, options.rows, is_shown=progress) as report:
        made = Run(options, report).run()
        made = replace(made, seconds=time.monotonic() - begun)
        report.say(str(made))
    return made


def probe(
    fn: Callable[..., Any],
    n: int,
    out: str | os.PathLike[str] = "rows.h5",
    *,
    seed: int = 0,
    workers: int | Literal["auto"] = "auto",
    executor: Kind | None = None,
    columns: Columns = None,
    seed_globals: bool = False,
) -> ProbeReport:
    """Estimate how long ``generate`` will take, how large the file will be, and how much workers gain.

    Rows are made for about three seconds, and none of them is kept.

    Args:
        fn, n, out, seed, workers, executor, columns, seed_globals: see :func:`fastpipe.generate`.

    Returns:
        The measurements and estimates.  ``print`` shows them as text.

    Raises:
        GenerationError: a row failed.
        OptionError: an option is invalid, or ``out`` exists and was not made by ``generate``.

    >>> found = probe(lambda index, rng: rng.normal(size=100), 1000, workers=1, executor="threads")
    >>> found.rows, found.row_nbytes, found.seconds > 0
    (1000, 800, True)
    """
    options = Options(fn, n, Path(out), seed, workers, executor, columns, seeds_globals=seed_globals)
    first = first_row(options)
    task, are_threads = options.task(first.schema, first.batch_rows), executor == "threads"
    return look(task, n, first.row_nbytes, options.most_workers, are_threads, options.out)


# ---- options ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The checked arguments of ``generate``."""

    function: Callable[..., Any]
    rows: int
    out: Path
    seed: int
    workers: int | Literal["auto"] = "auto"
    executor: Executor | Kind | None = None
    columns: Columns = None
    chunk_rows: int | None = None
    resume: bool | Literal["changed"] = True
    probe: bool = True
    max_bytes: int | None = None
    policy: Policy = "raise"
    seeds_globals: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"fn must be a function fn(index, rng), got {type(self.function).__name__}")
        workers = None if self.workers == "auto" else self.workers
        for name, value, least in (
            ("n", self.rows, 1), ("seed", self.seed, 0), ("chunk_rows", self.chunk_rows, 1),
            ("max_bytes", self.max_bytes, 1), ("workers", workers, 0),
        ):  # fmt: skip
            if value is not None and (not isinstance(value, int) or value < least):
                raise OptionError(f"{name} must be a whole number from {least}, got {value!r}")
        if self.policy not in get_args(Policy):
            raise OptionError(f"bad_samples must be one of {get_args(Policy)}, got {self.policy!r}")
        if self.executor not in (None, *get_args(Kind)) and not hasattr(self.executor, "submit"):
            raise OptionError(
                "executor must be 'processes', 'threads', or a concurrent.futures.Executor, got "
                f"{self.executor!r}"
            )
        if self.resume not in (True, False, "changed"):
            raise OptionError(f"resume must be True, False or 'changed', got {self.resume!r}")
        if self.seeds_globals and self.executor == "threads" and self.workers not in (0, 1):
            raise OptionError(
                "seed_globals=True with executor='threads': threads share the global generators; give "
                "executor='processes', or workers=1"
            )
        declared(self.columns)
        if self.out.suffix in (".npy", ".npz"):
            name = self.out.with_suffix(".h5").name
            raise OptionError(f"generate writes HDF5 files: name the file {name!r}")
        if self.out.is_dir():
            raise OptionError(f"{self.out} is a folder; name a file")
        if not self.out.parent.is_dir():
            raise OptionError(f"there is no folder {self.out.parent}; make it first")

    @property
    def most_workers(self) -> int:
        if self.workers != "auto":
            return self.workers
        return 0 if self.executor != "threads" and why_no_processes() else default_threads()

    def task(self, schema: Schema, batch_rows: int) -> Task:
        """Return the function and the options that every worker needs."""
        return Task(self.function, self.seed, schema, batch_rows, self.policy, self.seeds_globals)


# ---- the first row ----------------------------------------------------------------------------------

_TRIED = 100  # the most rows that are tried to find a row that does not fail
_BATCH_NBYTES, _MOST_BATCH_ROWS = 4 << 20, 256
_BATCH_ROW_S = 1e-3  # assumed duration of a row if a batch cannot be measured
_TIMED, _TIMED_S = 9, 0.002  # the most rows that are timed, and the seconds after which timing ends
_TOLERANCE = 1e-5  # tolerance, absolute and relative, between a row of ``fn`` and the row of a batch


class First(NamedTuple):
    """The schema of the first row, and the approximate size and duration of a row."""

    schema: Schema
    row_nbytes: int  # approximate bytes of a row in the file
    row_s: float  # approximate seconds to make a row
    batch_rows: int  # number of rows in a call of ``batch``; 0 if there is no ``batch``


def first_row(options: Options) -> First:
    """Make the first row that does not fail, and return its schema, size and duration.

    Raises an OptionError if ``columns=`` does not fit, or if ``batch`` makes other rows than ``fn``.
    """
    maker = Maker(options.task(Schema((), is_dict=True), 0))
    tried = min(_TRIED, options.rows)
    with OneThreadEach():
        for index in range(tried):
            begun = time.perf_counter()
            try:
                sample = maker.sample(index)
                schema = Schema.learned(sample, options.columns)
            except (OptionError, MissingDependencyError):
                raise
            except FAILURES as error:
                failure = Failure.of(index, error)
                if options.policy != "raise" and not failure.is_final:
                    continue
                raise GenerationError(f"row {index} failed: {failure.error}", index=index) from error
            row_s = time.perf_counter() - begun
            row_nbytes = schema.row_nbytes(sample)
            if not callable(getattr(options.function, "batch", None)):
                row_s = min(row_s, _next_row_s(maker, range(index + 1, options.rows)))
                return First(schema, row_nbytes, row_s, 0)
            batch_rows = max(1, min(_BATCH_NBYTES // row_nbytes, _MOST_BATCH_ROWS))
            alone = [one.copy() for one in schema.arrays(sample)]  # the function may reuse its arrays
            row_s = _check_batch(options, schema, index, alone, batch_rows)
            return First(schema, row_nbytes, row_s, batch_rows)
    raise GenerationError(f"all of the first {tried} rows failed: make one alone to see why")


def _next_row_s(maker: Maker, rows: range) -> float:
    """Return a later row's approximate duration; the first row may import or compile code."""
    took: list[float] = []
    while rows and len(took) < min(_TIMED, len(rows)) and sum(took) < _TIMED_S:
        begun = time.perf_counter()
        try:
            maker.sample(rows[len(took)])
        except FAILURES:  # the failure is reported later, when the row is made again
            break
        took.append(time.perf_counter() - begun)
    return statistics.median(took) if took else math.inf


def _check_batch(options: Options, schema: Schema, index: int, first: list[Any], batch_rows: int) -> float:
    """Check that ``batch`` makes the same rows as ``fn``; return the approximate seconds for a row."""
    maker = Maker(options.task(schema, batch_rows))
    rows = range(index, min(index + batch_rows, options.rows))
    try:
        made = maker.batch(rows)  # a warm-up, because the first call may compile code
        begun = time.perf_counter()
        made = maker.batch(rows)
        row_s = (time.perf_counter() - begun) / len(rows)
    except SampleError as error:
        raise OptionError(f"fn.batch of rows {rows.start} to {rows.stop - 1}: {error}") from error
    except FAILURES:
        return _BATCH_ROW_S  # the row that fails is found and handled when the rows are made
    if options.seeds_globals:  # a batch has one seed for all its rows, so the rows differ from those of fn
        return row_s
    for at, alone in ((0, first), (len(rows) - 1, schema.arrays(maker.sample(rows[-1])))):
        for column, values, value in zip(schema.columns, made, alone, strict=True):
            if not _equal(np.asarray(values[at]), value):
                raise OptionError(
                    f"fn.batch makes other rows than fn: {column.name!r} of row {rows[at]} differs. Draw "
                    "numbers with the methods of the rng that batch is given, in the order of fn's"
                )
    return row_s


def _equal(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.shape == other.shape and one.dtype.kind in "fc":
        return np.allclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True)
    return bool(np.array_equal(one, other))


# ---- the run ----------------------------------------------------------------------------------------

_SHORT_S = 1.0  # if the work takes less time, no workers are started
_PROBED_S = 20.0  # if the work takes more time, the function is probed first
_COPIED_NBYTES = 32 << 20
_ACCEPT = "; or, if rows made before the change are good, give resume='changed' (--resume-changed)"


@dataclass(frozen=True)
class Generated:
    """The result of ``generate``.

    Attributes:
        paths: the files, in the order of their rows.
        rows: number of rows in the files.
        failed: for each row that was left out, its index and the error.
        nan_rows: number of rows with a NaN.
        made: number of rows that this call made; all other rows existed before.
        seconds: duration of this call.
    """

    paths: tuple[Path, ...]
    rows: int
    failed: tuple[tuple[int, str], ...] = ()
    nan_rows: int = 0
    made: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        nbytes = sum(path.stat().st_size for path in self.paths)
        count = len(self.paths)
        files = str(self.paths[0]) if count == 1 else f"{count} files from {self.paths[0]}"
        if not self.made:
            return f"{files}: {self.rows:,} rows, {in_bytes(nbytes)}, all there already"
        rate = f"{self.made / max(self.seconds, 1e-9):,.3g} rows/s"
        took = f"{self.seconds:.1f} s" if self.seconds < 60 else in_time(self.seconds)
        return f"{files}: {self.rows:,} rows, {in_bytes(nbytes)}; {self.made:,} made in {took}, {rate}"


class Run:
    """One call of ``generate``."""

    def __init__(self, options: Options, report: Report) -> None:
        self._options, self._report = options, report
        self._name, self._code = code_name(options.function), code_version(options.function)
        self._columns = "; ".join(
            f"{name}: {one.dtype} {one.shape}" if one else name
            for name, one in declared(options.columns).items()
        )
        self._first: First | None = None  # None if this call continues or extends existing rows

    def run(self) -> Generated:
        """Make the missing rows and complete the files; raise the errors that ``generate`` describes."""
        out = self._options.out
        if not folder_of(out).exists() and (there := self._there(Finished.at(out))) is not None:
            return there
        with Folder(out) as folder, closing(Journal(folder.folder)) as journal:
            is_begun = bool(journal.blocks) or journal.is_naming  # if False, no finished rows can be lost
            if not self._options.resume or not is_begun:
                finished = Finished.at(out)  # the lock is held, so no other process can make files now
                # The files may also belong to a job that ended before it removed its folder.
                if (there := self._there(finished)) is not None:
                    folder.remove()
                    return there
                folder.clear()
                try:
                    self._begin(journal, finished)
                except BaseException:
                    folder.remove()  # it contains nothing yet
                    raise
            job = self._checked_journal(journal)
            try:
                made = self._made(job, folder, journal)
            except (KeyboardInterrupt, OSError, GenerationError) as error:
                found = self._explained(error, journal.blocks, job)
                if isinstance(error, KeyboardInterrupt):
                    self._report.say(str(found), logging.WARNING)
                raise found from found.__cause__
            folder.remove()
        if job.rows < self._options.rows:  # the earlier job is complete, but more rows are wanted
            more = self.run()
            return replace(more, made=made.made + more.made)
        return made

    def _there(self, finished: Finished | None) -> Generated | None:
        """Return the result if the finished files have all ``n`` rows; None if rows are missing.

        Raises an error if the files were made with other options, have more rows, or if ``resume`` is false.
        """
        if finished is None:
            return None
        path, job, rows = finished.paths[0], finished.job, self._options.rows
        if not self._options.resume:
            raise OptionError(f"{path} exists; remove it to generate it again, or name another file")
        found = self._differences(job)
        if found:
            remedy = "Name another file, or remove it" + (_ACCEPT if job.code != self._code.digest else "")
            raise GenerationError(f"{path} exists, and {', '.join(found)}. {remedy}")
        if job.rows > rows:
            raise GenerationError(
                f"{path} has {job.rows:,} rows, and n={rows:,} is less: read its first ones, or name another "
                "file"
            )
        if job.rows < rows:
            return None
        failed = tuple((index, LEFT_OUT) for index in finished.skipped)
        return Generated(finished.paths, job.rows - len(failed), failed, finished.nan_rows)

    def _differences(self, job: Job) -> list[str]:
        """Describe how an existing job differs from this call; with ``resume="changed"``, ignore its code."""
        is_accepted = self._options.resume == "changed"
        return differences(replace(job, code=self._code.digest) if is_accepted else job, self._wanted(job))

    def _wanted(self, like: Job) -> Job:
        """Return the job that this call describes, with the schema of the existing job ``like``."""
        options = self._options
        return replace(
            like, function=self._name, code=self._code.digest, parts=self._code.parts, seed=options.seed,
            rows=options.rows, columns=self._columns, chunk_rows=options.chunk_rows,
            max_bytes=options.max_bytes, policy=options.policy, seeds_globals=options.seeds_globals,
        )  # fmt: skip

    def _checked_journal(self, journal: Journal) -> Job:
        """Return a journal's job; raise a GenerationError if it differs from this call or has more rows."""
        folder, rows = folder_of(self._options.out), self._options.rows
        removed = f"which removes {_rows_of(journal.blocks):,} rows"
        if journal.job is None:
            text = "is of a job, and its journal, which says of which, is damaged"
            raise GenerationError(f"{folder} {text}. Start again with resume=False (--no-resume), {removed}")
        job = Job.from_json(journal.job)
        found = self._differences(job)
        if not found and job.rows > rows:
            found = [f"it is of {job.rows:,} rows, and n={rows:,} is less"]
        if found:
            accept = _ACCEPT if job.code != self._code.digest else ""
            raise GenerationError(
                f"{folder} belongs to an unfinished job, but {', '.join(found)}. Continue with the "
                "arguments that it was started with; or start again with resume=False (--no-resume), "
                f"{removed}{accept}"
            )
        return replace(job, code=self._code.digest, parts=self._code.parts)

    def _begin(self, journal: Journal, finished: Finished | None) -> None:
        """Begin a job: write the job's description to the journal."""
        if finished is not None:
            wanted = self._wanted(finished.job)
            journal.begin(replace(wanted, extends=finished.job.rows, versions=versions()).as_json())
            return
        options = self._options
        first = self._first = first_row(options)
        shard_rows = None if options.max_bytes is None else max(1, options.max_bytes // first.row_nbytes)
        job = Job(
            self._name, self._code.digest, self._code.parts, options.seed, options.rows, first.schema,
            self._columns, options.chunk_rows, options.max_bytes, options.policy, options.seeds_globals,
            shard_rows, first.batch_rows, versions(),
        )  # fmt: skip
        journal.begin(job.as_json())

    def _made(self, job: Job, folder: Folder, journal: Journal) -> Generated:
        """Make the missing rows of a job, and complete the job's files."""
        old: Sequence[Path] = ()  # the files whose rows the job copies, and which the new files replace
        if job.extends and journal.is_naming:  # some of the files may be new files of the job already
            old = paths_of(self._options.out)
        elif job.extends and (finished := Finished.at(self._options.out)) is not None:
            old = finished.paths
        layout, made = layout_of(job, folder.folder), 0
        if not journal.is_naming:
            writer = Writer(layout)
            self._check_stored(journal, layout)
            folder.tidy(journal.blocks)
            self._take_over(job, journal, writer, old)
            made = self._make(job, journal, layout, writer)
            finish(job, layout, journal.blocks, self._report.step)
        with opened_folder(self._options.out) as here:
            paths = name_files(self._options.out, replace(layout, folder=Path(here)), journal, old)
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

    def _check_stored(self, journal: Journal, layout: Layout) -> None:
        """Check the rows that earlier calls have stored, and drop damaged blocks from the journal."""
        if not journal.blocks:
            return
        if journal.damaged:
            text = f"{journal.damaged:,} lines of the journal are damaged; the rows of these are made again"
            self._report.say(text, logging.WARNING)
        self._report.step("reading what is there")
        if lost := damaged(journal.blocks, layout):
            journal.drop(lost)
            text = f"{_rows_of(lost):,} rows are not as they were noted, and are made again"
            self._report.say(text, logging.WARNING)
        self._report.say(f"going on: {_rows_of(journal.blocks):,} of {layout.rows:,} rows are there")

    def _take_over(self, job: Job, journal: Journal, writer: Writer, old: Sequence[Path]) -> None:
        """Copy the rows of the finished files ``old``, except the rows of an incomplete last batch."""
        if not old:
            return
        align = max(job.batch_rows, 1)
        missing = Missing(job.extends // align * align, _noted(journal), align)
        row_nbytes = sum(path.stat().st_size for path in old) // max(job.extends, 1)
        with closing(OldRows(old, job.schema)) as rows:
            while (block := missing.take(max(1, _COPIED_NBYTES // max(row_nbytes, 1)))) is not None:
                stored = writer.put(rows.block(*block))
                writer.sync([stored])
                journal.add([stored])

    def _make(self, job: Job, journal: Journal, layout: Layout, writer: Writer) -> int:
        """Make the missing rows; return their number."""
        missing = Missing(job.rows, _noted(journal), max(job.batch_rows, 1))
        count = missing.left
        if not count:
            return 0
        workers = self._workers(self._options.task(job.schema, job.batch_rows), layout, writer, count)
        with workers, Interrupts(is_here=isinstance(workers, ThisThread)) as interrupts:
            self._report.begin(job.rows - count)
            expected = (self._first.row_s, self._first.row_nbytes) if self._first else None
            Schedule(workers, missing, journal, writer, self._report, interrupts, expected).run()
        return count

    def _workers(self, task: Task, layout: Layout, writer: Writer, rows: int) -> Workers:
        """Choose the workers by the options and by the duration of the rows, and start them."""
        options, count = self._options, self._options.most_workers
        if options.executor is not None and not isinstance(options.executor, str):
            asked = None if options.workers == "auto" else options.workers
            return Cluster(task, layout.folder, options.executor, asked)
        seconds = self._first.row_s * rows if self._first else math.inf
        if count == 0 or (options.workers == "auto" and seconds < _SHORT_S):
            return ThisThread(task, writer)
        are_threads = options.executor == "threads"
        if self._first and options.probe and seconds / count > _PROBED_S:
            with suppress(WorkerError, OSError):  # if a worker dies or cannot start, this is reported later
                found = look(task, rows, self._first.row_nbytes, count, are_threads, options.out)
                for line in found.lines():
                    self._report.say(line)
                if options.workers == "auto" and not found.best_workers:
                    return ThisThread(task, writer)
        if are_threads:
            return Threads(task, writer, count)
        try:
            return Processes(task, layout, count)
        except OSError as error:
            if options.workers != "auto":
                raise
            text = f"no worker processes can be started ({error}): this one makes the rows"
            self._report.say(text, logging.WARNING)
            return ThisThread(task, writer)

    def _explained(self, error: BaseException, blocks: Sequence[Stored], job: Job) -> BaseException:
        """Return the error with a message that says which rows are kept and how to continue."""
        out = self._options.out
        kept = f"{_rows_of(blocks):,} of {job.rows:,} rows are kept in {folder_of(out)}"
        again = f"{kept}; the same call goes on from there"
        if sum(len(one.failed) for one in blocks) == job.rows:
            again = "No row is kept"
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt(f"interrupted: {again}")
        if isinstance(error, GenerationError):
            return _of_row(error, again, job, self._options.function)
        if not isinstance(error, OSError) or isinstance(error, FastpipeError):
            return error
        text = error.strerror or str(error)
        if error.filename is not None:
            text += f": {os.fsdecode(error.filename)!r}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # HDF5's text has many lines
            text = f"{os.strerror(error.errno)} ({in_bytes(shutil.disk_usage(out.parent).free)} are free)"
        text = f"{text}; {again}"
        return type(error)(text) if error.errno is None else type(error)(error.errno, text)


def _rows_of(blocks: Sequence[Stored]) -> int:
    """Return the number of rows of blocks, including failed rows."""
    return sum(one.last - one.first for one in blocks)


def _noted(journal: Journal) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in journal.blocks]


_BY_VALUE = "<dynamic-code>"  # cloudpickle's name for the file of a function that it pickled by value


def _of_row(error: GenerationError, again: str, job: Job, function: Callable[..., Any]) -> GenerationError:
    alone, policy = "", ""
    if error.trace:
        name, index = job.function.split(":")[-1], error.index
        alone = f" Alone it is {name}({index}, np.random.default_rng([{job.seed}, {index}]))."
        policy = ". bad_samples='skip' leaves such rows out, and 'retry' draws again"
    plain = getattr(function, "func", function)  # unwrap a partial; an object's source is that of its class
    plain = plain if inspect.isfunction(inspect.unwrap(plain)) else type(plain)
    trace = error.trace.replace(_BY_VALUE, inspect.getsourcefile(plain) or _BY_VALUE)
    found = GenerationError(
        f"{str(error).rstrip('.')}.{alone} {again}{policy}", index=error.index, trace=trace
    )
    found.__cause__ = error.__cause__ or (_WorkerTraceError(trace) if trace else None)
    return found


class _WorkerTraceError(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"

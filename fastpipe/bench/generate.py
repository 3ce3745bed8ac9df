"""The case ``generate``: rows of a function, stored: a script's loop against ``fastpipe.generate``."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

import fastpipe
from fastpipe.bench.check import Outcome
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Plan
from fastpipe.bench.samples import (
    BATCH_ROWS,
    SEED,
    Function,
    made,
    quick,
    rows_of,
    slow,
    waves,
    waves_alone,
)
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus
from fastpipe.errors import OptionError

# ---- Rows: a loop, and fastpipe.generate -----------------------------------------------------------

Columns = dict[str, npt.NDArray[Any]]

_AT_ONCE = 1 << 20  # bytes that are written at a time
_FAST = "fastpipe.generate"


@dataclass(frozen=True)
class Section:
    """A function whose rows are made.

    Attributes:
        function: makes a row.
        row_s: about how long a row takes.
        chunk: rows are made in multiples of this.
        checked: so many are compared before anything is timed.
    """

    key: str
    label: str
    function: Function
    row_s: float
    chunk: int
    checked: int


SECTIONS = (
    Section("slow", "5 ms a row, rows of 4 kB", slow, 5e-3, 20, 24),
    Section("quick", "100 µs a row, rows of 4 kB", quick, 1e-4, 200, 300),
    Section("batch", "sums of sines, rows of 1 kB", waves, 4e-5, 4 * BATCH_ROWS, 600),
)


@dataclass(frozen=True)
class Spec:
    """One way to make rows.

    Attributes:
        section: whose rows.
        kind: the end of the row's key.
        workers: how many rows are made at a time; 0: they are made in this thread.
        executor: as of `fastpipe.generate`.
        function: makes the rows, where it is not the section's.
    """

    section: Section
    kind: str
    label: str
    group: Literal["replaced", "fastpipe", "peer"]
    workers: int = 0
    executor: Literal["processes", "threads"] = "processes"
    note: str = ""
    function: Function | None = None

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return f"{self.section.key}-{self.kind}"

    @property
    def info(self) -> RowInfo:
        """What the report calls it."""
        return RowInfo(
            self.key,
            self.label,
            self.group,
            None,
            "float32",
            self.note,
            section=self.section.key,
            unit="rows",
        )


class MadeRow:
    """A `Contender` that makes rows and stores them.

    A measurement lasts from the call to the file being closed.  The start of threads and processes is a part
    of it; their end only where they end before the file is closed, and the removal of the file never.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.key, self.chunk = spec, spec.key, spec.section.chunk
        self.workers = spec.workers if spec.executor == "processes" else 0
        self._function, self._folder = spec.function or spec.section.function, folder

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows.

        Raises:
            ContenderError: it cannot.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Nothing: all ends with each measurement."""

    def read(self, out: Path) -> Columns:
        """What a file holds."""
        with require("h5py", extra="generation").File(out, "r") as file:
            return {name: dataset[...] for name, dataset in file.items()}

    def measure(self, count: int) -> float:
        """Make and store so many rows in a new file; return the seconds it took."""
        with ExitStack() as later:
            out = self._out(later)
            start = time.perf_counter()
            self.make(count, out, later)
            return time.perf_counter() - start

    def stored(self, count: int) -> Columns:
        """So many rows, as they are read from a new file."""
        with ExitStack() as later:
            out = self._out(later)
            self.make(count, out, later)
            return self.read(out)

    def _out(self, later: ExitStack) -> Path:
        folder = later.enter_context(tempfile.TemporaryDirectory(dir=self._folder))
        return Path(folder, "rows.h5")


class LoopRow(MadeRow):
    """A script's loop: lists, ``np.stack``, and a file at the end."""

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        lists: dict[str, list[Any]] = {}
        for index in range(count):
            for name, value in made(self._function, index).items():
                lists.setdefault(name, []).append(value)
        with require("h5py", extra="generation").File(out, "w") as file:
            for name, values in lists.items():
                file.create_dataset(name, data=np.stack(values))


class FastRow(MadeRow):
    """`fastpipe.generate`."""

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        fastpipe.generate(
            self._function, count, out, seed=SEED, workers=self.spec.workers, executor=self.spec.executor,
            progress=False,
        )  # fmt: skip


def specs(section: Section, cores: int) -> list[tuple[Spec, type[MadeRow]]]:
    """A section's rows without peers; the loop that is replaced comes first."""
    is_batch = section.function is waves
    through = "through fn.batch" if is_batch else ""
    all_cores = f"{_FAST}(workers={cores}"
    found: list[tuple[Spec, type[MadeRow]]] = [
        (Spec(section, "replaced", "for loop, np.stack, h5py", "replaced"), LoopRow)
    ]
    if is_batch:
        label, without = f"{_FAST}(workers=0), row by row", "without fn.batch"
        found.append(
            (Spec(section, "single", label, "fastpipe", note=without, function=waves_alone), FastRow)
        )
    found += [
        (Spec(section, "alone", f"{_FAST}(workers=0)", "fastpipe", note=through), FastRow),
        (Spec(section, "workers", f"{all_cores})", "fastpipe", cores, note=through), FastRow),
    ]
    return found


# ---- Does each store what the function returns? ----------------------------------------------------


@dataclass
class StoredCheck(Outcome):
    """What was compared.

    Attributes:
        files: that were made and read.
        rows: in them.
    """

    whose = "what the function returns"
    told: ClassVar[tuple[str, ...]] = ("files", "rows")

    files: int = 0
    rows: int = 0
    problems: tuple[str, ...] = ()

    def agreement(self) -> str:
        """Return in words what agrees."""
        return (
            f"{self.rows:,} rows that were made in {self.files} ways, and read from their files, equal"
            " fn(i, np.random.default_rng([seed, i])) bit for bit, each in its place"
        )


def check_stored(rows: Sequence[MadeRow], say: Callable[[str], None] = lambda text: None) -> StoredCheck:
    """Make some rows in each way, read them, and compare them with what the function returns here."""
    check = StoredCheck()
    for row in rows:
        what = f"{row.spec.section.key}: {row.spec.label}"
        say(f"comparing: {what}")
        problem = problem_of(row)
        if problem is None:
            check.files, check.rows = check.files + 1, check.rows + row.spec.section.checked
        else:
            check.problems += (f"{what}: {problem}",)
    return check


def problem_of(row: MadeRow) -> str | None:
    """Return how rows that are made and stored differ from what the function returns, or None."""
    section = row.spec.section
    return difference(rows_of(section.function, section.checked), row.stored(section.checked))


def difference(expected: Columns, found: Columns) -> str | None:
    """How columns differ, or None."""
    if sorted(expected) != sorted(found):
        return f"columns are {sorted(found)}, expected {sorted(expected)}"
    for name, values in expected.items():
        others = found[name]
        if (others.dtype, others.shape) != (values.dtype, values.shape):
            return f"{name} is {others.dtype} {others.shape}, expected {values.dtype} {values.shape}"
        wrong = np.flatnonzero((others != values).reshape(len(values), -1).any(1))
        if len(wrong):
            return f"{name} differs in {len(wrong)} of {len(values)} rows, row {wrong[0]} is the first"
    return None


# ---- The case --------------------------------------------------------------------------------------

# Long, so that the start of processes is a small part: with two cores 9 s of work.
MEASURED_S = 4.5


def add_arguments(parser: argparse.ArgumentParser, sections: Sequence[Section] = SECTIONS) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--folder", metavar="FOLDER", type=Path,
        help="where files are written, and removed (default: the folder for temporary ones)")  # fmt: skip
    add("--section", action="append", choices=[one.key for one in sections], metavar="NAME",
        help="only this: " + ", ".join(one.key for one in sections)
        + "; may be given again (default: all)")  # fmt: skip
    add_run_arguments(parser)


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for; return 1 when rows are not those of the function.

    Raises:
        MissingDependencyError: h5py, which the script that is replaced needs, is not installed.
        OptionError: the folder is none.
    """
    require("h5py", extra="generation")
    if args.folder is not None and not args.folder.is_dir():
        raise OptionError(f"--folder: {str(args.folder)!r} is not a folder")
    with tempfile.TemporaryDirectory(prefix="fastpipe-bench-", dir=args.folder) as scratch:
        bench = (kind or Bench)(args, available_cpus(), progress, scratch=Path(scratch))
        return bench.run(console)


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "generate"
    every: ClassVar[Sequence[Section]] = SECTIONS
    scratch: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        asked = self.args.section
        self.sections = [one for one in self.every if not asked or one.key in asked]

    def plan(self) -> Plan:
        plan = super().plan()
        return plan if self.args.quick else replace(plan, seconds=MEASURED_S)

    def result(self) -> dict[str, Any] | None:
        self.begin()
        with ExitStack() as stack:
            made = [self._made(*pair) for section in self.sections for pair in self.specs(section)]
            if not self.passed(check := check_stored(made, self.progress.now)):
                return None
            session = self.measure([*made, *self.all_others(stack)])
            args = self.args
            words = [f"--folder {args.folder.resolve().name}"] if args.folder else []
            words += [f"--section {one}" for one in args.section or ()]
            about = f"row i is fn(i, np.random.default_rng([{SEED}, i]))"
            return self.content(
                session, check, words,
                data={"text": about, "name": "functions of the benchmark", "samples": 0, "sample_bytes": 0},
                sections={one.key: {"label": one.label} for one in self.sections},
                job={
                    "text": "Generation: rows of a function made and stored, from the call to the"
                    " closed file",
                    "short": f"rows of a function made and stored, {self.cores} workers",
                    "batch_size": 1, "replaces": "script",
                },
                main=f"{self.sections[0].key}-workers",
            )  # fmt: skip

    def specs(self, section: Section) -> list[tuple[Spec, type[MadeRow]]]:
        """Return a section's rows."""
        return specs(section, self.cores)

    def _made(self, spec: Spec, make: type[MadeRow]) -> MadeRow:
        self.infos[spec.key] = spec.info
        return make(spec, self.scratch)

"""The case ``generate`` compares a user's loop with ``fastpipe.generate``; both store rows of a function."""

from __future__ import annotations

import argparse
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

import fastpipe
from fastpipe.bench.check import Outcome
from fastpipe.bench.data import Say, unheard
from fastpipe.bench.driver import Case, add_run_arguments
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Plan, Session
from fastpipe.bench.samples import BATCH_ROWS, SEED, Function, made, quick, rows_of, slow, waves, waves_alone
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

Columns = dict[str, npt.NDArray[Any]]

_FAST = "fastpipe.generate"


@dataclass(frozen=True)
class Section:
    """A function that makes rows; it has its own section in the result."""

    key: str
    label: str
    function: Function
    row_s: float  # approximate seconds to make a row
    chunk: int  # the number of rows is a multiple of this number
    checked: int  # number of rows that are compared before all measurements


SECTIONS = (
    Section("slow", "5 ms a row, rows of 4 kB", slow, 5e-3, 20, 24),
    Section("quick", "100 µs a row, rows of 4 kB", quick, 1e-4, 200, 300),
    Section("batch", "sums of sines, rows of 1 kB", waves, 4e-5, 4 * BATCH_ROWS, 600),
)


@dataclass(frozen=True)
class Spec(RowInfo):
    """Describes one way to make rows."""

    unit: str = "rows"
    workers: int = 0  # number of workers; 0 makes the rows in this thread
    executor: Literal["processes", "threads"] = "processes"
    function: Function = slow
    of: Section = SECTIONS[0]  # the section of the row


def spec_of(
    of: Section, kind: str, label: str, group: str, workers: int = 0, function: Function | None = None,
    **more: Any,
) -> Spec:  # fmt: skip
    """Describe a way to make the rows of section ``of``, by default with the function of this section."""
    return Spec(
        f"{of.key}-{kind}", label, group, section=of.key, workers=workers, of=of,
        function=function or of.function, **more,
    )  # fmt: skip


class MadeRow(Contender):
    """Measures how fast rows are made and stored (a `Contender`).

    A measurement lasts from the call until the file is closed.  The start of threads and processes is
    included.  Their end is included only if it comes before the file is closed.  The removal of the file is
    not included.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.key, self.chunk = spec, spec.key, spec.of.chunk
        self.workers = spec.workers if spec.executor == "processes" else 0
        self._function, self._folder = spec.function, folder

    @abstractmethod
    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows; ``later`` receives callbacks that run after the clock has stopped."""

    def read(self, out: Path) -> Columns:
        with require("h5py", extra="generation").File(out, "r") as file:
            return {name: dataset[...] for name, dataset in file.items()}

    def measure(self, count: int) -> float:
        with ExitStack() as later:
            out = self._out(later)
            start = time.perf_counter()
            self.make(count, out, later)
            return time.perf_counter() - start

    def stored(self, count: int) -> Columns:
        with ExitStack() as later:
            out = self._out(later)
            self.make(count, out, later)
            return self.read(out)

    def _out(self, later: ExitStack) -> Path:
        return Path(later.enter_context(tempfile.TemporaryDirectory(dir=self._folder)), "rows.h5")


class LoopRow(MadeRow):
    """A user's loop, which collects rows in lists, stacks the lists, and writes a file at the end."""

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        lists: dict[str, list[Any]] = {}
        for index in range(count):
            for name, value in made(self._function, index).items():
                lists.setdefault(name, []).append(value)
        with require("h5py", extra="generation").File(out, "w") as file:
            for name, values in lists.items():
                file.create_dataset(name, data=np.stack(values))


class FastRow(MadeRow):
    def make(self, count: int, out: Path, later: ExitStack) -> None:
        fastpipe.generate(
            self._function, count, out, seed=SEED, workers=self.spec.workers, executor=self.spec.executor,
            progress=False,
        )  # fmt: skip


def row_of(spec: Spec, folder: Path) -> MadeRow:
    return (FastRow if spec.group == "fastpipe" else LoopRow)(spec, folder)


def specs(section: Section, cores: int) -> list[Spec]:
    is_batch = section.function is waves
    through = "through fn.batch" if is_batch else ""
    by_row = spec_of(section, "single", f"{_FAST}(workers=0), row by row", "fastpipe", function=waves_alone,
                     note="without fn.batch")  # fmt: skip
    return [
        spec_of(section, "replaced", "for loop, np.stack, h5py", "replaced"),
        *([by_row] if is_batch else []),
        spec_of(section, "alone", f"{_FAST}(workers=0)", "fastpipe", note=through),
        spec_of(section, "workers", f"{_FAST}(workers={cores})", "fastpipe", cores, note=through),
    ]


@dataclass
class StoredCheck(Outcome):
    """Compares stored rows with the results of the function that makes rows."""

    whose = "what the function returns"
    told: ClassVar[tuple[str, ...]] = ("files", "rows")

    files: int = 0
    rows: int = 0
    problems: tuple[str, ...] = ()

    def agreement(self) -> str:
        return (
            f"{self.rows:,} rows that were made in {self.files} ways, and read from their files, equal"
            " fn(i, np.random.default_rng([seed, i])) bit for bit, each in its place"
        )


def check_stored(rows: Sequence[MadeRow], say: Say = unheard) -> StoredCheck:
    """Make some rows in each way, read them, and compare them with the results of the function."""
    check = StoredCheck()
    for row in rows:
        what = f"{row.spec.section}: {row.spec.label}"
        say(f"comparing: {what}")
        problem = problem_of(row)
        if problem is None:
            check.files, check.rows = check.files + 1, check.rows + row.spec.of.checked
        else:
            check.problems += (f"{what}: {problem}",)
    return check


def problem_of(row: MadeRow) -> str | None:
    section = row.spec.of
    return difference(rows_of(section.function, section.checked), row.stored(section.checked))


def difference(expected: Columns, found: Columns) -> str | None:
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


# So long that the start of processes is a small part of it.  With two cores it is 9 s of work.
MEASURED_S = 4.5


class Bench(Case):
    case = "generate"
    about = "rows that a function makes, stored: a script's loop against fastpipe.generate"
    every: ClassVar[Sequence[Section]] = SECTIONS
    scratch: Path

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        keys = [one.key for one in cls.every]
        add = parser.add_argument
        add("--folder", metavar="FOLDER", type=Path,
            help="where files are written, and removed (default: the folder for temporary ones)")  # fmt: skip
        add("--section", action="append", choices=keys, metavar="NAME",
            help=f"only this: {', '.join(keys)}; may be given again (default: all)")  # fmt: skip
        add_run_arguments(parser)

    def plan(self) -> Plan:
        plan = super().plan()
        return plan if self.args.quick else replace(plan, seconds=MEASURED_S)

    def run(self, console: Console) -> int:
        require("h5py", extra="generation")
        folder = self.args.folder
        if folder is not None and not folder.is_dir():
            raise OptionError(f"--folder: {str(folder)!r} is not a folder")
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-", dir=folder) as scratch:
            self.scratch = Path(scratch)
            return super().run(console)

    def prepare(self) -> None:
        asked = self.args.section
        self.sections = [one for one in self.every if not asked or one.key in asked]
        self.main = f"{self.sections[0].key}-workers"

    def rows(self) -> list[MadeRow]:
        specs = [spec for section in self.sections for spec in self.specs(section)]
        return [self.added(spec, row_of(spec, self.scratch)) for spec in specs]

    def specs(self, section: Section) -> list[Spec]:
        return specs(section, self.cores)

    def compared(self, rows: Sequence[Any]) -> Outcome:
        return check_stored(rows, self.progress.now)

    def described(self, session: Session) -> dict[str, Any]:
        about = f"row i is fn(i, np.random.default_rng([{SEED}, i]))"
        return {
            "data": {
                "text": about, "name": "functions of the benchmark", "samples": 0, "sample_bytes": 0,
            },
            "sections": {one.key: {"label": one.label} for one in self.sections},
            "job": {
                "text": "Generation: rows of a function made and stored, from the call to the closed file",
                "short": f"rows of a function made and stored, {self.cores} workers",
                "batch_size": 1, "replaces": "script",
            },
        }  # fmt: skip

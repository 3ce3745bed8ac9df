"""The rows of the case that a script has without other libraries: its loop, and `fastpipe.generate`."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.generate.functions import (
    BATCH_ROWS,
    SEED,
    Function,
    Generators,
    made,
    motion,
    quick,
    slow,
    waves,
    waves_alone,
    wide,
)
from fastpipe.bench.results import RowInfo
from fastpipe.core.extras import require

__all__ = [
    "SECTIONS", "BareRow", "Columns", "FastRow", "LoopRow", "MadeRow", "Section", "Spec", "StoringRow",
    "specs", "write_rows",
]  # fmt: skip

Columns = dict[str, npt.NDArray[Any]]

_AT_ONCE = 1 << 20  # bytes that are written at a time
_FAST = "fastpipe.generate"


@dataclass(frozen=True)
class Section:
    """A function whose rows are made.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables.
        function: makes a row.
        row_s: about how long a row takes.
        chunk: rows are made in multiples of this.
        checked: so many are compared before anything is timed.
        has_peers: whether other libraries make them, too.
        has_threads: whether threads make rows at a time, as the function lets go of the interpreter's lock.
    """

    key: str
    label: str
    function: Function
    row_s: float
    chunk: int
    checked: int
    has_peers: bool = True
    has_threads: bool = False


SECTIONS = (
    Section("slow", "5 ms a row, rows of 4 kB", slow, 5e-3, 20, 24),
    Section("quick", "100 µs a row, rows of 4 kB", quick, 1e-4, 200, 300),
    Section("wide", "100 µs a row, rows of 16 kB", wide, 1e-4, 200, 300),
    Section("batch", "sums of sines, rows of 1 kB", waves, 4e-5, 4 * BATCH_ROWS, 600, has_peers=False),
    Section("motion", "about 1 ms a row, rows of 75 kB", motion, 1e-3, 20, 60, has_threads=True),
)


@dataclass(frozen=True)
class Spec:
    """One way to make rows.

    Attributes:
        section: whose rows.
        kind: the end of the row's key.
        label: its name in tables.
        group: as of `RowInfo`.
        workers: how many rows are made at a time; 0: they are made in this thread.
        executor: as of `fastpipe.generate`.
        note: what a reader should know about the row.
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


class MadeRow(ABC):
    """A `Contender` that makes rows.

    Args:
        spec: which one.
        folder: in which files are made.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.key, self.chunk = spec, spec.key, spec.section.chunk
        self.workers = spec.workers if spec.executor == "processes" else 0
        self._function, self._folder = spec.function or spec.section.function, folder

    @abstractmethod
    def measure(self, count: int) -> float:
        """Make so many rows; return the seconds it took."""

    @abstractmethod
    def stored(self, count: int) -> Columns:
        """So many rows, as they are read from the file."""

    def close(self) -> None:  # noqa: B027
        """Nothing: all ends with each measurement."""


class StoringRow(MadeRow):
    """One that stores them.

    A measurement lasts from the call to the file being closed.  The start of threads and processes is a part
    of it; their end only where they end before the file is closed, and the removal of the file never.
    """

    @abstractmethod
    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows.

        Args:
            count: how many.
            out: the file, in an empty folder.
            later: ends what is still there when the file is closed.

        Raises:
            ContenderError: it cannot.
        """

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


class LoopRow(StoringRow):
    """A script's loop: lists, ``np.stack``, and a file at the end."""

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows."""
        lists: dict[str, list[Any]] = {}
        for index in range(count):
            for name, value in made(self._function, index).items():
                lists.setdefault(name, []).append(value)
        with require("h5py", extra="generation").File(out, "w") as file:
            for name, values in lists.items():
                file.create_dataset(name, data=np.stack(values))


class FastRow(StoringRow):
    """`fastpipe.generate`."""

    def make(self, count: int, out: Path, later: ExitStack) -> None:
        """Make and store rows."""
        fastpipe.generate(
            self._function, count, out, seed=SEED, workers=self.spec.workers, executor=self.spec.executor,
            progress=False,
        )  # fmt: skip


class BareRow(MadeRow):
    """``fn.batch`` alone: generators are made before the clock starts, and nothing is stored."""

    def measure(self, count: int) -> float:
        """Make so many rows; return the seconds it took."""
        return sum(seconds for seconds, _ in self._batches(count))

    def stored(self, count: int) -> Columns:
        """So many rows."""
        parts = [part for _, part in self._batches(count)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _batches(self, count: int) -> Iterator[tuple[float, Columns]]:
        batch: Any = getattr(self._function, "batch")  # noqa: B009  # of a function, which has no such name
        for first in range(0, count, BATCH_ROWS):
            indices = np.arange(first, min(first + BATCH_ROWS, count))
            rngs = Generators(indices.tolist())
            start = time.perf_counter()
            found = batch(indices, rngs)
            yield time.perf_counter() - start, found


def specs(section: Section, cores: int) -> list[tuple[Spec, type[MadeRow]]]:
    """A section's rows without peers; the loop that is replaced comes first.

    Args:
        section: whose rows.
        cores: how many workers there are where there are any.
    """
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
    if section.has_threads:
        label = f'{all_cores}, executor="threads")'
        found.append((Spec(section, "threads", label, "fastpipe", cores, "threads"), FastRow))
    if is_batch:
        note = f"{BATCH_ROWS} rows a call; generators are made before, and nothing is stored"
        found.append((Spec(section, "bare", "fn.batch alone", "peer", note=note), BareRow))
    return found


def write_rows(out: Path, count: int, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows with h5py as they come, about a megabyte at a time.

    Args:
        out: the file.
        count: how many rows come.
        rows: they.
    """
    rows = iter(rows)
    first = next(rows)
    step = max(1, _AT_ONCE // sum(np.asarray(value).nbytes for value in first.values()))
    some, at = [first, *islice(rows, step - 1)], 0
    with require("h5py", extra="generation").File(out, "w") as file:
        for name, value in first.items():
            file.create_dataset(name, (count, *np.shape(value)), np.asarray(value).dtype)
        while some:
            for name in first:
                file[name][at : at + len(some)] = np.stack([row[name] for row in some])
            at, some = at + len(some), list(islice(rows, step))

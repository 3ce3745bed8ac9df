"""The case ``hdf5`` compares ``FastHDF5Dataset`` with users' datasets, which read an HDF5 file row by row."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.check import Outcome, RowCheck, digests_of_samples
from fastpipe.bench.data import Say, made_once, unheard
from fastpipe.bench.driver import Case, add_run_arguments
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, DrawnRow, Draws, Session, calibrate, consume
from fastpipe.bench.synthetic import mel_rows, write_table
from fastpipe.console import positive
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

# ---- Files -----------------------------------------------------------------------------------------

SHAPE = (64, 128)
ROWS, QUICK_ROWS = 16_384, 256
ROWS_IN_CHUNK = 16
_AT_ONCE = 1024

# For each section: its label, the compression of the chunks or None, and True if the dataset has chunks.
LAYOUTS: dict[str, tuple[str, str | None, bool]] = {
    "gzip": ("gzip(4) + shuffle", "gzip", True),
    "lzf": ("LZF + shuffle", "lzf", True),
    "plain": ("chunks, uncompressed", None, True),
    "contiguous": ("contiguous", None, False),
}


@dataclass(frozen=True)
class Table:
    key: str  # name of the section in the result
    label: str
    path: Path
    dataset: str  # path of the dataset in the file
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...] | None  # None if the dataset is contiguous
    is_packed: bool  # True if chunks must be decoded
    sample_dims: int = 1  # number of leading dimensions that index samples
    labels: str | None = None  # path of another dataset, with a number for each sample
    bytes: int = 0  # size of the dataset in the file

    @property
    def samples(self) -> int:
        return math.prod(self.shape[: self.sample_dims])

    @property
    def group(self) -> int:
        """Length of a chunk's first dimension; ``ROWS_IN_CHUNK`` if the dataset has no chunks."""
        return self.chunk[0] if self.chunk else ROWS_IN_CHUNK

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape[self.sample_dims :]) * np.dtype(self.dtype).itemsize

    def opened(self, **options: Any) -> Any:
        """Open the file with h5py and ``options``, and return it; load hdf5plugin's filters if installed."""
        if importlib.util.find_spec("hdf5plugin"):
            importlib.import_module("hdf5plugin")
        return require("h5py", extra="hdf5").File(self.path, "r", **options)

    def warm(self) -> None:
        """Read the file once, so that it is in the page cache."""
        with open(self.path, "rb") as file:
            while file.read(1 << 24):
                pass

    @property
    def described(self) -> dict[str, Any]:
        told = ("label", "shape", "dtype", "chunk", "samples", "sample_bytes", "bytes")
        return {name: getattr(self, name) for name in told}


def look(
    path: Path, dataset: str, key: str, label: str = "", *, sample_dims: int = 1, labels: str | None = None
) -> Table:
    """Describe a dataset in a file; raise an OptionError if it is missing or has no rows of numbers."""
    h5py = require("h5py", extra="hdf5")
    try:
        with h5py.File(path, "r") as file:
            found = file.get(dataset)
            if not isinstance(found, h5py.Dataset):
                known = ", ".join(name for name, value in file.items() if isinstance(value, h5py.Dataset))
                raise OptionError(f"{path.name!r} has no dataset {dataset!r}; it has: {known or 'none'}")
            is_plain = found.dtype.kind in "iuf" and found.dtype.isnative
            if not is_plain or found.ndim < 2 or found.size == 0:
                raise OptionError(
                    f"dataset {dataset!r} must have rows of numbers as torch has them, got {found.dtype}"
                    f" of shape {found.shape}"
                )
            filters = [name for name in (found.compression, found.shuffle and "shuffle") if name]
            words = " + ".join(filters) or ("chunks, uncompressed" if found.chunks else "contiguous")
            is_packed = found.id.get_create_plist().get_nfilters() > 0
            return Table(
                key, label or words, path, dataset, found.shape, str(found.dtype), found.chunks, is_packed,
                sample_dims, labels, found.id.get_storage_size(),
            )  # fmt: skip
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read as HDF5: {error}") from None


def made_tables(
    rows: int = ROWS,
    cache: Path | None = None,
    say: Say = unheard,
    layouts: Mapping[str, tuple[str, str | None, bool]] = LAYOUTS,
) -> list[Table]:
    """Return a table of ``rows`` log-mel spectrograms for each layout; the first call makes the files."""
    shape = (rows, *SHAPE)

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(0)
        for first in range(0, rows, _AT_ONCE):
            yield mel_rows(rng, min(_AT_ONCE, rows - first))

    def fill(folder: Path) -> None:
        folder.mkdir()
        for key, (_, compression, is_chunked) in layouts.items():
            chunk = (ROWS_IN_CHUNK, *SHAPE) if is_chunked else None
            write_table(folder / f"{key}.h5", "mels", parts(), shape, chunk=chunk, compression=compression)

    is_all = list(layouts) == list(LAYOUTS)
    name = f"mels-1-{rows}" + ("" if is_all else f"-{'-'.join(layouts)}")
    what = "four layouts" if is_all else ", ".join(layouts)
    folder = made_once(name, fill, f"{rows:,} log-mels in {what}", cache, say)
    return [look(folder / f"{key}.h5", "mels", key, label) for key, (label, *_) in layouts.items()]


# ---- The readers of scripts ------------------------------------------------------------------------


class RowByRow:
    """The dataset that ``FastHDF5Dataset`` replaces.  Each worker opens the file at its first read, and reads
    single rows."""

    def __init__(self, table: Table, **options: Any) -> None:
        self._table, self._options = table, options
        self._file: Any = None

    def __len__(self) -> int:
        return self._table.samples

    def __getitem__(self, index: int) -> Any:
        table = self._table
        if self._file is None:
            self._file = table.opened(**self._options)
            self._values = self._file[table.dataset]
            self._labels = None if table.labels is None else self._file[table.labels]
        where = tuple(map(int, np.unravel_index(index, table.shape[: table.sample_dims])))
        value = require("torch", extra="torch").from_numpy(self.values(where))
        return value if self._labels is None else (value, int(self._labels[where]))

    def values(self, where: tuple[int, ...]) -> Any:
        return self._values[where]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._values = self._labels = None


# ---- Rows ------------------------------------------------------------------------------------------

# Number of chunks whose rows are mixed at a time, by loaders that mix only the rows of some chunks.
WINDOW = 64

Kind = Literal["rows", "named", "ordered", "stock", "window", "uniform", "ram"]
MakeLoader = Callable[["TableSpec", Table, "Draws | None"], Any]
_FAST = "FastHDF5Dataset + FastLoader"
_WORKERS = 4  # number of worker processes


@dataclass(frozen=True)
class TableSpec(RowInfo):
    """Describes one loader to measure.

    ``kind`` says how the loader reads.  ``"rows"`` reads row by row.  ``"named"`` also looks up the dataset
    for each row.  ``"ordered"`` reads chunk by chunk.  Loaders of all other kinds read fastpipe's dataset.
    ``"stock"`` (torch's loader) and ``"window"`` (fastpipe's) mix the rows of some chunks at a time.
    ``"uniform"`` and ``"ram"`` mix all rows.  ``"ram"`` also keeps all chunks in memory.
    """

    num_workers: int = 0
    kind: Kind = "rows"
    batch_size: int = 1
    threads: int | Literal["auto"] = "auto"
    make: MakeLoader | None = None  # function that builds the loader; None for `loader_of`


def spec_of(
    table: Table, kind: Kind, label: str, group: str, batch_size: int, name: str = "", **more: Any
) -> TableSpec:
    """Describe a loader of a table; the description's key ends with ``name``, by default with ``kind``."""
    usual: dict[str, Any] = {"section": table.key, "unit": "samples", "output": table.dtype}
    key = f"{table.key}-{name or kind}"
    return TableSpec(key, label, group, kind=kind, batch_size=batch_size, **usual, **more)


def specs_of(table: Table, batch_size: int) -> list[TableSpec]:
    """Describe the loaders to measure on a table; the loader that fastpipe replaces comes first."""
    made: Callable[..., TableSpec] = partial(spec_of, table, batch_size=batch_size)
    has_windows = table.is_packed and table.group > 1
    note, cold, stock = f"{WINDOW} chunks mixed at a time", 'cache="off"', "FastHDF5Dataset + DataLoader"
    specs = [made("rows", "row by row + DataLoader", "replaced", name="replaced")]
    if has_windows:
        specs += [
            made("stock", stock, "stock", note=note),
            made("stock", f"{stock}(num_workers={_WORKERS})", "stock", name="workers", num_workers=_WORKERS,
                 note=f"{note}; decoded by one process for all"),
            made("window", f"{_FAST}, windows", "fastpipe", note=f"{note}; {cold}"),
        ]  # fmt: skip
    note = f"each order as likely as any other; {cold}"
    note += "; a chunk is decoded for each of its rows" if has_windows else ""
    specs.append(made("uniform", f"{_FAST}, all rows", "fastpipe", note=note))
    if table.is_packed:
        note = "all rows, from the second epoch on"
        specs.append(made("ram", f'{_FAST}, cache="ram"', "fastpipe", note=note))
    return specs


def table_dataset(table: Table, cache: Any, threads: int | Literal["auto"] = "auto") -> Any:
    keys = table.dataset if table.labels is None else [table.dataset, table.labels]
    return fastpipe.FastHDF5Dataset(
        str(table.path), keys, sample_dims=table.sample_dims, cache=cache, seed=0, threads=threads
    )


def loader_of(spec: TableSpec, table: Table, draws: Draws | None = None) -> Any:
    data = require("torch.utils.data", extra="torch")
    workers: dict[str, Any] = {"num_workers": spec.num_workers, "persistent_workers": spec.num_workers > 0}
    window = fastpipe.Shuffle(WINDOW, "group")
    if spec.kind == "rows":
        return data.DataLoader(RowByRow(table), spec.batch_size, sampler=draws, **workers)
    everything = 5 * table.samples * (table.sample_bytes + 64)  # the tables of all layouts share one cache
    cache = fastpipe.Cache("ram", max_bytes=everything) if spec.kind == "ram" else "off"
    dataset = table_dataset(table, cache, spec.threads)
    if spec.kind == "stock":
        batches = dataset.batch_sampler(spec.batch_size, shuffle=window)
        return data.DataLoader(dataset, batch_sampler=batches, **workers)
    shuffle = window if spec.kind == "window" else True
    return fastpipe.FastLoader(dataset, spec.batch_size, shuffle, workers="processes", **workers)


class TableRow(DrawnRow):
    """Measures a loader that iterates over a table (a `Contender`).

    A loader that reads row by row reads as many random rows as a measurement needs.  All other loaders
    iterate whole epochs.
    """

    def __init__(self, spec: TableSpec, table: Table) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        burst = spec.batch_size * max(1, spec.num_workers)
        self.is_drawn = spec.kind in ("rows", "named")
        self.draws = Draws(range(table.samples), burst)
        self.chunk = burst if self.is_drawn else table.samples
        with quiet():
            make = spec.make or loader_of
            self.loader = make(spec, table, self.draws if self.is_drawn else None)

    def measure(self, count: int) -> float:
        epochs = 1 if self.is_drawn else count // self.chunk
        with quiet():
            batches = chain.from_iterable(repeat(self.batches(count), epochs))
            seconds = consume(batches, count, any_number=True)
        # In a process, the HDF5 library has one cache of chunks for each file, with the size that the first
        # opening requested.  So the file is closed, for rows that open the file with another size.
        if isinstance(self.loader.dataset, RowByRow):
            self.loader.dataset.close()
        return seconds


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings about slow options of loaders that are measured on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples are compressed together")
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def best_workers(
    spec: TableSpec, table: Table, counts: Sequence[int], seconds: float, say: Say = unheard
) -> TableSpec:
    """Measure each number of workers in ``counts`` shortly; return ``spec`` with the fastest number."""
    rates = {}
    for count in counts:
        row = TableRow(replace(spec, num_workers=count), table)
        try:
            samples = calibrate(row, seconds)
            rates[count] = samples / row.measure(samples)
        finally:
            row.close()
    best = max(rates, key=rates.__getitem__)
    found = ", ".join(f"{count}: {rate:,.0f}" for count, rate in rates.items())
    say(f"{table.label}: {spec.label}: samples/s by num_workers: {found}; taken: {best}")
    note = f"num_workers={best}, the best of {', '.join(map(str, counts))}"
    return replace(
        spec, num_workers=best, label=f"{spec.label}(num_workers={best})",
        note=f"{note}; {spec.note}" if spec.note else note,
    )  # fmt: skip


# ---- Are the batches equal to the rows of the file? ------------------------------------------------


def check_rows(pairs: Iterable[tuple[Table, TableSpec]], say: Say = unheard) -> RowCheck:
    """Compare an epoch of each loader, or two epochs if it caches chunks, with the values that h5py reads."""
    check = RowCheck()
    expected: tuple[str, Counter[bytes]] = "", Counter()
    for table, spec in pairs:
        if expected[0] != table.key:
            expected = table.key, digests_of(table)
        say(f"comparing: {table.label}: {spec.label}")
        with quiet():
            loader = loader_of(spec, table)
            for epoch in range(2 if spec.kind == "ram" else 1):
                check.add(f"{table.label}: {spec.label}, epoch {epoch}", expected[1], loader)
    return check


def digests_of(table: Table) -> Counter[bytes]:
    """Return the digests of all samples that h5py reads; count how often each digest occurs."""
    found: Counter[bytes] = Counter()
    with table.opened() as file:
        for first in range(0, table.shape[0], _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            values = file[table.dataset][part].reshape(-1, *table.shape[table.sample_dims :])
            labels = None if table.labels is None else file[table.labels][part].reshape(-1)
            found.update(digests_of_samples(values, labels))
    return found


# ---- The case: its options, its rows, its result ----------------------------------------------------

WORKER_COUNTS = (0, 1, 2, 4)
_CHOICE_S = 1.0


class Bench(Case):
    case = "hdf5"
    about = "rows of HDF5 files: h5py + DataLoader against FastHDF5Dataset + FastLoader"
    quick_s = 0.05
    tables: list[Table]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--data", metavar="FILE.h5", type=Path,
            help="your own file, instead of made-up log-mels; with --key")  # fmt: skip
        add("--key", metavar="PATH", help="the dataset in it; samples are its rows")
        add("--folder", metavar="FOLDER", type=Path,
            help="where made data is kept, 2 GB (default: the user's cache folder)")  # fmt: skip
        add("--samples", type=positive(int), metavar="N", help=f"rows to make (default: {ROWS:,})")
        add("--batch-size", type=positive(int), default=64, metavar="N",
            help="samples in a batch (default: 64)")  # fmt: skip
        add_run_arguments(parser)

    @property
    def samples(self) -> int:
        return int(self.args.samples or (QUICK_ROWS if self.args.quick else ROWS))

    def prepare(self) -> None:
        args = self.args
        if (args.data is None) != (args.key is None):
            raise OptionError("--data and --key go together: a file and the dataset in it")
        if args.data is not None:
            self.tables = [look(args.data, args.key, "file")]
        else:
            self.tables = made_tables(self.samples, args.folder, self.progress.done)

    def rows(self) -> Sequence[Contender]:
        first = self.tables[0]
        self.main = f"{first.key}-{'window' if first.is_packed else 'uniform'}"
        for table in self.tables:
            table.warm()
        chosen = [(table, self._chosen(table, spec)) for table, spec in self.specs()]
        return self.opened((spec, partial(TableRow, spec, table)) for table, spec in chosen)

    def specs(self) -> Iterator[tuple[Table, TableSpec]]:
        for table in self.tables:
            for spec in specs_of(table, min(self.args.batch_size, table.samples)):
                yield table, spec

    def worker_counts(self) -> tuple[Sequence[int], float]:
        """Return the numbers of workers to try for a user's own loader, and the seconds for each number."""
        return ((0, 1), 0.05) if self.args.quick else (WORKER_COUNTS, _CHOICE_S)

    def _chosen(self, table: Table, spec: TableSpec) -> TableSpec:
        """Return ``spec``; if it is a user's own loader, set its fastest number of workers."""
        if spec.group not in ("replaced", "peer"):
            return spec
        return best_workers(spec, table, *self.worker_counts(), self.progress.done)

    def compared(self, rows: Sequence[Any]) -> Outcome:
        tables = {table.key: table for table in self.tables}
        ours = (row.spec for row in rows if row.spec.group in ("stock", "fastpipe"))
        return check_rows(((tables[spec.section], spec) for spec in ours), self.progress.now)

    def described(self, session: Session) -> dict[str, Any]:
        args, first = self.args, self.tables[0]
        shape = "×".join(map(str, first.shape[1:])) or "1"
        return {
            "data": {"name": args.data.name if args.data else "made-up log-mels", **first.described},
            "sections": {table.key: table.described for table in self.tables},
            "job": {"text": f"HDF5: rows of {shape} {first.dtype}, shuffled, batches of {args.batch_size}",
                    "short": f"HDF5 rows of {shape}, batch {args.batch_size}", "batch_size": args.batch_size},
            "plan": str(table_dataset(first, "off").plan),
        }  # fmt: skip

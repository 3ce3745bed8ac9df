"""The case ``hdf5``: rows of HDF5 files, read one by one by many scripts, against ``FastHDF5Dataset``."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

import fastpipe
from benchmarks.cases.hdf5 import (
    TABLE_PEERS,
    TablePeerRow,
    first_batch_targets,
    memory_target,
    peers_of,
    rate_targets,
    row_info,
)
from benchmarks.peers.rows import interpreter
from benchmarks.studies.hdf5_evaluate import FileByFile, Grouped, evaluation_infos, section_of
from benchmarks.studies.hdf5_first import first_batches
from benchmarks.studies.hdf5_memory import memory_of_trees
from fastpipe._extras import require
from fastpipe.bench import machine
from fastpipe.bench.check import RowCheck, digests_of_samples
from fastpipe.bench.data import made_once
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.loaders import Draws, touch
from fastpipe.bench.orders import windows
from fastpipe.bench.results import RowInfo, entries, verdict
from fastpipe.bench.runner import Contender, ContenderError, calibrate
from fastpipe.bench.synthetic import log_mels, mel_rows, read_wav, write_table
from fastpipe.console import Progress, positive
from fastpipe.errors import OptionError

__all__ = [
    "BITSHUFFLE",
    "CELLS",
    "FEW",
    "LAYOUTS",
    "WINDOW",
    "WORKER_COUNTS",
    "InOrder",
    "RowByRow",
    "RowCheck",
    "Sizes",
    "Table",
    "TableRow",
    "TableSpec",
    "WindowBatches",
    "add_arguments",
    "best_workers",
    "check_rows",
    "described",
    "digests_of",
    "loader_of",
    "look",
    "made_cells",
    "made_chunks",
    "made_tables",
    "quiet",
    "run",
    "specs_of",
    "table_dataset",
    "wav_rows",
]


# ----------------------------------------------------------------------------------------------------
# The case ``hdf5``: rows of HDF5 files, read one by one by many scripts, against ``FastHDF5Dataset``.
#
# =========== ===================================================================== ``case`` its options,
# its rows, its result ``data`` which files are read ``rows`` the rows: loaders in this process
# ``sources`` the datasets and loops that scripts have without fastpipe ``peers`` the rows: other readers,
# each in its own process ``evaluate`` the rows: a model judged file by file ``check`` are the batches the
# rows of the file? ``first`` time to the first batch, in fresh processes ``memory`` memory of the process
# tree, in fresh processes ``targets`` what was asked for, and whether it is met ===========
# =====================================================================

__all__: list[str] = []


# ---- Which HDF5 files the benchmark reads -----------------------------------------------------------

SHAPE = (64, 128)
ROWS_IN_CHUNK = 16
# Segments of a file: (long, short, bands, frames), 1 KiB each; in another file fewer.
CELLS, FEW = (10, 20, 16, 16), (3, 4, 16, 16)
_AT_ONCE = 1024

# Section → its name, how its chunks are compressed (None: not), whether there are chunks.
LAYOUTS: dict[str, tuple[str, str | None, bool]] = {
    "gzip": ("gzip(4) + shuffle", "gzip", True),
    "lzf": ("LZF + shuffle", "lzf", True),
    "plain": ("chunks, uncompressed", None, True),
    "contiguous": ("contiguous", None, False),
}
# Where hdf5plugin is there, which h5py reads it by.
BITSHUFFLE = "bitshuffle"


@dataclass(frozen=True)
class Sizes:
    """How much data is made up.

    Attributes:
        rows: of each of the four layouts.
        files: in the file of cells.
        few: in that of few cells each.
        chunks: of the file with many chunks.
    """

    rows: int = 16_384
    files: int = 704
    few: int = 8192
    chunks: int = 100_000


@dataclass(frozen=True)
class Table:
    """A dataset of a file.

    Attributes:
        key: the section of the result.
        label: what the report calls it.
        path: the file.
        dataset: the dataset's path in it.
        shape, dtype: the dataset's.
        chunk: of its chunks; None where it is contiguous.
        is_packed: whether chunks have to be decoded.
        sample_dims: how many dimensions count samples.
        labels: another dataset, of a number for each sample.
        bytes: what the file's dataset takes.
    """

    key: str
    label: str
    path: Path
    dataset: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...] | None
    is_packed: bool
    sample_dims: int = 1
    labels: str | None = None
    bytes: int = 0

    @property
    def samples(self) -> int:
        """How many there are."""
        return math.prod(self.shape[: self.sample_dims])

    @property
    def group(self) -> int:
        """Samples of a chunk along the first dimension, or as many as a chunk would have."""
        return self.chunk[0] if self.chunk else ROWS_IN_CHUNK

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample."""
        return math.prod(self.shape[self.sample_dims :]) * np.dtype(self.dtype).itemsize

    def opened(self, **options: Any) -> Any:
        """The file, opened by h5py with these options, and with the filters that it needs."""
        if self.key == BITSHUFFLE:
            require("hdf5plugin", extra="hdf5")
        return require("h5py", extra="hdf5").File(self.path, "r", **options)

    def warm(self) -> None:
        """Read the file once, so that the page cache has it."""
        with open(self.path, "rb") as file:
            while file.read(1 << 24):
                pass


def look(
    path: Path, dataset: str, key: str, label: str = "", *, sample_dims: int = 1, labels: str | None = None
) -> Table:
    """A dataset of an existing file.

    Raises:
        OptionError: it is not there, or has nothing to read.
    """
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


def wav_rows(folder: Path) -> Callable[[np.random.Generator, int], npt.NDArray[np.float32]]:
    """A maker of rows like those of `mel_rows`, cut anywhere from the WAV files of a folder.

    Raises:
        OptionError: there are too few.
    """
    files = sorted(folder.glob("*.wav"))
    sounds = [log_mels(*read_wav(file), bands=SHAPE[0]) for file in files]
    whole = np.concatenate(sounds, axis=1) if sounds else np.empty((SHAPE[0], 0), np.float32)
    if whole.shape[1] < 2 * SHAPE[1]:
        raise OptionError(f"{str(folder)!r} must have WAV files of some seconds, got {len(files)} files")

    def rows(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
        starts = rng.integers(0, whole.shape[1] - SHAPE[1], count)
        return np.stack([whole[:, start : start + SHAPE[1]] for start in starts.tolist()])

    return rows


def made_tables(
    sizes: Sizes,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    wav: Path | None = None,
    layouts: Collection[str] = tuple(LAYOUTS),
) -> list[Table]:
    """Log-mel rows in some layouts, made once.

    Args:
        sizes: how many.
        cache: where, if not in the user's cache folder.
        say: told what takes long.
        wav: take them from WAV files.
        layouts: keys of ``LAYOUTS``, or ``BITSHUFFLE``.
    """
    every = {**LAYOUTS, BITSHUFFLE: ("bitshuffle + LZ4", BITSHUFFLE, True)}
    chosen = {key: every[key] for key in layouts}
    rows = mel_rows if wav is None else wav_rows(wav)
    shape = (sizes.rows, *SHAPE)

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(0)
        for first in range(0, sizes.rows, _AT_ONCE):
            yield rows(rng, min(_AT_ONCE, sizes.rows - first))

    def fill(folder: Path) -> None:
        folder.mkdir()
        for key, (_, compression, is_chunked) in chosen.items():
            chunk = (ROWS_IN_CHUNK, *SHAPE) if is_chunked else None
            write_table(folder / f"{key}.h5", "mels", parts(), shape, chunk=chunk, compression=compression)

    name = f"mels-1-{sizes.rows}" + ("" if wav is None else f"-{wav.resolve().name}")
    name += "" if list(chosen) == list(LAYOUTS) else f"-{'-'.join(chosen)}"
    what = "four layouts" if list(chosen) == list(LAYOUTS) else ", ".join(chosen)
    folder = made_once(name, fill, f"{sizes.rows:,} log-mels in {what}", cache, say)
    return [look(folder / f"{key}.h5", "mels", key, label) for key, (label, *_) in chosen.items()]


def made_cells(
    files: int,
    shape: tuple[int, int, int, int],
    key: str,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Table:
    """Segments of 1 KiB, with a label each, in chunks of those of the same file and long one.

    Args:
        files: how many.
        shape: of a file's: (long, short, bands, frames).
        key: the section of the result.
        cache: where, if not in the user's cache folder.
        say: told what takes long.
    """
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.integers(0, 4, files), math.prod(shape[:2]))

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        for _ in range(files):
            yield mel_rows(rng, math.prod(shape[:2]), shape[2:]).reshape(1, *shape)

    def fill(folder: Path) -> None:
        folder.mkdir()
        write_table(
            folder / "cells.h5", "segments", parts(), (files, *shape), chunk=(1, 1, *shape[1:]),
            compression="gzip", labels=labels.reshape(files, *shape[:2]),
        )  # fmt: skip

    folder = made_once(f"{key}-1-{files}", fill, f"segments of {files:,} files", cache, say)
    label = "segments of 1 KiB, gzip(4) + shuffle"
    return look(folder / "cells.h5", "segments", key, label, sample_dims=3, labels="labels")


def made_chunks(
    sizes: Sizes, cache: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Table:
    """Rows of 1 KiB, each a chunk of its own."""

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(0)
        for first in range(0, sizes.chunks, _AT_ONCE):
            yield mel_rows(rng, min(_AT_ONCE, sizes.chunks - first), CELLS[2:])

    def fill(folder: Path) -> None:
        folder.mkdir()
        write_table(
            folder / "chunks.h5", "mels", parts(), (sizes.chunks, *CELLS[2:]), chunk=(1, *CELLS[2:]),
            compression="gzip",
        )  # fmt: skip

    folder = made_once(f"chunks-1-{sizes.chunks}", fill, f"a file of {sizes.chunks:,} chunks", cache, say)
    return look(folder / "chunks.h5", "mels", "rows", "rows of 1 KiB, gzip(4), a chunk each")


def described(table: Table) -> dict[str, Any]:
    """A table for the JSON file."""
    return {
        "label": table.label,
        "shape": list(table.shape),
        "dtype": table.dtype,
        "chunk": None if table.chunk is None else list(table.chunk),
        "samples": table.samples,
        "sample_bytes": table.sample_bytes,
        "bytes": table.bytes,
    }


# ---- What scripts read HDF5 files with where they have no fastpipe ----------------------------------

# A prime well above a hundred times the chunks that are held, as HDF5's documents advise.
_SLOTS = 100_003


class RowByRow:
    """The dataset that the case replaces: the file is opened by each worker when it first reads, and a row is
    read by its number.

    Args:
        table: what to read.
        cache_bytes: HDF5's cache of decoded chunks; None leaves it as it is (1 MiB in most versions).
        is_by_name: whether the dataset is asked of the file anew for each row, as many scripts do.
    """

    def __init__(self, table: Table, cache_bytes: int | None = None, *, is_by_name: bool = False) -> None:
        self._table, self._cache_bytes, self._is_by_name = table, cache_bytes, is_by_name
        self._file: Any = None
        self._values: Any = None
        self._labels: Any = None

    def __len__(self) -> int:
        return self._table.samples

    def __getitem__(self, index: int) -> Any:
        if self._values is None:
            self._open()
        place = np.unravel_index(index, self._table.shape[: self._table.sample_dims])
        where = tuple(map(int, place))
        values = self._file[self._table.dataset] if self._is_by_name else self._values
        value = require("torch", extra="torch").from_numpy(values[where])
        return value if self._labels is None else (value, int(self._labels[where]))

    def _open(self) -> None:
        options: dict[str, Any] = {}
        if self._cache_bytes is not None:
            options = {"rdcc_nbytes": self._cache_bytes, "rdcc_nslots": _SLOTS, "rdcc_w0": 0}
        file = self._table.opened(**options)
        self._labels = None if self._table.labels is None else file[self._table.labels]
        self._file, self._values = file, file[self._table.dataset]

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
        self._file = self._values = self._labels = None


class WindowBatches:
    """Batches of numbers that take the chunks of a table apart a window at a time.

    Args:
        table: what is read.
        batch_size: samples in a batch.
        window: chunks at a time.
    """

    def __init__(self, table: Table, batch_size: int, window: int) -> None:
        self._table, self._batch_size, self._window = table, batch_size, window
        self._rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return math.ceil(self._table.samples / self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rest: list[int] = []
        for _, rows in windows(self._table.samples, self._table.group, self._window, self._rng):
            rest += rows.tolist()
            while len(rest) >= self._batch_size:
                yield rest[: self._batch_size]
                rest = rest[self._batch_size :]
        if rest:
            yield rest


class InOrder:
    """A `Contender` that reads whole chunks in order with h5py, in one thread, and does nothing else.

    Args:
        table: what to read.
        key: its name in the results.
    """

    workers = 0

    def __init__(self, table: Table, key: str) -> None:
        self.key, self.chunk = key, table.group
        self._table = table

    def measure(self, count: int) -> float:
        """Read so many rows; return the seconds it took."""
        group, rows = self._table.group, self._table.shape[0]
        out: npt.NDArray[Any] = np.empty((group, *self._table.shape[1:]), self._table.dtype)
        place = 0
        start = time.perf_counter()
        with self._table.opened() as file:
            dataset = file[self._table.dataset]
            while count > 0:
                size = min(group, rows - place, count)
                dataset.read_direct(out, np.s_[place : place + size], np.s_[:size])
                count, place = count - size, (place + size) % rows
        return time.perf_counter() - start

    def close(self) -> None:
        """Nothing is open between measurements."""


# ---- The rows of the case that are loaders in this process ------------------------------------------

# Chunks whose rows are mixed, in all rows that mix some at a time.
WINDOW = 64

Kind = Literal["rows", "named", "ordered", "stock", "window", "uniform", "ram"]
_FAST = "FastHDF5Dataset + FastLoader"
_WORKERS = 4  # processes


@dataclass(frozen=True)
class TableSpec:
    """One loader to measure.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables.
        group: as of `RowInfo`.
        kind: ``"rows"`` reads row by row, ``"named"`` too and looks up the dataset for each, ``"ordered"``
            chunk after chunk; the others are fastpipe's: ``"stock"`` in torch's loader and ``"window"`` mix
            the rows of some chunks at a time, ``"uniform"`` and ``"ram"`` mix all rows, the latter with all
            chunks kept in memory.
        batch_size: samples in a batch.
        num_workers: as for ``DataLoader``.
        note: what a reader should know about the row.
        threads: of ``fastpipe.FastHDF5Dataset``.
    """

    key: str
    label: str
    group: Literal["replaced", "stock", "fastpipe", "peer"]
    kind: Kind
    batch_size: int
    num_workers: int = 0
    note: str = ""
    threads: int | Literal["auto"] = "auto"

    def info(self, table: Table) -> RowInfo:
        """What the report calls it."""
        return RowInfo(
            self.key, self.label, self.group, self.num_workers, table.dtype, self.note,
            section=table.key, unit="samples",
        )  # fmt: skip


def specs_of(table: Table, batch_size: int) -> list[TableSpec]:
    """The loaders that are measured on a table; those of scripts without fastpipe come first."""
    key = table.key
    cold = 'cache="off"'
    specs = [
        TableSpec(f"{key}-replaced", "row by row + DataLoader", "replaced", "rows", batch_size),
    ]
    if table.key == "cells":
        name, note = f'{_FAST}, cache="ram"', "all rows, from the second epoch on"
        return [*specs, TableSpec("cells-ram", name, "fastpipe", "ram", batch_size, note=note)]
    if not table.is_packed:  # where the rest of a row's time is small
        note = "`file[name][row]`: the dataset is looked up for each row"
        specs.append(
            TableSpec(
                f"{key}-named", "row by row by name + DataLoader", "peer", "named", batch_size, note=note
            )
        )
    has_windows = table.is_packed and table.group > 1
    if table.chunk is not None and table.group > 1:
        note = f"HDF5's cache holds two windows of {WINDOW} chunks"
        note += ", here everything" if 2 * WINDOW * table.group >= table.samples else ""
        specs.append(
            TableSpec(
                f"{key}-ordered", "chunk by chunk + DataLoader", "peer", "ordered", batch_size, note=note
            )
        )
    if has_windows:
        note = f"{WINDOW} chunks mixed at a time"
        specs += [
            TableSpec(
                f"{key}-stock", "FastHDF5Dataset + DataLoader", "stock", "stock", batch_size, note=note
            ),
            TableSpec(
                f"{key}-workers",
                f"FastHDF5Dataset + DataLoader(num_workers={_WORKERS})",
                "stock",
                "stock",
                batch_size,
                _WORKERS,
                f"{note}; decoded by one process for all",
            ),
            TableSpec(
                f"{key}-window", f"{_FAST}, windows", "fastpipe", "window", batch_size, note=f"{note}; {cold}"
            ),
        ]
    note = f"each order as likely as any other; {cold}"
    note += "; a chunk is decoded for each of its rows" if has_windows else ""
    specs.append(
        TableSpec(f"{key}-uniform", f"{_FAST}, all rows", "fastpipe", "uniform", batch_size, note=note)
    )
    if table.is_packed:
        name, note = f'{_FAST}, cache="ram"', "all rows, from the second epoch on"
        specs.append(TableSpec(f"{key}-ram", name, "fastpipe", "ram", batch_size, note=note))
    return specs


def table_dataset(table: Table, cache: Any, threads: int | Literal["auto"] = "auto") -> Any:
    """A table as a `FastHDF5Dataset`."""
    keys = table.dataset if table.labels is None else [table.dataset, table.labels]
    return fastpipe.FastHDF5Dataset(
        str(table.path), keys, sample_dims=table.sample_dims, cache=cache, seed=0, threads=threads
    )


def loader_of(spec: TableSpec, table: Table, draws: Draws | None = None) -> Any:
    """The loader of a row.

    Args:
        spec: the row.
        table: what it reads.
        draws: the order of a loader that reads row by row.
    """
    data = require("torch.utils.data", extra="torch")
    workers: dict[str, Any] = {"num_workers": spec.num_workers, "persistent_workers": spec.num_workers > 0}
    window = fastpipe.Shuffle(WINDOW, "group")
    if spec.kind in ("rows", "named"):
        source = RowByRow(table, is_by_name=spec.kind == "named")
        return data.DataLoader(source, spec.batch_size, sampler=draws, **workers)
    if spec.kind == "ordered":
        held = 2 * WINDOW * table.group * table.sample_bytes
        batches = WindowBatches(table, spec.batch_size, WINDOW)
        return data.DataLoader(RowByRow(table, held), batch_sampler=batches, **workers)
    everything = 5 * table.samples * (table.sample_bytes + 64)  # all five layouts share one store
    cache = fastpipe.Cache("ram", max_bytes=everything) if spec.kind == "ram" else "off"
    dataset = table_dataset(table, cache, spec.threads)
    if spec.kind == "stock":
        batches = dataset.batch_sampler(spec.batch_size, shuffle=window)
        return data.DataLoader(dataset, batch_sampler=batches, **workers)
    shuffle = window if spec.kind == "window" else True
    return fastpipe.FastLoader(dataset, spec.batch_size, shuffle, workers="processes", **workers)


class TableRow:
    """A `Contender` that goes through a table.

    What reads row by row draws as many rows as a measurement needs; all else goes through whole epochs.

    Args:
        spec: which loader.
        table: what it reads.
    """

    def __init__(self, spec: TableSpec, table: Table) -> None:
        self.spec, self.key, self.workers = spec, spec.key, spec.num_workers
        burst = spec.batch_size * max(1, spec.num_workers)
        self._draws = Draws(range(table.samples), burst) if spec.kind in ("rows", "named") else None
        self.chunk = burst if self._draws is not None else table.samples
        with quiet():
            self.loader = loader_of(spec, table, self._draws)

    def measure(self, count: int) -> float:
        """Consume so many samples; return the seconds it took."""
        batches, seen = self.batches(count), 0
        with quiet():
            start = time.perf_counter()
            while seen < count:
                for batch in batches:
                    seen += touch(batch, any_number=True)
            seconds = time.perf_counter() - start
        self._let_go()
        if seen != count:
            raise RuntimeError(f"{self.spec.label} gave {seen} samples of {count}")
        return seconds

    def batches(self, count: int) -> Any:
        """An epoch: of so many samples, where they are drawn; else of all there are."""
        if self._draws is not None:
            self._draws.length = count
        return self.loader

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage that the loader's clock has counted so far."""
        return dict(self.loader.clock.totals())

    def close(self) -> None:
        """Let go of the loader, which ends its workers and threads."""
        self.loader = None
        gc.collect()

    def _let_go(self) -> None:
        """Close the file, where it is open in this process.

        Within a process the HDF5 library has one cache of chunks for a file, of the size that who opened it
        first asked for: rows that want caches of their own must not have it open at the same time.
        """
        if isinstance(self.loader.dataset, RowByRow):
            self.loader.dataset.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of what some rows are there to show."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*samples are compressed together")
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def best_workers(
    spec: TableSpec,
    table: Table,
    counts: Sequence[int],
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> TableSpec:
    """The row with the number of workers that a short measurement found fastest.

    Args:
        spec: the row.
        table: what it reads.
        counts: the numbers to try.
        seconds: how long each is measured.
        say: told what was found.
    """
    rates = {}
    for count in counts:
        row = TableRow(replace(spec, num_workers=count), table)
        try:
            samples = calibrate(row, seconds)
            rates[count] = samples / row.measure(samples)
        finally:
            row.close()
    best = max(rates, key=lambda count: rates[count])
    found = ", ".join(f"{count}: {rate:,.0f}" for count, rate in rates.items())
    say(f"{table.label}: {spec.label}: samples/s by num_workers: {found}; taken: {best}")
    note = f"num_workers={best}, the best of {', '.join(map(str, counts))}"
    return replace(
        spec, num_workers=best, label=f"{spec.label}(num_workers={best})",
        note=f"{note}; {spec.note}" if spec.note else note,
    )  # fmt: skip


# ---- Before anything is timed: are the batches the rows of the file, each once? ----------------------

_check_AT_ONCE = 256


def check_rows(
    pairs: Iterable[tuple[Table, TableSpec]], say: Callable[[str], None] = lambda text: None
) -> RowCheck:
    """Compare an epoch of each row, two where chunks are kept, with what h5py reads.

    Args:
        pairs: tables and the rows on them.
        say: told what is compared.
    """
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
    """Digests of the samples as h5py reads them, and how often each comes."""
    found: Counter[bytes] = Counter()
    dims = table.sample_dims
    with table.opened() as file:
        dataset = file[table.dataset]
        for first in range(0, table.shape[0], _check_AT_ONCE):
            part = dataset[first : first + _check_AT_ONCE]
            values = part.reshape(-1, *table.shape[dims:])
            labels = (
                None
                if table.labels is None
                else file[table.labels][first : first + _check_AT_ONCE].reshape(-1)
            )
            found.update(digests_of_samples(values, labels))
    return found


# ---- The case ``hdf5``: its options, its rows, its result -------------------------------------------

WORKER_COUNTS = (0, 1, 2, 4)
CELLS_BATCH = 5632
MEMORY_BUDGET = 256 << 20
_QUICK = Sizes(rows=256, files=8, few=32, chunks=2000)
_CHOICE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FILE.h5", type=Path, help="your own file, instead of made-up log-mels; with --key")
    add("--key", metavar="PATH", help="the dataset in it; samples are its rows")
    add("--wav", metavar="FOLDER", type=Path, help="cut the log-mels from the WAV files of a folder")
    add("--folder", metavar="FOLDER", type=Path,
        help="where made data is kept, 2 GB (default: the user's cache folder)")  # fmt: skip
    add("--samples", type=positive(int), metavar="N", help=f"rows to make (default: {Sizes.rows:,})")
    add("--batch-size", type=positive(int), default=64, metavar="N", help="samples in a batch (default: 64)")
    add_run_arguments(parser, " and ".join(peer.label for peer in TABLE_PEERS))


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when batches are not what h5py reads.

    Raises:
        OptionError: there is nothing to measure.
    """
    if (args.data is None) != (args.key is None):
        raise OptionError("--data and --key go together: a file and the dataset in it")
    tables, judged = _tables(args, progress)
    bench = _Bench(args, machine.cores_allowed(), progress, tables=tables, judged=judged)
    return bench.run(console)


def _sizes(args: argparse.Namespace) -> Sizes:
    sizes = _QUICK if args.quick else Sizes()
    return replace(sizes, rows=args.samples) if args.samples else sizes


def _tables(args: argparse.Namespace, progress: Progress) -> tuple[list[Table], list[Table]]:
    """What is read; and what is judged by file."""
    if args.data is not None:
        return [look(args.data, args.key, "file")], []
    sizes = _sizes(args)
    tables = made_tables(sizes, args.folder, progress.done, args.wav)
    if importlib.util.find_spec("hdf5plugin"):
        tables += made_tables(sizes, args.folder, progress.done, args.wav, [BITSHUFFLE])
    cells = made_cells(sizes.files, CELLS, "cells", args.folder, progress.done)
    few = made_cells(sizes.few, FEW, "few", args.folder, progress.done)
    return [*tables, made_chunks(sizes, args.folder, progress.done), cells], [few, cells]


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "hdf5"
    quick_s: ClassVar[float] = 0.05
    tables: list[Table] = field(kw_only=True)
    judged: list[Table] = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        for table in (*self.tables, *self.judged):
            table.warm()
        specs = [(table, self._chosen(table, spec)) for table, spec in self._specs()]
        check = self._check(specs)
        if not check.ok:
            return None
        with ExitStack() as stack:
            contenders = self._open(specs, stack)
            main = next(one for one in contenders if one.key == self._main)
            assert isinstance(main, TableRow)
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            after = main.stage_seconds()
        first, memory = self._first_batch(), self._memory()
        rows = entries(list(self.infos.values()), session)
        is_made = self.args.data is None
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": check.as_json(),
            "main": self._main,
            "rows": rows,
            "best": {entry["section"]: entry["key"] for entry in rows if entry["group"] == "replaced"},
            "missing": self.missing,
            "stages": {
                "seconds": {stage: round(after[stage] - before.get(stage, 0.0), 6) for stage in after},
                "images": sum(sample.count for sample in session.samples[self._main]),
            },
            "floor_share": None,
            "plan": str(table_dataset(self.tables[0], "off").plan),
            "targets": [
                *rate_targets(session.samples), *first_batch_targets(first), *memory_target(memory)
            ] if is_made else [],
            "first_batch": first or {},
            "memory": memory or {},
        }  # fmt: skip
        result["verdict"] = verdict(result)
        return result

    @property
    def _main(self) -> str:
        """The row that the verdict is about."""
        table = self.tables[0]
        return f"{table.key}-{'window' if table.is_packed else 'uniform'}"

    def _specs(self) -> Iterator[tuple[Table, TableSpec]]:
        """Tables and the loaders measured on them."""
        for table in self.tables:
            size = self.args.batch_size
            if table.key == "cells":
                size = 512 if self.args.quick else CELLS_BATCH
            for spec in specs_of(table, min(size, table.samples)):
                yield table, spec

    def _chosen(self, table: Table, spec: TableSpec) -> TableSpec:
        """A script's own loader with the number of workers that suits it best."""
        if spec.group not in ("replaced", "peer"):
            return spec
        counts, seconds = ((0, 1), 0.05) if self.args.quick else (WORKER_COUNTS, _CHOICE_S)
        return best_workers(spec, table, counts, seconds, self.progress.done)

    def _check(self, specs: list[tuple[Table, TableSpec]]) -> RowCheck:
        """Compare all rows of fastpipe's with h5py, and the two evaluations, and say so."""
        ours = [(table, spec) for table, spec in specs if spec.group in ("stock", "fastpipe")]
        check = check_rows(ours, self.progress.now)
        for table in self.judged:
            one, grouped = FileByFile(table), Grouped(table)
            one.measure(table.shape[0])
            grouped.measure(table.shape[0])
            if other := int((one.votes != grouped.votes).sum()):
                check.problems += (f"{other} files get other votes in groups",)
            grouped.close()
        self.progress.done(f"check: {check.sentence()}")
        return check

    def _open(self, specs: list[tuple[Table, TableSpec]], stack: ExitStack) -> list[Contender]:
        """Build every row; a peer that is not there is noted."""
        found: list[Contender | None] = []
        for table in self.tables:
            for spec in (spec for its, spec in specs if its is table):
                found.append(self.open(stack, spec.info(table), lambda s=spec, t=table: TableRow(s, t)))  # type: ignore[misc]
                if spec.kind == "rows" and table.key != "cells":
                    found.append(self._in_order(table, stack))
                    found += [self._peer(table, peer, stack) for peer in peers_of(table)]
        for table in self.judged:
            one, grouped = evaluation_infos(table)
            found.append(self.open(stack, one, lambda t=table: FileByFile(t)))  # type: ignore[misc]
            found.append(self.open(stack, grouped, lambda t=table: Grouped(t)))  # type: ignore[misc]
        return [contender for contender in found if contender is not None]

    def _in_order(self, table: Table, stack: ExitStack) -> Contender | None:
        info = RowInfo(
            f"{table.key}-order", "h5py, whole chunks in order", "peer", None, table.dtype,
            "one thread; nothing shuffled, no batches", section=table.key, unit="samples",
        )  # fmt: skip
        return self.open(stack, info, lambda: InOrder(table, info.key))

    def _peer(self, table: Table, peer: Any, stack: ExitStack) -> Contender | None:
        if not self.args.peers:
            return None
        info, python = row_info(peer, table), interpreter(peer)
        if python is None:
            self.miss(peer.key, f"{table.key}: {peer.label}", f"not installed: {peer.install}")
            return None
        self.progress.now(f"starting {peer.label}")
        size = min(self.args.batch_size, table.samples)
        row = self.open(stack, info, lambda: TablePeerRow(peer, python, table, size, self.cores))
        if isinstance(row, TablePeerRow):
            self.infos[info.key] = replace(info, versions=row.versions)
        return row

    def _first_batch(self) -> dict[str, Any] | None:
        """Time to the first batch; None where it is not measured."""
        if self.args.quick or self.args.data is not None:
            return None
        try:
            table = made_chunks(_sizes(self.args), self.args.folder, self.progress.done)
            return first_batches(table, self.args.batch_size, say=self.progress.step)
        except ContenderError as error:
            # The rates, which took far longer to measure, stay valid.
            self.warnings.append(f"no time to the first batch: {error}")
            return None

    def _memory(self) -> dict[str, Any] | None:
        """Memory; None where it is not measured."""
        if self.args.quick:
            return None
        try:
            return memory_of_trees(
                self.tables[0], self.args.batch_size, MEMORY_BUDGET, say=self.progress.step
            )
        except ContenderError as error:
            self.warnings.append(f"no memory: {error}")
            return None

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, first = self.args, self.tables[0]
        words = [f"--data {args.data.name} --key {args.key}"] if args.data else []
        words += [f"--wav {args.wav.resolve().name}"] if args.wav else []
        words += [f"--samples {args.samples}"] if args.samples else []
        words += [f"--batch-size {args.batch_size}"] if args.batch_size != 64 else []
        made = "made-up log-mels" if args.wav is None else f"log-mels of {args.wav.resolve().name}"
        files = {
            section_of(table): {"label": f"evaluation by file, {math.prod(table.shape[1:3])} segments each"}
            for table in self.judged
        }
        shape = "×".join(map(str, first.shape[1:])) or "1"
        return self.facts(words, busy) | {
            "data": {"name": args.data.name if args.data else made, **described(first)},
            "sections": {**{table.key: described(table) for table in self.tables}, **files},
            "job": {
                "text": f"HDF5: rows of {shape} {first.dtype}, shuffled, batches of {args.batch_size}",
                "short": f"HDF5 rows of {shape}, batch {args.batch_size}",
                "batch_size": args.batch_size,
            },
        }

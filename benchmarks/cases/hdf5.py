"""The case ``hdf5`` with more files, other readers, memory, the first batch, and what was asked for."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lines import Studied
from benchmarks.peers.children.windows import windows
from benchmarks.peers.rows import ChildRow, Peer
from benchmarks.studies.hdf5_evaluate import FileByFile, Grouped, evaluation_infos, section_of
from benchmarks.studies.hdf5_first import first_batches
from benchmarks.studies.hdf5_memory import memory_of_trees
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench import hdf5
from fastpipe.bench.check import Outcome
from fastpipe.bench.data import made_once
from fastpipe.bench.hdf5 import (
    WINDOW,
    RowByRow,
    Table,
    TableSpec,
    look,
    made_tables,
    spec_of,
    specs_of,
)
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Draws, Sample, Session
from fastpipe.bench.synthetic import mel_rows, write_table
from fastpipe.core.extras import require

# ---- Files beside those that users measure ----------------------------------------------------------

# Segments of a file: (long, short, bands, frames), 1 KiB each; in another file fewer.
CELLS, FEW = (10, 20, 16, 16), (3, 4, 16, 16)
# Files of each, and chunks of the file with many chunks.
SIZES, QUICK = (704, 8192, 100_000), (8, 32, 2000)
# Which h5py reads by hdf5plugin.
BITSHUFFLE = {"bitshuffle": ("bitshuffle + LZ4", "bitshuffle", True)}
CELLS_BATCH = 5632
MEMORY_BUDGET = 256 << 20
_AT_ONCE = 1024


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
    count: int, cache: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Table:
    """Rows of 1 KiB, each a chunk of its own."""

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(0)
        for first in range(0, count, _AT_ONCE):
            yield mel_rows(rng, min(_AT_ONCE, count - first), CELLS[2:])

    def fill(folder: Path) -> None:
        folder.mkdir()
        write_table(
            folder / "chunks.h5", "mels", parts(), (count, *CELLS[2:]), chunk=(1, *CELLS[2:]),
            compression="gzip",
        )  # fmt: skip

    folder = made_once(f"chunks-1-{count}", fill, f"a file of {count:,} chunks", cache, say)
    return look(folder / "chunks.h5", "mels", "rows", "rows of 1 KiB, gzip(4), a chunk each")


# ---- Loaders as scripts write them, and reading alone -----------------------------------------------

# A prime well above a hundred times the chunks that are held, as HDF5's documents advise.
_SLOTS = 100_003


class ByName(RowByRow):
    """Rows of a dataset that is looked up in the file for each of them, as many scripts do."""

    def values(self, where: tuple[int, ...]) -> Any:
        """Return a row's values."""
        return self._file[self._table.dataset][where]


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


def make_loader(spec: TableSpec, table: Table, draws: Draws | None = None) -> Any:
    """Build the loader of a row: row by row by name, or chunk by chunk."""
    data = require("torch.utils.data", extra="torch")
    workers: dict[str, Any] = {"num_workers": spec.num_workers, "persistent_workers": spec.num_workers > 0}
    if spec.kind == "named":
        return data.DataLoader(ByName(table), spec.batch_size, sampler=draws, **workers)
    held = 2 * WINDOW * table.group * table.sample_bytes
    source = RowByRow(table, rdcc_nbytes=held, rdcc_nslots=_SLOTS, rdcc_w0=0)
    return data.DataLoader(source, batch_sampler=WindowBatches(table, spec.batch_size, WINDOW), **workers)


def more_specs(table: Table, batch_size: int) -> list[TableSpec]:
    """Return further loaders that are measured on a table."""
    specs = []
    if not table.is_packed:  # where the rest of a row's time is small
        note = "`file[name][row]`: the dataset is looked up for each row"
        label = "row by row by name + DataLoader"
        specs.append(spec_of(table, "named", label, "peer", batch_size, note=note, make=make_loader))
    if table.chunk is not None and table.group > 1:
        note = f"HDF5's cache holds two windows of {WINDOW} chunks"
        note += ", here everything" if 2 * WINDOW * table.group >= table.samples else ""
        label = "chunk by chunk + DataLoader"
        specs.append(spec_of(table, "ordered", label, "peer", batch_size, note=note, make=make_loader))
    return specs


class InOrder(Contender):
    """A `Contender` that reads whole chunks in order with h5py, in one thread, and does nothing else.

    Args:
        table: what to read.
        key: its name in the results.
    """

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


# ---- Other readers, each in a process of its own ----------------------------------------------------

_MIXED = f"{WINDOW} chunks mixed at a time"

TABLE_PEERS = (
    Peer(
        "pyfive", "pyfive, threads", "pyfive", "pip install pyfive", "pyfive",
        note=f"the format in Python, a chunk to a thread; {_MIXED}",
    ),
    Peer(
        "hidefix", "hidefix", "hidefix", "pip install hidefix", "hidefix",
        note=f"chunks of a slice side by side; {_MIXED}, which lie next to each other",
    ),
)  # fmt: skip


def peers_of(table: Table) -> list[Peer]:
    """The peers, with keys of the table's section."""
    return [replace(peer, key=f"{table.key}-{peer.key}") for peer in TABLE_PEERS]


def row_info(peer: Peer, table: Table) -> RowInfo:
    """The row's label in the report."""
    return RowInfo(
        peer.key, peer.label, "peer", output=table.dtype, note=peer.note, section=table.key, unit="samples"
    )


class TablePeerRow(ChildRow):
    """A peer that reads a table.

    Args:
        peer: which library.
        python: the interpreter that has it.
        table: what it reads.
        batch_size: rows in a batch.
        threads: how many threads the library may use.

    Raises:
        ContenderError: the child does not start, or its first batch is not what it should be.
    """

    def __init__(self, peer: Peer, python: str, table: Table, batch_size: int, threads: int) -> None:
        job: dict[str, Any] = {
            "path": str(table.path),
            "dataset": table.dataset,
            "shape": table.shape,
            "dtype": table.dtype,
            "group": table.group,
            "window": WINDOW,
            "batch_size": batch_size,
            "threads": threads,
        }
        super().__init__(peer, python, job, batch_size, threads)
        # Rows come in bursts, a window at a time.
        window = -(-WINDOW * table.group // batch_size) * batch_size
        self.chunk = max(batch_size, min(window, table.samples // batch_size * batch_size))
        self.info = replace(row_info(peer, table), versions=self.first_batch["versions"])


# ---- What was asked of fastpipe for HDF5 files, as figures, and whether it is met -------------------

FIRST_COLD_S, FIRST_KEPT_S = 1.0, 0.3
MEMORY_ABOVE_MB = 150.0


ASKED = (
    Asked("gzip, windows, × the replaced loader", "gzip-window", "gzip-replaced", 26),
    Asked("gzip, windows, × hidefix", "gzip-window", "gzip-hidefix", 1.2),
    Asked("gzip, windows, × h5py in order", "gzip-window", "gzip-order", 1.8),
    Asked("LZF, windows, × the replaced loader", "lzf-window", "lzf-replaced", 20),
    Asked("LZF, windows, × h5py in order", "lzf-window", "lzf-order", 2),
    # One thread of h5py's, of which fastpipe has one for each of two cores.
    Asked("bitshuffle + LZ4, windows, × h5py in order", "bitshuffle-window", "bitshuffle-order", 2),
    Asked("gzip, any order, × the replaced loader", "gzip-uniform", "gzip-replaced", 4),
    Asked("LZF, any order, × the replaced loader", "lzf-uniform", "lzf-replaced", 4),
    Asked("a chunk for each row, × hidefix", "rows-uniform", "rows-hidefix", 1),
    Asked("uncompressed, all rows shuffled, × the replaced loader", "plain-uniform", "plain-replaced", 6),
    Asked(
        "contiguous, all rows shuffled, × the replaced loader", "contiguous-uniform", "contiguous-replaced", 6
    ),
    Asked("uncompressed, × the loader that looks rows up by name", "plain-uniform", "plain-named", 15),
    Asked(
        "contiguous, × the loader that looks rows up by name", "contiguous-uniform", "contiguous-named", 15
    ),
    Asked("gzip kept in memory, all rows shuffled, × the replaced loader", "gzip-ram", "gzip-replaced", 80),
    Asked("segments of 1 KiB kept in memory, samples/s", "cells-ram", None, 350_000),
    Asked("evaluation, files of 12 segments, × one at a time", "files-12-grouped", "files-12-replaced", 2),
    Asked("evaluation, files of 200 segments, × one at a time", "files-200-grouped", "files-200-replaced", 2),
)


def rate_targets(
    samples: Mapping[str, Sequence[Sample]], asked: Sequence[Asked] = ASKED
) -> list[dict[str, Any]]:
    """Return the targets that are rates, as `judged_rates` says."""
    return judged_rates(samples, asked)


def first_batch_targets(measured: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the target of the time to the first batch.

    Args:
        measured: from `hdf5_first.first_batches`; None where it was not measured.
    """
    return [
        judged(text, most, "s", [] if measured is None else measured[name]["raw_s"], is_most=True)
        for text, most, name in (
            ("first batch of a file of many chunks", FIRST_COLD_S, "cold"),
            ("first batch, where the chunks are is kept", FIRST_KEPT_S, "kept"),
        )
    ]


def memory_target(measured: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the target of the memory.

    Args:
        measured: from `hdf5_memory.memory_of_trees`; None where it was not measured.
    """
    figures = (
        [] if measured is None else [entry["above_mb"] - entry["budget_mb"] for entry in measured["rows"]]
    )
    text = "memory above that of loading nothing, less the cache's budget, most of all"
    return [judged(text, MEMORY_ABOVE_MB, "MB", [max(figures)] if figures else [], is_most=True)]


# ---- The case ---------------------------------------------------------------------------------------


class Bench(Studied, hdf5.Bench):
    """One run of the case, with everything.

    Attributes:
        judged: tables of files that a model judges.
    """

    judged: Sequence[Table] = ()

    def prepare(self) -> None:
        """Make further files, unless one is named."""
        super().prepare()
        args, say = self.args, self.progress.done
        if args.data is None:
            folder, (files, few, chunks) = args.folder, QUICK if args.quick else SIZES
            if importlib.util.find_spec("hdf5plugin"):
                self.tables += made_tables(self.samples, folder, say, BITSHUFFLE)
            cells = made_cells(files, CELLS, "cells", folder, say)
            self.judged = [made_cells(few, FEW, "few", folder, say), cells]
            self.tables += [made_chunks(chunks, folder, say), cells]

    def specs(self) -> Iterator[tuple[Table, TableSpec]]:
        """Give tables and the loaders measured on them."""
        for table in self.tables:
            if table.key == "cells":
                size = min(512 if self.args.quick else CELLS_BATCH, table.samples)
                rows, kept = specs_of(table, size)[0], specs_of(table, size)[-1]
                yield from ((table, spec) for spec in (rows, kept))
                continue
            size = min(self.args.batch_size, table.samples)
            first, *own = specs_of(table, size)
            yield from ((table, spec) for spec in (first, *more_specs(table, size), *own))

    def compared(self, rows: Sequence[Any]) -> Outcome:
        """Compare all rows of fastpipe's with h5py, and the two evaluations."""
        check = super().compared(rows)
        for table in self.judged:
            table.warm()
            one, grouped = FileByFile(table), Grouped(table)
            one.measure(table.shape[0])
            grouped.measure(table.shape[0])
            if other := int((one.votes != grouped.votes).sum()):
                check.problems += (f"{other} files get other votes in groups",)
            grouped.close()
        return check

    def others(self) -> list[Contender]:
        """Build the rows of h5py alone, of peers, and of evaluation; a peer that is not there is noted."""
        found: list[Contender] = []
        for table in self.tables:
            if table.key != "cells":
                info = RowInfo(
                    f"{table.key}-order", "h5py, whole chunks in order", "peer", None, table.dtype,
                    "one thread; nothing shuffled, no batches", section=table.key, unit="samples",
                )  # fmt: skip
                found.append(self.added(info, InOrder(table, info.key)))
                for peer in peers_of(table) if self.args.peers else ():
                    found += self.peer(peer, row_info(peer, table), partial(self._started, peer, table))
        for table in self.judged:
            one, grouped = evaluation_infos(table)
            found += [self.added(one, FileByFile(table)), self.added(grouped, Grouped(table))]
        return found

    def _started(self, peer: Peer, table: Table, python: str) -> TablePeerRow:
        return TablePeerRow(peer, python, table, min(self.args.batch_size, table.samples), self.cores)

    def described(self, session: Session) -> dict[str, Any]:
        """Return what was read, with the sections of files that are judged."""
        fields = super().described(session)
        fields["sections"] |= {
            section_of(table): {"label": f"evaluation by file, {math.prod(table.shape[1:3])} segments each"}
            for table in self.judged
        }
        return fields

    def studies(self, session: Session) -> dict[str, Any]:
        """Measure the first batch and memory, and judge the figures that were asked for."""
        is_made = self.args.data is None
        first = self._first_batch() if is_made and not self.args.quick else None
        memory = None if self.args.quick else self._memory()
        asked = [*rate_targets(session.samples), *first_batch_targets(first), *memory_target(memory)]
        return {"targets": asked if is_made else [], "first_batch": first or {}, "memory": memory or {}}

    def _first_batch(self) -> dict[str, Any] | None:
        table = next(table for table in self.tables if table.key == "rows")
        study = partial(first_batches, table, self.args.batch_size, say=self.progress.step)
        return self.tried("time to the first batch", study)

    def _memory(self) -> dict[str, Any] | None:
        study = partial(
            memory_of_trees, self.tables[0], self.args.batch_size, MEMORY_BUDGET, say=self.progress.step
        )
        return self.tried("memory", study)

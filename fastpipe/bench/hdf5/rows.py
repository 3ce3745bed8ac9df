"""The rows of the case that are loaders in this process."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import fastpipe
from fastpipe.bench.hdf5.data import Table
from fastpipe.bench.hdf5.sources import RowByRow, WindowBatches
from fastpipe.bench.loaders import Draws, touch
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import calibrate
from fastpipe.core.extras import require

__all__ = [
    "WINDOW",
    "TableRow",
    "TableSpec",
    "best_workers",
    "loader_of",
    "quiet",
    "specs_of",
    "table_dataset",
]

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

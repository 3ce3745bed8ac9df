"""What scripts read HDF5 files with where they have no fastpipe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.bench.hdf5.data import Table
from fastpipe.bench.windows import windows
from fastpipe.core.extras import require

__all__ = ["InOrder", "RowByRow", "WindowBatches"]

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

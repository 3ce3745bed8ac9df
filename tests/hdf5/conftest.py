"""Fixtures of the tests of ``fastpipe.hdf5``: readers of a file, and what they read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest

from fastpipe.core.native import native
from fastpipe.core.pool import Job, NativeJob
from fastpipe.core.reads import MADE
from fastpipe.hdf5.chunks import FileState
from fastpipe.hdf5.files import SampleFile, SampleFiles
from fastpipe.hdf5.layout import Layout, read_layout
from fastpipe.hdf5.reader import RowReader


class Rows(NamedTuple):
    """A batch as the native core leaves it.

    Attributes:
        arrays: one for each dataset, (samples, *sample_shape).
        is_made: bool (samples,): which rows the core made; the others it declined.
        statuses: uint8 (samples, 8).
        batch: the ``native.RowBatch``, or None.
    """

    arrays: list[Any]
    is_made: Any
    statuses: Any
    batch: Any


def _layout_of(path: Path, name: str = "x") -> Layout:
    with h5py.File(path, "r") as file:
        layout = read_layout(file[name])
    assert layout.kind != "h5py", layout.why
    return layout


def _files_of(path: Path, layouts: Sequence[Layout], sample_dims: int = 1) -> SampleFiles:
    """A file by layouts that were read before it was changed."""
    file, files = SampleFile.__new__(SampleFile), SampleFiles.__new__(SampleFiles)
    file.path = file.shown = str(path)
    file.layouts, file.sample_dims = list(layouts), sample_dims
    file.count = int(np.prod(file.layouts[0].shape[:sample_dims], dtype=np.int64))
    file.state = FileState.of(os.stat(path))
    files.files, files.count, files.firsts = [file], file.count, np.array([0, file.count])
    return files


def _reader_of(path: Path, sample_dims: int = 1, layout: Layout | None = None, **options: Any) -> RowReader:
    return RowReader(_files_of(path, [layout or _layout_of(path)], sample_dims), **options)


def _outs(files: SampleFiles, count: int, before: int) -> list[Any]:
    found = []
    for number, layout in enumerate(files.layouts):
        shape = count, *files.sample_shape(number)
        if layout.dtype.hasobject:
            found.append(np.full(shape, None, layout.dtype))
            continue
        memory = np.full(int(np.prod(shape)) * layout.dtype.itemsize, before, np.uint8)
        found.append(memory.view(layout.dtype).reshape(shape))
    return found


def _read_natively(reader: RowReader, samples: Any, before: int = 0xAB, threads: int = 0) -> Rows:
    samples = np.ascontiguousarray(samples, np.int64)
    outs = _outs(reader._files, len(samples), before)
    started = reader.start(samples, np.arange(len(samples)), outs)
    is_made = np.ones(len(samples), bool)
    if started.batch is not None:
        if threads:
            job = NativeJob(started.batch, native.Channel(threads), threads, lambda: None)
            job.wait()
            del job
        else:
            native.run_here(started.batch)
        assert started.batch.is_complete
        assert set(np.unique(started.statuses[:, 0])) <= {MADE, 2}
        is_made = started.statuses[:, 0] == MADE
        if started.keep is not None and started.batch.has_chunks:
            started.keep()
    if started.tasks:
        tasks = Job(lambda number: started.tasks[number].run(), len(started.tasks))
        tasks.run_here()
        tasks.wait()
    return Rows(outs, is_made, started.statuses, started.batch)


def _read(reader: RowReader, samples: Any, before: int = 0xAB, threads: int = 0) -> Any:
    samples = np.ascontiguousarray(samples, np.int64)
    rows = _read_natively(reader, samples, before, threads)
    for row in np.flatnonzero(~rows.is_made).tolist():
        reader.read_alone(int(samples[row]), row, rows.arrays)
    return rows.arrays[0] if len(rows.arrays) == 1 else rows.arrays


def _read_alone(reader: RowReader, samples: Any, before: int = 0xAB) -> Any:
    outs = _outs(reader._files, len(samples), before)
    for row, sample in enumerate(samples):
        reader.read_alone(int(sample), row, outs)
    return outs[0] if len(outs) == 1 else outs


@pytest.fixture(scope="session")
def layout_of() -> Callable[..., Layout]:
    """The layout of a file's dataset: ``layout_of(path, name="x")``, which must be read directly."""
    return _layout_of


@pytest.fixture(scope="session")
def files_of() -> Callable[..., SampleFiles]:
    """A file's datasets by their layouts, whatever the file has become: ``files_of(path, layouts, sample_dims)``."""
    return _files_of


@pytest.fixture(scope="session")
def reader_of() -> Callable[..., RowReader]:
    """The reader of a file's dataset ``x``: ``reader_of(path, sample_dims, layout, **options)``, with the
    layout from before the file was damaged, perhaps."""
    return _reader_of


@pytest.fixture(scope="session")
def read_natively() -> Callable[..., Rows]:
    """Reads samples by the native core alone: ``read_natively(reader, samples, before, threads)``, into bytes
    that were ``before``, in the calling thread or in ``threads`` of the engine."""
    return _read_natively


@pytest.fixture(scope="session")
def read() -> Callable[..., Any]:
    """Reads samples as a dataset does: what the core declines is read alone, which raises what is wrong.
    ``read(reader, samples, before, threads)``: an array, or one for each of several datasets."""
    return _read


@pytest.fixture(scope="session")
def read_alone() -> Callable[..., Any]:
    """Reads samples one by one, without the native batch: ``read_alone(reader, samples, before)``."""
    return _read_alone

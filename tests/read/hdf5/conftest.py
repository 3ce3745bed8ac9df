"""Fixtures of the tests of ``fastpipe.read.hdf5``: the reader under test, and what it reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from fastpipe.read.hdf5.layout import Layout, read_layout
from fastpipe.read.hdf5.reader import SampleReader


@contextmanager
def _reader_of(path: Path, sample_dims: int = 1, layout: Layout | None = None) -> Iterator[SampleReader]:
    if layout is None:
        with h5py.File(path, "r") as file:
            layout = read_layout(file["x"])
    assert layout.kind != "h5py", layout.why
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield SampleReader(layout, sample_dims, descriptor)
    finally:
        os.close(descriptor)


def _read(reader: SampleReader, dtype: Any, samples: Any, before: int = 0xAB) -> Any:
    geometry, samples = reader.geometry, np.asarray(samples, np.int64)
    out = np.full(len(samples) * geometry.sample_nbytes, before, np.uint8)
    for task in reader.tasks(samples, np.arange(len(samples)), out):
        task.run()
    return out.view(dtype).reshape(len(samples), *geometry.sample_shape)


@pytest.fixture(scope="session")
def reader_of() -> Callable[..., AbstractContextManager[SampleReader]]:
    """The reader of a file's dataset ``x``, as a dataset would make it: ``reader_of(path, sample_dims, layout)``,
    with the layout from before the file was damaged, perhaps."""
    return _reader_of


@pytest.fixture(scope="session")
def read() -> Callable[..., Any]:
    """Reads samples as an array: ``read(reader, dtype, samples, before)``, into bytes that were ``before``."""
    return _read

"""Fixtures of the tests of ``FastHDF5Dataset``: files of every usual kind of dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastpipe import FastHDF5Dataset


def _write(path: Path, rows: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        mels = random.integers(0, 9, (rows, 6, 10)).astype("f4")
        file.create_dataset("mels", data=mels, chunks=(8, 4, 7), compression="gzip", shuffle=True)
        packed = np.arange(rows * 12).reshape(rows, 12) + 1000 * seed
        file.create_dataset("packed", data=packed, chunks=(5, 12), compression="lzf", fletcher32=True)
        file["plain"] = random.integers(0, 255, (rows, 7), np.uint8)
        file["label"] = np.arange(rows) + 1000 * seed
        file["text"] = [f"text {number}" for number in range(rows)]
        file["code"] = np.array([f"c{number}".encode() for number in range(rows)], "S4")
        file.create_dataset("scaled", data=np.arange(rows) % 7, chunks=(16,), scaleoffset=0)
        grid = random.standard_normal((rows, 3, 5))
        file.create_dataset("grid", data=grid, chunks=(8, 2, 5), compression="gzip")
    return path


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory, settled: Callable[[Path], Path]) -> Path:
    """A file with a dataset of each usual kind, made once; not to be changed."""
    return settled(_write(tmp_path_factory.mktemp("hdf5") / "x.h5", 53, 0))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, settled: Callable[[Path], Path]) -> Path:
    """Another one, with other values and another number of samples."""
    return settled(_write(tmp_path_factory.mktemp("hdf5") / "y.h5", 21, 1))


@pytest.fixture(autouse=True)
def cache_folder(own_cache_folder: Path) -> Path:
    """The user's cache folder, which is each test's own."""
    return own_cache_folder


@pytest.fixture(scope="session")
def decoded() -> Callable[[FastHDF5Dataset], int]:
    """How many bytes of chunks a dataset has decoded in this process."""
    return lambda dataset: dataset._running().watch.decoded_nbytes

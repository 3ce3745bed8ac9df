"""Fixtures of the tests of ``FastHDF5Dataset``: files, the naive dataset over them, and what is equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastpipe import FastHDF5Dataset

ROWS = 53


class Naive(Dataset[Any]):
    """What scripts do: open the file with h5py, and take a row."""

    def __init__(self, paths: Any, keys: Any, sample_dims: int = 1) -> None:
        self.paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
        self.keys, self.dims = keys, sample_dims
        first = (
            keys
            if isinstance(keys, str)
            else next(iter(keys.values() if isinstance(keys, Mapping) else keys))
        )
        self.leads = []
        for path in self.paths:
            with h5py.File(path, "r") as file:
                self.leads.append(file[first].shape[:sample_dims])
        self.ends = np.cumsum([int(np.prod(lead)) for lead in self.leads])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Any:
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.ends, index, side="right"))
        local = index - (int(self.ends[number - 1]) if number else 0)
        place = tuple(map(int, np.unravel_index(local, self.leads[number])))
        with h5py.File(self.paths[number], "r") as file:
            if isinstance(self.keys, str):
                return file[self.keys][place]
            if isinstance(self.keys, Mapping):
                return {field: file[name][place] for field, name in self.keys.items()}
            return tuple(file[name][place] for name in self.keys)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
            and (a.stride() == b.stride() or not a.numel())
            and a.contiguous().view(-1).numpy().tobytes() == b.contiguous().view(-1).numpy().tobytes()
        )  # fmt: skip
    if isinstance(a, np.ndarray):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        if a.dtype.hasobject:
            return is_alike and all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
        if a.dtype.names:  # bytes between fields are no values
            return is_alike and all(_same(a[name], b[name]) for name in a.dtype.names)
        return is_alike and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return _same(np.asarray(a), np.asarray(b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and not isinstance(a, (str, bytes)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    """Whether two things are equal in types, dtypes, shapes, strides and to the last bit."""
    return _same


@pytest.fixture(scope="session")
def naive() -> type[Naive]:
    """The dataset that is the oracle."""
    return Naive


def _write(path: Path, rows: int = ROWS, seed: int = 0) -> Path:
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
        file.create_dataset(
            "grid", data=random.standard_normal((rows, 3, 5)), chunks=(8, 2, 5), compression="gzip"
        )
    return path


@pytest.fixture(scope="session")
def write(settled: Callable[[Path], Path]) -> Callable[..., Path]:
    """Writes a file with a dataset of each usual kind: ``write(path, rows, seed)``."""
    return lambda *arguments: settled(_write(*arguments))


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., Path]) -> Path:
    """Such a file, made once; not to be changed."""
    return write(tmp_path_factory.mktemp("hdf5") / "x.h5")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., Path]) -> Path:
    """Another one, with other values and another number of samples."""
    return write(tmp_path_factory.mktemp("hdf5") / "y.h5", 21, 1)


@pytest.fixture(autouse=True)
def cache_folder(own_cache_folder: Path) -> Path:
    """The user's cache folder, which is each test's own."""
    return own_cache_folder


def _decoded(dataset: FastHDF5Dataset) -> int:
    return dataset._running().watch.decoded_nbytes


@pytest.fixture(scope="session")
def decoded() -> Callable[[FastHDF5Dataset], int]:
    """How many bytes of chunks a dataset has decoded in this process."""
    return _decoded

"""``FileArrays``, besides tests/contracts/test_caches.py: each is kept for as long as its file is as it was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastpipe import FastHDF5Dataset
from fastpipe.core import file_identity
from fastpipe.core.array_cache import FileArrays, default_file_arrays
from fastpipe.hdf5 import layout

ARRAYS = [np.arange(5), np.array([7, 1 << 60]), np.zeros(0, np.uint32)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(b"content")
    return tmp_path / "data"


@pytest.fixture
def kept(tmp_path: Path) -> FileArrays:
    return FileArrays(tmp_path / "kept", now=lambda: time.time_ns() + 10_000_000_000)


def same(found: Any, expected: Any = ARRAYS) -> bool:
    return found is not None and all(
        one.dtype == other.dtype and np.array_equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("change", ["content", "time", "inode"])
def test_arrays_of_a_file_that_has_changed_are_replaced(kept: FileArrays, file: Path, change: str) -> None:
    assert kept.load(file.stat(), "x") is None
    assert not kept.path.exists()
    kept.save(file.stat(), "x", ARRAYS)
    kept.save(file.stat(), "y", ARRAYS[:1])
    assert same(kept.load(file.stat(), "x")) and same(kept.load(file.stat(), "y"), ARRAYS[:1])
    if change == "content":
        file.write_bytes(b"other content")
    elif change == "time":
        os.utime(file, ns=(1, 1))
    else:
        file.with_name("new").write_bytes(b"content")
        os.replace(file.with_name("new"), file)
    assert kept.load(file.stat(), "x") is None
    kept.save(file.stat(), "x", ARRAYS[::-1])
    assert same(kept.load(file.stat(), "x"), ARRAYS[::-1])
    assert len(list(kept.path.glob("*.npz"))) == (3 if change == "inode" else 2)


@pytest.mark.parametrize("age", [0, 2_100_000_000])
def test_arrays_of_a_file_that_changed_just_now_are_not_kept(tmp_path: Path, file: Path, age: int) -> None:
    status = file.stat()
    kept = FileArrays(tmp_path / "kept", now=lambda: max(status.st_mtime_ns, status.st_ctime_ns) + age)
    kept.save(status, "x", ARRAYS)
    assert not kept.path.exists()


def test_a_dataset_of_hdf5_reads_a_kept_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(layout, "_KEEP_FROM_S", 0.0)
    monkeypatch.setattr(file_identity, "_RESOLUTION_NS", 0)
    calls, real = list[Any](), layout._chunks
    monkeypatch.setattr(layout, "_chunks", lambda *given: calls.append(given) or real(*given))

    def write(value: int) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            for name in ("x", "y"):
                dataset = file.create_dataset(name, (40, 3), "i8", chunks=(3, 2), compression="gzip")
                dataset[:30] = value

    def opened(**options: Any) -> int:
        """Reads everything; how many tables were asked of the library."""
        calls.clear()
        dataset = FastHDF5Dataset(tmp_path / "x.h5", ["x", "y"], **options)
        with h5py.File(tmp_path / "x.h5", "r") as file:
            wanted = file["x"][...]
        for index in range(40):
            assert np.array_equal(dataset[index][0], wanted[index])
        return len(calls)

    write(5)
    assert [opened(cache="off"), opened(cache="off")] == [2, 2]
    assert not (tmp_path / "cache").exists()
    assert [opened(), opened(), opened(cache="ram")] == [2, 0, 0]
    write(6)
    assert [opened(), opened()] == [2, 0]
    folder = default_file_arrays()
    assert folder is not None
    for path in folder.path.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:-40])
    assert [opened(), opened()] == [2, 0]


def test_a_table_that_does_not_fit_is_asked_of_the_library(tmp_path: Path, kept: FileArrays) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as new:
        new.create_dataset("x", data=np.arange(10), chunks=(2,))
    status = (tmp_path / "x.h5").stat()
    kept.save(status, "hdf5 chunks 1, /x, (10,), (2,)", ARRAYS)
    with h5py.File(tmp_path / "x.h5", "r") as new:
        found = layout.read_layout(new["x"], kept, status)
        assert np.array_equal(found.offsets, layout.read_layout(new["x"]).offsets)

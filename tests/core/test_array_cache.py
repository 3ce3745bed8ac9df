"""``FileArrays``, besides tests/contracts/test_caches.py: each is kept for as long as its file is as it was."""

from __future__ import annotations

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


def test_arrays_of_a_file_that_changed_just_now_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    status = (tmp_path / "file").stat()
    for age in (0, 2_100_000_000):
        now = max(status.st_mtime_ns, status.st_ctime_ns) + age
        FileArrays(tmp_path / "kept", now=lambda: now).save(status, "x", ARRAYS)
    assert not (tmp_path / "kept").exists()


def test_a_dataset_of_hdf5_reads_a_kept_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(layout, "_KEEP_FROM_S", 0.0)
    monkeypatch.setattr(file_identity, "_RESOLUTION_NS", 0)
    calls, real = list[Any](), layout.chunk_places
    monkeypatch.setattr(layout, "chunk_places", lambda *given: calls.append(given) or real(*given))

    def write(value: int) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            for name in ("x", "y"):
                file.create_dataset(name, (40, 3), "i8", chunks=(3, 2), compression="gzip")[:30] = value

    def opened(**options: Any) -> int:
        """Reads everything; how many tables were asked of the library."""
        calls.clear()
        dataset = FastHDF5Dataset(tmp_path / "x.h5", ["x", "y"], **options)
        with h5py.File(tmp_path / "x.h5", "r") as file:
            assert all(np.array_equal(row, x) for (row, _), x in zip(dataset, file["x"], strict=True))
        return len(calls)

    write(5)
    assert [opened(cache="off"), opened(cache="off")] == [2, 2]
    assert not (tmp_path / "cache").exists()
    assert [opened(), opened(), opened(cache="ram")] == [2, 0, 0]
    write(6)
    assert [opened(), opened()] == [2, 0]
    for path in default_file_arrays().path.glob("*.npz"):  # type: ignore[union-attr]
        path.write_bytes(path.read_bytes()[:-40])
    assert [opened(), opened()] == [2, 0]


def test_a_table_that_does_not_fit_is_asked_of_the_library(tmp_path: Path) -> None:
    kept = FileArrays(tmp_path / "kept", now=lambda: time.time_ns() + 10_000_000_000)
    with h5py.File(tmp_path / "x.h5", "w") as new:
        new.create_dataset("x", data=np.arange(10), chunks=(2,))
    status = (tmp_path / "x.h5").stat()
    kept.save(status, "hdf5 chunks 1, /x, (10,), (2,)", ARRAYS)
    with h5py.File(tmp_path / "x.h5", "r") as new:
        found = layout.read_layout(new["x"], kept, status)
        assert np.array_equal(found.offsets, layout.read_layout(new["x"]).offsets)

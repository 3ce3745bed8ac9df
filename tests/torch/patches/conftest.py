"""Fixtures of the tests of ``FastPatchDataset``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zarr

from fastpipe.core.array_cache import FileArrays, default_folder
from fastpipe.volumes import blosc2 as blosc2_volumes
from fastpipe.volumes import raw as raw_volumes
from fastpipe.volumes import samples as samples_module
from fastpipe.volumes import tensorstore as tensorstore_volumes
from fastpipe.volumes import volume as grouped_volumes
from fastpipe.volumes import zarr as zarr_volumes


@pytest.fixture(scope="session", autouse=True)
def _libraries_have_their_threads() -> Iterator[None]:
    """zarr-python starts threads when it is first used, and keeps them: let that be before any test."""
    with zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1}):
        zarr.create_array({}, shape=(4,), chunks=(2,), dtype="u1")[:] = 1  # type: ignore[arg-type]
        yield


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units as small as volumes have them, so that small volumes have many."""
    monkeypatch.setattr(grouped_volumes, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(zarr_volumes, "_LEAST_UNIT", 1)
    monkeypatch.setattr(tensorstore_volumes, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(blosc2_volumes, "_LEAST_UNIT", 1)
    monkeypatch.setattr(raw_volumes, "_UNIT_NBYTES", 256)
    monkeypatch.setattr(raw_volumes, "_RUN_NBYTES", 32)


@pytest.fixture(autouse=True)
def cache_folder(own_cache_folder: Path) -> Path:
    """The user's cache folder, which is each test's own."""
    return own_cache_folder


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the clock had gone on since files were written: only then is kept what is found out about them."""

    def made() -> FileArrays | None:
        folder = default_folder()
        return None if folder is None else FileArrays(folder, now=lambda: time.time_ns() + 10**12)

    monkeypatch.setattr(samples_module, "default_file_arrays", made)

"""Processes, threads, memory and descriptors of ``FastPatchDataset``, and files that change meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from volume_kinds import coordinates, random_array, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset
from fastpipe.errors import VolumeError
from fastpipe.sampling import Grid, Uniform
from fastpipe.volumes import samples

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK, PATCH = (13, 14, 16), (4, 4, 8), (3, 4, 5)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("life")
    kinds = ("zarr3 zstd", "hdf5 gzip", "tiff tiles", "npy", "b2nd", "nii")
    array = coordinates(SHAPE).astype(np.int32)
    return {kind: write_volume(kind, folder / kind.replace(" ", "-"), array, CHUNK) for kind in kinds}


def dataset_of(path: Any, **options: Any) -> FastPatchDataset:
    return FastPatchDataset(
        path, PATCH, **{"sampling": Uniform(24), "threads": 2, "cache": Cache("ram", 20_000), **options}
    )


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def memory_files() -> int:
    """Open files in memory."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += "memfd" in os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the listing itself
            continue
    return found


ON_LINUX = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="run it on Linux, which lists descriptors"
)


@ON_LINUX
@pytest.mark.usefixtures("no_gc")
@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["zarr3 zstd", "hdf5 gzip", "tiff tiles", "npy", "b2nd", "nii"])
def test_a_dataset_that_is_deleted_frees_its_memory_threads_and_files(paths: Any, kind: str) -> None:
    """At once, without a collection of garbage."""
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    memories = memory_files()
    dataset = dataset_of(paths[kind], cache=Cache("ram", 1 << 20))
    batches_of(FastLoader(dataset, 5))
    batches_of(DataLoader(dataset, 5))
    dataset[0]
    assert memory_files() > memories
    del dataset
    assert memory_files() == memories
    for thread in set(threading.enumerate()) - before[0]:
        thread.join(60)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before[1]


def test_more_volumes_than_may_be_open(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_OPEN", 3)
    paths = []
    for number in range(12):
        np.save(tmp_path / f"{number}.npy", np.full((6, 6), number))
        paths.append(tmp_path / f"{number}.npy")
    dataset = FastPatchDataset(paths, (3, 3), sampling=Grid(), threads=3, cache="off")
    order = torch.randperm(len(dataset)).tolist()
    found = [int(patch[0, 0]) for batch in FastLoader(dataset, 10, sampler=order) for patch in batch]
    assert found == [index // 4 for index in order]
    assert len(dataset._running()._open) <= 3
    assert dataset._places_in_files() is not None


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "kind", ["hdf5 gzip", "hdf5 contiguous", "hdf5 scale-offset", "tiff tiles", "npy", "nii", "b2nd"]
)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_changes_is_an_error_and_not_values(tmp_path: Path, kind: str, is_open: bool) -> None:
    array = random_array((4, 32, 48), "i2")
    path = write_volume(kind, tmp_path / "x", array, (2, 16, 16))
    dataset = FastPatchDataset(path, (2, 16, 16), sampling=Grid(), cache="off")
    if is_open:
        dataset[0]
    file = path.removesuffix("/raw")
    data = Path(file).read_bytes()
    with open(file, "r+b") as target:
        target.write(data[:1])
        target.truncate(len(data) + 1)
    with pytest.raises(VolumeError, match=r"has changed since it was opened"):
        dataset[5]
    skipping = FastPatchDataset(path, (2, 16, 16), sampling=Grid(), cache="off", bad_samples="skip")
    os.truncate(file, len(data) + 2)
    with pytest.raises(VolumeError, match=r"has changed since it was opened"):  # whatever the policy
        skipping.__getitems__([5])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind",
    ["hdf5 gzip", "hdf5 contiguous", "hdf5 scale-offset", "tiff tiles", "npy", "nii", "nii.gz", "b2nd"],
)
def test_remembered_data_of_a_file_that_has_changed_are_an_error(tmp_path: Path, kind: str) -> None:
    array = random_array((4, 32, 48), "i2")
    path = write_volume(kind, tmp_path / "x", array, (2, 16, 16))
    dataset = FastPatchDataset(path, (2, 16, 16), sampling=Grid(), cache="ram")
    for _ in range(2):
        np.testing.assert_array_equal(dataset[5], array[:2, 16:32, 32:48])
    with open(path.removesuffix("/raw"), "ab") as target:
        target.write(b" ")
    with pytest.raises(VolumeError, match=r"has changed since it was opened"):
        dataset[5]

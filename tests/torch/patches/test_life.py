"""Descriptors of ``FastPatchDataset``, and files that change while it has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from failure import failure
from volume_kinds import random_array, write_volume

from fastpipe import FastLoader, FastPatchDataset
from fastpipe.errors import VolumeError
from fastpipe.sampling import Grid
from fastpipe.volumes import samples

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")


def test_more_volumes_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_OPEN", 3)
    paths = [tmp_path / f"{number}.npy" for number in range(12)]
    for number, path in enumerate(paths):
        np.save(path, np.full((6, 6), number))
    dataset = FastPatchDataset(paths, (3, 3), sampling=Grid(), threads=3, cache="off")
    order = torch.randperm(len(dataset)).tolist()
    found = torch.cat(list(FastLoader(dataset, 10, sampler=order)))[:, 0, 0].tolist()
    assert found == [index // 4 for index in order]
    assert len(dataset._running()._open) <= 3
    assert dataset._places_in_files() is not None


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind",
    ["hdf5 gzip", "hdf5 contiguous", "hdf5 scale-offset", "tiff tiles", "npy", "nii", "nii.gz", "b2nd"],
)
def test_remembered_data_of_a_file_that_has_changed_are_an_error(tmp_path: Path, kind: str) -> None:
    """So are those of a file that is open, or was found when the dataset was made, whatever the policy."""
    array, size = random_array((4, 32, 48), "i2"), (2, 16, 16)
    path = write_volume(kind, tmp_path / "x", array, size)
    remembering = FastPatchDataset(path, size, sampling=Grid(), cache="ram")
    datasets = [remembering]
    if kind != "nii.gz":  # which is read from a copy, for which the cache has a place
        datasets += [
            FastPatchDataset(path, size, sampling=Grid(), cache="off", bad_samples=policy)  # type: ignore[arg-type]
            for policy in ("raise", "raise", "skip")
        ]
    for dataset in (remembering, *datasets[:2]):
        np.testing.assert_array_equal(dataset[5], array[:2, 16:32, 32:48])
    with open(path.removesuffix("/raw"), "ab") as target:
        target.write(b" ")
    for dataset in datasets:
        for ask in (lambda: dataset[5], lambda: dataset.__getitems__([5])):
            assert "has changed since it was opened" in str(failure(ask, VolumeError))

"""Datasets stored in ways of which h5py shows little: their rows are h5py's, and none of them counts as damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastpipe import FastHDF5Dataset, FastLoader, FastPatchDataset
from fastpipe.sampling import Grid


def rows_of(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


@pytest.mark.parametrize("cache", ["off", "ram"])
@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_rows_are_h5pys(odd_hdf5: Path, policy: Any, cache: Any) -> None:
    expected = rows_of(odd_hdf5)
    dataset = FastHDF5Dataset(odd_hdf5, list(expected), bad_samples=policy, cache=cache)
    for _ in range(2):  # the second time from what is kept
        batches = list(FastLoader(dataset, batch_size=4))
        for values, rows in zip(zip(*batches, strict=True), expected.values(), strict=True):
            np.testing.assert_array_equal(np.concatenate(values), rows)


def test_print_says_which_datasets_the_library_reads(odd_hdf5: Path) -> None:
    lines = str(FastHDF5Dataset(odd_hdf5, list(rows_of(odd_hdf5)), cache="off").plan).splitlines()
    by_library = {line.split(":")[0].strip(): line for line in lines if "through h5py" in line}
    assert set(by_library) == {"never filled", "undefined fill", "grows across"}
    assert "parts of it were never written, and no fill value is read there" in by_library["never filled"]
    assert "does not say for certain which chunk is where" in by_library["grows across"]


def test_patches_are_h5pys(odd_hdf5: Path) -> None:
    for name, rows in rows_of(odd_hdf5).items():
        dataset = FastPatchDataset(odd_hdf5 / name, rows.shape, sampling=Grid(), cache="off")
        np.testing.assert_array_equal(dataset[0], rows, err_msg=name)

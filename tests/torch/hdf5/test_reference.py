"""``FastLoader.reference``: the same batches, read by h5py alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from fastpipe import FastHDF5Dataset, FastLoader, Shuffle
from fastpipe.torch.array_dataset import StockSamples


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = []
    for number, rows in enumerate((7, 4)):
        found.append(tmp_path / f"{number}.h5")
        with h5py.File(found[-1], "w") as file:
            data = np.random.default_rng(number).standard_normal((rows, 3, 5)).astype("f4")
            file.create_dataset("x", data=data, chunks=(2, 3, 5), compression="gzip")
            file["y"] = np.arange(rows * 3).reshape(rows, 3) + 100 * number
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True, Shuffle(2, "group")])
@pytest.mark.parametrize("keys", ["x", ["x", "y"], {"a": "y", "b": "x"}])
def test_the_same_batches(paths: list[Path], keys: Any, shuffle: Any, workers: int) -> None:
    dataset = FastHDF5Dataset(paths, keys, sample_dims=2, seed=3, transform=_twice, cache="off")
    loader: Any = FastLoader(
        Subset(dataset, range(1, 33)), 5, shuffle=shuffle, num_workers=workers, workers="processes"
    )
    reference = loader.reference()
    assert type(reference) is DataLoader
    assert isinstance(reference.dataset.dataset, StockSamples)
    fast, slow = list(loader), list(reference)
    assert len(fast) == len(slow) == 7
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _twice(value: Any) -> Any:
    return {key: 2 * one for key, one in value.items()} if isinstance(value, dict) else 2 * value


def test_indices_as_of_a_sequence(paths: list[Path]) -> None:
    dataset = FastHDF5Dataset(paths, ["x", "y"], sample_dims=2, target_transform=lambda y: -y)
    stock: Any = FastLoader(dataset).reference().dataset
    assert len(stock) == len(dataset) == 33
    for index in (-1, -33, 0, 20, 21, 32):
        np.testing.assert_array_equal(stock[index][0], dataset[index][0])
        assert stock[index][1] == dataset[index][1]
    for index in (33, -34):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 33"):
            stock[index]

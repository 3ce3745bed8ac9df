"""``transform=`` is given the values of a patch together, and ``nan=`` is seen to before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from volume_kinds import random_array, write_volume

from fastpipe import FastLoader, FastPatchDataset
from fastpipe.errors import BadSampleError, OptionError
from fastpipe.sampling import Grid

pytestmark = pytest.mark.usefixtures("same_generators")

VOLUME = np.arange(8 * 9).reshape(8, 9)


def joined(*values: Any) -> Any:
    total = sum(int(value.sum()) for value in values)
    return {"count": len(values), "sum": total, "volume": values[0].copy()}


def dataset_of(transform: Any, roles: int = 1) -> FastPatchDataset:
    others = dict([("labels", VOLUME % 5), ("mask", VOLUME > 1)][: roles - 1])
    return FastPatchDataset(VOLUME, (3, 4), sampling=Grid(), transform=transform, threads=2, **others)


@pytest.mark.parametrize(
    ("roles", "kind", "workers"), [(1, DataLoader, 1), (2, FastLoader, 0), (3, FastLoader, 1)]
)
def test_a_transform_gets_all_values_of_a_patch(roles: int, kind: Any, workers: int) -> None:
    dataset, plain = dataset_of(joined, roles), dataset_of(None, roles)
    (batch,) = kind(dataset, len(dataset), num_workers=workers)
    for number, sample in enumerate(plain):
        wanted = joined(*sample) if roles > 1 else joined(sample)
        assert {key: values[number].tolist() for key, values in batch.items()} == {
            **wanted, "volume": wanted["volume"].tolist()
        }  # fmt: skip
    assert dataset[2]["count"] == roles


def test_a_transform_may_keep_and_change_its_values(tmp_path: Any) -> None:
    """What it keeps, or writes into, is no other sample's."""
    kept: list[Any] = []

    def keeping(volume: Any) -> Any:
        kept.append(volume)
        volume += 1
        return volume

    dataset, expected = dataset_of(keeping), np.stack([patch + 1 for patch in dataset_of(None)])
    for _ in range(2):
        assert np.array_equal(torch.cat(list(FastLoader(dataset, 4))), expected)
    assert VOLUME[0, 1] == 1
    assert np.array_equal(kept[: len(dataset)], expected)
    assert all(patch.base is None for patch in kept), "none keeps the memory of a batch"


def with_nan(volume: Any, size: Any, nan: Any = "keep", **options: Any) -> FastPatchDataset:
    return FastPatchDataset(volume, size, nan=nan, sampling=Grid(), **options)


def test_nan_is_kept_replaced_or_an_error() -> None:
    volume, size = np.arange(24, dtype=np.float32).reshape(4, 6), (2, 3)
    volume[1, 4] = np.nan
    kept, replacing = with_nan(volume, size), with_nan(volume, size, -7, labels=volume)
    assert np.array_equal(kept[1], volume[:2, 3:], equal_nan=True)
    values, labels = replacing[1]
    assert np.array_equal(values, np.where(np.isnan(volume), -7, volume)[:2, 3:])
    assert np.isnan(labels[1, 1])  # which are taken as they are
    (reference,) = FastLoader(replacing, 4).reference()
    assert np.array_equal(reference[0][1], values) and np.array_equal(reference[1][1], labels, equal_nan=True)
    refusing = with_nan(volume, size, "error")
    with pytest.raises(BadSampleError, match="NaN"):
        list(FastLoader(refusing, 4).reference())
    assert np.array_equal(refusing[0], volume[:2, :3])
    said = r"patch of 2×3 at \(0, 3\)(.|\n)*1 of the patch's elements are NaN"
    with pytest.raises(BadSampleError, match=said):
        refusing[1]
    assert len(with_nan(volume, size, "error", bad_samples="skip").__getitems__(range(4))) == 3
    assert np.isnan(volume[1, 4])
    for nan in ("drop", None, "0"):
        with pytest.raises(OptionError, match="nan must be"):
            with_nan(volume, size, nan)


def test_nan_of_halves_and_complex_numbers_is_found() -> None:
    assert with_nan(np.array([[1, np.nan, 3]], "f2"), (1, 3), 0)[0].tolist() == [[1, 0, 3]]
    assert with_nan(np.array([[1, complex(0, np.nan)]], "c8"), (1, 2), 2)[0].tolist() == [[1, 2]]
    assert with_nan(np.array([[1, 2]]), (1, 2), "error")[0].tolist() == [[1, 2]]


def test_nan_of_a_volume_that_python_reads_is_replaced_or_an_error(tmp_path: Path) -> None:
    array, size = random_array((2, 16, 16), "f4"), (1, 16, 16)
    array[1, 2, 3] = np.nan
    path = write_volume("n5 gzip", tmp_path / "x", array, size)
    values, labels = with_nan(path, size, -7, labels=path)[1]
    assert np.array_equal(values, np.where(np.isnan(array), -7, array)[1:])
    assert np.array_equal(labels, array[1:], equal_nan=True)
    with pytest.raises(BadSampleError, match="1 of the patch's elements are NaN"):
        with_nan(path, size, "error")[1]

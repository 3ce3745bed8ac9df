"""``transform=`` is given the values of a patch together, and draws as the loader does; ``nan=`` before it."""

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
from fastpipe.sampling import Grid, Uniform

pytestmark = pytest.mark.usefixtures("same_generators")

VOLUME = np.arange(8 * 9).reshape(8, 9)
LABELS = VOLUME % 5


def joined(*values: Any) -> Any:
    return {
        "count": len(values),
        "sum": sum(int(value.sum()) for value in values),
        "volume": values[0].copy(),
    }


def flipped(volume: Any, labels: Any) -> Any:
    """Both alike, as the draw says."""
    if torch.rand(()) < 0.5:
        return volume[::-1].copy(), labels[::-1].copy()
    return volume, labels


def dataset_of(transform: Any, roles: int = 1, sampling: Any = None, **options: Any) -> FastPatchDataset:
    more = dict(list({"labels": LABELS, "mask": LABELS > 1}.items())[: roles - 1])
    return FastPatchDataset(
        VOLUME, (3, 4), sampling=sampling or Grid(), transform=transform, threads=2, **{**more, **options}
    )


def values(loader: Any) -> list[Any]:
    return [
        sample.tolist() for batch in loader for sample in (batch[0] if isinstance(batch, list) else batch)
    ]


@pytest.mark.parametrize(
    ("roles", "kind", "workers"), [(1, DataLoader, 1), (2, FastLoader, 0), (3, FastLoader, 1)]
)
def test_a_transform_gets_all_values_of_a_patch(roles: int, kind: Any, workers: int) -> None:
    dataset, plain = dataset_of(joined, roles), dataset_of(None, roles)
    batch = next(iter(kind(dataset, len(dataset), num_workers=workers)))
    assert batch["count"].tolist() == [roles] * len(dataset)
    for number in range(len(dataset)):
        sample = plain[number] if roles > 1 else (plain[number],)
        assert batch["sum"][number] == sum(int(value.sum()) for value in sample)
        assert np.array_equal(batch["volume"][number], sample[0])
    one = dataset[2]
    assert one["count"] == roles


def test_volume_and_labels_are_changed_together() -> None:
    dataset = dataset_of(flipped, 2, Uniform(60), seed=1)
    changed = 0
    for volume, labels in FastLoader(dataset, 8):
        assert torch.equal(labels, volume % 5)
        changed += int((volume[:, 0, 0] > volume[:, 1, 0]).sum())
    assert 10 < changed < 50


def test_a_transform_may_keep_and_change_its_values(tmp_path: Any) -> None:
    """What it keeps, or writes into, is no other sample's."""
    kept: list[Any] = []

    def keeping(volume: Any) -> Any:
        kept.append(volume)
        volume += 1
        return volume

    dataset = dataset_of(keeping)
    for _ in range(2):
        expected = [patch + 1 for patch in map(dataset_of(None).__getitem__, range(len(dataset)))]
        assert values(FastLoader(dataset, 4)) == [patch.tolist() for patch in expected]
    assert VOLUME[0, 1] == 1
    first = [patch.tolist() for patch in kept[: len(dataset)]]
    assert first == [patch.tolist() for patch in expected]
    assert all(patch.base is None for patch in kept), "none keeps the memory of a batch"


def test_nan_is_kept_replaced_or_an_error() -> None:
    volume = np.arange(24, dtype=np.float32).reshape(4, 6)
    volume[1, 4] = np.nan
    options: dict[str, Any] = {"sampling": Grid(), "labels": volume}
    assert np.array_equal(FastPatchDataset(volume, (2, 3), **options)[1][0], volume[:2, 3:], equal_nan=True)
    values, labels = FastPatchDataset(volume, (2, 3), nan=-7, **options)[1]
    assert np.array_equal(values, np.where(np.isnan(volume), -7, volume)[:2, 3:])
    assert np.isnan(labels[1, 1])  # which are taken as they are
    reference = next(iter(FastLoader(FastPatchDataset(volume, (2, 3), nan=-7, **options), 4).reference()))
    assert np.array_equal(reference[0][1], values) and np.array_equal(reference[1][1], labels, equal_nan=True)
    refusing = FastPatchDataset(volume, (2, 3), nan="error", **options)
    with pytest.raises(BadSampleError, match="NaN"):
        next(iter(FastLoader(refusing, 4).reference()))
    assert np.array_equal(refusing[0][0], volume[:2, :3])
    with pytest.raises(
        BadSampleError, match=r"patch of 2×3 at \(0, 3\)(.|\n)*1 of the patch's elements are NaN"
    ):
        refusing[1]
    skipping = FastPatchDataset(volume, (2, 3), nan="error", bad_samples="skip", **options)
    assert len(skipping.__getitems__(range(4))) == 3
    assert np.isnan(volume[1, 4])
    for nan in ("drop", None, "0"):
        with pytest.raises(OptionError, match="nan must be"):
            FastPatchDataset(volume, (2, 3), nan=nan)  # type: ignore[arg-type]


def test_nan_of_halves_and_complex_numbers_is_found() -> None:
    half = np.array([[1, np.nan, 3]], np.float16)
    assert FastPatchDataset(half, (1, 3), nan=0, sampling=Grid())[0].tolist() == [[1, 0, 3]]
    both = np.array([[1, complex(0, np.nan)]], np.complex64)
    assert FastPatchDataset(both, (1, 2), nan=2, sampling=Grid())[0].tolist() == [[1, 2]]
    assert FastPatchDataset(np.array([[1, 2]]), (1, 2), nan="error", sampling=Grid())[0].tolist() == [[1, 2]]


def test_nan_of_a_volume_that_python_reads_is_replaced_or_an_error(tmp_path: Path) -> None:
    array = random_array((2, 16, 16), "f4")
    array[1, 2, 3] = np.nan
    path = write_volume("n5 gzip", tmp_path / "x", array, (1, 16, 16))
    values, labels = FastPatchDataset(path, (1, 16, 16), nan=-7, labels=path, sampling=Grid())[1]
    assert np.array_equal(values, np.where(np.isnan(array), -7, array)[1:])
    assert np.array_equal(labels, array[1:], equal_nan=True)
    with pytest.raises(BadSampleError, match="1 of the patch's elements are NaN"):
        FastPatchDataset(path, (1, 16, 16), nan="error", sampling=Grid())[1]

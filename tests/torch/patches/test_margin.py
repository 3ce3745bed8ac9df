"""Patches with what is around them: where patches without are, and what ``numpy.pad`` has around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset
from volume_kinds import random_array, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle, augment, stitch
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, PATCH, MARGIN = (14, 20, 17), (4, 6, 5), (3, 0, 7)


@pytest.fixture
def volumes(tmp_path: Any) -> Any:
    """A volume and its labels, as arrays and as files."""
    arrays = random_array(SHAPE, "i2", 1), random_array(SHAPE, "u1", 2)
    paths = [
        write_volume("zarr3 blosc", str(tmp_path / str(n)), one, (5, 7, 6)) for n, one in enumerate(arrays)
    ]
    return arrays, paths


def around(array: Any, start: Any, mode: str = "constant") -> Any:
    """A patch with its margin, of the padded array."""
    padded = np.pad(array, [(20, 20)] * 3, mode)
    edges = zip(start, PATCH, MARGIN, strict=True)
    return padded[tuple(slice(20 + at - more, 20 + at + side + more) for at, side, more in edges)]


@pytest.mark.few(7)
@pytest.mark.parametrize("padding", ["error", "constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize(
    "sampling", [Uniform(30), Grid(3), Foreground(30, 0.5)], ids=lambda one: type(one).__name__
)
def test_patches_are_where_they_are_without(padding: str, sampling: Any, volumes: Any) -> None:
    arrays, (path, labels) = volumes
    plain, more = (
        FastPatchDataset(
            path, PATCH, labels=labels, sampling=sampling, padding=padding, seed=3, margin=margin
        )
        for margin in (0, MARGIN)
    )
    assert more.margin == MARGIN and plain.margin == (0, 0, 0) and more.patch_size == PATCH
    for epoch in (0, 1):
        np.testing.assert_array_equal(plain.places(epoch)[1], more.places(epoch)[1])
    loader = FastLoader(more, batch_size=7)
    starts, seen = more.places(0)[1], 0
    for batch in loader:
        for row in range(len(batch[0])):
            for found, array in zip(batch, arrays, strict=True):
                wanted = around(array, starts[seen], "constant" if padding == "error" else padding)
                np.testing.assert_array_equal(found[row].numpy(), wanted)
            seen += 1
    assert seen == len(more)


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", [Cache("off"), Cache("ram", 1 << 16), Cache("ram")], ids=str)
def test_every_way_gives_the_same_patches(cache: Cache, volumes: Any) -> None:
    _, (path, labels) = volumes
    dataset = FastPatchDataset(
        path, PATCH, labels=labels, sampling=Uniform(23), margin=MARGIN, seed=5, cache=cache
    )
    wanted = list(FastLoader(dataset, batch_size=4))
    reference = FastLoader(dataset, batch_size=4).reference()
    sliced = dataset._sliced()
    for number, batch in enumerate(wanted):
        for row in range(len(batch[0])):
            for found, value in zip(batch, sliced.values(4 * number + row, 5, 0), strict=True):
                np.testing.assert_array_equal(found[row].numpy(), value)
    for one, other in zip(wanted, reference, strict=True):
        assert all(map(torch.equal, one, other))
    tour = FastLoader(
        dataset, batch_size=23, shuffle=Shuffle(unit="group"), num_workers=1, workers="processes"
    )
    [whole] = tour
    rows = sorted(row.numpy().tobytes() for row in whole[0])
    assert rows == sorted(row.numpy().tobytes() for batch in wanted for row in batch[0])
    assert len(list(DataLoader(Subset(dataset, range(5)), batch_size=5))) == 1


def test_an_augmentation_defines_the_margin_and_cuts_it_off(volumes: Any) -> None:
    arrays, (path, labels) = volumes
    size = (4, 6, 6)
    views = augment.Compose([
        augment.RandomAffine3D(30, (0.7, 1.4), size=size, p_rotation=0.5, p_scale=0.0), augment.RandomFlip3D(p=0.0)
    ])  # fmt: skip
    dataset = FastPatchDataset(path, size, labels=labels, sampling=Uniform(40), margin=views, seed=1)
    assert dataset.margin == views.margin(size) and min(dataset.margin) > 0
    starts, at, is_plain = dataset.places(0)[1], 0, 0
    for images, labelled in FastLoader(dataset, batch_size=8, augment=views, seed=1):
        assert images.shape == labelled.shape == (8, *size)
        assert images.dtype == torch.float32 and labelled.dtype == torch.uint8
        for image, label in zip(images.numpy(), labelled.numpy(), strict=True):
            box = tuple(slice(low, low + side) for low, side in zip(starts[at], size, strict=True))
            at += 1
            if np.array_equal(image, arrays[0][box]):
                is_plain += 1
                np.testing.assert_array_equal(label, arrays[1][box])
    assert 10 < is_plain < 30  # half of them are not rotated


@pytest.mark.parametrize("margin", [-1, (1, 2), 1.5, "x", None], ids=str)
def test_margins_that_cannot_be_are_named(margin: Any) -> None:
    with pytest.raises(OptionError, match="margin must be a number of voxels from 0"):
        FastPatchDataset(np.zeros((9, 9, 9)), (2, 2, 2), margin=margin)


def test_stitch_refuses_a_margin() -> None:
    dataset = FastPatchDataset(np.zeros((9, 9, 9)), (3, 3, 3), sampling=Grid(), margin=1)
    assert "Margin: (1, 1, 1)" in repr(dataset)
    with pytest.raises(OptionError, match="cuts a margin"):
        stitch(iter([]), dataset, np.zeros((9, 9, 9)))

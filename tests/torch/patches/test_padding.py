"""Patches that reach beyond a volume, and those with a margin; ``test_parity.py`` has all modes of padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset
from volume_kinds import cut, equal, random_array, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle, augment, stitch
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")


def test_volume_labels_and_mask_have_constants_of_their_own() -> None:
    volume, labels, inside = np.ones((4, 4), "f4"), np.ones((4, 4), "i2"), np.zeros((3, 4), bool)
    inside[2:, 1:] = True
    options: Any = {"labels": labels, "mask": labels, "sampling": Positions([[-2, -1]])}
    for padding, wanted in [
        ("constant", (0, 0)), (("constant", -1000), (-1000, 0)), (("constant", 2.5, 255), (2.5, 255)),
    ]:  # fmt: skip
        dataset = FastPatchDataset(volume, (3, 4), padding=padding, **options)
        values, classes, mask = dataset[0]
        assert np.array_equal(values, np.where(inside, 1, wanted[0]).astype("f4"))
        assert np.array_equal(classes, np.where(inside, 1, wanted[1]))
        assert np.array_equal(mask, inside)
        assert f"Padding: {padding!r}" in repr(dataset)


@pytest.mark.parametrize("sampling", [Uniform(5), Grid(), Foreground(5, fraction=1.0)])
def test_a_patch_larger_than_the_volume_is_around_its_middle(sampling: Any) -> None:
    array = np.arange(1, 13).reshape(4, 3)
    dataset = FastPatchDataset(array, (9, 2), labels=array % 2, sampling=sampling, padding="constant", seed=0)
    _, starts = dataset.places()
    assert (starts[:, 0] == -2).all()
    assert set(starts[:, 1].tolist()) <= {0, 1}
    sample = dataset[0][0]
    assert sample[2:6].all() and not sample[:2].any() and not sample[6:].any()


def test_without_padding_what_reaches_beyond_is_refused() -> None:
    array = np.zeros((4, 6), "u1")
    with pytest.raises(OptionError, match=r"a patch of \(5, 2\) does not fit into .*which has \(4, 6\)"):
        FastPatchDataset(array, (5, 2))
    channels_last = np.zeros((8, 8, 8, 3), "u1")
    for labels in (None, np.zeros((8, 8, 8), "u1")):
        with pytest.raises(
            OptionError, match=r"shape \(8, 8, 8, 3\), .*: channels must come first.*moveaxis"
        ):
            FastPatchDataset(channels_last, (4, 4, 4), labels=labels)
    FastPatchDataset(channels_last, (4, 4, 4), padding="constant")
    for start in ([-2, 0], [0, 6], [4, 0]):  # without a voxel of the volume
        with pytest.raises(OptionError, match=r"patch 0, of \(2, 2\) at .* is not within"):
            FastPatchDataset(array, (2, 2), sampling=Positions([start]), padding="edge")
    for start in ([-1, 0], [0, 5], [3, 0]):
        with pytest.raises(OptionError, match=r"patch 1, of \(2, 2\) at .* is not within .*padding= lets"):
            FastPatchDataset(array, (2, 2), sampling=Positions([[0, 0], start]))


@pytest.mark.parametrize(
    "padding", ["zero", 0, None, ("constant",), ("edge", 1), ("constant", "1"), ("constant", 1, 2, 3)]
)
def test_paddings_that_cannot_be_are_named(padding: Any) -> None:
    with pytest.raises(OptionError, match=r"padding must be 'error', one of 'constant'.*got "):
        FastPatchDataset(np.zeros((4, 4)), (2, 2), padding=padding)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("i8", 2**60 + 1), ("u8", 2**64 - 1), ("u1", 255.0), ("f4", 0.1), ("f2", -np.inf), ("?", 1)],
)
def test_a_constant_is_what_numpy_pads_with(kind: str, value: Any) -> None:
    volume = np.ones((2, 2), kind)
    dataset = FastPatchDataset(volume, (4, 4), padding=("constant", value), sampling=Grid())
    np.testing.assert_array_equal(dataset[0], np.pad(volume, 1, constant_values=value))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("i8", 2**63), ("u8", 2**64), ("u8", 2.0**64), ("i1", 0.5), ("f4", 1e300), ("f2", 70_000), ("f8", 10**400),
        ("?", 2),
    ],
)  # fmt: skip
def test_a_number_that_elements_cannot_hold_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(OptionError, match=r"the constant of padding= for volume is .* cannot hold"):
        FastPatchDataset(np.ones((4, 4), kind), (6, 6), padding=("constant", value), sampling=Grid())
    if np.dtype(kind).kind == "f":
        with pytest.raises(OptionError, match=r"nan= is .* cannot hold"):
            FastPatchDataset(np.ones((4, 4), kind), (2, 2), nan=value)


def test_wrapped_patches_read_the_ends_alone(tmp_path: Path) -> None:
    """A corner of a large volume: its eight corners, and nothing between them."""
    array = np.random.default_rng(0).integers(0, 99, (40, 40, 2, 40)).astype("u1")
    path = write_volume("zarr3 zstd", tmp_path / "x", array, (4, 4, 2, 4))
    starts = [[-1, 38, -1, 38], [3, -1, 0, 5]]
    dataset = FastPatchDataset(path, (4, 4, 2, 4), sampling=Positions(starts), padding="wrap", cache="off")
    for patch, start in zip(dataset, starts, strict=True):
        assert equal(patch, cut(array, start, (4, 4, 2, 4), "wrap"))
    decoded, used = dataset._running().counts.nbytes
    assert used == 2 * 4 * 4 * 2 * 4
    assert decoded <= (2**3 + 2**3) * 4 * 4 * 2 * 4


# ---- margins --------------------------------------------------------------------------------------

SHAPE, PATCH, MARGIN = (14, 20, 17), (4, 6, 5), (3, 0, 7)


@pytest.fixture
def volumes(tmp_path: Any) -> Any:
    """A volume and its labels, as arrays and as files."""
    arrays = random_array(SHAPE, "i2", 1), random_array(SHAPE, "u1", 2)
    return arrays, [
        write_volume("zarr3 blosc", tmp_path / str(n), one, (5, 7, 6)) for n, one in enumerate(arrays)
    ]


@pytest.mark.few(7)
@pytest.mark.parametrize("padding", ["error", "constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize(
    "sampling", [Uniform(30), Grid(3), Foreground(30, 0.5)], ids=lambda one: type(one).__name__
)
def test_patches_are_where_they_are_without(padding: str, sampling: Any, volumes: Any) -> None:
    arrays, (path, labels) = volumes
    options: Any = {"labels": labels, "sampling": sampling, "padding": padding, "seed": 3}
    plain, more = (FastPatchDataset(path, PATCH, margin=margin, **options) for margin in (0, MARGIN))
    assert more.margin == MARGIN and plain.margin == (0, 0, 0) and more.patch_size == PATCH
    for epoch in (0, 1):
        np.testing.assert_array_equal(plain.places(epoch)[1], more.places(epoch)[1])
    samples = [sample for batch in FastLoader(more, batch_size=7) for sample in zip(*batch, strict=True)]
    size, mode = np.add(PATCH, 2 * np.array(MARGIN)), "constant" if padding == "error" else padding
    for start, sample in zip(more.places(0)[1], samples, strict=True):
        for found, array in zip(sample, arrays, strict=True):
            assert equal(found, cut(array, start - MARGIN, size, mode))


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", [Cache("off"), Cache("ram", 1 << 16), Cache("ram")], ids=str)
def test_every_way_gives_the_same_patches(cache: Cache, volumes: Any) -> None:
    _, (path, labels) = volumes
    options: Any = {"labels": labels, "sampling": Uniform(23), "seed": 5}
    dataset = FastPatchDataset(path, PATCH, margin=MARGIN, cache=cache, **options)
    wanted = list(FastLoader(dataset, batch_size=4))
    torch.testing.assert_close(list(FastLoader(dataset, batch_size=4).reference()), wanted, rtol=0, atol=0)
    tour: dict[str, Any] = {"shuffle": Shuffle(unit="group"), "num_workers": 1, "workers": "processes"}
    [(whole, _)] = FastLoader(dataset, batch_size=23, **tour)
    rows = sorted(row.numpy().tobytes() for row in whole)
    assert rows == sorted(row.numpy().tobytes() for images, _ in wanted for row in images)
    (part,) = DataLoader(Subset(dataset, range(5)), batch_size=5)
    assert part[0].shape == (5, 10, 6, 19)


def test_an_augmentation_defines_the_margin_and_cuts_it_off(volumes: Any) -> None:
    arrays, (path, labels) = volumes
    size = (4, 6, 6)
    views = augment.Compose([
        augment.RandomAffine3D(30, (0.7, 1.4), size=size, p_rotation=0.5, p_scale=0.0), augment.RandomFlip3D(p=0.0)
    ])  # fmt: skip
    dataset = FastPatchDataset(path, size, labels=labels, sampling=Uniform(40), margin=views, seed=1)
    assert dataset.margin == views.margin(size) and min(dataset.margin) > 0
    found = [*zip(*FastLoader(dataset, batch_size=8, augment=views, seed=1), strict=True)]
    images, labelled = (torch.cat(each) for each in found)
    assert images.shape == labelled.shape == (40, *size)
    assert images.dtype == torch.float32 and labelled.dtype == torch.uint8
    is_plain = 0
    for start, image, label in zip(dataset.places(0)[1], images, labelled, strict=True):
        if np.array_equal(image, cut(arrays[0], start, size)):
            is_plain += 1
            assert equal(label, cut(arrays[1], start, size))
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

"""``mask_fraction=``: patches of which enough is in the mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from volume_kinds import write_volume

from fastpipe import FastPatchDataset
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Uniform
from fastpipe.volumes import sampling as sampling_module

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, PATCH = (48, 56, 60), (12, 16, 20)


def ball(radius: float = 20.0) -> Any:
    """A mask with a round surface, where blocks are partly inside."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    return ((z - 24) ** 2 + (y - 28) ** 2 + (x - 30) ** 2 < radius**2).astype(np.uint8)


def shares(mask: Any, starts: Any) -> Any:
    """The part of each patch that is in the mask."""
    boxes = [
        tuple(slice(at, at + side) for at, side in zip(start, PATCH, strict=True))
        for start in starts.tolist()
    ]
    return np.array([(mask[box] != 0).mean() for box in boxes])


@pytest.mark.parametrize(
    ("kind", "least"), [("array", 0.9), ("zarr3 blosc", 0.5), ("hdf5 gzip", 0.1), ("tiff strips", 0.5)]
)
def test_every_patch_has_the_asked_share_of_the_mask(tmp_path: Path, kind: str, least: float) -> None:
    mask = ball()
    path = write_volume(kind, tmp_path / "mask", mask, (11, 13, 17))
    dataset = FastPatchDataset(
        np.zeros(SHAPE, "u1"), PATCH, mask=path, sampling=Uniform(300, mask_fraction=least), seed=2
    )
    _, starts = dataset.places()
    found = shares(mask, starts)
    assert found.min() >= least
    assert found.min() < least + 0.1  # and not only the middle is taken
    plain = FastPatchDataset(np.zeros(SHAPE, "u1"), PATCH, sampling=Uniform(300), seed=2).places()[1]
    kept = (plain == starts).all(axis=1)
    assert (shares(mask, plain[kept]) >= least).all()  # those that were good are as they were
    # Blocks at the surface of a patch do not count: one that has little more may be left out.
    assert (shares(mask, plain[~kept]) <= least + 0.15).all()
    assert not np.array_equal(dataset.places(1)[1], starts)


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("?", True, False), ("f8", np.nan, 0), ("f4", -1, -0.0), ("f8", 1e-300, 0), ("f2", 6e-8, 0), ("c8", 1j, 0),
        ("u8", 2**64 - 1, 0), ("i1", -128, 0),
    ],
)  # fmt: skip
def test_a_mask_of_any_type_is_where_it_is_not_0(kind: str, inside: Any, outside: Any) -> None:
    """The same places as of a mask of 0 and 1."""
    is_in = ball() != 0
    mask = np.full(is_in.shape, outside, kind)
    mask[is_in] = inside
    sampling = Uniform(50, mask_fraction=0.5)
    found, expected = (
        FastPatchDataset(np.zeros(SHAPE, "u1"), PATCH, mask=one, sampling=sampling, seed=2).places()[1]
        for one in (mask, is_in.astype("u1"))
    )
    np.testing.assert_array_equal(found, expected)


def test_a_mask_with_channels_is_inside_where_any_is() -> None:
    masks = np.zeros((2, *SHAPE), np.uint8)
    masks[0, :, :28], masks[1, :, 28:, :32] = 1, 1
    dataset = FastPatchDataset(
        np.zeros(SHAPE, "u1"), PATCH, mask=masks, sampling=Uniform(200, mask_fraction=1.0), seed=1
    )
    assert (shares(masks.any(axis=0), dataset.places()[1]) == 1).all()


def test_a_share_that_no_patch_has_is_an_error_that_says_the_most() -> None:
    with pytest.raises(OptionError, match=r"mask_fraction=0.99: of 16,384 patches .* the most is 0\.\d"):
        FastPatchDataset(np.zeros(SHAPE, "u1"), PATCH, mask=ball(9), sampling=Uniform(10, mask_fraction=0.99))
    with pytest.raises(OptionError, match=r"the most is 0\.000"):
        FastPatchDataset(
            np.zeros(SHAPE, "u1"), PATCH, mask=np.zeros(SHAPE, "u1"), sampling=Uniform(10, mask_fraction=0.01)
        )


def test_patches_around_the_foreground_are_not_asked_for_the_mask() -> None:
    mask, labels = ball(), np.zeros(SHAPE, np.uint8)
    labels[2, 2, 2] = 1
    dataset = FastPatchDataset(
        labels, PATCH, labels=labels, mask=mask, seed=1,
        sampling=Foreground(400, fraction=0.5, mask_fraction=0.6),
    )  # fmt: skip
    _, starts = dataset.places()
    around = (starts == 0).all(axis=1)
    assert around.mean() == pytest.approx(0.5, abs=0.08)
    assert shares(mask, starts[~around]).min() >= 0.6


def test_padding_is_outside_of_the_mask() -> None:
    mask = np.ones((6, 56, 60), np.uint8)
    with pytest.raises(OptionError, match=r"the most is 0\.500"):
        FastPatchDataset(mask, PATCH, mask=mask, padding="edge", sampling=Uniform(10, mask_fraction=0.6))
    dataset = FastPatchDataset(
        mask, PATCH, mask=mask, padding="constant", sampling=Uniform(10, mask_fraction=0.5), seed=1
    )
    assert dataset[0][1].mean() == 0.5


def test_counts_of_a_mask_are_kept(tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_volume("zarr3 zstd", tmp_path / "mask", ball(), (20, 20, 20))
    scanned = []
    real = sampling_module._scan
    monkeypatch.setattr(sampling_module, "_scan", lambda *some: (scanned.append(1), real(*some)))
    places = [
        FastPatchDataset(
            np.zeros(SHAPE, "u1"), PATCH, mask=path, sampling=Uniform(40, mask_fraction=least), seed=1
        ).places()[1]
        for least in (0.5, 0.5, 0.3)
    ]
    assert len(scanned) == 1
    np.testing.assert_array_equal(places[0], places[1])


def test_no_patch_is_empty_if_some_of_the_mask_is_asked_for() -> None:
    """A small object: however little is asked for, each patch has a voxel of it."""
    mask = np.zeros((128, 128, 128), np.uint8)
    mask[65:70, 65:70, 65:70] = 1
    dataset = FastPatchDataset(
        mask, (32, 32, 32), mask=mask, sampling=Uniform(500, mask_fraction=1e-9), seed=0
    )
    assert all(sample[1].any() for sample in dataset.__getitems__(range(500)))
    other = FastPatchDataset(
        mask, (32, 32, 32), mask=mask, sampling=Uniform(500, mask_fraction=1e-9), seed=1
    ).places()[1]
    assert (other == dataset.places()[1]).all(axis=1).mean() < 0.05

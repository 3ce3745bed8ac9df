"""Patches around the foreground, and patches of which enough is in the mask: how many, where, and what is kept."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from volume_kinds import cut, write_volume

from fastpipe import FastLoader, FastPatchDataset
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Uniform
from fastpipe.volumes import samples
from fastpipe.volumes import sampling as sampling_module
from fastpipe.volumes.opening import open_volume

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, PATCH = (40, 50, 60), (8, 9, 10)
ONE, TWO, THREE = (5, 5, 5), (30, 30, 30), (5, 30, 50)  # where cubes begin


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The volumes that were gone through."""
    found: list[str] = []
    real = sampling_module.scan

    def scan(roles: Any, number: int, look: Any) -> None:
        found.append(roles[0].volumes[number].name)
        real(roles, number, look)

    monkeypatch.setattr(sampling_module, "scan", scan)
    return found


def test_memory_for_looking_at_arrays_is_bounded() -> None:
    array = np.ones((128, 256, 256), np.uint8)
    for options in (
        {"labels": array, "sampling": Foreground(10)},
        {"mask": array, "sampling": Uniform(10, mask_fraction=0.5)},
    ):
        tracemalloc.start()
        try:
            FastPatchDataset(array, (16, 16, 16), **options)  # type: ignore[arg-type]
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()


# ---- foreground ---------------------------------------------------------------------------------


def labelled(*cubes: tuple[int, tuple[int, int, int]]) -> Any:
    """Labels with cubes of side 3: a label, and where its cube begins."""
    labels = np.zeros(SHAPE, np.uint8)
    for label, (z, y, x) in cubes:
        labels[z : z + 3, y : y + 3, x : x + 3] = label
    return labels


def around(labels: Any, count: int = 2000, fraction: float = 1.0, **options: Any) -> FastPatchDataset:
    volume: Any = np.zeros(SHAPE, np.uint8)
    volume = [volume] * len(labels) if isinstance(labels, list) else volume
    sampling = Foreground(count, fraction=fraction, **options)
    return FastPatchDataset(volume, PATCH, labels=labels, sampling=sampling, seed=1)


def starts_of(*given: Any, **options: Any) -> Any:
    return around(*given, **options).places()[1]


def inside(starts: Any, corner: Any) -> Any:
    """Whether patches have a voxel of a cube."""
    corner = np.array(corner)
    return ((starts < corner + 3) & (starts + np.array(PATCH) > corner)).all(axis=1)


@pytest.mark.parametrize("fraction", [0.0, 0.33, 0.8, 1.0])
def test_the_asked_fraction_of_patches_is_around_the_foreground(fraction: float) -> None:
    corner = (5, 40, 20)
    by_chance = inside(starts_of(labelled((1, corner)), fraction=0.0), corner).mean()
    dataset = around(labelled((1, corner)), fraction=fraction)
    epochs = [dataset.places(epoch)[1] for epoch in (0, 1)]
    shares = [inside(starts, corner).mean() for starts in epochs]
    assert shares == pytest.approx([fraction + (1 - fraction) * by_chance] * 2, abs=0.04)
    assert (fraction == 1.0) <= (shares[0] == 1.0)
    assert not np.array_equal(*epochs)


def test_the_rest_of_the_patches_is_anywhere_alike() -> None:
    """Those that are not around the foreground are those of ``Uniform``."""
    some, none = (starts_of(labelled((1, ONE)), fraction=part) for part in (0.5, 0.0))
    same = (some == none).all(axis=1)
    assert same.mean() == pytest.approx(0.5, abs=0.05)
    assert inside(some[~same], ONE).all()


def test_classes_are_drawn_alike_whatever_their_size() -> None:
    labels = np.zeros(SHAPE, np.uint8)
    labels[:20, :20, :20], labels[30, 40, 50], labels[39, 2, 5] = 1, 2, 9
    starts = starts_of(labels)
    for voxel in ((30, 40, 50), (39, 2, 5)):  # found by the patch that is centred at their only voxel
        start = np.clip(np.array(voxel) - np.array(PATCH) // 2, 0, np.array(SHAPE) - PATCH)
        assert (starts == start).all(axis=1).mean() == pytest.approx(1 / 3, abs=0.04)


def test_patches_are_around_the_named_classes_alone() -> None:
    labels = labelled((1, ONE), (2, TWO), (3, THREE))
    starts = starts_of(labels, classes=(2, 3))
    assert (inside(starts, TWO) | inside(starts, THREE)).all()
    assert len(np.unique(starts_of(labels, classes=(0,)), axis=0)) > 1000
    assert len(np.unique(starts_of(labels, classes=(2,), voxels=1), axis=0)) == 1


def test_labels_of_any_type_and_with_channels_have_the_same_patches() -> None:
    labels = labelled((1, ONE), (200, TWO))
    expected = starts_of(labels)
    for dtype in (np.int16, np.uint32, np.int64, np.float32, np.float64):
        np.testing.assert_array_equal(starts_of(labels.astype(dtype)), expected)
    assert inside(starts_of(labels == 1), ONE).all()
    starts = starts_of(np.stack([labelled((1, ONE)), labelled((1, TWO))]))
    assert (inside(starts, ONE) | inside(starts, TWO)).all()
    assert inside(starts, TWO).mean() == pytest.approx(0.5, abs=0.15)


def test_volumes_without_foreground_have_patches_anywhere_or_are_an_error() -> None:
    volumes, starts = around([labelled(), labelled((1, ONE))]).places()
    assert (volumes == 0).mean() == pytest.approx(0.5, abs=0.05)
    assert inside(starts[volumes == 1], ONE).all()
    assert inside(starts[volumes == 0], ONE).mean() < 0.2
    with pytest.raises(OptionError, match=r"labels=.* has no label above 0, around which to draw patches"):
        around(labelled())
    with pytest.raises(OptionError, match=r"has no label of \[5, 6\]"):
        around(labelled((1, ONE)), classes=(5, 6))
    assert len(around(labelled(), fraction=0.0)) == 2000


def scaled(path: Path) -> Path:
    """Labels 1, 2 and 3 in all bits of a byte, as some tools write them."""
    image = nibabel.Nifti1Image(labelled((85, ONE), (170, TWO), (255, THREE)), np.eye(4))
    image.header.set_slope_inter(1 / 85, 0)
    nibabel.save(image, path)  # type: ignore[attr-defined]
    return path


def test_labels_may_be_fractions(tmp_path: Path) -> None:
    """Every voxel above 0 counts, and each label is a class."""
    soft = labelled((1, ONE)) + 0.7 * labelled((1, TWO)) + 1e-3 * labelled((1, THREE))
    for labels in (scaled(tmp_path / "x.nii"), soft, soft.astype("f2"), (soft > 0).astype("f4") * 0.25):
        starts = starts_of(labels, 900)
        for corner in (ONE, TWO, THREE):
            assert inside(starts, corner).mean() == pytest.approx(1 / 3, abs=0.06)


def test_classes_that_are_in_no_volume_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the labels that there are: 1.0000000196 of a scaled image is not 1."""
    path = scaled(tmp_path / "x.nii")
    said = r"x\.nii has no label of \[1, 2\], .*; above 0 it has 1\.00000001\d*, 2\."
    with pytest.raises(OptionError, match=said):
        around(path, classes=(1, 2))
    assert not caplog.records
    around(path, classes=(0, 1))
    said = "No volume has the labels [1] that are in Foreground(classes=…)"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert inside(starts_of(labelled((1, ONE), (3, TWO)) / 2, classes=(1.5,)), TWO).all()


def test_complex_labels_are_refused() -> None:
    said = "Foreground needs labels that are real numbers, and these are complex64"
    with pytest.raises(OptionError, match=said):
        around(labelled((1, ONE)).astype("c8"))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind",
    ["zarr3 zstd", "zarr3 blosc", "zarr3 sharded", "hdf5 gzip", "tiff tiles", "tiff folder", "npy", "nii.gz"],
)
def test_places_of_labels_are_kept_until_the_labels_change(
    tmp_path: Path, scans: list[str], later: None, kind: str
) -> None:
    """However they are stored, places are those of the array."""
    labels = labelled((1, ONE), (2, THREE))
    labels[10:20] = 3
    path, wanted = write_volume(kind, tmp_path / "labels", labels, (7, 16, 9)), starts_of(labels, voxels=20)
    scans.clear()
    for _ in range(2):
        dataset = around(path, voxels=20)
        np.testing.assert_array_equal(dataset.places()[1], wanted)
    assert len(scans) == 1
    for _, found in FastLoader(dataset, 50):
        assert (found.numpy().reshape(len(found), -1) > 0).any(axis=1).all()
    starts_of(path, 50, classes=(1,)), starts_of(path, 50, voxels=3)  # other questions
    assert len(scans) == 3
    # Written anew: for Zarr only the files of its chunks are others.
    target = Path(path.removesuffix("/raw"))
    kept = (target / "zarr.json").read_bytes() if "zarr" in kind else b""
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    write_volume(kind, tmp_path / "labels", labelled((1, TWO)), (7, 16, 9))
    assert not kept or (target / "zarr.json").read_bytes() == kept
    assert inside(starts_of(path, voxels=20), TWO).all()
    assert len(scans) == 4


def test_places_that_an_older_version_kept_are_not_used(
    tmp_path: Path, scans: list[str], later: None
) -> None:
    path = tmp_path / "labels.npy"
    np.save(path, labelled((1, TWO)))
    kept, identity = samples.default_file_arrays(), open_volume(path).state()[1]
    assert kept is not None
    old = [np.array([1]), np.array([1]), np.array([1]), np.array([0])]
    kept.save(os.stat(path), f"label voxels 10000 None in {SHAPE} of {identity}", old)
    assert inside(starts_of(path, 50), TWO).all()
    assert len(scans) == 1


def test_other_dimensions_have_places_of_their_own(tmp_path: Path, scans: list[str], later: None) -> None:
    labels = np.zeros((16, 20, 24), np.uint8)
    labels[3, 8, 9] = 1
    path = write_volume("npy", tmp_path / "labels", labels, ())
    near, some = Foreground(9, fraction=1.0), Uniform(9, mask_fraction=1e-9)
    for patch, expected in (((4, 4, 4), [1, 6, 7]), ((4, 4), [6, 7]), ((4, 4, 4), [1, 6, 7])):
        starts = FastPatchDataset(path, patch, labels=path, seed=0, sampling=near).places()[1]
        assert (starts == expected).all()
        masked = FastPatchDataset(path, patch, mask=path, seed=0, sampling=some)
        assert all(sample[1].any() for sample in masked.__getitems__(range(9)))
    assert len(scans) == 4


# ---- masks --------------------------------------------------------------------------------------


def ball(radius: float = 15.0) -> Any:
    """A mask with a round surface, where blocks are partly inside."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    return ((z - 20) ** 2 + (y - 25) ** 2 + (x - 30) ** 2 < radius**2).astype(np.uint8)


def masked(mask: Any, least: float, count: int = 300, seed: int = 2, **options: Any) -> FastPatchDataset:
    sampling = Uniform(count, mask_fraction=least)
    return FastPatchDataset(np.zeros(SHAPE, "u1"), PATCH, mask=mask, sampling=sampling, seed=seed, **options)


def shares(mask: Any, starts: Any) -> Any:
    """The part of each patch that is in the mask."""
    return np.array([(cut(mask, start, PATCH) != 0).mean() for start in starts])


@pytest.mark.parametrize(
    ("kind", "least"), [("array", 0.9), ("zarr3 blosc", 0.5), ("hdf5 gzip", 0.1), ("tiff strips", 0.5)]
)
def test_every_patch_has_the_asked_share_of_the_mask(tmp_path: Path, kind: str, least: float) -> None:
    mask = ball()
    dataset = masked(write_volume(kind, tmp_path / "mask", mask, (11, 13, 17)), least)
    starts = dataset.places()[1]
    assert least <= shares(mask, starts).min() < least + 0.15  # and not only the middle is taken
    plain = masked(mask, 0).places()[1]
    kept = (plain == starts).all(axis=1)
    assert (shares(mask, plain[kept]) >= least).all()  # those that were good are as they were
    # Blocks at the surface of a patch do not count: one that has little more may be left out.
    assert (shares(mask, plain[~kept]) <= least + 0.2).all()
    assert not np.array_equal(dataset.places(1)[1], starts)


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("?", True, False), ("f8", np.nan, 0), ("f4", -1, -0.0), ("f8", 1e-300, 0), ("f2", 6e-8, 0), ("c8", 1j, 0),
        ("u8", 2**64 - 1, 0), ("i1", -128, 0),
    ],
)  # fmt: skip
def test_a_mask_of_any_type_is_where_it_is_not_0(kind: str, inside: Any, outside: Any) -> None:
    mask = np.full(SHAPE, outside, kind)
    mask[ball() != 0] = inside
    np.testing.assert_array_equal(masked(mask, 0.5).places()[1], masked(ball(), 0.5).places()[1])


def test_a_mask_with_channels_is_inside_where_any_is(tmp_path: Path) -> None:
    masks = np.zeros((2, *SHAPE), np.uint8)
    masks[0, :, :28], masks[1, :, 28:, :32] = 1, 1
    for mask in (masks, write_volume("zarr3 zstd", tmp_path / "mask", masks, (1, 16, 16, 16))):
        assert (shares(masks.any(axis=0), masked(mask, 1.0).places()[1]) == 1).all()


def test_a_share_that_no_patch_has_is_an_error_that_says_the_most() -> None:
    for mask, least, most in ((ball(4), 0.99, r"0\.\d"), (np.zeros(SHAPE, "u1"), 0.01, r"0\.000")):
        said = rf"mask_fraction={least}: of [\d,]+ patches .* the most is {most}"
        with pytest.raises(OptionError, match=said):
            masked(mask, least, 10)


def test_patches_around_the_foreground_are_not_asked_for_the_mask() -> None:
    mask, labels = ball(), np.zeros(SHAPE, np.uint8)
    labels[2, 2, 2] = 1
    sampling = Foreground(400, fraction=0.5, mask_fraction=0.6)
    dataset = FastPatchDataset(labels, PATCH, labels=labels, mask=mask, seed=1, sampling=sampling)
    starts = dataset.places()[1]
    near = (starts == 0).all(axis=1)
    assert near.mean() == pytest.approx(0.5, abs=0.08)
    assert shares(mask, starts[~near]).min() >= 0.6


def test_padding_is_outside_of_the_mask() -> None:
    mask = np.ones((4, 50, 60), np.uint8)  # half as high as a patch
    options: Any = {"mask": mask, "padding": "constant", "seed": 1}
    half = FastPatchDataset(mask, PATCH, sampling=Uniform(10, mask_fraction=0.5), **options)
    assert half[0][1].mean() == 0.5
    with pytest.raises(OptionError, match=r"the most is 0\.500"):
        FastPatchDataset(mask, PATCH, sampling=Uniform(10, mask_fraction=0.6), **options)

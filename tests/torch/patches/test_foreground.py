"""Patches around the foreground: how many, where, of which classes; and what is kept about labels."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from volume_kinds import write_volume

from fastpipe import FastLoader, FastPatchDataset
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Uniform
from fastpipe.volumes import samples
from fastpipe.volumes import sampling as sampling_module
from fastpipe.volumes.opening import open_volume

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, PATCH = (40, 50, 60), (8, 9, 10)


def labelled(*boxes: tuple[int, tuple[int, int, int]]) -> Any:
    """Labels with cubes of side 3: a label, and where its cube begins."""
    labels = np.zeros(SHAPE, np.uint8)
    for label, (z, y, x) in boxes:
        labels[z : z + 3, y : y + 3, x : x + 3] = label
    return labels


def dataset_of(labels: Any, count: int = 2000, **options: Any) -> FastPatchDataset:
    volume = (
        np.zeros(SHAPE, np.uint8)
        if isinstance(labels, np.ndarray)
        else [np.zeros(SHAPE, np.uint8)] * len(labels)
    )
    return FastPatchDataset(volume, PATCH, labels=labels, sampling=Foreground(count, **options), seed=1)


def inside(starts: Any, corner: Any, side: int = 3) -> Any:
    """Whether patches have a voxel of a cube."""
    corner = np.array(corner)
    return ((starts < corner + side) & (starts + np.array(PATCH) > corner)).all(axis=1)


@pytest.mark.parametrize("fraction", [0.0, 0.33, 0.8, 1.0])
def test_the_asked_fraction_of_patches_is_around_the_foreground(fraction: float) -> None:
    dataset = dataset_of(labelled((1, (5, 40, 20))), fraction=fraction)
    _, starts = dataset.places()
    anywhere = dataset_of(labelled((1, (5, 40, 20))), fraction=0.0).places()[1]
    by_chance = inside(anywhere, (5, 40, 20)).mean()
    share = inside(starts, (5, 40, 20)).mean()
    assert share == pytest.approx(fraction + (1 - fraction) * by_chance, abs=0.04)
    assert (fraction == 1.0) <= (share == 1.0)
    other = dataset.places(1)[1]
    assert not np.array_equal(other, starts)
    assert inside(other, (5, 40, 20)).mean() == pytest.approx(share, abs=0.04)


def test_the_rest_of_the_patches_is_anywhere_alike() -> None:
    """Those that are not around the foreground are those of ``Uniform``."""
    some, none = (dataset_of(labelled((1, (5, 40, 20))), fraction=part).places()[1] for part in (0.5, 0.0))
    same = (some == none).all(axis=1)
    assert same.mean() == pytest.approx(0.5, abs=0.05)
    assert inside(some[~same], (5, 40, 20)).all()


def test_classes_are_drawn_alike_whatever_their_size() -> None:
    labels = np.zeros(SHAPE, np.uint8)
    labels[:20, :20, :20] = 1
    labels[30, 40, 50] = 2
    labels[35, 5, 5] = 9
    _, starts = dataset_of(labels, fraction=1.0).places()
    # Small ones are found by the patch that is centred at their only voxel.
    for voxel in ((30, 40, 50), (35, 5, 5)):
        start = np.clip(np.array(voxel) - np.array(PATCH) // 2, 0, np.array(SHAPE) - PATCH)
        assert (starts == start).all(axis=1).mean() == pytest.approx(1 / 3, abs=0.04)


def test_patches_are_around_the_named_classes_alone() -> None:
    labels = labelled((1, (5, 5, 5)), (2, (30, 30, 30)), (3, (5, 30, 50)))
    _, starts = dataset_of(labels, fraction=1.0, classes=(2, 3)).places()
    assert (inside(starts, (30, 30, 30)) | inside(starts, (5, 30, 50))).all()
    _, background = dataset_of(labels, fraction=1.0, classes=(0,)).places()
    assert len(np.unique(background, axis=0)) > 1000
    one = dataset_of(labels, fraction=1.0, classes=(2,), voxels=1).places()[1]
    assert len(np.unique(one, axis=0)) == 1


def test_a_volume_without_foreground_has_patches_anywhere() -> None:
    dataset = dataset_of([labelled(), labelled((1, (5, 40, 20)))], fraction=1.0)
    volumes, starts = dataset.places()
    assert (volumes == 0).mean() == pytest.approx(0.5, abs=0.05)
    assert inside(starts[volumes == 1], (5, 40, 20)).all()
    assert inside(starts[volumes == 0], (5, 40, 20)).mean() < 0.2


def test_no_foreground_at_all_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"labels=.* has no label above 0, around which to draw patches"):
        dataset_of(labelled())
    with pytest.raises(OptionError, match=r"has no label of \[5, 6\]"):
        dataset_of(labelled((1, (3, 3, 3))), classes=(5, 6))
    assert len(dataset_of(labelled(), fraction=0.0)) == 2000


def scaled(path: Path) -> None:
    """Labels 1, 2 and 3 in all bits of a byte, as some tools write them."""
    image = nibabel.Nifti1Image(labelled((85, (5, 5, 5)), (170, (30, 30, 30)), (255, (5, 30, 50))), np.eye(4))
    image.header.set_slope_inter(1 / 85, 0)
    nibabel.save(image, path)  # type: ignore[attr-defined]


def test_labels_may_be_fractions(tmp_path: Path) -> None:
    """Every voxel above 0 counts, and each label is a class."""
    scaled(tmp_path / "x.nii")
    soft = labelled((1, (5, 5, 5))) + 0.7 * labelled((1, (30, 30, 30))) + 1e-3 * labelled((1, (5, 30, 50)))
    for labels in (tmp_path / "x.nii", soft, soft.astype("f2"), (soft > 0).astype("f4") * 0.25):
        dataset = FastPatchDataset(
            np.zeros(SHAPE, "u1"), PATCH, labels=labels, sampling=Foreground(900, 1.0), seed=1
        )
        starts = dataset.places()[1]
        for corner in ((5, 5, 5), (30, 30, 30), (5, 30, 50)):
            assert inside(starts, corner).mean() == pytest.approx(1 / 3, abs=0.06)


def test_classes_that_are_in_no_volume_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the labels that there are: 1.0000000196 of a scaled image is not 1."""
    scaled(tmp_path / "x.nii")
    volume = np.zeros(SHAPE, "u1")
    with pytest.raises(
        OptionError, match=r"x\.nii has no label of \[1, 2\], .*; above 0 it has 1\.00000001\d*, 2\."
    ):
        FastPatchDataset(volume, PATCH, labels=tmp_path / "x.nii", sampling=Foreground(9, classes=(1, 2)))
    assert not caplog.records
    FastPatchDataset(volume, PATCH, labels=tmp_path / "x.nii", sampling=Foreground(9, classes=(0, 1)))
    assert [record.getMessage() for record in caplog.records] == [
        "No volume has the labels [1] that are in Foreground(classes=…)"
    ]
    halves = labelled((1, (5, 5, 5)), (3, (30, 30, 30))) / 2
    assert inside(dataset_of(halves, fraction=1.0, classes=(1.5,)).places()[1], (30, 30, 30)).all()


def test_complex_labels_are_refused() -> None:
    with pytest.raises(OptionError, match="labels that are above 0 or not, and these are complex64"):
        dataset_of(labelled((1, (5, 5, 5))).astype("c8"))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind", ["zarr3 zstd", "zarr3 blosc", "zarr3 sharded", "hdf5 gzip", "tiff tiles", "npy", "nii.gz"]
)
def test_places_do_not_depend_on_how_labels_are_stored(tmp_path: Path, kind: str) -> None:
    labels = labelled((1, (5, 5, 5)), (2, (30, 30, 30)))
    labels[10:20] = 3
    path = write_volume(kind, tmp_path / "x", labels, (7, 16, 9))
    expected = dataset_of(labels, voxels=20, fraction=1.0).places()[1]
    volume = np.zeros(SHAPE, "u1")
    dataset = FastPatchDataset(
        volume, PATCH, labels=path, sampling=Foreground(2000, fraction=1.0, voxels=20), seed=1
    )
    np.testing.assert_array_equal(dataset.places()[1], expected)
    for _, found in FastLoader(dataset, 50):
        assert (found.numpy().reshape(len(found), -1) > 0).any(axis=1).all()


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The volumes that were gone through."""
    found: list[str] = []
    real = sampling_module._scan

    def scan(role: Any, number: int, look: Any) -> None:
        found.append(role.volumes[number].name)
        real(role, number, look)

    monkeypatch.setattr(sampling_module, "_scan", scan)
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["zarr3 zstd", "zarr3 sharded", "hdf5 gzip", "tiff folder", "npy", "nii.gz"])
def test_places_of_labels_are_kept_until_the_labels_change(
    tmp_path: Path, scans: list[str], later: None, kind: str
) -> None:
    first = labelled((1, (5, 5, 5)))
    path = write_volume(kind, tmp_path / "labels", first, (20, 25, 30))

    def places(**options: Any) -> Any:
        dataset = FastPatchDataset(
            np.zeros(SHAPE, "u1"),
            PATCH,
            labels=path,
            sampling=Foreground(50, fraction=1.0, **options),
            seed=1,
        )
        return dataset.places()[1]

    expected = places()
    assert len(scans) == 1
    np.testing.assert_array_equal(places(), expected)
    assert len(scans) == 1
    places(classes=(1,))  # another question
    places(voxels=3)
    assert len(scans) == 3
    # Written anew: for Zarr only the files of its chunks are others.
    target = Path(path.removesuffix("/raw"))
    kept = (target / "zarr.json").read_bytes() if "zarr" in kind else b""
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    second = labelled((1, (30, 30, 30)))
    write_volume(kind, tmp_path / "labels", second, (20, 25, 30))
    if kept:
        assert (target / "zarr.json").read_bytes() == kept
    found = places()
    assert len(scans) == 4
    assert inside(found, (30, 30, 30)).all()


def test_places_that_an_older_version_kept_are_not_used(
    tmp_path: Path, scans: list[str], later: None
) -> None:
    path = tmp_path / "labels.npy"
    np.save(path, labelled((1, (30, 30, 30))))
    kept, identity = samples.default_file_arrays(), open_volume(path).state()[1]
    assert kept is not None
    old = [np.array([1]), np.array([1]), np.array([1]), np.array([0])]
    kept.save(os.stat(path), f"label voxels 10000 None in {SHAPE} of {identity}", old)
    found = FastPatchDataset(
        path, PATCH, labels=path, sampling=Foreground(50, fraction=1.0), seed=1
    ).places()[1]
    assert len(scans) == 1
    assert inside(found, (30, 30, 30)).all()


@pytest.mark.parametrize("role", ["labels", "mask"])
def test_memory_for_looking_at_arrays_is_bounded(role: str) -> None:
    array = np.ones((128, 256, 256), np.uint8)
    sampling = Foreground(10) if role == "labels" else Uniform(10, mask_fraction=0.5)
    tracemalloc.start()
    try:
        FastPatchDataset(array, (16, 16, 16), sampling=sampling, **{role: array})
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()

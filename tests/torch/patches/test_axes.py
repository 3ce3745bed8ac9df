"""``orientation=`` and ``channel_dim=``: patches are those of nibabel's closest canonical image, of NumPy's moved axes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kinds import cut, equal, write_volume
from volume_kit import same_bits, whole

from fastpipe import Cache, FastLoader, FastPatchDataset, Rescale
from fastpipe.errors import OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform
from fastpipe.volumes.axes import Axes
from fastpipe.volumes.opening import open_volume

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")


def random_affine(random: Any) -> Any:
    """An affine of any orientation, a little turned, with unequal spacings."""
    signs, spacing = random.choice([-1, 1], 3), random.uniform(0.5, 3, 3)
    affine = np.eye(4)
    affine[:3, :3] = (np.eye(3)[random.permutation(3)] * signs + random.uniform(-0.1, 0.1, (3, 3))) * spacing
    affine[:3, 3] = random.uniform(-90, 90, 3)
    return affine


def write(path: Path, array: Any, affine: Any, scale: Any = (1, 0)) -> None:
    image = nibabel.Nifti1Image(array, affine)
    image.header.set_slope_inter(*scale)
    nibabel.save(image, path)  # type: ignore[attr-defined]


def oriented(path: Path, orientation: str) -> Any:
    """Return what nibabel makes of an image."""
    image: Any = nibabel.load(path)  # type: ignore[attr-defined]
    if orientation == "RAS":
        return np.asanyarray(nibabel.as_closest_canonical(image).dataobj)  # type: ignore[attr-defined]
    change = nibabel.orientations.ornt_transform(
        nibabel.io_orientation(image.affine), nibabel.orientations.axcodes2ornt(orientation)
    )
    return np.asanyarray(image.as_reoriented(change).dataobj)


@settings(max_examples=60)
@given(
    st.integers(0, 9999), st.sampled_from(["RAS", "LPS", "ASR", "PIL"]), st.integers(0, 2), st.sampled_from(["u1", "i2", "f4"]),
    st.sampled_from([".nii", ".nii.gz"]), st.sampled_from([(1, 0), (2.5, -3)]),
    st.sampled_from(["error", "constant", "reflect", "wrap"]), st.sampled_from([Cache("ram", 700), Cache("ram", 1 << 20)]),
)  # fmt: skip
def test_patches_are_those_of_the_closest_canonical_image(
    seed: int, orientation: str, more: int, dtype: str, end: str, scale: Any, mode: str, cache: Any
) -> None:
    """Three dimensions of space, and perhaps time and channels behind them."""
    random = np.random.default_rng(seed)
    shape = (*random.integers(2, 9, 3), *random.integers(1, 4, more))
    array = random.integers(0, 99, shape).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{end}"
        write(path, array, random_affine(random), scale)
        expected = oriented(path, orientation)
        channels = {0: None, 1: -1, 2: (4, 3)}[more]
        expected = np.moveaxis(expected, channels, tuple(range(more))) if more == 2 else expected
        expected = np.moveaxis(expected, -1, 0) if more == 1 else expected
        size = expected.shape[more:]
        patch = random.integers(1, np.array(size) + 1) if mode == "error" else random.integers(1, 12, 3)
        low, high = (0, np.array(size) - patch + 1) if mode == "error" else (1 - patch, np.array(size))
        starts = random.integers(low, high, (5, 3))
        dataset = FastPatchDataset(
            path, tuple(patch), sampling=Positions(starts), padding=mode, orientation=orientation, channel_dim=channels,
            cache=cache,
        )  # fmt: skip
        samples, stock = dataset.__getitems__(range(5)), dataset._stock()
        runtime = dataset._running()
        for index, (start, sample) in enumerate(zip(starts.tolist(), samples, strict=True)):
            wanted = cut(expected, start, tuple(patch), mode)
            assert same_bits(sample, wanted) and same_bits(stock[index], wanted)
        # The native core has read them, and Python's reader reads the same.
        assert not runtime._declined and None not in runtime._volumes.values()
        assert same_bits(whole(dataset._roles[0].volumes[0], seed), expected)
        del dataset, samples, stock, runtime


@settings(max_examples=60)
@given(
    st.integers(0, 9999),
    st.sampled_from(["array", "npy", "npy fortran", "hdf5 contiguous", "tiff raw", "memmap"]),
)
def test_channels_may_be_anywhere(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 6))
    array = random.integers(0, 99, random.integers(1, 7, count)).astype("u2")
    channels = random.permutation(count)[: random.integers(1, count)].tolist()
    expected = np.moveaxis(array, channels, range(len(channels)))
    given_dims = [dim - count if random.random() < 0.5 else dim for dim in channels]
    patch = expected.shape[len(channels) :]
    with tempfile.TemporaryDirectory() as folder:
        path = write_volume(kind.replace("memmap", "npy"), os.path.join(folder, "x"), array, None)
        volume = np.load(path, mmap_mode="r") if kind == "memmap" else path
        dataset = FastPatchDataset(volume, patch, sampling=Grid(), channel_dim=given_dims)
        assert equal(dataset[0], expected) and equal(dataset._stock()[0], expected)
        single = given_dims[0] if len(given_dims) == 1 else given_dims
        assert equal(FastPatchDataset(volume, patch, sampling=Grid(), channel_dim=single)[0], expected)
        del dataset, volume


def test_labels_without_channels_stay_as_they_are() -> None:
    image, labels = np.arange(4 * 5 * 6 * 2).reshape(4, 5, 6, 2), np.arange(4 * 5 * 6).reshape(4, 5, 6)
    dataset = FastPatchDataset(image, (2, 3, 4), labels=labels, sampling=Uniform(9), channel_dim=-1, seed=0)
    for start, (one, other) in zip(dataset.places()[1], FastLoader(dataset, None), strict=True):
        assert equal(one, cut(np.moveaxis(image, -1, 0), start, (2, 3, 4)))
        assert equal(other, cut(labels, start, (2, 3, 4)))


def test_the_image_and_its_labels_have_orientations_of_their_own(tmp_path: Path) -> None:
    """As files of two tools: the same voxels, in another order; statistics and foreground are found in the new one."""
    random = np.random.default_rng(3)
    voxels = random.integers(0, 50, (6, 7, 8)).astype("i2")
    labels = (voxels > 45).astype("u1")
    write(tmp_path / "image.nii", voxels, np.eye(4))
    turned = nibabel.Nifti1Image(labels, np.eye(4)).as_reoriented(np.array([[2, -1], [0, 1], [1, -1]]))
    nibabel.save(turned, tmp_path / "labels.nii.gz")  # type: ignore[attr-defined]
    options: Any = {"sampling": Foreground(40, 1.0), "seed": 2, "normalize": Rescale()}
    with pytest.raises(OptionError, match="must be of the same places"):
        FastPatchDataset(tmp_path / "image.nii", (3, 3, 3), labels=tmp_path / "labels.nii.gz", **options)
    dataset = FastPatchDataset(
        tmp_path / "image.nii", (3, 3, 3), labels=tmp_path / "labels.nii.gz", orientation="RAS", **options
    )
    assert "Orientation: 'RAS'" in repr(dataset)
    wanted = FastPatchDataset(voxels, (3, 3, 3), labels=labels, **options)
    np.testing.assert_array_equal(dataset.places()[1], wanted.places()[1])
    loaders = FastLoader(dataset, 8, num_workers=1, workers="processes"), FastLoader(wanted, 8)
    for found, expected in zip(*loaders, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert equal(one.numpy(), other.numpy())


@pytest.mark.usefixtures("later")
def test_kept_tables_belong_to_the_orientation(tmp_path: Path) -> None:
    labels = np.zeros((6, 7, 8), "u1")
    labels[1, 2, 3] = 1
    write(tmp_path / "x.nii", labels, np.diag([-1, 1, -1, 1]))
    for orientation, expected in (
        (None, [1, 2, 3]),
        ("RAS", [4, 2, 4]),
        (None, [1, 2, 3]),
        ("SAR", [4, 2, 4]),
    ):
        dataset = FastPatchDataset(
            tmp_path / "x.nii", (1, 1, 1), labels=tmp_path / "x.nii", orientation=orientation, sampling=Foreground(3, 1.0)
        )  # fmt: skip
        assert dataset.places()[1].tolist() == [expected] * 3


# ---- what cannot be seen so -----------------------------------------------------------------------


@pytest.mark.parametrize("orientation", ["RA", "RAX", "RAR", "ras", "RASS", 3, "LRS"])
def test_other_orientations_are_refused(orientation: Any) -> None:
    with pytest.raises(OptionError, match="orientation must be three letters"):
        FastPatchDataset(np.ones((4, 4, 4)), (2, 2, 2), orientation=orientation)


@pytest.mark.parametrize("channel_dim", [4, -5, (0, 0), (0, -4)])
def test_dimensions_that_are_not_there_are_refused(channel_dim: Any) -> None:
    with pytest.raises(OptionError, match="does not name dimensions of"):
        FastPatchDataset(np.ones((4, 4, 4, 4)), (2, 2, 2), channel_dim=channel_dim)
    with pytest.raises(OptionError, match="channel_dim must be an integer, or several"):
        FastPatchDataset(np.ones((4, 4, 4, 4)), (2, 2, 2), channel_dim="last")  # type: ignore[arg-type]


def test_images_without_an_orientation_are_errors(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 4, 4)))
    write(tmp_path / "flat.nii", np.ones((4, 4), "f4"), np.eye(4))
    for path in (tmp_path / "x.npy", tmp_path / "flat.nii"):
        with pytest.raises(
            OptionError, match="orientation= is for DICOM series, and for NIfTI images of at least"
        ):
            FastPatchDataset(path, (2, 2), orientation="RAS")
    write(tmp_path / "x.nii", np.ones((4, 4, 4, 2), "f4"), np.eye(4))
    with pytest.raises(OptionError, match="is one of the dimensions of space"):
        FastPatchDataset(tmp_path / "x.nii", (2, 2, 2), orientation="RAS", channel_dim=0)
    affine = np.diag([1.0, 0.0, 1.0, 1.0])
    image = nibabel.Nifti1Image(np.ones((4, 4, 4), "f4"), None)
    image.header["sform_code"], image.header["srow_x"] = 1, affine[0]
    image.header["srow_z"] = affine[2]
    nibabel.save(image, tmp_path / "none.nii")  # type: ignore[attr-defined]
    with pytest.raises(VolumeError, match="has no orientation"):
        FastPatchDataset(tmp_path / "none.nii", (2, 2, 2), orientation="RAS")


@pytest.mark.parametrize("kind", ["zarr3 zstd", "hdf5 gzip", "b2nd", "tiff tiles", "n5 gzip"])
def test_chunks_cannot_be_seen_otherwise(tmp_path: Path, kind: str) -> None:
    array = np.ones((4, 5, 6), "u2")
    path = write_volume(kind, tmp_path / "x", array, (2, 2, 2))
    with pytest.raises(OptionError, match=r"channel_dim= cannot move: make a copy"):
        FastPatchDataset(path, (2, 2), channel_dim=-1)
    assert equal(
        FastPatchDataset(path, (5, 6), channel_dim=0, sampling=Grid())[0], array
    )  # as they are stored
    assert open_volume(path, axes=Axes.of(-1, None, 3)).shape == array.shape

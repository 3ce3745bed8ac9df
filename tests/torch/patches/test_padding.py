"""Patches that reach beyond a volume: what ``numpy.pad`` of all of it gives, in every mode."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kinds import cut, equal, random_array, write_volume

from fastpipe import Cache, FastPatchDataset
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

MODES = ["constant", "edge", "reflect", "symmetric", "wrap"]


@st.composite
def beyond(draw: st.DrawFn) -> Any:
    """A shape, a patch that is perhaps larger, places that have at least a voxel, and how it is stored."""
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 8)) for _ in range(dims))
    patch = tuple(draw(st.integers(1, 20)) for _ in range(dims))
    starts = [
        [draw(st.integers(1 - side, size - 1)) for side, size in zip(patch, shape, strict=True)]
        for _ in range(draw(st.integers(1, 5)))
    ]
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=1)))
    kind = draw(st.sampled_from(["array", "npy", "npy fortran", "zarr3 blosc", "hdf5 gzip"]))
    return shape, patch, starts, lead, kind, draw(st.sampled_from([Cache("off"), Cache("ram", 1 << 20)]))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20)
@given(case=beyond())
def test_patches_are_slices_of_the_padded_volume(mode: str, case: Any) -> None:
    shape, patch, starts, lead, kind, cache = case
    array = random_array((*lead, *shape), "i2", 1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_volume(kind, os.path.join(folder, "x"), array, (*lead, *[3] * len(shape)))
        dataset = FastPatchDataset(
            path, patch, sampling=Positions(starts), padding=mode, cache=cache, threads=2
        )
        for start, sample in zip(starts, dataset.__getitems__(range(len(starts))), strict=True):
            assert equal(sample, cut(array, start, patch, mode)), f"{case} at {start}"
        reference = dataset._stock()
        assert all(equal(reference[index], dataset[index]) for index in range(len(starts)))
        del dataset, sample, reference


def test_volume_labels_and_mask_have_constants_of_their_own() -> None:
    volume, labels = np.ones((4, 4), np.float32), np.ones((4, 4), np.int16)
    starts = Positions([[-2, -1]])
    for padding, wanted in [
        ("constant", (0, 0)), (("constant", -1000), (-1000, 0)), (("constant", 2.5, 255), (2.5, 255)),
    ]:  # fmt: skip
        dataset = FastPatchDataset(
            volume, (3, 4), labels=labels, mask=labels, sampling=starts, padding=padding
        )
        values, classes, mask = dataset[0]
        inside = np.zeros((3, 4), bool)
        inside[2:, 1:] = True
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
    assert not sample[:2].any()
    assert not sample[6:].any()
    assert sample[2:6].all()


def test_without_padding_what_reaches_beyond_is_refused() -> None:
    array = np.zeros((4, 6), "u1")
    with pytest.raises(OptionError, match=r"a patch of \(5, 2\) does not fit into .*which has \(4, 6\)"):
        FastPatchDataset(array, (5, 2))
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
    patch = FastPatchDataset(volume, (4, 4), padding=("constant", value), labels=volume, sampling=Grid())[0][
        0
    ]
    np.testing.assert_array_equal(patch, np.pad(volume, 1, constant_values=value))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("i8", 2**63),
        ("u8", 2**64),
        ("u8", 2.0**64),
        ("i1", 0.5),
        ("f4", 1e300),
        ("f2", 70_000),
        ("f8", 10**400),
        ("?", 2),
    ],
)
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
    for number, start in enumerate(starts):
        assert equal(dataset[number], cut(array, start, (4, 4, 2, 4), "wrap"))
    decoded, used = dataset._running().counts.nbytes
    assert used == 2 * 4 * 4 * 2 * 4
    assert decoded <= (2**3 + 2**3) * 4 * 4 * 2 * 4

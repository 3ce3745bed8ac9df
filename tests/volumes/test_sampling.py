"""Places of patches by labels and masks: voxels of each label are drawn alike, and each patch has enough of a mask."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fastpipe import FastPatchDataset
from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.errors import OptionError
from fastpipe.sampling import Uniform
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches
from fastpipe.volumes.sampling import BlockCounts, MaskDensity, MaskedPatches, PatchCells, VoxelSketch


def sketched(array: Any, most: int, labels: Any = None, side: int = 100, seed: int = 0) -> Any:
    """What is found of an array that comes in parts, in any order."""
    sketch = VoxelSketch(array.shape, most, labels)
    starts = list(itertools.product(*(range(0, size, side) for size in array.shape)))
    for start in (starts[number] for number in np.random.default_rng(seed).permutation(len(starts))):
        sketch.add(array[tuple(slice(at, at + side) for at in start)], start)
    return sketch.found()


ODD: list[tuple[str, list[Any]]] = [
    ("f8", [0, 0.5, 1, 2, np.nan, np.inf, -np.inf, -3, -0.5, 1.0000000196078431, 0.9882, 1e-300]),
    ("f4", [0, 0.7, 1, 0.7, 2.5, np.nan, 16777216, 1e30, -0.0]), ("f2", [0.1, 0.5, 1, 0, 6e-8]), ("?", [0, 1, 1, 0]),
    ("u8", [0, 1, 2**53 + 1, 2**53, 2**63, 2**63 + 1, 2**64 - 1]), ("i8", [0, -1, 2**53 + 1, 2**53, -(2**63), 2**63 - 1]),
    ("u4", [0, 2**32 - 1, 7]), ("i1", [-128, -1, 0, 1, 127]), (">f4", [0.25, 3, 0]), (">i2", [-2, 300, 1]), ("u2", [0, 65535]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), ODD)
def test_all_labels_above_0_are_foreground(kind: str, values: list[Any]) -> None:
    """As NumPy finds them: ``labels > 0``; of each some voxels, whatever the order of parts."""
    array = np.tile(np.array(values, kind), 5)
    expected = np.unique(array[array > 0])
    for side in (1, 3, 100):
        found = sketched(array, 99, None, side)
        assert found.labels.tolist() == expected.tolist()
        for label, voxels in zip(expected.tolist(), found.each(), strict=True):
            assert voxels.tolist() == np.flatnonzero(array == label).tolist()
    first = sketched(array, 2)
    assert all(len(set(voxels.tolist())) == 2 for voxels in first.each())
    for seed in range(3):
        found = sketched(array, 2, None, 3, seed)
        assert all(np.array_equal(one, other) for one, other in zip(first, found, strict=True))


@pytest.mark.parametrize(("kind", "values"), ODD)
def test_classes_are_compared_as_numpy_compares(kind: str, values: list[Any]) -> None:
    array = np.array(values, kind)
    asked = [0, 1, -1, 0.5, 0.7, 2.5, 1.5, 300, 2**53 + 1, 2**63 + 1, -(2**63), 1.0000000196078431]
    plain = array.astype("i1") if kind == "?" else array  # NumPy compares bool with no large number
    with np.errstate(over="ignore"):
        places = {number: np.flatnonzero(plain == label).tolist() for number, label in enumerate(asked)}
    found = sketched(array, 99, asked, 2)
    made = dict(zip(found.labels.tolist(), (voxels.tolist() for voxels in found.each()), strict=True))
    assert made == {number: some for number, some in places.items() if some}


def test_many_labels_that_are_no_whole_numbers_are_one_class() -> None:
    """As those of a soft segmentation: whole numbers stay classes, and the order of parts makes no difference."""
    array = np.random.default_rng(0).random((30, 70)).astype("f4")
    array[:3], array[3, :5], array[4, :5] = 0, 1, 2
    whole = sketched(array, 5000)
    assert str(whole.labels.tolist()) == "[1.0, 2.0, nan]"
    assert whole.each()[2].tolist() == np.flatnonzero(array != np.floor(array)).tolist()
    for most in (7, 5000):
        first, *others = (sketched(array, most, None, side, side) for side in (3, 11, 100))
        for one in others:
            pairs = zip(one, first, strict=True)
            assert all(np.array_equal(part, other, equal_nan=True) for part, other in pairs)
    few = sketched(np.round(array, 2), 9, None, 11)
    assert len(few.labels) == len(np.unique(np.round(array, 2))) - 1  # up to 1,000 are classes of their own


def test_every_voxel_is_as_likely() -> None:
    """A tenth of a label's voxels: in each eighth of the volume about as many, and along each dimension."""
    array = np.ones((40, 40, 40), np.uint8)
    voxels = sketched(array, 6400).each()[0]
    at = np.stack(np.unravel_index(voxels, array.shape))
    for dim in range(3):
        counts = np.bincount(at[dim], minlength=40)
        assert ((counts - 160) ** 2 / 160).sum() < 75  # 39 degrees of freedom: 99.95 % are below
    octants = np.bincount((at >= 20).T @ np.array([1, 2, 4]), minlength=8)
    assert ((octants - 800) ** 2 / 800).sum() < 26  # 7: 99.95 %


def draws(number: int, seed: int, epoch: int, indices: Any, count: int) -> Any:
    return uniforms(sample_seed(seed, number, 1 << 40), epoch, indices, count)


def ball(shape: Any, centre: Any, radius: float) -> Any:
    at = np.indices(shape).reshape(len(shape), -1).T - np.array(centre)
    return ((at**2).sum(axis=1) <= radius**2).reshape(shape)


def masked(masks: Any, patch: Any, least: float, count: int, seed: int = 0) -> FastPatchDataset:
    """Patches that may reach beyond small volumes; if their sides are below 8, each voxel of a mask is counted."""
    volumes, sampling = [mask.astype("u1") for mask in masks], Uniform(count, mask_fraction=least)
    return FastPatchDataset(volumes, patch, mask=masks, sampling=sampling, padding="constant", seed=seed)


def shares_of(mask: Any, patch: Any) -> tuple[Any, Any]:
    """How much of each patch is in the mask, by its place, and the first place."""
    over = np.maximum(np.array(patch) - mask.shape, 0)
    padded = np.pad(mask, np.stack([over // 2, over - over // 2], axis=1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, patch)
    return windows.mean(axis=tuple(range(mask.ndim, 2 * mask.ndim))), -(over // 2)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    patch=st.one_of(st.lists(st.integers(1, most), min_size=3, max_size=3) for most in (7, 7, 30)),
    density=st.sampled_from([0.02, 0.4, 0.98, 1.0]), least=st.sampled_from([1e-9, 0.1234, 0.4321, 1.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_each_patch_has_enough_of_the_mask(
    shape: list[int], patch: list[int], density: float, least: float, seed: int
) -> None:
    mask, patch = np.random.default_rng(seed).random(shape) < density, patch[: len(shape)]
    shares, low = shares_of(mask, patch)
    try:
        _, starts = masked([mask], patch, least, 50, seed).places()
    except OptionError as error:
        assert "the most is" in str(error)
        assert (
            max(patch) > 7 or (shares < least).all()
        )  # of blocks at the ends of large ones nothing is known
    else:
        assert (shares[tuple((starts - low).T)] >= least).all()


CASES = {
    "little": ([ball((40, 40), (10, 28), 2)], (7, 7), 1e-9), "small": ([ball((48, 48), (20, 25), 5)], (7, 6), 0.2),
    "thin": ([np.arange(1200).reshape(30, 40) % 40 == 17], (7, 7), 0.05),
    "two": ([ball((30, 30), (9, 9), 4), ball((40, 28), (39, 20), 6)], (7, 7), 0.3),
    "flat": ([ball((6, 40, 40), (3, 20, 20), 6)], (1, 7, 7), 0.3), "padded": ([ball((5, 40), (2, 20), 4)], (7, 7), 0.2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_place_with_enough_of_the_mask_is_as_likely(case: str) -> None:
    masks, patch, least = CASES[case]
    volumes, starts = masked(masks, patch, least, 8_000).places()
    weights, observed = [], []
    for volume, mask in enumerate(masks):
        shares, low = shares_of(mask, patch)
        counts = np.zeros(shares.shape)
        np.add.at(counts, tuple((starts[volumes == volume] - low).T), 1)
        observed.append(counts[shares >= least])
        weights.append(np.full(len(observed[-1]), 1 / shares.size))
    assert np.concatenate(observed).sum() == 8_000, "no others"
    expected = np.concatenate(weights)
    pvalue = stats.chisquare(np.concatenate(observed), 8_000 * expected / expected.sum()).pvalue
    assert pvalue > 1e-3


def test_a_patch_that_is_known_is_drawn_where_attempts_find_none() -> None:
    """Cells that promise more than they hold: by another seed it is another one nevertheless."""
    space, counts = PatchSpace([(4000,)], (1,), ["mask"], False), BlockCounts((4000,), (1,))
    counts.add(np.ones(4000, bool), [0])
    cells = PatchCells(space, False, 0.5, [MaskDensity(counts.counts, counts.sides, counts.shape)])

    def fractions(places: Places) -> Any:
        return (places.starts[:, 0] % 1000 == 7).astype(float)

    base = UniformPatches(space, 50, False, partial(draws, 0))
    patches = MaskedPatches(base, cells, 0.5, fractions, draws)
    found = [patches.places(seed, 0, np.arange(50)).starts[:, 0] for seed in (0, 1)]
    assert all((starts % 1000 == 7).all() for starts in found)
    assert set(found[0]) == {7, 1007, 2007, 3007}
    assert (found[0] == found[1]).mean() < 0.6
    np.testing.assert_array_equal(patches.places(0, 0, np.array([9, 4])).starts[:, 0], found[0][[9, 4]])

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

from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.errors import OptionError
from fastpipe.volumes import sampling
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches
from fastpipe.volumes.sampling import (
    BlockCounts,
    MaskDensity,
    MaskedPatches,
    PatchCells,
    VoxelSketch,
    block_sides,
)


def parts_of(array: Any, side: int, seed: int) -> list[tuple[Any, list[int]]]:
    """Boxes that are the array together, in any order."""
    found = []
    for start in itertools.product(*(range(0, size, side) for size in array.shape)):
        found.append((array[tuple(slice(at, at + side) for at in start)], list(start)))
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[number] for number in order.tolist()]


def sketched(array: Any, most: int, labels: Any = None, side: int = 100, seed: int = 0) -> Any:
    sketch = VoxelSketch(array.shape, most, labels)
    for part, start in parts_of(array, side, seed):
        sketch.add(part, start)
    return sketch.found()


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), most=st.integers(1, 30), side=st.integers(1, 5),
    seed=st.integers(0, 99), dtype=st.sampled_from(["u1", "u2", "i2", "i8", "f4", "b"]),
)  # fmt: skip
def test_the_order_of_parts_makes_no_difference(
    shape: list[int], most: int, side: int, seed: int, dtype: str
) -> None:
    array = np.random.default_rng(seed).integers(0, 2 if dtype == "b" else 4, shape).astype(dtype)
    whole = sketched(array, most)
    for found in (sketched(array, most, None, side, seed), sketched(array, most, None, side, seed + 1)):
        assert all(np.array_equal(one, other) for one, other in zip(whole, found, strict=True))
    labels, counts = np.unique(array[array > 0].astype(int), return_counts=True)
    assert whole.labels.tolist() == labels.tolist()
    for label, count, voxels in zip(labels.tolist(), counts.tolist(), whole.each(), strict=True):
        assert len(voxels) == len(set(voxels.tolist())) == min(count, most)
        assert (array.reshape(-1)[voxels] == label).all()


ODD: list[tuple[str, list[Any]]] = [
    ("f8", [0, 0.5, 1, 2, np.nan, np.inf, -np.inf, -3, -0.5, 1.0000000196078431, 0.9882, 1e-300]),
    ("f4", [0, 0.7, 1, 0.7, 2.5, np.nan, 16777216, 1e30, -0.0]), ("f2", [0.1, 0.5, 1, 0, 6e-8]), ("?", [0, 1, 1, 0]),
    ("u8", [0, 1, 2**53 + 1, 2**53, 2**63, 2**63 + 1, 2**64 - 1]), ("i8", [0, -1, 2**53 + 1, 2**53, -(2**63), 2**63 - 1]),
    ("u4", [0, 2**32 - 1, 7]), ("i1", [-128, -1, 0, 1, 127]), (">f4", [0.25, 3, 0]), (">i2", [-2, 300, 1]), ("u2", [0, 65535]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), ODD)
def test_all_labels_above_0_are_foreground(kind: str, values: list[Any]) -> None:
    """As NumPy finds them: ``labels > 0``."""
    array = np.tile(np.array(values, kind), 5)
    expected = np.unique(array[array > 0])
    for side in (1, 3, 100):
        found = sketched(array, 99, None, side)
        assert found.labels.tolist() == expected.tolist()
        for label, voxels in zip(expected.tolist(), found.each(), strict=True):
            assert voxels.tolist() == np.flatnonzero(array == label).tolist()


@pytest.mark.parametrize(("kind", "values"), ODD)
def test_classes_are_compared_as_numpy_compares(kind: str, values: list[Any]) -> None:
    array = np.array(values, kind)
    asked = [0, 1, -1, 0.5, 0.7, 2.5, 1.5, 300, 2**53 + 1, 2**63 + 1, -(2**63), 1.0000000196078431]
    plain = array.astype("i1") if kind == "?" else array  # NumPy compares bool with no large number
    with np.errstate(over="ignore"):
        places = {label: np.flatnonzero(plain == label).tolist() for label in asked}
    expected = {label: some for label, some in places.items() if some}
    found = sketched(array, 99, asked, 2)
    made = dict(zip(found.labels.tolist(), (voxels.tolist() for voxels in found.each()), strict=True))
    assert made == {
        float(label) if np.dtype(kind).kind == "f" else label: some for label, some in expected.items()
    }


def test_many_labels_that_are_no_whole_numbers_are_one_class() -> None:
    """As those of a soft segmentation: whole numbers stay classes, and the order of parts makes no difference."""
    random = np.random.default_rng(0)
    array = random.random((30, 70)).astype("f4")
    array[:3], array[3, :5], array[4, :5] = 0, 1, 2
    is_soft = array != np.floor(array)
    whole = sketched(array, 5000)
    assert str(whole.labels.tolist()) == "[1.0, 2.0, nan]"
    assert whole.each()[2].tolist() == np.flatnonzero(is_soft).tolist()
    for most in (7, 5000):
        found = [sketched(array, most, None, side, side) for side in (3, 11, 100)]
        for one in found[1:]:
            assert all(
                np.array_equal(part, other, equal_nan=True) for part, other in zip(one, found[0], strict=True)
            )
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


# ---- masks ----------------------------------------------------------------------------------------


def counted(mask: Any, side: int = 1000, seed: int = 0, patch: Any = (16,) * 3) -> BlockCounts:
    counts = BlockCounts(mask.shape, patch[: mask.ndim])
    starts = list(itertools.product(*(range(0, size, side) for size in mask.shape)))
    for number in np.random.default_rng(seed).permutation(len(starts)).tolist():
        start = starts[number]
        counts.add(mask[tuple(slice(at, at + side) for at in start)], start)
    return counts


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=3), seed=st.integers(0, 99),
    patch=st.lists(st.integers(1, 30), min_size=3, max_size=3), density=st.sampled_from([0.02, 0.4, 0.98, 1.0]),
)  # fmt: skip
def test_the_content_of_a_box_lies_between_its_bounds(
    shape: list[int], seed: int, patch: list[int], density: float
) -> None:
    """They are the same where it ends with blocks."""
    random = np.random.default_rng(seed)
    mask = random.random(shape) < density
    counts = counted(mask, 1 + seed % 9, seed, patch[: len(shape)])
    assert counts.counts.sum() == np.count_nonzero(mask)
    found = MaskDensity(counts.counts, counts.sides, counts.shape)
    for number in range(10):
        low = np.array([random.integers(-size, size) for size in shape])
        high = np.array([random.integers(at + 1, 2 * size + 1) for at, size in zip(low, shape, strict=True)])
        if number % 2:
            low, high = (some // counts.sides * counts.sides for some in (low, high + counts.sides))
        size = high - low
        box = tuple(slice(max(0, at), max(0, end)) for at, end in zip(low, high, strict=True))
        true = np.count_nonzero(mask[box])
        (least,) = found.fractions(low[None], size) * np.prod(size)
        (most,) = found.most(low[None], size)
        assert least <= true + 1e-6
        assert true <= most
        if number % 2 or density == 1.0:
            assert most == true
            assert least == pytest.approx(true)
        # Of blocks that are not at the surface all is known.
        inner = tuple(
            slice(max(0, at + side - 1), max(0, end - side + 1))
            for at, end, side in zip(low, high, counts.sides, strict=True)
        )
        assert least >= np.count_nonzero(mask[inner]) - 1e-6


def test_blocks_are_as_small_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_sides((100, 3, 50), (16, 99, 99)) == [4, 3, 4]
    assert block_sides((100, 30, 50), (1, 9, 13)) == [1, 2, 3]
    monkeypatch.setattr(sampling, "_MOST_BLOCKS", 100)
    sides = block_sides((100, 100, 100), (16, 16, 16))
    assert sides == [32, 32, 32]
    assert np.prod([-(-100 // side) for side in sides]) <= 100
    monkeypatch.setattr(sampling, "_MOST_BLOCKS", 1000)
    assert block_sides((100, 100, 100), (1, 64, 64)) == [1, 64, 32]


def draws(number: int, seed: int, epoch: int, indices: Any, count: int) -> Any:
    """Uniform numbers by index, as a dataset draws them."""
    return uniforms(sample_seed(seed, number, 1 << 40), epoch, indices, count)


class Masked:
    """Patches of some masks, and what is true of them."""

    def __init__(self, some: Any, patch: Any, least: float, count: int = 400, by_size: bool = False) -> None:
        self.masks = some
        self.space = PatchSpace([mask.shape for mask in some], patch, [f"mask {n}" for n in range(9)], True)
        counts = [counted(mask, patch=patch) for mask in some]
        self.densities = [MaskDensity(one.counts, one.sides, one.shape) for one in counts]
        self.cells = PatchCells(self.space, by_size, least, self.densities)
        self.base = UniformPatches(self.space, count, by_size, partial(draws, 0))
        self.patches = MaskedPatches(self.base, self.cells, least, self.known, draws)

    def known(self, places: Places) -> Any:
        """What blocks say."""
        found = np.zeros(len(places.volumes))
        for volume, density in enumerate(self.densities):
            rows = places.volumes == volume
            found[rows] = density.fractions(places.starts[rows], self.space.patch)
        return found

    def true(self, places: Places) -> Any:
        """What is so."""
        found = []
        for volume, start in zip(places.volumes.tolist(), places.starts, strict=True):
            box = tuple(
                slice(max(0, at), max(0, at + side))
                for at, side in zip(start.tolist(), self.space.patch.tolist(), strict=True)
            )
            found.append(np.count_nonzero(self.masks[volume][box]) / np.prod(self.space.patch))
        return np.array(found)

    def everywhere(self, volume: int) -> Places:
        """All places of a volume."""
        starts = np.indices(self.space.counts[volume]).reshape(len(self.space.patch), -1).T
        return Places(np.full(len(starts), volume), starts + self.space.lows[volume])


def ball(shape: Any, centre: Any, radius: float) -> Any:
    at = np.indices(shape).reshape(len(shape), -1).T - np.array(centre)
    return ((at**2).sum(axis=1) <= radius**2).reshape(shape)


CASES = {
    "little": ([ball((40, 40), (10, 28), 2)], (8, 8), 1e-9),
    "small": ([ball((48, 48), (20, 25), 5)], (16, 12), 0.2),
    "thin": ([np.arange(1200).reshape(30, 40) % 40 == 17], (9, 11), 0.05),
    "two": ([ball((30, 30), (9, 9), 4), ball((40, 28), (39, 20), 6)], (8, 8), 0.3),
    "flat": ([ball((6, 40, 40), (3, 20, 20), 6)], (1, 12, 12), 0.3),
    "padded": ([ball((5, 40), (2, 20), 4)], (8, 8), 0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_each_patch_has_enough_and_each_that_is_known_to_is_as_likely(case: str) -> None:
    some, patch, least = CASES[case]
    made = Masked(some, patch, least, 8_000)
    found = made.patches.places(0, 0, np.arange(8_000))
    assert (made.true(found) >= least).all()
    weights, observed = [], []
    for volume in range(len(some)):
        everywhere = made.everywhere(volume)
        is_good = made.known(everywhere) >= least
        assert (made.true(everywhere)[is_good] >= least).all()
        keys = {tuple(start): number for number, start in enumerate(everywhere.starts.tolist())}
        rows = [keys[tuple(start)] for start in found.starts[found.volumes == volume].tolist()]
        observed.append(np.bincount(rows, minlength=len(keys))[is_good])
        weights.append(np.full(is_good.sum(), 1 / len(keys)))
    assert np.concatenate(observed).sum() == 8_000, "no others"
    expected = np.concatenate(weights)
    pvalue = stats.chisquare(np.concatenate(observed), 8_000 * expected / expected.sum()).pvalue
    assert pvalue > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_patches_are_functions_of_seed_epoch_and_index(case: str) -> None:
    some, patch, least = CASES[case]
    made = Masked(some, patch, least)
    first = made.patches.places(3, 1, np.arange(400))
    part = made.patches.places(3, 1, np.array([7, 250, 3]))
    np.testing.assert_array_equal(part.starts, first.starts[[7, 250, 3]])
    np.testing.assert_array_equal(part.volumes, first.volumes[[7, 250, 3]])
    plain = made.base.places(3, 1, np.arange(400))
    is_good = made.known(plain) >= least
    np.testing.assert_array_equal(first.starts[is_good], plain.starts[is_good])
    count = sum(int((made.known(made.everywhere(volume)) >= least).sum()) for volume in range(len(some)))
    for seed, epoch in ((4, 1), (3, 2)):
        other = made.patches.places(seed, epoch, np.arange(400))
        same = (other.starts == first.starts).all(axis=1) & (other.volumes == first.volumes)
        assert same.sum() <= 400 / count + 5 * (400 / count) ** 0.5 + 5


def test_a_patch_that_is_known_is_drawn_where_attempts_find_none() -> None:
    """Cells that promise more than they hold: by another seed it is another one nevertheless."""
    made = Masked([np.ones(4000, bool)], (1,), 0.5, count=50)

    def fractions(places: Places) -> Any:
        return (places.starts[:, 0] % 1000 == 7).astype(float)

    patches = MaskedPatches(made.base, made.cells, 0.5, fractions, draws)
    found = [patches.places(seed, 0, np.arange(50)).starts[:, 0] for seed in (0, 1)]
    assert all((starts % 1000 == 7).all() for starts in found)
    assert set(found[0]) == {7, 1007, 2007, 3007}
    assert (found[0] == found[1]).mean() < 0.6
    np.testing.assert_array_equal(patches.places(0, 0, np.array([9, 4])).starts[:, 0], found[0][[9, 4]])


def test_cells_without_enough_are_left_out() -> None:
    mask = ball((64, 64, 64), (20, 30, 40), 6)
    made = Masked([mask], (16, 16, 16), 0.1)
    few = PatchCells(made.space, True, 0.1, made.densities)
    assert 0 < few.count < 5000 < PatchCells(made.space, True, 0.0, [MaskDensity(
        np.ones((16, 16, 16), np.int64) * 64, [4, 4, 4], (64, 64, 64))]).count  # fmt: skip
    drawn = few.places(np.random.default_rng(0).random((2000, 4)))
    assert (made.known(drawn) >= 0.1).mean() > 0.3, "else attempts would be in vain"


@pytest.mark.parametrize("mask", [np.zeros((40, 40), bool), ball((40, 40), (20, 20), 3)])
def test_none_that_is_good_is_an_error_with_the_most(mask: Any) -> None:
    with pytest.raises(OptionError, match=r"mask_fraction=0.5: of 16,384 patches .* the most is 0\.[0-3]"):
        Masked([mask], (10, 10), 0.5)

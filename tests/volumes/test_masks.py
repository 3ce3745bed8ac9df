"""How much of a box is in a mask, by the counts of blocks; and patches of which enough is."""

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
from fastpipe.volumes import sampling as masks
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches
from fastpipe.volumes.sampling import BlockCounts, MaskDensity, MaskedPatches, PatchCells, block_sides


def counted(mask: Any, side: int = 1000, seed: int = 0, patch: Any = (16,) * 3) -> BlockCounts:
    counts = BlockCounts(mask.shape, patch[: mask.ndim])
    starts = list(itertools.product(*(range(0, size, side) for size in mask.shape)))
    for number in np.random.default_rng(seed).permutation(len(starts)).tolist():
        start = starts[number]
        counts.add(mask[tuple(slice(at, at + side) for at in start)], start)
    return counts


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 17), min_size=1, max_size=3), side=st.integers(1, 9), seed=st.integers(0, 99),
    dtype=st.sampled_from(["u1", "f4", "b", "i2"]),
)  # fmt: skip
def test_counts_do_not_depend_on_the_parts(shape: list[int], side: int, seed: int, dtype: str) -> None:
    mask = np.random.default_rng(seed).integers(-1 if dtype == "i2" else 0, 2, shape).astype(dtype)
    found = counted(mask, side, seed)
    assert found.counts.sum() == np.count_nonzero(mask)
    for at in np.ndindex(*found.counts.shape):
        box = tuple(
            slice(place * step, (place + 1) * step) for place, step in zip(at, found.sides, strict=True)
        )
        assert found.counts[at] == np.count_nonzero(mask[box])


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=3), seed=st.integers(0, 99),
    patch=st.lists(st.integers(1, 30), min_size=3, max_size=3), density=st.sampled_from([0.02, 0.4, 0.98, 1.0]),
)  # fmt: skip
def test_bounds_of_boxes(shape: list[int], seed: int, patch: list[int], density: float) -> None:
    """What a box has lies between them, and they are the same where it ends with blocks."""
    random = np.random.default_rng(seed)
    mask = random.random(shape) < density
    counts = counted(mask, patch=patch[: len(shape)])
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


def test_a_full_mask_is_full_up_to_its_ends() -> None:
    """Also where the last block is not a whole one."""
    for shape in ((10, 9), (7, 3), (1, 30), (4, 4), (5, 5, 5)):
        counts = counted(np.ones(shape, np.uint8))
        density = MaskDensity(counts.counts, counts.sides, counts.shape)
        patch = np.array([max(1, size // 2) for size in shape])
        last = np.array(shape) - patch
        found = density.fractions(np.array([np.zeros_like(last), last, last // 2]), patch)
        assert (found == 1).all()


def test_blocks_are_as_small_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_sides((100, 3, 50), (16, 99, 99)) == [4, 3, 4]
    assert block_sides((100, 30, 50), (1, 9, 13)) == [1, 2, 3]
    monkeypatch.setattr(masks, "_MOST_BLOCKS", 100)
    sides = block_sides((100, 100, 100), (16, 16, 16))
    assert sides == [32, 32, 32]
    assert np.prod([-(-100 // side) for side in sides]) <= 100
    monkeypatch.setattr(masks, "_MOST_BLOCKS", 1000)
    assert block_sides((100, 100, 100), (1, 64, 64)) == [1, 64, 32]


# ---- patches of which enough is in a mask -------------------------------------------------------


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


def test_where_attempts_find_none_one_that_is_known_is_drawn() -> None:
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

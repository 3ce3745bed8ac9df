"""Where patches are: within volumes, everywhere in them, and functions of seed, epoch and index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fastpipe.errors import OptionError
from fastpipe.volumes.places import (
    FixedPatches,
    PatchSpace,
    Places,
    UniformPatches,
    given_places,
    grid_places,
)


def draw(seed: int, epoch: int, indices: Any, count: int) -> Any:
    """Uniform numbers by index, as a dataset draws them."""
    rows = [np.random.default_rng([seed, epoch, int(index)]).random(count) for index in indices]
    return np.array(rows).reshape(len(indices), count)


def in_order(seed: int, epoch: int, indices: Any, count: int) -> Any:
    """The same, of many at once: by place and not by index."""
    return np.random.default_rng([seed, epoch]).random((len(indices), count))


def space_of(*shapes: tuple[int, ...], patch: tuple[int, ...], pads: bool = False) -> PatchSpace:
    return PatchSpace(shapes, patch, [f"volume {number}" for number in range(len(shapes))], pads)


@st.composite
def spaces(draw: Any) -> PatchSpace:
    """Volumes, of which some are smaller than a patch."""
    dims = draw(st.integers(1, 3))
    side = st.integers(1, 9)
    shapes = [tuple(draw(side) for _ in range(dims)) for _ in range(draw(st.integers(1, 4)))]
    return space_of(*shapes, patch=tuple(draw(side) for _ in range(dims)), pads=True)


def assert_within(space: PatchSpace, places: Places) -> None:
    """Within a volume along each dimension; or, where that is smaller, with all of it and as much on each side."""
    volumes, starts = places
    assert starts.dtype == np.int64
    assert starts.shape == (len(volumes), len(space.patch))
    assert ((volumes >= 0) & (volumes < len(space.shapes))).all()
    shapes = space.shapes[volumes]
    fits = space.patch <= shapes
    inside = (starts >= 0) & (starts + space.patch <= shapes)
    before, behind = -starts, starts + space.patch - shapes
    around = (before >= 0) & (behind >= 0) & (np.abs(before - behind) <= 1)
    assert np.where(fits, inside, around).all()


@settings(max_examples=80)
@given(space=spaces(), by_size=st.booleans(), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 99))
def test_uniform_places_are_within_bounds(space: PatchSpace, by_size: bool, seed: int, epoch: int) -> None:
    patches = UniformPatches(space, 50, by_size, in_order)
    assert_within(space, patches.places(seed, epoch, np.arange(50)))
    assert (patches.count, patches.is_random) == (50, True)


@settings(max_examples=40)
@given(space=spaces(), by_size=st.booleans(), indices=st.lists(st.integers(0, 99), max_size=12))
def test_a_place_depends_on_its_own_index_only(space: PatchSpace, by_size: bool, indices: list[int]) -> None:
    patches = UniformPatches(space, 100, by_size, draw)
    whole = patches.places(3, 1, np.arange(100))
    some = patches.places(3, 1, np.array(indices, np.int64))
    np.testing.assert_array_equal(some.volumes, whole.volumes[indices])
    np.testing.assert_array_equal(some.starts, whole.starts[indices])


def test_another_seed_or_epoch_has_other_places() -> None:
    patches = UniformPatches(space_of((100, 100), patch=(3, 3)), 20, True, draw)
    first = patches.places(0, 0, np.arange(20)).starts
    for seed, epoch in ((1, 0), (0, 1)):
        assert (patches.places(seed, epoch, np.arange(20)).starts != first).any()


@pytest.mark.parametrize("seed", range(2))
def test_places_are_uniform(seed: int) -> None:
    """By a chi-square of all places of a volume, and of their volumes."""
    space, count = space_of((9, 7), (5, 4), (12, 3), patch=(4, 3)), 60_000
    for by_size in (False, True):
        found = UniformPatches(space, count, by_size, in_order).places(seed, 0, np.arange(count))
        sizes = space.counts.prod(axis=1)
        expected = count * (sizes / sizes.sum() if by_size else np.full(3, 1 / 3))
        observed = np.bincount(found.volumes, minlength=3)
        assert stats.chisquare(observed, expected).pvalue > 1e-3
        for volume in range(3):
            starts = found.starts[found.volumes == volume]
            places = np.ravel_multi_index(tuple(starts.T), tuple(space.counts[volume]))
            assert stats.chisquare(np.bincount(places, minlength=int(sizes[volume]))).pvalue > 1e-3


def test_places_of_numbers_at_the_ends_of_their_range_are_within_bounds() -> None:
    space = space_of((1 << 40, 10), (3, 10), patch=(3, 10))
    for value in (0.0, np.nextafter(1.0, 0.0)):
        ends = UniformPatches(space, 4, True, lambda seed, epoch, indices, count: np.full((4, count), value))
        assert_within(space, ends.places(0, 0, np.arange(4)))


def test_places_are_drawn_where_a_float_cannot_tell_them_apart() -> None:
    space = space_of((1 << 30,) * 3, (1,) * 3, (1 << 30,) * 3, patch=(1, 1, 1))
    assert sum(math.prod(counts) for counts in space.counts.tolist()) == 2 * (1 << 90) + 1
    found = UniformPatches(space, 100, True, in_order).places(0, 0, np.arange(100))
    assert_within(space, found)
    assert {0, 2} == set(found.volumes.tolist())


def test_fixed_patches_are_the_same_in_each_epoch() -> None:
    places = Places(np.array([0, 1, 0]), np.array([[1], [2], [3]]))
    patches = FixedPatches(places)
    assert (patches.count, patches.is_random) == (3, False)
    for seed, epoch in ((0, 0), (1, 5)):
        found = patches.places(seed, epoch, np.array([2, 1]))
        assert found.volumes.tolist() == [0, 1]
        assert found.starts.tolist() == [[3], [2]]


@settings(max_examples=80)
@given(space=spaces(), data=st.data())
def test_a_grid_covers_every_voxel(space: PatchSpace, data: Any) -> None:
    stride = [data.draw(st.integers(1, side)) for side in space.patch.tolist()]
    found = grid_places(space, stride)
    assert_within(space, found)
    for volume, shape in enumerate(space.shapes.tolist()):
        covered, starts = np.zeros(shape, bool), found.starts[found.volumes == volume].tolist()
        for start in starts:
            covered[
                tuple(slice(max(0, at), at + side) for at, side in zip(start, space.patch, strict=True))
            ] = True
        assert covered.all()
        assert starts == sorted(starts), "in C order"
        assert len({tuple(start) for start in starts}) == len(starts)
        counts = [
            -(-(count - 1) // step) + 1
            for count, step in zip(space.counts[volume].tolist(), stride, strict=True)
        ]
        assert len(starts) == math.prod(counts), "no more than it takes"
    assert (np.diff(found.volumes) >= 0).all()


def test_a_patch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"a patch of \(4, 3\) does not fit into volume 1, which has \(3, 9\)"
    ):
        space_of((9, 9), (3, 9), patch=(4, 3))
    assert space_of((9, 9), (3, 9), patch=(4, 3), pads=True).lows.tolist() == [[0, 0], [0, 0]]
    assert space_of((1, 9), patch=(4, 3), pads=True).lows.tolist() == [[-1, 0]]


def test_given_places_are_those_given() -> None:
    one = space_of((9, 9), patch=(3, 3))
    array = np.array([[0, 0], [6, 6], [2, 5]])
    found = given_places(one, array, pads=False)
    assert found.volumes.tolist() == [0, 0, 0]
    np.testing.assert_array_equal(found.starts, array)
    two = space_of((9, 9), (4, 4), patch=(3, 3))
    found = given_places(two, np.array([[1, 1, 1], [0, 6, 0]]), pads=False)
    assert found.volumes.tolist() == [1, 0]
    assert found.starts.tolist() == [[1, 1], [6, 0]]
    assert len(given_places(two, np.zeros((0, 3), np.int64), pads=False).volumes) == 0


@pytest.mark.parametrize(
    ("array", "pads", "message"),
    [
        ([[0, 7, 0]], False, r"patch 0, of \(3, 3\) at \(7, 0\), is not within volume 0, which has \(9, 9\); padding="),
        ([[0, 0, 0], [1, 0, -1]], False, r"patch 1, of \(3, 3\) at \(0, -1\), is not within volume 1"),
        ([[0, 9, 0]], True, r"at \(9, 0\), is not within volume 0, which has \(9, 9\)$"),
        ([[0, 0, -3]], True, r"at \(0, -3\), is not within"),
        ([[2, 0, 0]], False, "names volume 2 of 2, counted from 0"), ([[-1, 0, 0], [1, 0, 0]], False, "names volume -1 of 2"),
        ([[0, np.iinfo(np.int64).max, 0]], False, "is not within"),
        ([[0, 0]], False, "3 numbers, the volume's in front for each patch, got 2"),
    ],
)  # fmt: skip
def test_impossible_given_places_are_refused(array: Any, pads: bool, message: str) -> None:
    space = space_of((9, 9), (4, 4), patch=(3, 3), pads=pads)
    with pytest.raises(OptionError, match=message):
        given_places(space, np.array(array), pads)


def test_with_padding_a_given_place_may_be_partly_outside() -> None:
    space = space_of((9, 9), patch=(3, 3), pads=True)
    array = np.array([[-2, 8], [8, -2]])
    np.testing.assert_array_equal(given_places(space, array, True).starts, array)

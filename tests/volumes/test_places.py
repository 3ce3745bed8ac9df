"""Where patches are: within volumes, everywhere in them, and functions of seed, epoch and index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.errors import OptionError
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches, given_places, grid_places


def space_of(*shapes: tuple[int, ...], patch: tuple[int, ...], pads: bool = False) -> PatchSpace:
    return PatchSpace(shapes, patch, [f"volume {number}" for number in range(len(shapes))], pads)


@st.composite
def spaces(draw: Any) -> PatchSpace:
    """Volumes, of which some are smaller than a patch."""
    dims, side = draw(st.integers(1, 3)), st.integers(1, 9)
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


def test_places_of_very_large_volumes_are_within_bounds() -> None:
    """For numbers at the ends of their range, and where a float cannot tell places apart."""
    space = space_of((1 << 40, 10), (3, 10), patch=(3, 10))
    for value in (0.0, np.nextafter(1.0, 0.0)):
        ends = UniformPatches(space, 4, True, lambda seed, epoch, indices, count: np.full((4, count), value))
        assert_within(space, ends.places(0, 0, np.arange(4)))
    space = space_of((1 << 30,) * 3, (1,) * 3, (1 << 30,) * 3, patch=(1, 1, 1))
    assert sum(math.prod(counts) for counts in space.counts.tolist()) == 2 * (1 << 90) + 1
    numbers = np.random.default_rng(0).random((100, 4))
    found = UniformPatches(space, 100, True, lambda *_: numbers).places(0, 0, np.arange(100))
    assert_within(space, found)
    assert {0, 2} == set(found.volumes.tolist())


@settings(max_examples=80)
@given(space=spaces(), data=st.data())
def test_a_grid_covers_every_voxel(space: PatchSpace, data: Any) -> None:
    patch = space.patch.tolist()
    stride = [data.draw(st.integers(1, side)) for side in patch]
    found = grid_places(space, stride)
    assert_within(space, found)
    assert (np.diff(found.volumes) >= 0).all()
    for volume, shape in enumerate(space.shapes.tolist()):
        covered, starts = np.zeros(shape, bool), found.starts[found.volumes == volume].tolist()
        for start in starts:
            covered[tuple(slice(max(0, at), at + side) for at, side in zip(start, patch, strict=True))] = True
        assert covered.all()
        assert starts == sorted(starts), "in C order"
        assert len({tuple(start) for start in starts}) == len(starts)
        counts = space.counts[volume].tolist()
        steps = [-(-(count - 1) // step) + 1 for count, step in zip(counts, stride, strict=True)]
        assert len(starts) == math.prod(steps), "no more than it takes"


def test_given_places_are_those_given() -> None:
    for pads, array in ((False, [[0, 0], [6, 6], [2, 5]]), (True, [[-2, 8], [8, -2]])):
        found = given_places(space_of((9, 9), patch=(3, 3), pads=pads), np.array(array), pads)
        assert (found.volumes.tolist(), found.starts.tolist()) == ([0] * len(array), array)
    two = space_of((9, 9), (4, 4), patch=(3, 3))
    found = given_places(two, np.array([[1, 1, 1], [0, 6, 0]]), pads=False)
    assert (found.volumes.tolist(), found.starts.tolist()) == ([1, 0], [[1, 1], [6, 0]])
    assert len(given_places(two, np.zeros((0, 3), np.int64), pads=False).volumes) == 0
    with pytest.raises(
        OptionError, match=r"a patch of \(5, 3\) does not fit into volume 1, which has \(4, 4\)"
    ):
        space_of((9, 9), (4, 4), patch=(5, 3))


@pytest.mark.parametrize(
    ("array", "pads", "message"),
    [
        ([[0, 7, 0]], False, r"patch 0, of \(3, 3\) at \(7, 0\), is not within volume 0, which has \(9, 9\); padding="),
        ([[0, 0, 0], [1, 0, -1]], False, r"patch 1, of \(3, 3\) at \(0, -1\), is not within volume 1"),
        ([[0, 9, 0]], True, r"at \(9, 0\), is not within volume 0, which has \(9, 9\)$"), ([[0, 0, -3]], True, "is not within"),
        ([[0, np.iinfo(np.int64).max, 0]], False, "is not within"), ([[2, 0, 0]], False, "names volume 2 of 2"),
        ([[-1, 0, 0], [1, 0, 0]], False, "names volume -1 of 2"), ([[0, 0]], False, "3 numbers, the volume's in front"),
    ],
)  # fmt: skip
def test_impossible_given_places_are_refused(array: Any, pads: bool, message: str) -> None:
    space = space_of((9, 9), (4, 4), patch=(3, 3), pads=pads)
    with pytest.raises(OptionError, match=message):
        given_places(space, np.array(array), pads)

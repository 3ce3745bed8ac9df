"""Voxels of each label are drawn from all of a volume, whatever the order of its parts; patches go around them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.volumes.places import ForegroundPatches, PatchSpace, Places
from fastpipe.volumes.sampling import VoxelSketch


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


def of(found: Any, label: float) -> Any:
    """The voxels of a label."""
    return found.each()[found.labels.tolist().index(label)]


@settings(max_examples=60)
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
    for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
        voxels = of(whole, label)
        assert len(voxels) == len(set(voxels.tolist())) == min(count, most)
        assert (array.reshape(-1)[voxels] == label).all()


def test_only_labels_that_are_asked_for() -> None:
    array = np.array([[-1, 0, 1], [2, 3, 3]], np.int8)
    found = sketched(array, 9, [3, -1, 0, 8])
    assert found.labels.tolist() == [-1, 0, 3]
    assert sketched(array, 9).labels.tolist() == [1, 2, 3]


ODD: list[tuple[str, list[Any]]] = [
    ("f8", [0, 0.5, 1, 2, np.nan, np.inf, -np.inf, -3, -0.5, 1.0000000196078431, 0.9882, 1e-300]),
    ("f4", [0, 0.7, 1, 0.7, 2.5, np.nan, 16777216, 1e30, -0.0]), ("f2", [0.1, 0.5, 1, 0, 6e-8]), ("?", [0, 1, 1, 0]),
    ("u8", [0, 1, 2**53 + 1, 2**53, 2**63, 2**63 + 1, 2**64 - 1]), ("i8", [0, -1, 2**53 + 1, 2**53, -(2**63), 2**63 - 1]),
    ("u4", [0, 2**32 - 1, 7]), ("i1", [-128, -1, 0, 1, 127]), (">f4", [0.25, 3, 0]), (">i2", [-2, 300, 1]), ("u2", [0, 65535]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), ODD)
@pytest.mark.parametrize("side", [1, 3, 100])
def test_all_labels_above_0_are_foreground(kind: str, values: list[Any], side: int) -> None:
    """As NumPy finds them: ``labels > 0``."""
    array = np.tile(np.array(values, kind), 5)
    found = sketched(array, 99, None, side)
    expected = np.unique(array[array > 0])
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
    assert len(few.labels) == len(np.unique(np.round(array, 2))) - 1, (
        "up to 1,000 they are classes of their own"
    )


def test_every_voxel_is_drawn_alike() -> None:
    """A tenth of a label's voxels: in each eighth of the volume about as many, and along each dimension."""
    array = np.ones((40, 40, 40), np.uint8)
    voxels = of(sketched(array, 6400), 1)
    at = np.stack(np.unravel_index(voxels, array.shape))
    for dim in range(3):
        counts = np.bincount(at[dim], minlength=40)
        assert ((counts - 160) ** 2 / 160).sum() < 75  # 39 degrees of freedom: 99.95 % are below
    octants = np.bincount((at >= 20).T @ np.array([1, 2, 4]), minlength=8)
    assert ((octants - 800) ** 2 / 800).sum() < 26  # 7: 99.95 %


class Corner:
    """Patches that are elsewhere: all at one place of volume 0 and 1 in turn."""

    is_random = True

    def __init__(self, count: int, start: list[int]) -> None:
        self.count, self._start = count, start

    def places(self, seed: int, epoch: int, indices: Any) -> Places:
        return Places(indices % 2, np.tile(np.array(self._start), (len(indices), 1)))


def test_patches_are_centred_on_voxels_of_the_label_that_was_drawn() -> None:
    space = PatchSpace([(20, 20), (30, 10)], (4, 5), ["a", "b"], False)
    voxels = [[np.array([20 * 10 + 10]), np.array([0, 399])], []]

    def draw(seed: int, epoch: int, indices: Any, count: int) -> Any:
        return np.random.default_rng([seed, epoch]).random((1000, count))[indices]

    patches = ForegroundPatches(space, Corner(1000, [7, 3]), 0.6, voxels, draw)
    assert patches.count == 1000
    volumes, starts = patches.places(1, 0, np.arange(1000))
    assert (starts[volumes == 1] == [7, 3]).all()  # which has no label
    inside = starts[volumes == 0]
    shares = {place: (inside == place).all(axis=1).mean() for place in [(7, 3), (8, 8), (0, 0), (16, 15)]}
    assert sum(shares.values()) == 1
    assert shares[7, 3] == pytest.approx(0.4, abs=0.07)
    assert shares[8, 8] == pytest.approx(0.3, abs=0.07)
    assert shares[0, 0] == pytest.approx(0.15, abs=0.05)
    # A patch depends on its own index only.
    some = patches.places(1, 0, np.array([5, 900, 4]))
    assert np.array_equal(some.starts, starts[[5, 900, 4]])
    assert not np.array_equal(patches.places(1, 1, np.arange(1000)).starts, starts)
    assert not len(patches.places(1, 0, np.zeros(0, np.int64)).starts)

"""How much of a box is in a mask, by the counts of blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.errors import OptionError
from fastpipe.index import masks
from fastpipe.index.masks import BlockCounts, MaskDensity, block_sides
from fastpipe.index.patches import MaskedPatches, Places


def counted(mask: Any, side: int = 1000, seed: int = 0) -> BlockCounts:
    counts = BlockCounts(mask.shape)
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


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(2, 24), min_size=1, max_size=3), seed=st.integers(0, 99), even=st.booleans(),
)  # fmt: skip
def test_fractions_of_boxes(shape: list[int], seed: int, even: bool) -> None:
    """Exact where boxes end with blocks, and else wrong by no more than the blocks at their surface."""
    random = np.random.default_rng(seed)
    mask = random.random(shape) < 0.4
    counts = counted(mask)
    density = MaskDensity(counts.counts, counts.sides, counts.shape)
    for _ in range(10):
        low = np.array([random.integers(-size, size) for size in shape])
        high = np.array([random.integers(at + 1, 2 * size + 1) for at, size in zip(low, shape, strict=True)])
        if even:
            low, high = low // 4 * 4, -(-high // 4) * 4
        size = high - low
        (found,) = density.fractions(low[None], size)
        box = tuple(slice(max(0, at), max(0, end)) for at, end in zip(low, high, strict=True))
        true = np.count_nonzero(mask[box]) / np.prod(size)
        blocks = np.prod(size + 8) - np.prod(np.maximum(size - 8, 0))
        is_exact = even and all(
            side == 4 and full % 4 == 0 for side, full in zip(counts.sides, shape, strict=True)
        )
        assert found == pytest.approx(true, abs=1e-9 if is_exact else blocks / np.prod(size))
        assert 0 <= found <= 1


def test_a_full_mask_is_full_up_to_its_ends() -> None:
    """Also where the last block is not a whole one."""
    for shape in ((10, 9), (7, 3), (1, 30), (4, 4), (5, 5, 5)):
        counts = counted(np.ones(shape, np.uint8))
        density = MaskDensity(counts.counts, counts.sides, counts.shape)
        patch = np.array([max(1, size // 2) for size in shape])
        last = np.array(shape) - patch
        found = density.fractions(np.array([np.zeros_like(last), last, last // 2]), patch)
        np.testing.assert_allclose(found, 1, atol=1e-9)


def test_blocks_are_as_small_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_sides((100, 3, 50)) == [4, 3, 4]
    monkeypatch.setattr(masks, "_MOST_BLOCKS", 100)
    sides = block_sides((100, 100, 100))
    assert sides == [32, 32, 32]
    assert np.prod([-(-100 // side) for side in sides]) <= 100


class Line:
    """Patches at numbers that depend on attempt, epoch and index."""

    is_random, count = True, 50

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt

    def places(self, seed: int, epoch: int, indices: Any) -> Places:
        starts = np.array([hash((self._attempt, seed, epoch, index)) % 100 for index in indices.tolist()])
        return Places(np.zeros(len(indices), np.int64), starts.reshape(-1, 1))


@pytest.mark.parametrize("good", [90, 40, 1])
def test_patches_with_too_little_are_drawn_anew(good: int) -> None:
    def shares(places: Places) -> Any:
        return (places.starts[:, 0] < good).astype(float)

    masked = MaskedPatches(Line, 0.5, shares)
    assert masked.count == 50
    volumes, starts = masked.places(3, 0, np.arange(50))
    assert (starts < good).all()
    plain = Line(0).places(3, 0, np.arange(50)).starts
    kept = plain[:, 0] < good
    assert np.array_equal(starts[kept], plain[kept])
    some = masked.places(3, 0, np.array([7, 3]))
    assert np.array_equal(some.starts, starts[[7, 3]])  # a row depends on its own index only
    assert np.array_equal(volumes[[7, 3]], some.volumes)


def test_none_that_is_good_is_an_error_with_the_most() -> None:
    with pytest.raises(OptionError, match=r"mask_fraction=0.5: of 16,384 patches .* the most is 0\.400"):
        MaskedPatches(Line, 0.5, lambda places: np.full(len(places.volumes), 0.4))

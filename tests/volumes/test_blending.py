"""Blended parts are those of a straightforward implementation over the whole array."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.errors import OptionError
from fastpipe.volumes.blending import Blender, gaussian_weights


def blended_by_numpy(shape: Any, starts: Any, weights: Any, values: Any) -> Any:
    """All of it at once, in float64: with a patch's side around the array, as patches reach beyond it."""
    lead, side = values.shape[1 : values.ndim - len(shape)], weights.shape
    padded = [size + 2 * more for size, more in zip(shape, side, strict=True)]
    sums, total = np.zeros((*lead, *padded)), np.zeros(padded)
    for start, value in zip(starts.tolist(), values, strict=True):
        box = tuple(slice(at + more, at + 2 * more) for at, more in zip(start, side, strict=True))
        sums[(..., *box)] += value * weights.astype(np.float64)
        total[box] += weights
    inner = tuple(slice(more, more + size) for more, size in zip(side, shape, strict=True))
    sums, total = sums[(..., *inner)], total[inner]
    return np.where(total > 0, sums / np.where(total > 0, total, 1), 0)


@st.composite
def cases(draw: st.DrawFn) -> Any:
    dims = draw(st.integers(1, 3))
    shape, patch, part = (tuple(draw(st.integers(1, most)) for _ in range(dims)) for most in (9, 6, 10))
    starts = [
        [draw(st.integers(1 - side, size - 1)) for side, size in zip(patch, shape, strict=True)]
        for _ in range(draw(st.integers(1, 8)))
    ]
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    return shape, patch, part, np.array(starts), lead, draw(st.sampled_from([0, 100, 400, 1 << 20]))


@settings(max_examples=100)
@given(case=cases(), seed=st.integers(0, 99))
def test_blended_parts_are_those_of_numpy(tmp_path: Path, case: Any, seed: int) -> None:
    shape, patch, part, starts, lead, max_bytes = case
    random = np.random.default_rng(seed)
    weights = random.uniform(0.1, 1, patch).astype(np.float32)
    values = random.normal(size=(len(starts), *lead, *patch)).astype(np.float32)
    made, written = np.zeros((*lead, *shape), np.float32), np.zeros(shape, int)

    def write(start: Any, values: Any) -> None:
        assert values.dtype == np.float32
        sizes = values.shape[values.ndim - len(shape) :]
        box = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
        assert made[(..., *box)].shape == values.shape  # within the array
        made[(..., *box)] = values
        written[box] += 1

    with Blender(shape, starts, weights, part, write, max_bytes, tmp_path) as blender:
        for start, value in zip(starts.tolist(), values, strict=True):
            blender.add(start, value)
    assert written.max() == 1  # no part twice
    np.testing.assert_allclose(made, blended_by_numpy(shape, starts, weights, values), rtol=2e-5, atol=2e-5)
    assert os.listdir(tmp_path) == []


def test_a_part_is_written_when_its_last_patch_has_come(tmp_path: Path) -> None:
    starts, ones, written = np.array([[0], [2], [4], [6]]), np.ones(2, "f4"), list[int]()
    with Blender(
        (8,), starts, ones, (4,), lambda start, _: written.append(start[0]), 99, tmp_path
    ) as blender:
        for number, start in enumerate(starts.tolist()):
            assert written == [0, 4][: number // 2]
            blender.add(start, ones)
    assert written == [0, 4]


def test_a_prediction_of_another_shape_than_before_is_an_error(tmp_path: Path) -> None:
    starts, ones = np.array([[0, 0], [0, 1]]), np.ones((2, 2), "f4")
    with Blender((4, 4), starts, ones, (4, 4), print, 1 << 20, tmp_path) as blender:
        blender.add([0, 0], np.zeros((5, 2, 2), "f4"))
        with pytest.raises(OptionError, match=r"shape \(4, 2, 2\), where \(5, 2, 2\) was expected"):
            blender.add([0, 1], np.zeros((4, 2, 2), "f4"))


@pytest.mark.parametrize("patch", [(1,), (7,), (16, 9), (5, 6, 33)])
def test_gaussian_weights_are_those_of_monai(patch: Any) -> None:
    monai = pytest.importorskip("monai.data.utils", reason="needs MONAI: pip install monai")
    expected = monai.compute_importance_map(patch, mode="gaussian", sigma_scale=0.125).numpy()
    np.testing.assert_allclose(gaussian_weights(patch), expected, rtol=1e-4, atol=1e-6)


def test_gaussian_weights_are_symmetric_and_positive() -> None:
    weights = gaussian_weights((9, 4, 30))
    assert weights.dtype == np.float32
    assert weights.max() <= 1
    assert weights.min() == np.float32(0.001)
    for axis in range(3):
        np.testing.assert_array_equal(weights, np.flip(weights, axis))

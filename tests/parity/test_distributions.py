"""What plans draw is distributed as what torchvision draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torchvision import transforms as v1

from fastpipe.core.keys import uniforms
from fastpipe.core.types import Size
from fastpipe.images.pixels import fold
from fastpipe.images.steps import random_resized_crop_box, recognise

COUNT = 10_000
# Each comparison is exact in distribution; at fixed seeds a smaller p would mean a real change.
SURE = 1e-4

IMAGES = [(375, 500), (500, 333), (64, 64), (40, 400), (600, 50)]
SETTINGS = [
    ((0.08, 1.0), (3 / 4, 4 / 3)), ((0.35, 0.6), (0.5, 2.0)), ((0.9, 1.0), (1.0, 1.0)), ((0.5, 1.0), (2.0, 3.0)),
]  # fmt: skip


def sized(size: tuple[int, int]) -> torch.Tensor:
    """As much of an image as torchvision's ``get_params`` looks at."""
    return torch.empty((3, *size), device="meta")


def same(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> None:
    """Two samples of one distribution, by the Kolmogorov-Smirnov test."""
    if len(np.unique(theirs)) == 1:
        np.testing.assert_array_equal(np.unique(ours), np.unique(theirs))
    else:
        assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > SURE


def drawn(count: int, seed: int = 0) -> npt.NDArray[np.float64]:
    return uniforms(seed, 0, np.arange(COUNT), count)


def folded(transform: Any, size: Size, draws: int) -> list[Any]:
    """The regions of an image that a transform takes."""
    step: Any = recognise(transform)
    return [fold([step.described("pil")], size, u) for u in drawn(draws)]


@pytest.mark.few(3)
@pytest.mark.parametrize("image", IMAGES, ids=str)
@pytest.mark.parametrize(("scale", "ratio"), SETTINGS, ids=str)
def test_random_resized_crop(image: tuple[int, int], scale: Any, ratio: Any) -> None:
    torch.manual_seed(0)
    blank = sized(image)
    theirs = np.array([v1.RandomResizedCrop.get_params(blank, scale, ratio) for _ in range(COUNT)])
    ours = np.array([random_resized_crop_box(Size(*image), scale, ratio, u) for u in drawn(22).tolist()])
    for boxes in (ours, theirs):
        assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= image).all()
    # Tries that fail ten times end in one central box: as often, and the same one.
    same(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])
    same(np.log(ours[:, 3] / ours[:, 2]), np.log(theirs[:, 3] / theirs[:, 2]))
    for axis in (0, 1):
        same(ours[:, axis], theirs[:, axis])
        same(ours[:, axis] + 3 * ours[:, 2], theirs[:, axis] + 3 * theirs[:, 2])  # and jointly


def test_areas_are_uniform_and_aspects_log_uniform() -> None:
    """Not by comparison, where the first try nearly always fits."""
    image, scale, ratio = Size(2000, 2000), (0.01, 0.2), (3 / 4, 4 / 3)
    boxes = np.array([random_resized_crop_box(image, scale, ratio, u) for u in drawn(22).tolist()])
    area = boxes[:, 2] * boxes[:, 3] / 2000**2
    assert stats.kstest(area, stats.uniform(0.01, 0.19).cdf).pvalue > SURE
    low = math.log(3 / 4)
    aspect = np.log(boxes[:, 3] / boxes[:, 2])
    assert stats.kstest(aspect, stats.uniform(low, -2 * low).cdf).pvalue > SURE
    for axis in (0, 1):
        place = (boxes[:, axis] + 0.5) / (2000 - boxes[:, 2 + axis] + 1)
        assert stats.kstest(place, stats.uniform().cdf).pvalue > SURE
    assert abs(stats.spearmanr(boxes[:, 0], boxes[:, 1]).statistic) < 0.06


@pytest.mark.parametrize("image", [(37, 45), (32, 45), (37, 32), (32, 32)], ids=str)
def test_random_crop_positions_are_uniform(image: tuple[int, int]) -> None:
    regions = folded(v1.RandomCrop(32), Size(*image), 2)
    positions = np.array([(region.source.top, region.source.left) for region in regions])
    rows, columns = image[0] - 32 + 1, image[1] - 32 + 1
    cells, counts = np.unique(positions @ [columns, 1], return_counts=True)
    assert set(cells.tolist()) == set(range(rows * columns)), "every position, and no other"
    if len(cells) > 1:
        assert stats.chisquare(counts).pvalue > SURE
    torch.manual_seed(0)
    blank = sized(image)
    theirs = np.array([v1.RandomCrop.get_params(blank, (32, 32))[:2] for _ in range(COUNT)])
    for axis in (0, 1):
        same(positions[:, axis], theirs[:, axis])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_flips_are_as_frequent_as_they_should_be(p: float) -> None:
    for transform in (v1.RandomHorizontalFlip(p), v1.RandomVerticalFlip(p)):
        flips = sum(any(region.flip_before) for region in folded(transform, Size(9, 9), 1))
        if p in (0.0, 1.0):
            assert flips == p * COUNT
        else:
            assert stats.binomtest(flips, COUNT, p).pvalue > SURE


def test_draws_of_different_samples_epochs_and_seeds_are_unrelated() -> None:
    one = uniforms(0, 0, np.arange(COUNT), 1)[:, 0]
    for other in (
        uniforms(0, 1, np.arange(COUNT), 1)[:, 0],
        uniforms(1, 0, np.arange(COUNT), 1)[:, 0],
        uniforms(0, 0, np.arange(1, COUNT + 1), 1)[:, 0],
        uniforms(0, 0, np.arange(COUNT), 2)[:, 1],
    ):
        assert abs(stats.spearmanr(one, other).statistic) < 0.06
        same(one, other)

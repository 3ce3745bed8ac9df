"""Folding a chain of operations gives the pixels of applying them one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from array_image import ArrayImage
from image_steps import Crop, Flip, Grey, Operation, Resize, fold

from fastpipe.core.types import Box, Size
from fastpipe.images import kernels
from fastpipe.images import pixels as geometry
from fastpipe.images.pixels import render
from fastpipe.images.steps import BOX, FLIP, described_step

CROP, TURN = Crop(Box(3, 5, 30, 40)), Flip(True, False)


@pytest.mark.parametrize(
    "operations",
    [
        [Resize(Size(20, 20), 1), Resize(Size(10, 10), 1)],
        [Resize(Size(20, 20), 1), Crop(Box(-1, 0, 20, 20))],
        [Crop(Box(-1, 0, 40, 50), None)],
        [Crop(Box(-1, 0, 41, 50), (1, 1, 1)), Crop(Box(-1, 0, 42, 50), (2, 2, 2))],
        [Crop(Box(100, 100, 5, 5))],
        [Grey(1), Grey(3)],
        [Grey(3), Crop(Box(-1, 0, 40, 50), (1, 2, 3))],
    ],
    ids=["two resizes", "fill after a resize", "no fill", "two fills", "all outside", "grey twice",
         "colour on grey"],
)  # fmt: skip
def test_a_chain_that_needs_two_passes_is_refused(operations: list[Operation]) -> None:
    assert fold(operations, Size(40, 50)) is None


def test_steps_and_numbers_that_do_not_fit_together_are_errors() -> None:
    box, flip = described_step(BOX), described_step(FLIP)
    for numbers in ([], [1, 2, 3]):
        with pytest.raises(ValueError, match="a step's numbers outside the row"):
            geometry.fold([box], Size(40, 50), numbers)
    flip.draw = -1
    with pytest.raises(ValueError, match="a step's numbers outside the row"):
        geometry.fold([flip], Size(40, 50), [0.5])
    for size, parameters in ((Size(1 << 40, 5), [0.5] * 4), (Size(40, 50), np.zeros((2, 4)))):
        with pytest.raises(TypeError):
            geometry.fold([box], size, parameters)


@pytest.mark.parametrize(
    ("operations", "decoded"),
    [
        ([Flip(True, False), Crop(Box(10, 20, 100, 50))], Box(10, 400 - 20 - 50, 100, 50)),
        # The filter's reach: twice the window, and a pixel on each side.
        ([Resize(Size(150, 200), kernels.BILINEAR), Crop(Box(50, 60, 10, 20))], Box(99, 119, 22, 42)),
    ],
    ids=["crop", "crop after a resize"],
)
def test_only_needed_pixels_are_decoded(operations: list[Operation], decoded: Box) -> None:
    image = ArrayImage(np.zeros((300, 400, 3), np.uint8))
    region = fold(operations, image.size)
    assert region is not None
    render(image, region)
    assert image.regions == [decoded]

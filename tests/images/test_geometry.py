"""Folding a chain of operations gives the pixels of applying them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from array_image import ArrayImage
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from image_steps import Crop, Flip, Grey, Operation, Resize, fold, pillow_resize
from PIL import Image

from fastpipe.core.types import Box, Size
from fastpipe.images import kernels
from fastpipe.images import pixels as geometry
from fastpipe.images.pillow_rules import FILTERS
from fastpipe.images.pixels import render
from fastpipe.images.steps import BOX, FLIP, described_step

MODES = {constant: Image.Resampling[name.upper()] for name, constant in FILTERS.items()}


def naively(image: Any, operations: Sequence[Operation]) -> Any:
    """Each operation by Pillow's own means."""
    for operation in operations:
        if isinstance(operation, Crop):
            image = cropped(image, operation)
        elif isinstance(operation, Resize):
            image = image.resize((operation.size.width, operation.size.height), MODES[operation.mode])
        elif isinstance(operation, Flip):
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if operation.horizontal else image
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if operation.vertical else image
        else:
            image = luma(image)
            image = image if operation.channels == 1 else Image.merge("RGB", [image] * 3)
    return image


def luma(image: Any) -> Any:
    """What ``convert("L")`` does, but in Pillow-SIMD; ``plan`` leaves grey to that."""
    if image.mode == "L":
        return image
    red, green, blue = np.moveaxis(np.asarray(image).astype(np.int64), 2, 0)
    return Image.fromarray(((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8))


def cropped(image: Any, operation: Crop) -> Any:
    box = operation.box
    reaches_out = box.top < 0 or box.left < 0
    reaches_out |= box.top + box.height > image.height or box.left + box.width > image.width
    fill = operation.fill
    assert fill is not None or not reaches_out, "what lies outside has no colour"
    colour: Any = (fill or (0, 0, 0)) if image.mode == "RGB" else (fill or (0,))[0]
    canvas = Image.new(image.mode, (box.width, box.height), colour)
    canvas.paste(image, (-box.left, -box.top))
    return canvas


def as_installed(operations: Sequence[Operation]) -> list[Operation]:
    """The operations, resizing as the installed Pillow does."""
    return [pillow_resize(one.mode, one.size) if isinstance(one, Resize) else one for one in operations]


def by_fold(pixels: npt.NDArray[np.uint8], operations: Sequence[Operation]) -> npt.NDArray[np.uint8] | None:
    image = ArrayImage(pixels)
    region = fold(as_installed(operations), image.size)
    if region is None:
        return None
    made = render(image, region)
    assert len(image.regions) <= 1, "one region is decoded, once"
    return np.repeat(made, region.grey_channels, axis=2) if region.grey else made


@st.composite
def chains(draw: st.DrawFn) -> tuple[Size, list[Operation]]:
    """An image's size and operations that make sense on it, up to six."""
    side = st.integers(1, 70)
    first = current = Size(draw(side), draw(side))
    operations: list[Operation] = []
    channels = 3
    for kind in draw(st.lists(st.sampled_from(["crop", "out", "resize", "flip", "grey"]), max_size=6)):
        if kind == "crop":
            height, width = draw(st.integers(1, current.height)), draw(st.integers(1, current.width))
            top = draw(st.integers(0, current.height - height))
            left = draw(st.integers(0, current.width - width))
            fill = draw(st.sampled_from([None, (0, 0, 0)]))
            operation: Operation = Crop(Box(top, left, height, width), fill)
        elif kind == "out":
            box = Box(draw(st.integers(-9, 9)), draw(st.integers(-9, 9)), draw(side), draw(side))
            grey = st.integers(0, 255).map(lambda v: (v, v, v))
            colours = grey if channels == 1 else grey | st.just((10, 200, 90))
            operation = Crop(box, draw(colours))
        elif kind == "resize":
            operation = Resize(Size(draw(side), draw(side)), draw(st.sampled_from(sorted(MODES))))
        elif kind == "flip":
            operation = Flip(draw(st.booleans()), draw(st.booleans()))
        else:
            channels = draw(st.sampled_from([1, 3]))
            operation = Grey(channels)
        operations.append(operation)
        if isinstance(operation, Crop):
            current = Size(operation.box.height, operation.box.width)
        elif isinstance(operation, Resize):
            current = operation.size
    return first, operations


def check(chain: tuple[Size, list[Operation]]) -> bool:
    """Whether the chain folds; fails if its pixels differ then."""
    size, operations = chain
    pixels = np.random.default_rng(size).integers(0, 256, (*size, 3), np.uint8)
    made = by_fold(pixels, operations)
    if made is not None:
        expected = np.asarray(naively(Image.fromarray(pixels), operations))
        np.testing.assert_array_equal(made, expected.reshape(*expected.shape[:2], -1))
    return made is not None


CROP, TURN = Crop(Box(3, 5, 30, 40)), Flip(True, False)


@settings(max_examples=200)
@given(chains())
@example((Size(50, 60), [TURN, CROP, Flip(True, True), CROP]))
@example((Size(50, 60), [TURN, Resize(Size(31, 77), kernels.BILINEAR), TURN, Crop(Box(0, 1, 30, 70)), TURN]))
@example((Size(50, 60), [Crop(Box(-4, -4, 58, 68), (1, 2, 3)), TURN, Crop(Box(1, 2, 50, 50)), Grey(3)]))
@example((Size(40, 50), [Grey(1), Resize(Size(20, 20), kernels.BICUBIC)]))
@example((Size(40, 50), [Resize(Size(20, 20), kernels.BICUBIC), Grey(1), Crop(Box(1, 1, 10, 10))]))
def test_folding_changes_no_pixel(chain: tuple[Size, list[Operation]]) -> None:
    event("folded" if check(chain) else "refused")


@pytest.mark.slow
@settings(max_examples=20_000)
@given(chains())
def test_folding_changes_no_pixel_at_length(chain: tuple[Size, list[Operation]]) -> None:
    check(chain)


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
    "operations",
    [
        [],
        [Crop(Box(5, 6, 30, 31))],
        [Crop(Box(5, 6, 30, 31)), Resize(Size(10, 10), kernels.BICUBIC), Flip(True, False)],
        [Resize(Size(256, 256), kernels.BILINEAR), Crop(Box(16, 16, 224, 224))],
        [Flip(True, True), Crop(Box(-3, -4, 20, 20), (9, 9, 9)), Crop(Box(1, 1, 12, 12)), Grey(3)],
        [Resize(Size(40, 50), kernels.BILINEAR), Resize(Size(30, 30), kernels.BILINEAR)],
    ],
)
def test_usual_chains_are_folded(operations: list[Operation]) -> None:
    assert check((Size(40, 50), operations))


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

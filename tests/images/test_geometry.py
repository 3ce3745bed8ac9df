"""Regions of images: resizes of any size, as Pillow does them, of the needed pixels only; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_image import ArrayImage
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from image_steps import Crop, Flip, Operation, Resize, fold, pillow_resize
from PIL import Image

from fastpipe.core.native import native
from fastpipe.core.types import Box, Size
from fastpipe.images import kernels
from fastpipe.images import pixels as geometry
from fastpipe.images.pillow_rules import FILTERS
from fastpipe.images.pixels import Conversion, render
from fastpipe.images.steps import BOX, FLIP, described_step

# As many small ones as large ones, and those around which vectors begin and end.
SIDES = st.floats(0, 11).map(lambda power: round(2**power)) | st.sampled_from(
    [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65]
)
SIZES = st.builds(Size, SIDES, SIDES)
TURNS = st.builds(Flip, st.booleans(), st.booleans())
WHOLE = {"part": ((0, 1), (0, 1)), "before": Flip(False, False), "after": Flip(False, False), "seed": 0}
# Where a part begins, and how much of the rest it has.
PART = st.tuples(st.floats(0, 0.99), st.floats(0.01, 1)) | st.just((0.0, 1.0))


@settings(max_examples=100)
@given(
    size=SIZES, to=SIZES, name=st.sampled_from(sorted(FILTERS)), part=st.tuples(PART, PART), before=TURNS, after=TURNS,
    seed=st.integers(0, 2**32),
)  # fmt: skip
@example(size=Size(1, 1), to=Size(2000, 1), name="lanczos", **WHOLE)
@example(size=Size(2000, 120), to=Size(1, 1), name="lanczos", **WHOLE)
@example(size=Size(500, 375), to=Size(224, 224), name="bilinear", **{**WHOLE, "after": Flip(True, False)})
def test_resizes_at_every_instruction_set_equal_pillows(
    size: Size, to: Size, name: str, part: Any, before: Flip, after: Flip, seed: int
) -> None:
    assume(max(size.height, to.height) * max(size.width, to.width) <= 250_000)
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (*size, 3), np.uint8)
    for value in (0, 255):  # filters that overshoot must be clipped
        pixels[rng.random(size) < 0.2] = value
    begin = [int(first * side) for (first, _), side in zip(part, to, strict=True)]
    count = [max(1, int(rest * (side - at))) for (_, rest), side, at in zip(part, to, begin, strict=True)]
    region = fold([before, pillow_resize(FILTERS[name], to), Crop(Box(*begin, *count)), after], size)
    assert region is not None
    turned = Image.fromarray(flipped(pixels, before))
    resized = np.asarray(turned.resize((to.width, to.height), Image.Resampling[name.upper()]))
    wanted = flipped(resized[begin[0] : begin[0] + count[0], begin[1] : begin[1] + count[1]], after)
    level = native.level()
    try:
        for other in range(3):
            if native.force_level(other):
                np.testing.assert_array_equal(render(ArrayImage(pixels), region), wanted)
    finally:
        assert native.force_level(level)


def flipped(pixels: Any, turn: Flip) -> Any:
    return np.ascontiguousarray(pixels[:: -1 if turn.vertical else 1, :: -1 if turn.horizontal else 1])


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


@pytest.mark.parametrize("fault", ["pixels", "a row's step", "memory", "axis", "elements"])
def test_arrays_that_do_not_fit_are_refused(fault: str) -> None:
    """The binding is the last that looks: behind it are pointers."""
    image: Any = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    x, y, out = kernels.axis(1, 30, 7), kernels.axis(1, 20, 9), np.zeros(9 * 7 * 3, np.uint8)
    image.flags.writeable = False
    if fault == "pixels":
        image = image[1:]
    elif fault == "a row's step":
        image = np.asfortranarray(image)
    elif fault == "memory":
        out = out[1:]
    elif fault == "axis":
        x = x._replace(pitch=99)
    else:
        image = image.astype(np.uint16)
    with pytest.raises((ValueError, TypeError)):
        kernels.resample(image, 1, x, y, False, 0, Conversion("bytes", 3, interleaved=True).native, out)
    assert not out.any()


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

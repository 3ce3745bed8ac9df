"""Resampling and conversion against their references: Pillow, torch and plain NumPy; at every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from image_steps import fold, pillow_resize
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as functional_v2

from fastpipe.core.native import native
from fastpipe.core.types import Size
from fastpipe.images import kernels
from fastpipe.images.pillow_rules import FILTERS, grey_is_known
from fastpipe.images.pixels import Conversion

UInt8Array = npt.NDArray[np.uint8]

PILLOW = {constant: Image.Resampling[name.upper()] for name, constant in FILTERS.items()}
# Around the sizes at which the vector path begins and its blocks end.
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
MOST_PIXELS = 250_000


@dataclass(frozen=True)
class Axis:
    """One axis of a resize: sizes, the part that is wanted, mirroring before and after."""

    size: int
    to: int
    first: int
    count: int
    before: bool = False
    after: bool = False


def whole(size: int, to: int, before: bool = False, after: bool = False) -> Axis:
    return Axis(size, to, 0, to, before, after)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> UInt8Array:
    """Values at both ends as well: filters that overshoot must be clipped."""
    rng = np.random.default_rng((height, width, channels, seed))
    image = rng.integers(0, 256, (height, width, channels), np.uint8)
    image[rng.random((height, width)) < 0.2] = 0
    image[rng.random((height, width)) < 0.2] = 255
    return image


def by_kernel(
    image: UInt8Array, y: Axis, x: Axis, mode: int, columns_first: bool, how: Conversion | None = None, grey: int = 0
) -> npt.NDArray[Any]:  # fmt: skip
    """(H, W, C) in, (H, W, C) out, or as ``how`` has it in memory."""
    x_axis, y_axis = (
        kernels.axis(mode, axis.size, axis.to, axis.first, axis.count, axis.before, axis.after)
        for axis in (x, y)
    )
    assert 0 <= x_axis.low < x_axis.high <= x.size
    assert 0 <= y_axis.low < y_axis.high <= y.size
    part = image[y_axis.low : y_axis.high, x_axis.low : x_axis.high]
    to = how or Conversion("bytes", image.shape[2], interleaved=True)
    made = np.empty(y.count * x.count * to.channels, to.word)
    made.view(np.uint8)[:] = 77  # what is not written must be seen
    kernels.resample(part, mode, x_axis, y_axis, columns_first, grey, to.native, made)
    return made if how else made.reshape(y.count, x.count, to.channels)


def converted(image: UInt8Array, how: Conversion, grey: int = 0) -> npt.NDArray[Any]:
    """The pixels as they are, in memory as ``how`` has them."""
    y, x = (whole(side, side) for side in image.shape[:2])
    return by_kernel(image, y, x, kernels.NEAREST_FLOOR, False, how, grey)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """An instruction set, which the kernels use."""
    before = native.level()
    if not native.force_level(["baseline", "avx2", "avx512"].index(request.param)):
        pytest.skip("this processor does not have it: run the test on one that has")
    try:
        yield
    finally:
        assert native.force_level(before)


every_level = pytest.mark.usefixtures("level")


def by_pillow(image: UInt8Array, y: Axis, x: Axis, mode: int) -> UInt8Array:
    image = image[:: -1 if y.before else 1, :: -1 if x.before else 1]
    squeezed = np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image)
    resized = np.asarray(Image.fromarray(squeezed).resize((x.to, y.to), PILLOW[mode]))
    resized = resized.reshape(y.to, x.to, -1)
    part = resized[y.first : y.first + y.count, x.first : x.first + x.count]
    return part[:: -1 if y.after else 1, :: -1 if x.after else 1]


def log_size(most: int) -> st.SearchStrategy[int]:
    """Sizes 1 … most, as many small ones as large ones, and those where vectors begin."""
    grown = st.floats(0, float(np.log2(most))).map(lambda power: max(1, min(most, round(2**power))))
    return grown | st.sampled_from([size for size in EDGES if size <= most])


@st.composite
def axes(draw: st.DrawFn, most: int = 2000) -> Axis:
    size, to = draw(log_size(most)), draw(log_size(most))
    first = draw(st.integers(0, to - 1))
    count = draw(st.integers(1, to - first))
    if draw(st.booleans()):
        first, count = 0, to
    return Axis(size, to, first, count, draw(st.booleans()), draw(st.booleans()))


def bounded(y: Axis, x: Axis) -> tuple[Axis, Axis]:
    """Shorten the longer axis until no image in between has too many pixels."""
    while max(y.size, y.to) * max(x.size, x.to) > MOST_PIXELS:
        y, x = (halved(y), x) if max(y.size, y.to) >= max(x.size, x.to) else (y, halved(x))
    return y, x


def halved(axis: Axis) -> Axis:
    size, to = (axis.size + 1) // 2, (axis.to + 1) // 2
    first = min(axis.first, to - 1)
    return Axis(size, to, first, min(axis.count, to - first), axis.before, axis.after)


def installed(mode: int, size: Size, to: Size) -> tuple[int, bool]:
    """The filter that the installed Pillow's is, and whether it begins with the columns."""
    resize = pillow_resize(mode, to)
    region = fold([resize], size)
    assert region is not None
    return resize.mode, region.vertical_first


def assert_equals_pillow(y: Axis, x: Axis, mode: int, channels: int, seed: int = 0) -> None:
    y, x = bounded(y, x)
    image = noise(y.size, x.size, channels, seed)
    flag, vertical_first = installed(mode, Size(y.size, x.size), Size(y.to, x.to))
    made = by_kernel(image, y, x, flag, vertical_first)
    np.testing.assert_array_equal(made, by_pillow(image, y, x, mode))


MODES = st.sampled_from(sorted(PILLOW))


CASES = {
    "y": axes(),
    "x": axes(),
    "mode": MODES,
    "channels": st.sampled_from([1, 3]),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=100)
@given(**CASES)
@example(y=whole(1, 2000), x=whole(1, 1), mode=kernels.LANCZOS, channels=3, seed=0)
@example(y=whole(2000, 1), x=whole(120, 1), mode=kernels.LANCZOS, channels=3, seed=0)
@example(y=whole(500, 224), x=whole(375, 224, after=True), mode=kernels.BILINEAR, channels=3, seed=0)
def test_resize_equals_pillow(y: Axis, x: Axis, mode: int, channels: int, seed: int) -> None:
    before = native.level()
    try:
        for number in range(3):
            if native.force_level(number):
                assert_equals_pillow(y, x, mode, channels, seed)
    finally:
        assert native.force_level(before)


@pytest.mark.slow
@settings(max_examples=5000)
@given(**CASES)
def test_resize_equals_pillow_at_length(y: Axis, x: Axis, mode: int, channels: int, seed: int) -> None:
    assert_equals_pillow(y, x, mode, channels, seed)


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """A size, a part of it in eighths of a pixel, and the size that the part becomes."""
    size = draw(log_size(300))
    start8 = draw(st.integers(0, 8 * size - 8))
    return size, start8, draw(st.integers(8, 8 * size - start8)), draw(log_size(300))


@pytest.mark.parametrize("mode", [mode for mode in PILLOW if mode != kernels.NEAREST])
@settings(max_examples=30)
@given(y=parts(), x=parts(), turns=st.tuples(st.booleans(), st.booleans()))
def test_a_part_in_eighths_of_a_pixel_equals_pillows_box(
    mode: int, y: tuple[int, int, int, int], x: tuple[int, int, int, int], turns: tuple[bool, bool]
) -> None:
    image = noise(y[0], x[0])
    box = (x[1] / 8, y[1] / 8, (x[1] + x[2]) / 8, (y[1] + y[2]) / 8)
    by_rows = Image.fromarray(image).resize((x[3], image.shape[0]), PILLOW[mode], (box[0], 0, box[2], y[0]))
    expected = np.asarray(by_rows.resize((x[3], y[3]), PILLOW[mode], (0, box[1], x[3], box[3])))
    turned = image[:: -1 if turns[0] else 1, :: -1 if turns[1] else 1]
    y_axis, x_axis = (
        kernels.axis(mode, size, to, 0, to, turn, False, 8 * size - start - extent if turn else start, extent)
        for (size, start, extent, to), turn in zip((y, x), turns, strict=True)
    )
    part = turned[y_axis.low : y_axis.high, x_axis.low : x_axis.high]
    made = np.empty((y[3], x[3], 3), np.uint8)
    flag, _ = installed(mode, Size(9, 9), Size(5, 5))
    how = Conversion("bytes", 3, interleaved=True).native
    kernels.resample(part.copy(), flag, x_axis, y_axis, False, 0, how, made.reshape(-1))
    np.testing.assert_array_equal(made, expected)


TENSOR_MODES = {
    kernels.BILINEAR: (InterpolationMode.BILINEAR, True),
    kernels.BICUBIC: (InterpolationMode.BICUBIC, True),
    kernels.SHARP_BILINEAR: (InterpolationMode.BILINEAR, False),
    kernels.SHARP_BICUBIC: (InterpolationMode.BICUBIC, False),
}


def difference_from_torch(image: UInt8Array, to: tuple[int, int], mode: int) -> npt.NDArray[np.int64]:
    """How far the kernels are from v2's resize of a uint8 tensor, in either memory layout."""
    interpolation, antialias = TENSOR_MODES[mode]
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    y, x = whole(image.shape[0], to[0]), whole(image.shape[1], to[1])
    made = by_kernel(image, y, x, mode, False).transpose(2, 0, 1).astype(np.int64)
    found = [
        np.abs(made - functional_v2.resize(memory, [y.to, x.to], interpolation, antialias=antialias).numpy())
        for memory in (tensor, tensor.contiguous())
    ]
    return np.maximum(*found)


@every_level
@pytest.mark.parametrize("mode", sorted(TENSOR_MODES))
def test_resize_is_nearly_always_within_one_of_torch(mode: int) -> None:
    """Two of 255 at no more than 0.01 % of the values, on images that are as hard as noise."""
    cases = [((300, 340), (224, 224)), ((100, 120), (224, 224)), ((224, 300), (220, 310))]
    found = [difference_from_torch(noise(*size), to, mode) for size, to in cases]
    values = np.concatenate([difference.reshape(-1) for difference in found])
    assert values.max() <= 2
    assert (values > 1).mean() <= 1e-4


needs_grey = pytest.mark.skipif(
    not grey_is_known(), reason="the installed Pillow turns grey in a way of its own: install Pillow itself"
)


@every_level
@needs_grey
@pytest.mark.parametrize("when", [1, 2])
def test_grey_equals_pillow_s(when: int) -> None:
    values = np.array([0, 1, 127, 128, 254, 255], np.uint8)
    extremes = np.stack(np.meshgrid(values, values, values, indexing="ij"), -1).reshape(1, -1, 3)
    for image in (extremes, *(noise(*size) for size in ((1, 1), (3, 5), (33, 17), (2, 130)))):
        expected = np.asarray(Image.fromarray(image).convert("L"))[..., None]
        for channels in (1, 3):
            made = converted(image, Conversion("bytes", channels, interleaved=True), when)
            np.testing.assert_array_equal(
                made.reshape(*image.shape[:2], channels), expected.repeat(channels, 2)
            )


SHAPES = [(1, 1), (2, 3), (5, 16), (16, 5), (31, 33)]


def in_layout(planes: npt.NDArray[Any], last: bool) -> npt.NDArray[Any]:
    """(C, H, W) as it lies in memory."""
    return np.ascontiguousarray(planes.transpose(1, 2, 0) if last else planes).reshape(-1)


@every_level
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_conversions_equal_plain_numpy(channels: int, last: bool) -> None:
    mean = np.array([0.485, 0.456, 0.406], np.float32)[:channels]
    std = np.array([0.229, 0.224, 0.225], np.float32)[:channels]
    for shape in SHAPES:
        image = noise(*shape, channels)
        planes = image.transpose(2, 0, 1)
        np.testing.assert_array_equal(
            converted(image, Conversion("bytes", channels, last)), in_layout(planes, last)
        )
        for divide in (False, True):
            made = converted(image, Conversion("affine", channels, last, np.float32, divide, mean, std))
            np.testing.assert_array_equal(made, in_layout(normalized(planes, mean, std, divide), last))
        for word in (np.uint8, np.uint16, np.uint32, np.uint64):
            table: Any = np.random.default_rng(1).integers(0, np.iinfo(word).max, (channels, 256), word)
            made = converted(image, Conversion("table", channels, last, word, table=table))
            expected = np.stack([table[c][planes[c]] for c in range(channels)])
            np.testing.assert_array_equal(made, in_layout(expected, last))


def normalized(planes: UInt8Array, mean: Any, std: Any, divide: bool) -> Any:
    unit = planes.astype(np.float32)
    unit = unit / np.float32(255) if divide else unit * (np.float32(1) / np.float32(255))
    return (unit - mean[:, None, None]) / std[:, None, None]


@pytest.mark.parametrize("fault", ["pixels", "a row's step", "memory", "axis", "elements"])
def test_arrays_that_do_not_fit_are_refused(fault: str) -> None:
    """The binding is the last that looks: behind it are pointers."""
    image, x, y = noise(20, 30), kernels.axis(1, 30, 7), kernels.axis(1, 20, 9)
    image.flags.writeable = False
    out, how = np.zeros(9 * 7 * 3, np.uint8), Conversion("bytes", 3, interleaved=True).native
    if fault == "pixels":
        image = image[1:]
    elif fault == "a row's step":
        image = np.asfortranarray(image)
    elif fault == "memory":
        out = out[1:]
    elif fault == "axis":
        x = x._replace(pitch=99)
    else:
        image = image.astype(np.uint16)  # type: ignore[assignment]
    with pytest.raises((ValueError, TypeError)):
        kernels.resample(image, 1, x, y, False, 0, how, out)
    assert not out.any()

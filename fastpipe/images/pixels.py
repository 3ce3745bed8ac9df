"""Output pixels of an encoded image: the needed part is decoded, and the kernels convert it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.types import Box, EncodedImage, Size, UInt8Array
from fastpipe.images import kernels

Fill = tuple[int, int, int]


class Flip(NamedTuple):
    """Mirroring left to right, top to bottom, or both."""

    horizontal: bool
    vertical: bool


class Region(NamedTuple):
    """The part of an image to decode, and the operations that make the output from this part.

    The part is placed on a canvas, which may have a filled border, and the canvas is resampled.

    Attributes:
        source: the part of the image to use, which lies inside the image.
        placed: the position of ``source`` on the canvas.
        canvas: the size of the canvas. The part of the canvas outside ``placed`` is filled.
        fill: the colour of the filled part.
        size: the size to which the canvas is resampled.
        mode: the filter, a constant of ``kernels``; None if the canvas is not resampled.
        vertical_first: whether the vertical pass comes first.
        window: the part of the resampled canvas that is the output.
        flip_before, flip_after: the mirroring before resampling, and the mirroring after resampling. These
            give different results because resampling rounds.
        grey: when colours are converted to grey, before or after resampling. None keeps the colours.
        grey_channels: 1 or 3.
    """

    source: Box
    placed: Box
    canvas: Size
    fill: Fill
    size: Size
    mode: int | None
    vertical_first: bool
    window: Box
    flip_before: Flip
    flip_after: Flip
    grey: Literal["before", "after"] | None
    grey_channels: int

    @property
    def filter(self) -> int:
        """The filter of the resampling. If ``mode`` is None, this filter copies pixels."""
        return kernels.NEAREST_FLOOR if self.mode is None else self.mode


_GREY: tuple[Literal["before", "after"] | None, ...] = (None, "before", "after")


def fold(steps: Sequence[Any], image: Size, parameters: npt.ArrayLike = ()) -> Region | None:
    """Combine ``native.Step`` objects and a sample's random numbers into one region of an image of this size.

    Return None if one kernel pass cannot give the same pixels.  The reason may be a second resize, a fill by
    channel of an image without colours, or grey both before and after resampling.  It may also be a crop that
    reaches outside the image and comes after a resize, or after a filled crop of another colour.  Return None
    also if torchvision would raise an error.

    >>> from fastpipe.images.steps import BOX, RESIZE, described_step
    >>> steps = [described_step(BOX, outside=2), described_step(RESIZE, size=(50, 50), filter=1)]
    >>> fold(steps, Size(300, 400), [20, 10, 120, 110]).source
    Box(top=10, left=20, height=100, width=100)
    """
    found = native.fold(list(steps), *image, np.ascontiguousarray(parameters, np.float64))
    if found is None:
        return None
    source, placed, canvas, fill, size, mode, vertical_first, window, before, after, grey, channels = found
    return Region(
        Box(*source), Box(*placed), Size(*canvas), fill, Size(*size), None if mode < 0 else mode,
        vertical_first, Box(*window), Flip(*before), Flip(*after), _GREY[grey], channels,
    )  # fmt: skip


Words = npt.NDArray[Any]

# The cost of decoding a pixel at 1 / factor of the size, relative to the cost at full size. The cost of
# reading the pixel's bits is left out, because all bits are read in both cases.  Measured on photographs of
# 12 megapixels.  libjpeg-turbo has no vector code for 1 / 2.
_COST = {8: 0.11, 4: 0.41, 2: 1.6}
_RESAMPLING = 0.93  # the cost of resampling a pixel, in the same unit


@dataclass(frozen=True)
class Conversion:
    """A conversion of bytes to the output's values.

    Attributes:
        kind: ``"bytes"`` keeps the bytes, ``"affine"`` computes float32, ``"table"`` looks values up.
        interleaved: whether memory is channels-last.
        word: the NumPy dtype of an output element in memory.
        divide, mean, std: numbers of an ``"affine"`` conversion, ``(v / 255 - mean) / std`` in float32. If
            ``divide`` is False, ``v`` is multiplied by ``1 / 255`` instead.
        table: 256 values for each channel, as bit patterns in unsigned integers.
    """

    kind: Literal["bytes", "affine", "table"]
    channels: int
    interleaved: bool
    word: Any = np.uint8
    divide: bool = True
    mean: npt.NDArray[np.float32] | None = None
    std: npt.NDArray[np.float32] | None = None
    table: Words | None = None

    @cached_property
    def native(self) -> Any:
        """Return the conversion in the native core's form."""
        mean, std = ([] if part is None else part.tolist() for part in (self.mean, self.std))
        return native.conversion(
            ("bytes", "affine", "table").index(self.kind), self.channels, self.interleaved,
            np.dtype(self.word).itemsize, self.divide, mean, std,
            b"" if self.table is None else self.table.tobytes(),
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "native"}

    @property
    def affine(self) -> tuple[bool, bytes, bytes]:
        """Return the numbers of an affine conversion. Conversions with equal numbers compute the same
        values."""
        assert self.mean is not None
        assert self.std is not None
        return self.divide, self.mean.tobytes(), self.std.tobytes()

    def of_tensor(self, batch: Any) -> Any:
        """Convert uint8 (N, C, H, W) affinely on any device, with the float32 arithmetic of the kernels."""
        torch = require("torch", extra="torch")
        mean, std = (torch.from_numpy(part).to(batch.device).view(-1, 1, 1) for part in (self.mean, self.std))
        values = batch.to(torch.float32)
        if self.divide:  # by a tensor: on a GPU, torch would multiply by the inverse of a Python number
            values = values.div_(torch.full((), 255.0, device=values.device))
        else:
            values = values.mul_(float(np.float32(1) / np.float32(255)))
        return values.sub_(mean).div_(std)


class Resampling(NamedTuple):
    """How to resample a part of an image to an output of three colours, for code that decodes the part
    itself.

    The fields have the form that ``kernels.resample`` takes.
    """

    part: Box
    mode: int
    x: kernels.Axis
    y: kernels.Axis
    vertical_first: bool


def resampling_of(image: EncodedImage, region: Region) -> Resampling | None:
    """Return the resampling that ``draw`` would do; None if ``draw`` does more than decode and resample a
    part."""
    if region.grey is not None or _is_reduced(image, region):
        return None
    x, y = _whole_axes(region)
    needed = _needed(x, y)
    part = _placed_part(region, needed)
    if part is None or part[2:] != needed[2:]:
        return None
    return Resampling(part, region.filter, x, y, region.vertical_first)


def render(image: EncodedImage, region: Region) -> UInt8Array:
    """Decode and resample an image: return uint8 (H, W, 3), or (H, W, 1) for grey."""
    height, width, channels = region.window.height, region.window.width, 1 if region.grey else 3
    made = np.empty(height * width * channels, np.uint8)
    draw(image, region, Conversion("bytes", channels, interleaved=True), made)
    return made.reshape(height, width, channels)


def draw(image: EncodedImage, region: Region, how: Conversion, out: Words) -> None:
    """Decode and resample an image, and fill ``out``, an array (how.channels * height * width,) of
    ``how.word``.

    Grey is copied to three channels if the conversion has three channels.
    """
    pixels, x, y = _reduced_source(image, region) or _exact_source(image, region)
    grey = _GREY.index(region.grey)
    kernels.resample(pixels, region.filter, x, y, region.vertical_first, grey, how.native, out)


def part_of(image: EncodedImage, region: Region) -> Box | None:
    """Return the part of an image that ``draw`` will decode with the image's method ``region``. Return None
    if ``draw`` will not call this method."""
    if _is_reduced(image, region):
        return None
    return _placed_part(region, _needed(*_whole_axes(region)))


def reduction(region: Region, image: Size) -> int:
    """Return the factor, 8, 4 or 2, by which to reduce an image while it is decoded; 1 for full size.

    The used part of the image is resampled to ``region.size``.  The reduced part must be at least as high and
    as wide as ``region.size``, so that no visible detail is lost.  Exact decoding decodes only the rows of
    the part.  Reduced decoding decodes all rows from the top, so reduced decoding is chosen only if it costs
    less.

    >>> from fastpipe.images.pixels import fold
    >>> from fastpipe.images.steps import BOX, RESIZE, described_step
    >>> photo = Size(3024, 4032)
    >>> steps = [described_step(BOX), described_step(RESIZE, size=(224, 224), filter=1)]
    >>> for edge in (300, 1000, 2000):
    ...     print(reduction(fold(steps, photo, [500, 500, 500 + edge, 500 + edge]), photo))
    1
    4
    8
    """
    source, to = region.source, region.size
    if region.placed != Box(0, 0, *region.canvas) or region.filter & 15 > kernels.LANCZOS:
        return 1  # partly filled, or not antialiased: lost detail would be visible
    for factor, cost in _COST.items():
        if source.height >= factor * to.height and source.width >= factor * to.width:
            exact = source.height * (image.width + _RESAMPLING * source.width)
            return factor if cost * (source.top + source.height) * image.width < exact else 1
    return 1


def _is_reduced(image: EncodedImage, region: Region) -> bool:
    """Return whether an image is reduced while it is decoded."""
    factor = reduction(region, image.size)
    return factor > 1 and image.reduced(factor) is not None


def _axes(region: Region, canvas: Size, part8: Box) -> tuple[kernels.Axis, kernels.Axis]:
    """Return the axes of columns and rows for a part of a canvas. ``part8`` is in eighths of a pixel."""
    mode, window, before, after = region.filter, region.window, region.flip_before, region.flip_after
    return (
        kernels.axis(mode, canvas.width, region.size.width, window.left, window.width,
                     before.horizontal, after.horizontal, part8.left, part8.width),
        kernels.axis(mode, canvas.height, region.size.height, window.top, window.height,
                     before.vertical, after.vertical, part8.top, part8.height),
    )  # fmt: skip


def _whole_axes(region: Region) -> tuple[kernels.Axis, kernels.Axis]:
    """Return the axes for the whole canvas of a region."""
    canvas = region.canvas
    return _axes(region, canvas, Box(0, 0, 8 * canvas.height, 8 * canvas.width))


def _needed(x: kernels.Axis, y: kernels.Axis) -> Box:
    """Return the part of a canvas that resampling needs."""
    return Box(y.low, x.low, y.high - y.low, x.high - x.low)


_Source = tuple[UInt8Array, kernels.Axis, kernels.Axis]


def _exact_source(image: EncodedImage, region: Region) -> _Source:
    """Return the needed pixels, uint8 (H, W, 3), and the axes along which the pixels are resampled."""
    placed = region.source
    x, y = _whole_axes(region)
    if region.placed == Box(0, 0, *region.canvas):  # no filled pixels
        rows = image.rows(placed.top + y.low, y.high - y.low)
        if rows is not None:
            return rows[:, placed.left + x.low : placed.left + x.high], x, y
    return _decode(image, region, _needed(x, y)), x, y


def _reduced_source(image: EncodedImage, region: Region) -> _Source | None:
    """Return the pixels and axes for an image that is reduced during decoding; None if the image is not
    reduced."""
    factor = reduction(region, image.size)
    reduced = image.reduced(factor) if factor > 1 else None
    if reduced is None:
        return None
    part8 = Box(*(8 // factor * number for number in region.source))
    x, y = _axes(region, reduced.size, part8)
    rows = reduced.rows(y.high)
    return None if rows is None else (rows[y.low : y.high, x.low : x.high], x, y)


def _decode(image: EncodedImage, region: Region, needed: Box) -> UInt8Array:
    """Return the needed part of the canvas: decoded pixels, and the fill outside the image."""
    part = _placed_part(region, needed)
    if part is not None and part[2:] == needed[2:]:  # no filled pixels
        return image.region(part)
    canvas: UInt8Array = np.empty((needed.height, needed.width, 3), np.uint8)
    canvas[:] = region.fill
    if part is not None:
        placed, source = region.placed, region.source
        top = placed.top + part.top - source.top - needed.top
        left = placed.left + part.left - source.left - needed.left
        canvas[top : top + part.height, left : left + part.width] = image.region(part)
    return canvas


def _placed_part(region: Region, needed: Box) -> Box | None:
    """Return the part of the image that lies in the part ``needed`` of the canvas; None if there is none."""
    placed, source = region.placed, region.source
    top, left = max(needed.top, placed.top), max(needed.left, placed.left)
    bottom = min(needed.top + needed.height, placed.top + placed.height)
    right = min(needed.left + needed.width, placed.left + placed.width)
    if bottom <= top or right <= left:
        return None
    return Box(source.top + top - placed.top, source.left + left - placed.left, bottom - top, right - left)

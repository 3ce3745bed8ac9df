"""Functions that resample pixels with the native core's kernels; see fastpipe/native/resample.h."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.core.types import UInt8Array

# Filters, from fastpipe/native/resample.h.
# NARROW is a flag: the weights have 16 bits, as in torch and Pillow-SIMD, instead of Pillow's 22 bits.
NARROW = 16
# Pillow's filters. These filters become wider when they shrink an image (antialiasing).
BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = 0, 1, 2, 3, 4
# torch's filters with antialiasing.
TORCH_BILINEAR, TORCH_BICUBIC = BILINEAR | NARROW, BICUBIC | NARROW
# Copy the nearest pixel. NEAREST rounds to the centre (Pillow, NEAREST_EXACT); NEAREST_FLOOR rounds down
# (torch's "nearest").
NEAREST, NEAREST_FLOOR = 5, 6
# torch's filters without antialiasing. These filters keep their width and repeat the edge pixels.
SHARP_BILINEAR, SHARP_BICUBIC = 7 | NARROW, 8 | NARROW


class Axis(NamedTuple):
    """The resize along one axis of an image, as ``resample`` takes it.

    Attributes:
        in_size: the number of input pixels.
        start8, extent8: the start and the length of the input that is used, in eighths of a pixel.
        out_size: the number of output pixels.
        first, length: the first pixel and the number of pixels of the requested output.
        turned: whether to resample the input as if the input were mirrored.
        mirrored: whether to mirror the output.
        low, high: the kernel needs the input pixels ``low`` to ``high - 1``, which the caller must provide.
        pitch: the number of weights stored for each output pixel.
    """

    in_size: int
    start8: int
    extent8: int
    out_size: int
    first: int
    length: int
    turned: bool
    mirrored: bool
    low: int
    high: int
    pitch: int


def axis(
    mode: int,
    in_size: int,
    out_size: int,
    first: int = 0,
    length: int | None = None,
    turned: bool = False,
    mirrored: bool = False,
    start8: int = 0,
    extent8: int | None = None,
) -> Axis:
    """Return the ``Axis`` of a resize with the filter ``mode``. ``first`` and ``length`` limit the output.

    >>> axis(1, 340, 224).high  # bilinear
    340
    """
    length = out_size if length is None else length
    extent8 = 8 * in_size if extent8 is None else extent8
    return Axis(*native.make_axis(mode, in_size, out_size, first, length, turned, mirrored, start8, extent8))


def axis_tables(axes: list[tuple[int, Axis]]) -> npt.NDArray[np.int32]:
    """Return a table of weights for each pair (filter, axis), one after the other: int32 (M,).

    Each table has ``length * (pitch + 2)`` numbers: the first input pixel of each output pixel, then the
    number of input pixels of each output pixel, then the weights.
    """
    sizes = [one.length * (one.pitch + 2) for _, one in axes]
    tables = np.empty(sum(sizes), np.int32)
    start = 0
    for (mode, one), size in zip(axes, sizes, strict=True):
        native.axis_table(mode, one, tables[start : start + size])
        start += size
    return tables


def resample(
    pixels: npt.NDArray[np.uint8], mode: int, x: Axis, y: Axis, vertical_first: bool, grey: int, how: Any,
    out: npt.NDArray[Any],
) -> None:  # fmt: skip
    """Resample ``pixels``, convert the result with ``how``, and write it to ``out``.

    Args:
        pixels: uint8 (y.high - y.low, x.high - x.low, 1 or 3), each row contiguous.
        mode: the filter, a constant of this module.
        vertical_first: whether the vertical pass comes before the horizontal pass. Each pass rounds.
        grey: 1 converts colours to luma before resampling, 2 after resampling, and 0 keeps the colours.
        how, out: a ``native.Conversion``, and a contiguous array that receives the converted pixels.
    """
    native.resample(pixels, mode, x, y, vertical_first, grey, how, out.view(np.uint8))


def noise(size: tuple[int, int]) -> UInt8Array:
    """Return an image of noise, uint8 (H, W, 3).  Two implementations that compute differently give different
    results for it."""
    return np.random.Generator(np.random.PCG64(1)).integers(0, 256, (*size, 3), np.uint8)


def resized(image: UInt8Array, to: tuple[int, int], mode: int) -> UInt8Array:
    """Resize a whole image, uint8 (H, W, C), to a height and a width. Rows are resampled first."""
    (height, width, channels), (out_height, out_width) = image.shape, to
    made = np.empty(out_height * out_width * channels, np.uint8)
    how = native.conversion(0, channels, True, 1, True, [], [], b"")
    x, y = axis(mode, width, out_width), axis(mode, height, out_height)
    resample(image, mode, x, y, False, 0, how, made)
    return made.reshape(out_height, out_width, channels)

"""Kernels for batches of interleaved images: TensorFlow's bilinear resize, bytes to floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.tf._between import between_pixels

__all__ = ["bilinear_scratch", "gather_scaled", "resize_bilinear", "scale_bytes"]

_t = require("numba.types", extra="image")

_in8 = _t.Array(_t.uint8, 1, "C", readonly=True)
_f32, _u32, _i64 = _t.float32[::1], _t.uint32[::1], _t.int64[::1]
_int, _float = _t.int64, _t.float32


@compiled()
def _places(in_size: int, out_size: int, channels: int, low: Any, high: Any, parts: Any) -> None:
    """The two elements that each element of an output line lies between, and how far from the first."""
    scale = np.float32(in_size) / np.float32(out_size)
    half = np.float32(0.5)
    for i in range(out_size):
        place = (np.float32(i) + half) * scale - half
        floor = np.float32(math.floor(place))
        after = min(int(math.ceil(place)), in_size - 1)  # noqa: RUF046 - a float in numba
        before = min(max(int(floor), 0), after)
        for c in range(channels):
            low[i * channels + c] = before * channels + c
            high[i * channels + c] = after * channels + c
            parts[i * channels + c] = place - floor


@compiled()
def _stretch_colours(src: Any, left: Any, right: Any, parts: Any, dst: Any) -> None:
    """One row of pixels of three colours, resampled; ``dst`` has room for one more element.

    Pixels are taken four bytes at a time: which beyond the row's last one there must be.
    """
    for x in range(0, len(parts), 3):
        between_pixels(src, np.int64(left[x]), np.int64(right[x]), parts[x], dst, x)


@compiled()
def _stretch(src: Any, row: Any, left: Any, right: Any, parts: Any, dst: Any) -> None:
    """One row, resampled; first to floats, as those are fetched from where they are needed side by side."""
    for x in range(len(src)):
        row[x] = np.float32(src[x])
    for x in range(len(dst)):
        a, b = row[left[x]], row[right[x]]
        dst[x] = a + (b - a) * parts[x]


@compiled(_t.void(_in8, _int, _int, _int, _int, _int, _int, _int, _u32, _f32, _f32))
def resize_bilinear(
    src: Any, start: int, pitch: int, height: int, width: int, channels: int, out_height: int, out_width: int,
    places: Any, numbers: Any, dst: Any,
) -> None:  # fmt: skip
    """``tf.image.resize(…, "bilinear")`` without antialiasing, in its arithmetic: float32, columns first.

    The reference is TensorFlow's ``resize_bilinear_op.cc`` with ``half_pixel_centers``.

    Args:
        src: uint8 (N,), interleaved pixels.
        start, pitch: where in it the first pixel is, and how far apart rows begin.
        height, width, channels: of the image.
        out_height, out_width: of the result.
        places, numbers: uint32 and float32 memory of at least ``bilinear_scratch``.
        dst: float32 (out_height * out_width * channels,).
    """
    line = out_width * channels
    left, right = places[:line], places[line : 2 * line]
    upper, lower = places[2 * line : 2 * line + out_height], places[2 * line + out_height :]
    x_parts, y_parts = numbers[:line], numbers[line : line + out_height]
    rows = numbers[line + out_height : 3 * line + out_height + 2]
    row = numbers[3 * line + out_height + 2 :][: width * channels]
    _places(width, out_width, channels, left, right, x_parts)
    _places(height, out_height, 1, upper, lower, y_parts)
    held = np.array([-1, -1])  # which row of the image is in each half of ``rows``
    for y in range(out_height):
        first = 1 if held[1] == upper[y] else 0
        for wanted, half in ((upper[y], first), (lower[y], 1 - first)):
            if held[half] != wanted:
                at = start + wanted * pitch
                into = rows[half * (line + 1) : (half + 1) * (line + 1)]
                if channels == 3 and at + width * 3 < len(src):
                    _stretch_colours(src[at:], left, right, x_parts, into)
                else:
                    _stretch(src[at : at + width * channels], row, left, right, x_parts, into[:line])
                held[half] = wanted
        top = rows[first * (line + 1) :][:line]
        bottom = rows[(1 - first) * (line + 1) :][:line]
        out, part = dst[y * line : (y + 1) * line], y_parts[y]
        for x in range(line):
            out[x] = top[x] + (bottom[x] - top[x]) * part


def bilinear_scratch(width: int, channels: int, out_height: int, out_width: int) -> tuple[int, int]:
    """Elements of ``places`` and ``numbers`` that ``resize_bilinear`` needs."""
    line = out_width * channels
    return 2 * (line + out_height), 3 * line + out_height + 2 + width * channels


@compiled(_t.void(_in8, _float, _float, _f32))
def scale_bytes(src: Any, scale: float, offset: float, dst: Any) -> None:
    """``src * scale + offset`` in float32, each operation rounded, as ``keras.layers.Rescaling`` does.

    Args:
        src: uint8 (N,).
        scale, offset: float32.
        dst: float32 (N,).
    """
    if offset == np.float32(0):
        for i in range(dst.size):
            dst[i] = np.float32(src[i]) * scale
    else:
        for i in range(dst.size):
            dst[i] = np.float32(src[i]) * scale + offset


@compiled(_t.void(_in8, _i64, _float, _float, _t.float32[:, ::1]))
def gather_scaled(memory: Any, places: Any, scale: float, offset: float, dst: Any) -> None:
    """``scale_bytes`` of images that lie at several places of a memory.

    Args:
        memory: uint8 (N,).
        places: int64 (M,): where each begins.
        scale, offset: float32.
        dst: float32 (M, elements of an image).
    """
    for i in range(len(places)):
        scale_bytes(memory[places[i] : places[i] + dst.shape[1]], scale, offset, dst[i])

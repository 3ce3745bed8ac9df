"""The CPU kernel that resamples an image by an affine map: planes of float32, (C, H · W).

Coordinates are computed in float32 in the order in which ``torch.nn.functional.grid_sample`` computes them
from torchvision's grid, so that the nearest pixel is the same one.

It releases the GIL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["warp"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_planes = _t.Array(_t.float32, 2, "C")
_f64s = _t.Array(_t.float64, 1, "C", readonly=True)
_one, _zero, _half = np.float32(1), np.float32(0), np.float32(0.5)


@compiled(
    _t.void(
        _planes,
        _t.int64,
        _t.int64,
        _f64s,
        _t.boolean,
        _f32,
        _t.boolean,
        _t.boolean,
        _planes,
        _t.int64,
        _t.int64,
    ),
    error_model="numpy",
)
def warp(
    planes: Any, height: Any, width: Any, matrix: Any, is_nearest: Any, fill: Any, of_bytes: Any,
    is_fused: Any, out: Any, out_height: Any, out_width: Any,
) -> None:  # fmt: skip
    """Take each pixel from where it comes from.

    Args:
        planes: (C, height · width).
        matrix: (6,), from coordinates about the centre of the result to those about the image's.
        is_nearest: whether the nearest pixel is taken, or the four around are weighted.
        fill: a number for each channel, of what is outside; empty for 0.  Where a weighted pixel is partly
            outside, torchvision's is weighted once more with what is inside if there is a fill; so is this.
        of_bytes: whether weighted means are rounded.
        is_fused: whether torch's matrix product, from which torchvision's grid comes, rounds the product with
            a row's coordinate only once it is added.
        out: (C, out_height · out_width).
    """
    half_w, half_h = np.float32(0.5 * width), np.float32(0.5 * height)
    xx, xy, x1 = (
        np.float32(matrix[0]) / half_w,
        np.float32(matrix[1]) / half_w,
        np.float32(matrix[2]) / half_w,
    )
    yx, yy, y1 = (
        np.float32(matrix[3]) / half_h,
        np.float32(matrix[4]) / half_h,
        np.float32(matrix[5]) / half_h,
    )
    channels, has_fill = planes.shape[0], fill.shape[0] > 0
    outside = np.rint(fill) if of_bytes else fill
    for row in range(out_height):
        from_y = np.float32(row) + (_one - np.float32(out_height)) * _half
        for column in range(out_width):
            from_x = np.float32(column) + (_one - np.float32(out_width)) * _half
            if is_fused:
                # The product of two float32 is exact in float64.
                x = np.float32(np.float64(from_y) * np.float64(xy) + np.float64(from_x * xx))
                y = np.float32(np.float64(from_y) * np.float64(yy) + np.float64(from_x * yx))
            else:
                x, y = from_x * xx + from_y * xy, from_x * yx + from_y * yy
            x = ((x + x1) + _one) * half_w - _half
            y = ((y + y1) + _one) * half_h - _half
            at = row * out_width + column
            if is_nearest:
                # Half to even; and NaN or what is too far for an integer is outside.
                x, y = np.rint(x), np.rint(y)
                if x >= 0 and x < width and y >= 0 and y < height:
                    source = int(y) * width + int(x)
                    for c in range(channels):
                        out[c, at] = planes[c, source]
                else:
                    for c in range(channels):
                        out[c, at] = outside[c] if has_fill else _zero
                continue
            left, top = np.floor(x), np.float32(math.floor(y))
            right, below = x - left, y - top
            rest_x, rest_y = _one - right, _one - below
            nw, ne, sw, se = rest_y * rest_x, rest_y * right, below * rest_x, below * right
            if left >= 0 and left + 1 < width and top >= 0 and top + 1 < height:
                source = int(top) * width + int(left)
                for c in range(channels):
                    value = planes[c, source] * nw + planes[c, source + 1] * ne
                    value += planes[c, source + width] * sw + planes[c, source + width + 1] * se
                    out[c, at] = np.float32(np.rint(value)) if of_bytes else value
                continue
            if not (left >= -1 and left < width and top >= -1 and top < height):
                for c in range(channels):
                    out[c, at] = outside[c] if has_fill else _zero
                continue
            has_left, has_right, has_top = left >= 0, left + 1 < width, top >= 0
            has_below = top + 1 < height
            source = int(top) * width + int(left)
            inside = (nw if has_left and has_top else _zero) + (ne if has_right and has_top else _zero)
            inside += (sw if has_left and has_below else _zero) + (se if has_right and has_below else _zero)
            for c in range(channels):
                value = planes[c, source] * nw if has_left and has_top else _zero
                value += planes[c, source + 1] * ne if has_right and has_top else _zero
                value += planes[c, source + width] * sw if has_left and has_below else _zero
                value += planes[c, source + width + 1] * se if has_right and has_below else _zero
                if has_fill:
                    value = (value - fill[c]) * inside + fill[c]
                out[c, at] = np.float32(np.rint(value)) if of_bytes else value

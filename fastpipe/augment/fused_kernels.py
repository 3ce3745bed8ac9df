"""The CPU kernels of fused augmentation: planes of float32, (C, H · W).

Every function releases the GIL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.augment.sum_kernels import mean

__all__ = ["colour", "round_all", "sample"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_planes = _t.Array(_t.float32, 2, "C")
_f64s = _t.Array(_t.float64, 1, "C", readonly=True)
_one, _zero = np.float32(1), np.float32(0)


# ---- affine maps ---------------------------------------------------------------------------------


@compiled(_t.void(_planes, _t.int64, _t.int64, _f64s, _f32, _planes, _t.int64), error_model="numpy")
def _add_row(planes: Any, height: Any, width: Any, line: Any, inside: Any, out: Any, begin: Any) -> None:
    """Add bilinear samples along a line to a row of pixels, which begins at ``begin`` of each plane.

    Args:
        line: x and y of the first sample, and steps along both.
        inside: what part of each pixel's sample is inside of the image is added here.
    """
    for column in range(inside.shape[0]):
        x, y, at = line[0] + column * line[2], line[1] + column * line[3], begin + column
        if not (x > -1 and x < width and y > -1 and y < height):
            continue
        left, top = math.floor(x), math.floor(y)
        right, below = np.float32(x - left), np.float32(y - top)
        nw, ne = (_one - below) * (_one - right), (_one - below) * right
        sw, se = below * (_one - right), below * right
        source = top * width + left
        if left >= 0 and left + 1 < width and top >= 0 and top + 1 < height:
            inside[column] += _one
            for c in range(planes.shape[0]):
                upper = nw * planes[c, source] + ne * planes[c, source + 1]
                out[c, at] += upper + sw * planes[c, source + width] + se * planes[c, source + width + 1]
            continue
        nw, ne = (nw if left >= 0 else _zero), (ne if left + 1 < width else _zero)
        sw, se = (sw if left >= 0 else _zero), (se if left + 1 < width else _zero)
        nw, ne = (nw, ne) if top >= 0 else (_zero, _zero)
        sw, se = (sw, se) if top + 1 < height else (_zero, _zero)
        inside[column] += (nw + ne) + (sw + se)
        for c in range(planes.shape[0]):
            for weight, place in ((nw, 0), (ne, 1), (sw, width), (se, width + 1)):
                if weight != _zero:
                    out[c, at] += weight * planes[c, source + place]


@compiled(
    _t.void(_planes, _t.int64, _t.int64, _f64s, _t.int64, _t.int64, _f32, _planes, _t.int64, _t.int64),
    error_model="numpy",
)
def sample(
    planes: Any, height: Any, width: Any, matrix: Any, taps_x: Any, taps_y: Any, fill: Any, out: Any,
    out_height: Any, out_width: Any,
) -> None:  # fmt: skip
    """Take each pixel from where it comes from: the mean of bilinear samples spread over it.

    Args:
        planes: (C, height · width).
        matrix: (6,), from coordinates about the centre of the result to those about the image's.
        taps_x, taps_y: samples along each side of a pixel.
        fill: a number for each channel, of what is outside.
        out: (C, out_height · out_width).
    """
    part, inside = np.float32(1.0 / (taps_x * taps_y)), np.empty(out_width, np.float32)
    for row in range(out_height):
        inside[:] = _zero
        for c in range(planes.shape[0]):
            out[c, row * out_width : (row + 1) * out_width] = _zero
        for tap in range(taps_x * taps_y):
            from_x = (tap % taps_x + 0.5) / taps_x - 0.5 * out_width
            from_y = row + (tap // taps_x + 0.5) / taps_y - 0.5 * out_height
            x = from_x * matrix[0] + from_y * matrix[1] + matrix[2] + 0.5 * width - 0.5
            y = from_x * matrix[3] + from_y * matrix[4] + matrix[5] + 0.5 * height - 0.5
            _add_row(
                planes, height, width, np.array((x, y, matrix[0], matrix[3])), inside, out, row * out_width
            )
        for c in range(planes.shape[0]):
            for column in range(out_width):
                value = out[c, row * out_width + column]
                out[c, row * out_width + column] = value * part + fill[c] * (_one - inside[column] * part)


# ---- colours -------------------------------------------------------------------------------------


@compiled(_t.void(_f32, _f32, _f32, _planes, _f32, _f32))
def _three(red: Any, green: Any, blue: Any, linear: Any, low: Any, high: Any) -> None:
    rr, rg, rb, r1 = linear[0, 0], linear[0, 1], linear[0, 2], linear[0, 3]
    gr, gg, gb, g1 = linear[1, 0], linear[1, 1], linear[1, 2], linear[1, 3]
    br, bg, bb, b1 = linear[2, 0], linear[2, 1], linear[2, 2], linear[2, 3]
    red_low, green_low, blue_low = low[0], low[1], low[2]
    red_high, green_high, blue_high = high[0], high[1], high[2]
    for i in range(red.shape[0]):
        r, g, b = red[i], green[i], blue[i]
        red[i] = min(max(rr * r + rg * g + rb * b + r1, red_low), red_high)
        green[i] = min(max(gr * r + gg * g + gb * b + g1, green_low), green_high)
        blue[i] = min(max(br * r + bg * g + bb * b + b1, blue_low), blue_high)


@compiled(_t.void(_planes, _f64s, _t.float64, _t.float64, _f64s, _f64s))
def colour(planes: Any, maps: Any, unit: Any, new_unit: Any, low: Any, high: Any) -> None:
    """A linear change of colours.

    Args:
        planes: three, or a grey one, of which all three colours are.
        maps: (21,): rows of ``[A | B | c]`` for red, green and blue, see ``colour_maps``.
        unit, new_unit: the value of 1, before and afterwards.
        low, high: (3,), bounds, in units.
    """
    linear, bounds = np.empty((3, 4), np.float32), np.empty((2, 3), np.float32)
    means = np.zeros(3)
    needs_means = False
    for at in range(3):
        for c in range(3):
            needs_means = needs_means or maps[7 * at + 3 + c] != 0
    if needs_means:
        for c in range(3):
            means[c] = mean(planes[min(c, planes.shape[0] - 1)])
    for at in range(3):
        added = maps[7 * at + 6] * new_unit
        for c in range(3):
            linear[at, c] = np.float32(maps[7 * at + c] * (new_unit / unit))
            added += maps[7 * at + 3 + c] * means[c] * (new_unit / unit)
        linear[at, 3] = np.float32(added)
        bounds[0, at], bounds[1, at] = np.float32(low[at] * new_unit), np.float32(high[at] * new_unit)
    if planes.shape[0] == 3:
        _three(planes[0], planes[1], planes[2], linear, bounds[0], bounds[1])
        return
    factor, addend = linear[0, 0] + linear[0, 1] + linear[0, 2], linear[0, 3]
    plane, least, most = planes[0], bounds[0, 0], bounds[1, 0]
    for i in range(plane.shape[0]):
        plane[i] = min(max(factor * plane[i] + addend, least), most)


@compiled(_t.void(_planes))
def round_all(planes: Any) -> None:
    """Whole numbers."""
    for c in range(planes.shape[0]):
        plane = planes[c]
        for i in range(plane.shape[0]):
            plane[i] = np.rint(plane[i])

"""The CPU kernel that resizes: planes of float32, (C, H · W).

It releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["resize"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_ints = _t.Array(_t.int64, 1, "C")
_planes = _t.Array(_t.float32, 2, "C")
_source = _t.Array(_t.float32, 1, "C", readonly=True)  # also a user's, which may be one of a file
_sources = _t.Array(_t.float32, 2, "C", readonly=True)
_f64s = _t.Array(_t.float64, 1, "C", readonly=True)
_one, _zero = np.float32(1), np.float32(0)
_next = np.uint64(1)  # indices that cannot be negative are not looked at twice


@compiled(_t.float32(_t.float32, _t.boolean), error_model="numpy")
def _filter(distance: Any, is_cubic: Any) -> Any:
    """The triangle, or Keys's cubic with a = -1/2."""
    distance = abs(distance)
    if not is_cubic:
        return max(_one - distance, _zero)
    if distance < _one:
        return (np.float32(1.5) * distance - np.float32(2.5)) * distance * distance + _one
    if distance < np.float32(2):
        return (
            (np.float32(-0.5) * distance + np.float32(2.5)) * distance - np.float32(4)
        ) * distance + np.float32(2)
    return _zero


@compiled(
    _t.int64(_t.float64, _t.float64, _t.int64, _t.boolean, _t.boolean, _ints, _planes), error_model="numpy"
)
def _taps(
    begin: Any, extent: Any, size: Any, is_mirrored: Any, is_cubic: Any, first: Any, weights: Any
) -> Any:
    """Which pixels make each one of an axis, and by which weights.

    They are those of ``torch.nn.functional.interpolate`` with antialiasing, which computes them in float32.

    Args:
        begin, extent: where what is resized begins, and how far it goes.
        size: pixels that there are.
        is_mirrored: whether the last comes first.
        is_cubic: else linear.
        first: (wanted,), becomes the first pixel of each.
        weights: (taps, wanted).

    Returns:
        The largest number of taps.
    """
    wanted = first.shape[0]
    step = np.float32(extent / wanted)
    stretch = max(step, _one)
    reach, inverse = stretch * np.float32(2.0 if is_cubic else 1.0), _one / stretch
    most = 0
    for number in range(wanted):
        at = wanted - 1 - number if is_mirrored else number
        centre = np.float32(begin) + step * np.float32(number + 0.5)
        start = max(int(centre - reach + np.float32(0.5)), 0)
        count = min(min(int(centre + reach + np.float32(0.5)), size) - start, weights.shape[0])
        total = _zero
        for k in range(count):
            weights[k, at] = _filter((np.float32(start + k) - centre + np.float32(0.5)) * inverse, is_cubic)
            total += weights[k, at]
        for k in range(weights.shape[0]):
            weights[k, at] = weights[k, at] / total if k < count else _zero
        first[at], most = start, max(most, count)
    for at in range(wanted):  # those that weigh nothing are read as well
        move = max(first[at] + most - size, 0)
        if move:
            for k in range(most - 1, -1, -1):
                weights[k, at] = weights[k - move, at] if k >= move else _zero
            first[at] -= move
    return most


@compiled(_t.void(_source, _ints, _planes, _t.int64, _f32), error_model="numpy")
def _row(row: Any, first: Any, weights: Any, taps: Any, to: Any) -> None:
    """Weighted means along a row: (width,) to (len(first),)."""
    k = taps % 2
    if k:
        weight = weights[0]
        for x in range(first.shape[0]):
            to[x] = weight[x] * row[np.uint64(first[x])]
    else:
        k, weight, other = 2, weights[0], weights[1]
        for x in range(first.shape[0]):
            at = np.uint64(first[x])
            to[x] = weight[x] * row[at] + other[x] * row[at + _next]
    while k < taps:
        weight, other = weights[k], weights[k + 1]
        for x in range(first.shape[0]):
            at = np.uint64(first[x] + k)
            to[x] += weight[x] * row[at] + other[x] * row[at + _next]
        k += 2


@compiled(_t.void(_source, _t.int64, _t.int64, _ints, _planes, _f32), error_model="numpy")
def _four_rows(source: Any, pitch: Any, width: Any, first: Any, weights: Any, out: Any) -> None:
    """As ``_row`` with two taps, for four rows at once: indices and weights are loaded once for them."""
    wanted, weight, other = first.shape[0], weights[0], weights[1]
    row0, row1 = source[:width], source[pitch : pitch + width]
    row2, row3 = source[2 * pitch : 2 * pitch + width], source[3 * pitch : 3 * pitch + width]
    to0, to1, to2, to3 = out[:wanted], out[wanted:], out[2 * wanted :], out[3 * wanted :]
    for x in range(wanted):
        at, left, right = np.uint64(first[x]), weight[x], other[x]
        to0[x] = left * row0[at] + right * row0[at + _next]
        to1[x] = left * row1[at] + right * row1[at + _next]
        to2[x] = left * row2[at] + right * row2[at + _next]
        to3[x] = left * row3[at] + right * row3[at + _next]


@compiled(_t.void(_source, _t.int64, _t.int64, _t.int64, _ints, _planes, _t.int64, _f32), error_model="numpy")
def _rows(
    source: Any, pitch: Any, height: Any, width: Any, first: Any, weights: Any, taps: Any, out: Any
) -> None:
    """Weighted means along rows: (height, width) to (height, len(first))."""
    wanted, near = first.shape[0], np.empty(4 * width, np.float32)
    y = 4 * (height // 4) if taps == 2 else 0
    for begin in range(0, y, 4):
        for at in range(4):  # one after the other, which is how memory is fast
            row, to = (
                source[(begin + at) * pitch : (begin + at) * pitch + width],
                near[at * width : (at + 1) * width],
            )
            for x in range(width):
                to[x] = row[x]
        _four_rows(near, width, width, first, weights, out[begin * wanted :])
    for at in range(y, height):
        row = source[at * pitch : at * pitch + width]
        _row(row, first, weights, taps, out[at * wanted : (at + 1) * wanted])


@compiled(_t.void(_source, _t.int64, _t.int64, _ints, _planes, _t.int64, _f32), error_model="numpy")
def _columns(source: Any, pitch: Any, width: Any, first: Any, weights: Any, taps: Any, out: Any) -> None:
    """Weighted means along columns: (height, width) to (len(first), width)."""
    for y in range(first.shape[0]):
        to, at = out[y * width : (y + 1) * width], first[y] * pitch
        row, weight, k = source[at : at + width], weights[0, y], 1
        if taps % 2:
            for x in range(width):
                to[x] = weight * row[x]
        else:
            other, second, k = source[at + pitch : at + pitch + width], weights[1, y], 2
            for x in range(width):
                to[x] = weight * row[x] + second * other[x]
        while k < taps:
            row, weight = source[at + k * pitch : at + k * pitch + width], weights[k, y]
            below = at + (k + 1) * pitch
            other, second = source[below : below + width], weights[k + 1, y]
            for x in range(width):
                to[x] += weight * row[x] + second * other[x]
            k += 2


@compiled(
    _t.void(
        _sources, _t.int64, _t.int64, _t.int64, _t.int64, _f64s, _t.boolean, _planes, _t.int64, _t.int64, _f32
    ),
    error_model="numpy",
)
def resize(
    planes: Any, begin: Any, pitch: Any, height: Any, width: Any, box: Any, is_cubic: Any, out: Any,
    out_height: Any, out_width: Any, scratch: Any,
) -> None:  # fmt: skip
    """Resize a box, with antialiasing.

    Args:
        planes: (C, …), of which (height, width) pixels are looked at.
        begin, pitch: where the first of these is, and how far it is from row to row.
        box: along y and then along x where it begins, how far it goes, and whether it is mirrored.
        out: (C, out_height · out_width).
        scratch: of max(height · out_width, out_height · width).
    """
    most_y, most_x = 4 * int(box[1] / out_height + 1) + 2, 4 * int(box[4] / out_width + 1) + 2
    first_y, first_x = np.empty(out_height, np.int64), np.empty(out_width, np.int64)
    weights_y = np.empty((most_y, out_height), np.float32)
    weights_x = np.empty((most_x, out_width), np.float32)
    taps_y = _taps(box[0], box[1], height, box[2] != 0, is_cubic, first_y, weights_y)
    taps_x = _taps(box[3], box[4], width, box[5] != 0, is_cubic, first_x, weights_x)
    for c in range(planes.shape[0]):
        plane = planes[c, begin:]
        # Along rows the work is slower: with as few rows as there are before or after.
        if height <= out_height:
            _rows(plane, pitch, height, width, first_x, weights_x, taps_x, scratch)
            _columns(scratch, out_width, out_width, first_y, weights_y, taps_y, out[c])
        else:
            _columns(plane, pitch, width, first_y, weights_y, taps_y, scratch)
            _rows(scratch, width, out_height, width, first_x, weights_x, taps_x, out[c])

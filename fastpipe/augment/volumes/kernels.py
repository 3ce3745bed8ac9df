"""The CPU kernels of volumes: each does a part of one, so that threads share it.

Every function releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["along_middle", "along_width", "moments", "warp", "warp_nearest"]

_t = require("numba.types", extra="image")
_volume = _t.Array(_t.float32, 4, "C")
_channel = _t.Array(_t.float32, 3, "C")
_given = _t.Array(_t.float32, 3, "C", readonly=True)
_f64s = _t.Array(_t.float64, 1, "C", readonly=True)
_f32 = _t.Array(_t.float32, 1, "C")
_taps = _t.Array(_t.int64, 2, "C", readonly=True), _t.Array(_t.float32, 2, "C", readonly=True)
_line = _t.UniTuple(_t.float32, 6)
_zero, _one = np.float32(0), np.float32(1)
_ROUNDING = 1e-3  # voxels, much more than float32 places differ by


# ---- maps ----------------------------------------------------------------------------------------


@compiled(_line(_f64s, _t.UniTuple(_t.int64, 3), _t.UniTuple(_t.int64, 3), _t.int64, _t.int64))
def _row(matrix: Any, size: Any, new_size: Any, z: Any, y: Any) -> Any:
    """Where the first voxel of a row comes from, along depth, height and width, and the steps to the next."""
    mz, my, mx = 0.5 * (new_size[0] - 1), 0.5 * (new_size[1] - 1), 0.5 * (new_size[2] - 1)
    bz = matrix[0] * (z - mz) + matrix[1] * (y - my) - matrix[2] * mx + matrix[3] + 0.5 * (size[0] - 1)
    by = matrix[4] * (z - mz) + matrix[5] * (y - my) - matrix[6] * mx + matrix[7] + 0.5 * (size[1] - 1)
    bx = matrix[8] * (z - mz) + matrix[9] * (y - my) - matrix[10] * mx + matrix[11] + 0.5 * (size[2] - 1)
    return (
        np.float32(bz), np.float32(by), np.float32(bx),
        np.float32(matrix[2]), np.float32(matrix[6]), np.float32(matrix[10]),
    )  # fmt: skip


@compiled(_t.void(_volume, _t.int64, _t.int64, _t.int64, _t.int64, _t.int64, _f32))
def _bend_row(bends: Any, depth: Any, height: Any, width: Any, z: Any, y: Any, found: Any) -> None:
    """How far the voxels of a row are moved: ``found``, (3 · width,), is 0 without control points."""
    _, rows_z, rows_y, rows_x = bends.shape
    if rows_x == 0:
        found[:] = _zero
        return
    at_z, at_y = z * (rows_z - 1) / max(depth - 1, 1), y * (rows_y - 1) / max(height - 1, 1)
    z0, y0 = min(int(at_z), max(rows_z - 2, 0)), min(int(at_y), max(rows_y - 2, 0))
    z1, y1 = min(z0 + 1, rows_z - 1), min(y0 + 1, rows_y - 1)
    part_z, part_y = np.float32(at_z - z0), np.float32(at_y - y0)
    step = (rows_x - 1) / max(width - 1, 1)
    line = np.empty(rows_x, np.float32)
    for axis in range(3):
        for x in range(rows_x):
            above = bends[axis, z0, y0, x] * (_one - part_y) + bends[axis, z0, y1, x] * part_y
            below = bends[axis, z1, y0, x] * (_one - part_y) + bends[axis, z1, y1, x] * part_y
            line[x] = above * (_one - part_z) + below * part_z
        for x in range(width):
            at = x * step
            x0 = min(int(at), max(rows_x - 2, 0))
            part = np.float32(at - x0)
            found[axis * width + x] = line[x0] * (_one - part) + line[min(x0 + 1, rows_x - 1)] * part


@compiled(
    _t.void(_f32, _t.int64, _t.int64, _line, _t.int64, _t.int64, _f32), error_model="numpy",
    fastmath={"contract"},
)  # fmt: skip
def _inside(flat: Any, plane: Any, width: Any, line: Any, first: Any, last: Any, out: Any) -> None:
    """Voxels of a row whose eight neighbours are all there: without a question in between.

    Args:
        flat: a channel.
        plane, width: voxels between planes, and between rows.
        line: where the first voxel comes from, along depth, height and width, and the steps to the next.
        first, last: which voxels.
        out: the row.
    """
    from_z, from_y, from_x, step_z, step_y, step_x = line
    for x in range(first, last):
        at = np.float32(x)
        pz, py, px = from_z + at * step_z, from_y + at * step_y, from_x + at * step_x
        iz, iy, ix = np.int32(pz), np.int32(py), np.int32(px)
        fz, fy, fx = pz - np.float32(iz), py - np.float32(iy), px - np.float32(ix)
        source = iz * plane + iy * width + ix
        below = source + plane
        n0 = flat[source] + fx * (flat[source + 1] - flat[source])
        n1 = flat[source + width] + fx * (flat[source + width + 1] - flat[source + width])
        s0 = flat[below] + fx * (flat[below + 1] - flat[below])
        s1 = flat[below + width] + fx * (flat[below + width + 1] - flat[below + width])
        n0, s0 = n0 + fy * (n1 - n0), s0 + fy * (s1 - s0)
        out[x] = n0 + fz * (s0 - n0)


@compiled(_t.UniTuple(_t.int64, 2)(_line, _t.UniTuple(_t.int64, 3), _t.int64), error_model="numpy")
def _range_inside(line: Any, size: Any, count: Any) -> Any:
    """The voxels of a row, first and last, whose eight neighbours are all there."""
    low, high = 0.0, np.float64(count - 1)
    for axis in range(3):
        begin, step, most = np.float64(line[axis]), np.float64(line[axis + 3]), size[axis] - 1 - _ROUNDING
        if size[axis] < 2:
            return 0, 0
        if abs(step) * count < _ROUNDING:
            if begin < _ROUNDING or begin > most - _ROUNDING:
                return 0, 0
            continue
        one, other = (_ROUNDING - begin) / step, (most - begin) / step
        low, high = max(low, min(one, other)), min(high, max(one, other))
    if not low <= high:  # NaN neither; and what is far away is no integer
        return 0, 0
    first, last = int(np.ceil(low)), int(np.floor(high)) + 1
    return (first, last) if first < last else (0, 0)


@compiled(
    _t.void(_volume, _f64s, _volume, _t.float32, _t.boolean, _volume, _t.int64, _t.int64),
    error_model="numpy",
    fastmath={"contract"},
)  # fmt: skip
def warp(
    values: Any, matrix: Any, bends: Any, fill: Any, has_edge: Any, out: Any, first: Any, last: Any
) -> None:
    """Take each voxel from between the eight that it comes from.

    Args:
        values: (C, D, H, W).
        matrix: (12,), from coordinates about the centre of the result to those about the volume's: three
            rows, each of three factors and what is added.
        bends: (3, Z, Y, X): control points, the first and the last of each axis at the result's first and
            last voxel; how far voxels are moved before the matrix is applied.  X is 0 for none.
        fill: what is outside.
        has_edge: the nearest voxels inside are, in its place.
        out: (C, d, h, w).
        first, last: which planes of ``out`` are made.
    """
    channels, depth, height, width = values.shape
    _, new_depth, new_height, new_width = out.shape
    plane, flat = height * width, values.reshape(channels, depth * height * width)
    bent = np.empty(3 * new_width, np.float32)
    has_bends = bends.shape[3] > 0
    size, new_size = (depth, height, width), (new_depth, new_height, new_width)
    most_z, most_y, most_x = np.float32(depth - 1), np.float32(height - 1), np.float32(width - 1)
    for row in range(first * new_height, last * new_height):
        z, y = row // new_height, row % new_height
        line = _row(matrix, size, new_size, z, y)
        from_z, from_y, from_x, az, ay, ax = line
        begin, end = 0, 0
        if has_bends:
            _bend_row(bends, new_depth, new_height, new_width, z, y, bent)
        else:
            begin, end = _range_inside(line, size, new_width)
            for c in range(channels):
                _inside(flat[c], plane, width, line, begin, end, out[c, z, y])
        for number in range(new_width - (end - begin)):
            x = number if number < begin else number + (end - begin)
            at = np.float32(x)
            pz, py, px = from_z + at * az, from_y + at * ay, from_x + at * ax
            if has_bends:
                dz, dy, dx = bent[x], bent[new_width + x], bent[2 * new_width + x]
                pz += np.float32(matrix[0]) * dz + np.float32(matrix[1]) * dy + az * dx
                py += np.float32(matrix[4]) * dz + np.float32(matrix[5]) * dy + ay * dx
                px += np.float32(matrix[8]) * dz + np.float32(matrix[9]) * dy + ax * dx
            if has_edge:
                pz, py = min(max(pz, _zero), most_z), min(max(py, _zero), most_y)
                px = min(max(px, _zero), most_x)
            if not (pz > -1 and pz < depth and py > -1 and py < height and px > -1 and px < width):
                for c in range(channels):
                    out[c, z, y, x] = fill
                continue
            # Truncated towards 0, these are floors once they are above 0.
            z0, y0, x0 = int(pz + _one) - 1, int(py + _one) - 1, int(px + _one) - 1
            fz, fy, fx = pz - np.float32(z0), py - np.float32(y0), px - np.float32(x0)
            source = z0 * plane + y0 * width + x0
            if z0 >= 0 and z0 + 1 < depth and y0 >= 0 and y0 + 1 < height and x0 >= 0 and x0 + 1 < width:
                for c in range(channels):
                    line = flat[c]
                    n0 = line[source] + fx * (line[source + 1] - line[source])
                    n1 = line[source + width] + fx * (line[source + width + 1] - line[source + width])
                    n0 += fy * (n1 - n0)
                    below = source + plane
                    s0 = line[below] + fx * (line[below + 1] - line[below])
                    s1 = line[below + width] + fx * (line[below + width + 1] - line[below + width])
                    s0 += fy * (s1 - s0)
                    out[c, z, y, x] = n0 + fz * (s0 - n0)
                continue
            for c in range(channels):
                total = _zero
                for corner in range(8):
                    cz, cy, cx = z0 + (corner >> 2), y0 + ((corner >> 1) & 1), x0 + (corner & 1)
                    weight = fz if corner & 4 else _one - fz
                    weight *= fy if corner & 2 else _one - fy
                    weight *= fx if corner & 1 else _one - fx
                    is_in = cz >= 0 and cz < depth and cy >= 0 and cy < height and cx >= 0 and cx < width
                    total += weight * (flat[c, cz * plane + cy * width + cx] if is_in else fill)
                out[c, z, y, x] = total


def _labels(kind: Any) -> Any:
    volume = _t.Array(kind, 4, "C")
    return _t.void(volume, _f64s, _volume, kind, _t.boolean, volume, _t.int64, _t.int64)


@compiled(
    *(_labels(kind) for kind in (_t.float32, _t.uint8, _t.uint16, _t.uint32, _t.uint64)),
    error_model="numpy", fastmath={"contract"},
)  # fmt: skip
def warp_nearest(
    values: Any, matrix: Any, bends: Any, fill: Any, has_edge: Any, out: Any, first: Any, last: Any
) -> None:
    """As ``warp``, from the nearest voxel."""
    channels, depth, height, width = values.shape
    _, new_depth, new_height, new_width = out.shape
    bent = np.empty(3 * new_width, np.float32)
    has_bends = bends.shape[3] > 0
    size, new_size = (depth, height, width), (new_depth, new_height, new_width)
    most_z, most_y, most_x = np.float32(depth - 1), np.float32(height - 1), np.float32(width - 1)
    half = np.float32(0.5)
    for row in range(first * new_height, last * new_height):
        z, y = row // new_height, row % new_height
        line = _row(matrix, size, new_size, z, y)
        from_z, from_y, from_x, az, ay, ax = line
        if has_bends:
            _bend_row(bends, new_depth, new_height, new_width, z, y, bent)
        for x in range(new_width):
            at = np.float32(x)
            pz, py, px = from_z + at * az, from_y + at * ay, from_x + at * ax
            if has_bends:
                dz, dy, dx = bent[x], bent[new_width + x], bent[2 * new_width + x]
                pz += np.float32(matrix[0]) * dz + np.float32(matrix[1]) * dy + az * dx
                py += np.float32(matrix[4]) * dz + np.float32(matrix[5]) * dy + ay * dx
                px += np.float32(matrix[8]) * dz + np.float32(matrix[9]) * dy + ax * dx
            if has_edge:
                pz, py = min(max(pz, _zero), most_z), min(max(py, _zero), most_y)
                px = min(max(px, _zero), most_x)
            is_in = pz >= -half and pz < depth - half and py >= -half and py < height - half
            if is_in and px >= -half and px < width - half:
                z0, y0, x0 = int(pz + half), int(py + half), int(px + half)
                for c in range(channels):
                    out[c, z, y, x] = values[c, z0, y0, x0]
            else:
                for c in range(channels):
                    out[c, z, y, x] = fill


# ---- numbers of all voxels -----------------------------------------------------------------------

_LANES, _BLOCK = 64, 1 << 14  # sums side by side, and how many voxels they are float32 for


@compiled(_t.void(_f32, _t.Array(_t.float64, 1, "C")), fastmath=True)
def moments(values: Any, found: Any) -> None:
    """The first value, sums of what others differ from it and of its square, the least and the greatest."""
    about, total, squares = values[0], 0.0, 0.0
    sums, of_squares = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
    low, high = np.full(_LANES, about), np.full(_LANES, about)
    whole = len(values) - len(values) % _LANES
    for begin in range(0, whole, _BLOCK):
        for row in range(begin, min(begin + _BLOCK, whole), _LANES):
            for lane in range(_LANES):
                value = values[row + lane]
                apart = value - about
                sums[lane] += apart
                of_squares[lane] += apart * apart
                low[lane] = value if value < low[lane] else low[lane]
                high[lane] = value if value > high[lane] else high[lane]
        for lane in range(_LANES):
            total += sums[lane]
            squares += of_squares[lane]
            sums[lane], of_squares[lane] = _zero, _zero
    least, greatest = low.min(), high.max()
    for at in range(whole, len(values)):
        apart = values[at] - about
        total += apart
        squares += apart * apart
        least, greatest = min(least, values[at]), max(greatest, values[at])
    found[0], found[1], found[2], found[3], found[4] = about, total, squares, least, greatest


# ---- along an axis -------------------------------------------------------------------------------
#
# Each voxel becomes a weighted sum of voxels of its line: of ``index[i, k]`` with ``weights[i, k]`` where it
# is the line's i-th.  In place: what is read is copied first, and small enough to stay in cache.

_COLUMNS, _LINES = 256, 16  # lines that are side by side, or are turned to be so, and worked on at once


@compiled(
    _t.void(_given, _channel, *_taps, _t.int64, _t.int64, _t.int64, _t.int64), error_model="numpy",
    fastmath={"contract"},
)  # fmt: skip
def along_middle(
    given: Any, out: Any, index: Any, weights: Any, first: Any, last: Any, begin: Any, end: Any
) -> None:
    """Lines along the second of three axes: of ``first`` … ``last`` of the first one, and of ``begin`` …
    ``end`` of the third, along which they are side by side."""
    length = given.shape[1]
    copied = np.empty((length, _COLUMNS), np.float32)
    for a in range(first, last):
        for left in range(begin, end, _COLUMNS):
            count = min(_COLUMNS, end - left)
            for at in range(length):
                row, source = copied[at], given[a, at, left : left + count]
                for x in range(count):
                    row[x] = source[x]
            for at in range(length):
                row, source, weight = out[a, at, left : left + count], copied[index[at, 0]], weights[at, 0]
                for x in range(count):
                    row[x] = weight * source[x]
                for k in range(1, index.shape[1]):
                    source, weight = copied[index[at, k]], weights[at, k]
                    for x in range(count):
                        row[x] += weight * source[x]


@compiled(_t.void(_given, _channel, *_taps, _t.int64, _t.int64), error_model="numpy", fastmath={"contract"})
def along_width(given: Any, channel: Any, index: Any, weights: Any, first: Any, last: Any) -> None:
    """Lines along the width, of the planes ``first`` … ``last``."""
    _, height, width = channel.shape
    turned, made = np.empty((width, _LINES), np.float32), np.empty((width, _LINES), np.float32)
    for z in range(first, last):
        for y in range(0, height, _LINES):
            count = min(_LINES, height - y)
            for line in range(count):
                source = given[z, y + line]
                for x in range(width):
                    turned[x, line] = source[x]
            for x in range(width):
                row, source, weight = made[x], turned[index[x, 0]], weights[x, 0]
                for line in range(_LINES):
                    row[line] = weight * source[line]
                for k in range(1, index.shape[1]):
                    source, weight = turned[index[x, k]], weights[x, k]
                    for line in range(_LINES):
                        row[line] += weight * source[line]
            for line in range(count):
                row = channel[z, y + line]
                for x in range(width):
                    row[x] = made[x, line]

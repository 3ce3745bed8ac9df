"""The CPU kernels of single images: planes of float32, (C, H · W), changed in place.

Bytes are worked on as floats, and rounded down where torchvision converts them to bytes, so that what
comes of a chain of changes is what comes of torchvision's.

Every function releases the GIL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.augment.sum_kernels import mean

__all__ = ["blur", "gaussian", "grey", "jitter"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_planes = _t.Array(_t.float32, 2, "C")
_f64s = _t.Array(_t.float64, 1, "C", readonly=True)
_one = np.float32(1)


@require("numba.extending", extra="image").intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once: as torch adds what is multiplied by ``alpha``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return _t.float32(_t.float32, _t.float32, _t.float32), generate


@compiled(_t.void(_planes, _f32, _t.boolean), error_model="numpy")
def _luminance(planes: Any, out: Any, of_bytes: Any) -> None:
    """An image's luminance into ``out``, rounded down of bytes."""
    red, green, blue = planes[0], planes[1], planes[2]
    for i in range(out.shape[0]):
        value = _fma(green[i], np.float32(0.587), red[i] * np.float32(0.2989))
        value = _fma(blue[i], np.float32(0.114), value)
        out[i] = np.floor(value) if of_bytes else value


@compiled(_t.void(_f32, _t.float32, _t.float32, _t.float32, _t.float32, _t.boolean), error_model="numpy")
def _blend_with(plane: Any, number: Any, factor: Any, rest: Any, bound: Any, of_bytes: Any) -> None:
    """plane · factor + number · rest, in the range."""
    for i in range(plane.shape[0]):
        value = _fma(number, rest, plane[i] * factor)
        value = min(max(value, np.float32(0)), bound)
        plane[i] = np.floor(value) if of_bytes else value


@compiled(_t.void(_f32, _f32, _t.float32, _t.float32, _t.float32, _t.boolean), error_model="numpy")
def _blend(plane: Any, other: Any, factor: Any, rest: Any, bound: Any, of_bytes: Any) -> None:
    """plane · factor + other · rest, in the range."""
    for i in range(plane.shape[0]):
        value = _fma(other[i], rest, plane[i] * factor)
        value = min(max(value, np.float32(0)), bound)
        plane[i] = np.floor(value) if of_bytes else value


@compiled(_t.float32(_t.float32, _t.float32, _t.float32, _t.float32), error_model="numpy")
def _channel(sixths: Any, begin: Any, high: Any, depth: Any) -> Any:
    """One channel of a colour, by its hue from ``begin`` in sixths of a turn."""
    k = sixths + begin
    k = k - np.float32(6) if k >= np.float32(6) else k
    part = min(k, np.float32(4) - k)
    value = high - depth * max(np.float32(0), min(part, _one))
    return min(max(value, np.float32(0)), _one)


@compiled(_t.void(_f32, _f32, _f32, _t.float32, _t.float32, _t.boolean), error_model="numpy")
def _shift_hue(red: Any, green: Any, blue: Any, shift: Any, bound: Any, of_bytes: Any) -> None:
    """Turn hues by a part of the circle.

    From colours to hue, saturation and value as Pillow and torchvision have it, and back without branches by
    ``v - v s max(0, min(k, 4 - k, 1))`` with ``k = (n + 6 h) mod 6`` and n = 5, 3, 1.
    """
    zero, two, four, six, sixth = (
        np.float32(0),
        np.float32(2),
        np.float32(4),
        np.float32(6),
        np.float32(1 / 6),
    )
    to_byte = np.float32(255.999)
    for i in range(red.shape[0]):
        r, g, b = red[i] / bound, green[i] / bound, blue[i] / bound
        v, low = max(max(r, g), b), min(min(r, g), b)
        span = v - low
        s = span / (_one if span == zero else v)
        over = _one / (_one if span == zero else span)
        of_red, of_green, of_blue = (v - r) * over, (v - g) * over, (v - b) * over
        h = of_green + four - of_red
        h = of_red + two - of_blue if v == g else h
        h = of_blue - of_green if v == r else h
        h = h * sixth + shift + two
        sixths, depth = (h - np.floor(h)) * six, v * s
        r, g, b = (
            _channel(sixths, np.float32(5), v, depth), _channel(sixths, np.float32(3), v, depth),
            _channel(sixths, _one, v, depth),
        )  # fmt: skip
        if of_bytes:
            r, g, b = np.floor(r * to_byte), np.floor(g * to_byte), np.floor(b * to_byte)
        red[i], green[i], blue[i] = r, g, b


@compiled(_t.void(_planes, _f32, _f64s, _f64s, _t.boolean), error_model="numpy")
def jitter(planes: Any, scratch: Any, factors: Any, order: Any, of_bytes: Any) -> None:
    """Brightness, contrast, saturation and hue.

    Args:
        planes: three, or a grey one.
        scratch: as long as a plane.
        factors: for brightness, contrast and saturation, where 1 changes nothing, and the turn of the hue.
        order: in which they come, as indices of ``factors``.
        of_bytes: whether the range is 0 … 255, of whole numbers.
    """
    bound = np.float32(255) if of_bytes else _one
    is_colour = planes.shape[0] == 3
    for place in range(order.shape[0]):
        kind = int(order[place])
        factor, rest = np.float32(factors[kind]), np.float32(1.0 - factors[kind])
        if kind == 0 and factor != _one:
            for c in range(planes.shape[0]):
                _blend_with(planes[c], np.float32(0), factor, rest, bound, of_bytes)
        elif kind == 1 and factor != _one:
            if is_colour:
                _luminance(planes, scratch, of_bytes)
                middle = mean(scratch)
            else:
                middle = mean(planes[0])
            for c in range(planes.shape[0]):
                _blend_with(planes[c], middle, factor, rest, bound, of_bytes)
        elif kind == 2 and factor != _one and is_colour:
            _luminance(planes, scratch, of_bytes)
            for c in range(3):
                _blend(planes[c], scratch, factor, rest, bound, of_bytes)
        elif kind == 3 and factor != np.float32(0) and is_colour:
            _shift_hue(planes[0], planes[1], planes[2], factor, bound, of_bytes)


@compiled(_t.void(_planes, _t.boolean))
def grey(planes: Any, of_bytes: Any) -> None:
    """The luminance in the place of each of three planes."""
    _luminance(planes, planes[0], of_bytes)
    planes[1, :] = planes[0]
    planes[2, :] = planes[0]


@compiled(_t.void(_f32, _t.int64, _f32, _f32))
def _weighted(source: Any, step: Any, weights: Any, out: Any) -> None:
    """out[i] = Σ weights[j] · source[i + j · step]; in blocks that stay in the nearest cache."""
    half = weights.shape[0] // 2
    for begin in range(0, out.shape[0], 2048):
        block = out[begin : begin + 2048]
        count = block.shape[0]
        middle = source[begin + half * step : begin + half * step + count]
        for i in range(count):
            block[i] = weights[half] * middle[i]
        j = half & 1
        if j:
            a, b = source[begin:], source[begin + 2 * half * step :]
            for i in range(count):
                block[i] += weights[0] * (a[i] + b[i])
        while j < half:
            a, b = source[begin + j * step :], source[begin + (2 * half - j) * step :]
            c, d = source[begin + (j + 1) * step :], source[begin + (2 * half - j - 1) * step :]
            first, second = weights[j], weights[j + 1]
            for i in range(count):
                block[i] += first * (a[i] + b[i]) + second * (c[i] + d[i])
            j += 2


@compiled(_f32(_t.int64, _t.float64, _t.float64), error_model="numpy")
def gaussian(size: Any, sigma: Any, least: Any) -> Any:
    """A Gaussian's weights at so many places, but for those at both ends that are too small to count.

    Args:
        size: an odd number.
        sigma: standard deviation, in places.
        least: of the sum of all weights, what counts.
    """
    half, total = size // 2, 0.0
    powers = np.empty(size)
    for at in range(size):
        powers[at] = math.exp(-((at - half) ** 2) / (2 * sigma * sigma))
        total += powers[at]
    small = 0
    while small < half and powers[small] < total * least:
        small += 1
    total = powers[small : size - small].sum()
    found = np.empty(size - 2 * small, np.float32)
    for at in range(found.shape[0]):
        found[at] = np.float32(powers[at + small] / total)
    return found


@compiled(_t.void(_planes, _t.int64, _t.int64, _f32, _f32, _f32, _f32, _t.boolean), error_model="numpy")
def blur(
    planes: Any, height: Any, width: Any, across: Any, down: Any, first: Any, second: Any, of_bytes: Any
) -> None:
    """Weighted means of neighbours, along rows and then along columns; images are mirrored at their borders.

    Rows are kept with their mirrored ends, and worked on as one long row: what is computed where one ends and
    the next begins is left out in the end.

    Args:
        planes: (C, height · width).
        height, width: larger than half as many as there are weights.
        across, down: an odd number of weights each, the same from both ends.
        first, second: to work in, of (height + len(down) - 1) · (width + len(across) - 1).
        of_bytes: whether results are rounded to whole numbers.
    """
    half_x, half_y = across.shape[0] // 2, down.shape[0] // 2
    stride = width + 2 * half_x
    for c in range(planes.shape[0]):
        for y in range(height):
            row, padded = planes[c, y * width : (y + 1) * width], first[y * stride : (y + 1) * stride]
            inner = padded[half_x : half_x + width]
            for x in range(width):
                inner[x] = row[x]
            for i in range(half_x):
                padded[half_x - 1 - i] = row[i + 1]
                padded[half_x + width + i] = row[width - 2 - i]
        count = height * stride - 2 * half_x
        _weighted(first, 1, across, second[half_y * stride : half_y * stride + count])
        for i in range(half_y):
            for to, source in (
                (half_y - 1 - i, half_y + 1 + i),
                (half_y + height + i, half_y + height - 2 - i),
            ):
                for x in range(width):
                    second[to * stride + x] = second[source * stride + x]
        _weighted(second, stride, down, first[:count])
        for y in range(height):
            row, padded = planes[c, y * width : (y + 1) * width], first[y * stride : y * stride + width]
            for x in range(width):
                row[x] = np.rint(padded[x]) if of_bytes else padded[x]

"""Which input pixels make an output pixel, and how much each counts, along one axis.

The filters and the arithmetic are those of Pillow's ``Resample.c`` (double precision, then
22-bit fixed point), and of torch's ``interpolate`` on bytes (16-bit fixed point).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.transform._jit import compiled

__all__ = [
    "BICUBIC",
    "BILINEAR",
    "BOX",
    "HAMMING",
    "LANCZOS",
    "NEAREST",
    "NEAREST_FLOOR",
    "SHARP_BICUBIC",
    "SHARP_BILINEAR",
    "TORCH_BICUBIC",
    "TORCH_BILINEAR",
    "axis_weights",
    "max_taps",
]

# Pillow's filters, which widen when they shrink an image (antialiasing) …
BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = 0, 1, 2, 3, 4
# … the nearest pixel: to the centre (Pillow, NEAREST_EXACT) or rounded down (torch's "nearest") …
NEAREST, NEAREST_FLOOR = 5, 6
# … torch's filters without antialiasing, which do not widen and repeat the edge …
SHARP_BILINEAR, SHARP_BICUBIC = 7, 8
# … and torch's with antialiasing: Pillow's, with weights of fewer bits.
TORCH_BILINEAR, TORCH_BICUBIC = 9, 10

_SUPPORT = (0.5, 1.0, 1.0, 2.0, 3.0, 0.5, 0.5, 1.0, 2.0, 1.0, 2.0)

_t = require("numba.types", extra="image")

_i32, _int, _flag = _t.int32[::1], _t.int64, _t.boolean


def max_taps(mode: int, in_size: int, out_size: int) -> int:
    """Upper bound of the number of input pixels that make one output pixel.

    >>> max_taps(BILINEAR, 340, 224)
    5
    """
    scale = 1.0 if mode in (SHARP_BILINEAR, SHARP_BICUBIC) else max(in_size / out_size, 1.0)
    return math.ceil(_SUPPORT[mode] * scale) * 2 + 1


@compiled()
def _sinc(x: float) -> float:
    if x == 0.0:
        return 1.0
    x = x * math.pi
    return math.sin(x) / x


@compiled()
def _filter(mode: int, x: float) -> float:
    """A resampling filter's value at a distance of x (scaled) pixels from the centre."""
    if mode == 0:  # box
        return 1.0 if -0.5 < x <= 0.5 else 0.0
    if mode == 4:  # Lanczos, three lobes
        return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0
    x = abs(x)
    if mode in (1, 7, 9):  # triangle
        return 1.0 - x if x < 1.0 else 0.0
    if mode == 2:  # Hamming-windowed sinc
        if x == 0.0:
            return 1.0
        if x >= 1.0:
            return 0.0
        x = x * math.pi
        # Pillow's two constants are single precision.
        return math.sin(x) / x * (np.float64(np.float32(0.54)) + np.float64(np.float32(0.46)) * math.cos(x))
    # Keys' cubic convolution: a = -0.5, and -0.75 in torch without antialiasing.
    a = -0.75 if mode == 8 else -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0


@compiled()
def _soft_taps(mode: int, center: float, stretch: float, in_size: int, exact: Any) -> tuple[int, int]:
    """Weights of a filter that widens with the scale; they sum to 1.  First input, and how many."""
    support = _SUPPORT[mode] * stretch
    start = max(int(center - support + 0.5), 0)
    count = min(int(center + support + 0.5), in_size) - start
    total = 0.0
    for k in range(count):
        exact[k] = _filter(mode, (k + start - center + 0.5) * (1.0 / stretch))
        total += exact[k]
    for k in range(count if total != 0.0 else 0):
        exact[k] /= total
    return start, count


@compiled()
def _sharp_taps(mode: int, center: float, in_size: int, exact: Any) -> tuple[int, int]:
    """Weights without antialiasing: pixels beyond an edge count for the pixel at the edge."""
    reach = int(_SUPPORT[mode])
    left = int(math.floor(center - 0.5)) - reach + 1  # noqa: RUF046 - numba's floor gives a float
    start = min(max(left, 0), in_size - 1)
    count = max(min(left + 2 * reach, in_size) - start, 1)
    exact[:count] = 0.0
    for x in range(left, left + 2 * reach):
        exact[min(max(x, 0), in_size - 1) - start] += _filter(mode, x + 0.5 - center)
    return start, count


@compiled()
def _taps(mode: int, center: float, stretch: float, in_size: int, exact: Any) -> tuple[int, int]:
    if mode in (7, 8):
        start, count = _sharp_taps(mode, center, in_size, exact)
    else:
        start, count = _soft_taps(mode, center, stretch, in_size, exact)
    return start, count


@compiled()
def _fraction_bits(mode: int, scale: float, stretch: float, in_size: int, out_size: int, exact: Any) -> int:
    """Bits of the fixed-point weights: 22 in Pillow; in torch as many as keep the largest weight
    of the whole axis within 16 bits."""
    if mode < 7:
        return 22
    largest = 0.0
    for i in range(out_size):
        _, count = _taps(mode, (i + 0.5) * scale, stretch, in_size, exact)
        for k in range(count):
            largest = max(largest, exact[k])
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < (1 << 15):
        bits += 1
    return bits


@compiled(_t.UniTuple(_int, 2)(_int, _int, _int, _int, _int, _i32, _i32, _i32, _int, _flag))
def axis_weights(
    mode: int,
    in_size: int,
    out_size: int,
    first: int,
    count: int,
    starts: Any,
    taps: Any,
    weights: Any,
    pitch: int,
    mirrored: bool,
) -> tuple[int, int]:
    """Weights of one axis, for output pixels ``first … first + count - 1`` of ``out_size``.

    Args:
        mode: one of this module's constants.
        in_size, out_size: pixels along the axis before and after.
        first, count: the part of the output that is wanted.
        starts, taps: int32 (count,): each output's first input pixel and number of inputs.
        weights: int32 (count * pitch,): fixed-point weights, scaled by 2**22.
        pitch: weights kept for each output; at least ``max_taps``.
        mirrored: the weights for resampling the mirrored input, on the input as it is.

    Returns:
        The range of input pixels that are read, as (first, past the last).
    """
    scale = in_size / out_size
    stretch = 1.0 if mode in (7, 8) else max(scale, 1.0)
    exact = np.empty(pitch)
    bits = _fraction_bits(mode, scale, stretch, in_size, out_size, exact)
    low, high = in_size, 0
    walked = 0.5 * scale  # Pillow walks to the nearest pixel in steps, with their rounding
    for _ in range(first if mode == 5 else 0):
        walked += scale
    for i in range(count):
        base = i * pitch
        if mode == 5 or mode == 6:
            position = walked if mode == 5 else (first + i) * scale
            starts[i], taps[i], weights[base] = min(int(position), in_size - 1), 1, 1 << 22
            walked += scale
        else:
            starts[i], taps[i] = _taps(mode, (first + i + 0.5) * scale, stretch, in_size, exact)
            for k in range(taps[i]):
                weight = exact[k] * (1 << bits)
                rounded = int(weight - 0.5) if weight < 0 else int(weight + 0.5)
                weights[base + k] = rounded << (22 - bits)
        if mirrored:
            starts[i] = in_size - starts[i] - taps[i]
            for k in range(taps[i] // 2):
                other = base + taps[i] - 1 - k
                weights[base + k], weights[other] = weights[other], weights[base + k]
        low = min(low, starts[i])
        high = max(high, starts[i] + taps[i])
    return low, high

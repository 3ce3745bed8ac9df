"""Which input pixels make an output pixel, and how much each counts, along one axis.

The filters and the arithmetic are those of Pillow's ``Resample.c`` (double precision, then
22-bit fixed point), and of torch's ``interpolate`` where it does not antialias.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require

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
    "axis_weights",
    "max_taps",
]

# Pillow's filters, which widen when they shrink an image (antialiasing) …
BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = 0, 1, 2, 3, 4
# … the nearest pixel: to the centre (Pillow, NEAREST_EXACT) or rounded down (torch's "nearest") …
NEAREST, NEAREST_FLOOR = 5, 6
# … and torch's filters without antialiasing, which do not widen and repeat the edge.
SHARP_BILINEAR, SHARP_BICUBIC = 7, 8

_SUPPORT = (0.5, 1.0, 1.0, 2.0, 3.0, 0.5, 0.5, 1.0, 2.0)

_numba = require("numba", extra="image")
_t = require("numba.types", extra="image")

_i32, _int, _flag = _t.int32[::1], _t.int64, _t.boolean


def max_taps(mode: int, in_size: int, out_size: int) -> int:
    """Upper bound of the number of input pixels that make one output pixel.

    >>> max_taps(BILINEAR, 340, 224)
    5
    """
    scale = max(in_size / out_size, 1.0) if mode <= LANCZOS else 1.0
    return math.ceil(_SUPPORT[mode] * scale) * 2 + 1


@_numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sinc(x: float) -> float:
    if x == 0.0:
        return 1.0
    x = x * math.pi
    return math.sin(x) / x


@_numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _filter(mode: int, x: float) -> float:
    """A resampling filter's value at a distance of x (scaled) pixels from the centre."""
    if mode == 0:  # box
        return 1.0 if -0.5 < x <= 0.5 else 0.0
    if mode == 4:  # Lanczos, three lobes
        return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0
    x = abs(x)
    if mode in (1, 7):  # triangle
        return 1.0 - x if x < 1.0 else 0.0
    if mode == 2:  # Hamming-windowed sinc
        if x == 0.0:
            return 1.0
        if x >= 1.0:
            return 0.0
        x = x * math.pi
        # Pillow's two constants are single precision.
        return math.sin(x) / x * (np.float64(np.float32(0.54)) + np.float64(np.float32(0.46)) * math.cos(x))
    # Keys' cubic convolution: a = -0.5 in Pillow, -0.75 in torch without antialiasing.
    a = -0.5 if mode == 3 else -0.75
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0


@_numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sharp_weights(
    mode: int,
    center: float,
    support: float,
    in_size: int,
    i: int,
    base: int,
    starts: Any,
    taps: Any,
    weights: Any,
    pitch: int,
) -> None:
    """Weights without antialiasing: pixels beyond an edge count for the pixel at the edge."""
    left = math.floor(center - 0.5) - int(support) + 1
    start = min(max(left, 0), in_size - 1)
    stop = min(left + 2 * int(support), in_size)
    starts[i], taps[i] = start, max(stop - start, 1)
    for k in range(taps[i]):
        weights[base + k] = 0
    for k in range(2 * int(support)):
        x = left + k
        weight = _filter(mode, x + 0.5 - center) * (1 << 22)
        slot = min(max(x, 0), in_size - 1) - start
        weights[base + slot] += int(weight - 0.5) if weight < 0 else int(weight + 0.5)


@_numba.njit(
    _t.UniTuple(_int, 2)(_int, _int, _int, _int, _int, _i32, _i32, _i32, _int, _flag),
    nogil=True,
    cache=True,
)  # type: ignore[untyped-decorator]
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
    stretch = max(scale, 1.0) if mode <= 4 else 1.0
    support = _SUPPORT[mode] * stretch
    low, high = in_size, 0
    walked = 0.5 * scale  # Pillow walks to the nearest pixel in steps, with their rounding
    for _ in range(first if mode == 5 else 0):
        walked += scale
    for i in range(count):
        center = (first + i + 0.5) * scale
        base = i * pitch
        if mode == 5 or mode == 6:
            position = walked if mode == 5 else (first + i) * scale
            starts[i], taps[i], weights[base] = min(int(position), in_size - 1), 1, 1 << 22
            walked += scale
        elif mode >= 7:
            _sharp_weights(mode, center, support, in_size, i, base, starts, taps, weights, pitch)
        else:
            start = max(int(center - support + 0.5), 0)
            stop = min(int(center + support + 0.5), in_size)
            starts[i], taps[i] = start, stop - start
            total = 0.0
            for k in range(stop - start):
                total += _filter(mode, (k + start - center + 0.5) * (1.0 / stretch))
            for k in range(stop - start):
                weight = _filter(mode, (k + start - center + 0.5) * (1.0 / stretch))
                weight = (weight / total if total != 0.0 else weight) * (1 << 22)
                weights[base + k] = int(weight - 0.5) if weight < 0 else int(weight + 0.5)
        if mirrored:
            starts[i] = in_size - starts[i] - taps[i]
            for k in range(taps[i] // 2):
                other = base + taps[i] - 1 - k
                weights[base + k], weights[other] = weights[other], weights[base + k]
        low = min(low, starts[i])
        high = max(high, starts[i] + taps[i])
    return low, high

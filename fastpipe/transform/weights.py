"""Which input pixels make an output pixel, and how much each counts, along one axis.

The filters and the arithmetic are those of Pillow's ``Resample.c`` (double precision, then
22-bit fixed point), and of torch's ``interpolate`` on bytes (16-bit fixed point).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = [
    "BICUBIC",
    "BILINEAR",
    "BOX",
    "HAMMING",
    "LANCZOS",
    "NARROW",
    "NEAREST",
    "NEAREST_FLOOR",
    "SHARP_BICUBIC",
    "SHARP_BILINEAR",
    "TORCH_BICUBIC",
    "TORCH_BILINEAR",
    "axis_table",
    "axis_weights",
    "span",
]

# A flag: weights of 16 bits, as torch and Pillow-SIMD have them, instead of Pillow's 22.
NARROW = 16
# Pillow's filters, which widen when they shrink an image (antialiasing) …
BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = 0, 1, 2, 3, 4
# … which torch has as well …
TORCH_BILINEAR, TORCH_BICUBIC = BILINEAR | NARROW, BICUBIC | NARROW
# … the nearest pixel: to the centre (Pillow, NEAREST_EXACT) or rounded down (torch's "nearest") …
NEAREST, NEAREST_FLOOR = 5, 6
# … and torch's filters without antialiasing, which do not widen and repeat the edge.
SHARP_BILINEAR, SHARP_BICUBIC = 7 | NARROW, 8 | NARROW

_SUPPORT = (0.5, 1.0, 1.0, 2.0, 3.0, 0.5, 0.5, 1.0, 2.0)

_t = require("numba.types", extra="image")

_i32, _int, _flag = _t.int32[::1], _t.int64, _t.boolean


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
    if mode == 1 or mode == 7:  # triangle
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
def _is_sharp(mode: int) -> bool:
    """Whether the filter keeps its width when it shrinks an image."""
    return mode == 7 or mode == 8


@compiled()
def _stretch(mode: int, scale: float) -> float:
    return 1.0 if _is_sharp(mode) else max(scale, 1.0)


@compiled()
def _inputs(mode: int, center: float, stretch: float, in_size: int) -> tuple[int, int]:
    """The input pixels under a filter: the first, and past the last."""
    if _is_sharp(mode):
        left = _sharp_left(mode, center)
        start = min(max(left, 0), in_size - 1)
        return start, max(min(left + 2 * int(_SUPPORT[mode]), in_size), start + 1)
    support = _SUPPORT[mode] * stretch
    return max(int(center - support + 0.5), 0), min(int(center + support + 0.5), in_size)


@compiled()
def _sharp_left(mode: int, center: float) -> int:
    """The first pixel under a filter, which may lie before the edge."""
    return int(math.floor(center - 0.5)) - int(_SUPPORT[mode]) + 1  # noqa: RUF046 - a float in numba


@compiled()
def _taps(mode: int, center: float, stretch: float, in_size: int, exact: Any) -> tuple[int, int]:
    """Weights of one output pixel: the first input, and how many there are."""
    start, stop = _inputs(mode, center, stretch, in_size)
    count = stop - start
    if _is_sharp(mode):  # pixels beyond an edge count for the pixel at the edge
        exact[:count] = 0.0
        left = _sharp_left(mode, center)
        for x in range(left, left + 2 * int(_SUPPORT[mode])):
            exact[min(max(x, 0), in_size - 1) - start] += _filter(mode, x + 0.5 - center)
        return start, count
    total = 0.0
    for k in range(count):
        exact[k] = _filter(mode, (k + start - center + 0.5) * (1.0 / stretch))
        total += exact[k]
    for k in range(count if total != 0.0 else 0):  # they sum to 1
        exact[k] /= total
    return start, count


@compiled()
def _fraction_bits(
    mode: int, narrow: bool, start: float, scale: float, stretch: float, in_size: int, out_size: int,
    exact: Any,
) -> int:  # fmt: skip
    """Bits of the fixed-point weights: 22, or as many as keep the largest weight of the whole axis
    within 16 bits."""
    if not narrow:
        return 22
    largest = 0.0
    for i in range(out_size):
        _, count = _taps(mode, start + (i + 0.5) * scale, stretch, in_size, exact)
        for k in range(count):
            largest = max(largest, exact[k])
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < (1 << 15):
        bits += 1
    return bits


@compiled()
def _nearest(mode: int, in_size: int, scale: float, i: int, walked: float) -> int:
    """Pillow walks to the nearest pixel in steps of the scale, with their rounding."""
    return min(int(walked if mode == 5 else i * scale), in_size - 1)


# So short that letting go of the GIL would cost more than it gives.
@compiled(_t.UniTuple(_int, 3)(_int, _int, _int, _int, _int, _int, _int, _flag), nogil=False)
def span(
    mode: int, in_size: int, start8: int, extent8: int, out_size: int, first: int, count: int, mirrored: bool
) -> tuple[int, int, int]:
    """What a part of the output reads along one axis.

    Args:
        mode, in_size, start8, extent8, out_size, first, count, mirrored: as in ``axis_weights``.

    Returns:
        The range of input pixels as (first, past the last), and the ``pitch`` of their weights.

    >>> span(BILINEAR, 340, 0, 340 * 8, 224, 0, 224, False)
    (0, 340, 5)
    """
    mode &= 15
    start, scale = start8 / 8.0, extent8 / 8.0 / out_size
    stretch = _stretch(mode, scale)
    last = first + count - 1
    if mode == 5 or mode == 6:
        walked = 0.5 * scale
        for _ in range(first):
            walked += scale
        low = _nearest(mode, in_size, scale, first, walked)
        for _ in range(count - 1):
            walked += scale
        high = _nearest(mode, in_size, scale, last, walked) + 1
    else:
        low, _ = _inputs(mode, start + (first + 0.5) * scale, stretch, in_size)
        _, high = _inputs(mode, start + (last + 0.5) * scale, stretch, in_size)
    pitch = int(math.ceil(_SUPPORT[mode] * stretch)) * 2 + 1  # noqa: RUF046 - a float in numba
    return (in_size - high, in_size - low, pitch) if mirrored else (low, high, pitch)


@compiled()
def axis_weights(
    mode: int,
    in_size: int,
    start8: int,
    extent8: int,
    out_size: int,
    first: int,
    count: int,
    starts: Any,
    taps: Any,
    weights: Any,
    pitch: int,
    mirrored: bool,
) -> None:
    """Weights of one axis, for output pixels ``first … first + count - 1`` of ``out_size``.

    Args:
        mode: one of this module's constants.
        in_size, out_size: pixels along the axis before and after.
        start8, extent8: the part of the input that becomes the output, in eighths of a pixel; 0 and
            ``8 * in_size`` for all of it.  (The nearest pixel is always one of all.)
        first, count: the part of the output that is wanted.
        starts, taps: int32 (count,): each output's first input pixel and number of inputs.
        weights: int32 (count * pitch,): fixed-point weights, scaled by 2**22.
        pitch: weights kept for each output; see ``span``.
        mirrored: the weights for resampling the mirrored input, on the input as it is.
    """
    narrow, mode = mode >= NARROW, mode & 15
    start, scale = start8 / 8.0, extent8 / 8.0 / out_size
    stretch = _stretch(mode, scale)
    exact = np.empty(pitch)
    bits = _fraction_bits(mode, narrow, start, scale, stretch, in_size, out_size, exact)
    walked = 0.5 * scale
    for _ in range(first if mode == 5 else 0):
        walked += scale
    for i in range(count):
        base = i * pitch
        if mode == 5 or mode == 6:
            starts[i] = _nearest(mode, in_size, scale, first + i, walked)
            taps[i], weights[base] = 1, 1 << 22
            walked += scale
        else:
            starts[i], taps[i] = _taps(mode, start + (first + i + 0.5) * scale, stretch, in_size, exact)
            for k in range(taps[i]):
                weight = exact[k] * (1 << bits)
                rounded = int(weight - 0.5) if weight < 0 else int(weight + 0.5)
                weights[base + k] = rounded << (22 - bits)
        if mirrored:
            starts[i] = in_size - starts[i] - taps[i]
            for k in range(taps[i] // 2):
                other = base + taps[i] - 1 - k
                weights[base + k], weights[other] = weights[other], weights[base + k]


@compiled(_t.void(_int, _int, _int, _int, _int, _int, _int, _int, _flag, _flag, _i32))
def axis_table(
    mode: int, in_size: int, start8: int, extent8: int, out_size: int, first: int, count: int, pitch: int,
    turned: bool, mirrored: bool, table: Any,
) -> None:  # fmt: skip
    """All that is needed to resample along an axis, in one piece of memory.

    Args:
        mode, in_size, start8, extent8, out_size, first, count, pitch: as of ``axis_weights``.
        turned: the weights for resampling the mirrored input, on the input as it is.
        mirrored: the outputs in the other direction.
        table: int32 (count * (pitch + 2),): the outputs' first inputs, numbers of inputs, and weights.
    """
    starts, taps, weights = table[:count], table[count : 2 * count], table[2 * count :]
    axis_weights(mode, in_size, start8, extent8, out_size, first, count, starts, taps, weights, pitch, turned)
    for i in range(count // 2 if mirrored else 0):
        j = count - 1 - i
        starts[i], starts[j] = starts[j], starts[i]
        taps[i], taps[j] = taps[j], taps[i]
        for k in range(pitch):
            one, other = i * pitch + k, j * pitch + k
            weights[one], weights[other] = weights[other], weights[one]


@compiled()  # when it is first called: only devices need it
def axis_tables(axes: Any, starts: Any, tables: Any) -> None:
    """The tables of several axes, one behind the other.

    Args:
        axes: int64 (A, 12): of each the filter, and the fields of a ``kernels.Axis``.
        starts: int64 (A,): where the table of each begins.
        tables: int32 (N,), which is written.
    """
    for number in range(len(axes)):
        mode, in_size, start8, extent8, out_size, first, count = axes[number, :7]
        pitch, turned, mirrored = axes[number, 11], axes[number, 7] != 0, axes[number, 8] != 0
        table = tables[starts[number] : starts[number] + count * (pitch + 2)]
        axis_table(mode, in_size, start8, extent8, out_size, first, count, pitch, turned, mirrored, table)

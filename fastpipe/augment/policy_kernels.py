"""The CPU kernels of ``RandAugment``'s own changes: planes of float32, (C, H · W), changed in place.

Bytes are worked on as floats, and rounded where torchvision rounds them.

Every function releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["autocontrast", "equalize", "posterize", "sharpen", "solarize"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_planes = _t.Array(_t.float32, 2, "C")
_one, _zero, _byte = np.float32(1), np.float32(0), np.float32(255)


@compiled(_t.void(_planes, _t.int64, _t.int64, _t.float32, _f32, _t.boolean), error_model="numpy")
def sharpen(planes: Any, height: Any, width: Any, factor: Any, scratch: Any, of_bytes: Any) -> None:
    """Blend each pixel but those of the border with the mean around it, in which it counts five times.

    Args:
        planes: (C, height · width).
        factor: 0 gives the mean, 1 the image, more is sharper.
        scratch: as long as a plane.
        of_bytes: whether the range is 0 … 255, of whole numbers.
    """
    if height <= 2 or width <= 2:
        return
    bound = _byte if of_bytes else _one
    part, own, rest = np.float32(1 / 13), np.float32(5 / 13), _one - factor
    for c in range(planes.shape[0]):
        plane = planes[c]
        scratch[:] = plane
        for row in range(1, height - 1):
            above, here, under = (row - 1) * width, row * width, (row + 1) * width
            for x in range(1, width - 1):
                mean = (scratch[above + x - 1] + scratch[above + x] + scratch[above + x + 1]) * part
                mean += (scratch[here + x - 1] + scratch[here + x + 1]) * part + scratch[here + x] * own
                mean += (scratch[under + x - 1] + scratch[under + x] + scratch[under + x + 1]) * part
                mean = np.float32(np.rint(mean)) if of_bytes else mean
                plane[here + x] = scratch[here + x] + (mean - scratch[here + x]) * rest
        for i in range(plane.shape[0]):
            value = min(max(plane[i], _zero), bound)
            plane[i] = np.floor(value) if of_bytes else value


@compiled(_t.void(_planes, _t.int64, _t.boolean), error_model="numpy")
def posterize(planes: Any, bits: Any, of_bytes: Any) -> None:
    """Keep the highest bits; of floats as many levels."""
    levels = np.float32(1 << bits)
    step = np.float32(1 << (8 - bits)) if of_bytes else _one / levels
    scale, top = _one / step if of_bytes else levels, _byte if of_bytes else levels - _one
    for c in range(planes.shape[0]):
        for i in range(planes.shape[1]):
            level = np.floor(planes[c, i] * scale)
            planes[c, i] = min(max(level, _zero), top) * step


@compiled(_t.void(_planes, _t.float32, _t.boolean), error_model="numpy")
def solarize(planes: Any, threshold: Any, of_bytes: Any) -> None:
    """Invert what is at least a threshold."""
    bound = _byte if of_bytes else _one
    for c in range(planes.shape[0]):
        for i in range(planes.shape[1]):
            value = planes[c, i]
            planes[c, i] = bound - value if value >= threshold else value


@compiled(_t.void(_planes, _t.boolean), error_model="numpy")
def autocontrast(planes: Any, of_bytes: Any) -> None:
    """Stretch each channel to the whole range."""
    bound = _byte if of_bytes else _one
    for c in range(planes.shape[0]):
        plane = planes[c]
        low, high = plane[0], plane[0]
        for i in range(plane.shape[0]):
            low, high = min(low, plane[i]), max(high, plane[i])
        if low == high:
            low, unit = _zero, _one
        else:
            unit = (high - low) * (_one / bound)
        for i in range(plane.shape[0]):
            value = min(max((plane[i] - low) / unit, _zero), bound)
            plane[i] = np.floor(value) if of_bytes else value


@compiled(_t.void(_planes, _t.boolean), error_model="numpy")
def equalize(planes: Any, of_bytes: Any) -> None:
    """Spread the values of each channel evenly over all bytes, as Pillow does; floats become bytes for it."""
    to_byte = np.float32(255.999)
    counts, table = np.zeros(256, np.int64), np.zeros(256, np.float32)
    for c in range(planes.shape[0]):
        plane = planes[c]
        counts[:] = 0
        for i in range(plane.shape[0]):
            value = plane[i] if of_bytes else np.floor(plane[i] * to_byte)
            value = value if value > _zero else _zero  # also of NaN, which is no index
            plane[i] = min(value, _byte)
            counts[int(plane[i])] += 1
        last = 255
        while counts[last] == 0:
            last -= 1
        step = (plane.shape[0] - counts[last]) // 255
        total = 0
        for value in range(256):
            table[value] = min((total + step // 2) // step, 255) if step else value
            total += counts[value]
        unit = _one if of_bytes else np.float32(1 / 255)
        for i in range(plane.shape[0]):
            plane[i] = table[int(plane[i])] * unit

"""The CPU kernel of noise that depends on a seed and on where a pixel is.

It releases the GIL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["fill"]

_t = require("numba.types", extra="image")
_planes = _t.Array(_t.float32, 2, "C")
_bits, _factor, _other = np.int64(0xFFFF_FFFF), np.int64(0x85EBCA6B), np.int64(0xC2B2AE35)
_unit, _turn = np.float32(2.0**-24), np.float32(2 * math.pi * 2.0**-24)


@compiled(_t.int64(_t.int64))
def _mixed(value: Any) -> Any:
    """The finaliser of MurmurHash3 (A. Appleby, 2011), of 32 bits in 64."""
    value = value ^ (value >> 16)
    value = (value * _factor) & _bits
    value = value ^ (value >> 13)
    value = (value * _other) & _bits
    return value ^ (value >> 16)


@compiled(_t.void(_planes, _t.int64, _t.int64, _t.int64, _t.int64, _t.int64, _t.int64), error_model="numpy")
def fill(planes: Any, width: Any, top: Any, left: Any, box_height: Any, box_width: Any, seed: Any) -> None:
    """Normal noise in a box of an image of this ``width``: by Box and Muller, of two numbers of 24 bits."""
    for c in range(planes.shape[0]):
        for row in range(top, top + box_height):
            for x in range(left, left + box_width):
                at = row * width + x
                mixed = _mixed(_mixed(c * planes.shape[1] + at) ^ seed)
                first, second = _mixed(mixed ^ 0x5851F42D), _mixed(mixed ^ 0x14057B7E)
                radius = np.sqrt(np.float32(-2) * np.log(np.float32((first >> 8) + 1) * _unit))
                planes[c, at] = radius * np.cos(np.float32(second >> 8) * _turn)

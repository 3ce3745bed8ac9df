"""A sum that several CPU kernels need.

It releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["mean"]

_t = require("numba.types", extra="image")
_f32 = _t.Array(_t.float32, 1, "C")
_BLOCK = 512


@compiled(_t.float32(_f32), fastmath={"reassoc"})
def _block_sum(values: Any) -> Any:
    total = np.float32(0)
    for i in range(values.shape[0]):
        total += values[i]
    return total


@compiled(_t.float32(_f32), error_model="numpy")
def mean(values: Any) -> Any:
    """The mean of numbers, in blocks, so that no sum is much larger than what is added to it."""
    total = 0.0
    for begin in range(0, values.shape[0], _BLOCK):
        total += _block_sum(values[begin : begin + _BLOCK])
    return np.float32(total / values.shape[0])

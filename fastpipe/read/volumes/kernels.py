"""Boxes copied from decoded units into a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["DIMS", "copy_box"]

_t = require("numba.types", extra="volume")
_int = _t.int64
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_inu64 = _t.Array(_t.uint64, 1, "C", readonly=True)
_memcpy = _t.ExternalFunction("memcpy", _t.voidptr(_t.uintp, _t.uintp, _t.uintp))

DIMS = 5  # dimensions of a box, of which those in front may have one element


@compiled(_t.void(_inu64, _in64, _in64, _in64, _in64, _in64, _int, _t.uint64, _in64))
def copy_box(
    units: Any, first: Any, counts: Any, unit: Any, start: Any, stop: Any, itemsize: int, to: Any, steps: Any
) -> None:
    """Copy a box of an array from the units that it touches.

    Args:
        units: uint64 (N,): where each begins in memory, in C order; 0 for those to be left out.
        first: int64 (5,): the place of the first of them in the grid of units.
        counts: int64 (5,): how many there are along each dimension.
        unit: int64 (5,): the shape of a unit, which is C-contiguous.
        start, stop: int64 (5,): where the box begins and ends in the array.
        itemsize: bytes of an element.
        to: where the box is to begin in memory.
        steps: int64 (5,): bytes there from one element to the next, along each dimension; the last one's
            is ``itemsize``.
    """
    low, high = np.empty(5, np.int64), np.empty(5, np.int64)
    for number in range(units.size):
        if units[number] == 0:
            continue
        left = number
        # What the box takes of this unit, in the unit's own coordinates, and where that goes.
        target = to
        for back in range(5):
            dim = 4 - back
            corner = (first[dim] + left % counts[dim]) * unit[dim]
            left //= counts[dim]
            low[dim] = max(start[dim] - corner, 0)
            high[dim] = min(stop[dim] - corner, unit[dim])
            target += np.uint64((corner + low[dim] - start[dim]) * steps[dim])
        nbytes = np.uint64((high[4] - low[4]) * itemsize)
        for a in range(low[0], high[0]):
            for b in range(low[1], high[1]):
                for c in range(low[2], high[2]):
                    plane = ((a * unit[1] + b) * unit[2] + c) * unit[3]
                    goal = (
                        target
                        + np.uint64((a - low[0]) * steps[0])
                        + np.uint64((b - low[1]) * steps[1])
                        + np.uint64((c - low[2]) * steps[2])
                    )
                    source = units[number] + np.uint64(((plane + low[3]) * unit[4] + low[4]) * itemsize)
                    for _ in range(low[3], high[3]):
                        _memcpy(goal, source, nbytes)
                        goal += np.uint64(steps[3])
                        source += np.uint64(unit[4] * itemsize)

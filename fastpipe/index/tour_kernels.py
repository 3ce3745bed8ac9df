"""Which units patches touch, and how many of these are decoded with a memory of a fixed size."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["decoded_units", "touched_units"]

_t = require("numba.types", extra="volume")
_int = _t.int64
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_table64 = _t.Array(_t.int64, 2, "C", readonly=True)


@compiled(_t.Tuple((_int[::1], _int[::1]))(_in64, _table64, _table64, _table64))
def touched_units(firsts: Any, lows: Any, counts: Any, steps: Any) -> Any:
    """The numbers of all units that patches touch.

    Args:
        firsts: int64 (N,): the number of the first unit of each patch's volume.
        lows: int64 (N, D): the place of the first unit that it touches, along each dimension.
        counts: int64 (N, D): how many it touches.
        steps: int64 (N, D): from the number of a unit to that of the next one.

    Returns:
        int64 (M,): the numbers, patch after patch; and int64 (N,): where each patch's end.
    """
    patches, dims = lows.shape
    ends = np.empty(patches, np.int64)
    total = 0
    for patch in range(patches):
        each = 1
        for dim in range(dims):
            each *= counts[patch, dim]
        total += each
        ends[patch] = total
    numbers = np.empty(total, np.int64)
    begin = 0
    for patch in range(patches):
        for place in range(ends[patch] - begin):
            left, number = place, firsts[patch]
            for back in range(dims):
                dim = dims - 1 - back
                number += (lows[patch, dim] + left % counts[patch, dim]) * steps[patch, dim]
                left //= counts[patch, dim]
            numbers[begin + place] = number
        begin = ends[patch]
    return numbers, ends


@compiled(_int(_in64, _in64, _in64, _int, _int))
def decoded_units(units: Any, ends: Any, visits: Any, held: int, most: int) -> Any:
    """How many units are decoded for patches that come one after the other.

    Those are forgotten first that no patch will touch again, and then those that were not used for the
    longest time.

    Args:
        units: int64 (M,): those that patches touch, from 0 to K - 1, patch after patch.
        ends: int64 (N,): where those of each patch end.
        visits: int64 (K,): how many patches, these among them, touch each unit.
        held: units for which there is memory.
        most: after a patch with which more are decoded it is enough.
    """
    # A ring of those that are remembered, from the one not used for the longest time on; -1 for others.
    nowhere, head = -1, visits.size
    older, newer = np.full(head + 1, nowhere), np.full(head + 1, nowhere)
    older[head] = newer[head] = head
    left = visits.copy()
    decoded, remembered, begin = 0, 0, 0
    for patch in range(ends.size):
        for place in range(begin, ends[patch]):
            unit = units[place]
            if newer[unit] == nowhere:
                decoded += 1
                remembered += 1
            else:
                older[newer[unit]], newer[older[unit]] = older[unit], newer[unit]
            last = older[head]
            older[unit], newer[unit], newer[last], older[head] = last, head, unit, unit
            left[unit] -= 1
            forgotten = nowhere
            if left[unit] <= 0:
                forgotten = unit
            elif remembered > held:
                forgotten = newer[head]
            if forgotten != nowhere:
                older[newer[forgotten]], newer[older[forgotten]] = older[forgotten], newer[forgotten]
                newer[forgotten] = nowhere
                remembered -= 1
        begin = ends[patch]
        if decoded > most:
            break
    return decoded

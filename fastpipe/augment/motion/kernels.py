"""The CPU kernel of motion: all that is done to sequences in one pass over them.

It releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["change"]

_t = require("numba.types", extra="image")
_batch = _t.Array(_t.float32, 4, "C")
_given = _t.Array(_t.float32, 4, "C", readonly=True)
_table = _t.Array(_t.float64, 2, "C", readonly=True)
_places = _t.Array(_t.int64, 2, "C", readonly=True)
_f64s = _t.Array(_t.float64, 1, "C", readonly=True)
_frame, _order = _t.Array(_t.float32, 1, "C"), _t.Array(_t.int64, 1, "C", readonly=True)
_lengths = _t.Array(_t.int64, 1, "C", readonly=True)
_one, _zero = np.float32(1), np.float32(0)


@compiled(_t.void(_frame, _order, _t.int64, _frame))
def _arrange(row: Any, order: Any, coordinates: Any, out: Any) -> None:
    """Put the joints of a frame in another order."""
    if coordinates == 3:
        for j in range(len(order)):
            taken = 3 * order[j]
            out[3 * j], out[3 * j + 1], out[3 * j + 2] = row[taken], row[taken + 1], row[taken + 2]
    else:
        for j in range(len(order)):
            for c in range(coordinates):
                out[j * coordinates + c] = row[order[j] * coordinates + c]


@compiled(
    _t.void(
        _given, _batch, _f64s, _table, _table, _places, _lengths, _lengths, _t.boolean, _t.int64, _t.int64
    ),
    error_model="numpy", fastmath={"contract"},
)  # fmt: skip
def change(
    source: Any, out: Any, speeds: Any, scales: Any, shifts: Any, order: Any, lengths: Any, new_lengths: Any,
    holds: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Play sequences at another speed, and map their frames.

    Args:
        source: (N, T, J, C).
        out: the same; becomes the new sequences.
        speeds: (N,): how many frames each new one is after the one before; between two it is their mean.
        scales, shifts: (N, C): what coordinates are multiplied by, and what is added.
        order: (N, J): the joint that each one becomes, before that.
        lengths, new_lengths: (N,), in frames, before and afterwards.
        holds: all frames are motion, and the last one stays until the end; else frames from a sequence's
            length on are left as they are, and those from its new one on are zeros.
        first, last: which sequences.
    """
    count, frames, joints, coordinates = source.shape
    width = joints * coordinates
    given, made = source.reshape(count, frames, width), out.reshape(count, frames, width)
    row, scale, shift = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for n in range(first, last):
        speed, length, new_length = speeds[n], lengths[n], new_lengths[n]
        is_played, is_moved = speed != 1.0, False
        for j in range(joints):
            is_moved = is_moved or order[n, j] != j
            for c in range(coordinates):
                scale[j * coordinates + c] = np.float32(scales[n, c])
                shift[j * coordinates + c] = np.float32(shifts[n, c])
        for t in range(new_length):
            place = t * speed
            at = min(int(place), length - 1)
            part = np.float32(place - at)
            # Of what has no part in a frame NaN is none of its.
            rest, after = _one - part, min(at + 1, length - 1) if part > 0 else at
            goal = row if is_moved else made[n, t]
            if is_played:
                for k in range(width):
                    goal[k] = (rest * given[n, at, k] + part * given[n, after, k]) * scale[k] + shift[k]
            else:
                for k in range(width):
                    goal[k] = given[n, t, k] * scale[k] + shift[k]
            if is_moved:
                _arrange(row, order[n], coordinates, made[n, t])
        for t in range(new_length, frames):
            for k in range(width):
                if not is_played:
                    made[n, t, k] = given[n, t, k]
                else:
                    made[n, t, k] = made[n, new_length - 1, k] if holds else _zero

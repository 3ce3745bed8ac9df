"""The CPU kernels of motion: batches of float32, (N, T, J, C), changed in place.

A sequence is so small that calls for each one would take longer than the work.

Every function releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = ["mirror", "move", "resample", "scale"]

_t = require("numba.types", extra="image")
_batch = _t.Array(_t.float32, 4, "C")
_table = _t.Array(_t.float64, 2, "C", readonly=True)
_lengths = _t.Array(_t.int64, 1, "C")
_joints = _t.Array(_t.int64, 1, "C", readonly=True)
_one = np.float32(1)


@compiled(_t.void(_batch, _table, _lengths, _t.boolean), error_model="numpy")
def resample(batch: Any, speeds: Any, lengths: Any, holds: Any) -> None:
    """Play sequences faster or slower: frames between two are their weighted mean.

    Args:
        speeds: (N, 1): how many frames each new one is after the one before.
        lengths: of sequences, at least 1; become those afterwards.
        holds: the last frame stays until the end, and lengths as they are; else there are zeros.
    """
    count, frames, joints, coordinates = batch.shape
    width = joints * coordinates
    flat = batch.reshape(count, frames, width)
    kept = np.empty((frames, width), np.float32)
    for n in range(count):
        speed, length = speeds[n, 0], lengths[n]
        if speed == 1.0:
            continue
        for t in range(length):
            for at in range(width):
                kept[t, at] = flat[n, t, at]
        new_length = min(frames, int((length - 1) / speed) + 1)
        for t in range(new_length):
            place = t * speed
            first = min(int(place), length - 1)
            second, part = min(first + 1, length - 1), np.float32(place - first)
            rest = _one - part
            for at in range(width):
                flat[n, t, at] = rest * kept[first, at] + part * kept[second, at]
        for t in range(new_length, frames):
            for at in range(width):
                flat[n, t, at] = flat[n, new_length - 1, at] if holds else np.float32(0)
        if not holds:
            lengths[n] = new_length


@compiled(_t.void(_batch, _table, _lengths), error_model="numpy")
def move(batch: Any, shifts: Any, lengths: Any) -> None:
    """Add to the coordinates of all joints: ``shifts`` has at least C columns."""
    count, _, joints, coordinates = batch.shape
    for n in range(count):
        for t in range(lengths[n]):
            for j in range(joints):
                for c in range(coordinates):
                    batch[n, t, j, c] += np.float32(shifts[n, c])


@compiled(_t.void(_batch, _table, _lengths, _t.int64), error_model="numpy")
def scale(batch: Any, factors: Any, lengths: Any, about: Any) -> None:
    """Multiply coordinates, as they are seen from a joint's place in the first frame; of joint -1, from 0."""
    count, _, joints, coordinates = batch.shape
    centre = np.zeros(coordinates, np.float32)
    for n in range(count):
        factor = np.float32(factors[n, 0])
        if about >= 0:
            for c in range(coordinates):
                centre[c] = batch[n, 0, about, c]
        for t in range(lengths[n]):
            for j in range(joints):
                for c in range(coordinates):
                    batch[n, t, j, c] = (batch[n, t, j, c] - centre[c]) * factor + centre[c]


@compiled(_t.void(_batch, _table, _lengths, _joints, _t.int64, _t.float32), error_model="numpy")
def mirror(batch: Any, flags: Any, lengths: Any, order: Any, axis: Any, about: Any) -> None:
    """Mirror some sequences.

    Args:
        flags: (N, 1): which.
        order: (J,): the joint that each one becomes.
        axis: the coordinate that changes its sign.
        about: where the mirror is.
    """
    count, _, joints, coordinates = batch.shape
    kept = np.empty((joints, coordinates), np.float32)
    twice = np.float32(2) * about
    for n in range(count):
        if flags[n, 0] == 0:
            continue
        for t in range(lengths[n]):
            for j in range(joints):
                for c in range(coordinates):
                    kept[j, c] = batch[n, t, j, c]
            for j in range(joints):
                for c in range(coordinates):
                    value = kept[order[j], c]
                    batch[n, t, j, c] = twice - value if c == axis else value

"""Rotations of volumes."""

from __future__ import annotations

import numpy as np

from fastpipe.augment.parameters import Float64Array

__all__ = ["rotations"]


def rotations(degrees: Float64Array) -> Float64Array:
    """Matrices that rotate about the axis of depth, then of height, then of width.

    Args:
        degrees: (N, 3).

    Returns:
        (N, 3, 3), for places (depth, height, width).

    >>> rotations(np.array([[90.0, 0.0, 0.0]])).round(6)[0] @ [0, 1, 0]
    array([0., 0., 1.])
    """
    found = np.broadcast_to(np.eye(3), (len(degrees), 3, 3))
    for axis in range(3):
        radians = np.deg2rad(degrees[:, axis])
        turn = np.zeros((len(degrees), 3, 3))
        turn[:, axis, axis] = 1.0
        # Each is a rotation from the axis that comes next to the one after: of depth 1 → 2, of height 2 → 0.
        first, second = (axis + 1) % 3, (axis + 2) % 3
        turn[:, first, first] = turn[:, second, second] = np.cos(radians)
        turn[:, second, first] = np.sin(radians)
        turn[:, first, second] = -np.sin(radians)
        found = turn @ found
    return found

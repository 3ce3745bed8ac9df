"""Rotations of volumes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastpipe.augment.parameters import Float64Array

__all__ = ["covering", "rotations"]


def rotations(degrees: Float64Array) -> Float64Array:
    """Matrices that rotate about the axis of depth, then of height, then of width.

    Args:
        degrees: (N, 3).

    Returns:
        (N, 3, 3), for places (depth, height, width).

    >>> rotations(np.array([[90.0, 0.0, 0.0]])).round(6)[0] @ [0, 1, 0]
    array([0., 0., 1.])
    """
    radians = np.deg2rad(degrees).T
    cosines, sines = np.cos(radians), np.sin(radians)
    turns = np.zeros((3, len(degrees), 3, 3))
    for axis, turn in enumerate(turns):
        turn[:, axis, axis] = 1.0
        # Each is a rotation from the axis that comes next to the one after: of depth 1 → 2, of height 2 → 0.
        first, second = (axis + 1) % 3, (axis + 2) % 3
        turn[:, first, first] = turn[:, second, second] = cosines[axis]
        turn[:, second, first] = sines[axis]
        turn[:, first, second] = -sines[axis]
    found: Float64Array = turns[2] @ (turns[1] @ turns[0])
    return found


def covering(size: Float64Array, degrees: Sequence[tuple[float, float]]) -> Float64Array:
    """The size of a box that covers another of a size, (3,), which is turned about one of its axes.

    Args:
        size: depth, height and width, in one unit.
        degrees: least and greatest angle about each axis; other axes are not turned meanwhile.

    >>> covering(np.array([2.0, 10.0, 10.0]), [(-45, 45), (0, 0), (0, 0)]).round(2)
    array([ 2.  , 14.14, 14.14])
    """
    found = size.astype(np.float64)
    for axis, limits in enumerate(degrees):
        most = np.deg2rad(min(90.0, max(map(abs, limits))))
        plane = [(axis + 1) % 3, (axis + 2) % 3]
        for own, other in (plane, plane[::-1]):
            angle = min(most, np.arctan2(size[other], size[own]))  # beyond, it covers less again
            found[own] = max(found[own], size[own] * np.cos(angle) + size[other] * np.sin(angle))
    return found

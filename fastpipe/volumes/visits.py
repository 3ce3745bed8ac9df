"""How often the patches of an epoch touch each unit of a volume."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["unit_visits"]

Int64Array = npt.NDArray[np.int64]


def unit_visits(
    shape: Sequence[int], unit: Sequence[int], patch: Sequence[int], starts: Int64Array
) -> npt.NDArray[np.int32]:
    """For each unit of a volume the number of patches that touch it: int32, of the grid's shape.

    Args:
        shape: of the volume, along the D dimensions that patches are cut along.
        unit: of a unit.
        patch: of a patch.
        starts: int64 (N, D): where patches begin, perhaps outside of the volume.

    >>> unit_visits((6,), (2,), (3,), np.array([[0], [3]]))
    array([1, 2, 1], dtype=int32)
    """
    sizes, sides = np.array(shape, np.int64), np.array(unit, np.int64)
    lows = np.maximum(starts, 0) // sides
    highs = (np.minimum(starts + np.array(patch, np.int64), sizes) - 1) // sides + 1
    counts = -(-sizes // sides)
    # One more where a patch begins and one less behind its end, along each dimension; summed up that is it.
    steps = np.zeros(counts + 1, np.int32)
    for corner in itertools.product((False, True), repeat=len(counts)):
        at = np.where(np.array(corner), highs, lows)
        np.add.at(steps, tuple(at.T), -1 if sum(corner) % 2 else 1)
    for dim in range(steps.ndim):
        steps = np.cumsum(steps, axis=dim, dtype=np.int32)
    inside: npt.NDArray[np.int32] = steps[tuple(slice(int(count)) for count in counts)]
    return inside

"""Which units of an array a box touches.

A *unit* is what is decoded, and remembered, at once: a chunk, or as little of one as can be decoded alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Touched", "UnitGrid"]

Int64Array = npt.NDArray[np.int64]


class Touched(NamedTuple):
    """The units that a box touches.

    Attributes:
        numbers: int64 (N,): of the units, in C order.
        first: int64 (D,): the place in the grid of the first.
        counts: int64 (D,): how many along each dimension; N is their product.
    """

    numbers: Int64Array
    first: Int64Array
    counts: Int64Array


class UnitGrid:
    """An array cut into units of one shape; those at its ends reach beyond it.

    Args:
        shape: of the array.
        unit: of a unit.

    Attributes:
        shape, unit: as given.
        counts: units along each dimension.
        count: of all.

    >>> grid = UnitGrid((10, 10), (4, 8))
    >>> grid.touched([3, 0], [5, 4]).numbers
    array([0, 2])
    """

    def __init__(self, shape: Sequence[int], unit: Sequence[int]) -> None:
        self.shape, self.unit = tuple(map(int, shape)), tuple(map(int, unit))
        self.counts = tuple(-(-size // side) for size, side in zip(self.shape, self.unit, strict=True))
        self.count = math.prod(self.counts)
        self._unit = np.array(self.unit, np.int64)
        steps = [math.prod(self.counts[dim + 1 :]) for dim in range(len(self.counts))]
        self._steps = np.array(steps, np.int64)

    def touched(self, start: Sequence[int] | Int64Array, stop: Sequence[int] | Int64Array) -> Touched:
        """The units that a box touches.

        Args:
            start, stop: integers (D,): where it begins and ends, within the array and not empty.
        """
        first = np.asarray(start, np.int64) // self._unit
        counts = (np.asarray(stop, np.int64) - 1) // self._unit - first + 1
        numbers = np.zeros(1, np.int64)
        for low, count, step in zip(first.tolist(), counts.tolist(), self._steps.tolist(), strict=True):
            numbers = np.add.outer(numbers, np.arange(low, low + count) * step).ravel()
        return Touched(numbers, first, counts)

    def touched_by_each(
        self, starts: Int64Array, stops: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """The units that each of several boxes touches.

        Args:
            starts, stops: int64 (N, D): where they begin and end, within the array and not empty.

        Returns:
            int64 (N, K), their numbers; and bool (N, K), which of these there are.

        >>> starts, stops = np.array([[0], [2]]), np.array([[1], [9]])
        >>> numbers, are_there = UnitGrid((10,), (4,)).touched_by_each(starts, stops)
        >>> numbers[0][are_there[0]], numbers[1][are_there[1]]
        (array([0]), array([0, 1, 2]))
        """
        first, last = starts // self._unit, (stops - 1) // self._unit
        most = (last - first).max(axis=0, initial=0) + 1
        numbers = np.zeros((len(starts), 1), np.int64)
        are_there = np.ones((len(starts), 1), np.bool_)
        for dim, step in enumerate(self._steps.tolist()):
            at = first[:, dim, None] + np.arange(most[dim])
            shape = len(starts), numbers.shape[1] * at.shape[1]
            numbers = (numbers[:, :, None] + at[:, None, :] * step).reshape(shape)
            inside = at <= last[:, dim, None]
            are_there = (are_there[:, :, None] & inside[:, None, :]).reshape(shape)
        return numbers, are_there

    def place(self, number: int) -> tuple[int, ...]:
        """Where a unit is in the grid."""
        return tuple(int(at) for at in np.unravel_index(number, self.counts))

    def box(self, number: int) -> tuple[slice, ...]:
        """The part of the array that a unit is, as far as it is in the array."""
        return tuple(
            slice(at * side, min((at + 1) * side, size))
            for at, side, size in zip(self.place(number), self.unit, self.shape, strict=True)
        )

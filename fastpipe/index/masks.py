"""How much of a patch is in a mask, from counts of blocks of voxels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BlockCounts", "MaskDensity", "block_sides"]

Int64Array = npt.NDArray[np.int64]

_MOST_BLOCKS = 1 << 22
_LEAST_SIDE = 4


def block_sides(shape: Sequence[int]) -> list[int]:
    """The sides of blocks: as small as there may be so many of them."""
    side = _LEAST_SIDE
    while math.prod(-(-size // side) for size in shape) > _MOST_BLOCKS:
        side *= 2
    return [min(side, max(1, size)) for size in shape]


class BlockCounts:
    """Counts the voxels of a mask that are not 0, block by block.  Parts may come in any order.

    Args:
        shape: of the mask.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.sides = tuple(shape), block_sides(shape)
        blocks = [-(-size // side) for size, side in zip(self.shape, self.sides, strict=True)]
        self.counts = np.zeros(blocks, np.int64)

    def add(self, part: npt.NDArray[Any], start: Sequence[int]) -> None:
        """Count a part.

        Args:
            part: of the mask.
            start: where it begins in the mask.
        """
        sums = (part != 0).astype(np.int64)
        box = []
        for dim, (first, side) in enumerate(zip(start, self.sides, strict=True)):
            last = first + part.shape[dim]
            cuts = np.arange(first // side * side, last, side) - first
            cuts[0] = 0
            sums = np.add.reduceat(sums, cuts, axis=dim)
            box.append(slice(first // side, first // side + len(cuts)))
        self.counts[tuple(box)] += sums


class MaskDensity:
    """The part of boxes that is in a mask, where blocks at the surface count by the share that is inside.

    Args:
        counts: int64, of the voxels of each block that are not 0.
        sides: of the blocks, of which the last may be cut off.
        shape: of the mask.
    """

    def __init__(self, counts: Int64Array, sides: Sequence[int], shape: Sequence[int]) -> None:
        self._sides, self._shape = np.array(sides, np.int64), np.array(shape, np.int64)
        sums = counts.astype(np.float64)
        for dim in range(sums.ndim):
            sums = np.cumsum(sums, axis=dim)
        # Of all blocks before a corner.
        self._sums = np.pad(sums, [(1, 0)] * sums.ndim)

    def fractions(self, starts: Int64Array, patch: Int64Array) -> npt.NDArray[np.float64]:
        """The part of boxes that is in the mask: float64 (N,).

        Args:
            starts: int64 (N, D): where they begin, perhaps outside of the mask.
            patch: int64 (D,): their size.
        """
        total = np.zeros(len(starts))
        for corner in itertools.product((0, 1), repeat=len(patch)):
            at = np.clip(starts + np.array(corner, np.int64) * patch, 0, self._shape)
            sign = -1.0 if (len(patch) - sum(corner)) % 2 else 1.0
            total += sign * self._before(at)
        return np.clip(total / float(np.prod(patch.astype(np.float64))), 0.0, 1.0)

    def _before(self, at: Int64Array) -> npt.NDArray[np.float64]:
        """The voxels before corners, between those of blocks in proportion to each side."""
        low = np.minimum(at // self._sides, np.array(self._sums.shape) - 2)
        begins = low * self._sides
        part = (at - begins) / np.minimum(self._sides, self._shape - begins)
        found = np.zeros(len(at))
        for corner in itertools.product((0, 1), repeat=at.shape[1]):
            weight = np.ones(len(at))
            for dim, side in enumerate(corner):
                weight *= part[:, dim] if side else 1.0 - part[:, dim]
            found += weight * self._sums[tuple((low + np.array(corner)).T)]
        return found

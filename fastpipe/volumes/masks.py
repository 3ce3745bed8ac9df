"""Patches of which enough is in a mask, by counts of blocks of voxels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places

__all__ = ["BlockCounts", "MaskDensity", "MaskedPatches", "PatchCells", "block_sides"]

Int64Array = npt.NDArray[np.int64]
# (number, seed, epoch, indices, count) to numbers in [0, 1): float64 (N, count); others for each number.
Draws = Callable[[int, int, int, Int64Array, int], npt.NDArray[np.float64]]

_MOST_BLOCKS = 1 << 22
_MOST_SIDE = 4  # where there may be so many blocks
_MOST_CELLS, _CELLS_AT_ONCE = 1 << 18, 1 << 14
_TRIED, _ROUNDS = 4096, 4  # patches that are tried when a dataset is made
_DRAWS, _AT_ONCE = 4, 16  # rounds of attempts to find a patch, and how many each has


def _doubled(sides: Sequence[int], shape: Sequence[int], patch: Sequence[int], most: int) -> list[int]:
    """Sides of boxes, doubled until there are not too many: first where a patch has most of them."""
    found = list(sides)
    while math.prod(-(-size // side) for size, side in zip(shape, found, strict=True)) > most:
        dims = [dim for dim, size in enumerate(shape) if found[dim] < size]
        found[max(dims, key=lambda dim: patch[dim] / found[dim])] *= 2
    return [min(side, max(1, size)) for side, size in zip(found, shape, strict=True)]


def block_sides(shape: Sequence[int], patch: Sequence[int]) -> list[int]:
    """The sides of blocks: a quarter of a patch's, and at most 4, or as small as there may be so many.

    Args:
        shape: of the mask.
        patch: of the patches.
    """
    return _doubled([min(_MOST_SIDE, max(1, side // 4)) for side in patch], shape, patch, _MOST_BLOCKS)


class BlockCounts:
    """Counts the voxels of a mask that are not 0, block by block.  Parts may come in any order.

    Args:
        shape: of the mask.
        patch: of the patches.

    Attributes:
        shape: as given.
        sides: of the blocks, of which the last may be cut off.
        counts: int64, of the voxels of each block that are not 0.
    """

    def __init__(self, shape: Sequence[int], patch: Sequence[int]) -> None:
        self.shape, self.sides = tuple(shape), block_sides(shape, patch)
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
    """How much of boxes is in a mask: what is known of it by the counts of blocks.

    A box has all of the blocks within it, and of blocks that are all in the mask the part within it.  Of
    other blocks at its surface it is not known which of their voxels are in the box.

    Args:
        counts: int64, of the voxels of each block that are not 0.
        sides: of the blocks, of which the last may be cut off.
        shape: of the mask.
    """

    def __init__(self, counts: Int64Array, sides: Sequence[int], shape: Sequence[int]) -> None:
        self._sides, self._shape = np.array(sides, np.int64), np.array(shape, np.int64)
        self._blocks = np.array(counts.shape, np.int64)
        sizes = np.ones((), np.int64)
        for side, size in zip(sides, shape, strict=True):
            sizes = np.multiply.outer(sizes, np.diff(np.append(np.arange(0, size, side), size)))
        is_full = counts == sizes
        self._full, self._others = _summed(counts, is_full), _summed(counts, ~is_full)

    def fractions(self, starts: Int64Array, patch: Int64Array) -> npt.NDArray[np.float64]:
        """The part of boxes that is in the mask at least: float64 (N,).

        Args:
            starts: int64 (N, D): where they begin, perhaps outside of the mask.
            patch: int64 (D,): their size.
        """
        ends = np.clip(starts + patch, 0, self._shape)
        starts = np.clip(starts, 0, self._shape)
        lows = -(-starts // self._sides)
        highs = np.where(ends == self._shape, self._blocks, ends // self._sides)
        voxels = self._voxels(starts, ends, lows, np.maximum(lows, highs))
        return np.asarray(voxels / math.prod(patch.tolist()), np.float64)

    def most(self, starts: Int64Array, size: Int64Array) -> npt.NDArray[np.float64]:
        """The most voxels of boxes that can be in the mask: float64 (N,).

        Args:
            starts: int64 (N, D): where they begin, perhaps outside of the mask.
            size: int64 (D,): theirs.
        """
        ends = np.clip(starts + size, 0, self._shape)
        starts = np.clip(starts, 0, self._shape)
        lows, highs = starts // self._sides, -(-ends // self._sides)
        return self._voxels(starts, ends, np.minimum(lows, highs), highs)

    def _voxels(
        self, starts: Int64Array, ends: Int64Array, lows: Int64Array, highs: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Voxels of full blocks within boxes, and all of other blocks from ``lows`` to ``highs``."""
        total = np.zeros(len(starts))
        for corner in itertools.product((False, True), repeat=starts.shape[1]):
            is_end = np.array(corner)
            sign = -1.0 if (len(corner) - sum(corner)) % 2 else 1.0
            others = self._others[tuple(np.where(is_end, highs, lows).T)]
            total += sign * (others + self._full_before(np.where(is_end, ends, starts)))
        counts: npt.NDArray[np.float64] = np.rint(total)  # they are integers
        return counts

    def _full_before(self, at: Int64Array) -> npt.NDArray[np.float64]:
        """The voxels of full blocks before corners: those of a block in proportion to each side."""
        low = np.minimum(at // self._sides, self._blocks - 1)
        begins = low * self._sides
        part = (at - begins) / np.minimum(self._sides, self._shape - begins)
        found = np.zeros(len(at))
        for corner in itertools.product((0, 1), repeat=at.shape[1]):
            weight = np.ones(len(at))
            for dim, side in enumerate(corner):
                weight *= part[:, dim] if side else 1.0 - part[:, dim]
            found += weight * self._full[tuple((low + np.array(corner)).T)]
        return found


def _summed(counts: Int64Array, where: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Of some blocks, the sums of all before each corner."""
    total = int(counts.sum())
    sums = np.where(where, counts, 0).astype(np.int32 if total <= np.iinfo(np.int32).max else np.int64)
    for dim in range(sums.ndim):
        sums = np.cumsum(sums, axis=dim, dtype=sums.dtype)
    return np.pad(sums, [(1, 0)] * sums.ndim)


class PatchCells:
    """Draws patches near to a mask: each place that can have enough of it is as likely as any other.

    Places are looked at in cells, boxes of them; cells of which no place can have enough are left out.

    Args:
        space: where patches can be.
        by_size: whether volumes are taken by the number of their places, and not as often as each other.
        least: the part of a patch that is to be in the mask.
        densities: of the volumes' masks.

    Attributes:
        count: of cells; if there are none, no patch has enough.
        numbers: so many are needed for a patch.
    """

    def __init__(
        self, space: PatchSpace, by_size: bool, least: float, densities: Sequence[MaskDensity]
    ) -> None:
        self._space, patch = space, space.patch.tolist()
        wanted = max(1.0, least * math.prod(patch))
        most = max(1, _MOST_CELLS // len(densities))
        volumes, cells, weights, sides = [], [], [], []
        for volume, (density, counts) in enumerate(zip(densities, space.counts.tolist(), strict=True)):
            side = np.array(_doubled([max(1, side // 8) for side in patch], counts, patch, most), np.int64)
            grid = -(-space.counts[volume] // side)
            begins = np.indices(tuple(grid.tolist())).reshape(len(patch), -1).T * side
            starts = np.array_split(space.lows[volume] + begins, 1 + len(begins) // _CELLS_AT_ONCE)
            held = np.concatenate([density.most(some, side + space.patch - 1) for some in starts])
            # The box that all patches of a cell are in; a little less is enough, as both are rounded.
            begins = begins[held >= wanted * (1 - 1e-9)]
            places = np.minimum(side, space.counts[volume] - begins).prod(axis=1, dtype=np.float64)
            volumes.append(np.full(len(begins), volume))
            cells.append(begins)
            weights.append(places / (1 if by_size else math.prod(counts)))
            sides.append(side)
        self._volumes, self._cells = np.concatenate(volumes), np.concatenate(cells)
        self._sides = np.array(sides)
        self.count, self.numbers = len(self._volumes), 1 + len(patch)
        self._ends = np.cumsum(np.concatenate(weights))

    def places(self, drawn: npt.NDArray[np.float64]) -> Places:
        """Where patches are.

        Args:
            drawn: numbers in [0, 1), float64 (N, 1 + D).
        """
        cells = np.searchsorted(self._ends[:-1], drawn[:, 0] * self._ends[-1], side="right")
        volumes, begins = self._volumes[cells], self._cells[cells]
        sides = np.minimum(self._sides[volumes], self._space.counts[volumes] - begins)
        steps = np.minimum((drawn[:, 1:] * sides).astype(np.int64), sides - 1)
        return Places(volumes, self._space.lows[volumes] + begins + steps)


class MaskedPatches:
    """Patches of which enough is in a mask: in the place of others some near to the mask are drawn.

    Args:
        base: the patches.
        cells: draws those near to the mask.
        least: the part of a patch that is to be in the mask.
        fractions: for volumes, and places in them, the part that is at least.
        draws: gives random numbers, others than ``base`` has.

    Raises:
        OptionError: there seem to be no such patches.
    """

    is_random = True

    def __init__(
        self,
        base: PatchPlaces,
        cells: PatchCells,
        least: float,
        fractions: Callable[[Places], npt.NDArray[np.float64]],
        draws: Draws,
    ) -> None:
        self._base, self._cells, self._least = base, cells, least
        self._fractions, self._draws, self.count = fractions, draws, base.count
        # What is left after many attempts is taken from these.
        tried = np.arange(_TRIED)
        found = [
            self._near(_DRAWS + 1, 0, number, tried, 1) if cells.count else base.places(0, number, tried)
            for number in range(_ROUNDS)
        ]
        places = Places(*(np.concatenate(some) for some in zip(*found, strict=True)))
        shares = fractions(places)
        good = np.flatnonzero(shares >= least)
        if not len(good):
            raise OptionError(
                f"mask_fraction={least}: of {len(shares):,} patches that were tried none has so much of the "
                f"mask; the most is {shares.max():.3f}"
            )
        self._good = Places(places.volumes[good], places.starts[good])

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        """As for ``PatchPlaces``."""
        volumes, starts = (part.copy() for part in self._base.places(seed, epoch, indices))
        left = np.flatnonzero(self._fractions(Places(volumes, starts)) < self._least)
        for number in range(1, _DRAWS + 1):
            if not len(left):
                break
            again = self._near(number, seed, epoch, indices[left], _AT_ONCE)
            is_good = (self._fractions(again) >= self._least).reshape(-1, _AT_ONCE)
            # The first that is good, or any.
            some = np.arange(len(left)) * _AT_ONCE + is_good.argmax(axis=1)
            volumes[left], starts[left] = again.volumes[some], again.starts[some]
            left = left[~is_good.any(axis=1)]
        if len(left):
            count = len(self._good.volumes)
            drawn = self._draws(_DRAWS + 2, seed, epoch, indices[left], 1)[:, 0]
            some = np.minimum((drawn * count).astype(np.int64), count - 1)
            volumes[left], starts[left] = self._good.volumes[some], self._good.starts[some]
        return Places(volumes, starts)

    def _near(self, number: int, seed: int, epoch: int, indices: Int64Array, count: int) -> Places:
        """So many patches near to the mask for each index, those of an index after each other."""
        each = self._cells.numbers
        drawn = self._draws(number, seed, epoch, indices, count * each)
        return self._cells.places(drawn.reshape(-1, each))

"""Estimate how many bytes are decoded to read patches of a volume in an order, with a memory size."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastpipe.core.order import interleaved
from fastpipe.errors import OptionError
from fastpipe.volumes.places import PatchSpace, Places, UniformPatches
from fastpipe.volumes.tours import Geometry, TourTrial, planned, tour_of
from fastpipe.volumes.volume import Int64Array, UnitGrid

_TRIED = 1024  # number of patches for planning a tour, in a part of the volume
_EPOCHS = 3  # number of epochs of other patches on which the tour is tried
_OTHERS = 1 / 3  # memory that each further thread needs, as a fraction of the bytes decoded for one patch
_MOST = 1e18  # after this many patches, each unit has been used
_NEARLY_ALL = 1 - 1e-12  # the probability for a unit that all patches use
_FINENESS = 4  # number of budgets that are tried for each doubling


@dataclass(frozen=True)
class Stored:
    """The shape of an array and of the units in which the array is decoded."""

    shape: tuple[int, ...]  # shape of the array
    unit: tuple[int, ...]  # shape of a unit, with as many dimensions as ``shape``
    itemsize: int  # bytes of an element

    @property
    def unit_nbytes(self) -> int:
        return math.prod(self.unit) * self.itemsize

    @property
    def nbytes(self) -> int:
        return UnitGrid(self.shape, self.unit).count * self.unit_nbytes

    @property
    def decoded(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Tour:
    fronts: int  # number of parts of the tour, from which patches are taken in turn (see tours.py)
    amplification: float  # decoded bytes for each used byte


class PatchModel:
    """The cost of reading patches of one size at uniformly random places.

    An epoch has as many patches as fill the volume.  ``arrays`` are the volume and its labels.  Both arrays
    are read at the same places, and have the same sizes along the dimensions of the patches.
    """

    def __init__(self, arrays: Sequence[Stored], patch: Sequence[int], threads: int = 1) -> None:
        self.arrays, self.patch, self.threads = list(arrays), tuple(patch), threads
        for array in arrays:
            if len(array.shape) < len(patch):
                raise OptionError(
                    f"--patch has {len(patch)} numbers, and the volume {len(array.shape)} dimensions"
                )
            if self._spatial(array) != self._spatial(arrays[0]):
                raise OptionError(
                    f"--labels has {self._spatial(array)} voxels, and the volume {self._spatial(arrays[0])}"
                )
        if any(side > size for side, size in zip(patch, self._spatial(arrays[0]), strict=True)):
            raise OptionError(f"a patch of {self.patch} does not fit into {self._spatial(arrays[0])}")
        self._wholes = [(*array.shape[: len(array.shape) - len(patch)], *patch) for array in arrays]
        self.patch_nbytes = sum(map(self.nbytes_of, range(len(arrays))))

    def nbytes_of(self, number: int) -> int:
        """Return the bytes of a patch in array ``number``."""
        return math.prod(self._wholes[number]) * self.arrays[number].itemsize

    def _spatial(self, array: Stored) -> tuple[int, ...]:
        return array.shape[len(array.shape) - len(self.patch) :]

    @property
    def epoch(self) -> int:
        return max(1, math.prod(self._spatial(self.arrays[0])) // math.prod(self.patch))

    @property
    def total_nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def alone(self) -> float:
        """Return how many bytes are decoded for one patch, on average, if no units are in memory."""
        return sum(
            math.prod(
                _touched(size, unit, side)
                for size, unit, side in zip(array.shape, array.unit, whole, strict=True)
            )
            * array.unit_nbytes
            for array, whole in zip(self.arrays, self._wholes, strict=True)
        )

    def uniform(self, budget: int) -> float:
        """Return the decoded bytes for each used byte if patches come in uniformly random order.

        A patch uses a unit (a part of the array that is decoded as a whole) with a probability ``q``.  The
        memory holds the units that at least one of the last ``t`` patches used.  ``t`` is as large as the
        memory allows (Che's approximation of a cache that evicts the least recently used entry)::

            sum of 1 - (1 - q)^t  =  slots - sum of q / 2,      decoded for a patch:  sum of q (1 - q)^t

        If all units fit into memory, the result is the value for the first epoch.
        """
        share = min(1.0, budget / max(1, self.total_nbytes))
        decoded = 0.0
        for array, whole in zip(self.arrays, self._wholes, strict=True):
            q, times = _touches(array, whole)
            if share == 1.0:
                units = (times * -np.expm1(self.epoch * np.log1p(-q))).sum() / self.epoch
            else:
                units = _decoded(q, times, int(share * times.sum()))
            decoded += float(units) * array.unit_nbytes
        return decoded / self.patch_nbytes

    def tour(self, budget: int, fronts: int | None = None) -> Tour:
        """Return the tour that ``FastPatchDataset`` would plan, and its cost, estimated with some patches.

        A tour is an order in which neighbouring patches follow each other.  ``fronts`` is the number of its
        parts, from which patches are taken in turn.  If ``fronts`` is None, this number is planned, too.
        """
        geometry, places = self._tried
        if fronts is None:
            count, stripes, _ = planned(geometry, places, budget)
        else:
            count, (stripes, _) = fronts, self._trial.best_stripes(budget / fronts)
        if budget >= self.total_nbytes:  # nothing is evicted in any order
            return Tour(count, self.uniform(budget))
        # Other threads decode patches at the same time, and some of their units are not shared with the
        # preceding patches.
        room = budget - (self.threads - 1) * _OTHERS * self.alone()
        times = []
        for seed, (epoch, trial) in enumerate(self._epochs):
            tour = tour_of(geometry, epoch, stripes, seed=seed, epoch=1)
            order = trial.order_of(interleaved(tour, count, seed=seed, epoch=1))
            times.append(trial.amplification(order, room))
        return Tour(count, statistics.median(times))

    def near(self, budget: int) -> float:
        """Return the decoded bytes for each used byte on a tour with one front (see ``tour``)."""
        return self.tour(budget, 1).amplification

    def least_budget(self, limits: Sequence[float]) -> list[int | None]:
        """Return, for each limit, the least memory in bytes that keeps the result of ``near`` within it.

        A limit is a number of decoded bytes for each used byte.  The least memory is accurate to about a
        fifth.  If only memory for all units is enough, None replaces the number.
        """
        geometry, _ = self._tried
        last = math.ceil(_FINENESS * math.log2(max(2.0, self.total_nbytes / geometry.unit_nbytes)))

        def budget_of(step: int) -> int:
            return int(2 ** (step / _FINENESS)) * geometry.unit_nbytes

        found: list[int | None] = []
        for limit in limits:
            enough = last
            # Search downwards, because the cost of a tour does not fall steadily with more memory.
            while enough and self.near(budget_of(enough - 1)) <= limit:
                enough -= 1
            budget = budget_of(enough)
            found.append(budget if enough < last and budget < self.total_nbytes else None)
        return found

    @functools.cached_property
    def _trial(self) -> TourTrial:
        return TourTrial(*self._tried)

    @functools.cached_property
    def _epochs(self) -> list[tuple[Places, TourTrial]]:
        """Return epochs of random patches.  The tour is planned with other patches (``_tried``)."""
        geometry, places = self._tried
        count = len(places.volumes)
        patches = UniformPatches(geometry.space, count, False, _draw)
        drawn = [patches.places(seed, 1, np.arange(count)) for seed in range(_EPOCHS)]
        return [(epoch, TourTrial(geometry, epoch)) for epoch in drawn]

    @functools.cached_property
    def _tried(self) -> tuple[Geometry, Places]:
        """Return the geometry of a part of the volume, and random patches in this part.

        The patches are as dense in the part as the patches of an epoch are in the whole volume.
        """
        leading = max(range(len(self.arrays)), key=lambda number: self.arrays[number].decoded)
        array = self.arrays[leading]
        dims = len(self.patch)
        lead, unit = array.shape[:-dims], array.unit[-dims:]
        shape = _part(self._spatial(array), self.patch, _TRIED)
        space = PatchSpace([shape], self.patch, ["the volume"], False)
        count = max(1, math.prod(shape) // math.prod(self.patch))
        places = UniformPatches(space, count, False, _draw).places(0, 0, np.arange(count))
        # Like ``FastPatchDataset``, count the units of the other arrays at the place of a unit.
        more = sum(one.decoded for one in self.arrays) / max(1, array.decoded)
        nbytes = math.prod(lead) * math.prod(unit) * array.itemsize
        return Geometry(space, np.array([unit], np.int64), max(1, int(nbytes * more))), places


def _part(shape: Sequence[int], patch: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the shape of a part of the volume that is as large as ``count`` patches.

    If possible, the part has the proportions of the volume.
    """
    sides = list(map(float, shape))
    while math.prod(sides) > count * math.prod(patch):
        large = [dim for dim in range(len(sides)) if sides[dim] > 2 * patch[dim]]
        if not large:
            break
        dim = max(large, key=lambda dim: sides[dim] / patch[dim])
        sides[dim] = max(2 * patch[dim], 0.9 * sides[dim])
    return tuple(math.ceil(side) for side in sides)


def _draw(seed: int, epoch: int, indices: Int64Array, count: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng([seed, epoch]).random((len(indices), count))


def _touched(size: int, unit: int, patch: int) -> float:
    """Return the average number of units that a patch overlaps along one dimension."""
    starts = np.arange(size - patch + 1)
    return float(((starts + patch - 1) // unit - starts // unit + 1).mean())


def _touches(array: Stored, whole: Sequence[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each probability that a patch uses a unit, and the number of units with this probability."""
    q, times = np.ones(1), np.ones(1)
    for size, unit, side in zip(array.shape, array.unit, whole, strict=True):
        first = np.arange(0, size, unit)
        # The number of places at which a patch overlaps with the unit.
        places = np.minimum(first + unit - 1, size - side) - np.maximum(first - side + 1, 0) + 1
        values, counts = np.unique(places, return_counts=True)
        q = np.multiply.outer(q, values / (size - side + 1)).ravel()
        times = np.multiply.outer(times, counts).ravel()
    return np.minimum(q, _NEARLY_ALL), times


def _decoded(q: npt.NDArray[np.float64], times: npt.NDArray[np.float64], slots: int) -> float:
    """Return how many units are decoded for a patch if the memory has ``slots`` slots for one unit each.

    On average, half of the patch's units occupy slots while the patch is read.
    """
    touched = float((times * q).sum())
    earlier = slots - touched / 2
    if earlier <= 0:
        return touched
    low, high = -math.log(_MOST), math.log(_MOST)  # bounds of log(t)
    for _ in range(100):
        middle = (low + high) / 2
        units = (times * -np.expm1(math.exp(middle) * np.log1p(-q))).sum()
        low, high = (middle, high) if units < earlier else (low, middle)
    return float((times * q * np.exp(math.exp(low) * np.log1p(-q))).sum())

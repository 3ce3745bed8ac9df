"""Orders that visit patches near to each other soon after each other, from several places at a time.

Patches of a volume are put in *stripes*, boxes that are as long as the volume along one dimension, and within
each in the order along that dimension, forth in one stripe and back in the next: a tour through the volume.
What a patch needs of the volume was then, for the most part, decoded for the patches before it.  The tour of
all volumes, in a random order, is cut into as many parts as the window has *fronts*, and the epoch takes a
patch of each in turn: those of a batch come from different places.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.core.order import tour_words
from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import Int64Array

_FRONTS = (1, 2, 4, 8, 16, 32, 64)
_TRIED = 256  # patches on which stripes are tried
_LEAST_OF_FRONT = 24  # of these, at least, from each place: what is decoded for the first is not typical
_WORTH = 1.25  # decoded bytes for each that is used: more is not given for a wider window
_LITTLE = 1.15  # times as much is given where patches are too far apart for little to be decoded
_ENDLESS = 1 << 62
_PLANNED_BY = 1 << 16  # patches of an epoch by which a tour is planned


def unit_visits(
    shape: Sequence[int], unit: Sequence[int], patch: Sequence[int], starts: Int64Array
) -> npt.NDArray[np.int32]:
    """For each unit of a volume the number of patches that touch it: int32, of the grid's shape.

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


class UnitArray(NamedTuple):
    """An array of a volume, or one of several that lie one behind the other, that is read in units."""

    volume: int  # the number of the volume
    first: int  # the number of its first unit
    shape: Sequence[int]  # of the array and of a unit, along the D dimensions that patches are cut along
    unit: Sequence[int]


def units_used(arrays: Sequence[UnitArray], places: Places, patch: Sequence[int]) -> Int64Array:
    """The numbers of the units that patches, perhaps beyond their volumes' ends, touch, one after the other:
    int64 (M,).

    >>> from fastpipe.volumes.places import Places
    >>> array = UnitArray(volume=0, first=10, shape=(6,), unit=(2,))
    >>> units_used([array], Places(np.array([0, 0]), np.array([[3], [0]])), (3,)).tolist()
    [11, 12, 10, 11]
    """
    counts_of = Counter(array.volume for array in arrays)
    # A row for each array that a patch is cut of; where its volume has fewer than others, of no units.
    rows, dims = (len(places.volumes), max(counts_of.values(), default=0)), len(patch)
    firsts, (lows, counts, steps) = np.zeros(rows, np.int64), np.zeros((3, *rows, dims), np.int64)
    columns: Counter[int] = Counter()
    for volume, first, shape, unit in arrays:
        here, column = places.volumes == volume, columns[volume]
        columns[volume] += 1
        sizes, sides = np.array(shape, np.int64), np.array(unit, np.int64)
        begins = np.maximum(places.starts[here], 0)
        ends = np.minimum(places.starts[here] + np.array(patch, np.int64), sizes)
        firsts[here, column], lows[here, column] = first, begins // sides
        counts[here, column] = np.where(begins < ends, (ends - 1) // sides - begins // sides + 1, 0)
        grid = -(-sizes // sides)
        steps[here, column] = np.append(np.cumprod(grid[:0:-1])[::-1], 1)
    flat = (table.reshape(-1, dims) for table in (lows, counts, steps))
    numbers: Int64Array = native.touched_units(firsts.ravel(), *flat)[0]
    return numbers


class Stripes(NamedTuple):
    axis: int  # the dimension along a stripe
    widths: tuple[int, ...]  # of a stripe along each dimension, in units; along ``axis`` it has no meaning


class Geometry(NamedTuple):
    """What of volumes decides how they are best visited."""

    space: PatchSpace  # where patches can be
    units: Int64Array  # int64 (V, D): of each volume, the shape of what is decoded at once
    unit_nbytes: int  # of the largest of these, in all arrays that are read at the same place


def tour_of(geometry: Geometry, places: Places, stripes: Stripes, *, seed: int, epoch: int) -> Int64Array:
    """The place of each patch in a tour through all volumes: int64 (N,), a permutation.

    Another one in each epoch: volumes come in another order, stripes begin elsewhere, and each volume is
    gone through from one end or from the other.
    """
    space, volumes = geometry.space, places.volumes
    count, dims = len(space.shapes), len(space.patch)
    words = tour_words(count * (1 + 2 * dims), seed, epoch)
    turn = np.empty(count, np.int64)
    turn[np.argsort(words[:count], kind="stable")] = np.arange(count)
    is_from_end = (words[count : count * (1 + dims)] & np.uint64(1)).astype(np.bool_).reshape(count, dims)
    shifts = (words[count * (1 + dims) :] >> np.uint64(33)).astype(np.int64).reshape(count, dims)
    at = places.starts - space.lows[volumes]
    widths = np.array(stripes.widths, np.int64)
    # A stripe begins with a unit, which else two of them would decode.
    units = geometry.units[volumes]
    cells = (at // units + (shifts % widths)[volumes]) // widths
    cells = np.where(is_from_end[volumes], -cells, cells)
    # Forth and back: along each dimension by whether the stripe is an odd one along those before it.
    before = np.zeros(len(volumes), np.int64)
    keys = [turn[volumes]]
    for dim in [dim for dim in range(dims) if dim != stripes.axis]:
        keys.append(np.where(before % 2 == 1, -cells[:, dim], cells[:, dim]))
        before += cells[:, dim]
    backwards = (before % 2 == 1) != is_from_end[volumes, stripes.axis]
    along = at[:, stripes.axis]
    keys.append(np.where(backwards, -along, along))
    order = np.lexsort(tuple(reversed(keys)))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


def planned(
    geometry: Geometry, places: Places, room: float, fronts: int | None = None
) -> tuple[int, Stripes, float]:
    """How volumes are best visited, by trying on some patches of an epoch: with ``fronts`` parts of the tour,
    or the largest number of them with which not much more is decoded than is used."""
    if not len(places.volumes):
        return fronts or 1, Stripes(0, (1,) * len(geometry.space.patch)), 1.0
    trial = TourTrial(geometry, places)
    chosen, worth = None, _WORTH
    for count in [fronts] if fronts is not None else _FRONTS:
        stripes, _ = trial.best_stripes(room / count)
        times = trial.amplification(trial.beginning(stripes, count), room)
        if chosen is None:
            worth = max(_WORTH, _LITTLE * times)
        if chosen is None or times <= worth:
            chosen = count, stripes, times
        if times > worth or count >= len(places.volumes):
            break
    assert chosen is not None
    return chosen


class TriedOrder(NamedTuple):
    """The units of patches in the order in which these come."""

    units: Int64Array  # int64 (M,): numbers of units from 0 to K - 1, patch after patch
    ends: Int64Array  # int64 (N,): where those of each patch end
    visits: Int64Array  # int64 (K,): how many patches of the epoch touch each unit


class TourTrial:
    """Tries orders on the patches of an epoch, at least one."""

    def __init__(self, geometry: Geometry, places: Places) -> None:
        self._geometry, self._places = geometry, places
        space, units = geometry.space, geometry.units
        counts = -(-space.shapes // units)
        # Units are counted through all volumes.
        self._firsts = np.cumsum(np.concatenate([[0], counts.prod(axis=1)]))
        inner = np.concatenate([counts[:, 1:], np.ones_like(counts[:, :1])], axis=1)
        self._steps = np.cumprod(inner[:, ::-1], axis=1)[:, ::-1]
        visits = [
            unit_visits(
                space.shapes[volume].tolist(), unit, space.patch.tolist(),
                places.starts[places.volumes == volume],
            ).ravel()
            for volume, unit in enumerate(units.tolist())
        ]  # fmt: skip
        self._visits = np.concatenate(visits)

    @functools.cached_property
    def tours(self) -> list[tuple[Stripes, TriedOrder]]:
        """The beginnings of all tours from one place that differ: where there are few patches, few."""
        space, units = self._geometry.space, self._geometry.units
        cells = (-(-space.counts // units)).max(axis=0).tolist()
        found: dict[bytes, tuple[Stripes, TriedOrder]] = {}
        # In units, up to all; the larger the farther apart.
        widths = [sorted({*(1 << power for power in range((cell - 1).bit_length())), cell}) for cell in cells]
        for axis in range(len(cells)):
            for some in itertools.product(*widths[:axis], [1], *widths[axis + 1 :]):
                stripes = Stripes(axis, some)
                patches = self._beginning(stripes, 1)
                if (content := patches.tobytes()) not in found:
                    found[content] = stripes, self.order_of(patches)
        return list(found.values())

    def best_stripes(self, room: float) -> tuple[Stripes, float]:
        """The stripes with which the least is decoded on a tour with so much room, and how many bytes for
        each that is used."""
        stripes, least = self.tours[0][0], math.inf
        for one, order in self.tours:
            times = self.amplification(order, room, least)
            if times < least:
                stripes, least = one, times
        return stripes, least

    def beginning(self, stripes: Stripes, fronts: int) -> TriedOrder:
        return self.order_of(self._beginning(stripes, fronts))

    def amplification(self, order: TriedOrder, room: float, limit: float = math.inf) -> float:
        """Bytes of units that are decoded for each byte of patches in an order, if what will not be wanted
        again is forgotten first, and then what was not used for the longest time; at least ``limit`` beyond
        that."""
        geometry = self._geometry
        held = max(1, int(room // max(1, geometry.unit_nbytes)))
        used: int = len(order.ends) * math.prod(geometry.space.patch.tolist())
        voxels: int = math.prod(geometry.units[0].tolist())
        most = _ENDLESS if limit == math.inf else int(limit * used / voxels)
        decoded: int = native.decoded_units(*order, held, most)
        return decoded * voxels / used

    def _beginning(self, stripes: Stripes, fronts: int) -> Int64Array:
        ranks = tour_of(self._geometry, self._places, stripes, seed=0, epoch=0)
        tour = np.argsort(ranks, kind="stable")
        fronts = min(fronts, len(tour))
        each = min(len(tour) // fronts, max(_TRIED // fronts, _LEAST_OF_FRONT))
        firsts = np.arange(fronts) * len(tour) // fronts
        some: Int64Array = tour[(firsts[None, :] + np.arange(each)[:, None]).ravel()]
        return some

    def order_of(self, patches: Int64Array) -> TriedOrder:
        space, volumes = self._geometry.space, self._places.volumes[patches]
        starts, units = self._places.starts[patches], self._geometry.units[volumes]
        lows = np.maximum(starts, 0) // units
        highs = (np.minimum(starts + space.patch, space.shapes[volumes]) - 1) // units
        numbers, ends = native.touched_units(
            self._firsts[volumes], lows, highs - lows + 1, self._steps[volumes]
        )
        some, places = np.unique(numbers, return_inverse=True)
        return TriedOrder(places.astype(np.int64), ends, self._visits[some].astype(np.int64))


class Touring:
    """Plans tours through the volumes of a dataset.  Can be sent to other processes."""

    def __init__(self, roles: Sequence[Role], space: PatchSpace, places: PatchPlaces, room: int) -> None:
        self._places, self._room = places, room
        # What costs most to read twice decides; other arrays have other units.
        leading = max(roles, key=lambda role: sum(volume.nbytes for volume in role.volumes))
        dims = len(space.patch)
        units = np.array([volume.grid.unit[len(leading.lead) :] for volume in leading.volumes], np.int64)
        voxels = sum(volume.nbytes for role in roles for volume in role.volumes)
        more = voxels / max(1, sum(volume.nbytes for volume in leading.volumes))
        largest = math.prod(leading.lead) * leading.dtype.itemsize * int(units.prod(axis=1).max())
        self._geometry = Geometry(space, units.reshape(-1, dims), int(largest * more))
        self._planned: dict[int | None, tuple[int, Stripes, float]] = {}

    def planned(self, window: int | None) -> tuple[int, Stripes, float]:
        """For so many places at a time, or as many as go: how many, by which stripes, and how many bytes are
        decoded for each that is used."""
        if window not in self._planned:
            # By what another seed draws: an order does not depend on the budget but through this.
            some = self._places.places(0, 0, np.arange(min(self._places.count, _PLANNED_BY)))
            found = planned(self._geometry, some, self._room, window)
            self._planned[window] = self._planned[found[0]] = found
        return self._planned[window]

    def ranks(self, window: int, seed: int, epoch: int) -> Int64Array:
        """The place of each patch of an epoch in the tour: int64 (N,)."""
        _, stripes, _ = self.planned(window)
        places = self._places.places(seed, epoch, np.arange(self._places.count))
        return tour_of(self._geometry, places, stripes, seed=seed, epoch=epoch)

    def about(self, window: int) -> str:
        space = self._geometry.space
        shapes = zlib.crc32(np.concatenate([space.shapes, self._geometry.units]).tobytes())
        return f"{self._places.count} patches of {shapes:08x}, {self.planned(window)[1]!r}"

    def groups(self, places: Places) -> Int64Array:
        """The unit in which each patch begins, counted through all volumes: int64 (N,)."""
        space, units = self._geometry.space, self._geometry.units
        counts = -(-space.shapes // units)
        firsts = np.concatenate([[0], np.cumsum(counts.prod(axis=1))])
        cells = np.maximum(places.starts, 0) // units[places.volumes]
        numbers = np.zeros(len(cells), np.int64)
        for dim in range(cells.shape[1]):
            numbers = numbers * counts[places.volumes, dim] + cells[:, dim]
        return np.asarray(firsts[places.volumes] + numbers, np.int64)

"""Orders that visit neighbouring patches soon after each other, from several places at a time.

Patches of a volume are grouped in *stripes*, boxes that span the volume along one dimension.  Within a stripe
they are ordered along that dimension, forward in one stripe and backward in the next: a tour through the
volume.  Most units that a patch needs were then decoded for the patches before it.  The tour of all volumes,
in random order, is cut into as many parts as the window has *fronts*, and the epoch takes a patch from each
in turn; so the patches of a batch come from different places.
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
_LEAST_OF_FRONT = 24  # least number of these from each place: the first patches are not typical
_WORTH = 1.25  # decoded bytes for each byte used: the limit for a wider window
_LITTLE = 1.15  # factor of the limit if patches are so far apart that little can be saved
_ENDLESS = 1 << 62
_PLANNED_BY = 1 << 16  # patches of an epoch for which a tour is planned


def unit_visits(
    shape: Sequence[int], unit: Sequence[int], patch: Sequence[int], starts: Int64Array
) -> npt.NDArray[np.int32]:
    """Return for each unit of a volume the number of patches that touch it: int32, of the grid's shape.

    >>> unit_visits((6,), (2,), (3,), np.array([[0], [3]]))
    array([1, 2, 1], dtype=int32)
    """
    sizes, sides = np.array(shape, np.int64), np.array(unit, np.int64)
    lows = np.maximum(starts, 0) // sides
    highs = (np.minimum(starts + np.array(patch, np.int64), sizes) - 1) // sides + 1
    counts = -(-sizes // sides)
    # Along each dimension add 1 at a patch's begin and subtract 1 after its end, then sum up.
    steps = np.zeros(counts + 1, np.int32)
    for corner in itertools.product((False, True), repeat=len(counts)):
        at = np.where(np.array(corner), highs, lows)
        np.add.at(steps, tuple(at.T), -1 if sum(corner) % 2 else 1)
    for dim in range(steps.ndim):
        steps = np.cumsum(steps, axis=dim, dtype=np.int32)
    inside: npt.NDArray[np.int32] = steps[tuple(slice(int(count)) for count in counts)]
    return inside


class UnitArray(NamedTuple):
    """An array of a volume, or one of several in a row, that is read in units."""

    volume: int  # number of the volume
    first: int  # number of its first unit
    shape: Sequence[int]  # of the array and of a unit, along the D dimensions of patches
    unit: Sequence[int]


def units_used(arrays: Sequence[UnitArray], places: Places, patch: Sequence[int]) -> Int64Array:
    """Return the numbers of the units that patches, possibly beyond their volumes' ends, touch, in a row:
    int64 (M,).

    >>> from fastpipe.volumes.places import Places
    >>> array = UnitArray(volume=0, first=10, shape=(6,), unit=(2,))
    >>> units_used([array], Places(np.array([0, 0]), np.array([[3], [0]])), (3,)).tolist()
    [11, 12, 10, 11]
    """
    counts_of = Counter(array.volume for array in arrays)
    # A row for each array of a patch; rows without units if its volume has fewer arrays than others.
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
    widths: tuple[int, ...]  # of a stripe along each dimension, in units; meaningless along ``axis``


class Geometry(NamedTuple):
    """The properties of volumes that determine the best order of visits."""

    space: PatchSpace  # the possible places of patches
    units: Int64Array  # int64 (V, D): for each volume the shape of a unit
    unit_nbytes: int  # of the largest unit, in all arrays that are read at the same place


def tour_of(geometry: Geometry, places: Places, stripes: Stripes, *, seed: int, epoch: int) -> Int64Array:
    """Return the position of each patch in a tour through all volumes: int64 (N,), a permutation.

    It differs between epochs: in the order of volumes, in the origin of stripes, and in the end at which each
    volume is entered.
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
    # A stripe begins with a unit, which otherwise two stripes would decode.
    units = geometry.units[volumes]
    cells = (at // units + (shifts % widths)[volumes]) // widths
    cells = np.where(is_from_end[volumes], -cells, cells)
    # Forward or backward along each dimension, by the parity of the stripe along those before it.
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
    """Plan the best tour by trying some patches of an epoch: with ``fronts`` parts, or the largest number of
    parts with which not much more is decoded than is used."""
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
    """The units of patches in the order of the patches."""

    units: Int64Array  # int64 (M,): numbers of units from 0 to K - 1, patch by patch
    ends: Int64Array  # int64 (N,): the end of each patch's units
    visits: Int64Array  # int64 (K,): number of the epoch's patches that touch each unit


class TourTrial:
    """A trial of orders on the patches of an epoch, at least one patch."""

    def __init__(self, geometry: Geometry, places: Places) -> None:
        self._geometry, self._places = geometry, places
        space, units = geometry.space, geometry.units
        counts = -(-space.shapes // units)
        # Units are numbered across all volumes.
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
        """Return the beginnings of all different tours from one place; few if there are few patches."""
        space, units = self._geometry.space, self._geometry.units
        cells = (-(-space.counts // units)).max(axis=0).tolist()
        found: dict[bytes, tuple[Stripes, TriedOrder]] = {}
        # In units, up to all; the distances grow.
        widths = [sorted({*(1 << power for power in range((cell - 1).bit_length())), cell}) for cell in cells]
        for axis in range(len(cells)):
            for some in itertools.product(*widths[:axis], [1], *widths[axis + 1 :]):
                stripes = Stripes(axis, some)
                patches = self._beginning(stripes, 1)
                if (content := patches.tobytes()) not in found:
                    found[content] = stripes, self.order_of(patches)
        return list(found.values())

    def best_stripes(self, room: float) -> tuple[Stripes, float]:
        """Return the stripes with which a tour decodes the least with this much room, and the decoded bytes
        for each byte used."""
        stripes, least = self.tours[0][0], math.inf
        for one, order in self.tours:
            times = self.amplification(order, room, least)
            if times < least:
                stripes, least = one, times
        return stripes, least

    def beginning(self, stripes: Stripes, fronts: int) -> TriedOrder:
        return self.order_of(self._beginning(stripes, fronts))

    def amplification(self, order: TriedOrder, room: float, limit: float = math.inf) -> float:
        """Return the decoded bytes for each byte of patches in an order, if units that are not needed again
        are evicted first, then the least recently used.  Above ``limit`` the count may stop early, at a value
        of at least ``limit``."""
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
    """The planner of tours through a dataset's volumes.  Can be pickled."""

    def __init__(self, roles: Sequence[Role], space: PatchSpace, places: PatchPlaces, room: int) -> None:
        self._places, self._room = places, room
        # The array that is most expensive to read twice decides; other arrays have other units.
        leading = max(roles, key=lambda role: sum(volume.nbytes for volume in role.volumes))
        dims = len(space.patch)
        units = np.array([volume.grid.unit[len(leading.lead) :] for volume in leading.volumes], np.int64)
        voxels = sum(volume.nbytes for role in roles for volume in role.volumes)
        more = voxels / max(1, sum(volume.nbytes for volume in leading.volumes))
        largest = math.prod(leading.lead) * leading.dtype.itemsize * int(units.prod(axis=1).max())
        self._geometry = Geometry(space, units.reshape(-1, dims), int(largest * more))
        self._planned: dict[int | None, tuple[int, Stripes, float]] = {}

    def planned(self, window: int | None) -> tuple[int, Stripes, float]:
        """Return the plan for ``window`` places at a time, or as many as possible: their number, the stripes,
        and the decoded bytes for each byte used."""
        if window not in self._planned:
            # For patches of another seed: an order depends on the budget only through this plan.
            some = self._places.places(0, 0, np.arange(min(self._places.count, _PLANNED_BY)))
            found = planned(self._geometry, some, self._room, window)
            self._planned[window] = self._planned[found[0]] = found
        return self._planned[window]

    def ranks(self, window: int, seed: int, epoch: int) -> Int64Array:
        """Return the position of each patch of an epoch in the tour: int64 (N,)."""
        _, stripes, _ = self.planned(window)
        places = self._places.places(seed, epoch, np.arange(self._places.count))
        return tour_of(self._geometry, places, stripes, seed=seed, epoch=epoch)

    def about(self, window: int) -> str:
        space = self._geometry.space
        shapes = zlib.crc32(np.concatenate([space.shapes, self._geometry.units]).tobytes())
        return f"{self._places.count} patches of {shapes:08x}, {self.planned(window)[1]!r}"

    def groups(self, places: Places) -> Int64Array:
        """Return the unit in which each patch begins, numbered across all volumes: int64 (N,)."""
        space, units = self._geometry.space, self._geometry.units
        counts = -(-space.shapes // units)
        firsts = np.concatenate([[0], np.cumsum(counts.prod(axis=1))])
        cells = np.maximum(places.starts, 0) // units[places.volumes]
        numbers = np.zeros(len(cells), np.int64)
        for dim in range(cells.shape[1]):
            numbers = numbers * counts[places.volumes, dim] + cells[:, dim]
        return np.asarray(firsts[places.volumes] + numbers, np.int64)

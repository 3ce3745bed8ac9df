"""Plan orders in which neighbouring patches follow each other soon, so that few units are decoded twice.

Patches of a volume are grouped in *stripes*, which are boxes that span the volume along one dimension.
Within a stripe, patches are ordered along this dimension, forward in one stripe and backward in the next
stripe.  The resulting order is a *tour* through the volume.  Most units that a patch needs were decoded for
the preceding patches of the tour.  The tours of all volumes are joined in random order and cut into equal
parts, which are called *fronts*.  The epoch takes one patch from each front in turn, so that the patches of a
batch come from different places.  The number of fronts is the shuffle window.
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
_TRIED = 256  # number of patches for trying stripes
_LEAST_OF_FRONT = 24  # the least patches from each front, because the first patches are not typical
_WORTH = 1.25  # the most decoded bytes for each used byte that a wider window may cause
_LITTLE = 1.15  # if one front already decodes more, a wider window may decode this factor more than one front
_ENDLESS = 1 << 62
_PLANNED_BY = 1 << 16  # the most patches of an epoch from which a tour is planned


def unit_visits(
    shape: Sequence[int], unit: Sequence[int], patch: Sequence[int], starts: Int64Array
) -> npt.NDArray[np.int32]:
    """Return, for each unit of a volume, the number of patches that overlap with the unit.

    The result is int32 and has the shape of the grid of units.

    >>> unit_visits((6,), (2,), (3,), np.array([[0], [3]]))
    array([1, 2, 1], dtype=int32)
    """
    sizes, sides = np.array(shape, np.int64), np.array(unit, np.int64)
    lows = np.maximum(starts, 0) // sides
    highs = (np.minimum(starts + np.array(patch, np.int64), sizes) - 1) // sides + 1
    counts = -(-sizes // sides)
    # Along each dimension, add 1 at the start of each patch and subtract 1 after its end.  The cumulative
    # sums are the numbers of patches.
    steps = np.zeros(counts + 1, np.int32)
    for corner in itertools.product((False, True), repeat=len(counts)):
        at = np.where(np.array(corner), highs, lows)
        np.add.at(steps, tuple(at.T), -1 if sum(corner) % 2 else 1)
    for dim in range(steps.ndim):
        steps = np.cumsum(steps, axis=dim, dtype=np.int32)
    inside: npt.NDArray[np.int32] = steps[tuple(slice(int(count)) for count in counts)]
    return inside


class UnitArray(NamedTuple):
    """An array of a volume that is read in units, or the part of such an array that has one fixed index
    along the leading dimensions."""

    volume: int  # index of the volume
    first: int  # number of the array's first unit
    shape: Sequence[int]  # shape of the array along the D dimensions of patches
    unit: Sequence[int]  # shape of a unit along the D dimensions of patches


def units_used(arrays: Sequence[UnitArray], places: Places, patch: Sequence[int]) -> Int64Array:
    """Return the numbers of the units with which patches overlap, in the order of the patches: int64 (M,).

    Patches may extend beyond the ends of their volumes.

    >>> from fastpipe.volumes.places import Places
    >>> array = UnitArray(volume=0, first=10, shape=(6,), unit=(2,))
    >>> units_used([array], Places(np.array([0, 0]), np.array([[3], [0]])), (3,)).tolist()
    [11, 12, 10, 11]
    """
    counts_of = Counter(array.volume for array in arrays)
    # Each patch has a row for each array; a row is empty if the patch's volume has fewer arrays than others.
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
    axis: int  # the dimension along which a stripe spans the volume
    widths: tuple[int, ...]  # widths of a stripe in units; the width along ``axis`` has no meaning


class Geometry(NamedTuple):
    """The properties of volumes that determine the best order of patches."""

    space: PatchSpace  # the possible places of patches
    units: Int64Array  # int64 (V, D): the shape of each volume's units
    unit_nbytes: int  # bytes of the largest unit, including the other arrays of its volume at its place


def tour_of(geometry: Geometry, places: Places, stripes: Stripes, *, seed: int, epoch: int) -> Int64Array:
    """Return the position of each patch in a tour through all volumes: int64 (N,), a permutation.

    Tours of different epochs differ in the order of volumes, in the origin of the stripes, and in the end of
    each volume at which the tour starts.
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
    # A stripe begins at the start of a unit.  If stripes cut units, two stripes would decode the same unit.
    units = geometry.units[volumes]
    cells = (at // units + (shifts % widths)[volumes]) // widths
    cells = np.where(is_from_end[volumes], -cells, cells)
    # The direction along each dimension depends on the parity of the stripe's index along the dimensions that
    # precede it in the keys.
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
    """Plan the best tour (order of patches) by trying tours on some patches of an epoch.

    Return the number of fronts (parts of the tour), the stripes and the decoded bytes for each used byte.  If
    ``fronts`` is None, choose the largest number of fronts with which only a little more is decoded than
    used.
    """
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
    """The units with which patches overlap, in the order of the patches."""

    units: Int64Array  # int64 (M,): numbers from 0 to K - 1 of the units, in the order of the patches
    ends: Int64Array  # int64 (N,): the index in ``units`` after each patch's last unit
    visits: Int64Array  # int64 (K,): the number of the epoch's patches that overlap with each unit


class TourTrial:
    """Tries orders on the patches of an epoch, which must have at least one patch."""

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
        """Return the stripes and the first patches of each tour with one front.

        With few patches, many tours are equal.  Equal tours are returned once.
        """
        space, units = self._geometry.space, self._geometry.units
        cells = (-(-space.counts // units)).max(axis=0).tolist()
        found: dict[bytes, tuple[Stripes, TriedOrder]] = {}
        # The widths are powers of two, and the number of units along the dimension.
        widths = [sorted({*(1 << power for power in range((cell - 1).bit_length())), cell}) for cell in cells]
        for axis in range(len(cells)):
            for some in itertools.product(*widths[:axis], [1], *widths[axis + 1 :]):
                stripes = Stripes(axis, some)
                patches = self._beginning(stripes, 1)
                if (content := patches.tobytes()) not in found:
                    found[content] = stripes, self.order_of(patches)
        return list(found.values())

    def best_stripes(self, room: float) -> tuple[Stripes, float]:
        """Find the tour that decodes the least; return its stripes and decoded bytes for each used byte.

        ``room`` is the memory for decoded units in bytes.
        """
        stripes, least = self.tours[0][0], math.inf
        for one, order in self.tours:
            times = self.amplification(order, room, least)
            if times < least:
                stripes, least = one, times
        return stripes, least

    def beginning(self, stripes: Stripes, fronts: int) -> TriedOrder:
        return self.order_of(self._beginning(stripes, fronts))

    def amplification(self, order: TriedOrder, room: float, limit: float = math.inf) -> float:
        """Return the decoded bytes for each byte of the patches in ``order``.

        The memory for decoded units has ``room`` bytes.  It first evicts units that no later patch needs, and
        then the least recently used units.  If the result exceeds ``limit``, the method may stop early and
        return a lower value that is at least ``limit``.
        """
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
    """Plans tours (orders of patches) through a dataset's volumes.  Picklable."""

    def __init__(self, roles: Sequence[Role], space: PatchSpace, places: PatchPlaces, room: int) -> None:
        self._places, self._room = places, room
        # Arrays may have different units.  The tour follows the units of the largest array, whose units are
        # the most expensive to decode twice.
        leading = max(roles, key=lambda role: sum(volume.nbytes for volume in role.volumes))
        dims = len(space.patch)
        units = np.array([volume.grid.unit[len(leading.lead) :] for volume in leading.volumes], np.int64)
        voxels = sum(volume.nbytes for role in roles for volume in role.volumes)
        more = voxels / max(1, sum(volume.nbytes for volume in leading.volumes))
        largest = math.prod(leading.lead) * leading.dtype.itemsize * int(units.prod(axis=1).max())
        self._geometry = Geometry(space, units.reshape(-1, dims), int(largest * more))
        self._planned: dict[int | None, tuple[int, Stripes, float]] = {}

    def planned(self, window: int | None) -> tuple[int, Stripes, float]:
        """Return the plan for a tour that is cut into ``window`` parts (fronts).

        If ``window`` is None, the number of fronts is planned, too.  A plan has the number of fronts, the
        stripes and the decoded bytes for each used byte.
        """
        if window not in self._planned:
            # The plan uses the patches of seed 0 and epoch 0.  An order depends on the budget only through
            # this plan.
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
        """Return the number of the unit in which each patch begins, across all volumes: int64 (N,)."""
        space, units = self._geometry.space, self._geometry.units
        counts = -(-space.shapes // units)
        firsts = np.concatenate([[0], np.cumsum(counts.prod(axis=1))])
        cells = np.maximum(places.starts, 0) // units[places.volumes]
        numbers = np.zeros(len(cells), np.int64)
        for dim in range(cells.shape[1]):
            numbers = numbers * counts[places.volumes, dim] + cells[:, dim]
        return np.asarray(firsts[places.volumes] + numbers, np.int64)

"""Orders that visit patches near to each other soon after each other, from several places at a time.

Patches of a volume are put in *stripes*, boxes that are as long as the volume along one dimension, and within
each in the order along that dimension, forth in one stripe and back in the next: a tour through the volume.
What a patch needs of the volume was then, for the most part, decoded for the patches before it.  The tour of
all volumes, in a random order, is cut into as many parts as the window has *fronts*, and the epoch takes a
patch of each in turn: those of a batch come from different places.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.index.order import tour_words
from fastpipe.index.patches import PatchSpace, Places
from fastpipe.index.visits import unit_visits

__all__ = ["Geometry", "Stripes", "interleaved", "planned", "some_widths", "tour_of"]

Int64Array = npt.NDArray[np.int64]

_FRONTS = (1, 2, 4, 8, 16, 32, 64)
_TRIED = 256  # patches on which stripes are tried
_LEAST_OF_FRONT = 24  # of these, at least, from each place: what is decoded for the first is not typical
_WORTH = 1.25  # decoded bytes for each that is used: more is not given for a wider window
_LITTLE = 1.15  # times as much is given where patches are too far apart for little to be decoded


class Stripes(NamedTuple):
    """How volumes are visited.

    Attributes:
        axis: the dimension along a stripe.
        widths: of a stripe along each dimension, in units; along ``axis`` it has no meaning.
    """

    axis: int
    widths: tuple[int, ...]


class Geometry(NamedTuple):
    """What of volumes decides how they are best visited.

    Attributes:
        space: where patches can be.
        units: int64 (V, D): of each volume, the shape of what is decoded at once.
        unit_nbytes: of the largest of these, in all arrays that are read at the same place.
    """

    space: PatchSpace
    units: Int64Array
    unit_nbytes: int


def tour_of(geometry: Geometry, places: Places, stripes: Stripes, *, seed: int, epoch: int) -> Int64Array:
    """The place of each patch in a tour through all volumes.

    Another one in each epoch: volumes come in another order, stripes begin elsewhere, and each volume is
    gone through from one end or from the other.

    Args:
        geometry: of the volumes.
        places: where patches are.
        stripes: how volumes are visited.
        seed, epoch: of the epoch.

    Returns:
        int64 (N,): a permutation of ``range(N)``.
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


def interleaved(ranks: Int64Array, fronts: int, *, seed: int, epoch: int) -> Int64Array:
    """An order that takes patches from several parts of a tour in turn.

    Args:
        ranks: int64 (N,): the place of each patch in the tour; no two have the same.
        fronts: how many parts.
        seed, epoch: of the epoch.

    Returns:
        int64 (N,): a permutation of ``range(N)``.
    """
    count = len(ranks)
    if not count:
        return np.zeros(0, np.int64)
    fronts = min(fronts, count)
    words = tour_words(count + 1, seed, epoch, other=True)
    tour = np.roll(np.argsort(ranks, kind="stable"), int(words[-1] % np.uint64(count)))
    ends = np.arange(fronts + 1) * count // fronts
    lengths = np.diff(ends)
    rounds = np.arange(count) - np.repeat(ends[:-1], lengths)
    # Within a round by words, so that fronts do not follow each other in the same order.
    order = np.lexsort((words[:count], rounds))
    found: Int64Array = tour[order]
    return found


def planned(
    geometry: Geometry, places: Places, room: float, fronts: int | None = None
) -> tuple[int, Stripes, float]:
    """How volumes are best visited; found by trying on some patches of an epoch.

    Args:
        geometry: of the volumes.
        places: where the patches of an epoch are.
        room: bytes for units that are remembered.
        fronts: parts of the tour; None finds the largest number with which not much more is decoded than
            is used.

    Returns:
        How many fronts, what stripes, and how many bytes are decoded for each that is used.
    """
    if not len(places.volumes):
        return fronts or 1, Stripes(0, (1,) * len(geometry.space.patch)), 1.0
    trial = _Trial(geometry, places)
    chosen, worth = None, _WORTH
    for count in [fronts] if fronts is not None else _FRONTS:
        stripes = trial.best_stripes(room / count)
        order = _some_of(trial.ranks(stripes), count)
        times = trial.amplification(order, room)
        if chosen is None:
            worth = max(_WORTH, _LITTLE * times)
        if chosen is None or times <= worth:
            chosen = count, stripes, times
        if times > worth or count >= len(places.volumes):
            break
    assert chosen is not None
    return chosen


class _Trial:
    """Tries orders on the patches of an epoch.

    Args:
        geometry: of the volumes.
        places: where the patches are.
    """

    def __init__(self, geometry: Geometry, places: Places) -> None:
        self._geometry, self._places = geometry, places
        space = geometry.space
        counts = -(-space.shapes // geometry.units)
        # Units are counted through all volumes.
        self._firsts = np.cumsum(np.concatenate([[0], counts.prod(axis=1)]))
        self._steps = np.ones_like(counts)
        for dim in range(counts.shape[1] - 2, -1, -1):
            self._steps[:, dim] = self._steps[:, dim + 1] * counts[:, dim + 1]
        visits = [
            unit_visits(
                space.shapes[volume].tolist(), unit, space.patch.tolist(),
                places.starts[places.volumes == volume],
            ).ravel()
            for volume, unit in enumerate(geometry.units.tolist())
        ]  # fmt: skip
        self._visits = np.concatenate(visits)
        self._touched: dict[int, list[int]] = {}
        cells = (-(-space.counts // geometry.units)).max(axis=0).tolist()
        # The beginnings of all tours that differ, which are few where there are few patches.
        self._tours: dict[bytes, tuple[Stripes, Int64Array]] = {}
        for axis in range(len(cells)):
            widths = ([1] if dim == axis else some_widths(cell) for dim, cell in enumerate(cells))
            for some in itertools.product(*widths):
                stripes = Stripes(axis, some)
                order = _some_of(self.ranks(stripes), 1)
                self._tours.setdefault(order.tobytes(), (stripes, order))

    def ranks(self, stripes: Stripes) -> Int64Array:
        """The place of each patch in a tour."""
        return tour_of(self._geometry, self._places, stripes, seed=0, epoch=0)

    def best_stripes(self, room: float) -> Stripes:
        """The stripes with which the least is decoded on a tour with so much room."""
        best: tuple[float, Stripes] | None = None
        for stripes, order in self._tours.values():
            times = self.amplification(order, room, math.inf if best is None else best[0])
            if best is None or times < best[0]:
                best = times, stripes
        assert best is not None
        return best[1]

    def _units_of(self, patch: int) -> list[int]:
        """The units that a patch touches."""
        found = self._touched.get(patch)
        if found is None:
            space, volume = self._geometry.space, int(self._places.volumes[patch])
            start, unit = self._places.starts[patch], self._geometry.units[volume]
            lows = np.maximum(start, 0) // unit
            highs = (np.minimum(start + space.patch, space.shapes[volume]) - 1) // unit
            numbers = self._firsts[volume : volume + 1]
            for low, high, step in zip(lows, highs, self._steps[volume], strict=True):
                numbers = np.add.outer(numbers, np.arange(low, high + 1) * step).ravel()
            found = self._touched[patch] = numbers.tolist()
        return found

    def amplification(self, order: Int64Array, room: float, limit: float = math.inf) -> float:
        """Bytes of units that are decoded for each byte of patches in an order, if what will not be wanted
        again is forgotten first, and then what was not used for the longest time; not less than ``limit``
        where it is beyond that."""
        geometry = self._geometry
        held = max(1, int(room // max(1, geometry.unit_nbytes)))
        used = len(order) * math.prod(geometry.space.patch.tolist())
        voxels = math.prod(geometry.units[0].tolist())
        most = limit * used / voxels
        remembered: OrderedDict[int, None] = OrderedDict()
        left: dict[int, int] = {}
        decoded = 0
        for patch in order.tolist():
            for unit in self._units_of(patch):
                uses = left[unit] = left.get(unit, int(self._visits[unit])) - 1
                if unit in remembered:
                    remembered.move_to_end(unit)
                else:
                    decoded += 1
                    remembered[unit] = None
                if uses <= 0:  # nobody will want it any more
                    del remembered[unit]
                elif len(remembered) > held:
                    remembered.popitem(last=False)
            if decoded > most:
                break
        return float(decoded * voxels / max(1, used))


def _some_of(ranks: Int64Array, fronts: int) -> Int64Array:
    """The beginning of an order with so many fronts."""
    tour = np.argsort(ranks, kind="stable")
    fronts = min(fronts, len(tour))
    each = min(len(tour) // fronts, max(_TRIED // fronts, _LEAST_OF_FRONT))
    firsts = np.arange(fronts) * len(tour) // fronts
    some: Int64Array = tour[(firsts[None, :] + np.arange(each)[:, None]).ravel()]
    return some


def some_widths(most: int) -> list[int]:
    """Widths of stripes that are tried, in units, up to the largest; the larger the farther apart."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, 2 * sizes[-1]))
    return sizes

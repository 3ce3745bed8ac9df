"""Which tour through volumes decodes least: found by trying some on patches of an epoch."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.volumes.places import Places
from fastpipe.volumes.tours import Geometry, Stripes, tour_of
from fastpipe.volumes.visits import unit_visits

__all__ = ["TourTrial", "TriedOrder", "planned"]

Int64Array = npt.NDArray[np.int64]

_FRONTS = (1, 2, 4, 8, 16, 32, 64)
_TRIED = 256  # patches on which stripes are tried
_LEAST_OF_FRONT = 24  # of these, at least, from each place: what is decoded for the first is not typical
_WORTH = 1.25  # decoded bytes for each that is used: more is not given for a wider window
_LITTLE = 1.15  # times as much is given where patches are too far apart for little to be decoded
_ENDLESS = 1 << 62


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
    """The units of patches in the order in which these come.

    Attributes:
        units: int64 (M,): numbers of units from 0 to K - 1, patch after patch.
        ends: int64 (N,): where those of each patch end.
        visits: int64 (K,): how many patches of the epoch touch each unit.
    """

    units: Int64Array
    ends: Int64Array
    visits: Int64Array


class TourTrial:
    """Tries orders on the patches of an epoch.

    Args:
        geometry: of the volumes.
        places: where the patches are; at least one.

    """

    def __init__(self, geometry: Geometry, places: Places) -> None:
        self._geometry, self._places = geometry, places
        space, units = geometry.space, geometry.units
        counts = -(-space.shapes // units)
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
            for volume, unit in enumerate(units.tolist())
        ]  # fmt: skip
        self._visits = np.concatenate(visits)

    @functools.cached_property
    def tours(self) -> list[tuple[Stripes, TriedOrder]]:
        """The beginnings of all tours from one place that differ: where there are few patches, few."""
        space, units = self._geometry.space, self._geometry.units
        cells = (-(-space.counts // units)).max(axis=0).tolist()
        found: dict[bytes, tuple[Stripes, TriedOrder]] = {}
        for axis in range(len(cells)):
            widths = ([1] if dim == axis else _some_widths(cell) for dim, cell in enumerate(cells))
            for some in itertools.product(*widths):
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
        """Some patches at the beginning of an order with so many fronts."""
        return self.order_of(self._beginning(stripes, fronts))

    def amplification(self, order: TriedOrder, room: float, limit: float = math.inf) -> float:
        """Bytes of units that are decoded for each byte of patches in an order, if what will not be wanted
        again is forgotten first, and then what was not used for the longest time; not less than ``limit``
        where it is beyond that.

        Args:
            order: as found in ``tours``.
            room: bytes for units that are remembered.
            limit: as above.
        """
        geometry = self._geometry
        held = max(1, int(room // max(1, geometry.unit_nbytes)))
        used: int = len(order.ends) * math.prod(geometry.space.patch.tolist())
        voxels: int = math.prod(geometry.units[0].tolist())
        most = _ENDLESS if limit == math.inf else int(limit * used / voxels)
        decoded: int = native.decoded_units(*order, held, most)
        return decoded * voxels / used

    def _beginning(self, stripes: Stripes, fronts: int) -> Int64Array:
        """The numbers of these patches."""
        ranks = tour_of(self._geometry, self._places, stripes, seed=0, epoch=0)
        tour = np.argsort(ranks, kind="stable")
        fronts = min(fronts, len(tour))
        each = min(len(tour) // fronts, max(_TRIED // fronts, _LEAST_OF_FRONT))
        firsts = np.arange(fronts) * len(tour) // fronts
        some: Int64Array = tour[(firsts[None, :] + np.arange(each)[:, None]).ravel()]
        return some

    def order_of(self, patches: Int64Array) -> TriedOrder:
        """Patches in an order.

        Args:
            patches: int64 (N,): their numbers, as they come.
        """
        space, volumes = self._geometry.space, self._places.volumes[patches]
        starts, units = self._places.starts[patches], self._geometry.units[volumes]
        lows = np.maximum(starts, 0) // units
        highs = (np.minimum(starts + space.patch, space.shapes[volumes]) - 1) // units
        numbers, ends = native.touched_units(
            self._firsts[volumes], lows, highs - lows + 1, self._steps[volumes]
        )
        some, places = np.unique(numbers, return_inverse=True)
        return TriedOrder(places.astype(np.int64), ends, self._visits[some].astype(np.int64))


def _some_widths(most: int) -> list[int]:
    """Widths of stripes that are tried, in units, up to the largest; the larger the farther apart."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, 2 * sizes[-1]))
    return sizes

"""How the patches of a dataset are visited so that little is decoded twice."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places
from fastpipe.volumes.sources import Role
from fastpipe.volumes.tour_trials import planned
from fastpipe.volumes.tours import Geometry, Stripes, tour_of

__all__ = ["Touring"]

_TRIED = 1 << 16  # patches of an epoch by which a tour is planned


class Touring:
    """Plans tours through the volumes of a dataset.  Can be sent to other processes.

    Args:
        roles: the arrays.
        space: where patches can be.
        places: where they are.
        room: bytes for what is remembered.
    """

    def __init__(self, roles: Sequence[Role], space: PatchSpace, places: PatchPlaces, room: int) -> None:
        self._places, self._room = places, room
        # What costs most to read twice decides; other arrays have other units.
        leading = max(roles, key=lambda role: sum(volume.nbytes for volume in role.volumes))
        dims = len(space.patch)
        units = np.array([volume.grid.unit[len(leading.lead) :] for volume in leading.volumes], np.int64)
        voxels = sum(volume.nbytes for role in roles for volume in role.volumes)
        more = voxels / max(1, sum(volume.nbytes for volume in leading.volumes))
        largest = max(
            int(np.prod(leading.lead)) * leading.dtype.itemsize * int(np.prod(unit)) for unit in units
        )
        self._geometry = Geometry(space, units.reshape(-1, dims), int(largest * more))
        self._planned: dict[int | None, tuple[int, Stripes, float]] = {}

    def planned(self, window: int | None) -> tuple[int, Stripes, float]:
        """For so many places at a time, or as many as go: how many, by which stripes, and how many bytes are
        decoded for each that is used."""
        if window not in self._planned:
            # By what another seed draws: an order does not depend on the budget but through this.
            some = self._places.places(0, 0, np.arange(min(self._places.count, _TRIED)))
            found = planned(self._geometry, some, self._room, window)
            self._planned[window] = self._planned[found[0]] = found
        return self._planned[window]

    def ranks(self, window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The place of each patch of an epoch in the tour: int64 (N,)."""
        _, stripes, _ = self.planned(window)
        places = self._places.places(seed, epoch, np.arange(self._places.count))
        return tour_of(self._geometry, places, stripes, seed=seed, epoch=epoch)

    def about(self, window: int) -> str:
        """What decides a tour, beside seed and epoch."""
        space = self._geometry.space
        shapes = zlib.crc32(np.concatenate([space.shapes, self._geometry.units]).tobytes())
        return f"{self._places.count} patches of {shapes:08x}, {self.planned(window)[1]!r}"

    def groups(self, places: Places) -> npt.NDArray[np.int64]:
        """The unit in which each patch begins, counted through all volumes: int64 (N,)."""
        space, units = self._geometry.space, self._geometry.units
        counts = -(-space.shapes // units)
        firsts = np.concatenate([[0], np.cumsum(counts.prod(axis=1))])
        cells = np.maximum(places.starts, 0) // units[places.volumes]
        numbers = np.zeros(len(cells), np.int64)
        for dim in range(cells.shape[1]):
            numbers = numbers * counts[places.volumes, dim] + cells[:, dim]
        return np.asarray(firsts[places.volumes] + numbers, np.int64)

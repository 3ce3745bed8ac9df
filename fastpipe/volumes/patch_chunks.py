"""Which chunks of volumes that are somewhere else patches need: fetched before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.volumes.places import Places
from fastpipe.volumes.remote import ChunkStore, Needed, RemoteChunks
from fastpipe.volumes.sources import Role
from fastpipe.volumes.units import Foreseen
from fastpipe.volumes.volume import UnitGrid, Volume
from fastpipe.volumes.wrappers import GroupedVolume, NativeVolume
from fastpipe.volumes.zarr import ZarrVolume

__all__ = ["PatchChunks", "Units"]

Int64Array = npt.NDArray[np.int64]
Units = Sequence[tuple[Any, int]]  # of each array its ``native.UnitMemory`` or None, and its first key


class _Array(NamedTuple):
    """An array whose chunks are objects.

    Attributes:
        number: of the array, among those of all roles.
        volume: number of the volume.
        lead: dimensions in front of those that patches are cut along.
        units: what is decoded, and remembered, at once.
        chunks: what is fetched at once.
        objects: these.
    """

    number: int
    volume: int
    lead: int
    units: UnitGrid
    chunks: UnitGrid
    objects: RemoteChunks

    def touched(self, places: Places, patch: Int64Array) -> Int64Array:
        """Numbers of the units that patches touch, one patch after the other."""
        starts = places.starts[places.volumes == self.volume]
        shape = np.array(self.units.shape, np.int64)
        low, high = np.zeros((len(starts), len(shape)), np.int64), np.tile(shape, (len(starts), 1))
        # Of what is beyond the ends (padding) the nearest inside.
        low[:, self.lead :] = np.clip(starts, 0, shape[self.lead :] - 1)
        high[:, self.lead :] = np.clip(starts + patch, 1, shape[self.lead :])
        numbers, are_there = self.units.touched_by_each(low, np.maximum(high, low + 1))
        return numbers[are_there]

    def rows(self, numbers: Int64Array) -> Int64Array:
        """The objects of units, as far as there are any."""
        if self.units.unit != self.chunks.unit and self.units.unit:
            unit = np.array(self.units.unit, np.int64)
            starts = np.stack(np.unravel_index(numbers, self.units.counts), axis=-1) * unit
            stops = np.minimum(starts + unit, self.units.shape)
            chunks, are_there = self.chunks.touched_by_each(starts, stops)
            numbers = chunks[are_there]
        rows = self.objects.rows(numbers)
        return rows[rows >= 0]


class PatchChunks:
    """The chunks of all arrays of a dataset that are somewhere else.

    Args:
        arrays: these arrays.
        patch: the patches' size.
    """

    def __init__(self, arrays: Sequence[_Array], patch: Sequence[int]) -> None:
        self._arrays, self._patch = arrays, np.array(patch, np.int64)
        self.stores: list[ChunkStore] = list(dict.fromkeys(one.objects.store for one in arrays))
        # What an order has for batches that have not begun yet.
        self._expected: dict[tuple[int, bytes], Int64Array] = {}

    @classmethod
    def of(cls, roles: Sequence[Role], patch: Sequence[int]) -> PatchChunks | None:
        """Those of some arrays; None where all are near."""
        volumes = [(role, number) for role in roles for number in range(len(role.volumes))]
        found = []
        for place, (role, number) in enumerate(volumes):
            volume = role.volumes[number]
            inner = _innermost(volume)
            if isinstance(inner, ZarrVolume) and isinstance(inner.objects, RemoteChunks):
                lead = len(role.lead)
                found.append(_Array(place, number, lead, volume.grid, inner.chunks, inner.objects))
        return cls(found, patch) if found else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_expected": {}}

    def need(self, places: Places, units: Units) -> Needed:
        """Say that patches will be read; what is remembered of them is not fetched.

        Args:
            places: where they are.
            units: for each array where its units are remembered, and the number there of its first.
        """
        needed = Needed()
        rows: dict[ChunkStore, list[Int64Array]] = {store: [] for store in self.stores}
        for one in self._arrays:
            numbers = one.touched(places, self._patch)
            slots, first = units[one.number]
            store = one.objects.store
            if slots is None:
                rows[store].append(one.rows(numbers))
            else:
                some = one.rows(_missing(slots, np.unique(numbers) + first) - first)
                rows[store].append(some[~store.are_needed(some)])
        for place, (store, parts) in enumerate(rows.items()):
            some = np.concatenate(parts)
            store.need(some, needed)
            expected = self._expected.pop((place, _name(places)), None)
            if expected is not None:
                store.are_here(np.setdiff1d(expected, some))
        return needed

    def foreseen(self, store: ChunkStore, places: Places, foreseen: Foreseen) -> Int64Array:
        """The objects of a store that will have to be fetched for the patches of a batch."""
        parts = [np.zeros(0, np.int64)]
        for one in self._arrays:
            if one.objects.store is store:
                parts.append(one.rows(foreseen.missed(one.number, one.touched(places, self._patch))))
        return np.concatenate(parts)

    def expect(self, store: ChunkStore, places: Places, rows: Int64Array) -> None:
        """Note that an order has these rows for a batch."""
        if len(rows):
            self._expected[self.stores.index(store), _name(places)] = rows

    def expect_nothing(self) -> None:
        """Another order begins."""
        self._expected.clear()


def _missing(slots: Any, keys: Int64Array) -> Int64Array:
    """Those of units that nobody remembers, or is decoding."""
    missing: Int64Array = keys[~slots.are_there(keys, or_coming=True)]
    return missing


def _name(places: Places) -> bytes:
    """What tells a batch from others: its first patch."""
    return places.volumes[:1].tobytes() + places.starts[:1].tobytes()


def _innermost(volume: Volume) -> Volume:
    while isinstance(volume, (GroupedVolume, NativeVolume)):
        volume = volume.inner
    return volume

"""Which chunks of volumes that are somewhere else patches need: fetched before they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.cache.units import UnitSlots
from fastpipe.index.patches import PatchPlaces, Places
from fastpipe.read.volumes.grid import UnitGrid
from fastpipe.read.volumes.grouped import GroupedVolume
from fastpipe.read.volumes.native import NativeVolume
from fastpipe.read.volumes.volume import Volume
from fastpipe.read.volumes.zarr import ZarrVolume
from fastpipe.torch.ahead import Ahead
from fastpipe.torch.patches.foreseen import Foreseen
from fastpipe.torch.patches.sources import Role
from fastpipe.torch.remote_chunks import ChunkStore, Needed, RemoteChunks
from fastpipe.torch.views import integers, located

__all__ = ["PatchChunks", "PatchLookout"]

Int64Array = npt.NDArray[np.int64]
_Units = Sequence[tuple[UnitSlots | None, int]]


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

    def need(self, places: Places, units: _Units) -> Needed:
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


class PatchLookout:
    """Has chunks fetched before they are asked for.

    Args:
        dataset: the loader's.
        base: the dataset of patches behind it.
        places: where these are.
        chunks: which chunks they need.
        foreseen: begins a look at what will be remembered.
        units: gives where units are remembered.
        is_here: whether batches are made in this process; else chunks are only staged, for workers.
    """

    def __init__(
        self,
        dataset: Any,
        base: Any,
        places: PatchPlaces,
        chunks: PatchChunks,
        foreseen: Callable[[_Units], Foreseen],
        units: Callable[[], _Units],
        is_here: bool,
    ) -> None:
        self._dataset, self._base, self._places, self._chunks = dataset, base, places, chunks
        self._foreseen, self._units, self._is_here = foreseen, units, is_here
        self._ahead: Ahead | None = None

    def follow(self, ahead: Ahead) -> None:
        """An epoch begins, and this is ahead."""
        self._ahead = ahead
        self._chunks.expect_nothing()
        for store in self._chunks.stores:
            order = _order(weakref.ref(self), store.location.store, ahead)
            store.reader().follow(order, None, is_here=self._is_here)

    def asked(self, indices: Sequence[int]) -> None:
        """A batch of these indices was asked for."""
        if self._is_here or self._ahead is None:
            return  # a batch says so itself
        places = self._at(integers(indices), self._ahead, 0)
        if places is not None:
            self._chunks.need(places, self._units())

    def rows(self, store: str, indices: Int64Array, ahead: Ahead, later: int, foreseen: Foreseen) -> Any:
        """The objects of a store that a batch will need: int64 (N,); None if that is not known."""
        places = self._at(indices, ahead, later)
        if places is None:
            return None
        found = next(one for one in self._chunks.stores if one.location.store == store)
        rows = self._chunks.foreseen(found, places, foreseen)
        if self._is_here:
            self._chunks.expect(found, places, rows)
        return rows

    def look(self) -> Foreseen:
        """Begin a look at what will be remembered."""
        return self._foreseen(self._units())

    def _at(self, indices: Int64Array, ahead: Ahead, later: int) -> Places | None:
        """Where the patches of these indices are that are of this dataset; None if that is not known."""
        drawn_by = ahead.drawn_by(later) if self._places.is_random else (0, 0)
        if drawn_by is None:
            return None
        for end, _, local in located(self._dataset, indices):
            if end is self._base:
                return self._places.places(*drawn_by, np.where(local < 0, local + len(end), local))
        return self._places.places(*drawn_by, np.zeros(0, np.int64))


def _order(lookout: weakref.ref[PatchLookout], store: str, ahead: Ahead) -> Iterator[Int64Array]:
    """The objects of a store that will be needed, as long as anybody wants to know: whoever goes on with this
    must not keep the dataset."""
    seer = lookout()
    foreseen = None if seer is None else seer.look()
    del seer
    for later, indices in ahead.parts():
        seer = lookout()
        if seer is None or foreseen is None:
            return
        rows = seer.rows(store, indices, ahead, later, foreseen)
        del seer
        if rows is None:
            return
        yield rows


def _missing(slots: UnitSlots, keys: Int64Array) -> Int64Array:
    """Those of units that nobody remembers, or is decoding."""
    keys = keys[slots.find(keys).slots < 0]
    return keys[[not slots.is_coming(key) for key in keys.tolist()]] if len(keys) else keys


def _name(places: Places) -> bytes:
    """What tells a batch from others: its first patch."""
    return places.volumes[:1].tobytes() + places.starts[:1].tobytes()


def _innermost(volume: Volume) -> Volume:
    while isinstance(volume, (GroupedVolume, NativeVolume)):
        volume = volume.inner
    return volume

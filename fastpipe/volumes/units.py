"""Keep decoded units in memory, and find the remote chunks to prefetch.

A unit is a chunk, or a part of a chunk that can be decoded on its own.  One memory budget covers all arrays,
threads and processes.  For remote arrays, fastpipe prefetches the chunks that patches will need, unless their
units are in memory.
"""

from __future__ import annotations

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.machine import free_memory, local_ranks
from fastpipe.core.shared_chunks import UnitFile, joined_memory, slot_nbytes
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError
from fastpipe.options import Cache
from fastpipe.volumes.places import Places
from fastpipe.volumes.remote import ChunkStore, Needed, RemoteChunks
from fastpipe.volumes.sources import Role
from fastpipe.volumes.tours import UnitArray, units_used
from fastpipe.volumes.volume import GroupedVolume, Int64Array, NativeVolume, UnitGrid, Volume
from fastpipe.volumes.zarr import ZarrVolume

Units = Sequence[tuple[Any, int]]  # each array's ``native.UnitMemory`` or None, and the first unit's key

_log = logging.getLogger("fastpipe.cache")
_SHARE = 4  # "auto" takes the free memory divided by this number
_ASSUMED = 1 << 30  # budget in bytes for planning an order, because the order must be equal on all machines
_MOST_SIZES = 4  # up to this many unit sizes, each size has its own slots
_MOST_WASTE = 1.25  # with more unit sizes, the largest ratio of a slot's size to a unit's size


def budget_of(cache: Cache) -> int:
    if cache.where == "off":
        return 0
    if cache.where == "disk":
        raise OptionError(
            "Cache('disk') is not for volumes; of one that is slow to read, make a copy that is not: "
            "fastpipe repack"
        )
    if cache.max_bytes != "auto":
        return int(cache.max_bytes)
    return (free_memory() or 4 * _ASSUMED) // _SHARE


def planned_room(cache: Cache) -> int:
    """Return the memory budget in bytes with which orders of patches are planned.

    This budget does not depend on the free memory, so all machines plan the same order.
    """
    return 0 if cache.where == "off" else _ASSUMED if cache.max_bytes == "auto" else int(cache.max_bytes)


class _Class(NamedTuple):
    slot_nbytes: int  # bytes of each slot, which holds one unit
    keys: int  # number of units that use slots of this size
    slots: int  # number of units that are kept in memory


class Remembered:
    """The memory for decoded units.  It is created in the parent of the processes that share it."""

    def __init__(self, roles: Sequence[Role], budget: int, *, is_fixed: bool = True) -> None:
        self._arrays = [(role, number) for role in roles for number in range(len(role.volumes))]
        volumes = [role.volumes[number] for role, number in self._arrays]
        keys: dict[int, int] = {}
        # For each array: its slot size, and the key of its first unit among all units with this slot size.
        self._firsts: list[tuple[int, int]] = []
        sizes = _slot_sizes([volume.unit_nbytes for volume in volumes if volume.array is None])
        for volume in volumes:
            size = sizes.get(volume.unit_nbytes, slot_nbytes(0))
            self._firsts.append((size, keys.get(size, 0)))
            keys[size] = keys.get(size, 0) + (volume.grid.count if volume.array is None else 0)
        total = sum(size * count for size, count in keys.items())
        share = min(1.0, budget / total) if total else 0.0
        self.keeps_all = share == 1.0
        self._classes = [
            _Class(size, count, count if share == 1.0 else int(share * count))
            for size, count in keys.items()
            if count
        ]
        job = _job(volumes, budget if is_fixed else 0)
        self._memories = {one.slot_nbytes: _memory(one, job) for one in self._classes if one.slots}
        if not total:
            self.note = "nothing has to be decoded"
        elif not budget:
            self.note = "not remembered (cache='off')"
        else:
            some = in_bytes(total) if self.keeps_all else f"{in_bytes(budget)} of {in_bytes(total)}"
            self.note = f"remembered in memory that threads and processes share, {some}"

    def most_uses(self, patch: Sequence[int]) -> int:
        """Return how many units one patch of this size uses at most, in all arrays of a volume together."""
        found: dict[int, int] = {}
        for role, number in self._arrays:
            volume, lead = role.volumes[number], len(role.lead)
            if volume.array is None:
                counts, sides = volume.grid.counts, volume.grid.unit[lead:]
                touched = [-(-size // side) + 1 for size, side in zip(patch, sides, strict=True)]
                inside = math.prod(map(min, touched, counts[lead:]))
                found[number] = found.get(number, 0) + math.prod(counts[:lead]) * inside
        return max(found.values(), default=0)

    def uses(self, places: Places, patch: Sequence[int]) -> Callable[[int], Int64Array]:
        """Return a function that takes a slot size, and returns the keys of the units that patches use.

        Only units in slots of this size are returned, in the order of the patches: int64 (N,).
        """

        def of(size: int) -> Int64Array:
            arrays = []
            for (each, first), (role, number) in zip(self._firsts, self._arrays, strict=True):
                volume, lead = role.volumes[number], len(role.lead)
                if each == size and volume.array is None:
                    shape, unit = role.spatial(number), volume.grid.unit[lead:]
                    step = math.prod(volume.grid.counts[lead:])
                    boxes = math.prod(volume.grid.counts[:lead])
                    arrays += [UnitArray(number, first + box * step, shape, unit) for box in range(boxes)]
            return units_used(arrays, places, patch)

        return of

    def foreseen(self, units: Units) -> Foreseen:
        """Return a simulation that predicts which units must be decoded; ``units`` come from ``slots``."""
        rooms = {one.slot_nbytes: (one.keys, one.slots) for one in self._classes}
        return Foreseen(units, [size for size, _ in self._firsts], rooms)

    def slots(self, workers: int = 0) -> list[tuple[Any, int]]:
        """Return, for each array, this process's ``native.UnitMemory`` or None, and the first unit's key.

        ``workers`` is the number of worker processes, of which this process is one.  If there are no worker
        processes, ``workers`` is 0.
        """
        made: dict[int, Any] = {}
        for one in self._classes:
            memory = self._memories.get(one.slot_nbytes)
            # If the worker processes and ranks cannot share memory, each gets its own part of the budget.
            if memory is None and (own := one.slots // (max(1, workers) * local_ranks())):
                memory = _memory(one._replace(slots=own))
            made[one.slot_nbytes] = _mapped(memory)
        return [(made.get(size), first) for size, first in self._firsts]


def _slot_sizes(sizes: Iterable[int]) -> dict[int, int]:
    """Return, for each unit size in ``sizes``, the size of the slots in memory for such units.

    Each slot size gets a part of the budget.  Files of many shapes have many unit sizes.  With a slot size
    for each of them, the parts would be too small to help.  Units of similar sizes then share slots that are
    up to a quarter larger than the units.
    """
    aligned = {size: slot_nbytes(size) for size in sizes}
    if len(set(aligned.values())) <= _MOST_SIZES:
        return aligned
    found: dict[int, int] = {}
    slot = 0
    for size in sorted(aligned, reverse=True):  # from the largest size, which fits its slot exactly
        if not slot or slot > _MOST_WASTE * aligned[size]:
            slot = aligned[size]
        found[size] = slot
    return found


def _job(volumes: Sequence[Volume], budget: int) -> str:
    """Return a name under which a job's ranks on this machine share memory; empty if there is one rank."""
    if local_ranks() == 1:
        return ""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    launch = [os.environ.get(name, "") for name in names]
    # The name contains the files' states, because units of a rewritten file must not be used.
    found = [
        (one.name, one.state()[1], one.shape, one.dtype.str, one.grid.unit)
        for one in volumes
        if one.array is None
    ]
    return repr([launch, budget, found])


def _memory(one: _Class, job: str = "") -> UnitFile | None:
    if job:
        try:
            return joined_memory(job, one.keys, one.slots, one.slot_nbytes)
        except OSError as error:
            ranks = local_ranks()
            _log.warning(
                "%d ranks of this machine do not share what is decoded, each has a part of the budget: %s",
                ranks, str(error),  # as text: log handlers keep it, and its traceback would keep this object
            )  # fmt: skip
            one = one._replace(slots=one.slots // ranks)
    if not one.slots:
        return None
    try:
        return UnitFile(one.keys, one.slots, one.slot_nbytes)
    except OSError as error:
        _log.warning("decoded parts of volumes are not kept: %s", str(error))
        return None


def _mapped(memory: UnitFile | None) -> Any:
    try:
        return None if memory is None else memory.opened()
    except OSError as error:
        _log.warning("decoded parts of volumes are not kept: %s", str(error))
        return None


class Foreseen:
    """A simulation of the memory for decoded units, which evicts the least recently used units.

    The simulation is only used to decide which chunks to prefetch.  The real memory evicts units by a better
    rule, and serves all processes.
    """

    def __init__(self, units: Units, sizes: Sequence[int], rooms: Mapping[int, tuple[int, int]]) -> None:
        self._units, self._sizes, self._rooms = units, sizes, rooms
        self._kept: dict[int, OrderedDict[int, None]] = {}
        for (slots, _), size in zip(units, sizes, strict=True):
            if slots is not None and size not in self._kept:
                are_there = slots.are_there(np.arange(rooms[size][0]))
                self._kept[size] = OrderedDict.fromkeys(np.flatnonzero(are_there).tolist())

    def missed(self, array: int, numbers: Int64Array) -> Int64Array:
        """Simulate the use of the units ``numbers``; return the units that are not in memory: int64 (N,)."""
        slots, first = self._units[array]
        if slots is None:
            return numbers
        size = self._sizes[array]
        kept, missed = self._kept[size], []
        for key in (numbers + first).tolist():
            if key not in kept:
                missed.append(key - first)
            kept[key] = None
            kept.move_to_end(key)
            if len(kept) > self._rooms[size][1]:
                kept.popitem(last=False)
        return np.array(missed, np.int64)


class _Array(NamedTuple):
    number: int  # index of the array among the arrays of all roles
    volume: int  # index of the volume
    lead: int  # number of leading dimensions, which patches contain completely
    units: UnitGrid  # the units, which are decoded and kept in memory
    chunks: UnitGrid  # the chunks, which are fetched
    objects: RemoteChunks  # the objects that contain the chunks

    def touched(self, places: Places, patch: Int64Array) -> Int64Array:
        """Return the numbers of the units that overlap with patches, in the order of the patches."""
        starts = places.starts[places.volumes == self.volume]
        shape = np.array(self.units.shape, np.int64)
        low, high = np.zeros((len(starts), len(shape)), np.int64), np.tile(shape, (len(starts), 1))
        # A patch completely beyond an end needs the nearest element inside for its padding.
        low[:, self.lead :] = np.clip(starts, 0, shape[self.lead :] - 1)
        high[:, self.lead :] = np.clip(starts + patch, 1, shape[self.lead :])
        numbers, are_there = self.units.touched_by_each(low, np.maximum(high, low + 1))
        return numbers[are_there]

    def rows(self, numbers: Int64Array) -> Int64Array:
        """Return the existing objects that contain the units, by their indices in the store's list."""
        if self.units.unit != self.chunks.unit and self.units.unit:
            unit = np.array(self.units.unit, np.int64)
            starts = np.stack(np.unravel_index(numbers, self.units.counts), axis=-1) * unit
            stops = np.minimum(starts + unit, self.units.shape)
            chunks, are_there = self.chunks.touched_by_each(starts, stops)
            numbers = chunks[are_there]
        rows = self.objects.rows(numbers)
        return rows[rows >= 0]


class PatchChunks:
    """The chunks of all remote arrays of a dataset."""

    def __init__(self, arrays: Sequence[_Array], patch: Sequence[int]) -> None:
        self._arrays, self._patch = arrays, np.array(patch, np.int64)
        self.stores: list[ChunkStore] = list(dict.fromkeys(one.objects.store for one in arrays))
        # Rows that a prefetched order contains, for batches that have not started.
        self._expected: dict[tuple[int, bytes], Int64Array] = {}

    @classmethod
    def of(cls, roles: Sequence[Role], patch: Sequence[int]) -> PatchChunks | None:
        volumes = [(role, number) for role in roles for number in range(len(role.volumes))]
        found = []
        for place, (role, number) in enumerate(volumes):
            inner = volume = role.volumes[number]
            while isinstance(inner, (GroupedVolume, NativeVolume)):
                inner = inner.inner
            if isinstance(inner, ZarrVolume) and isinstance(inner.objects, RemoteChunks):
                lead = len(role.lead)
                found.append(_Array(place, number, lead, volume.grid, inner.chunks, inner.objects))
        return cls(found, patch) if found else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_expected": {}}

    def need(self, places: Places, units: Units) -> Needed:
        """Announce that patches will be read.  Chunks are fetched unless their units are in memory."""
        needed = Needed()
        rows: dict[ChunkStore, list[Int64Array]] = {store: [] for store in self.stores}
        for one in self._arrays:
            numbers = one.touched(places, self._patch)
            slots, first = units[one.number]
            store = one.objects.store
            if slots is None:
                rows[store].append(one.rows(numbers))
            else:
                some = np.unique(numbers)
                some = one.rows(some[~slots.are_there(some + first, or_coming=True)])
                rows[store].append(some[~store.are_needed(some)])
        for place, (store, parts) in enumerate(rows.items()):
            some = np.concatenate(parts)
            store.need(some, needed)
            expected = self._expected.pop((place, _name(places)), None)
            if expected is not None:
                store.are_here(np.setdiff1d(expected, some))
        return needed

    def foreseen(self, store: ChunkStore, places: Places, foreseen: Foreseen) -> Int64Array:
        """Return the objects that a batch must fetch from ``store``, by their indices in its list."""
        parts = [np.zeros(0, np.int64)]
        for one in self._arrays:
            if one.objects.store is store:
                parts.append(one.rows(foreseen.missed(one.number, one.touched(places, self._patch))))
        return np.concatenate(parts)

    def expect(self, store: ChunkStore, places: Places, rows: Int64Array) -> None:
        """Record that the objects ``rows`` are prefetched for the batch of patches at ``places``."""
        if len(rows):
            self._expected[self.stores.index(store), _name(places)] = rows

    def expect_nothing(self) -> None:
        self._expected.clear()


def _name(places: Places) -> bytes:
    """Return a key that identifies a batch by its first patch."""
    return places.volumes[:1].tobytes() + places.starts[:1].tobytes()

"""Patches as samples of a dataset: plan patches, read batches, and read patches with other libraries."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import default_file_arrays
from fastpipe.core.array_samples import EpochOrder, Form, checked_threads, drawn_substitute
from fastpipe.core.bad_samples import BadSampleLog, Item, is_of_samples
from fastpipe.core.clock import StageClock
from fastpipe.core.extras import require
from fastpipe.core.keys import sample_seed
from fastpipe.core.native import native
from fastpipe.core.order import TouredSamples
from fastpipe.core.pool import Process, ProcessRuntime
from fastpipe.core.reads import DECLINED, Reading, ReadPolicy, ReadThreads, Started, Task
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.hdf5.opening import open_library, raw_name
from fastpipe.options import BadSamples, Cache, Rescale, Stage, ZScore
from fastpipe.sampling import Sampling, Uniform
from fastpipe.volumes.blosc2 import Blosc2Volume
from fastpipe.volumes.dicom import DicomVolume
from fastpipe.volumes.hdf5 import HDF5Volume
from fastpipe.volumes.nifti import ScaledVolume
from fastpipe.volumes.normalization import Normalizer, image_values, normalizers
from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places, keys_of
from fastpipe.volumes.raw import RawVolume
from fastpipe.volumes.reader import (
    PADDING_MODES,
    Counts,
    Padding,
    PatchReader,
    WithMargin,
    checked_margin,
    checked_nan,
    checked_size,
    filling,
    read_patch,
)
from fastpipe.volumes.remote import Needed
from fastpipe.volumes.sampling import places_of
from fastpipe.volumes.sources import Given, PatchPlan, Role, opened_roles
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.tiff import TiffVolume
from fastpipe.volumes.tours import Touring
from fastpipe.volumes.units import PatchChunks, Remembered, budget_of, planned_room
from fastpipe.volumes.volume import (
    DamagedUnitError,
    GroupedVolume,
    Int64Array,
    NativeVolume,
    UInt8Array,
    Volume,
    sides_text,
)
from fastpipe.volumes.zarr import ZarrVolume
from fastpipe.volumes.zarr_python import ZarrPythonVolume

# ----------------------------------------------------------------------------------------------------
# Patches without fastpipe: the library of each format opens the arrays, and the patches are slices.  This is
# for comparison, and is the fallback.


def library_array(volume: Volume) -> Any:
    if volume.array is not None:
        return volume.array
    if isinstance(volume, ZarrVolume):
        return require("zarr", extra="volume").open_array(volume.name, mode="r")
    if isinstance(volume, (ZarrPythonVolume, DicomVolume)):
        return volume.array_of_library()
    if isinstance(volume, RawVolume):
        return volume.mapped()
    if isinstance(volume, TensorStoreVolume):
        store = volume.store()
        return _Sliced(lambda box: np.asarray(store[box].read().result()))
    if isinstance(volume, (GroupedVolume, NativeVolume)):
        return library_array(volume.inner)
    if isinstance(volume, HDF5Volume):
        return open_library(volume.path)[raw_name(volume.layout.name)]
    if isinstance(volume, Blosc2Volume):
        return require("blosc2", extra="volume").open(volume.name, mode="r")
    if isinstance(volume, TiffVolume):
        return require("tifffile", extra="volume").imread(volume.files)
    if isinstance(volume, ScaledVolume):
        stored, scaled = library_array(volume.inner), volume.scaled
        return _Sliced(lambda box: scaled(np.asarray(stored[box])))
    raise TypeError(f"{type(volume).__name__} has no library of its own")


class _Sliced:
    """An object like an array: ``read`` returns its slices."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, box: Any) -> Any:
        return self._read(box)


class SlicedPatches:
    """Patches that are slices of arrays, which the formats' own libraries open."""

    def __init__(
        self,
        roles: Sequence[Role],
        places: PatchPlaces,
        padding: Padding,
        nan: str | float,
        patch_size: Sequence[int],
        normalizers: Sequence[Normalizer] | None,
    ) -> None:
        self._roles, self._places, self._padding, self._nan = roles, places, padding, nan
        self._size, self._normalizers = tuple(patch_size), normalizers
        self._open: tuple[int, dict[tuple[int, int], Any]] = os.getpid(), {}

    def __len__(self) -> int:
        return self._places.count

    @property
    def is_random(self) -> bool:
        return self._places.is_random

    def values(self, index: int, seed: int, epoch: int) -> list[npt.NDArray[Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample index {index} is out of range for a dataset of {len(self)} samples")
        volumes, starts = self._places.places(seed, epoch, np.array([index % len(self)]))
        return [
            self._patch(number, int(volumes[0]), starts[0].tolist()) for number in range(len(self._roles))
        ]

    def _patch(self, number: int, volume: int, start: Sequence[int]) -> npt.NDArray[Any]:
        role, array = self._roles[number], self._array(number, volume)
        sides = list(zip(start, self._size, role.spatial(volume), strict=True))
        ends = [(max(0, -at), max(0, at + size - most)) for at, size, most in sides]
        box: Any = (..., *(slice(max(0, at), max(0, at) + size) for at, size, _ in sides))
        if number == 0 and self._normalizers is not None:
            normalizer, pads = self._normalizers[volume], any(map(any, ends))
            patch = image_values(array[...] if pads else array[box], self._nan, normalizer)
            return self._padded(role, patch, ends)[box] if pads else patch
        if any(map(any, ends)):  # ``numpy.pad`` needs the whole array
            array = self._padded(role, array[...], ends)
        patch = np.array(array[box], role.dtype)
        if number == 0 and self._nan != "keep" and patch.dtype.kind in "fc" and np.isnan(patch).any():
            if self._nan == "error":
                raise BadSampleError(f"{role.volumes[volume].name} has a NaN in the patch at {tuple(start)}")
            patch[np.isnan(patch)] = self._nan
        return patch

    def _padded(self, role: Role, whole: Any, ends: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
        options = {}
        if self._padding.mode == "constant":
            options["constant_values"] = np.array(self._padding.constant(role.name)).astype(whole.dtype)
        mode: Any = self._padding.mode
        padded: npt.NDArray[Any] = np.pad(whole, [(0, 0)] * len(role.lead) + list(ends), mode, **options)
        return padded

    def _array(self, number: int, volume: int) -> Any:
        if self._open[0] != os.getpid():
            self._open = os.getpid(), {}
        arrays, key = self._open[1], (number, volume)
        if key not in arrays:
            arrays[key] = library_array(self._roles[number].volumes[volume])
        return arrays[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}


# ---- The patches of volumes: the base class of the datasets for every framework ---------------------

_MOST_DRAWN = 101  # number of random places to choose substitutes from, if an epoch has fewer patches
_MOST_EXPECTED = 1 << 23  # the most uses of units in an epoch that are listed in advance

_PADDING = ("error", *PADDING_MODES)  # in the order of fastpipe/native/patches.h
_KEEP, _DECLINE, _REPLACE = 0, 1, 2  # policies for NaN
_MOST_DESCRIBED = 4096  # the most volumes that are described for the native core at a time
_MOST_OPEN = 256  # the most volumes that are open in Python at a time
_MOST_DECLINED = 8  # if the core fails for this many patches of a volume, only Python reads the volume

_is_bad = partial(is_of_samples, damaged=DamagedUnitError)


def _kind(role: Role, size: Sequence[int], padding: Padding, nan: str | float) -> Any:
    """Return the native core's ``PatchKind`` for a role; None if the core does not support the dtype."""
    dtype, constant, number = role.dtype, np.zeros((), role.dtype), np.zeros((), role.dtype)
    if padding.mode == "constant":
        constant[...] = padding.constant(role.name)
    done = _KEEP
    if nan != "keep" and dtype.kind in "fc":
        done = _DECLINE if nan == "error" else _REPLACE
        number[...] = 0 if nan == "error" else nan
    word = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    try:
        return native.PatchKind(
            (*role.lead, *size), len(size), dtype.itemsize, _PADDING.index(padding.mode), constant.tobytes(),
            done, word, number.tobytes(),
        )  # fmt: skip
    except ValueError:
        return None


class Options(NamedTuple):
    """The options of a dataset that a ``Runtime`` depends on."""

    bad_samples: BadSamples
    threads: int | str
    padding: Padding
    nan: str | float


class Runtime(ProcessRuntime[Options]):
    """A dataset's threads, memory and open volumes in one process.  ``chunks`` are its remote chunks."""

    def __init__(
        self,
        options: Options,
        roles: Sequence[Role],
        size: Sequence[int],
        remembered: Remembered,
        process: Process,
        chunks: PatchChunks | None,
        normalizers: Sequence[Normalizer] | None,
    ) -> None:
        super().__init__(options, process.pool)
        self.threads = ReadThreads.of(process.pool)
        self.clock = StageClock()
        self.slots = [SlotPool(KEPT_SLOTS) for _ in roles]
        self.log = BadSampleLog(options.bad_samples)
        self._roles, self._padding, self._nan = roles, options.padding, options.nan
        self._normalizers, self._constant = normalizers, options.padding.value
        if normalizers is not None:  # the constant is written after normalising
            self._padding = options.padding._replace(value=0)
        self._units, self._chunks = remembered.slots(process.workers), chunks
        self.counts = Counts(next((units for units, _ in self._units if units is not None), None))
        self._expected: dict[Any, set[int]] = {units: set() for units, _ in self._units if units is not None}
        self._firsts = np.cumsum([0, *(len(role.volumes) for role in roles)]).tolist()
        self._kinds = [
            _kind(role, size, self._padding, "keep" if number else options.nan)
            for number, role in enumerate(roles)
        ]
        self._volumes: dict[tuple[int, int], Any] = {}  # the core's volumes, by (role, volume)
        self._declined: Counter[int] = Counter()  # by volume: the patches that the core failed to read
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], PatchReader] = OrderedDict()

    def expect(
        self, seed: int, epoch: int, uses: Callable[[], tuple[Callable[[int], Int64Array], bool]]
    ) -> None:
        """Announce the patches of an epoch, so that units that no patch will use again are evicted first.

        ``uses`` returns two values.  The first is a function that takes a slot size and returns the units
        that have this slot size, with an entry for each use: int64 (N,).  The second is True if these entries
        are in order of use.  The memory then first evicts the unit whose next use is the latest.
        """
        what = zlib.crc32(f"{seed} {epoch}".encode()) + 1
        found: list[tuple[Callable[[int], Int64Array], bool]] = []
        for units, expected in self._expected.items():
            # Announce each epoch once.  Epochs that run in turns would repeat their announcements.
            if (what == units.expected or what in expected) and not units.is_over:
                continue
            expected.add(what)
            of, is_in_order = found[0] if found else uses()
            found = [(of, is_in_order)]
            units.expect(what, of(units.slot_nbytes), is_in_order)

    def start(self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]]) -> Started:
        """Prepare to read patches into the ``rows`` of ``arrays``, and return this work.

        ``arrays`` has an array (M, *lead, *patch) for each role: the volume, the labels and the mask.
        """
        statuses = np.zeros((len(arrays[0]), 8), np.uint8)
        if not len(rows):
            return Started(None, statuses, ())
        if self._normalizers is not None:
            return Started(None, statuses, self._normalized(places, rows, arrays))
        batch, left = self._batch(places, rows, arrays, statuses)
        return Started(batch, statuses, self._tasks(places, rows, arrays, left) if left else ())

    def heard(self, places: Places, rows: Int64Array, started: Started) -> None:
        """Record the native core's times and failures for a batch, after the core has finished it."""
        for stage, nanoseconds in zip(("decode", "copy"), started.batch.times, strict=True):
            self.clock.add(stage, nanoseconds)
        self.counts.add(*started.batch.nbytes)
        # If the core failed for too many patches of a volume, only Python reads the volume from now on.
        declined = places.volumes[started.statuses[rows, 0] == DECLINED].tolist()
        self._declined.update(declined)
        for number in set(declined):
            if self._declined[number] >= _MOST_DECLINED:
                self._volumes.update({(role, number): None for role in range(len(self._roles))})

    def _batch(
        self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]], statuses: UInt8Array
    ) -> tuple[Any, list[tuple[int, int]]]:
        """Return a ``native.PatchBatch``, and the list of (patch, role) that Python must read.

        If the native core reads no patch, None replaces the batch.  ``rows`` is int64 (N,).  ``arrays`` has
        the batch's memory (M, *lead, *patch) for each role.  ``statuses`` is uint8 (M, 8).
        """
        count = len(self._roles)
        volumes = [self._volume(role, volume) for volume in places.volumes.tolist() for role in range(count)]
        left = [divmod(item, count) for item, volume in enumerate(volumes) if volume is None]
        if len(left) == len(volumes):
            return None, left
        outs: list[Any] = [array.reshape(len(array), -1).view(np.uint8) for array in arrays]
        starts = np.ascontiguousarray(places.starts, np.int64)
        return native.patch_batch(self._kinds, outs, volumes, starts, rows, statuses), left

    def _volume(self, role: int, number: int) -> Any:
        """Return the native core's form of a volume; None if the core cannot read the volume."""
        with suppress(KeyError):  # another thread may clear the dictionary between a test and the access
            return self._volumes[role, number]
        if len(self._volumes) >= _MOST_DESCRIBED:
            self._volumes.clear()
        volume, made = self._roles[role].volumes[number], None
        units, first = self._units[self._firsts[role] + number]
        with suppress(ValueError):  # the core does not support some sizes
            source = None if self._kinds[role] is None else volume.native_source()
            if source is not None:
                shape, unit, itemsize = volume.shape, volume.grid.unit, volume.dtype.itemsize
                made = native.Volume(shape, unit, itemsize, source, units, first)
        self._volumes[role, number] = made
        return made

    def read_alone(self, places: Places, row: int, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Read one patch in Python; raise an error if the patch cannot be read."""
        self._read_one(places, row, arrays, self._need(places), by_core=False)

    def _read_one(
        self, places: Places, row: int, arrays: Sequence[npt.NDArray[Any]], needed: Needed | None, *,
        by_core: bool,
    ) -> None:  # fmt: skip
        """Read one patch in this thread, and normalise it.

        With ``by_core``, the native core reads what it can, without Python's lock.
        """
        outs = [array[row] for array in arrays]
        raw, left = list(outs), list(range(len(outs)))
        if self._normalizers is not None:
            raw[0] = np.empty(outs[0].shape, self._roles[0].dtype)
        if by_core:
            first, statuses = np.zeros(1, np.int64), np.zeros((1, 8), np.uint8)
            batch, others = self._batch(places, first, [one[None] for one in raw], statuses)
            if batch is not None:
                native.run_here(batch)
                self.heard(places, first, Started(batch, statuses, ()))
                left = left if statuses[0, 0] == DECLINED else [role for _, role in others]
        volume, start = int(places.volumes[0]), places.starts[0].tolist()
        for role in left:
            self._read(role, volume, start, raw[role], needed)
        if self._normalizers is not None:
            self._normalize(self._normalizers[volume], volume, start, raw[0], outs[0])

    def _normalize(
        self, normalizer: Normalizer, volume: int, start: Sequence[int], raw: npt.NDArray[Any],
        out: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Normalise a patch; if it is padded with a constant, write the constant beyond the volume."""
        begun = perf_counter_ns()
        inside: list[Any] = [slice(None)] * len(start)
        if self._padding.mode == "constant":
            most, sizes = self._roles[0].spatial(volume), out.shape[out.ndim - len(start) :]
            inside = [
                slice(max(0, -at), max(0, min(size, end - at)))
                for at, size, end in zip(start, sizes, most, strict=True)
            ]
            if out[(..., *inside)].size < out.size:
                out[...] = self._constant
        normalizer.normalize(raw[(..., *inside)], out[(..., *inside)])
        self.clock.add("copy", perf_counter_ns() - begun)

    def _need(self, places: Places) -> Needed | None:
        return None if self._chunks is None else self._chunks.need(places, self._units)

    def _tasks(
        self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]],
        left: Sequence[tuple[int, int]],
    ) -> list[Task]:  # fmt: skip
        """Return the tasks with which Python reads the pairs (patch, role) in ``left``."""
        needed = self._need(places)

        def task(patch: int, role: int) -> Task:
            volume, start = int(places.volumes[patch]), places.starts[patch].tolist()
            out = arrays[role][rows[patch]]
            return Task(rows[patch : patch + 1], lambda: self._read(role, volume, start, out, needed))

        return [task(*one) for one in left]

    def _read(
        self, number: int, volume: int, start: Sequence[int], out: npt.NDArray[Any], needed: Needed | None
    ) -> None:
        role, reader = self._roles[number], self._reader(number, volume)
        shape = role.spatial(volume)
        with nullcontext() if needed is None else needed.reading():
            read_patch(reader, shape, start, out, len(role.lead), self._padding, role.name)
        if number or self._nan == "keep" or out.dtype.kind not in "fc" or not (is_nan := np.isnan(out)).any():
            return
        if self._nan == "error":
            raise DamagedUnitError(
                f"{role.volumes[volume].name}: {int(is_nan.sum()):,} of the patch's elements are NaN, and "
                "nan='error' was asked for"
            )
        out[is_nan] = self._nan

    def _normalized(self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]]) -> list[Task]:
        """Return the tasks that read patches and normalise them, one for each patch."""
        needed = self._need(places)

        def task(patch: int) -> Task:
            one = Places(*(part[patch : patch + 1] for part in places))
            row = int(rows[patch])
            return Task(
                rows[patch : patch + 1], lambda: self._read_one(one, row, arrays, needed, by_core=True)
            )

        return [task(patch) for patch in range(len(rows))]

    def _reader(self, role: int, volume: int) -> PatchReader:
        with self._lock:
            reader = self._open.get((role, volume))
            if reader is not None:
                self._open.move_to_end((role, volume))
                return reader
        units, first = self._units[self._firsts[role] + volume]
        reader = PatchReader(self._roles[role].volumes[volume], self.clock, self.counts, units, first)
        with self._lock:
            self._open[role, volume] = reader
            while len(self._open) > _MOST_OPEN:  # a removed reader closes when no task uses it any more
                self._open.popitem(last=False)
        return reader


class PatchSamples(TouredSamples):
    """Patches of volumes as samples.

    Changes of the attributes ``cache``, ``nan``, ``bad_samples`` and ``threads`` take effect from the next
    batch on.
    """

    seed: int | None = None

    def __init__(
        self,
        process: Callable[[int | str, str], Process],
        given: Given,
        patch_size: Sequence[int],
        *,
        sampling: Sampling | None,
        padding: Any,
        margin: Any,
        normalize: ZScore | Rescale | None,
        cache: Cache | Literal["auto", "ram", "off"],
        nan: Literal["keep", "error"] | float,
        bad_samples: BadSamples | Literal["raise", "replace", "skip"],
        threads: int | Literal["auto"],
    ) -> None:
        self._process = process
        self.patch_size = checked_size(patch_size)
        self.margin = checked_margin(margin, self.patch_size)
        self._cut = tuple(size + 2 * more for size, more in zip(self.patch_size, self.margin, strict=True))
        self._padding = Padding.of(padding)
        self.volume, self.labels, self.mask, self.padding = given.volume, given.labels, given.mask, padding
        self.channel_dim, self.orientation = given.channel_dim, given.orientation
        self.cache = Cache.without_form(cache, "parts of volumes")
        self.bad_samples = BadSamples.of(bad_samples)
        self.threads = checked_threads(threads)
        self.stage = None if given.stage is None else Stage.of(given.stage)
        self._roles, self._remote = opened_roles(
            given._replace(stage=self.stage),
            self.patch_size,
            pads=self._padding.pads,
            may_write=self.cache.where != "off",
        )
        self._chunks = PatchChunks.of(self._roles, self._cut)
        self.nan = checked_nan(nan, self._roles[0].dtype)
        first = self._roles[0]
        kept = None if self.cache.where == "off" else default_file_arrays()
        self.normalize, self._normalizers = normalize, normalizers(normalize, first, self.nan, kept)
        for role, (dtype, _) in zip(self._roles, self.kinds, strict=True):
            self._padding.check(role.name, dtype)
        titles = [one.name for one in first.volumes]
        shapes = [first.spatial(number) for number in range(len(titles))]
        self._space = PatchSpace(shapes, self.patch_size, titles, self._padding.pads)
        self.sampling = sampling or Uniform(filling(self._space))
        each: Sequence[Normalizer | None] = self._normalizers or [None] * len(titles)
        values = [partial(image_values, nan=self.nan, normalizer=one) for one in each]
        pads = self._padding.pads
        self._own_places = places_of(
            self.sampling, self._space, self._roles, pads, kept, values, f"{self.nan} {self.normalize}"
        )
        self._places: PatchPlaces = self._own_places
        cut_space = self._space
        if any(self.margin):  # a margin may extend beyond the volume, also without padding=
            self._places = WithMargin(self._own_places, self.margin)
            cut_space = PatchSpace(shapes, self._cut, titles, pads=True)
        names = tuple(role.name for role in self._roles)
        self._form = Form("tuple" if len(names) > 1 else "value", (), names)
        is_fixed = self.cache.max_bytes != "auto"
        self._remembered = Remembered(self._roles, budget_of(self.cache), is_fixed=is_fixed)
        self._most_uses = self._remembered.most_uses(self._cut)
        self._touring = Touring(self._roles, cut_space, self._places, planned_room(self.cache))
        self._runtime: Runtime | None = None

    def __len__(self) -> int:
        return self._places.count

    def __getstate__(self) -> dict[str, Any]:
        # A copy creates its own threads and open files on first use.
        return {**self.__dict__, "_runtime": None}

    @property
    def kinds(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return the dtype and the shape of each value of a sample."""
        dtypes = [role.dtype for role in self._roles]
        if self.normalize is not None:
            dtypes[0] = np.dtype(np.float32)
        return [(dtype, (*role.lead, *self._cut)) for dtype, role in zip(dtypes, self._roles, strict=True)]

    def places(self, epoch: int = 0) -> tuple[Int64Array, Int64Array]:
        """Return the places of an epoch's patches.

        The first array has the index of each patch's volume: int64 (N,).  The second array has the first
        voxel of each patch without its margin: int64 (N, D).  A dataset without a seed uses seed 0.
        """
        return self._own_places.places(self.seed or 0, epoch, np.arange(len(self)))

    def locality_groups(self, epoch: int = 0) -> Int64Array:
        """Return the group of each sample: int64 (N,).

        Patches of a group begin in the same unit: a part of a volume, such as a chunk, decoded as a whole.
        """
        return self._touring.groups(self._places.places(self.seed or 0, epoch, np.arange(len(self))))

    @property
    def amplification(self) -> float:
        """Return the decoded bytes for each used byte up to now, in all processes that share the memory."""
        decoded, used = self._running().counts.nbytes
        return decoded / max(1, used)

    @property
    def downloaded(self) -> tuple[int, int]:
        """Return how many objects and how many bytes this process has fetched from object stores."""
        return (0, 0) if self._remote is None else self._remote.downloaded

    def close(self) -> None:
        """End the threads of this process, and release the stage and the stores.

        Deleting the dataset has the same effect.  The next use starts the threads again.
        """
        runtime, self._runtime = self._runtime, None
        if self._remote is not None:
            self._remote.close()
        if runtime is not None:
            runtime.close()

    @property
    def plan(self) -> PatchPlan:
        """Return a description of how each array is read, for ``print``."""
        decoded, used = self._running().counts.nbytes
        amplification = decoded / used if used else None
        return PatchPlan(self._roles, self._cut, self._remembered.note, amplification, self.normalize)

    @property
    def _beyond(self) -> Padding:
        """The padding beyond the ends of volumes; without ``padding=``, margins are padded with zeros."""
        return self._padding if self._padding.pads or not any(self.margin) else Padding("constant")

    def _sliced(self) -> SlicedPatches:
        """Return an object that reads the patches of this dataset with the formats' own libraries."""
        return SlicedPatches(self._roles, self._places, self._beyond, self.nan, self._cut, self._normalizers)

    def _tour_window(self) -> int:
        return self._touring.planned(None)[0]

    def _tour_ranks(self, window: int, seed: int, epoch: int) -> Int64Array:
        return self._touring.ranks(window, seed, epoch)

    def _tour_about(self, window: int) -> str:
        return f"{self.sampling!r} in {self._touring.about(window)}"

    def _tour_amplification(self, window: int) -> float:
        return self._touring.planned(window)[2]

    @property
    def _draws_samples(self) -> bool:
        """True if each epoch has its own random patches."""
        return self._places.is_random

    def follow(self, batches: Callable[[], Iterator[Int64Array]], seed: int, epoch: int) -> None:
        """Prefetch the remote chunks of an epoch, as specified in `BatchReader`."""
        if self._chunks is None:
            return
        self._chunks.expect_nothing()
        for store in self._chunks.stores:
            order = _followed(weakref.ref(self), store.location.store, batches(), seed, epoch)
            store.reader().follow(order, None, is_here=True)

    def _reading(
        self, indices: Any, samples: Int64Array, key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]], order: EpochOrder | None = None,
    ) -> Reading:  # fmt: skip
        """Return a ``Reading``, which describes how to read a batch, as specified in `BatchReader`."""
        places = self._places_of(indices, samples, key)
        found = list(keys_of(indices)) or ([(key.seed, key.epoch)] if key is not None and is_keyed else [])
        if len(found) == 1:
            self._expect_epoch(*found[0], order)
        batch = _Batch(self, samples, places, key, runtime, arrays)
        # The samples of the reading are positions in ``batch``, which appends the places of substitutes.
        return Reading(
            batch.start, batch.read_alone, np.arange(len(samples)),
            ReadPolicy(self.bad_samples.policy, runtime.log, _is_bad, batch.item),
            None if key is None else batch.substitute, batch.heard, lambda: batch.item(0).path,
        )  # fmt: skip

    def _places_of(self, indices: Sequence[int] | Int64Array, samples: Int64Array, key: Key | None) -> Places:
        """Return the places of the patches ``samples``."""
        if not self._places.is_random:
            return self._places.places(0, 0, samples)
        assert key is not None
        found = keys_of(indices)
        if not found:
            return self._places.places(key.seed, key.epoch, samples)
        volumes = np.empty(len(samples), np.int64)
        starts = np.empty((len(samples), len(self._cut)), np.int64)
        for (seed, epoch), rows in found.items():
            volumes[rows], starts[rows] = self._places.places(seed, epoch, samples[rows])
        return Places(volumes, starts)

    def _expect_epoch(self, seed: int, epoch: int, order: EpochOrder | None) -> None:
        """Announce an epoch's patches to the memory for decoded units, in their order if it is known."""
        if self._remembered.keeps_all or len(self) * self._most_uses > _MOST_EXPECTED:
            return

        def uses() -> tuple[Callable[[int], Int64Array], bool]:
            indices = np.arange(len(self)) if order is None else order(epoch)
            places = self._places.places(seed, epoch, indices)
            return self._remembered.uses(places, self._cut), order is not None

        self._running().expect(seed, epoch, uses)

    def _running(self) -> Runtime:
        """Return this process's threads, open volumes and memory; create them on first use."""
        options = Options(self.bad_samples, self.threads, self._beyond, self.nan)
        if self._runtime is None or not self._runtime.fits(options):
            process = self._process(self.threads, "fastpipe-patch")
            self._runtime = Runtime(
                options, self._roles, self._cut, self._remembered, process, self._chunks, self._normalizers
            )
        return self._runtime


def _followed(
    living: weakref.ref[PatchSamples], name: str, batches: Iterator[Int64Array], seed: int, epoch: int
) -> Iterator[Int64Array]:
    """Yield, for each batch, the objects of a store that it will need, by their indices in the store's list.

    The generator must not keep the ``PatchSamples`` alive, and ends when the ``PatchSamples`` is deleted.
    """
    samples = living()
    foreseen = None if samples is None else samples._remembered.foreseen(samples._remembered.slots())
    del samples
    for batch in batches:
        samples = living()
        if samples is None or samples._chunks is None or foreseen is None:
            return
        chunks = samples._chunks
        places = samples._places.places(seed, epoch, batch)
        store = next(one for one in chunks.stores if one.location.store == name)
        rows = chunks.foreseen(store, places, foreseen)
        chunks.expect(store, places, rows)
        del samples, chunks, store
        yield rows


class _Batch:
    """The places of a batch's patches, and of substitutes for unreadable patches."""

    def __init__(
        self,
        dataset: PatchSamples,
        samples: Int64Array,
        places: Places,
        key: Key | None,
        runtime: Runtime,
        arrays: Sequence[npt.NDArray[Any]],
    ) -> None:
        self._dataset, self._samples, self._places, self._key = dataset, samples, places, key
        self._runtime, self._arrays = runtime, arrays
        self._rows = list(range(len(samples)))  # the row in the batch for each place
        self._started: tuple[Places, Int64Array, Started] | None = None

    def start(self, places: Int64Array, rows: Int64Array) -> Started:
        """Prepare to read the patches ``places`` into the ``rows`` of the batch, and return this work."""
        at = self._at(places)
        started = self._runtime.start(at, rows, self._arrays)
        self._started = at, rows, started
        return started

    def heard(self, _: Any) -> None:
        """Record the native core's times and failures for this batch."""
        started, self._started = self._started, None
        if started is not None:
            self._runtime.heard(*started)

    def read_alone(self, place: int, row: int) -> None:
        """Read one patch in Python; raise an error if the patch cannot be read."""
        self._runtime.read_alone(self._at(np.array([place])), row, self._arrays)

    def _at(self, places: Int64Array) -> Places:
        volumes, starts = self._places
        return Places(volumes[places], starts[places])

    def item(self, place: int) -> Item:
        """Return the description of a patch for messages."""
        dataset, (volumes, starts) = self._dataset, self._places
        name, start = dataset._roles[0].volumes[int(volumes[place])].name, tuple(starts[place].tolist())
        about = f"{name}, patch of {sides_text(dataset._cut)} at {start}"
        return Item(int(self._samples[self._rows[place]]), about)

    def substitute(self, row: int, attempt: int) -> int | None:
        """Choose a random substitute for the patch in ``row``; return None if no substitute is left.

        ``attempt``, the seed, the epoch and the patch's position in the epoch determine the substitute.
        """
        key, places = self._key, self._dataset._places
        assert key is not None
        # Random places are valid substitutes, also if an epoch has fewer patches than substitutes.
        count = max(len(self._dataset), _MOST_DRAWN) if places.is_random else len(self._dataset)
        other = drawn_substitute(count, self._samples, key, row, attempt)
        if other is None:
            return None
        seed = sample_seed(key.seed, key.epoch, int(key.draws[row]))
        found = places.places(seed, attempt, np.array([other % len(self._dataset)]))
        self._rows.append(row)
        self._places = Places(*(np.concatenate(pair) for pair in zip(self._places, found, strict=True)))
        return len(self._places.volumes) - 1

"""What patches need in one process and must not be taken to another."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import BadSampleLog
from fastpipe.core.clock import StageClock
from fastpipe.core.native import native
from fastpipe.core.pool import Process, ProcessRuntime
from fastpipe.core.reads import DECLINED, ReadThreads, Started, Task
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.options import BadSamples
from fastpipe.volumes.places import Places
from fastpipe.volumes.reader import PADDING_MODES, Counts, Padding, PatchReader, read_patch
from fastpipe.volumes.remote import Needed
from fastpipe.volumes.sources import Role
from fastpipe.volumes.units import PatchChunks, Remembered
from fastpipe.volumes.volume import DamagedUnitError, Int64Array, UInt8Array

_PADDING = ("error", *PADDING_MODES)  # of fastpipe/native/patches.h
_KEEP, _DECLINE, _REPLACE = 0, 1, 2  # what is done about NaN
_MOST_DESCRIBED = 4096  # volumes
_MOST_OPEN = 256  # volumes
_MOST_DECLINED = 8  # patches of one volume: then Python's threads read it from the start


class NativePatches:
    """Describes batches of patches of one dataset in one process; ``units`` are as of
    ``Remembered.slots``."""

    def __init__(
        self,
        roles: Sequence[Role],
        units: Sequence[tuple[Any, int]],
        size: Sequence[int],
        padding: Padding,
        nan: str | float,
    ) -> None:
        self._roles, self._units = roles, units
        self._firsts = np.cumsum([0, *(len(role.volumes) for role in roles)]).tolist()
        self._kinds = [
            _kind(role, size, padding, "keep" if number else nan) for number, role in enumerate(roles)
        ]
        self._volumes: dict[tuple[int, int], Any] = {}
        self._declined: dict[int, int] = {}  # patches, by the numbers of volumes

    def batch(
        self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]], statuses: UInt8Array
    ) -> tuple[Any, list[tuple[int, int]]]:
        """Describe a batch.

        Its rows are int64 (N,), ``arrays`` for each role the batch's memory (M, *lead, *patch), ``statuses``
        uint8 (M, 8). Return a ``native.PatchBatch``, or None where the core reads nothing of it; and what is
        left to Python, as numbers of patches and roles.
        """
        count = len(self._roles)
        volumes = [self._volume(role, volume) for volume in places.volumes.tolist() for role in range(count)]
        left = [divmod(item, count) for item, volume in enumerate(volumes) if volume is None]
        if len(left) == len(volumes):
            return None, left
        outs: list[Any] = [array.reshape(len(array), -1).view(np.uint8) for array in arrays]
        starts = np.ascontiguousarray(places.starts, np.int64)
        return native.patch_batch(self._kinds, outs, volumes, starts, rows, statuses), left

    def heard(self, places: Places, rows: Int64Array, statuses: UInt8Array) -> None:
        """Look at what became of a batch: of a volume that the core declines, no more is left to it."""
        declined = statuses[rows, 0] == DECLINED
        if not declined.any():
            return
        for number in places.volumes[declined].tolist():
            self._declined[number] = self._declined.get(number, 0) + 1
            if self._declined[number] == _MOST_DECLINED:
                self._volumes.update({(role, number): None for role in range(len(self._roles))})

    def _volume(self, role: int, number: int) -> Any:
        """A volume as the core reads it; None where it does not."""
        try:
            return self._volumes[role, number]
        except KeyError:
            pass
        if len(self._volumes) >= _MOST_DESCRIBED:
            self._volumes.clear()
        volume, made = self._roles[role].volumes[number], None
        units, first = self._units[self._firsts[role] + number]
        try:
            source = None if self._kinds[role] is None else volume.native_source()
            if source is not None:
                made = native.Volume(
                    volume.shape, volume.grid.unit, volume.dtype.itemsize, source, units, first
                )
        except ValueError:  # of sizes that are not read there
            pass
        self._volumes[role, number] = made
        return made


def _kind(role: Role, size: Sequence[int], padding: Padding, nan: str | float) -> Any:
    """A role as the core knows it; None of elements that it does not know."""
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
    """A dataset's options that a runtime is made by."""

    bad_samples: BadSamples  # as given
    threads: int | str
    padding: Padding  # what is beyond the ends of volumes
    nan: str | float


class Runtime(ProcessRuntime[Options]):
    """Threads, memory and open volumes of one dataset in one process; ``chunks`` are those that are
    elsewhere."""

    def __init__(
        self,
        options: Options,
        roles: Sequence[Role],
        size: Sequence[int],
        remembered: Remembered,
        process: Process,
        chunks: PatchChunks | None = None,
    ) -> None:
        super().__init__(options, process.pool)
        self.threads = ReadThreads.of(process.pool)
        self.clock = StageClock()
        self.slots = [SlotPool(KEPT_SLOTS) for _ in roles]
        self.log = BadSampleLog(options.bad_samples)
        self._roles, self._padding, self._nan = roles, options.padding, options.nan
        self._units, self._chunks = remembered.slots(process.workers), chunks
        self.counts = Counts(next((units for units, _ in self._units if units is not None), None))
        self._expected: dict[Any, set[int]] = {units: set() for units, _ in self._units if units is not None}
        self._native = NativePatches(roles, self._units, size, options.padding, options.nan)
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], PatchReader] = OrderedDict()

    def expect(
        self, seed: int, epoch: int, uses: Callable[[], tuple[Callable[[int], Int64Array], bool]]
    ) -> None:
        """Hear which patches an epoch has: units that none of them will use any more make room first.

        ``uses`` gives a function of a size, to the units of that size as often as they are used, int64 (N,);
        and whether that is the order of their use: then those that are used last make room first.
        """
        what = zlib.crc32(f"{seed} {epoch}".encode()) + 1
        found: list[tuple[Callable[[int], Int64Array], bool]] = []
        for units, expected in self._expected.items():
            # While others go on, once only: who takes turns with them would say it again and again.
            if (what == units.expected or what in expected) and not units.is_over:
                continue
            expected.add(what)
            of, is_in_order = found[0] if found else uses()
            found = [(of, is_in_order)]
            units.expect(what, of(units.slot_nbytes), is_in_order)

    def start(self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]]) -> Started:
        """Describe what there is to do to read patches into rows of the batch's memory, (M, *lead, *patch)
        for each role."""
        statuses = np.zeros((len(arrays[0]), 8), np.uint8)
        if not len(rows):
            return Started(None, statuses, ())
        batch, left = self._native.batch(places, rows, arrays, statuses)
        return Started(batch, statuses, self._tasks(places, rows, arrays, left) if left else ())

    def heard(self, places: Places, rows: Int64Array, started: Started) -> None:
        """Hear that the core has done its part of a batch."""
        for stage, nanoseconds in zip(("decode", "copy"), started.batch.times, strict=True):
            self.clock.add(stage, nanoseconds)
        self.counts.add(*started.batch.nbytes)
        self._native.heard(places, rows, started.statuses)

    def read_alone(self, places: Places, row: int, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Read one patch, and raise what is wrong with it."""
        every = [(0, role) for role in range(len(self._roles))]
        for task in self._tasks(places, np.array([row]), arrays, every):
            task.run()

    def _tasks(
        self, places: Places, rows: Int64Array, arrays: Sequence[npt.NDArray[Any]],
        left: Sequence[tuple[int, int]],
    ) -> list[Task]:  # fmt: skip
        """What Python does for some patches, by their numbers and roles."""
        needed = None if self._chunks is None else self._chunks.need(places, self._units)

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
        if number == 0 and self._nan != "keep" and out.dtype.kind in "fc":
            _settle_nan(out, self._nan, role.volumes[volume].name)

    def _reader(self, role: int, volume: int) -> PatchReader:
        with self._lock:
            reader = self._open.get((role, volume))
            if reader is not None:
                self._open.move_to_end((role, volume))
                return reader
        place = sum(len(one.volumes) for one in self._roles[:role]) + volume
        units, first = self._units[place]
        reader = PatchReader(self._roles[role].volumes[volume], self.clock, self.counts, units, first)
        with self._lock:
            self._open[role, volume] = reader
            while len(self._open) > _MOST_OPEN:  # closed when the last task of it is done
                self._open.popitem(last=False)
        return reader


def _settle_nan(out: npt.NDArray[Any], nan: str | float, name: str) -> None:
    """Do what was asked for about elements that are no number."""
    is_nan = np.isnan(out)
    if not is_nan.any():
        return
    if nan == "error":
        raise DamagedUnitError(
            f"{name}: {int(is_nan.sum()):,} of the patch's elements are NaN, and nan='error' was asked for"
        )
    out[is_nan] = nan

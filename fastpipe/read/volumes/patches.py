"""Boxes of a volume, copied into a batch from units that are decoded once, as long as they are remembered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.errors import OptionError
from fastpipe.protocols import RememberedUnits, Stopwatch
from fastpipe.read.volumes.kernels import DIMS, copy_box
from fastpipe.read.volumes.volume import DamagedUnitError, Volume

__all__ = ["Counts", "PatchReader", "padded_indices"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_ALIGNMENT = 16
_MOST_WAITS = 40  # of a twentieth of a second, for a process that may be stopped


class Counts:
    """How much was decoded, and how much of it was used.  For threads at once.

    Args:
        shared: counts for all processes; None for this one alone.
    """

    def __init__(self, shared: RememberedUnits | None = None) -> None:
        self._lock, self._shared = threading.Lock(), shared
        self._decoded = self._used = 0

    def add(self, decoded: int, used: int) -> None:
        """Count bytes of units that were decoded, and of patches, without padding."""
        if self._shared is not None:
            self._shared.count(decoded, used)
            return
        with self._lock:
            self._decoded += decoded
            self._used += used

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that were decoded and used so far."""
        return (self._decoded, self._used) if self._shared is None else self._shared.counted


class _Box(NamedTuple):
    """A box in the form that the kernel takes."""

    first: Int64Array
    counts: Int64Array
    start: Int64Array
    stop: Int64Array
    to: int
    steps: Int64Array


class PatchReader:
    """Reads boxes of one volume.  For threads at once.

    Args:
        volume: the volume.
        clock: hears how long was decoded (``"decode"``, with reading) and copied (``"copy"``).
        counts: hears how much.
        units: where decoded units are remembered; None for nowhere.
        first_key: the number there of the volume's first unit.

    Raises:
        OSError, VolumeError: it cannot be opened.
        OptionError: it has too many dimensions.
    """

    def __init__(
        self,
        volume: Volume,
        clock: Stopwatch,
        counts: Counts,
        units: RememberedUnits | None = None,
        first_key: int = 0,
    ) -> None:
        self._volume, self._clock, self._counts = volume, clock, counts
        self._units, self._first_key = units, first_key
        self._reader = volume.open()
        self._finer: PatchReader | None = None
        self._unit = np.array([1] * (DIMS - len(volume.shape)) + list(volume.grid.unit), np.int64)
        if len(self._unit) > DIMS:
            raise OptionError(
                f"{volume.name} has {len(volume.shape)} dimensions, of which {DIMS} can be read"
            )

    def read(self, start: Sequence[int], out: npt.NDArray[Any]) -> None:
        """Read a box.

        Args:
            start: integers (D,): where it begins; the box is within the volume.
            out: (…) of D dimensions and the volume's dtype, its last dimension contiguous: is filled.

        Raises:
            DamagedUnitError: the volume does not hold what it should.
            OSError: it cannot be read.
        """
        if not out.size:
            return
        self._counts.add(0, out.nbytes)
        try:
            self._read(start, out)
        except DamagedUnitError:
            # What is damaged may be a chunk that the box does not touch, in a unit that has some.
            finer = self._finer_reader()
            if finer is None:
                raise
            finer._read(start, out)

    def _finer_reader(self) -> PatchReader | None:
        if self._finer is None and (finer := self._volume.finer) is not None:
            self._finer = PatchReader(finer, self._clock, self._counts)
        return self._finer

    @ranged("sample")
    def _read(self, start: Sequence[int], out: npt.NDArray[Any]) -> None:
        stop = [at + size for at, size in zip(start, out.shape, strict=True)]
        array = self._volume.array
        if array is not None:
            begun = perf_counter_ns()
            out[...] = array[tuple(slice(*ends) for ends in zip(start, stop, strict=True))]
            self._clock.add("copy", perf_counter_ns() - begun)
            return
        touched = self._volume.grid.touched(start, stop)
        lead = [0] * (DIMS - len(stop))
        box = _Box(
            np.array([*lead, *touched.first], np.int64),
            np.array([*[1] * len(lead), *touched.counts], np.int64),
            np.array([*lead, *start], np.int64),
            np.array([*[1] * len(lead), *stop], np.int64),
            out.__array_interface__["data"][0],
            np.array([*lead, *out.strides], np.int64),
        )
        if self._units is None:
            self._read_alone(touched.numbers, np.arange(len(touched.numbers)), box)
        else:
            self._reader.check()  # as it is where nothing is remembered
            self._read_remembered(self._units, touched.numbers, box)
            self._units.used(touched.numbers + self._first_key)

    def _read_remembered(self, units: RememberedUnits, numbers: Int64Array, box: _Box) -> None:
        keys = numbers + self._first_key
        left, waits = np.arange(len(numbers)), 0
        while len(left):
            left = left[~self._copied(units, keys, left, box)]
            if not len(left):
                return
            claims = units.claim(keys[left].tolist())
            mine = [place for place, claim in enumerate(claims) if claim is not None]
            if mine:
                self._decode(numbers, left[mine], [claims[place] for place in mine], box)
                left = np.delete(left, mine)
                continue
            # Somebody else is decoding all that is left, has just done so, or there is no room.
            is_there = units.find(keys[left]).slots >= 0
            if is_there.any():
                continue
            if units.is_coming(int(keys[left[0]])) and waits < _MOST_WAITS:
                waits += 1
                units.wait(int(keys[left[0]]))
                continue
            waits = 0
            self._read_alone(numbers, left[:1], box)
            left = left[1:]

    def _copied(
        self, units: RememberedUnits, keys: Int64Array, places: Int64Array, box: _Box
    ) -> npt.NDArray[np.bool_]:
        """Copy of the units at these places those that are remembered; for each whether it was."""
        found = units.find(keys[places])
        addresses = np.zeros(len(keys), np.uint64)
        addresses[places] = units.addresses(found)
        if not addresses.any():
            return np.zeros(len(places), np.bool_)
        self._copy(addresses, box)
        return units.are_still(found)

    @ranged("decode")
    def _decode(self, numbers: Int64Array, places: Int64Array, claims: list[Any], box: _Box) -> None:
        """Decode units into slots that were claimed for them, chunk by chunk, and copy from there."""
        chunks = self._volume.stored_in(numbers[places])
        nbytes = self._volume.unit_nbytes
        order = np.argsort(chunks, kind="stable")
        ends = np.flatnonzero(np.diff(chunks[order])) + 1
        try:
            for some in np.split(order, ends):
                slots = [claims[place] for place in some.tolist()]
                begun = perf_counter_ns()
                self._reader.read(numbers[places[some]], [slot.memory[:nbytes] for slot in slots])
                self._clock.add("decode", perf_counter_ns() - begun)
                self._counts.add(nbytes * len(slots), 0)
                addresses = np.zeros(len(numbers), np.uint64)
                addresses[places[some]] = [slot.address for slot in slots]
                self._copy(addresses, box)
                for slot in slots:
                    slot.publish()
        finally:
            for slot in claims:
                slot.__exit__()

    @ranged("decode")
    def _read_alone(self, numbers: Int64Array, places: Int64Array, box: _Box) -> None:
        """Decode the units at these places into memory of this call, chunk by chunk."""
        chunks = self._volume.stored_in(numbers[places])
        nbytes = self._volume.unit_nbytes
        step = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for chunk in np.unique(chunks).tolist():
            some = places[chunks == chunk]
            memory = np.empty(step * len(some) + _ALIGNMENT, np.uint8)
            skipped = -memory.__array_interface__["data"][0] % _ALIGNMENT
            parts = [memory[skipped + step * place :][:nbytes] for place in range(len(some))]
            begun = perf_counter_ns()
            self._reader.read(numbers[some], parts)
            self._clock.add("decode", perf_counter_ns() - begun)
            self._counts.add(nbytes * len(some), 0)
            addresses = np.zeros(len(numbers), np.uint64)
            addresses[some] = [part.__array_interface__["data"][0] for part in parts]
            self._copy(addresses, box)

    @ranged("copy")
    def _copy(self, addresses: UInt64Array, box: _Box) -> None:
        begun = perf_counter_ns()
        copy_box(
            addresses, box.first, box.counts, self._unit, box.start, box.stop,
            self._volume.dtype.itemsize, box.to, box.steps,
        )  # fmt: skip
        self._clock.add("copy", perf_counter_ns() - begun)


def padded_indices(start: int, size: int, length: int, mode: str) -> Int64Array:
    """Of which elements of a dimension a patch beyond its ends is made, as ``numpy.pad`` makes it.

    Args:
        start: where the patch begins, perhaps below 0.
        size: of the patch.
        length: of the dimension.
        mode: ``"constant"`` (-1 where the constant goes), ``"edge"``, ``"reflect"``, ``"symmetric"`` or
            ``"wrap"``.
    """
    at = np.arange(start, start + size)
    if mode == "constant":
        return np.where((at < 0) | (at >= length), -1, at)
    if mode == "edge" or length == 1:
        return np.clip(at, 0, length - 1)
    if mode == "wrap":
        return at % length
    period = 2 * length - 2 if mode == "reflect" else 2 * length
    at = at % period
    return np.where(at < length, at, period - at if mode == "reflect" else period - 1 - at)

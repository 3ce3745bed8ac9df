"""Boxes of a volume, copied into a batch from units that are decoded once, as long as they are remembered.

The native core does this for whole batches.  Here it is done for what that declines, a box at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.clock import ranged
from fastpipe.core.text import in_bytes
from fastpipe.core.types import Stopwatch
from fastpipe.errors import OptionError, VolumeError
from fastpipe.volumes.volume import DIMS, DamagedUnitError, Volume

__all__ = ["Counts", "PatchReader", "padded_indices"]

Int64Array = npt.NDArray[np.int64]

_ALIGNMENT = 16
_MOST_WAITS = 40  # of a twentieth of a second, for a process that may be stopped


class Counts:
    """How much was decoded, and how much of it was used.  For threads at once.

    Args:
        shared: a ``native.UnitMemory`` that counts for all processes; None counts for this one alone.
    """

    def __init__(self, shared: Any = None) -> None:
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
        shared = self._shared
        return (self._decoded, self._used) if shared is None else (shared.decoded, shared.copied)


class PatchReader:
    """Reads boxes of one volume.  For threads at once.

    Args:
        volume: the volume.
        clock: hears how long was decoded (``"decode"``, with reading) and copied (``"copy"``).
        counts: hears how much.
        units: a ``native.UnitMemory`` where decoded units are remembered; None for nowhere.
        first_key: the number there of the volume's first unit.

    Raises:
        OSError, VolumeError: it cannot be opened.
        OptionError: it has too many dimensions.
    """

    def __init__(
        self, volume: Volume, clock: Stopwatch, counts: Counts, units: Any = None, first_key: int = 0
    ) -> None:
        self._volume, self._clock, self._counts = volume, clock, counts
        self._units, self._first_key = units, first_key
        self._reader = volume.open()
        self._finer: PatchReader | None = None
        if len(volume.shape) > DIMS:
            raise OptionError(
                f"{volume.name} has {len(volume.shape)} dimensions, of which {DIMS} can be read"
            )

    def read(self, start: Sequence[int], out: npt.NDArray[Any]) -> None:
        """Read a box.

        Args:
            start: integers (D,): where it begins; the box is within the volume.
            out: (…) of D dimensions and the volume's dtype: is filled.

        Raises:
            DamagedUnitError: the volume does not hold what it should.
            VolumeError: there is not enough memory for it.
            OSError: it cannot be read.
        """
        if not out.size:
            return
        self._counts.add(0, out.nbytes)
        try:
            self._read(start, out)
        except MemoryError as error:
            raise VolumeError(
                f"{self._volume.name} is decoded in parts of {in_bytes(self._volume.unit_nbytes)}, for which "
                "there is not enough memory: free some, or make a copy with smaller chunks: fastpipe repack"
            ) from error
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
        numbers = self._volume.grid.touched(start, stop).numbers

        def copy(number: int, memory: npt.NDArray[np.uint8]) -> None:
            self._copy(number, memory, start, out)

        if self._units is None:
            self._read_alone(numbers, copy)
        else:
            self._reader.check()  # as it is where nothing is remembered
            self._read_remembered(numbers, copy)
            self._units.used(numbers + self._first_key)

    def _read_remembered(self, numbers: Int64Array, copy: Callable[[int, Any], None]) -> None:
        units, left, waits = self._units, numbers.tolist(), 0
        while left:
            claims, still = {}, []
            for number in left:
                key = self._first_key + number
                if (found := units.find(key)) is not None:
                    copy(number, found.memory)
                    if found.release():
                        continue
                elif (claim := units.claim(key)) is not None:
                    claims[number] = claim
                    continue
                still.append(number)
            if claims:
                self._decode(claims, copy)
            if len(still) < len(left):
                left, waits = still, 0
                continue
            # Somebody else is decoding all that is left, has just done so, or there is no room.
            key = self._first_key + left[0]
            if units.are_there(np.array([key]))[0]:
                continue
            if units.is_coming(key) and waits < _MOST_WAITS:
                waits += 1
                units.wait(key)
                continue
            waits = 0
            self._read_alone(np.array(left[:1]), copy)
            left = left[1:]

    @ranged("decode")
    def _decode(self, claims: dict[int, Any], copy: Callable[[int, Any], None]) -> None:
        """Decode units into slots that were claimed for them, chunk by chunk, and copy from there."""
        try:
            for some in self._by_chunks(np.array(list(claims))):
                parts = [claims[number].memory for number in some.tolist()]
                self._read_units(some, parts, copy)
                lost = [number for number in some.tolist() if not claims.pop(number).publish()]
                if lost:  # another process may have written there, too
                    self._read_alone(np.array(lost), copy)
        finally:
            for claim in claims.values():
                claim.abandon()

    @ranged("decode")
    def _read_alone(self, numbers: Int64Array, copy: Callable[[int, Any], None]) -> None:
        """Decode units into memory of this call, chunk by chunk."""
        step = -(-self._volume.unit_nbytes // _ALIGNMENT) * _ALIGNMENT
        for some in self._by_chunks(numbers):
            memory = np.empty(step * len(some) + _ALIGNMENT, np.uint8)
            memory = memory[-memory.__array_interface__["data"][0] % _ALIGNMENT :]
            self._read_units(some, [memory[step * place :] for place in range(len(some))], copy)

    def _by_chunks(self, numbers: Int64Array) -> list[Int64Array]:
        """Units, those of one chunk together."""
        chunks = self._volume.stored_in(numbers)
        return [numbers[chunks == chunk] for chunk in np.unique(chunks)]

    def _read_units(
        self, numbers: Int64Array, parts: Sequence[npt.NDArray[np.uint8]], copy: Callable[[int, Any], None]
    ) -> None:
        nbytes, begun = self._volume.unit_nbytes, perf_counter_ns()
        self._reader.read(numbers, [part[:nbytes] for part in parts])
        self._clock.add("decode", perf_counter_ns() - begun)
        self._counts.add(nbytes * len(numbers), 0)
        for number, part in zip(numbers.tolist(), parts, strict=True):
            copy(number, part)

    def _copy(
        self, number: int, memory: npt.NDArray[np.uint8], start: Sequence[int], out: npt.NDArray[Any]
    ) -> None:
        """Copy what a box has of a unit."""
        begun, volume = perf_counter_ns(), self._volume
        unit = memory[: volume.unit_nbytes].view(volume.dtype).reshape(volume.grid.unit)
        source, target = [], []
        for side, at, size in zip(volume.grid.box(number), start, out.shape, strict=True):
            low, high = max(side.start, at), min(side.stop, at + size)
            source.append(slice(low - side.start, high - side.start))
            target.append(slice(low - at, high - at))
        out[tuple(target)] = unit[tuple(source)]
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

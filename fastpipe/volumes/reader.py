"""Read patches one at a time in Python, and define the padding of patches.

The native core reads whole batches.  This module reads the patches that the core does not support.  Each
patch is copied from decoded units.  A unit, such as a chunk, is not decoded again while it is in memory.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.casting import unheld
from fastpipe.core.clock import StageClock, ranged
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError, VolumeError
from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places
from fastpipe.volumes.volume import DIMS, DamagedUnitError, Int64Array, UInt8Array, Volume, aligned

_MOST_WAITS = 40  # waits of 1/20 second each for another process, which may be suspended


class Counts:
    """Counters of decoded bytes and used bytes.  Thread-safe.

    ``shared`` is a ``native.UnitMemory``, which contains the counters of all processes.  If ``shared`` is
    None, only the bytes of this process are counted.
    """

    def __init__(self, shared: Any = None) -> None:
        self._lock, self._shared = threading.Lock(), shared
        self._decoded = self._used = 0

    def add(self, decoded: int, used: int) -> None:
        """Add ``decoded`` bytes, and ``used`` bytes that were copied into patches (padding excluded)."""
        if self._shared is not None:
            self._shared.count(decoded, used)
            return
        with self._lock:
            self._decoded += decoded
            self._used += used

    @property
    def nbytes(self) -> tuple[int, int]:
        shared = self._shared
        return (self._decoded, self._used) if shared is None else (shared.decoded, shared.copied)


class PatchReader:
    """A reader of boxes of one volume.  Thread-safe.

    ``clock`` receives the time for reading and decoding (``"decode"``) and the time for copying (``"copy"``).
    ``units`` is a ``native.UnitMemory``, which keeps decoded units, or None.  ``first_key`` is the key of the
    volume's first unit in ``units``.
    """

    def __init__(
        self, volume: Volume, clock: StageClock, counts: Counts, units: Any = None, first_key: int = 0
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
        """Read the box that begins at ``start`` into ``out``, an array of the volume's dtype.

        The box must lie inside the volume.
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
            # A unit may consist of several chunks, and the box may not overlap with the damaged chunk.
            if self._finer is None:
                if (finer := self._volume.finer) is None:
                    raise
                self._finer = PatchReader(finer, self._clock, self._counts)
            self._finer._read(start, out)

    @ranged("sample")
    def _read(self, start: Sequence[int], out: npt.NDArray[Any]) -> None:
        box = tuple(slice(at, at + size) for at, size in zip(start, out.shape, strict=True))
        array = self._volume.array
        if array is not None:
            begun = perf_counter_ns()
            out[...] = array[box]
            self._clock.add("copy", perf_counter_ns() - begun)
            return
        numbers = self._volume.grid.touched(box)

        def copy(number: int, memory: UInt8Array) -> None:
            self._copy(number, memory, start, out)

        if self._units is None:
            self._read_alone(numbers, copy)
        else:
            self._reader.check()  # all units may be in memory, so reads alone would not check the file
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
            # Other threads or processes are decoding all remaining units or have finished them, or the memory
            # has no room.
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
        """Decode units into the claimed slots of the memory, chunk by chunk, and copy from the slots."""
        try:
            for some in self._volume.together(np.array(list(claims))):
                parts = [claims[number].memory for number in some.tolist()]
                self._read_units(some, parts, copy)
                lost = [number for number in some.tolist() if not claims.pop(number).publish()]
                if lost:  # another process may have written to the slots at the same time
                    self._read_alone(np.array(lost), copy)
        finally:
            for claim in claims.values():
                claim.abandon()

    @ranged("decode")
    def _read_alone(self, numbers: Int64Array, copy: Callable[[int, Any], None]) -> None:
        """Decode units into temporary memory, chunk by chunk, and copy from this memory."""
        for some in self._volume.together(numbers):
            self._read_units(some, aligned(self._volume.unit_nbytes, len(some)), copy)

    def _read_units(
        self, numbers: Int64Array, parts: Sequence[UInt8Array], copy: Callable[[int, Any], None]
    ) -> None:
        nbytes, begun = self._volume.unit_nbytes, perf_counter_ns()
        self._reader.read(numbers, [part[:nbytes] for part in parts])
        self._clock.add("decode", perf_counter_ns() - begun)
        self._counts.add(nbytes * len(numbers), 0)
        for number, part in zip(numbers.tolist(), parts, strict=True):
            copy(number, part)

    def _copy(self, number: int, memory: UInt8Array, start: Sequence[int], out: npt.NDArray[Any]) -> None:
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
    """Return, for each element of a patch along one dimension, the index of the volume's element to copy.

    The patch may extend beyond the ``length`` elements of the dimension.  There, ``mode`` (as in
    ``numpy.pad``) decides which element is copied.  For the mode ``"constant"``, the index there is -1.
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


PADDING_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


def checked_size(patch_size: Sequence[int]) -> tuple[int, ...]:
    try:
        size = tuple(operator.index(side) for side in patch_size)
    except TypeError:
        size = ()
    if not size or min(size) < 1:
        raise OptionError(f"patch_size must be numbers from 1, one for each dimension, got {patch_size!r}")
    return size


def checked_nan(nan: Any, dtype: np.dtype[Any]) -> Any:
    if nan in ("keep", "error"):
        return nan
    if not isinstance(nan, (int, float)) or isinstance(nan, bool):
        raise OptionError(f"nan must be 'keep', 'error' or a number, got {nan!r}")
    if dtype.kind in "fc":
        check_held(nan, dtype, "nan=")
    return nan


def check_held(value: float, dtype: np.dtype[Any], what: str) -> None:
    """Raise an error if ``dtype`` cannot hold ``value``; a float may be rounded."""
    if dtype.kind in "fc":
        is_lost = float(np.finfo(dtype).max) < abs(value) != np.inf
    else:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        is_lost = bool(unheld(np.asarray(whole), dtype).any())
    if is_lost:
        raise OptionError(f"{what} is {value}, which elements of {dtype} cannot hold: give one that they can")


def filling(space: PatchSpace) -> int:
    """Return how many patches together have as many voxels as all volumes together."""
    voxels = sum(math.prod(shape) for shape in space.shapes.tolist())
    return int(max(1, voxels // math.prod(space.patch.tolist())))


def checked_margin(margin: Any, patch_size: Sequence[int]) -> tuple[int, ...]:
    """Return the margin in voxels for each dimension.

    ``margin`` is a number for all dimensions, a sequence with a number for each dimension, or an object whose
    method ``margin(patch_size)`` returns the numbers.
    """
    asks = getattr(margin, "margin", None)
    given = asks(tuple(patch_size)) if callable(asks) else margin
    try:
        found = tuple(operator.index(one) for one in np.atleast_1d(np.asarray(given, object)).tolist())
    except TypeError:
        found = (-1,)
    found = found * len(patch_size) if len(found) == 1 else found
    if len(found) != len(patch_size) or min(found) < 0:
        raise OptionError(
            "margin must be a number of voxels from 0, one for each dimension, or an augmentation of "
            f"fastpipe.augment, got {margin!r}"
        )
    return found


class WithMargin:
    """The places of patches enlarged by a margin: each start is moved back by the margin."""

    def __init__(self, places: PatchPlaces, margin: Sequence[int]) -> None:
        self._places, self._margin = places, np.array(margin, np.int64)
        self.count, self.is_random = places.count, places.is_random

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        found = self._places.places(seed, epoch, indices)
        return Places(found.volumes, found.starts - self._margin)


class Padding(NamedTuple):
    """The values of a patch's voxels that lie beyond the ends of the volume."""

    mode: str  # a mode of ``numpy.pad``, or ``"error"`` for no padding
    value: float = 0  # the constant for the volume, with the mode ``"constant"``
    label: float = 0  # the constant for the labels; the constant for masks is 0

    @classmethod
    def of(cls, option: Any) -> Padding:
        if isinstance(option, str) and option in ("error", *PADDING_MODES):
            return cls(option)
        if isinstance(option, tuple) and len(option) in (2, 3) and option[0] == "constant":
            try:
                return cls("constant", *map(_number, option[1:]))
            except (TypeError, ValueError):
                pass
        raise OptionError(
            f"padding must be 'error', one of {', '.join(map(repr, PADDING_MODES))}, or ('constant', value[, "
            f"value of labels]), got {option!r}"
        )

    def check(self, role: str, dtype: np.dtype[Any]) -> None:
        if self.mode == "constant":
            check_held(self.constant(role), dtype, f"the constant of padding= for {role}")

    def constant(self, role: str) -> float:
        """Return the constant for padding arrays of ``role``: ``"volume"``, ``"labels"`` or ``"mask"``."""
        return {"volume": self.value, "labels": self.label, "mask": 0}[role]

    @property
    def pads(self) -> bool:
        return self.mode != "error"


def _number(value: Any) -> float:
    """Convert ``value`` to a number; an integer stays an integer, which keeps its exact value."""
    if isinstance(value, (str, bytes)):
        raise TypeError(value)
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def read_patch(
    reader: PatchReader, shape: Sequence[int], start: Sequence[int], out: npt.NDArray[Any], lead: int,
    padding: Padding, role: str,
) -> None:  # fmt: skip
    """Read a patch, with padding beyond the ends of its volume, into ``out``: (*lead, *patch).

    ``start`` is the patch's first voxel, and may be negative.  ``shape`` is the volume's shape.  ``start``
    and ``shape`` do not contain the first ``lead`` dimensions of the array.
    """
    front, sides = [0] * lead, list(zip(start, out.shape[lead:], shape, strict=True))
    if all(at >= 0 and at + side <= most for at, side, most in sides):
        reader.read([*front, *start], out)
        return
    indices = [padded_indices(at, side, most, padding.mode) for at, side, most in sides]
    needed = [np.unique(index[index >= 0]) for index in indices]
    sizes = [len(some) for some in needed]  # at most the sides of the patch
    box = np.empty((*out.shape[:lead], *sizes), out.dtype)
    for runs in itertools.product(*map(_runs, needed)):
        lows = [int(some[run.start]) for some, run in zip(needed, runs, strict=True)]
        some_box: list[Any] = [slice(None)] * lead + list(runs)
        reader.read([*front, *lows], box[tuple(some_box)])
    if padding.mode == "constant":
        out[...] = padding.constant(role)
        begins = [int(some[0]) - at for some, at in zip(needed, start, strict=True)]
        inside: list[Any] = [slice(at, at + side) for at, side in zip(begins, sizes, strict=True)]
        out[(..., *inside)] = box
        return
    taken = [np.searchsorted(some, index) for some, index in zip(needed, indices, strict=True)]
    out[...] = box[np.ix_(*map(range, out.shape[:lead]), *taken)]


def _runs(indices: Int64Array) -> list[slice]:
    """Return slices that select runs of consecutive numbers from ascending ``indices``.

    With the padding ``"wrap"``, a dimension may have one run at each end.  The elements between these two
    runs are then not read.
    """
    cuts = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1).tolist(), len(indices)]
    return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]

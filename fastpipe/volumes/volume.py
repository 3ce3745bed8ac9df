"""What a volume is: an array somewhere, which is read in units.

A *unit* is what is decoded, and remembered, at once: a chunk, or as little of one as can be decoded alone.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.errors import VolumeError

__all__ = [
    "DIMS",
    "LARGEST_UNIT",
    "Box",
    "DamagedUnitError",
    "FileState",
    "Touched",
    "UnitGrid",
    "UnitReader",
    "Volume",
    "box_text",
    "box_within",
    "folder_state",
]

Box = tuple[slice, ...]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

DIMS = 5  # that an array may have
_MOST = (1 << 63) - 1  # units, and elements along a dimension
LARGEST_UNIT = 1 << 32  # bytes that are decoded at once


class Touched(NamedTuple):
    """The units that a box touches.

    Attributes:
        numbers: int64 (N,): of the units, in C order.
        first: int64 (D,): the place in the grid of the first.
        counts: int64 (D,): how many along each dimension; N is their product.
    """

    numbers: Int64Array
    first: Int64Array
    counts: Int64Array


class UnitGrid:
    """An array cut into units of one shape; those at its ends reach beyond it.

    Args:
        shape: of the array.
        unit: of a unit.

    Raises:
        OverflowError: there are more units, or elements along a dimension, than can be numbered.

    Attributes:
        shape, unit: as given.
        counts: units along each dimension.
        count: of all.

    >>> grid = UnitGrid((10, 10), (4, 8))
    >>> grid.touched([3, 0], [5, 4]).numbers
    array([0, 2])
    """

    def __init__(self, shape: Sequence[int], unit: Sequence[int]) -> None:
        self.shape, self.unit = tuple(map(int, shape)), tuple(map(int, unit))
        self.counts = tuple(-(-size // side) for size, side in zip(self.shape, self.unit, strict=True))
        self.count = math.prod(self.counts)
        if max(self.count, *self.shape, 0) > _MOST:
            raise OverflowError(f"its shape is {self.shape}, of {self.count:,} parts")
        self._unit = np.array(self.unit, np.int64)
        steps = [math.prod(self.counts[dim + 1 :]) for dim in range(len(self.counts))]
        self._steps = np.array(steps, np.int64)

    def touched(self, start: Sequence[int] | Int64Array, stop: Sequence[int] | Int64Array) -> Touched:
        """The units that a box touches.

        Args:
            start, stop: integers (D,): where it begins and ends, within the array and not empty.
        """
        first = np.asarray(start, np.int64) // self._unit
        counts = (np.asarray(stop, np.int64) - 1) // self._unit - first + 1
        numbers = np.zeros(1, np.int64)
        for low, count, step in zip(first.tolist(), counts.tolist(), self._steps.tolist(), strict=True):
            numbers = np.add.outer(numbers, np.arange(low, low + count) * step).ravel()
        return Touched(numbers, first, counts)

    def touched_by_each(
        self, starts: Int64Array, stops: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """The units that each of several boxes touches.

        Args:
            starts, stops: int64 (N, D): where they begin and end, within the array and not empty.

        Returns:
            int64 (N, K), their numbers; and bool (N, K), which of these there are.

        >>> starts, stops = np.array([[0], [2]]), np.array([[1], [9]])
        >>> numbers, are_there = UnitGrid((10,), (4,)).touched_by_each(starts, stops)
        >>> numbers[0][are_there[0]], numbers[1][are_there[1]]
        (array([0]), array([0, 1, 2]))
        """
        first, last = starts // self._unit, (stops - 1) // self._unit
        most = (last - first).max(axis=0, initial=0) + 1
        numbers = np.zeros((len(starts), 1), np.int64)
        are_there = np.ones((len(starts), 1), np.bool_)
        for dim, step in enumerate(self._steps.tolist()):
            at = first[:, dim, None] + np.arange(most[dim])
            shape = len(starts), numbers.shape[1] * at.shape[1]
            numbers = (numbers[:, :, None] + at[:, None, :] * step).reshape(shape)
            inside = at <= last[:, dim, None]
            are_there = (are_there[:, :, None] & inside[:, None, :]).reshape(shape)
        return numbers, are_there

    def place(self, number: int) -> tuple[int, ...]:
        """Where a unit is in the grid."""
        return tuple(int(at) for at in np.unravel_index(number, self.counts))

    def box(self, number: int) -> Box:
        """The part of the array that a unit is, as far as it is in the array."""
        return tuple(
            slice(at * side, min((at + 1) * side, size))
            for at, side, size in zip(self.place(number), self.unit, self.shape, strict=True)
        )


def box_text(box: Sequence[slice]) -> str:
    """Return a box as it is written in Python.

    >>> box_text((slice(0, 4), slice(8, 10)))
    '[0:4, 8:10]'
    """
    return f"[{', '.join(f'{side.start}:{side.stop}' for side in box)}]"


def box_within(box: Sequence[slice], outer: Sequence[slice]) -> Box:
    """Return a box in the coordinates of one that it is in."""
    return tuple(
        slice(side.start - whole.start, side.stop - whole.start)
        for side, whole in zip(box, outer, strict=True)
    )


class FileState(NamedTuple):
    """The state of a file, or folder, when it was opened.

    Attributes:
        name: for messages.
        state: device, inode, size, and when it was modified; of a file that is being written the last two are
            -1, and do not count.
    """

    name: str
    state: tuple[int, int, int, int]

    @classmethod
    def of(cls, name: str, status: os.stat_result | None = None, *, is_written: bool = False) -> FileState:
        """The state of a file now, or as it was found to be before."""
        return cls(name, _numbers(os.stat(name) if status is None else status, is_written))

    def check(self, where: int | str | None = None) -> None:
        """Raise an error if the file is not as it was.

        Args:
            where: a descriptor of it, or its path; None asks at its name.

        Raises:
            VolumeError: it has changed.
        """
        status = os.stat(self.name if where is None else where)
        if _numbers(status, is_written=self.state[2] < 0) != self.state:
            raise self.changed()

    def changed(self) -> VolumeError:
        """The error that the file is not as it was."""
        return VolumeError(
            f"{self.name} has changed since it was opened; make the dataset anew when it is complete"
        )


def _numbers(status: os.stat_result, is_written: bool) -> tuple[int, int, int, int]:
    if is_written:
        return status.st_dev, status.st_ino, -1, -1
    # Not the time of change: a file that is renamed, or loses a name, has the same content.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def folder_state(path: str) -> tuple[int, int, int]:
    """Of all files in a folder and those in it: how many, their bytes, and when one last changed, in ns."""
    count = nbytes = latest = 0
    for entry in os.scandir(path):
        if entry.is_dir():
            found = folder_state(entry.path)
        else:
            status = entry.stat()
            found = 1, status.st_size, max(status.st_mtime_ns, status.st_ctime_ns)
        count, nbytes, latest = count + found[0], nbytes + found[1], max(latest, found[2])
    return count, nbytes, latest


class DamagedUnitError(VolumeError):
    """A volume does not hold a part of itself as it should; others may be whole."""


class UnitReader(ABC):
    """Reads units of a volume, in the process that opened it.  For threads at once."""

    @abstractmethod
    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        """Read units into memory.

        Args:
            numbers: int64 (N,), of the units.
            outs: for each uint8 (M,), C-contiguous and aligned to 16: its elements in C order.  What lies
                beyond the array's ends is arbitrary.

        Raises:
            DamagedUnitError: it does not hold what it should; the message says which chunk, and where.
            OSError: it cannot be read.
        """

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise an error if what was read before may be no longer what the volume holds.  What each chunk is
        read from by itself, as in a folder, is not looked at.

        Raises:
            VolumeError: a file has changed.
        """


class Volume(ABC):
    """An array somewhere.  It can be sent to other processes, which open it for themselves.

    Attributes:
        name: says in messages which it is: a path, and a name within that.
        shape: of the array.
        dtype: of its elements, as NumPy has it.
        grid: its units.
        how: how it is stored, in words.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    grid: UnitGrid
    how: str

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, decoded."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a unit, decoded."""
        return math.prod(self.grid.unit) * self.dtype.itemsize

    @property
    def array(self) -> npt.NDArray[Any] | None:
        """The array, where it is in memory; None where it is read."""
        return None

    @property
    def fill(self) -> bytes:
        """The bytes of an element of which nothing was written; zeros where its format does not say."""
        return bytes(self.dtype.itemsize)

    @property
    def finer(self) -> Volume | None:
        """The same in smaller units, where a unit is some that are stored apart: then one that is damaged
        does not spoil the others.  None where a unit is what it is."""
        return None

    def native_source(self) -> Any | None:
        """Where its bytes are, for the native core: a ``native.VolumeSource``; None where only ``open`` reads
        it."""
        return None

    @abstractmethod
    def open(self) -> UnitReader:
        """Open it in this process."""

    @abstractmethod
    def stored_in(self, numbers: Int64Array) -> Int64Array:
        """The number of the chunk in which units are stored: those of one are best read together."""

    @abstractmethod
    def state(self) -> tuple[str, str]:
        """A file or folder of it, and in words what it is and in which state all of it is, for what is kept
        of it from one time to the next; empty where that cannot be known."""

"""What a volume is: an array somewhere, which is read in units."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import VolumeError
from fastpipe.volumes.grid import UnitGrid

__all__ = ["DIMS", "DamagedUnitError", "UnitReader", "Volume"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

DIMS = 5  # that an array may have


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

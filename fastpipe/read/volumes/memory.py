"""Arrays that are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.read.volumes.grid import UnitGrid
from fastpipe.read.volumes.volume import UnitReader, Volume

__all__ = ["MemoryVolume"]


class MemoryVolume(Volume, UnitReader):
    """A NumPy array; patches are copied from it as they are.

    Args:
        array: the array.
        name: for messages.
    """

    def __init__(self, array: npt.NDArray[Any], name: str) -> None:
        self._array, self.name = array, name
        self.shape, self.dtype = array.shape, array.dtype.newbyteorder("=")
        # As a file of it would be read, for orders that visit neighbours together.
        self.grid = UnitGrid(array.shape, [min(max(1, size), 64) for size in array.shape])
        self.how = "an array in memory"

    @property
    def array(self) -> npt.NDArray[Any]:
        """The array."""
        return self._array

    def open(self) -> UnitReader:
        """Nothing is to be opened."""
        return self

    def read(self, numbers: npt.NDArray[np.int64], outs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy units."""
        for number, out in zip(numbers.tolist(), outs, strict=True):
            part = self._array[self.grid.box(number)]
            unit = out.view(self.dtype).reshape(self.grid.unit)
            unit[tuple(slice(size) for size in part.shape)] = part

    def stored_in(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each by itself."""
        return numbers

    def state(self) -> tuple[str, str]:
        """Not known: it can change at any time."""
        return "", ""

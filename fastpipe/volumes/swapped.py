"""Volumes whose elements lie in the other order of bytes than the machine's: torch knows its own only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.volumes.grid import UnitGrid
from fastpipe.volumes.volume import UnitReader, Volume

__all__ = ["NativeVolume"]


class NativeVolume(Volume):
    """A volume with elements in the machine's order of bytes.

    Args:
        volume: as it is stored.
    """

    def __init__(self, volume: Volume) -> None:
        self.inner = volume
        self.name, self.shape, self.how = volume.name, volume.shape, volume.how
        self.dtype = volume.dtype.newbyteorder("=")
        self.grid = UnitGrid(volume.shape, volume.grid.unit)

    @property
    def finer(self) -> Volume | None:
        """As of the volume."""
        finer = self.inner.finer
        return None if finer is None else NativeVolume(finer)

    @property
    def fill(self) -> bytes:
        """The volume's, swapped."""
        return np.frombuffer(self.inner.fill, self.inner.dtype).astype(self.dtype).tobytes()

    def native_source(self) -> Any | None:
        """The volume's, swapped."""
        source = self.inner.native_source()
        if source is None or self.dtype.kind != "c":
            return source and source.swap(self.dtype.itemsize)
        return source.swap(self.dtype.itemsize // 2)

    def open(self) -> UnitReader:
        """Open the volume."""
        return _Reader(self)

    def stored_in(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As of the volume."""
        return self.inner.stored_in(numbers)

    def state(self) -> tuple[str, str]:
        """The volume's."""
        return self.inner.state()


class _Reader(UnitReader):
    def __init__(self, volume: NativeVolume) -> None:
        self._dtype, self._reader = volume.dtype, volume.inner.open()

    def check(self) -> None:
        """As of the volume."""
        self._reader.check()

    def read(self, numbers: npt.NDArray[np.int64], outs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Read units, and turn the bytes of their elements around."""
        self._reader.read(numbers, outs)
        for out in outs:
            out.view(self._dtype).byteswap(inplace=True)

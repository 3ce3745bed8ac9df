"""Volumes made of others: in larger units, or with elements in the machine's order of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.volumes.volume import UnitGrid, UnitReader, Volume, box_within

__all__ = ["GroupedVolume", "NativeVolume", "grown_unit", "in_worthwhile_units"]

_LEAST_NBYTES = 1 << 17  # of a unit: to remember a smaller one costs more than to decode it


def in_worthwhile_units(volume: Volume) -> Volume:
    """The volume, with units that are worth remembering."""
    if volume.array is not None or volume.unit_nbytes >= _LEAST_NBYTES:
        return volume
    unit = grown_unit(volume.grid.unit, volume.shape, volume.dtype.itemsize, _LEAST_NBYTES)
    return volume if tuple(unit) == volume.grid.unit else GroupedVolume(volume, unit)


def grown_unit(unit: Sequence[int], shape: Sequence[int], itemsize: int, least: int) -> list[int]:
    """A unit of whole smaller ones, as even as these let it be.

    Args:
        unit: the smaller one.
        shape: of the array.
        itemsize: of its elements.
        least: bytes that it is to have, if the array has.
    """
    grown = list(unit)
    while math.prod(grown) * itemsize < least:
        growing = [dim for dim in range(len(grown)) if grown[dim] < shape[dim]]
        if not growing:
            break
        dim = min(growing, key=lambda dim: grown[dim])
        grown[dim] = min(2 * grown[dim], -(-shape[dim] // unit[dim]) * unit[dim])
    return grown


class GroupedVolume(Volume):
    """A volume in larger units.

    Args:
        volume: the volume.
        unit: whole multiples of its unit.
    """

    def __init__(self, volume: Volume, unit: Sequence[int]) -> None:
        self.inner = volume
        self.name, self.shape, self.dtype, self.how = volume.name, volume.shape, volume.dtype, volume.how
        self.grid = UnitGrid(volume.shape, unit)

    @property
    def fill(self) -> bytes:
        """The volume's."""
        return self.inner.fill

    @property
    def finer(self) -> Volume:
        """The volume in units of its own."""
        return self.inner

    def native_source(self) -> Any | None:
        """The volume's."""
        return self.inner.native_source()

    def open(self) -> UnitReader:
        """Open the volume."""
        return _GroupedReader(self)

    def stored_in(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each by itself."""
        return numbers

    def state(self) -> tuple[str, str]:
        """The volume's."""
        return self.inner.state()


class _GroupedReader(UnitReader):
    def __init__(self, volume: GroupedVolume) -> None:
        self._volume, self._reader = volume, volume.inner.open()

    def check(self) -> None:
        """As of the volume."""
        self._reader.check()

    def read(self, numbers: npt.NDArray[np.int64], outs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Read units: the smaller ones of each together."""
        volume, inner = self._volume, self._volume.inner
        for number, out in zip(numbers.tolist(), outs, strict=True):
            box = volume.grid.box(number)
            touched = inner.grid.touched([side.start for side in box], [side.stop for side in box])
            count, nbytes = len(touched.numbers), inner.unit_nbytes
            step = -(-nbytes // 16) * 16
            memory = np.empty(count * step, np.uint8)
            parts = [memory[place * step :][:nbytes] for place in range(count)]
            self._reader.read(touched.numbers, parts)
            made = out.view(volume.dtype).reshape(volume.grid.unit)
            for small, part in zip(touched.numbers.tolist(), parts, strict=True):
                sides = inner.grid.box(small)
                whole = part.view(volume.dtype).reshape(inner.grid.unit)
                made[box_within(sides, box)] = whole[tuple(slice(side.stop - side.start) for side in sides)]


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
        return _NativeReader(self)

    def stored_in(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As of the volume."""
        return self.inner.stored_in(numbers)

    def state(self) -> tuple[str, str]:
        """The volume's."""
        return self.inner.state()


class _NativeReader(UnitReader):
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

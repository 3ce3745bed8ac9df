"""Volumes: arrays in any storage, which are read in units.

A *unit* is the part of an array that is decoded and kept in memory as a whole.  It is a chunk, a group of
chunks, or a part of a chunk that can be decoded on its own.
"""

from __future__ import annotations

import errno
import lzma
import math
import os
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import missing_package
from fastpipe.core.text import in_bytes
from fastpipe.errors import FastpipeError, VolumeError
from fastpipe.hdf5 import chunks

Box = tuple[slice, ...]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

DIMS = 5  # the most dimensions of an array
LARGEST_UNIT = 1 << 32  # the most bytes of a unit
_ALIGNMENT = 16  # bytes to which the memory for a unit is aligned
_MOST = (1 << 63) - 1  # the most units, and the most elements along a dimension
_LEAST_NBYTES = 1 << 17  # the least bytes of a unit; keeping a smaller unit costs more than decoding it again

# The errors that parsers raise for unexpected bytes.  The list excludes errors about packages that cannot be
# imported, about a lack of memory or descriptors, and about files that must not be opened.
UNREADABLE: tuple[type[Exception], ...] = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError, lzma.LZMAError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_OF_CONTENT = (None, errno.EINVAL)  # errno of a library's own error, and of an offset beyond any file
_MOST_TEXT = 300  # the most characters of a library's message, which may repeat a whole header


class UnitGrid:
    """An array divided into units of one shape.  The last units may extend beyond the ends of the array.

    >>> grid = UnitGrid((10, 10), (4, 8))
    >>> grid.touched((slice(3, 5), slice(0, 4)))
    array([0, 2])
    """

    def __init__(self, shape: Sequence[int], unit: Sequence[int]) -> None:
        self.shape, self.unit = tuple(map(int, shape)), tuple(map(int, unit))
        self.counts = tuple(-(-size // side) for size, side in zip(self.shape, self.unit, strict=True))
        self.count = math.prod(self.counts)
        if max(self.count, *self.shape, 0) > _MOST:
            raise OverflowError(f"its shape is {self.shape}, of {self.count:,} parts")

    def touched(self, box: Sequence[slice]) -> Int64Array:
        """Return the numbers of the units that overlap with a non-empty box, in C order: int64 (N,)."""
        numbers = np.zeros(1, np.int64)
        for side, unit, count in zip(box, self.unit, self.counts, strict=True):
            along = np.arange(side.start // unit, (side.stop - 1) // unit + 1)
            numbers = np.add.outer(numbers * count, along).ravel()
        return numbers

    def touched_by_each(
        self, starts: Int64Array, stops: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return the units that overlap with each of N boxes, which extend from ``starts`` to ``stops``.

        The first array has the numbers of each box's units: int64 (N, K).  The second array is True where the
        first array has a valid number: bool (N, K).

        >>> starts, stops = np.array([[0], [2]]), np.array([[1], [9]])
        >>> numbers, are_there = UnitGrid((10,), (4,)).touched_by_each(starts, stops)
        >>> numbers[0][are_there[0]], numbers[1][are_there[1]]
        (array([0]), array([0, 1, 2]))
        """
        unit = np.array(self.unit, np.int64)
        first, last = starts // unit, (stops - 1) // unit
        most = (last - first).max(axis=0, initial=0) + 1
        numbers = np.zeros((len(starts), 1), np.int64)
        are_there = np.ones((len(starts), 1), np.bool_)
        for dim, count in enumerate(self.counts):
            at = first[:, dim, None] + np.arange(most[dim])
            shape = len(starts), numbers.shape[1] * at.shape[1]
            numbers = (numbers[:, :, None] * count + at[:, None, :]).reshape(shape)
            inside = at <= last[:, dim, None]
            are_there = (are_there[:, :, None] & inside[:, None, :]).reshape(shape)
        return numbers, are_there

    def place(self, number: int) -> tuple[int, ...]:
        return tuple(int(at) for at in np.unravel_index(number, self.counts))

    def box(self, number: int) -> Box:
        """Return the part of the array that a unit covers."""
        return tuple(
            slice(at * side, min((at + 1) * side, size))
            for at, side, size in zip(self.place(number), self.unit, self.shape, strict=True)
        )


def box_text(box: Sequence[slice]) -> str:
    """Return a box in Python's notation: ``"[0:4, 8:10]"``."""
    return f"[{', '.join(f'{side.start}:{side.stop}' for side in box)}]"


def sides_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def chunk_text(chunk: Sequence[int], dtype: np.dtype[Any], codec: str = "") -> str:
    """Return a description of a chunk: ``"64×128×128 (1 MiB; zstd)"``."""
    nbytes = in_bytes(math.prod(chunk) * dtype.itemsize)
    return f"{sides_text(chunk)} ({nbytes}; {codec})" if codec else f"{sides_text(chunk)} ({nbytes})"


def box_within(box: Sequence[slice], outer: Sequence[slice]) -> Box:
    """Return ``box`` in the coordinates of ``outer``, which contains ``box``."""
    return tuple(
        slice(side.start - whole.start, side.stop - whole.start)
        for side, whole in zip(box, outer, strict=True)
    )


class FileState(NamedTuple):
    name: str  # for messages
    state: chunks.FileState

    @classmethod
    def of(cls, name: str, status: os.stat_result | None = None, *, is_written: bool = False) -> FileState:
        found = os.stat(name) if status is None else status
        return cls(name, chunks.FileState.of(found, is_written=is_written))

    def check(self, where: int | str | None = None) -> None:
        """Raise an error if the file at ``where`` has changed.

        ``where`` is a descriptor or a path.  If it is None, the path is ``name``.
        """
        if not self.state.fits(os.stat(self.name if where is None else where)):
            raise self.changed()

    def changed(self) -> VolumeError:
        return VolumeError(str(self.state.changed(self.name)))


def folder_state(path: str) -> str:
    """Describe all files in a folder and its subfolders: their number, total size and latest change."""
    count, nbytes, latest, folders = 0, 0, 0, [path]
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.is_dir():
                folders.append(entry.path)
                continue
            status = entry.stat()
            count, nbytes = count + 1, nbytes + status.st_size
            latest = max(latest, status.st_mtime_ns, status.st_ctime_ns)
    return f"{count} files, {nbytes} bytes, {latest} ns"


class DamagedUnitError(VolumeError):
    """An error for a damaged part of a volume whose other parts may be intact."""


class UnitReader(ABC):
    """A reader of a volume's units, for the process that created the reader.  Thread-safe."""

    @abstractmethod
    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        """Read the units ``numbers`` into ``outs``, which has one array for each unit.

        Each array is uint8 (M,), C-contiguous, aligned to 16 bytes, and receives the unit's elements in C
        order.  Elements beyond the ends of the volume are arbitrary.  If a unit is damaged, a
        ``DamagedUnitError`` names the chunk and its place.
        """

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise a ``VolumeError`` if the volume has changed and units in memory may be outdated.

        If each chunk is a file in a folder, the files are not checked.
        """


class Volume(ABC):
    """An array in any storage.  Picklable: another process opens the storage again."""

    name: str  # the name in messages: a path, and the name of the array in the file or folder
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    grid: UnitGrid
    how: str  # the storage format, in words
    affine: npt.NDArray[np.float64] | None = None  # (4, 4): from voxels to places, if the format has it
    _fill = b""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def unit_nbytes(self) -> int:
        return math.prod(self.grid.unit) * self.dtype.itemsize

    @property
    def array(self) -> npt.NDArray[Any] | None:
        """The array, if the volume is an array in memory; otherwise None."""
        return None

    @property
    def fill(self) -> bytes:
        """The bytes of an element that was never written; zeros if the format does not specify them."""
        return self._fill or bytes(self.dtype.itemsize)

    @property
    def finer(self) -> Volume | None:
        """The same volume with smaller units, if a unit consists of parts that are stored separately.

        With smaller units, a damaged part does not make its neighbours unreadable.  If a unit has no such
        parts, the result is None.
        """
        return None

    def native_source(self) -> Any | None:
        """Return a ``native.VolumeSource`` for reads in the native core; None if only ``open`` can read."""
        return None

    @abstractmethod
    def open(self) -> UnitReader:
        """Open the volume in this process."""

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        """Return the number of each unit's chunk.  Units of one chunk should be read by one call."""
        return numbers

    @abstractmethod
    def state(self) -> tuple[str, str]:
        """Return a path of the volume, and a text that describes the volume's state.

        The two strings are a key for cached data about the volume.  If the state is unknown, both are empty.
        """

    def together(self, numbers: Int64Array, most_nbytes: float = math.inf) -> list[Int64Array]:
        """Split the units ``numbers`` into groups, each of which one call of ``UnitReader.read`` should read.

        The units of a group belong to one chunk.  A group has at most ``most_nbytes`` bytes.
        """
        chunks = self.stored_in(numbers)
        order = np.argsort(chunks, kind="stable")
        groups = np.split(numbers[order], np.flatnonzero(np.diff(chunks[order])) + 1)
        most = int(max(1, min(len(numbers), most_nbytes // max(1, self.unit_nbytes))))
        return [group[at : at + most] for group in groups for at in range(0, len(group), most)]

    def put(self, part: npt.NDArray[Any], out: UInt8Array) -> None:
        """Copy ``part``, the elements of a unit that are within the array, into the unit's memory ``out``."""
        unit = out.view(self.dtype).reshape(self.grid.unit)
        unit[tuple(map(slice, part.shape))] = part


def aligned(nbytes: int, count: int) -> list[UInt8Array]:
    """Return memory for ``count`` units as ``UnitReader.read`` requires: aligned, uint8 (nbytes,) each."""
    step = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = np.empty(step * count + _ALIGNMENT, np.uint8)
    skipped = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return [memory[skipped + step * number :][:nbytes] for number in range(count)]


def in_worthwhile_units(volume: Volume) -> Volume:
    if volume.array is not None or volume.unit_nbytes >= _LEAST_NBYTES:
        return volume
    unit = grown_unit(volume.grid.unit, volume.shape, volume.dtype.itemsize, _LEAST_NBYTES)
    return volume if tuple(unit) == volume.grid.unit else GroupedVolume(volume, unit)


def grown_unit(
    unit: Sequence[int], shape: Sequence[int], itemsize: int, least: int, *, is_cut: bool = False
) -> list[int]:
    """Return the shape of a unit of at least ``least`` bytes that consists of whole units of shape ``unit``.

    The sides are as equal as possible.  With ``is_cut``, no side is longer than the array, which has
    ``shape``.
    """
    grown, ends = list(unit), shape
    if not is_cut:
        ends = [-(-size // side) * side for size, side in zip(shape, unit, strict=True)]
    while math.prod(grown) * itemsize < least:
        growing = [dim for dim in range(len(grown)) if grown[dim] < shape[dim]]
        if not growing:
            break
        dim = min(growing, key=lambda dim: grown[dim])
        grown[dim] = min(2 * grown[dim], ends[dim])
    return grown


class WrappedVolume(Volume):
    """A volume whose units are made from the units of another volume, ``inner``."""

    def __init__(self, inner: Volume, unit: Sequence[int] | None = None) -> None:
        self.inner = inner
        self.name, self.shape, self.dtype, self.how = inner.name, inner.shape, inner.dtype, inner.how
        self.grid, self._fill = UnitGrid(inner.shape, unit or inner.grid.unit), inner.fill

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        return self.inner.stored_in(numbers)

    def state(self) -> tuple[str, str]:
        return self.inner.state()


class WrappedReader(UnitReader):
    """A reader of a ``WrappedVolume``; subclasses define ``read``."""

    def __init__(self, volume: WrappedVolume) -> None:
        self._volume, self._reader = volume, volume.inner.open()

    def check(self) -> None:
        self._reader.check()


class GroupedVolume(WrappedVolume):
    """A volume with larger units, which consist of whole units of the inner volume."""

    @property
    def finer(self) -> Volume:
        return self.inner

    def native_source(self) -> Any | None:
        return self.inner.native_source()

    def open(self) -> UnitReader:
        return _GroupedReader(self)

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        return numbers


class _GroupedReader(WrappedReader):
    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        volume, inner = self._volume, self._volume.inner
        for number, out in zip(numbers.tolist(), outs, strict=True):
            box = volume.grid.box(number)
            touched = inner.grid.touched(box)
            parts = aligned(inner.unit_nbytes, len(touched))
            self._reader.read(touched, parts)
            made = out.view(volume.dtype).reshape(volume.grid.unit)
            for small, part in zip(touched.tolist(), parts, strict=True):
                sides = inner.grid.box(small)
                whole = part.view(volume.dtype).reshape(inner.grid.unit)
                made[box_within(sides, box)] = whole[box_within(sides, sides)]


class NativeVolume(WrappedVolume):
    """A volume that converts the elements of ``inner`` to native byte order."""

    def __init__(self, inner: Volume) -> None:
        super().__init__(inner)
        self.dtype = inner.dtype.newbyteorder("=")
        self._fill = np.frombuffer(inner.fill, inner.dtype).astype(self.dtype).tobytes()

    @property
    def finer(self) -> Volume | None:
        finer = self.inner.finer
        return None if finer is None else NativeVolume(finer)

    def native_source(self) -> Any | None:
        source = self.inner.native_source()
        return source and swapped(source, self.dtype)

    def open(self) -> UnitReader:
        return _NativeReader(self)


class _NativeReader(WrappedReader):
    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        self._reader.read(numbers, outs)
        for out in outs:
            out.view(self._volume.dtype).byteswap(inplace=True)


def swapped(source: Any, dtype: np.dtype[Any]) -> Any:
    """Return a native source that swaps the bytes of each number; a complex element has two numbers."""
    return source.swap(dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize)


@contextmanager
def as_volume_error(what: str, *others: type[Exception]) -> Iterator[None]:
    """Convert errors about a file's content to a ``VolumeError``.

    The classes in ``UNREADABLE`` and ``others`` count as errors about the content.  The message begins with
    ``what``, such as ``"x.tif cannot be read as TIFF"``.  Errors that are not about the file's content stay
    unchanged.
    """
    try:
        yield
    except FastpipeError:
        raise
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    except MemoryError:
        raise VolumeError(f"{what}: it claims a size that exceeds the memory") from None
    except OSError as error:
        if error.errno not in _OF_CONTENT:
            raise
        raise VolumeError(f"{what}: {shortened(error)}") from None
    except (*UNREADABLE, *others) as error:
        raise VolumeError(f"{what}: {type(error).__name__}: {shortened(error)}") from None


def shortened(what: object) -> str:
    text = str(what)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"

"""Volumes that lie in a file as they are: NumPy's format."""

from __future__ import annotations

import ast
import contextlib
import errno
import math
import os
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import lent, open_file
from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError, read_fully
from fastpipe.core.text import in_bytes
from fastpipe.errors import VolumeError
from fastpipe.volumes.damage import as_volume_error
from fastpipe.volumes.volume import DamagedUnitError, FileState, UnitGrid, UnitReader, Volume, box_text

__all__ = ["RawVolume", "npy_volume", "raw_unit", "read_box"]

_RUN_NBYTES = 1 << 14  # that lie together, and are read by one call
_UNIT_NBYTES = 1 << 19
_MOST_HEADER = 10_000  # bytes, as NumPy has it


class RawVolume(Volume):
    """An array whose elements lie in a file one after the other, in C order or in Fortran's.

    Args:
        path: the file.
        shape, dtype: of the array.
        offset: where its first element is.
        is_fortran: whether the first index counts fastest.
        how: how it is stored, in words.
        status: of the file, from before the rest was read from it: a change since then is noticed.
        name: of the volume, for messages, where that is not the file.
    """

    def __init__(
        self,
        path: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        offset: int,
        is_fortran: bool,
        how: str,
        status: os.stat_result,
        name: str = "",
    ) -> None:
        self.path, self.name, self.shape, self.dtype = path, name or path, tuple(shape), dtype
        self.offset, self.is_fortran = offset, is_fortran
        self.source = path  # what the file is a copy of, where it is one, and the state that this was in
        self.copied: FileState | None = None
        needed = offset + math.prod(shape) * dtype.itemsize
        if status.st_size < needed:
            raise VolumeError(
                f"{path} is cut off: it has {in_bytes(status.st_size)} of {in_bytes(needed)}; copy it again"
            )
        self.opened = FileState.of(self.name, status)
        stored = self.shape[::-1] if is_fortran else self.shape
        unit = raw_unit(stored, dtype.itemsize)
        self.grid = UnitGrid(self.shape, unit[::-1] if is_fortran else unit)
        self.how = how

    def native_source(self) -> Any:
        """The file, in the state that it was in."""
        source = native.volume_in_file(
            os.fsencode(self.path), self.opened.state, self.dtype.itemsize, self.offset, self.is_fortran
        )
        copied = self.copied
        return source if copied is None else source.copy_of(os.fsencode(copied.name), copied.state)

    def open(self) -> UnitReader:
        """Open the file in this process."""
        return _RawReader(self)

    def stored_in(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each by itself."""
        return numbers

    def state(self) -> tuple[str, str]:
        """The file's; of a copy that of what it is a copy of."""
        state = FileState.of(self.source).state
        return self.source, f"raw {state} {self.shape} {self.dtype.str} {self.offset}"


class _RawReader(UnitReader):
    def __init__(self, volume: RawVolume) -> None:
        self._volume = volume
        self._file = native.data_file(os.fsencode(volume.path), volume.opened.state)
        self.check()

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        volume = self._volume
        with contextlib.ExitStack() as block:
            try:
                descriptor = block.enter_context(lent(self._file, volume.path))
            except OSError as error:
                # A copy goes when one of another state is made.
                is_gone = isinstance(error, FileNotFoundError) and volume.path != volume.source
                if error.errno == errno.ESTALE or is_gone:
                    raise volume.opened.changed() from None
                raise
            yield descriptor

    def check(self) -> None:
        """Look at the file; of a copy also at what it is a copy of."""
        with self._descriptor():
            pass
        if self._volume.copied is not None:
            self._volume.copied.check()

    def read(self, numbers: npt.NDArray[np.int64], outs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Read units."""
        self.check()
        with self._descriptor() as descriptor:
            for number, out in zip(numbers.tolist(), outs, strict=True):
                self._read_unit(descriptor, number, out)

    def _read_unit(self, descriptor: int, number: int, out: npt.NDArray[np.uint8]) -> None:
        volume = self._volume
        shape, unit, box = volume.shape, volume.grid.unit, volume.grid.box(number)
        made = out.view(volume.dtype).reshape(unit)
        sizes = [side.stop - side.start for side in box]
        box_of_unit: list[Any] = list(map(slice, sizes))
        target = made[(..., *box_of_unit)]
        if volume.is_fortran:  # the same, seen from behind
            shape, box, sizes, target = shape[::-1], box[::-1], sizes[::-1], target.T
        # What lies together in the file is read into memory without gaps, and put into its place.
        packed = target if target.flags.c_contiguous else np.empty(sizes, volume.dtype)
        try:
            read_box(descriptor, volume.offset, shape, box, packed)
        except ChunkError as error:
            where = box_text(volume.grid.box(number))
            raise DamagedUnitError(f"{volume.name}, the part at {where}: {error}") from None
        if packed is not target:
            target[...] = packed


def read_box(
    descriptor: int, offset: int, shape: Sequence[int], box: Sequence[slice], out: npt.NDArray[Any]
) -> None:
    """Read a box of an array that lies in a file in C order.

    Args:
        descriptor: of the file.
        offset: where the array begins in it.
        shape: of the array.
        box: the part of it to be read.
        out: of the box's shape, C-contiguous.

    Raises:
        ChunkError: the file ends within it.
        OSError: it cannot be read.
    """
    itemsize, sizes = out.itemsize, [side.stop - side.start for side in box]
    # From the last dimension on that is not taken as a whole, elements lie together.
    lead = len(shape)
    while lead > 1 and sizes[lead - 1] == shape[lead - 1]:
        lead -= 1
    lead = max(lead - 1, 0)
    run = math.prod(sizes[lead:]) * itemsize
    steps = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    first = offset + sum(side.start * step for side, step in zip(box, steps, strict=True))
    view: Any = out.reshape(-1).view(np.uint8).data
    for place, at in enumerate(np.ndindex(*sizes[:lead])):
        begin = first + sum(index * step for index, step in zip(at, steps, strict=False))
        read_fully(descriptor, view[place * run : (place + 1) * run], begin)


def raw_unit(shape: Sequence[int], itemsize: int) -> list[int]:
    """The shape of a unit of an array that lies in C order: of runs that are worth a call, and as even as
    these let it be."""
    unit = [1] * len(shape)
    if not shape:
        return unit
    # The last dimensions first, until a run is long enough.
    for dim in reversed(range(len(shape))):
        inner = math.prod(unit[dim + 1 :]) * itemsize
        if inner >= _RUN_NBYTES:
            break
        unit[dim] = max(1, min(shape[dim], -(-_RUN_NBYTES // inner)))
    # Then all in front of them alike.
    while math.prod(unit) * itemsize < _UNIT_NBYTES:
        growing = [dim for dim in range(len(shape)) if unit[dim] < shape[dim]]
        if not growing:
            break
        dim = min(growing, key=lambda dim: unit[dim])
        unit[dim] = min(shape[dim], 2 * unit[dim])
    return unit


def npy_volume(path: str) -> RawVolume:
    """The array in a file of NumPy's format.

    Raises:
        VolumeError: it is none, or holds Python objects.
    """
    refused = as_volume_error(f"{path} is no array of NumPy's", tokenize.TokenError)
    with open(path, "rb", opener=open_file) as file, refused:
        status = os.fstat(file.fileno())
        shape, is_fortran, dtype = _npy_header(file)
        offset = file.tell()
    if dtype.hasobject:
        raise VolumeError(f"{path} holds Python objects, which could run code: save numbers")
    if min(shape, default=0) < 0:
        raise VolumeError(f"{path} is no array of NumPy's: its shape is {shape}")
    return RawVolume(path, shape, dtype, offset, is_fortran, "an array in NumPy's file format", status)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of the array in a file; it is read up to the first element."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    if version != (3, 0):
        raise ValueError(f"version {version} of the format is not known")
    # As the second, but in UTF-8; NumPy has no public function for it.
    length = int.from_bytes(file.read(4), "little")
    if length > _MOST_HEADER:
        raise ValueError(f"its header has {length} bytes")
    about = ast.literal_eval(file.read(length).decode())
    shape, dtype = about["shape"], np.lib.format.descr_to_dtype(about["descr"])
    is_right = isinstance(shape, tuple) and all(isinstance(side, int) for side in shape)
    if not is_right or len(about) != 3 or not isinstance(about["fortran_order"], bool):
        raise ValueError(f"its header says {about!r}")
    return shape, about["fortran_order"], dtype

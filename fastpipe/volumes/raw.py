"""Uncompressed arrays in memory, and in files such as NumPy's ``.npy``."""

from __future__ import annotations

import ast
import contextlib
import copy
import errno
import math
import mmap
import os
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import lent, open_file
from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError, read_fully
from fastpipe.core.text import in_bytes
from fastpipe.errors import VolumeError
from fastpipe.volumes.volume import (
    DamagedUnitError,
    FileState,
    Int64Array,
    UInt8Array,
    UnitGrid,
    UnitReader,
    Volume,
    as_volume_error,
    box_text,
    grown_unit,
    swapped,
)

_RUN_NBYTES = 1 << 14  # contiguous bytes that make a read call worthwhile
_UNIT_NBYTES = 1 << 19
_MOST_HEADER = 10_000  # bytes; NumPy's limit


class RawVolume(Volume):
    """An array whose elements are contiguous in a file, in C or in Fortran order, or a view of such an array.

    ``steps`` has the bytes from one element to the next in the file, for each dimension.  The step of a
    dimension whose order is reversed is negative.  ``offset`` is the byte where the file's elements begin.

    ``status`` must be taken before anything else is read from the file, so that later changes are detected.
    ``name`` is the file's name in messages.  If the file is an uncompressed copy, the attribute ``source`` is
    the path of the original file, and ``copied`` is the original's state at the time of the copy.  Otherwise
    ``source`` is ``path``, and ``copied`` is None.
    """

    def __init__(
        self, path: str, shape: Sequence[int], dtype: np.dtype[Any], offset: int, is_fortran: bool, how: str,
        status: os.stat_result, name: str = "",
    ) -> None:  # fmt: skip
        self.path, self.name, self.dtype = path, name or path, dtype
        self.offset, self.how = offset, how
        self.source = path
        self.copied: FileState | None = None
        needed = offset + math.prod(shape) * dtype.itemsize
        if status.st_size < needed:
            raise VolumeError(
                f"{path} is cut off: it has {in_bytes(status.st_size)} of {in_bytes(needed)}; copy it again"
            )
        self.opened = FileState.of(self.name, status)
        steps, step = [0] * len(shape), dtype.itemsize
        for dim in range(len(shape)) if is_fortran else reversed(range(len(shape))):
            steps[dim] = step
            step *= max(1, shape[dim])
        self._set_view(shape, steps)

    def _set_view(self, shape: Sequence[int], steps: Sequence[int]) -> None:
        self.shape, self.steps = tuple(shape), tuple(steps)
        unit = dict(
            zip(self.order, raw_unit([shape[dim] for dim in self.order], self.dtype.itemsize), strict=True)
        )
        self.grid = UnitGrid(self.shape, [unit[dim] for dim in range(len(shape))])

    @property
    def order(self) -> list[int]:
        """The dimensions in the order of the file: elements along the last one are next to each other."""
        return sorted(range(len(self.steps)), key=lambda dim: -abs(self.steps[dim]))

    def viewed(self, axes: Sequence[int], flips: Sequence[bool]) -> RawVolume:
        """Return the volume with its dimensions in the order ``axes``, and some of them reversed."""
        made = copy.copy(self)
        steps = [
            -self.steps[axis] if flip else self.steps[axis] for axis, flip in zip(axes, flips, strict=True)
        ]
        made._set_view([self.shape[axis] for axis in axes], steps)
        return made

    def mapped(self) -> npt.NDArray[Any]:
        """Return the array as a memory map."""
        whole = np.memmap(self.path, np.uint8, "r", self.offset, (self.nbytes,))
        steps = zip(self.steps, self.shape, strict=True)
        first = sum(-step * (size - 1) for step, size in steps if step < 0)
        return np.ndarray(self.shape, self.dtype, whole, first, self.steps)

    def native_source(self) -> Any:
        source = native.volume_in_file(
            os.fsencode(self.path), self.opened.state, self.dtype.itemsize, self.offset, self.steps
        )
        copied = self.copied
        return source if copied is None else source.copy_of(os.fsencode(copied.name), copied.state)

    def open(self) -> UnitReader:
        return _RawReader(self)

    def state(self) -> tuple[str, str]:
        state = FileState.of(self.source).state
        return self.source, f"raw {state} {self.shape} {self.dtype.str} {self.offset} {self.steps}"


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
                # If the original changes, a new copy is made and this copy is removed.
                is_gone = isinstance(error, FileNotFoundError) and volume.path != volume.source
                if error.errno == errno.ESTALE or is_gone:
                    raise volume.opened.changed() from None
                raise
            yield descriptor

    def check(self) -> None:
        with self._descriptor():
            pass
        if self._volume.copied is not None:
            self._volume.copied.check()

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        self.check()
        with self._descriptor() as descriptor:
            for number, out in zip(numbers.tolist(), outs, strict=True):
                self._read_unit(descriptor, number, out)

    def _read_unit(self, descriptor: int, number: int, out: UInt8Array) -> None:
        volume = self._volume
        whole, order, inside = volume.grid.box(number), volume.order, list[Any]([...])
        for side, step in zip(whole, volume.steps, strict=True):
            size = side.stop - side.start
            inside.append(slice(size) if step > 0 else slice(size - 1, None, -1))
        # The same in the order of the file.
        target = out.view(volume.dtype).reshape(volume.grid.unit)[tuple(inside)].transpose(order)
        shape, sizes, box = [volume.shape[dim] for dim in order], target.shape, []
        for dim in order:
            side, most = whole[dim], volume.shape[dim]
            box.append(side if volume.steps[dim] > 0 else slice(most - side.stop, most - side.start))
        # If the target is not contiguous, read into temporary memory.
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
    """Read a box of an array that a file stores in C order from byte ``offset`` on."""
    itemsize, sizes = out.itemsize, [side.stop - side.start for side in box]
    # The box's elements are contiguous in the file from the last dimension on that the box does not span.
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
    """Return the shape of a unit (the part that is read as a whole) of an array that is stored in C order.

    The contiguous runs of a unit are long enough to make a read call worthwhile.  Apart from this
    condition, the sides are as equal as possible.
    """
    unit = [1] * len(shape)
    if not shape:
        return unit
    # Extend the unit along the last dimensions until a run is long enough.
    for dim in reversed(range(len(shape))):
        inner = math.prod(unit[dim + 1 :]) * itemsize
        if inner >= _RUN_NBYTES:
            break
        unit[dim] = max(1, min(shape[dim], -(-_RUN_NBYTES // inner)))
    # Then extend the unit along all dimensions equally.
    return grown_unit(unit, shape, itemsize, _UNIT_NBYTES, is_cut=True)


def npy_volume(path: str) -> RawVolume:
    refused = as_volume_error(f"{path} is not a NumPy array", tokenize.TokenError)
    with open(path, "rb", opener=open_file) as file, refused:
        status = os.fstat(file.fileno())
        shape, is_fortran, dtype = _npy_header(file)
        offset = file.tell()
    if dtype.hasobject:
        raise VolumeError(f"{path} holds Python objects, which could run code: save numbers")
    if min(shape, default=0) < 0:
        raise VolumeError(f"{path} is not a NumPy array: its shape is {shape}")
    return RawVolume(path, shape, dtype, offset, is_fortran, "an array in NumPy's file format", status)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array's file: return the shape, True for Fortran order, and the dtype."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    if version != (3, 0):
        raise ValueError(f"version {version} of the format is not known")
    # Version 3 differs from version 2 only in the encoding, UTF-8.  NumPy has no public function to read it.
    length = int.from_bytes(file.read(4), "little")
    if length > _MOST_HEADER:
        raise ValueError(f"its header has {length} bytes")
    about = ast.literal_eval(file.read(length).decode())
    shape, dtype = about["shape"], np.lib.format.descr_to_dtype(about["descr"])
    is_right = isinstance(shape, tuple) and all(isinstance(side, int) for side in shape)
    if not is_right or len(about) != 3 or not isinstance(about["fortran_order"], bool):
        raise ValueError(f"its header says {about!r}")
    return shape, about["fortran_order"], dtype


class MemoryVolume(Volume, UnitReader):
    """A NumPy array, from which patches are copied directly.

    Other processes receive a copy of the array.  If the array is a ``numpy.memmap`` or a view of one, other
    processes map the file instead.
    """

    def __init__(self, array: npt.NDArray[Any], name: str) -> None:
        self._array, self.name = array, name
        self.shape, self.dtype = array.shape, array.dtype.newbyteorder("=")
        # An array in memory has no units.  This grid is for orders in which neighbouring patches are close.
        self.grid = UnitGrid(array.shape, [min(max(1, size), 64) for size in array.shape])
        self.how = "an array in memory"

    @property
    def array(self) -> npt.NDArray[Any]:
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": sendable(self._array)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_array": received(state["_array"])}

    def native_source(self) -> Any | None:
        """Return a native source for the array's memory; None if the native core does not support the array.

        The core does not support some dtypes.  It does not support strides that are not multiples of the
        element size either, as a field of a packed structure has.
        """
        array = np.asarray(self._array)
        if self.dtype.char in "gG" or any(step % array.itemsize for step in array.strides):
            return None
        source = native.volume_in_memory(array.view(self.dtype))
        return source if array.dtype.isnative else swapped(source, array.dtype)

    def open(self) -> UnitReader:
        return self

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        for number, out in zip(numbers.tolist(), outs, strict=True):
            self.put(self._array[self.grid.box(number)], out)

    def state(self) -> tuple[str, str]:
        """Return empty strings, because an array in memory can change at any time."""
        return "", ""


def sendable(what: Any) -> Any:
    """Return an array, or lists and tuples of arrays, in a form that can be pickled for another process.

    A memory-mapped array is replaced by a description, with which the other process maps the file itself.
    """
    if isinstance(what, np.ndarray):
        return _MappedFile.of(what) or what
    return type(what)(map(sendable, what)) if type(what) in (list, tuple) else what


def received(what: Any) -> Any:
    if isinstance(what, _MappedFile):
        return what.opened()
    return type(what)(map(received, what)) if type(what) in (list, tuple) else what


class _MappedFile(NamedTuple):
    """An array in a memory-mapped file.  The array spans the bytes from ``begin`` to ``end``, and its first
    element is ``first`` bytes after ``begin``."""

    path: str
    begin: int
    end: int
    first: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> _MappedFile | None:
        whole: Any = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if not isinstance(whole, np.memmap) or not isinstance(whole.base, mmap.mmap) or not array.size:
            return None
        if whole.filename is None or whole.mode == "c":  # with mode "c", changes exist only in this process
            return None
        first = whole.offset + array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        spans = [step * (size - 1) for step, size in zip(array.strides, array.shape, strict=True)]
        begin = first + sum(min(0, span) for span in spans)
        end = first + sum(max(0, span) for span in spans) + array.itemsize
        path = os.path.abspath(whole.filename)
        return cls(path, begin, end, first - begin, array.dtype, array.shape, array.strides)

    def opened(self) -> npt.NDArray[Any]:
        mapped = np.memmap(self.path, np.uint8, "r", self.begin, (self.end - self.begin,))
        return np.ndarray(self.shape, self.dtype, mapped, self.first, self.strides)

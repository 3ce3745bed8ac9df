"""Arrays that are in memory, or are files there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.volumes.volume import UnitGrid, UnitReader, Volume

__all__ = ["MemoryVolume", "received", "sendable"]


class MemoryVolume(Volume, UnitReader):
    """A NumPy array; patches are copied from it as they are.

    Other processes get a copy; of a ``numpy.memmap``, or a view of one, they map the file.

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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": sendable(self._array)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_array": received(state["_array"])}

    def native_source(self) -> Any | None:
        """Its memory; None of elements that the core does not know, or that lie between others unevenly, as a
        field of a packed structure does."""
        array = np.asarray(self._array)
        if self.dtype.char in "gG" or any(step % array.itemsize for step in array.strides):
            return None
        source = native.volume_in_memory(array.view(self.dtype))
        if array.dtype.isnative:
            return source
        return source.swap(array.itemsize // 2 if array.dtype.kind == "c" else array.itemsize)

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


def sendable(what: Any) -> Any:
    """Of an array, or of lists and tuples of some, what another process is to be sent.

    Returns:
        The same, but for mapped files: these with what is needed to map them there.
    """
    if isinstance(what, np.ndarray):
        return _MappedFile.of(what) or what
    return type(what)(map(sendable, what)) if type(what) in (list, tuple) else what


def received(what: Any) -> Any:
    """What was sent.

    Raises:
        OSError: a file cannot be opened.
    """
    if isinstance(what, _MappedFile):
        return what.opened()
    return type(what)(map(received, what)) if type(what) in (list, tuple) else what


class _MappedFile(NamedTuple):
    """An array whose elements are those of a file.

    Attributes:
        path: the file.
        begin, end: the bytes in it that the array spans.
        first: where among these its first element is.
        dtype, shape, strides: the array's.
    """

    path: str
    begin: int
    end: int
    first: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> _MappedFile | None:
        """What maps the file of an array; None of one that has none."""
        whole: Any = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if not isinstance(whole, np.memmap) or not isinstance(whole.base, mmap.mmap) or not array.size:
            return None
        if whole.filename is None or whole.mode == "c":  # what was changed is in this process only
            return None
        first = whole.offset + array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        spans = [step * (size - 1) for step, size in zip(array.strides, array.shape, strict=True)]
        begin = first + sum(min(0, span) for span in spans)
        end = first + sum(max(0, span) for span in spans) + array.itemsize
        path = os.path.abspath(whole.filename)
        return cls(path, begin, end, first - begin, array.dtype, array.shape, array.strides)

    def opened(self) -> npt.NDArray[Any]:
        """The array, of the file as it is now."""
        mapped = np.memmap(self.path, np.uint8, "r", self.begin, (self.end - self.begin,))
        return np.ndarray(self.shape, self.dtype, mapped, self.first, self.strides)

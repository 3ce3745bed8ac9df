"""Arrays in files of Blosc2's (.b2nd), as nnU-Net keeps its cases: single blocks are decompressed."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe._sizes import in_bytes
from fastpipe.core.files import regular_status
from fastpipe.errors import VolumeError
from fastpipe.volumes.volume import DamagedUnitError, FileState, UnitGrid, UnitReader, Volume, box_text
from fastpipe.volumes.wrappers import grown_unit

__all__ = ["Blosc2Volume"]

_LEAST_UNIT = 1 << 17


class Blosc2Volume(Volume):
    """An array in a file.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self.opened = FileState.of(path, regular_status(path))
        array = _opened(path)
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        # Some blocks at a time, but of one chunk.
        unit = grown_unit(array.blocks, array.chunks, self.dtype.itemsize, _LEAST_UNIT)
        fits = all(chunk % side == 0 for chunk, side in zip(array.chunks, unit, strict=True))
        self.grid = UnitGrid(self.shape, unit if fits else array.chunks)
        chunk, block = ("×".join(map(str, sides)) for sides in (array.chunks, array.blocks))
        nbytes = in_bytes(array.schunk.chunksize)
        codec = array.cparams.codec.name.lower()
        self.how = f"Blosc2, chunks of {chunk} ({nbytes}; {codec}) in blocks of {block}"

    def open(self) -> UnitReader:
        """Each thread opens it for itself, as an open file is for one of them at a time."""
        return _Reader(self)

    def stored_in(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each by itself."""
        return numbers

    def state(self) -> tuple[str, str]:
        """The file's."""
        return self.name, f"blosc2 {self.opened.state}"


class _OfThread(threading.local):
    handle: _Handle | None = None


class _Reader(UnitReader):
    def __init__(self, volume: Blosc2Volume) -> None:
        volume.opened.check()
        self._volume, self._own = volume, _OfThread()

    def check(self) -> None:
        """Look at the file."""
        self._volume.opened.check()

    def read(self, numbers: npt.NDArray[np.int64], outs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Read units."""
        volume, own = self._volume, self._own
        self.check()
        if own.handle is None:
            own.handle = _Handle(volume.name)
        for number, out in zip(numbers.tolist(), outs, strict=True):
            box = volume.grid.box(number)
            if not own.handle.is_read(box, volume.grid.unit, out):
                volume.opened.check()
                raise DamagedUnitError(
                    f"{volume.name}, the part at {box_text(box)}: its blocks are damaged, or cut off"
                )


class _Handle:
    """An open array, for one thread at a time.  (blosc2's own does not let go of the GIL.)"""

    def __init__(self, path: str) -> None:
        library, array = _library(), ctypes.c_void_p()
        if library.b2nd_open(os.fsencode(path), ctypes.byref(array)) != 0 or not array.value:
            raise VolumeError(f"{path} cannot be opened by Blosc2: it may be cut off")
        self._array = array
        weakref.finalize(self, library.b2nd_free, array).atexit = False

    def is_read(self, box: Sequence[slice], unit: Sequence[int], out: npt.NDArray[np.uint8]) -> bool:
        """Read a box into memory of a unit; whether it went well."""
        numbers = ctypes.c_int64 * len(unit)
        start, stop = numbers(*(side.start for side in box)), numbers(*(side.stop for side in box))
        failed = _library().b2nd_get_slice_cbuffer(
            self._array, start, stop, out.ctypes.data, numbers(*unit), len(out)
        )
        return not failed


@functools.cache
def _library() -> Any:
    """c-blosc2, which the package brings along."""
    blosc2 = require("blosc2", extra="volume")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    functions: dict[str, tuple[Any, list[Any]]] = {
        "blosc2_init": (None, []),
        "b2nd_open": (number, [ctypes.c_char_p, pointer]),
        "b2nd_free": (number, [pointer]),
        "b2nd_get_slice_cbuffer": (number, [pointer] * 5 + [ctypes.c_int64]),
    }
    folder = Path(blosc2.__file__).parent
    for found in sorted([*folder.glob("lib*/libblosc2.*"), *folder.glob("*.libs/libblosc2.*")]):
        try:
            library = ctypes.CDLL(os.fspath(found))
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (AttributeError, OSError):
            continue
        library.blosc2_init()
        return library
    raise ImportError("the package blosc2 does not show c-blosc2: pip install --upgrade blosc2")


def _opened(path: str) -> Any:
    """The array as the package has it: to ask what it is."""
    blosc2 = require("blosc2", extra="volume")
    try:
        array = blosc2.open(path, mode="r")
    except (RuntimeError, ValueError, TypeError, OverflowError, SyntaxError) as error:  # of its metadata
        raise VolumeError(f"{path} cannot be opened by blosc2: {error}") from None
    if not isinstance(array, blosc2.NDArray) or np.dtype(array.dtype).kind not in "biufc":
        raise VolumeError(f"{path} is no array of numbers of Blosc2's")
    return array

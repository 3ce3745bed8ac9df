"""Read arrays in Blosc2 files (.b2nd), the format of nnU-Net's cases, and decompress only single blocks."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import open_file, regular_status
from fastpipe.errors import MissingDependencyError, VolumeError
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
    chunk_text,
    grown_unit,
    shortened,
    sides_text,
)

_LEAST_UNIT = 1 << 17
_LEAST_HEADER = 87  # bytes of a frame's header that has no metadata layers
_CODECS = {0: "blosclz", 1: "lz4", 2: "lz4hc", 4: "zlib", 5: "zstd"}
_FUNCTIONS = ("blosc2_init", "b2nd_open", "b2nd_free", "b2nd_get_slice_cbuffer")
# Metadata layers of files that contain a recipe or objects instead of the elements of an array.
_MADE = {b"LazyArray", b"proxy-source", b"b2o", b"b2embed", b"listarray", b"vlarray", b"batcharray"}


class Blosc2Volume(Volume):
    def __init__(self, path: str) -> None:
        self.name = path
        self.opened = FileState.of(path, regular_status(path))
        array = _Header.of(path)
        _Handle(path)  # check now that c-blosc2 can open it
        self.shape, self.dtype = array.shape, array.dtype
        # A unit consists of a few blocks of one chunk.
        unit = grown_unit(array.blocks, array.chunks, self.dtype.itemsize, _LEAST_UNIT)
        fits = all(chunk % side == 0 for chunk, side in zip(array.chunks, unit, strict=True))
        self.grid = UnitGrid(self.shape, unit if fits else array.chunks)
        codec = _CODECS.get(array.codec, f"codec {array.codec}")
        chunk = chunk_text(array.chunks, array.dtype, codec)
        self.how = f"Blosc2, chunks of {chunk} in blocks of {sides_text(array.blocks)}"

    def open(self) -> UnitReader:
        """Open the file; each thread gets its own handle, because a handle is not thread-safe."""
        return _Reader(self)

    def state(self) -> tuple[str, str]:
        return self.name, f"blosc2 {self.opened.state}"


class _Reader(UnitReader):
    def __init__(self, volume: Blosc2Volume) -> None:
        self._volume, self._own = volume, threading.local()
        self.check()

    def check(self) -> None:
        self._volume.opened.check()

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        volume, own = self._volume, self._own
        self.check()
        if not hasattr(own, "handle"):
            own.handle = _Handle(volume.name)
        for number, out in zip(numbers.tolist(), outs, strict=True):
            box = volume.grid.box(number)
            if not own.handle.is_read(box, volume.grid.unit, out):
                volume.opened.check()
                raise DamagedUnitError(
                    f"{volume.name}, the part at {box_text(box)}: its blocks are damaged, or cut off"
                )


class _Handle:
    """An open array, which only one thread at a time may use.

    This class replaces the array object of the Python package blosc2, which does not release the GIL.
    """

    def __init__(self, path: str) -> None:
        library, array = _library(), ctypes.c_void_p()
        if library.b2nd_open(os.fsencode(path), ctypes.byref(array)) != 0 or not array.value:
            raise VolumeError(f"{path} cannot be opened by Blosc2: it may be cut off")
        self._array = array
        weakref.finalize(self, library.b2nd_free, array).atexit = False

    def is_read(self, box: Sequence[slice], unit: Sequence[int], out: UInt8Array) -> bool:
        """Read ``box`` into ``out``, memory of the shape ``unit``; return True on success."""
        numbers = ctypes.c_int64 * len(unit)
        start, stop = numbers(*(side.start for side in box)), numbers(*(side.stop for side in box))
        memory, nbytes = ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(len(out))
        get = _library().b2nd_get_slice_cbuffer
        return bool(get(self._array, start, stop, memory, numbers(*unit), nbytes) == 0)


@functools.cache
def _library() -> Any:
    """Load c-blosc2, which is part of the package blosc2."""
    folder = Path(require("blosc2", extra="volume").__file__).parent
    # Releases older than 3.7 have the library in lib64, next to the package's folder.
    for found in sorted([*folder.glob("lib*/libblosc2.*"), *folder.parent.glob("lib64/libblosc2.*")]):
        try:
            library = ctypes.CDLL(os.fspath(found))
            if all(hasattr(library, name) for name in _FUNCTIONS):
                library.blosc2_init()
                return library
        except OSError:
            continue
    raise MissingDependencyError(
        "fastpipe reads .b2nd with the library c-blosc2, which the installed package blosc2 does not show. "
        "Install it again with:  pip install --upgrade --force-reinstall blosc2"
    )


class _Header(NamedTuple):
    shape: tuple[int, ...]  # shape of the array
    chunks: tuple[int, ...]  # shape of a chunk
    blocks: tuple[int, ...]  # shape of a block
    dtype: np.dtype[Any]  # dtype of the elements
    codec: int  # number of the compressor

    @classmethod
    def of(cls, path: str) -> _Header:
        """Read the frame's header, which is in MessagePack (README_CFRAME_FORMAT.rst of c-blosc2).

        ``blosc2.open`` is not used, because releases older than 4.14 run code that the file of a lazy array
        contains.
        """
        msgpack = require("msgpack", extra="volume")
        with (
            as_volume_error(f"{path} cannot be opened by Blosc2"),
            open(path, "rb", opener=open_file) as file,
        ):
            begin = file.read(_LEAST_HEADER)
            if begin[2:10] != b"b2frame\0":
                raise ValueError("it does not begin as one")
            size = int.from_bytes(begin[11:15], "big")
            frame = msgpack.unpackb(begin + file.read(max(0, size - len(begin))), raw=True)
            # The layers are stored as the size of their index, a map of their names to offsets, and their
            # contents in the order of the map.
            layers = dict(zip(frame[13][1], frame[13][2], strict=True))
            if made := sorted(layers.keys() & _MADE):
                raise ValueError(f"it is a {made[0].decode()}, whose values are made when it is opened")
            _, dims, shape, chunks, blocks, kind, dtype = msgpack.unpackb(layers[b"b2nd"], raw=False)
            found = cls(tuple(shape), tuple(chunks), tuple(blocks), np.dtype(dtype), frame[3][2] & 15)
            if kind != 0 or found.dtype.kind not in "biufc" or found.dtype.itemsize != frame[6]:
                raise ValueError(f"its elements are {shortened(dtype)}, of {frame[6]} bytes")
            sides = (*found.chunks, *found.blocks)
            if not dims == len(shape) == len(chunks) == len(blocks) or min((*sides, 1)) < 1:
                raise ValueError(f"it has chunks of {chunks} and blocks of {blocks}, and the shape {shape}")
            # The last blocks of a chunk and the last chunks of an array are stored in full size.
            ends = zip(found.chunks, found.blocks, strict=True)
            chunk = math.prod(-(-side // block) * block for side, block in ends) * frame[6]
            count = math.prod(-(-size // side) for size, side in zip(found.shape, found.chunks, strict=True))
            if min((*found.shape, 0)) < 0 or chunk != frame[8] or count * chunk != frame[4]:
                raise ValueError(
                    f"{frame[4]} bytes in chunks of {frame[8]} are no array of the shape {shape}"
                )
            return found

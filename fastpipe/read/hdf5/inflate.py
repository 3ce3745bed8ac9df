"""gzip's format, decompressed by libdeflate into memory that is there already.

The package ``deflate`` gives new bytes for each call, whose memory costs the system a third as much
as decompressing.  So the functions of libdeflate inside it are called, where they can be found.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
import zlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.read.hdf5.errors import ChunkError

__all__ = ["decompressor", "inflate", "zlib_decompress"]

UInt8Array = npt.NDArray[np.uint8]


def inflate(data: UInt8Array, out: UInt8Array) -> None:
    """Decompress a zlib stream.

    Args:
        data: uint8 (N,), the stream (RFC 1950).
        out: uint8 (M,), which it must fill.

    Raises:
        ChunkError: it is damaged, or holds more or fewer bytes.
    """
    library = _library()
    if library is not None:
        count = ctypes.c_size_t(0)
        failed = library.libdeflate_zlib_decompress(
            decompressor(), data.ctypes.data, len(data), out.ctypes.data, len(out),
            ctypes.byref(count),
        )  # fmt: skip
        if not failed and count.value == len(out):
            return
    else:
        deflate = require("deflate", extra="hdf5")
        try:
            made = np.frombuffer(deflate.zlib_decompress(data, len(out)), np.uint8)
        except deflate.DeflateError:
            made = data[:0]
        if len(made) == len(out):
            out[:] = made
            return
    _by_zlib(data, out)


def _by_zlib(data: UInt8Array, out: UInt8Array) -> None:
    """The same, for the reason why it fails, and to bear what zlib bears."""
    stream = zlib.decompressobj()
    try:
        made = stream.decompress(data.tobytes(), len(out) + 1)
    except zlib.error as error:
        raise ChunkError(f"gzip: {error}") from None
    if len(made) > len(out):
        raise ChunkError(f"gzip: it inflates to more than the {len(out)} bytes that it should have")
    if not stream.eof:
        raise ChunkError("gzip: its data end too early")
    if len(made) < len(out):
        raise ChunkError(f"gzip: {len(made)} bytes where {len(out)} were expected")
    out[:] = np.frombuffer(made, np.uint8)


@cache
def _library() -> Any:
    """The library; None where the package does not show its functions."""
    module = require("deflate._deflate", extra="hdf5")
    try:
        library = ctypes.CDLL(module.__file__)
        library.libdeflate_alloc_decompressor.restype = ctypes.c_void_p
        library.libdeflate_alloc_decompressor.argtypes = []
        library.libdeflate_free_decompressor.restype = None
        library.libdeflate_free_decompressor.argtypes = [ctypes.c_void_p]
        library.libdeflate_zlib_decompress.restype = ctypes.c_int
        library.libdeflate_zlib_decompress.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_size_t),
        ]  # fmt: skip
    except (AttributeError, OSError, TypeError):
        return None
    return library


def zlib_decompress() -> int:
    """The address of ``libdeflate_zlib_decompress``, for kernels; 0 where it cannot be had."""
    library = _library()
    if library is None:
        return 0
    return ctypes.cast(library.libdeflate_zlib_decompress, ctypes.c_void_p).value or 0


class _Decompressor:
    """libdeflate's, which serves one call at a time; freed with this object."""

    def __init__(self, library: Any) -> None:
        self.address = library.libdeflate_alloc_decompressor()
        if not self.address:
            raise MemoryError("no memory for a decompressor")
        weakref.finalize(self, library.libdeflate_free_decompressor, self.address).atexit = False


_of_thread = threading.local()  # what is in it goes with its thread


def decompressor() -> int:
    """The address of this thread's decompressor, of the library that there is."""
    own = getattr(_of_thread, "decompressor", None)
    if own is None:
        own = _of_thread.decompressor = _Decompressor(_library())
    address: int = own.address
    return address

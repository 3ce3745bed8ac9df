"""gzip's format, decompressed by libdeflate into memory that is there already.

The package ``deflate`` gives new bytes for each call, whose memory costs the system a third as much
as decompressing.  So the functions of libdeflate inside it are called, where they can be found.
"""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.foreign import ContextOfThread, address, library_of, once

__all__ = ["decompressor", "inflate", "zlib_decompress"]

UInt8Array = npt.NDArray[np.uint8]

_DECOMPRESS = "libdeflate_zlib_decompress"


def inflate(data: UInt8Array, out: UInt8Array) -> None:
    """Decompress a zlib stream.

    Args:
        data: uint8 (N,), the stream (RFC 1950).
        out: uint8 (M,), which it must fill.

    Raises:
        ChunkError: it is damaged, or holds more or fewer bytes.
    """
    found = _decompressors()
    if found is not None:
        count = ctypes.c_size_t(0)
        failed = found.library.libdeflate_zlib_decompress(
            found(), data.ctypes.data, len(data), out.ctypes.data, len(out),
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


@once
def _decompressors() -> ContextOfThread | None:
    """libdeflate's, each of which serves one call at a time; None where the package does not show them."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library = library_of(
        "deflate._deflate",
        {
            "libdeflate_alloc_decompressor": (pointer, []),
            "libdeflate_free_decompressor": (None, [pointer]),
            _DECOMPRESS: (
                ctypes.c_int, [pointer, pointer, size, pointer, size, ctypes.POINTER(size)]
            ),
        },
    )  # fmt: skip
    if library is None:
        return None
    return ContextOfThread(library, "libdeflate_alloc_decompressor", "libdeflate_free_decompressor")


def zlib_decompress() -> int:
    """The address of ``libdeflate_zlib_decompress``, for kernels; 0 where it cannot be had."""
    return 0 if (found := _decompressors()) is None else address(found.library, _DECOMPRESS)


def decompressor() -> int:
    """The address of this thread's decompressor, where ``zlib_decompress`` is not 0."""
    found = _decompressors()
    assert found is not None
    return found()

"""Blosc2's frames, decompressed by the library inside hdf5plugin, but without the HDF5 library's lock.

The filter writes a contiguous frame of one chunk for each of HDF5's, as an array of several
dimensions (b2nd) or as plain bytes: c-blosc2's README_CFRAME_FORMAT.rst and b2nd.h, and the
filter's blosc2_filter.c in hdf5plugin say how.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.errors import MissingDependencyError
from fastpipe.read.hdf5.errors import ChunkError

__all__ = ["blosc2", "has_blosc2"]

UInt8Array = npt.NDArray[np.uint8]

_MAGIC, _MAGIC_AT = b"b2frame\0", 2


def has_blosc2() -> bool:
    """Whether frames can be decompressed here."""
    return _library() is not None


def blosc2(data: UInt8Array, made: UInt8Array) -> None:
    """Decompress a frame.

    Args:
        data: uint8 (N,), the frame.
        made: uint8 (M,), which it must fill.

    Raises:
        ChunkError: it is damaged, or holds more or fewer bytes.
    """
    library = _library()
    assert library is not None, "has_blosc2 said so"
    if data[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)].tobytes() != _MAGIC:
        raise ChunkError("blosc2: this is no frame")
    frame = library.blosc2_schunk_from_buffer(data.ctypes.data, len(data), False)
    if not frame:
        raise ChunkError("blosc2: a damaged frame")
    array = ctypes.c_void_p()
    if library.b2nd_from_schunk(frame, ctypes.byref(array)) == 0:
        try:
            # It says what does not fit into memory, but not what does not fill it.
            is_less = library.b2nd_to_cbuffer(array, made.ctypes.data, len(made) - 1) == 0
            failed = is_less or library.b2nd_to_cbuffer(array, made.ctypes.data, len(made))
        finally:
            library.b2nd_free(array)  # and the frame
        if failed:
            raise ChunkError(f"blosc2: damaged data, or not the {len(made)} bytes that were expected")
        return
    try:
        count = library.blosc2_schunk_decompress_chunk(frame, 0, made.ctypes.data, len(made))
    finally:
        library.blosc2_schunk_free(frame)
    if count != len(made):
        problem = "damaged data, or more of them" if count < 0 else f"{count} bytes"
        raise ChunkError(f"blosc2: {problem} where {len(made)} bytes were expected")


@cache
def _library() -> Any:
    """c-blosc2; None where hdf5plugin is not there, or does not show its functions."""
    try:
        folder = Path(require("hdf5plugin", extra="hdf5").PLUGIN_PATH)
        found = next(iter(sorted(folder.glob("libh5blosc2.*"))), None)
        library = None if found is None else ctypes.CDLL(str(found))
        if library is None:
            return None
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        kinds: dict[str, tuple[Any, list[Any]]] = {
            "blosc2_init": (None, []),
            "blosc2_schunk_from_buffer": (pointer, [pointer, whole, ctypes.c_bool]),
            "blosc2_schunk_decompress_chunk": (ctypes.c_int, [pointer, whole, pointer, ctypes.c_int32]),
            "blosc2_schunk_free": (ctypes.c_int, [pointer]),
            "b2nd_from_schunk": (ctypes.c_int, [pointer, ctypes.POINTER(pointer)]),
            "b2nd_to_cbuffer": (ctypes.c_int, [pointer, pointer, whole]),
            "b2nd_free": (ctypes.c_int, [pointer]),
        }
        for name, (result, arguments) in kinds.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.blosc2_init()
    except (MissingDependencyError, AttributeError, OSError):
        return None
    return library

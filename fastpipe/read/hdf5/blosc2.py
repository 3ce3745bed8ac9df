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

from fastpipe._extras import require
from fastpipe.errors import MissingDependencyError
from fastpipe.read.chunks.foreign import address, library_at, once
from fastpipe.read.hdf5.plugin_kernels import BLOSC2_CALLS

__all__ = ["blosc2_functions", "has_blosc2"]


def has_blosc2() -> bool:
    """Whether frames can be decompressed here."""
    return _library() is not None


@cache
def blosc2_functions() -> tuple[int, ...]:
    """The addresses of the functions in ``BLOSC2_CALLS``, for kernels; 0 where ``has_blosc2`` is false."""
    return tuple(address(_library(), name) for name in BLOSC2_CALLS)


@once
def _library() -> Any:
    """c-blosc2; None where hdf5plugin is not there, or does not show its functions."""
    try:
        folder = Path(require("hdf5plugin", extra="hdf5").PLUGIN_PATH)
    except (MissingDependencyError, AttributeError):
        return None
    found = next(iter(sorted(folder.glob("libh5blosc2.*"))), None)
    functions: dict[str, tuple[Any, list[Any]]] = {name: (ctypes.c_int, []) for name in BLOSC2_CALLS}
    library = None if found is None else library_at(found, {"blosc2_init": (None, []), **functions})
    if library is not None:
        library.blosc2_init()
    return library

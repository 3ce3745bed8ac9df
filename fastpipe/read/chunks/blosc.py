"""The functions of Blosc that numcodecs has in it."""

from __future__ import annotations

import ctypes
from typing import Any

from fastpipe.read.chunks.foreign import library_of, once

__all__ = ["DECOMPRESS", "GETITEM", "blosc_library"]

DECOMPRESS, GETITEM = "blosc_decompress_ctx", "blosc_getitem"


@once
def blosc_library() -> Any:
    """The library; None where the package does not show its functions."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    return library_of(
        "numcodecs.blosc",
        {
            DECOMPRESS: (number, [pointer, pointer, ctypes.c_size_t, number]),
            GETITEM: (number, [pointer, number, number, pointer]),
        },
    )

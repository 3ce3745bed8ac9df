"""The functions of zstd that numcodecs has in it."""

from __future__ import annotations

import ctypes

from fastpipe.read.chunks.foreign import ContextOfThread, library_of, once

__all__ = ["ZSTD_DECOMPRESS", "zstd_contexts"]

ZSTD_DECOMPRESS = "ZSTD_decompressDCtx"


@once
def zstd_contexts() -> ContextOfThread | None:
    """zstd's contexts for decompressing; None where the package does not show its functions."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library = library_of(
        "numcodecs.zstd",
        {
            "ZSTD_createDCtx": (pointer, []),
            "ZSTD_freeDCtx": (size, [pointer]),
            ZSTD_DECOMPRESS: (size, [pointer, pointer, size, pointer, size]),
            "ZSTD_isError": (ctypes.c_uint, [size]),
            "ZSTD_getErrorName": (ctypes.c_char_p, [size]),
        },
    )
    return None if library is None else ContextOfThread(library, "ZSTD_createDCtx", "ZSTD_freeDCtx")

"""Many files read by two calls, during which Python's lock is free: it is asked for between them, and not
four times for each file, which threads that share it would wait for.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.chunks.calls import is_read, memory_at
from fastpipe.read.jpeg_scans import FILE
from fastpipe.read.jpeg_segments import header_of

__all__ = ["headers_of", "open_files", "read_files"]

_t = require("numba.types", extra="image")

_open = _t.ExternalFunction("open", _t.int32(_t.uintp, _t.int32))
_seek = _t.ExternalFunction("lseek", _t.int64(_t.int32, _t.int64, _t.int32))
_close = _t.ExternalFunction("close", _t.int32(_t.int32))
_END = 2  # SEEK_END
_OPENED = _t.void(FILE, _t.int64[::1], _t.int64, _t.int32[::1], _t.int64[::1])
_READ = _t.void(_t.int32[::1], _t.int64[::1], _t.uint64[::1], _t.boolean[::1])
_HAS_THEM = sys.platform != "win32"  # C's functions; there, nobody calls what is not compiled


@compiled(*[_OPENED] * _HAS_THEM)
def open_files(names: Any, starts: Any, flags: Any, descriptors: Any, sizes: Any) -> None:
    """Open files.

    Args:
        names: uint8 (M,), their names one after the other, each with a zero at its end.
        starts: int64 (N,), where in it each begins.
        flags: of ``open``.
        descriptors: int32 (N,), which is written: -1 where a file cannot be opened.
        sizes: int64 (N,), which is written: bytes of each; -1 where that is not known.
    """
    for i in range(starts.size):
        descriptors[i] = _open(np.uint64(names.ctypes.data) + np.uint64(starts[i]), np.int32(flags))
        sizes[i] = -1
        if descriptors[i] >= 0:
            sizes[i] = _seek(descriptors[i], 0, _END)


@compiled(*[_READ] * _HAS_THEM)
def read_files(descriptors: Any, sizes: Any, addresses: Any, is_whole: Any) -> None:
    """Read files to their ends, and close them.

    Args:
        descriptors, sizes: as of ``open_files``.
        addresses: uint64 (N,), of memory for each; 0 for files that are only closed.
        is_whole: bool (N,), which is written: whether a file was read to its end.
    """
    for i in range(descriptors.size):
        is_whole[i] = False
        if descriptors[i] < 0:
            continue
        if addresses[i] != 0 and is_read(descriptors[i], 0, memory_at(addresses[i], sizes[i])):
            is_whole[i] = _seek(descriptors[i], 0, _END) == sizes[i]  # it has not grown meanwhile
        _close(descriptors[i])


@compiled(_t.void(_t.uint64[::1], _t.int64[::1], _t.int64[:, ::1]))
def headers_of(addresses: Any, sizes: Any, found: Any) -> None:
    """``header_of`` of files in memory.

    Args:
        addresses: uint64 (N,).
        sizes: int64 (N,), bytes of each.
        found: int64 (N, 6), which is written.
    """
    for i in range(sizes.size):
        fields = header_of(memory_at(addresses[i], sizes[i]))
        for k in range(6):
            found[i, k] = fields[k]

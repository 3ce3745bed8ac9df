"""Reading many files at once, where Python's lock is what threads wait for."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.read.file_kernels import headers_of, open_files, read_files
from fastpipe.read.files import FLAGS
from fastpipe.read.jpeg_header import JpegHeader, header_from

__all__ = ["read_many"]

_LARGEST = 1 << 28  # bytes: larger ones are not what this is for
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)


@ranged("read")
def read_many(paths: Sequence[str]) -> list[tuple[bytes, JpegHeader | None] | None]:
    """Read files, and walk the headers of those that are JPEGs.

    Args:
        paths: of regular files.

    Returns:
        Of each its content and its header, as of ``read_jpeg_header``; None where ``read_file`` has to be
        asked, which says what is wrong.  On Windows that is all of them.
    """
    if sys.platform == "win32":
        return [None] * len(paths)
    names = [os.fsencode(path) for path in paths]
    count = len(names)
    text = np.frombuffer(b"\0".join(names) + b"\0", np.uint8)
    starts = np.cumsum([0, *(len(name) + 1 for name in names)])[:-1]
    descriptors, sizes = np.full(count, -1, np.int32), np.empty(count, np.int64)
    addresses, is_whole = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
    blobs: list[bytes] = []
    try:
        open_files(text, starts, FLAGS, descriptors, sizes)
        for number, (name, size) in enumerate(zip(names, sizes.tolist(), strict=True)):
            # A name with a zero in it ends there for C, and is another file's.
            is_ordinary = 0 < size <= _LARGEST and b"\0" not in name
            # Memory that nobody has seen yet may be written.
            blobs.append(_new_bytes(None, size if is_ordinary else 0))
            addresses[number] = _address(blobs[-1]) if is_ordinary else 0
    finally:
        read_files(descriptors, sizes, addresses, is_whole)
    return _with_headers(blobs, addresses, sizes, is_whole)


def _with_headers(
    blobs: Sequence[bytes],
    addresses: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.int64],
    is_whole: npt.NDArray[np.bool_],
) -> list[tuple[bytes, JpegHeader | None] | None]:
    found: list[tuple[bytes, JpegHeader | None] | None] = [None] * len(blobs)
    there = np.flatnonzero(is_whole)
    fields = np.empty((len(there), len(JpegHeader._fields)), np.int64)
    headers_of(addresses[there], sizes[there], fields)
    for number, facts in zip(there.tolist(), fields.tolist(), strict=True):
        found[number] = blobs[number], header_from(facts)
    return found

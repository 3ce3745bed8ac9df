"""What chunks of volumes are compressed with as a whole, undone by C libraries that let go of the GIL."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.read.chunks.inflate import inflate
from fastpipe.read.chunks.zstd import zstd_contexts

__all__ = ["DECODE"]

UInt8Array = npt.NDArray[np.uint8]

_GZIP = b"\x1f\x8b\x08"  # with which a member begins


def _zstd(stored: UInt8Array, out: UInt8Array) -> None:
    contexts = zstd_contexts()
    if contexts is None:
        require("numcodecs.zstd", extra="volume")
        raise ImportError("the package numcodecs has no zstd: pip install --upgrade numcodecs")
    count = contexts.library.ZSTD_decompressDCtx(
        contexts(), out.ctypes.data, len(out), stored.ctypes.data, len(stored)
    )
    if contexts.library.ZSTD_isError(count):
        name = contexts.library.ZSTD_getErrorName(count).decode()
        raise ValueError(f"zstd: {name}, where {len(out)} bytes were expected")
    if count != len(out):
        raise ValueError(f"zstd: {count} bytes in the place of {len(out)}")


def _gzip(stored: UInt8Array, out: UInt8Array) -> None:
    # The last four bytes say how much there is, so that nothing larger is ever made.
    said = int.from_bytes(stored[-4:].tobytes(), "little")
    # Of several members the library would undo the first one only.
    may_have_more = stored.tobytes().find(_GZIP, 1) >= 0
    if said == len(out) % (1 << 32) and not may_have_more:
        deflate = require("deflate", extra="volume")
        try:
            made = deflate.gzip_decompress(stored)
        except deflate.DeflateError:
            made = b""
        if len(made) == len(out):
            out[:] = np.frombuffer(made, np.uint8)
            return
    _by_zlib(stored, out)


def _by_zlib(stored: UInt8Array, out: UInt8Array) -> None:
    """The same, for the reason why it fails, and for files of several members."""
    made, left = 0, stored.tobytes()
    while left:
        stream = zlib.decompressobj(wbits=31)
        try:
            part = stream.decompress(left, len(out) - made + 1)
        except zlib.error as error:
            raise ValueError(f"gzip: {error}") from None
        if not stream.eof and len(part) <= len(out) - made:
            raise ValueError("gzip: the data are cut off")
        if made + len(part) > len(out):
            break
        out[made : made + len(part)] = np.frombuffer(part, np.uint8)
        made, left = made + len(part), stream.unused_data
    if left or made != len(out):
        raise ValueError(f"gzip: {'more' if left else made} bytes in the place of {len(out)}")


# From stored bytes, uint8 (N,), into memory, uint8 (M,), that they fill; else a ValueError says why not.
DECODE: Mapping[str, Callable[[UInt8Array, UInt8Array], None]] = {
    "zstd": _zstd, "gzip": _gzip, "zlib": inflate,
}  # fmt: skip

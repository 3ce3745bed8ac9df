"""What chunks of volumes are compressed with as a whole, undone by the native core."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.reads import UNKNOWN_CODEC, ChunkError, chunk_error

__all__ = ["BLOSC_HEADER", "BloscHeader", "decode"]

UInt8Array = npt.NDArray[np.uint8]

BLOSC_HEADER = 16  # bytes
_HEADER = struct.Struct("<4B3I")


class BloscHeader(NamedTuple):
    """What a buffer of Blosc's says of itself: c-blosc's README_CHUNK_FORMAT.rst.

    Attributes:
        itemsize: of its elements, as far as its compressor was told.
        nbytes: of its content.
        block: of that, in each block, which can be decoded alone.
        stored: bytes of the buffer.
    """

    itemsize: int
    nbytes: int
    block: int
    stored: int

    @classmethod
    def of(cls, data: bytes, nbytes: int) -> BloscHeader:
        """Of a buffer's first bytes.

        Args:
            data: at least 16 bytes.
            nbytes: that its content is to have.

        Raises:
            ChunkError: they are no header, or that of another content.
        """
        if len(data) < BLOSC_HEADER:
            raise ChunkError("its header is cut off")
        _, _, _, itemsize, content, block, stored = _HEADER.unpack_from(data)
        if content != nbytes or not itemsize or not 0 < block <= content or stored < BLOSC_HEADER:
            raise ChunkError(f"its header is not that of {nbytes} bytes")
        return cls(itemsize, content, block, stored)


def decode(codec: str, stored: Any, out: UInt8Array) -> None:
    """Undo the codec of a whole chunk.

    Args:
        codec: one of ``zarr_metadata.CODECS``.
        stored: the chunk's bytes.
        out: uint8 (N,): memory that its content fills.

    Raises:
        ChunkError: it is damaged, or of another size.
    """
    problem = native.decode_chunk(codec, stored, out)
    if problem == UNKNOWN_CODEC and codec == "blosc":
        _decode_rare(bytes(stored), out)
    elif problem and codec == "none":
        raise ChunkError(f"it has {memoryview(stored).nbytes} bytes instead of {len(out)}")
    elif problem:
        raise chunk_error(codec, problem, len(out))


def _decode_rare(stored: bytes, out: UInt8Array) -> None:
    """Decode a buffer of Blosc's whose compressor only the library may have, such as Snappy."""
    blosc = require("numcodecs.blosc", extra="volume")
    try:
        made = blosc.decompress(stored)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ChunkError(f"blosc: {error}") from None
    if len(made) != len(out):
        raise ChunkError(f"blosc: {len(made)} bytes instead of {len(out)}")
    out[:] = np.frombuffer(made, np.uint8)

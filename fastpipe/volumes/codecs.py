"""What chunks of volumes are compressed with as a whole, undone by the native core."""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.core.native import native

__all__ = ["BLOSC_HEADER", "BloscHeader", "ChunkError", "decode", "read_fully"]

UInt8Array = npt.NDArray[np.uint8]

BLOSC_HEADER = 16  # bytes
_HEADER = struct.Struct("<4B3I")
_UNKNOWN = 7
_PROBLEMS = {  # of fastpipe/native/codecs.h
    1: "its header is cut off, or is none",
    2: "its header is not that of {nbytes} bytes",
    3: "its blocks are of a size that there is not",
    4: "its data end too early",
    5: "damaged data, or more or fewer than {nbytes} bytes",
    6: "the checksum is not that of the data",
    _UNKNOWN: "it is compressed by a codec that is not known",
}


class ChunkError(ValueError):
    """A chunk's bytes are not what its codec makes, or are not all there."""


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
    if problem == _UNKNOWN and codec == "blosc":
        _decode_rare(bytes(stored), out)
    elif problem:
        said = _PROBLEMS.get(problem, "there is not enough memory").format(nbytes=len(out))
        raise ChunkError(f"{codec}: {said}" if codec != "none" else _of_another_size(stored, out))


def _of_another_size(stored: Any, out: UInt8Array) -> str:
    return f"it has {memoryview(stored).nbytes} bytes in the place of {len(out)}"


def _decode_rare(stored: bytes, out: UInt8Array) -> None:
    """Decode a buffer of Blosc's whose compressor only the library may have, such as Snappy."""
    blosc = require("numcodecs.blosc", extra="volume")
    try:
        made = blosc.decompress(stored)
    except (RuntimeError, ValueError) as error:
        raise ChunkError(f"blosc: {error}") from None
    if len(made) != len(out):
        raise ChunkError(f"blosc: {len(made)} bytes in the place of {len(out)}")
    out[:] = np.frombuffer(made, np.uint8)


def read_fully(descriptor: int, memory: Any, offset: int) -> None:
    """Fill memory with bytes of a file, however many calls that takes.

    Args:
        descriptor: of the file.
        memory: an array or a view of uint8, C-contiguous.
        offset: where the first of them is in the file.

    Raises:
        ChunkError: the file ends before.
        OSError: it cannot be read.
    """
    left = memoryview(memory)
    while len(left):
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise ChunkError("the file ends within it")
        left, offset = left[count:], offset + count

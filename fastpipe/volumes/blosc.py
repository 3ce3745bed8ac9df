"""Blosc's buffers, of which parts can be decompressed alone.

The format: c-blosc's README_CHUNK_FORMAT.rst.  A buffer begins with 16 bytes (version, version of the
compressor, flags, size of an element; then, as little-endian numbers of 32 bits, bytes of the content, of a
block, and of the buffer), and behind these has where each block's bytes begin.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.read.chunks.blosc import blosc_library
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.stored import read_fully

__all__ = ["HEADER_NBYTES", "BloscHeader", "decompress", "read_parts"]

UInt8Array = npt.NDArray[np.uint8]

HEADER_NBYTES = 16
_HEADER = struct.Struct("<4B3I")
_IS_COPIED = 0x2  # the content as it is


class BloscHeader(NamedTuple):
    """What a buffer says of itself.

    Attributes:
        itemsize: of its elements, as far as its compressor was told.
        nbytes: of its content.
        block: of that, in each block.
        stored: bytes of the buffer.
        is_copied: whether the content is in it as it is.
    """

    itemsize: int
    nbytes: int
    block: int
    stored: int
    is_copied: bool

    @classmethod
    def of(cls, data: bytes | UInt8Array, nbytes: int) -> BloscHeader:
        """Of a buffer's first bytes.

        Args:
            data: at least 16 bytes.
            nbytes: that its content is to have.

        Raises:
            ChunkError: they are no header, or that of another content.
        """
        if len(data) < HEADER_NBYTES:
            raise ChunkError("its header is cut off")
        _, _, flags, itemsize, content, block, stored = _HEADER.unpack_from(bytes(data[:HEADER_NBYTES]))
        if content != nbytes or not itemsize or not 0 < block <= content or stored < HEADER_NBYTES:
            raise ChunkError(f"its header is not that of {nbytes} bytes")
        return cls(itemsize, content, block, stored, bool(flags & _IS_COPIED))

    @property
    def blocks(self) -> int:
        """How many it has."""
        return -(-self.nbytes // self.block)


def _library() -> Any:
    found = blosc_library()
    if found is None:
        raise ImportError("the package numcodecs has no blosc: pip install --upgrade numcodecs")
    return found


def _address(data: UInt8Array) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


def decompress(stored: UInt8Array, out: UInt8Array) -> None:
    """Decompress a whole buffer.

    Args:
        stored: uint8 (N,), the buffer.
        out: uint8 (M,), of the content's size.

    Raises:
        ChunkError: it is damaged, or of another size.
    """
    header = BloscHeader.of(stored, len(out))
    if header.stored != len(stored):
        raise ChunkError(f"it says that it has {header.stored} bytes, but has {len(stored)}")
    made = _library().blosc_decompress_ctx(_address(stored), _address(out), len(out), 1)
    if made != len(out):
        raise ChunkError("its blocks are damaged")


def read_parts(
    descriptor: int, size: int, nbytes: int, parts: Sequence[tuple[int, UInt8Array]], stored: UInt8Array
) -> None:
    """Read and decompress parts of the buffer that a file is.

    Args:
        descriptor: of the file.
        size: of the file.
        nbytes: of the content.
        parts: where in the content each begins, and the memory that it fills.
        stored: uint8 (N,), memory for at least ``size`` bytes.

    Raises:
        ChunkError: it is damaged, or of another size.
    """
    stored = stored[:size]
    read_fully(descriptor, stored, 0)
    whole = np.empty(nbytes, np.uint8)
    decompress(stored, whole)
    for begin, out in parts:
        out[:] = whole[begin : begin + len(out)]

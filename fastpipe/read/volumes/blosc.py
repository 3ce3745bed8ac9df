"""Blosc's buffers, of which parts can be decompressed alone.

The format: c-blosc's README_CHUNK_FORMAT.rst.  A buffer begins with 16 bytes (version, version of the
compressor, flags, size of an element; then, as little-endian numbers of 32 bits, bytes of the content, of a
block, and of the buffer), and behind these has where each block's bytes begin.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.foreign import address, library_of, once
from fastpipe.read.chunks.stored import read_fully
from fastpipe.read.volumes.blosc_kernels import UNUSUAL, blosc_parts

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


@once
def _library() -> Any:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found = library_of(
        "numcodecs.blosc",
        {
            "blosc_decompress_ctx": (number, [pointer, pointer, ctypes.c_size_t, number]),
            "blosc_getitem": (number, [pointer, number, number, pointer]),
        },
    )
    if found is None:
        raise ImportError("the package numcodecs has no blosc: pip install --upgrade numcodecs")
    return found


@once
def _addresses() -> tuple[int, int]:
    library = _library()
    return address(library, "blosc_getitem"), address(library, "blosc_decompress_ctx")


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
) -> int:
    """Read and decompress parts of the buffer that a file is.

    Args:
        descriptor: of the file.
        size: of the file.
        nbytes: of the content.
        parts: where in the content each begins, and the memory that it fills.
        stored: uint8 (N,), memory for at least ``size`` bytes.

    Returns:
        How many bytes were decompressed.

    Raises:
        ChunkError: it is damaged, or of another size.
    """
    stored = stored[:size]
    done = blosc_parts(
        descriptor, nbytes, np.array([begin for begin, _ in parts], np.int64),
        np.array([len(out) for _, out in parts], np.int64),
        np.array([_address(out) for _, out in parts], np.uint64), stored, *_addresses(),
    )  # fmt: skip
    return _read_parts(descriptor, size, nbytes, parts, stored) if done == UNUSUAL else int(done)


def _read_parts(
    descriptor: int, size: int, nbytes: int, parts: Sequence[tuple[int, UInt8Array]], stored: UInt8Array
) -> int:
    """The same, for what is unusual, and to say what is wrong."""
    if sum(len(out) for _, out in parts) == nbytes:
        read_fully(descriptor, stored[:size], 0)
        header = BloscHeader.of(stored, nbytes)
    else:
        read_fully(descriptor, stored[:HEADER_NBYTES], 0)
        header = BloscHeader.of(stored, nbytes)
        if header.stored == size:
            _read_blocks(descriptor, stored, header, parts)
    if header.stored != size:
        raise ChunkError(f"it says that it has {header.stored} bytes, but has {size}")
    if len(parts) == 1 and len(parts[0][1]) == nbytes:
        decompress(stored, parts[0][1])
        return nbytes
    source, done = _address(stored), 0
    for begin, out in parts:
        first, over = divmod(begin, header.itemsize)
        count, left = divmod(len(out), header.itemsize)
        if over or left:  # compressed as elements of another size than the array's
            whole = np.empty(nbytes, np.uint8)
            read_fully(descriptor, stored[:size], 0)
            decompress(stored, whole)
            for at, memory in parts:
                memory[:] = whole[at : at + len(memory)]
            return nbytes
        if _library().blosc_getitem(source, first, count, _address(out)) != len(out):
            raise ChunkError("its blocks are damaged")
        low, high = begin // header.block, -(-(begin + len(out)) // header.block)
        done += min(high * header.block, nbytes) - low * header.block
    return done


def _read_blocks(
    descriptor: int, stored: UInt8Array, header: BloscHeader, parts: Sequence[tuple[int, UInt8Array]]
) -> None:
    """Read of a buffer what parts of its content need."""
    if header.is_copied:
        for begin, out in parts:
            begin += HEADER_NBYTES
            read_fully(descriptor, stored[begin : begin + len(out)], begin)
        return
    table_end = HEADER_NBYTES + 4 * header.blocks
    if table_end > len(stored):
        raise ChunkError("the table of its blocks is cut off")
    read_fully(descriptor, stored[HEADER_NBYTES:table_end], HEADER_NBYTES)
    begins = stored[HEADER_NBYTES:table_end].view("<i4").astype(np.int64)
    if begins.min() < table_end or begins.max() >= len(stored):
        raise ChunkError("its blocks begin outside of it")
    # Threads of the compressor put blocks into any order; each ends where another begins.
    order = np.append(np.sort(begins), len(stored))
    ends = order[np.searchsorted(order, begins, side="right")]
    wanted = np.zeros(header.blocks, np.bool_)
    for begin, out in parts:
        wanted[begin // header.block : -(-(begin + len(out)) // header.block)] = True
    runs: list[list[int]] = []
    for low, high in sorted(zip(begins[wanted].tolist(), ends[wanted].tolist(), strict=True)):
        if runs and runs[-1][1] == low:
            runs[-1][1] = high
        else:
            runs.append([low, high])
    for low, high in runs:
        read_fully(descriptor, stored[low:high], low)

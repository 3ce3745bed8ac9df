"""Filters that hdf5plugin brings to the HDF5 library, undone without both."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.read.hdf5 import plugin_kernels
from fastpipe.read.hdf5.blosc2 import blosc2
from fastpipe.read.hdf5.errors import ChunkError
from fastpipe.read.hdf5.scratch import BLOCK, scratch

__all__ = ["BLOSC2", "PLUGINS"]

UInt8Array = npt.NDArray[np.uint8]
Values = Sequence[int]

BLOSC2 = 32026
_TOTAL, _SIZE = struct.Struct(">QI"), struct.Struct(">I")
_PLAIN, _WITH_LZ4, _WITH_ZSTD = 0, 2, 3  # bitshuffle's values of its fifth parameter
# Bitshuffle's block without a parameter: so many bytes, in groups of 8 elements, and at least 128 elements.
_BLOCK_NBYTES, _BLOCK_LEAST = 8192, 128
_BLOSC_HEADER = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _blosc(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    size = len(made)
    if len(data) < _BLOSC_HEADER:
        raise ChunkError("blosc: its header is cut off")
    nbytes, _, compressed = struct.unpack_from("<3I", data.data, 4)
    if nbytes != size or compressed != len(data):
        raise ChunkError(f"blosc: {nbytes} bytes where {size} were expected")
    _by_numcodecs("blosc", data, made)


def _blosc2(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    blosc2(data, made)


def _zstd(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    _from_zstd(data, made)


def _from_zstd(stored: UInt8Array, made: UInt8Array) -> None:
    nbytes = _zstd_nbytes(stored)
    if nbytes != len(made):
        raise ChunkError(f"zstd: {nbytes} bytes where {len(made)} were expected")
    _by_numcodecs("zstd", stored, made)


def _zstd_nbytes(data: UInt8Array) -> int | None:
    """What a frame says of its content's size (RFC 8878, section 3.1.1.1); None for nothing, which
    the HDF5 library's filter does not accept either."""
    if len(data) < 6 or data[:4].tobytes() != _ZSTD_MAGIC:
        raise ChunkError("zstd: this is no frame")
    flags = int(data[4])
    size_flag, is_single = flags >> 6, flags >> 5 & 1
    first = 5 + (0 if is_single else 1) + (0, 1, 2, 4)[flags & 3]
    width = (1 if is_single else 0, 2, 4, 8)[size_flag]
    if not width or len(data) < first + width:
        return None
    return int.from_bytes(data[first : first + width].tobytes(), "little") + (256 if width == 2 else 0)


def _by_numcodecs(name: str, data: UInt8Array, made: UInt8Array) -> None:
    codec = require(f"numcodecs.{name}", extra="hdf5")
    try:
        codec.decompress(data, made)
    except (RuntimeError, ValueError) as error:
        raise ChunkError(f"{name}: {error}") from None


def _lz4(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    """A header of the whole size and that of a block, then blocks, each after its compressed size."""
    size = len(made)
    block = _header("lz4", data, size)
    at = _TOTAL.size
    for first in range(0, size, block):
        part = made[first : first + block]
        stored, at = _next(data, at, "lz4")
        if len(stored) == len(part):  # it gained nothing
            part[:] = stored
        else:
            _from_lz4(stored, part)


def _bitshuffle(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    """Blocks of elements; those that are left, fewer than 8, as they are."""
    size = len(made)
    element = values[2] if len(values) > 2 else 1
    how = values[4] if len(values) > 4 else _PLAIN
    if element < 1 or size % element:
        raise ChunkError(f"bitshuffle: {size} bytes are no whole number of elements of {element}")
    if how != _PLAIN and how not in _BLOCK_DECODERS:
        raise ChunkError(f"bitshuffle: its compression {how} is not known")
    if how == _PLAIN:
        if len(data) != size:
            raise ChunkError(f"bitshuffle: {len(data)} bytes where {size} were expected")
        elements = (values[3] if len(values) > 3 else 0) or max(
            _BLOCK_NBYTES // element // 8 * 8, _BLOCK_LEAST
        )
        at = 0
    else:
        elements, at = _header("bitshuffle", data, size) // element, _TOTAL.size
    if elements < 8 or elements % 8 or elements * element > (1 << 30):
        raise ChunkError(f"bitshuffle: blocks of {elements} elements")
    left = size // element % 8 * element
    for first in range(0, size - left, elements * element):
        part = made[first : min(first + elements * element, size - left)]
        if how == _PLAIN:
            block, at = data[at : at + len(part)], at + len(part)
        else:
            stored, at = _next(data, at, "bitshuffle")
            block = scratch(BLOCK, len(part))
            _BLOCK_DECODERS[how](stored, block)
        plugin_kernels.bit_unshuffle(block, part, element)
    if len(data) - at < left:
        raise ChunkError("bitshuffle: its data end too early")
    made[size - left :] = data[at : at + left]


def _from_lz4(stored: UInt8Array, made: UInt8Array) -> None:
    if plugin_kernels.lz4_block(stored, made) != len(made):
        raise ChunkError("lz4: damaged data")


_BLOCK_DECODERS: dict[int, Callable[[UInt8Array, UInt8Array], None]] = {
    _WITH_LZ4: _from_lz4,
    _WITH_ZSTD: _from_zstd,
}


def _header(name: str, data: UInt8Array, size: int) -> int:
    """The size of a block, after a check of the whole size."""
    if len(data) < _TOTAL.size:
        raise ChunkError(f"{name}: its header is cut off")
    total, block = _TOTAL.unpack_from(data.data)
    if total != size or block < 1:
        raise ChunkError(f"{name}: {total} bytes in blocks of {block} where {size} were expected")
    return int(block)


def _next(data: UInt8Array, at: int, name: str) -> tuple[UInt8Array, int]:
    """A block of compressed bytes, and where the next begins."""
    first = at + _SIZE.size
    if first <= len(data):
        (size,) = _SIZE.unpack_from(data.data, at)
        if first + size <= len(data):
            return data[first : first + size], first + size
    raise ChunkError(f"{name}: its data end too early")


# By the filters' numbers: from the stored bytes and the filter's parameters into memory that they fill.
PLUGINS: dict[int, Callable[[UInt8Array, Values, UInt8Array], None]] = {
    32001: _blosc,
    32004: _lz4,
    32008: _bitshuffle,
    32015: _zstd,
    BLOSC2: _blosc2,
}

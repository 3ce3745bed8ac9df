"""Filters that hdf5plugin brings to the HDF5 library, undone without both."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.read.chunks.blosc import DECOMPRESS, blosc_library
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.foreign import address
from fastpipe.read.chunks.zstd import ZSTD_DECOMPRESS, zstd_contexts
from fastpipe.read.hdf5 import plugin_kernels as kernels
from fastpipe.read.hdf5.blosc2 import blosc2_functions, has_blosc2
from fastpipe.read.hdf5.kernels import BITSHUFFLE, BLOSC, BLOSC2, LZ4, ZSTD

__all__ = [
    "PLUGINS",
    "bitshuffle_values",
    "blosc_decompress",
    "is_missing",
    "zstd_context",
    "zstd_decompress",
]

UInt8Array = npt.NDArray[np.uint8]
Values = Sequence[int]

# Bitshuffle's block without a parameter: so many bytes, in groups of 8 elements, and at least 128 elements.
_BLOCK_NBYTES, _BLOCK_LEAST = 8192, 128
# Which of a Blosc's parameters says its codec; and blosclz, lz4, lz4hc, zlib and zstd, without snappy.
_BLOSC_CODEC, _BLOSC_CODECS = 6, (0, 1, 2, 4, 5)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PROBLEMS = {
    kernels.CUT: "its header is cut off, or is none",
    kernels.SIZE: "it is not of the {} bytes that were expected",
    kernels.BLOCKS: "its blocks are of a size that there is not",
    kernels.EARLY: "its data end too early",
    kernels.DAMAGED: "damaged data, or not the {} bytes that were expected",
}


def is_missing(code: int, values: Values) -> bool:
    """Return whether a filter cannot be undone: its codec is unknown here, or a library lacks a function."""
    if code == BITSHUFFLE:
        how = bitshuffle_values(values)[1]
        is_known = how in (kernels.PLAIN, kernels.WITH_LZ4, kernels.WITH_ZSTD)
        return not is_known or (how == kernels.WITH_ZSTD and not zstd_decompress())
    if code == BLOSC:
        return len(values) > _BLOSC_CODEC and values[_BLOSC_CODEC] not in _BLOSC_CODECS
    return code == BLOSC2 and not has_blosc2()


def _check(name: str, found: int, made: UInt8Array) -> None:
    if found != kernels.FINE:
        raise ChunkError(f"{name}: {_PROBLEMS[found].format(len(made))}")


def _blosc(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    if function := blosc_decompress():
        _check("blosc", kernels.blosc_chunk(function, data, made), made)
        return
    if len(data) < 16 or struct.unpack_from("<I4xI", data.data, 4) != (len(made), len(data)):
        _check("blosc", kernels.SIZE, made)
    _by_numcodecs("blosc", data, made)


def _blosc2(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    functions = np.array(blosc2_functions(), np.uint64)
    assert functions.all(), "has_blosc2 said so"
    _check("blosc2", kernels.blosc2_chunk(functions, data, made), made)


def _zstd(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    # What the kernel does not decompress is said, or borne, by the other way.
    function = zstd_decompress()
    if function and kernels.zstd_chunk(function, zstd_context(), data, made) == kernels.FINE:
        return
    nbytes = _zstd_nbytes(data)
    if nbytes != len(made):
        raise ChunkError(f"zstd: {nbytes} bytes where {len(made)} were expected")
    _by_numcodecs("zstd", data, made)


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
    _check("lz4", kernels.lz4_chunk(data, made), made)


def _bitshuffle(data: UInt8Array, values: Values, made: UInt8Array) -> None:
    element, how, elements = bitshuffle_values(values)
    if element < 1 or len(made) % element:
        raise ChunkError(f"bitshuffle: {len(made)} bytes are no whole number of elements of {element}")
    if how not in (kernels.PLAIN, kernels.WITH_LZ4, kernels.WITH_ZSTD):
        raise ChunkError(f"bitshuffle: its compression {how} is not known")
    function = zstd_decompress() if how == kernels.WITH_ZSTD else 0
    context = zstd_context() if function else 0
    found = kernels.bitshuffle_chunk(data, made, element, how, elements, function, context)
    _check("bitshuffle", found, made)


def bitshuffle_values(values: Values) -> tuple[int, int, int]:
    """Of a bitshuffle's parameters: bytes of an element, how it compresses, and elements of a block where it
    does not."""
    element = values[2] if len(values) > 2 else 1
    how = values[4] if len(values) > 4 else kernels.PLAIN
    asked = values[3] if len(values) > 3 else 0
    return element, how, asked or max(_BLOCK_NBYTES // max(element, 1) // 8 * 8, _BLOCK_LEAST)


@cache
def blosc_decompress() -> int:
    """The address of ``blosc_decompress_ctx``, for kernels; 0 where it cannot be had."""
    return address(blosc_library(), DECOMPRESS)


@cache
def zstd_decompress() -> int:
    """The address of ``ZSTD_decompressDCtx``, for kernels; 0 where it cannot be had."""
    return 0 if (context := zstd_contexts()) is None else address(context.library, ZSTD_DECOMPRESS)


def zstd_context() -> int:
    """The address of this thread's context of zstd, where ``zstd_decompress`` is not 0."""
    contexts = zstd_contexts()
    assert contexts is not None
    return contexts()


# By the filters' numbers: from the stored bytes and the filter's parameters into memory that they fill.
PLUGINS: dict[int, Callable[[UInt8Array, Values, UInt8Array], None]] = {
    BLOSC: _blosc,
    LZ4: _lz4,
    BITSHUFFLE: _bitshuffle,
    ZSTD: _zstd,
    BLOSC2: _blosc2,
}

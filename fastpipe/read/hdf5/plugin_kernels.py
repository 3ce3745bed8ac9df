"""Kernels for filters that are registered with The HDF Group but are no part of its library.

LZ4's block format: lz4_Block_format.md of the LZ4 project.  Bitshuffle: the paper by K. Masui and
others, Astronomy and Computing 12 (2015), and the filter's own description of its header.  Blosc's header:
c-blosc's README_CHUNK_FORMAT.rst.

What decodes a chunk returns one of the numbers ``FINE`` to ``DAMAGED``, and fills all of the memory or says
what is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.chunks.calls import call, little_endian
from fastpipe.read.hdf5.kernels import copy_all, copy_back, copy_literals, unshuffle, unshuffle_8

__all__ = [
    "BLOCKS", "BLOSC2_CALLS", "CUT", "DAMAGED", "EARLY", "FINE", "PLAIN", "SIZE", "WITH_LZ4", "WITH_ZSTD",
    "bitshuffle_chunk", "blosc2_chunk", "blosc_chunk", "lz4_chunk", "zstd_chunk",
]  # fmt: skip

_t = require("numba.types", extra="hdf5")
_in8 = _t.Array(_t.uint8, 1, "C", readonly=True)
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_word64 = _t.Array(_t.uint64, 1, "C", readonly=True)
_u8 = _t.uint8[::1]
_int, _word = _t.int64, _t.uintp

FINE, CUT, SIZE, BLOCKS, EARLY, DAMAGED = range(6)
PLAIN, WITH_LZ4, WITH_ZSTD = 0, 2, 3  # bitshuffle's values of its fifth parameter
_HEADER = 12  # bytes: of LZ4's filter, and of bitshuffle's where it compresses
_MOST_BLOCK = 1 << 30
_BLOSC_HEADER = 16
_BLOSC2_MAGIC, _BLOSC2_MAGIC_AT = int.from_bytes(b"b2frame\0", "big"), 2
# The functions that ``blosc2_chunk`` wants, in this order.
BLOSC2_CALLS = (
    "blosc2_schunk_from_buffer", "b2nd_from_schunk", "b2nd_to_cbuffer", "b2nd_free",
    "blosc2_schunk_decompress_chunk", "blosc2_schunk_free",
)  # fmt: skip


@compiled()
def _length(src: Any, i: Any, nibble: Any) -> Any:
    """A length that begins in a token: (the length, where to go on); beyond the end if it is cut off."""
    one, n = np.uint64(1), np.uint64(src.size)
    if nibble == np.uint64(15):
        more = np.uint64(255)
        while more == np.uint64(255) and i < n:
            more = np.uint64(src[i])
            nibble += more
            i += one
        if more == np.uint64(255):
            return nibble, n + one
    return nibble, i


@compiled(_t.int64(_in8, _u8))
def _lz4_block(src: Any, dst: Any) -> Any:
    """How many bytes a block of LZ4 is; -1 where it is damaged or is more than ``dst`` holds."""
    one, n, m = np.uint64(1), np.uint64(src.size), np.uint64(dst.size)
    i, o = np.uint64(0), np.uint64(0)
    while i < n:
        token = np.uint64(src[i])
        length, i = _length(src, i + one, token >> np.uint64(4))
        if i + length > n or o + length > m:
            return -1
        copy_literals(src, i, dst, o, length)
        i += length
        o += length
        if i >= n:  # a block ends with literals
            break
        if i + one >= n:
            return -1
        back = np.uint64(src[i]) | (np.uint64(src[i + one]) << np.uint64(8))
        length, i = _length(src, i + one + one, token & np.uint64(15))
        length += np.uint64(4)
        if i > n or back == np.uint64(0) or back > o or o + length > m:
            return -1
        copy_back(dst, o, back, length)
        o += length
    return np.int64(o)


@compiled()
def _big_endian(src: Any, at: Any, count: Any) -> Any:
    value = np.uint64(0)
    for byte in range(at, at + count):
        value = value << np.uint64(8) | np.uint64(src[byte])
    return value


@compiled()
def _block_nbytes(src: Any, size: Any) -> Any:
    """The size of the blocks that a header tells, after it has told that of all; below 0 without one."""
    if src.size < _HEADER:
        return -CUT
    block = np.int64(_big_endian(src, 8, 4))
    if _big_endian(src, 0, 8) != np.uint64(size) or block < 1:
        return -SIZE
    return block


@compiled()
def _stored_end(src: Any, at: Any) -> Any:
    """The end of the compressed bytes before which their number is at ``at``; -1 where they end too early."""
    if at + 4 > src.size:
        return -1
    end = at + 4 + np.int64(_big_endian(src, at, 4))
    return end if end <= src.size else -1


@compiled(_t.int64(_in8, _u8))
def lz4_chunk(src: Any, dst: Any) -> Any:
    """Undo the LZ4 filter: a header of the whole size and that of a block, then blocks, each after its
    compressed size.

    Args:
        src: uint8 (N,), the compressed bytes.
        dst: uint8 (M,), the result.
    """
    block = _block_nbytes(src, dst.size)
    if block < 0:
        return -block
    at = _HEADER
    for first in range(0, dst.size, block):
        part = dst[first : min(first + block, dst.size)]
        end = _stored_end(src, at)
        if end < 0:
            return EARLY
        stored, at = src[at + 4 : end], end
        if stored.size == part.size:  # it gained nothing
            copy_all(stored, part)
        elif _lz4_block(stored, part) != part.size:
            return DAMAGED
    return FINE


@compiled(_t.int64(_word, _word, _in8, _u8))
def zstd_chunk(function: int, context: int, src: Any, dst: Any) -> Any:
    """Decompress a frame of zstd.

    Args:
        function: the address of ``ZSTD_decompressDCtx``.
        context: of one of its contexts, for this call alone.
        src: uint8 (N,), the frame.
        dst: uint8 (M,), the result.
    """
    to, at = np.uint64(dst.ctypes.data), np.uint64(src.ctypes.data)
    made = call(function, context, to, np.uint64(dst.size), at, np.uint64(src.size), np.uint64(0))
    return FINE if made == np.uint64(dst.size) else DAMAGED  # errors are larger than any size


@compiled(_t.void(_in8, _t.uint64[::1], _int, _int))
def _bits_to_bytes(src: Any, dst: Any, row: int, size: int) -> None:
    """From rows of bits to rows of bytes, those of 8 elements in one word."""
    for byte in range(size):
        first, words = 8 * byte * row, dst[byte * row : (byte + 1) * row]
        unshuffle_8(src[first : first + 8 * row], words, row)
        for k in range(row):
            bits = words[k]
            # Transposed as a matrix of 8 by 8 bits: eighths, quarters and halves change places.
            swap = (bits ^ (bits >> np.uint64(7))) & np.uint64(0x00AA00AA00AA00AA)
            bits ^= swap ^ (swap << np.uint64(7))
            swap = (bits ^ (bits >> np.uint64(14))) & np.uint64(0x0000CCCC0000CCCC)
            bits ^= swap ^ (swap << np.uint64(14))
            swap = (bits ^ (bits >> np.uint64(28))) & np.uint64(0x00000000F0F0F0F0)
            bits ^= swap ^ (swap << np.uint64(28))
            words[k] = bits


@compiled(_t.void(_in8, _t.uint64[::1], _u8, _int))
def _bit_unshuffle(src: Any, words: Any, dst: Any, size: int) -> None:
    """Undo a bitshuffle of a multiple of 8 elements: all first bits, then all second ones, and so on.

    ``words`` is memory for as many bytes.
    """
    _bits_to_bytes(src, words, src.size // size // 8, size)
    unshuffle(words.view(np.uint8), dst, size)


@compiled(_t.int64(_in8, _u8, _int, _int, _int, _word, _word))
def bitshuffle_chunk(
    src: Any, dst: Any, element: int, how: int, elements: int, function: int, context: int
) -> Any:
    """Undo the bitshuffle filter: blocks of elements; those that are left, fewer than 8, as they are.

    Args:
        src: uint8 (N,), the stored bytes.
        dst: uint8 (M,), the result, of a whole number of elements; its memory aligned to them.
        element: bytes of an element.
        how: ``PLAIN``, ``WITH_LZ4`` or ``WITH_ZSTD``.
        elements: of a block, for ``PLAIN``; otherwise there is a header.
        function, context: as for ``zstd_chunk``, for ``WITH_ZSTD``.
    """
    at = 0
    if how != PLAIN:
        block = _block_nbytes(src, dst.size)
        if block < 0:
            return -block
        elements, at = block // element, _HEADER
    elif src.size != dst.size:
        return SIZE
    if elements < 8 or elements % 8 or elements * element > _MOST_BLOCK:
        return BLOCKS
    whole = dst.size - dst.size // element % 8 * element
    step = min(elements * element, whole)
    words, block_of = np.empty(step // 8, np.uint64), np.empty(0 if how == PLAIN else step, np.uint8)
    for first in range(0, whole, max(step, 1)):
        part = dst[first : min(first + step, whole)]
        some = words[: part.size // 8]
        if how == PLAIN:
            _bit_unshuffle(src[at : at + part.size], some, part, element)
            at += part.size
            continue
        end = _stored_end(src, at)
        if end < 0:
            return EARLY
        stored, bits, at = src[at + 4 : end], block_of[: part.size], end
        if how == WITH_ZSTD:
            if zstd_chunk(function, context, stored, bits) != FINE:
                return DAMAGED
        elif _lz4_block(stored, bits) != bits.size:
            return DAMAGED
        _bit_unshuffle(bits, some, part, element)
    if src.size - at < dst.size - whole:
        return EARLY
    copy_all(src[at:], dst[whole:])
    return FINE


@compiled(_t.int64(_word, _in8, _u8))
def blosc_chunk(function: int, src: Any, dst: Any) -> Any:
    """Decompress a buffer of Blosc's.

    Args:
        function: the address of ``blosc_decompress_ctx``.
        src: uint8 (N,), the buffer.
        dst: uint8 (M,), the result.
    """
    if src.size < _BLOSC_HEADER:
        return CUT
    if little_endian(src, 4) != dst.size or little_endian(src, 12) != src.size:
        return SIZE
    at, to = np.uint64(src.ctypes.data), np.uint64(dst.ctypes.data)
    none = np.uint64(0)
    made = call(function, at, to, np.uint64(dst.size), np.uint64(1), none, none)
    return FINE if np.int32(made) == dst.size else DAMAGED


@compiled(_t.int64(_word64, _in8, _u8))
def blosc2_chunk(functions: Any, src: Any, dst: Any) -> Any:
    """Decompress a frame of Blosc2's, of an array or of plain bytes.

    Args:
        functions: uint64 (6,), the addresses of those in ``BLOSC2_CALLS``.
        src: uint8 (N,), the frame.
        dst: uint8 (M,), the result, of at least a byte.
    """
    end = _BLOSC2_MAGIC_AT + 8
    if src.size < end or _big_endian(src, _BLOSC2_MAGIC_AT, 8) != np.uint64(_BLOSC2_MAGIC):
        return CUT
    none, array = np.uint64(0), np.zeros(1, np.uint64)
    to, size = np.uint64(dst.ctypes.data), np.uint64(dst.size)
    frame = call(functions[0], np.uint64(src.ctypes.data), np.uint64(src.size), none, none, none, none)
    if frame == none:
        return DAMAGED
    if np.int32(call(functions[1], frame, np.uint64(array.ctypes.data), none, none, none, none)) == 0:
        found = array[0]
        # It says what does not fit into memory, but not what does not fill it.
        less = np.int32(call(functions[2], found, to, size - np.uint64(1), none, none, none))
        made = less if less == 0 else np.int32(call(functions[2], found, to, size, none, none, none))
        call(functions[3], found, none, none, none, none, none)  # and the frame
        return FINE if less != 0 and made == 0 else SIZE
    count = np.int32(call(functions[4], frame, none, to, size, none, none))
    call(functions[5], frame, none, none, none, none, none)
    return FINE if count == dst.size else SIZE

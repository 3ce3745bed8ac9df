"""Kernels for filters that are registered with The HDF Group but are no part of its library.

LZ4's block format: lz4_Block_format.md of the LZ4 project.  Bitshuffle: the paper by K. Masui and
others, Astronomy and Computing 12 (2015), and the filter's own description of its header.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.hdf5.kernels import copy_back, copy_literals, unshuffle, unshuffle_8

__all__ = ["bit_unshuffle", "lz4_block"]

_t = require("numba.types", extra="hdf5")
_in8 = _t.Array(_t.uint8, 1, "C", readonly=True)
_u8 = _t.uint8[::1]
_int = _t.int64


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
def lz4_block(src: Any, dst: Any) -> Any:
    """Decompress one block of LZ4.

    Args:
        src: uint8 (N,), the compressed bytes.
        dst: uint8 (M,), the result.

    Returns:
        How many bytes it is; -1 where ``src`` is damaged or is more than ``dst`` holds.
    """
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


def bit_unshuffle(src: Any, dst: Any, size: int) -> None:
    """Undo a bitshuffle: all first bits of the elements, then all second ones, and so on.

    Args:
        src, dst: uint8 (N,), of a number of elements that is a multiple of 8; the memory of ``dst`` aligned
            to ``size``.
        size: of an element, in bytes.
    """
    words = np.empty(len(src) // 8, np.dtype("<u8"))
    _bits_to_bytes(src, words, len(src) // size // 8, size)
    unshuffle(words.view(np.uint8), dst, size)

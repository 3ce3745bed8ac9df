"""What HDF5's filters do to a chunk, undone; and rows of chunks copied to where they belong.

Shuffle, Fletcher32: the HDF5 library's H5Zshuffle.c and H5checksum.c say what they are.  LZF: the
format of Marc Lehmann's LibLZF, a byte of control for each literal run or back reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled

__all__ = [
    "BITSHUFFLE",
    "BLOSC",
    "BLOSC2",
    "DEFLATE",
    "FLETCHER32",
    "LZ4",
    "LZF",
    "SHUFFLE",
    "SUM_NBYTES",
    "ZSTD",
    "copy_all",
    "copy_back",
    "copy_literals",
    "copy_runs",
    "fletcher32",
    "lzf",
    "read_runs",
    "unshuffle",
    "unshuffle_8",
]

_t = require("numba.types", extra="hdf5")
_in8 = _t.Array(_t.uint8, 1, "C", readonly=True)
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_u8 = _t.uint8[::1]
_int = _t.int64

# Numbers of filters: the HDF5 library's H5Zpublic.h, and The HDF Group's list of registered ones.
DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32001, 32004, 32008, 32015, 32026
SUM_NBYTES = 4  # that Fletcher32 appends

_BLOCK = 16  # bytes that are copied at once, where there is room behind them
_MOST_WORDS = 360  # whose sums cannot overflow 32 bits


# The C library knows the processor: a loop that copies some bytes at a time takes twice as long from a few
# cache lines on.
_memcpy = _t.ExternalFunction("memcpy", _t.voidptr(_t.uintp, _t.uintp, _t.uintp))


@compiled()
def copy_all(src: Any, dst: Any) -> None:
    """Copy bytes to memory of the same size."""
    _memcpy(np.uint64(dst.ctypes.data), np.uint64(src.ctypes.data), np.uint64(dst.size))


@compiled()
def _unshuffle_any(src: Any, dst: Any, count: Any, size: Any) -> None:
    for byte in range(size):
        start = byte * count
        for k in range(count):
            dst[k * size + byte] = src[start + k]


@compiled()
def _unshuffle_2(src: Any, dst: Any, n: Any) -> None:
    a, b = src[:n], src[n : 2 * n]
    for k in range(n):
        dst[k] = np.uint16(a[k]) | (np.uint16(b[k]) << np.uint16(8))


@compiled()
def _unshuffle_4(src: Any, dst: Any, n: Any) -> None:
    a, b, c, d = src[:n], src[n : 2 * n], src[2 * n : 3 * n], src[3 * n : 4 * n]
    for k in range(n):
        low = np.uint32(a[k]) | (np.uint32(b[k]) << np.uint32(8))
        dst[k] = low | (np.uint32(c[k]) << np.uint32(16)) | (np.uint32(d[k]) << np.uint32(24))


@compiled(_t.void(_in8, _t.uint64[::1], _int))
def unshuffle_8(src: Any, dst: Any, n: int) -> None:
    """As ``unshuffle``, for elements of 8 bytes, in kernels."""
    a, b, c, d = src[:n], src[n : 2 * n], src[2 * n : 3 * n], src[3 * n : 4 * n]
    e, f, g, h = src[4 * n : 5 * n], src[5 * n : 6 * n], src[6 * n : 7 * n], src[7 * n : 8 * n]
    for k in range(n):
        low = np.uint64(a[k]) | (np.uint64(b[k]) << np.uint64(8))
        low |= (np.uint64(c[k]) << np.uint64(16)) | (np.uint64(d[k]) << np.uint64(24))
        high = np.uint64(e[k]) | (np.uint64(f[k]) << np.uint64(8))
        high |= (np.uint64(g[k]) << np.uint64(16)) | (np.uint64(h[k]) << np.uint64(24))
        dst[k] = low | (high << np.uint64(32))


@compiled(_t.void(_in8, _u8, _int))
def unshuffle(src: Any, dst: Any, size: int) -> None:
    """Undo the shuffle filter: all first bytes of the elements, then all second ones, and so on.

    Args:
        src: uint8 (N,).
        dst: uint8 (N,), its memory aligned to ``size``.
        size: of an element, in bytes.
    """
    count = src.size // size
    whole = count * size
    if size == 2:
        _unshuffle_2(src, dst[:whole].view(np.uint16), count)
    elif size == 4:
        _unshuffle_4(src, dst[:whole].view(np.uint32), count)
    elif size == 8:
        unshuffle_8(src, dst[:whole].view(np.uint64), count)
    else:
        _unshuffle_any(src, dst, count, size)
    copy_all(src[whole:], dst[whole:])


@compiled()
def _folded(total: Any) -> Any:
    """A sum modulo 65,535, in at most 17 bits."""
    return (total & np.uint32(0xFFFF)) + (total >> np.uint32(16))


@compiled(_t.int64(_in8))
def fletcher32(data: Any) -> Any:
    """The checksum that the Fletcher32 filter appends, as a number of 32 bits.

    Args:
        data: uint8 (N,).
    """
    low, high = np.uint32(0), np.uint32(0)
    words, at = data.size // 2, 0
    while words:
        some = min(words, _MOST_WORDS)
        words -= some
        for _ in range(some):
            low += (np.uint32(data[at]) << np.uint32(8)) | np.uint32(data[at + 1])
            high += low
            at += 2
        low, high = _folded(low), _folded(high)
    if data.size % 2:
        low += np.uint32(data[at]) << np.uint32(8)
        high += low
        low, high = _folded(low), _folded(high)
    low, high = _folded(low), _folded(high)
    return (np.int64(high) << 16) | np.int64(low)


@compiled()
def copy_literals(src: Any, i: Any, dst: Any, o: Any, length: Any) -> None:
    """Copy ``length`` bytes from ``src[i:]`` to ``dst[o:]``, both of which have them."""
    block = np.uint64(_BLOCK)
    if i + length + block <= np.uint64(src.size) and o + length + block <= np.uint64(dst.size):
        first = np.uint64(0)
        while first < length:  # more than there is: what follows is written later
            for k in range(_BLOCK):
                dst[o + first + np.uint64(k)] = src[i + first + np.uint64(k)]
            first += block
    else:
        for k in range(length):
            dst[o + np.uint64(k)] = src[i + np.uint64(k)]


@compiled()
def copy_back(dst: Any, o: Any, back: Any, length: Any) -> None:
    """Repeat ``length`` bytes that begin ``back`` before ``o``; the two may overlap."""
    block = np.uint64(_BLOCK)
    if back >= block and o + length + block <= np.uint64(dst.size):
        first = np.uint64(0)
        while first < length:  # more than there is: what follows is written later
            for k in range(_BLOCK):
                dst[o + first + np.uint64(k)] = dst[o - back + first + np.uint64(k)]
            first += block
    elif back == np.uint64(1):
        value = dst[o - back]
        for k in range(length):
            dst[o + np.uint64(k)] = value
    else:
        for k in range(length):
            dst[o + np.uint64(k)] = dst[o - back + np.uint64(k)]


@compiled(_t.int64(_in8, _u8))
def lzf(src: Any, dst: Any) -> Any:
    """Decompress LZF.

    Args:
        src: uint8 (N,), the compressed bytes.
        dst: uint8 (M,), the result.

    Returns:
        How many bytes it is; -1 where ``src`` is damaged or is more than ``dst`` holds.
    """
    # Unsigned, as numba makes negative indices count from the end.
    one, n, m = np.uint64(1), np.uint64(src.size), np.uint64(dst.size)
    i: Any = np.uint64(0)
    o: Any = np.uint64(0)
    while i < n:
        count: Any = np.uint64(src[i])
        i += one
        if count < np.uint64(32):
            count += one
            if i + count > n or o + count > m:
                return -1
            copy_literals(src, i, dst, o, count)
            i += count
            o += count
            continue
        length = count >> np.uint64(5)
        if length == np.uint64(7):
            if i >= n:
                return -1
            length += np.uint64(src[i])
            i += one
        if i >= n:
            return -1
        back = ((count & np.uint64(0x1F)) << np.uint64(8)) + np.uint64(src[i]) + one
        i += one
        length += np.uint64(2)
        if back > o or o + length > m:
            return -1
        copy_back(dst, o, back, length)
        o += length
    return np.int64(o)


@compiled(_t.boolean(_t.Array(_t.uint64, 1, "C", readonly=True), _u8, _in64, _in64, _in64, _int))
def copy_runs(src_rows: Any, dst: Any, dst_rows: Any, src_runs: Any, dst_runs: Any, nbytes: int) -> bool:
    """Copy rows, each of which lies as runs of bytes in one of several memories and in another one.

    Args:
        src_rows: uint64 (rows,), the addresses at which they begin, for whose bounds the caller answers.
        dst: uint8 (M,), a batch.
        dst_rows: int64 (rows,), where they begin there.
        src_runs, dst_runs: int64 (runs,), where runs begin behind the beginnings of their rows.
        nbytes: length of a run.

    Returns:
        False, and nothing is copied, where that would be outside of the batch.
    """
    if not (dst_rows.size and dst_runs.size):
        return True
    last = dst_rows.max() + dst_runs.max() + nbytes
    if dst_rows.min() < 0 or dst_runs.min() < 0 or last > dst.size:
        return False
    base = np.uint64(dst.ctypes.data)
    for row in range(src_rows.size):
        for run in range(src_runs.size):
            to = base + np.uint64(dst_rows[row] + dst_runs[run])
            _memcpy(to, src_rows[row] + np.uint64(src_runs[run]), np.uint64(nbytes))
    return True


_pread = _t.ExternalFunction("pread", _t.intp(_t.int32, _t.voidptr, _t.uintp, _t.int64))


@compiled(_t.int64(_t.int32, _in64, _u8, _in64, _in64, _in64, _int, _int))
def read_runs(
    descriptor: int, firsts: Any, dst: Any, to: Any, in_src: Any, in_dst: Any, nbytes: int, begin: int
) -> Any:  # fmt: skip
    """Read samples from a file, each of the same runs of bytes.

    Args:
        descriptor: of the file.
        firsts: int64 (samples,), where they begin in it.
        dst: uint8 (N,), the memory.
        to: int64 (samples,), where they begin there.
        in_src: int64 (runs,), where a sample's runs begin behind its beginning in the file.
        in_dst: int64 (runs,), where they begin behind its beginning in the memory.
        nbytes: length of each run.
        begin: runs that are not to be read, of the first samples.

    Returns:
        How many runs are read, with those: fewer than all at an error or behind the file's end; -1, and
        nothing is read, where that would be outside of the memory.
    """
    runs = in_src.size
    if to.size and runs and (to.min() + in_dst.min() < 0 or to.max() + in_dst.max() + nbytes > dst.size):
        return -1
    for number in range(begin, firsts.size * runs):
        sample, run = number // runs, number % runs
        offset, place, done = firsts[sample] + in_src[run], to[sample] + in_dst[run], 0
        while done < nbytes:
            at = place + done
            count = _pread(descriptor, dst[at : at + 1].ctypes, nbytes - done, offset + done)
            if count <= 0:
                return number
            done += count
    return firsts.size * runs

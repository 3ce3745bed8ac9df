"""Many small chunks read and decoded by one call: in Python a chunk costs more than decoding 4 KiB."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.hdf5.kernels import (
    FLETCHER32,
    LZF,
    SHUFFLE,
    SUM_NBYTES,
    fletcher32,
    lzf,
    unshuffle_2,
    unshuffle_4,
    unshuffle_8,
    unshuffle_any,
)

__all__ = ["decode_many"]

_t = require("numba.types", extra="hdf5")
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_u8 = _t.uint8[::1]
_int = _t.int64

_pread = _t.ExternalFunction("pread", _t.intp(_t.int32, _t.uintp, _t.uintp, _t.int64))
_ir = require("llvmlite.ir", extra="hdf5")


@require("numba.extending", extra="hdf5").intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def _call(context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call the C function at an address, which takes six words and returns an ``int``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = _ir.IntType(_t.uintp.bitwidth)
        kind = _ir.FunctionType(_ir.IntType(32), [word] * 6)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return _t.int32(*[_t.uintp] * 7), generate


@compiled()
def _is_read(descriptor: Any, offset: Any, data: Any) -> Any:
    done = 0
    while done < data.size:
        to = np.uint64(data.ctypes.data) + np.uint64(done)
        count = _pread(descriptor, to, np.uint64(data.size - done), offset + done)
        if count <= 0:
            return False
        done += count
    return True


@compiled()
def _is_inflated(inflate: Any, decompressor: Any, src: Any, dst: Any, found: Any) -> Any:
    at, to = np.uint64(src.ctypes.data), np.uint64(dst.ctypes.data)
    n, m = np.uint64(src.size), np.uint64(dst.size)
    failed = _call(inflate, decompressor, at, n, to, m, np.uint64(found.ctypes.data))
    return failed == 0 and found[0] == dst.size


@compiled()
def _unshuffle(src: Any, dst: Any, size: Any) -> None:
    count = dst.size // size
    if size == 2:
        unshuffle_2(src, dst.view(np.uint16), count)
    elif size == 4:
        unshuffle_4(src, dst.view(np.uint32), count)
    elif size == 8:
        unshuffle_8(src, dst.view(np.uint64), count)
    else:
        unshuffle_any(src, dst, count, size)


@compiled()
def _is_right(data: Any) -> Any:
    """Whether data end in their checksum."""
    if data.size < SUM_NBYTES:
        return False
    end = data.size - SUM_NBYTES
    found = np.int64(data[end]) | np.int64(data[end + 1]) << 8
    found |= np.int64(data[end + 2]) << 16 | np.int64(data[end + 3]) << 24
    return fletcher32(data[:end]) == found


@compiled(_t.int64(_t.int32, _in64, _in64, _in64, _in64, _t.uintp, _t.uintp, _u8, _u8, _u8, _int, _int))
def decode_many(
    descriptor: int, offsets: Any, sizes: Any, codes: Any, values: Any, inflate: int, decompressor: int,
    stored: Any, spare: Any, out: Any, nbytes: int, step: int,
) -> Any:  # fmt: skip
    """Read chunks from a file and undo their filters.

    Args:
        descriptor: of the file.
        offsets, sizes: int64 (N,), where the chunks are and how many bytes.
        codes: int64 (F,), the filters in the order of reading: a checksum, if there is one, first;
            then at most two others.
        values: int64 (F,), of a shuffle the size of an element, which divides ``nbytes``.
        inflate: the address of ``libdeflate_zlib_decompress``.
        decompressor: the address of one of libdeflate's, for this call alone.
        stored: uint8 (M,), memory for what the file has of one chunk; one that is larger is not read.
        spare: uint8 (nbytes,), memory for what is between two filters.
        out: uint8 (N * step,), the chunks, each at a multiple of ``step``.
        nbytes: of a chunk, decoded.
        step: at least ``nbytes``.

    Returns:
        How many were decoded, before the first that is not as all should be.
    """
    found = np.empty(1, np.int64)
    for number in range(offsets.size):
        if sizes[number] > stored.size:
            return number
        src = stored[: sizes[number]]
        if not _is_read(descriptor, offsets[number], src):
            return number
        made = out[number * step : number * step + nbytes]
        for place in range(codes.size):
            code = codes[place]
            if code == FLETCHER32:
                if not _is_right(src):
                    return number
                src = src[: src.size - SUM_NBYTES]
                continue
            dst = made if place == codes.size - 1 else spare
            if code == SHUFFLE:
                if src.size != nbytes:
                    return number
                _unshuffle(src, dst, values[place])
            elif code == LZF:
                if lzf(src, dst) != nbytes:
                    return number
            elif not _is_inflated(inflate, decompressor, src, dst, found):
                return number
            src = dst
        if codes[codes.size - 1] == FLETCHER32:  # and nothing else
            if src.size != nbytes:
                return number
            made[:] = src
    return offsets.size

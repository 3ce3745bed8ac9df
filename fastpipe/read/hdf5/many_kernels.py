"""Chunks read and decoded by one call: in Python a chunk costs more than decoding 4 KiB, and after each call
a thread may have to wait for those that run Python."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.chunks.calls import call, is_read, little_endian, memory_at
from fastpipe.read.hdf5.kernels import (
    BITSHUFFLE,
    BLOSC,
    BLOSC2,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    SUM_NBYTES,
    ZSTD,
    copy_all,
    fletcher32,
    lzf,
    unshuffle,
)
from fastpipe.read.hdf5.plugin_kernels import (
    FINE,
    bitshuffle_chunk,
    blosc2_chunk,
    blosc_chunk,
    lz4_chunk,
    zstd_chunk,
)

__all__ = ["decode_many"]

_t = require("numba.types", extra="hdf5")
_in8 = _t.Array(_t.uint8, 1, "C", readonly=True)
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_in64_2 = _t.Array(_t.int64, 2, "C", readonly=True)
_word64 = _t.Array(_t.uint64, 1, "C", readonly=True)
_word64_2 = _t.Array(_t.uint64, 2, "C", readonly=True)
_u8 = _t.uint8[::1]
_int = _t.int64

_CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)
_clock_gettime = _t.ExternalFunction("clock_gettime", _t.int32(_t.int32, _t.uintp))


@compiled()
def _now(spec: Any) -> Any:
    """Nanoseconds; ``spec`` is memory of int64 (2,)."""
    _clock_gettime(np.int32(_CLOCK), np.uint64(spec.ctypes.data))
    return spec[0] * 1_000_000_000 + spec[1]


@compiled()
def _is_inflated(inflate: Any, decompressor: Any, src: Any, dst: Any) -> Any:
    found = np.empty(1, np.int64)
    at, to = np.uint64(src.ctypes.data), np.uint64(dst.ctypes.data)
    n, m = np.uint64(src.size), np.uint64(dst.size)
    failed = np.int32(call(inflate, decompressor, at, n, to, m, np.uint64(found.ctypes.data)))
    return failed == 0 and found[0] == dst.size


@compiled()
def _is_right(data: Any) -> Any:
    """Whether data end in their checksum."""
    if data.size < SUM_NBYTES:
        return False
    end = data.size - SUM_NBYTES
    return fletcher32(data[:end]) == little_endian(data, end)


@compiled(_t.boolean(_int, _in64, _word64, _t.uintp, _in8, _u8))
def _is_undone(code: Any, values: Any, functions: Any, context: Any, src: Any, dst: Any) -> Any:
    """Whether a filter that is no checksum could be undone, and filled the memory."""
    if code == SHUFFLE:
        if src.size != dst.size:
            return False
        unshuffle(src, dst, values[0])
        return True
    if code == LZF:
        return lzf(src, dst) == dst.size
    if code == DEFLATE:
        return _is_inflated(functions[0], context, src, dst)
    if code == LZ4:
        return lz4_chunk(src, dst) == FINE
    if code == ZSTD:
        return zstd_chunk(functions[0], context, src, dst) == FINE
    if code == BITSHUFFLE:
        found = bitshuffle_chunk(src, dst, values[0], values[1], values[2], functions[0], context)
        return found == FINE
    if code == BLOSC:
        return blosc_chunk(functions[0], src, dst) == FINE
    return code == BLOSC2 and blosc2_chunk(functions, src, dst) == FINE


@compiled(_t.int64(
    _t.int32, _in64, _in64, _in64, _in64_2, _word64_2, _word64, _u8, _u8, _word64, _int, _t.int64[::1],
))  # fmt: skip
def decode_many(
    descriptor: int, offsets: Any, sizes: Any, codes: Any, values: Any, functions: Any, contexts: Any,
    stored: Any, spare: Any, outs: Any, nbytes: int, reading: Any,
) -> Any:  # fmt: skip
    """Read chunks from a file and undo their filters.

    Args:
        descriptor: of the file.
        offsets, sizes: int64 (N,), where the chunks are and how many bytes.
        codes: int64 (F,), the filters in the order of reading: a checksum, if there is one, first;
            then at most two others.
        values: int64 (F, 3), of a shuffle the size of an element; of a bitshuffle that, how it compresses,
            and the elements of a block where it does not.
        functions: uint64 (F, 6), the addresses of the functions that undo them: of
            ``libdeflate_zlib_decompress``, of ``ZSTD_decompressDCtx`` also for a bitshuffle, of
            ``blosc_decompress_ctx``, and those that ``blosc2_chunk`` takes.
        contexts: uint64 (F,), the addresses of libdeflate's decompressor or zstd's context, for this call
            alone.
        stored: uint8 (M,), memory for what the file has of one chunk; one that is larger is not read.
        spare: uint8 (nbytes,), memory for what is between two filters.
        outs: uint64 (N,), the addresses of memory for the chunks, aligned to 8, for which the caller answers.
        nbytes: of a chunk, decoded.
        reading: int64 (1,), to which the nanoseconds are added that reading took.

    Returns:
        How many were decoded, before the first that is not as all should be.
    """
    spec = np.zeros(2, np.int64)
    for number in range(offsets.size):
        if sizes[number] > stored.size:
            return number
        src = stored[: sizes[number]]
        begun = _now(spec)
        if not is_read(descriptor, offsets[number], src):
            return number
        reading[0] += _now(spec) - begun
        made = memory_at(outs[number], nbytes)
        for place in range(codes.size):
            if codes[place] == FLETCHER32:
                if not _is_right(src):
                    return number
                src = src[: src.size - SUM_NBYTES]
                continue
            dst = made if place == codes.size - 1 else spare
            if not _is_undone(codes[place], values[place], functions[place], contexts[place], src, dst):
                return number
            src = dst
        if codes[codes.size - 1] == FLETCHER32:  # and nothing else
            if src.size != nbytes:
                return number
            copy_all(src, made)
    return offsets.size

"""Parts of a Blosc buffer in a file, read and decompressed by one call.

In Python each read, and each block that is decompressed, gives up the GIL and has to get it back, which takes
a thread longer than the read itself while others run Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.read.chunks.calls import call, is_read, little_endian, memory_at

__all__ = ["HEADER_NBYTES", "IS_COPIED", "UNUSUAL", "blosc_parts"]

UNUSUAL = -1  # in the place of a number of bytes: to be done, or refused, in Python

_t = require("numba.types", extra="volume")
_int = _t.int64
_in64 = _t.Array(_t.int64, 1, "C", readonly=True)
_inu64 = _t.Array(_t.uint64, 1, "C", readonly=True)

HEADER_NBYTES = 16
IS_COPIED = 0x2  # the content as it is


@compiled()
def _is_usual(stored: Any, nbytes: Any, begins: Any, lengths: Any, itemsize: Any, block: Any) -> Any:
    """Whether a header is that of the content, and the parts are whole elements in it."""
    if little_endian(stored, 4) != nbytes or little_endian(stored, 12) != stored.size:
        return False
    if stored[2] & IS_COPIED and stored.size != HEADER_NBYTES + nbytes:
        return False
    if itemsize == 0 or not 0 < block <= nbytes:
        return False
    for part in range(begins.size):
        begin, length = begins[part], lengths[part]
        if begin % itemsize or length % itemsize or begin < 0 or begin + length > nbytes:
            return False
    return True


@compiled()
def _are_copied(descriptor: Any, begins: Any, lengths: Any, tos: Any) -> Any:
    """Whether all parts of a content that is in the file as it is could be read."""
    for part in range(begins.size):
        if not is_read(descriptor, HEADER_NBYTES + begins[part], memory_at(tos[part], lengths[part])):
            return False
    return True


@compiled()
def _blocks_are_read(descriptor: Any, stored: Any, nbytes: Any, block: Any, begins: Any, lengths: Any) -> Any:
    """Whether there were, for all parts, the blocks that they need."""
    blocks = (nbytes + block - 1) // block
    table = HEADER_NBYTES + 4 * blocks
    if table > stored.size or not is_read(descriptor, HEADER_NBYTES, stored[HEADER_NBYTES:table]):
        return False
    starts = np.empty(blocks, np.int64)
    for number in range(blocks):
        starts[number] = little_endian(stored, HEADER_NBYTES + 4 * number)
        if not table <= starts[number] < stored.size:
            return False
    wanted = np.zeros(blocks, np.bool_)
    for part in range(begins.size):
        for number in range(begins[part] // block, (begins[part] + lengths[part] + block - 1) // block):
            wanted[number] = True
    # Threads of the compressor put blocks into any order; each ends where another begins.
    order = np.argsort(starts)
    low = np.int64(-1)
    for place in range(1, blocks):
        if starts[order[place]] == starts[order[place - 1]]:
            return False
    for place in range(blocks):
        if not wanted[order[place]]:
            continue
        if low < 0:
            low = starts[order[place]]
        is_last = place + 1 == blocks
        high = np.int64(stored.size) if is_last else starts[order[place + 1]]
        if is_last or not wanted[order[place + 1]]:
            if not is_read(descriptor, low, stored[low:high]):
                return False
            low = np.int64(-1)
    return True


@compiled(_int(_int, _int, _in64, _in64, _inu64, _t.uint8[::1], _t.uintp, _t.uintp))
def blosc_parts(
    descriptor: int, nbytes: int, begins: Any, lengths: Any, tos: Any, stored: Any, getitem: Any, whole: Any
) -> Any:
    """Read and decompress parts of the buffer that a file is.

    Args:
        descriptor: of the file.
        nbytes: of the content.
        begins, lengths: int64 (N,): where in the content the parts begin, and their bytes.
        tos: uint64 (N,): where each is to begin in memory.
        stored: uint8 (M,): memory for the buffer, of the file's size.
        getitem, whole: where ``blosc_getitem`` and ``blosc_decompress_ctx`` are.

    Returns:
        How many bytes were decompressed, or ``UNUSUAL``.
    """
    if stored.size < HEADER_NBYTES or not is_read(descriptor, 0, stored[:HEADER_NBYTES]):
        return UNUSUAL
    itemsize, block = np.int64(stored[3]), little_endian(stored, 8)
    if not _is_usual(stored, nbytes, begins, lengths, itemsize, block):
        return UNUSUAL
    if stored[2] & IS_COPIED:
        return lengths.sum() if _are_copied(descriptor, begins, lengths, tos) else UNUSUAL
    if lengths.sum() == nbytes:
        if not is_read(descriptor, HEADER_NBYTES, stored[HEADER_NBYTES:]):
            return UNUSUAL
    elif not _blocks_are_read(descriptor, stored, nbytes, block, begins, lengths):
        return UNUSUAL
    source, none, done = np.uint64(stored.ctypes.data), np.uint64(0), np.int64(0)
    if begins.size == 1 and lengths[0] == nbytes:
        made = call(whole, source, tos[0], np.uint64(nbytes), np.uint64(1), none, none)
        return nbytes if np.int32(made) == nbytes else UNUSUAL
    for part in range(begins.size):
        begin, length = begins[part], lengths[part]
        first, count = np.uint64(begin // itemsize), np.uint64(length // itemsize)
        made = call(getitem, source, first, count, tos[part], none, none)
        if np.int32(made) != length:
            return UNUSUAL
        low, high = begin // block, (begin + length + block - 1) // block
        done += min(high * block, nbytes) - low * block
    return done

"""HDF5's filters, as the native core takes them; and undone one by one, to say what is wrong with a chunk."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.chunks import ChunkError, problem_text
from fastpipe.core.native import native

__all__ = ["BLOSC2", "FilterStep", "decode_chunk", "described", "why_not"]

UInt8Array = npt.NDArray[np.uint8]

# Numbers of filters: the HDF5 library's H5Zpublic.h, and The HDF Group's list of registered ones.
_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_BLOSC, _LZ4, _BITSHUFFLE, _ZSTD, BLOSC2 = 32001, 32004, 32008, 32015, 32026
_NAMES = {
    _DEFLATE: "gzip", _SHUFFLE: "shuffle", _FLETCHER32: "fletcher32", 4: "szip", 5: "nbit", 6: "scale-offset",
    _LZF: "lzf", _BLOSC: "blosc", _LZ4: "lz4", _BITSHUFFLE: "bitshuffle", _ZSTD: "zstd", BLOSC2: "blosc2",
}  # fmt: skip
_KNOWN = {_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF, _BLOSC, _LZ4, _BITSHUFFLE, _ZSTD, BLOSC2}
_KEEP_SIZE = {_SHUFFLE, _FLETCHER32}
_SUM_NBYTES = 4  # that Fletcher32 appends

# Bitshuffle's block without a parameter: so many bytes, in groups of 8 elements, and at least 128 elements.
_BLOCK_NBYTES, _BLOCK_LEAST = 8192, 128
_BITSHUFFLE_CODECS = (0, 2, 3)  # none, LZ4, zstd
# Which of Blosc's parameters says its codec; and blosclz, lz4, lz4hc, zlib and zstd, without snappy.
_BLOSC_CODEC, _BLOSC_CODECS = 6, (0, 1, 2, 4, 5)


class FilterStep(NamedTuple):
    """One filter of a dataset.

    Attributes:
        code: its number.
        values: its parameters, as the file has them.
        name: as the file has it.
    """

    code: int
    values: tuple[int, ...]
    name: str


def why_not(filters: Sequence[FilterStep], *, has_blosc2: bool) -> str:
    """Why the HDF5 library is needed for these filters, in words; empty if it is not."""
    for step in filters:
        if not _is_known(step, has_blosc2):
            name = _NAMES.get(step.code) if step.code in (4, 5, 6) else step.name
            return f"its filter {name or step.code} is known to the library only"
        if step.code == _SHUFFLE and (len(step.values) != 1 or not 0 < step.values[0] < 1 << 31):
            return "its filter shuffle does not have the size of an element"
    if sum(step.code not in _KEEP_SIZE for step in filters) > 1:
        return "it is compressed twice"
    return ""


def _is_known(step: FilterStep, has_blosc2: bool) -> bool:
    if step.code == _BITSHUFFLE:
        return described(step)[2] in _BITSHUFFLE_CODECS
    if step.code == _BLOSC:
        return len(step.values) <= _BLOSC_CODEC or step.values[_BLOSC_CODEC] in _BLOSC_CODECS
    return step.code in _KNOWN and (step.code != BLOSC2 or has_blosc2)


def described(step: FilterStep) -> tuple[int, int, int, int]:
    """A filter as the native core takes it.

    Returns:
        Its number; bytes of an element, of a shuffle or bitshuffle; how a bitshuffle compresses, and the
        elements of its blocks where it does not.
    """
    # The core refuses what it cannot be: no element has 0 bytes, and no codec is -1.
    values = tuple(value if value < 1 << 31 else -1 for value in step.values)
    if step.code == _SHUFFLE:
        return step.code, values[0] if values else 0, 0, 0
    if step.code != _BITSHUFFLE:
        return step.code, 1, 0, 0
    element = values[2] if len(values) > 2 else 1
    codec = values[4] if len(values) > 4 else 0
    asked = values[3] if len(values) > 3 else 0
    return step.code, element, codec, asked or max(_BLOCK_NBYTES // max(element, 1) // 8 * 8, _BLOCK_LEAST)


def decode_chunk(stored: bytes, filters: Sequence[FilterStep], mask: int, nbytes: int) -> UInt8Array:
    """Undo the filters of a chunk, one after the other.

    Args:
        stored: what the file has.
        filters: the dataset's, in the order of writing.
        mask: bit i says that filter i was left out for this chunk.
        nbytes: of the chunk without filters, which is also the most that this makes of it.

    Raises:
        ChunkError: they do not fit, a checksum is wrong, or the bytes are more or fewer than said.
    """
    steps = [step for number, step in enumerate(filters) if not mask >> number & 1]
    data = stored
    for number in reversed(range(len(steps))):
        step = steps[number]
        # Sums that were appended before this filter was applied.
        sums = _SUM_NBYTES * sum(earlier.code == _FLETCHER32 for earlier in steps[:number])
        if step.code == _FLETCHER32:
            size = len(data) - _SUM_NBYTES
            if size < 0:
                raise ChunkError("fletcher32: there is no checksum")
        else:
            size = len(data) if step.code == _SHUFFLE else nbytes + sums
        data = _undone(step, data, size)
    if len(data) != nbytes:
        raise ChunkError(f"{len(data)} bytes where {nbytes} were expected")
    return np.frombuffer(data, np.uint8)


def _undone(step: FilterStep, data: bytes, nbytes: int) -> bytes:
    made = native.undo_filter(described(step), data, nbytes)
    if not isinstance(made, int):
        return bytes(made.data)
    if step.code == _DEFLATE:
        return _inflated(data, nbytes)
    raise ChunkError(f"{_NAMES[step.code]}: {problem_text(made, nbytes)}")


def _inflated(data: bytes, nbytes: int) -> bytes:
    """The same by zlib, for the reason why it fails, and to bear what that bears."""
    stream = zlib.decompressobj()
    try:
        made = stream.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise ChunkError(f"gzip: {error}") from None
    if len(made) > nbytes:
        raise ChunkError(f"gzip: it inflates to more than the {nbytes} bytes that it should have")
    if not stream.eof:
        raise ChunkError("gzip: its data end too early")
    if len(made) < nbytes:
        raise ChunkError(f"gzip: {len(made)} bytes where {nbytes} were expected")
    return made

"""Describe HDF5's filters in words and for the native core, and undo them one by one for precise errors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError, chunk_error

UInt8Array = npt.NDArray[np.uint8]

# The numbers of filters are those in the HDF5 library's H5Zpublic.h and in The HDF Group's list of filters.
DEFLATE, SHUFFLE, FLETCHER32, _SZIP, _NBIT, _SCALE_OFFSET, LZF = 1, 2, 3, 4, 5, 6, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32001, 32004, 32008, 32015, 32026
_NAMES = {
    DEFLATE: "gzip", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", _SZIP: "szip", _NBIT: "nbit",
    _SCALE_OFFSET: "scale-offset", LZF: "lzf", BLOSC: "blosc", LZ4: "lz4", BITSHUFFLE: "bitshuffle",
    ZSTD: "zstd", 307: "bzip2", 32013: "zfp", 32017: "sz", 32018: "fcidecomp", 32024: "sz3",
    BLOSC2: "blosc2", 32028: "sperr", 32033: "htj2k",
}  # fmt: skip
OF_HDF5PLUGIN = set(_NAMES) - {DEFLATE, SHUFFLE, FLETCHER32, _SZIP, _NBIT, _SCALE_OFFSET, LZF}
_KNOWN = {DEFLATE, SHUFFLE, FLETCHER32, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2}
_LOSSY = {32013, 32017, 32018, 32024, 32028, 32033}
_FLOATS = 1  # HDF5's number for the class of floating-point types
_KEEP_SIZE = {SHUFFLE, FLETCHER32}
_SUM_NBYTES = 4  # bytes that Fletcher32 appends

# Without a parameter for its block size, bitshuffle's blocks have 8192 bytes, rounded down to a multiple of 8
# elements, and at least 128 elements.
_BLOCK_NBYTES, _BLOCK_LEAST = 8192, 128
_BITSHUFFLE_CODECS = {0: "", 2: " with lz4", 3: " with zstd"}
_BLOSC_CODEC = 6  # index of Blosc's parameter for its codec
_BLOSC_NAMES = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
_BLOSC_SHUFFLES = ("", ", its shuffle", ", its bitshuffle")
# The native core does not support Snappy.
BLOSC_CODECS = {name: number for number, name in enumerate(_BLOSC_NAMES) if name != "snappy"}


class FilterStep(NamedTuple):
    """One filter of a dataset: the filter's number, its parameters and its name, as stored in the file."""

    code: int
    values: tuple[int, ...]
    name: str


def why_not(filters: Sequence[FilterStep], *, has_blosc2: bool) -> str:
    """Return why these filters require the HDF5 library, or an empty text if fastpipe can undo them."""
    for step in filters:
        if not _is_known(step, has_blosc2):
            name = _NAMES.get(step.code) if step.code in (_SZIP, _NBIT, _SCALE_OFFSET) else step.name
            return f"its filter {name or step.code} is known to the library only"
        if step.code == SHUFFLE and (len(step.values) != 1 or not 0 < step.values[0] < 1 << 31):
            return "its filter shuffle does not have the size of an element"
    if sum(step.code not in _KEEP_SIZE for step in filters) > 1:
        return "it is compressed twice"
    return ""


def _is_known(step: FilterStep, has_blosc2: bool) -> bool:
    if step.code == BITSHUFFLE:
        return described(step)[2] in _BITSHUFFLE_CODECS
    if step.code == BLOSC:
        return len(step.values) <= _BLOSC_CODEC or step.values[_BLOSC_CODEC] in BLOSC_CODECS.values()
    return step.code in _KNOWN and (step.code != BLOSC2 or has_blosc2)


def in_words(step: FilterStep) -> str:
    """Return a filter's name with its important parameters.

    >>> in_words(FilterStep(1, (4,), "deflate")), in_words(FilterStep(32001, (2, 2, 4, 8, 5, 1, 1), ""))
    ('gzip 4', 'blosc lz4 5, its shuffle')
    """
    values = step.values
    name = _NAMES.get(step.code) or step.name or f"filter {step.code}"
    if step.code in (DEFLATE, ZSTD) and values:
        return f"{name} {values[0]}"
    if step.code == BLOSC and len(values) > 4:
        codec = values[_BLOSC_CODEC] if len(values) > _BLOSC_CODEC else 0
        codec_name = _BLOSC_NAMES[codec] if codec < len(_BLOSC_NAMES) else f"codec {codec}"
        shuffle = values[5] if len(values) > 5 else 0
        return f"{name} {codec_name} {values[4]}{_BLOSC_SHUFFLES[min(shuffle, 2)]}"
    if step.code == BITSHUFFLE:
        return name + _BITSHUFFLE_CODECS.get(values[4] if len(values) > 4 else 0, "")
    return name


def may_lose(steps: Iterable[FilterStep], type_class: int) -> FilterStep | None:
    """Return the first filter that may round values of HDF5's ``type_class``; None if no filter does."""
    for step in steps:
        if step.code in _LOSSY or (step.code == _SCALE_OFFSET and type_class == _FLOATS):
            return step
    return None


def described(step: FilterStep) -> tuple[int, int, int, int]:
    """Return a filter in the native core's form, ``(number, element, codec, block)``.

    ``element`` is the element size in bytes, for shuffle and bitshuffle.  ``codec`` and ``block`` are
    bitshuffle's compression codec and its number of elements in a block.
    """
    # The native core rejects an element size of 0 and a codec of -1.
    values = tuple(value if value < 1 << 31 else -1 for value in step.values)
    if step.code == SHUFFLE:
        return step.code, values[0] if values else 0, 0, 0
    if step.code != BITSHUFFLE:
        return step.code, 1, 0, 0
    element = values[2] if len(values) > 2 else 1
    codec = values[4] if len(values) > 4 else 0
    asked = values[3] if len(values) > 3 else 0
    return step.code, element, codec, asked or max(_BLOCK_NBYTES // max(element, 1) // 8 * 8, _BLOCK_LEAST)


def decode_chunk(stored: bytes, filters: Sequence[FilterStep], mask: int, nbytes: int) -> UInt8Array:
    """Undo the filters of a chunk one after the other: uint8 (nbytes,).

    If bit i of ``mask`` is set, this chunk was written without filter i.  Filters are numbered in the order
    of writing.  Raises a ``ChunkError`` if the decoded chunk does not have ``nbytes`` bytes.
    """
    steps = [step for number, step in enumerate(filters) if not mask >> number & 1]
    data = stored
    for number in reversed(range(len(steps))):
        step = steps[number]
        # The bytes of checksums that were appended before this filter was applied.
        sums = _SUM_NBYTES * sum(earlier.code == FLETCHER32 for earlier in steps[:number])
        if step.code == FLETCHER32:
            size = len(data) - _SUM_NBYTES
            if size < 0:
                raise ChunkError("fletcher32: there is no checksum")
        else:
            size = len(data) if step.code == SHUFFLE else nbytes + sums
        data = _undone(step, data, size)
    if len(data) != nbytes:
        raise ChunkError(f"{len(data)} bytes where {nbytes} were expected")
    return np.frombuffer(data, np.uint8)


def _undone(step: FilterStep, data: bytes, nbytes: int) -> bytes:
    made = native.undo_filter(described(step), data, nbytes)
    if not isinstance(made, int):
        return bytes(made.data)
    if step.code == DEFLATE:
        return _inflated(data, nbytes)
    raise chunk_error(_NAMES[step.code], made, nbytes)


def _inflated(data: bytes, nbytes: int) -> bytes:
    """Inflate with zlib, which tolerates more than the native core and reports precise errors."""
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

"""HDF5's filters, undone outside of the HDF5 library, whose lock lets one thread decode at a time.

Numbers of filters: the HDF5 library's H5Zpublic.h, and The HDF Group's list of registered ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.read.hdf5 import kernels
from fastpipe.read.hdf5.errors import ChunkError
from fastpipe.read.hdf5.plugins import PLUGINS

__all__ = ["FilterStep", "decode_chunk", "why_not"]

UInt8Array = npt.NDArray[np.uint8]

_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_SUM = 4  # bytes that Fletcher32 appends
_KEEP_SIZE = {_SHUFFLE, _FLETCHER32}
_NAMES = {4: "szip", 5: "nbit", 6: "scale-offset"}


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


def why_not(filters: Sequence[FilterStep]) -> str:
    """Why the HDF5 library is needed for these filters, in words; empty if it is not."""
    for step in filters:
        if step.code not in _UNDO:
            return (
                f"its filter {_NAMES.get(step.code) or step.name or step.code} is known to the library only"
            )
    if sum(step.code not in _KEEP_SIZE for step in filters) > 1:
        return "it is compressed twice"
    return ""


def decode_chunk(stored: UInt8Array, filters: Sequence[FilterStep], mask: int, nbytes: int) -> UInt8Array:
    """Undo the filters of a chunk.

    Args:
        stored: uint8 (N,), what the file has.
        filters: the dataset's, in the order of writing.
        mask: bit i says that filter i was left out for this chunk.
        nbytes: of the chunk without filters, which is also the most that this will make of it.

    Returns:
        uint8 (nbytes,).

    Raises:
        ChunkError: they do not fit, a checksum is wrong, or the bytes are more or fewer than said.
    """
    steps = [step for number, step in enumerate(filters) if not mask >> number & 1]
    data = stored
    for number in reversed(range(len(steps))):
        step = steps[number]
        # Sums that were appended before this filter was applied.
        size = nbytes + _SUM * sum(earlier.code == _FLETCHER32 for earlier in steps[:number])
        data = _UNDO[step.code](data, step.values, size)
    if len(data) != nbytes:
        raise ChunkError(f"{len(data)} bytes where {nbytes} were expected")
    return data


def _inflate(data: UInt8Array, values: Sequence[int], size: int) -> UInt8Array:
    deflate = require("deflate", extra="hdf5")
    try:
        return np.frombuffer(deflate.zlib_decompress(data, size), np.uint8)
    except deflate.DeflateError:
        pass
    # For the reason, and to bear what zlib bears.
    stream = zlib.decompressobj()
    try:
        made = stream.decompress(data.tobytes(), size + 1)
    except zlib.error as error:
        raise ChunkError(f"gzip: {error}") from None
    if len(made) > size:
        raise ChunkError(f"gzip: it inflates to more than the {size} bytes that it should have")
    if not stream.eof:
        raise ChunkError("gzip: its data end too early")
    return np.frombuffer(made, np.uint8)


def _unshuffled(data: UInt8Array, values: Sequence[int], size: int) -> UInt8Array:
    element = values[0] if values else 1
    if element <= 1:
        return data
    made = np.empty(len(data), np.uint8)
    kernels.unshuffle(data, made, element)
    return made


def _summed(data: UInt8Array, values: Sequence[int], size: int) -> UInt8Array:
    if len(data) < _SUM:
        raise ChunkError("fletcher32: there is no checksum")
    body, found = data[:-_SUM], int.from_bytes(data[-_SUM:].tobytes(), "little")
    expected = kernels.fletcher32(body)
    # Releases before 1.6.3 wrote the halves' bytes in the other order on some machines.
    swapped = (expected & 0x00FF00FF) << 8 | (expected >> 8) & 0x00FF00FF
    if found not in (expected, swapped):
        raise ChunkError("fletcher32: the checksum is not that of the data")
    return body


def _from_lzf(data: UInt8Array, values: Sequence[int], size: int) -> UInt8Array:
    made = np.empty(size, np.uint8)
    if (found := kernels.lzf(data, made)) != size:
        problem = "damaged data, or more of them" if found < 0 else f"{found} bytes"
        raise ChunkError(f"lzf: {problem} where {size} bytes were expected")
    return made


_UNDO: dict[int, Callable[[UInt8Array, Sequence[int], int], UInt8Array]] = {
    _DEFLATE: _inflate,
    _SHUFFLE: _unshuffled,
    _FLETCHER32: _summed,
    _LZF: _from_lzf,
    **PLUGINS,
}

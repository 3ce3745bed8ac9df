"""HDF5's filters, undone outside of the HDF5 library, whose lock lets one thread decode at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.inflate import inflate
from fastpipe.read.chunks.scratch import STEPS, scratch
from fastpipe.read.hdf5 import kernels
from fastpipe.read.hdf5.plugins import PLUGINS, is_missing

__all__ = ["FilterStep", "decode_chunk", "why_not"]

UInt8Array = npt.NDArray[np.uint8]

_KEEP_SIZE = {kernels.SHUFFLE, kernels.FLETCHER32}
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
        is_known = step.code in _UNDO or step.code == kernels.FLETCHER32
        if not is_known or is_missing(step.code, step.values):
            return (
                f"its filter {_NAMES.get(step.code) or step.name or step.code} is known to the library only"
            )
        if step.code == kernels.SHUFFLE and (len(step.values) != 1 or not step.values[0]):
            return "its filter shuffle does not have the size of an element"
    if sum(step.code not in _KEEP_SIZE for step in filters) > 1:
        return "it is compressed twice"
    return ""


def decode_chunk(stored: UInt8Array, filters: Sequence[FilterStep], mask: int, out: UInt8Array) -> None:
    """Undo the filters of a chunk.

    Args:
        stored: uint8 (N,), what the file has.
        filters: the dataset's, in the order of writing.
        mask: bit i says that filter i was left out for this chunk.
        out: uint8 (M,), of the chunk's size without filters, which is also the most that this makes of it;
            its memory aligned to 8.

    Raises:
        ChunkError: they do not fit, a checksum is wrong, or the bytes are more or fewer than said.
    """
    steps = [step for number, step in enumerate(filters) if not mask >> number & 1]
    data, buffers = stored, itertools.cycle(STEPS)
    for number in reversed(range(len(steps))):
        step = steps[number]
        if step.code == kernels.FLETCHER32:
            data = _summed(data)
            continue
        if step.code == kernels.SHUFFLE and step.values[0] == 1:
            continue
        # Sums that were appended before this filter was applied.
        size = len(out) + kernels.SUM_NBYTES * sum(
            earlier.code == kernels.FLETCHER32 for earlier in steps[:number]
        )
        if step.code == kernels.SHUFFLE:
            size = len(data)
        is_last = size == len(out) and all(earlier.code == kernels.FLETCHER32 for earlier in steps[:number])
        made = out if is_last else scratch(next(buffers), size)
        _UNDO[step.code](data, step.values, made)
        data = made
    if data is out:
        return
    if len(data) != len(out):
        raise ChunkError(f"{len(data)} bytes where {len(out)} were expected")
    out[:] = data


def _deflated(data: UInt8Array, values: Sequence[int], made: UInt8Array) -> None:
    inflate(data, made)


def _shuffled(data: UInt8Array, values: Sequence[int], made: UInt8Array) -> None:
    kernels.unshuffle(data, made, values[0])


def _summed(data: UInt8Array) -> UInt8Array:
    """The data before their checksum, which is compared."""
    if len(data) < kernels.SUM_NBYTES:
        raise ChunkError("fletcher32: there is no checksum")
    body, found = data[: -kernels.SUM_NBYTES], int.from_bytes(data[-kernels.SUM_NBYTES :].tobytes(), "little")
    expected = kernels.fletcher32(body)
    # Releases before 1.6.3 wrote the halves' bytes in the other order on some machines.
    swapped = (expected & 0x00FF00FF) << 8 | (expected >> 8) & 0x00FF00FF
    if found not in (expected, swapped):
        raise ChunkError("fletcher32: the checksum is not that of the data")
    return body


def _unlzf(data: UInt8Array, values: Sequence[int], made: UInt8Array) -> None:
    if (found := kernels.lzf(data, made)) != len(made):
        problem = "damaged data, or more of them" if found < 0 else f"{found} bytes"
        raise ChunkError(f"lzf: {problem} where {len(made)} bytes were expected")


_UNDO: dict[int, Callable[[UInt8Array, Sequence[int], UInt8Array], None]] = {
    kernels.DEFLATE: _deflated,
    kernels.SHUFFLE: _shuffled,
    kernels.LZF: _unlzf,
    **PLUGINS,
}

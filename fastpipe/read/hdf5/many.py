"""Small chunks, decoded many at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.read.hdf5.filters import FilterStep
from fastpipe.read.hdf5.inflate import decompressor, zlib_decompress
from fastpipe.read.hdf5.kernels import DEFLATE, FLETCHER32, LZF, SHUFFLE
from fastpipe.read.hdf5.many_kernels import decode_many
from fastpipe.read.hdf5.scratch import STEPS, STORED, scratch

__all__ = ["ManyDecoder", "many_decoder"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_SMALL = 1 << 16  # bytes of a chunk, beyond which Python does not matter beside decoding
_ALIGNMENT = 8
_MORE = 1 << 12  # bytes by which what is stored may exceed what it is made of


class ManyDecoder:
    """Reads chunks of one kind from a file and decodes them.  For threads at once.

    Args:
        codes, values: the filters, as ``decode_many`` takes them.
        nbytes: of a chunk, decoded.

    Attributes:
        step: bytes from one chunk to the next.
    """

    def __init__(self, codes: Sequence[int], values: Sequence[int], nbytes: int) -> None:
        self._codes, self._values = np.array(codes, np.int64), np.array(values, np.int64)
        self._nbytes = nbytes
        self._inflate = zlib_decompress() if DEFLATE in codes else 0
        self.step = -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def __call__(self, descriptor: int, offsets: Int64Array, sizes: Int64Array, out: UInt8Array) -> int:
        """Decode some.

        Args:
            descriptor: of the file.
            offsets, sizes: int64 (N,), where they are.
            out: uint8 (N * step,).

        Returns:
            How many were decoded, before the first that is to be looked at alone.
        """
        own = decompressor() if self._inflate else 0
        stored, spare = scratch(STORED, 2 * self._nbytes + _MORE), scratch(STEPS[0], self._nbytes)
        done: int = decode_many(
            descriptor, offsets, sizes, self._codes, self._values, self._inflate, own, stored, spare, out,
            self._nbytes, self.step,
        )  # fmt: skip
        return done


def many_decoder(filters: Sequence[FilterStep], nbytes: int) -> ManyDecoder | None:
    """What decodes chunks with these filters many at a time; None where they are better decoded one by one.

    Args:
        filters: the dataset's, in the order of writing.
        nbytes: of a chunk, decoded.
    """
    if not 0 < nbytes <= _SMALL:
        return None
    codes: list[int] = []
    values: list[int] = []
    for step in reversed(filters):
        value = step.values[0] if step.values else 0
        if step.code == SHUFFLE and value <= 1:
            continue
        if step.code == SHUFFLE and nbytes % value:
            return None
        if step.code == FLETCHER32 and codes:
            return None
        if step.code not in (DEFLATE, LZF, SHUFFLE, FLETCHER32):
            return None
        if step.code == DEFLATE and not zlib_decompress():
            return None
        codes.append(step.code)
        values.append(value)
    transforms = len(codes) - codes.count(FLETCHER32)
    return ManyDecoder(codes, values, nbytes) if codes and transforms <= 2 else None

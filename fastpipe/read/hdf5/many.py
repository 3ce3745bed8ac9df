"""Chunks, read and decoded many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.read.chunks.inflate import decompressor, zlib_decompress
from fastpipe.read.chunks.scratch import STEPS, STORED, scratch
from fastpipe.read.hdf5.blosc2 import blosc2_functions
from fastpipe.read.hdf5.filters import FilterStep
from fastpipe.read.hdf5.kernels import BITSHUFFLE, BLOSC, BLOSC2, DEFLATE, FLETCHER32, LZ4, LZF, SHUFFLE, ZSTD
from fastpipe.read.hdf5.many_kernels import decode_many
from fastpipe.read.hdf5.plugin_kernels import PLAIN, WITH_LZ4, WITH_ZSTD
from fastpipe.read.hdf5.plugins import bitshuffle_values, blosc_decompress, zstd_context, zstd_decompress

__all__ = ["ManyDecoder", "many_decoder"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_MORE = 1 << 12  # bytes by which what is stored may exceed what it is made of
_VALUES, _FUNCTIONS = 3, 6


class _Step(NamedTuple):
    """A filter, as ``decode_many`` takes it."""

    code: int
    values: tuple[int, ...] = ()
    functions: tuple[int, ...] = ()
    context: Callable[[], int] | None = None


class ManyDecoder:
    """Reads chunks of one kind from a file and decodes them.  For threads at once.

    Args:
        steps: the filters, in the order of reading.
        nbytes: of a chunk, decoded.
    """

    def __init__(self, steps: Sequence[_Step], nbytes: int) -> None:
        self._codes = np.array([step.code for step in steps], np.int64)
        self._values = np.zeros((len(steps), _VALUES), np.int64)
        self._functions = np.zeros((len(steps), _FUNCTIONS), np.uint64)
        for number, step in enumerate(steps):
            self._values[number, : len(step.values)] = step.values
            self._functions[number, : len(step.functions)] = step.functions
        self._contexts = [step.context for step in steps]
        self._has_between = sum(step.code != FLETCHER32 for step in steps) > 1
        self._nbytes = nbytes

    def __call__(
        self, descriptor: int, offsets: Int64Array, sizes: Int64Array, outs: npt.NDArray[np.uint64]
    ) -> tuple[int, int]:
        """Decode some.

        Args:
            descriptor: of the file.
            offsets, sizes: int64 (N,), where they are.
            outs: uint64 (N,), the addresses of their memory, each of their size and aligned to 8.

        Returns:
            How many were decoded, before the first that is to be looked at alone; and the nanoseconds that
            reading took.
        """
        own = np.array([0 if context is None else context() for context in self._contexts], np.uint64)
        most = min(int(sizes.max(initial=0)), 2 * self._nbytes + _MORE)
        spare = scratch(STEPS[0], self._nbytes if self._has_between else 0)
        reading = np.zeros(1, np.int64)
        done = decode_many(
            descriptor, offsets, sizes, self._codes, self._values, self._functions, own,
            scratch(STORED, most), spare, outs, self._nbytes, reading,
        )  # fmt: skip
        return int(done), int(reading[0])


def many_decoder(filters: Sequence[FilterStep], nbytes: int) -> ManyDecoder | None:
    """What decodes chunks with these filters by one call; None where that is left to several.

    Args:
        filters: the dataset's, in the order of writing.
        nbytes: of a chunk, decoded.
    """
    if not nbytes:
        return None
    steps: list[_Step] = []
    for one in reversed(filters):
        if one.code == SHUFFLE and (not one.values or one.values[0] <= 1):
            continue
        step = _step(one, nbytes)
        if step is None or (step.code == FLETCHER32 and steps):
            return None
        steps.append(step)
    transforms = sum(step.code != FLETCHER32 for step in steps)
    return ManyDecoder(steps, nbytes) if steps and transforms <= 2 else None


def _step(one: FilterStep, nbytes: int) -> _Step | None:
    """A filter for the kernel; None for one that it does not undo."""
    code = one.code
    if code == SHUFFLE:
        return _Step(code, (one.values[0],))
    if code == DEFLATE and (function := zlib_decompress()):
        return _Step(code, functions=(function,), context=decompressor)
    if code == ZSTD and (function := zstd_decompress()):
        return _Step(code, functions=(function,), context=zstd_context)
    if code == BLOSC and (function := blosc_decompress()):
        return _Step(code, functions=(function,))
    if code == BLOSC2 and all(functions := blosc2_functions()):
        return _Step(code, functions=functions)
    if code == BITSHUFFLE:
        return _bitshuffle(one, nbytes)
    return _Step(code) if code in (LZF, LZ4, FLETCHER32) else None


def _bitshuffle(one: FilterStep, nbytes: int) -> _Step | None:
    values = bitshuffle_values(one.values)
    element, how, _ = values
    if element < 1 or nbytes % element:
        return None
    if how == WITH_ZSTD and (function := zstd_decompress()):
        return _Step(one.code, values, (function,), zstd_context)
    return _Step(one.code, values) if how in (PLAIN, WITH_LZ4) else None

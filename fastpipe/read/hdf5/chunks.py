"""Chunks of an HDF5 dataset, read and decoded without the HDF5 library's lock."""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.protocols import Stopwatch
from fastpipe.read.hdf5.errors import ChunkError
from fastpipe.read.hdf5.filters import decode_chunk
from fastpipe.read.hdf5.geometry import grid_of
from fastpipe.read.hdf5.layout import Layout
from fastpipe.read.hdf5.many import many_decoder
from fastpipe.read.hdf5.recent import RecentChunks
from fastpipe.read.hdf5.scratch import STORED, scratch

__all__ = ["ChunkReader"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]


class ChunkReader:
    """Chunks of one dataset that is not of the kind ``"h5py"``.  For threads at once.

    Args:
        layout: of the dataset.
        nbytes: of a chunk, decoded.
        descriptor: of the file, open for reading; it stays the caller's.
        recent: gives memory, and keeps what other batches will want soon.
        clock: hears how long was read and decoded; of small chunks, both together as decoding.
    """

    def __init__(
        self, layout: Layout, nbytes: int, descriptor: int, recent: RecentChunks, clock: Stopwatch
    ) -> None:
        self._layout, self._nbytes, self._descriptor = layout, nbytes, descriptor
        self._recent, self._clock = recent, clock
        self._decode_many = many_decoder(layout.filters, nbytes)

    def is_there(self, numbers: Int64Array) -> npt.NDArray[np.bool_]:
        """Which chunks were written."""
        if self._layout.kind == "compact":
            return np.ones(len(numbers), np.bool_)
        there: npt.NDArray[np.bool_] = self._layout.offsets[numbers] >= 0
        return there

    def decoded(self, numbers: Int64Array) -> list[UInt8Array]:
        """Chunks that were written, decoded: each uint8 (nbytes,).

        Args:
            numbers: int64 (N,), in C order of the chunks' grid.

        Raises:
            ChunkError: the file does not hold what it should; the message says where.
            OSError: it cannot be read.
        """
        if self._decode_many is None or len(numbers) < 2:
            return [self.decoded_one(number) for number in numbers.tolist()]
        nbytes, step, decode = self._nbytes, self._decode_many.step, self._decode_many
        block = np.empty(len(numbers) * step, np.uint8)
        offsets, sizes = self._layout.offsets[numbers], self._layout.sizes[numbers]
        plain = np.append(np.flatnonzero(self._layout.masks[numbers]), len(numbers))
        done = 0
        while done < len(numbers):
            stop = int(plain[np.searchsorted(plain, done)])
            begun = perf_counter_ns()
            done += decode(self._descriptor, offsets[done:stop], sizes[done:stop], block[done * step :])
            self._clock.add("decode", perf_counter_ns() - begun)
            if done < len(numbers):  # whatever is unusual about this one is found out, or borne, here
                block[done * step : done * step + nbytes] = self.decoded_one(int(numbers[done]))
                done += 1
        return [block[first : first + nbytes] for first in range(0, len(block), step)]

    def decoded_one(self, number: int) -> UInt8Array:
        """One of them."""
        if self._layout.kind == "compact":
            return np.frombuffer(self._layout.inside, np.uint8)
        made = self._recent.allocate(self._nbytes)
        self.decode_into(made, number)
        return made

    def decode_into(self, made: UInt8Array, number: int) -> None:
        """Decode one into memory that is aligned to 8."""
        layout = self._layout
        size, offset = int(layout.sizes[number]), int(layout.offsets[number])
        if not layout.filters:
            self.read_run(offset, made[:size], number)
            made[size:] = 0  # behind the dataset's end, for it may be kept in a file
            return
        stored, begun = scratch(STORED, size), perf_counter_ns()
        self.read_run(offset, stored, number)
        read = perf_counter_ns()
        try:
            decode_chunk(stored, layout.filters, int(layout.masks[number]), made)
        except ChunkError as error:
            raise ChunkError(f"{self.where(number)}: {error}") from None
        self._clock.add("read", read - begun)
        self._clock.add("decode", perf_counter_ns() - read)

    def read_run(self, offset: int, out: UInt8Array, number: int) -> None:
        """Read bytes of a chunk as they are in the file."""
        view: Any = out.data
        while len(view):
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise ChunkError(f"{self.where(number)}: the file ends within it")
            view, offset = view[count:], offset + count

    def where(self, number: int) -> str:
        """Which chunk this is, in words."""
        layout = self._layout
        if layout.kind != "chunked":
            return f"{layout.file}, dataset {layout.name}"
        corner = np.unravel_index(number, grid_of(layout.shape, layout.chunk))
        box = ", ".join(
            f"{at * side}:{min((at + 1) * side, size)}"
            for at, side, size in zip(map(int, corner), layout.chunk, layout.shape, strict=True)
        )
        return f"{layout.file}, dataset {layout.name}, chunk {number} at [{box}]"

"""Chunks of an HDF5 dataset, read and decoded without the HDF5 library's lock."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.protocols import Stopwatch
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.scratch import STORED, scratch
from fastpipe.read.chunks.stored import read_fully
from fastpipe.read.hdf5.filters import decode_chunk
from fastpipe.read.hdf5.geometry import grid_of
from fastpipe.read.hdf5.layout import Layout
from fastpipe.read.hdf5.many import many_decoder
from fastpipe.read.hdf5.recent import RecentChunks

__all__ = ["ChunkReader", "NoClock"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_SMALL = 1 << 16  # bytes of a chunk up to which some have their memory together
_ALIGNMENT = 8


class NoClock:
    """A `Stopwatch` of which nobody reads the time."""

    def add(self, stage: str, nanoseconds: int) -> None:
        """Nobody wants to know."""


class ChunkReader:
    """Chunks of one dataset that is not of the kind ``"h5py"``.  For threads at once.

    Args:
        layout: of the dataset.
        nbytes: of a chunk, decoded.
        descriptor: of the file, open for reading; it stays the caller's.
        recent: gives memory, and keeps what other batches will want soon.
        clock: hears how long was read and decoded.
    """

    def __init__(
        self, layout: Layout, nbytes: int, descriptor: int, recent: RecentChunks, clock: Stopwatch
    ) -> None:
        self._layout, self._nbytes, self._descriptor = layout, nbytes, descriptor
        self._recent, self._clock = recent, clock
        self._decode_many = many_decoder(layout.filters, nbytes)

    def decoded(self, numbers: Int64Array) -> list[UInt8Array]:
        """Chunks that were written, decoded: each uint8 (nbytes,).

        Args:
            numbers: int64 (N,), in C order of the chunks' grid.

        Raises:
            ChunkError: the file does not hold what it should; the message says where.
            OSError: it cannot be read.
        """
        if self._layout.kind == "compact":
            return [np.frombuffer(self._layout.inside, np.uint8)] * len(numbers)
        made = self._memory(len(numbers))
        self.decode_into(made, numbers)
        return made

    def _memory(self, count: int) -> list[UInt8Array]:
        if count < 2 or self._nbytes > _SMALL:
            return [self._recent.allocate(self._nbytes) for _ in range(count)]
        step = -(-self._nbytes // _ALIGNMENT) * _ALIGNMENT
        block = np.empty(count * step, np.uint8)
        return [block[first : first + self._nbytes] for first in range(0, len(block), step)]

    @ranged("decode")
    def decode_into(self, made: Sequence[UInt8Array], numbers: Int64Array) -> None:
        """As ``decoded``, into memory that is aligned to 8."""
        decode = self._decode_many
        if decode is None:
            for memory, number in zip(made, numbers.tolist(), strict=True):
                self._decode_alone(memory, number)
            return
        if min(map(len, made), default=self._nbytes) < self._nbytes:  # the kernel trusts addresses
            raise AssertionError(f"{self.where(int(numbers[0]))}: less memory than a chunk has")
        outs = np.array([memory.__array_interface__["data"][0] for memory in made], np.uint64)
        offsets, sizes = self._layout.offsets[numbers], self._layout.sizes[numbers]
        ends = [*np.flatnonzero(self._layout.masks[numbers]).tolist(), len(numbers)]  # filters were left out
        done = 0
        while done < len(numbers):
            some, begun = slice(done, next(end for end in ends if end >= done)), perf_counter_ns()
            count, reading = decode(self._descriptor, offsets[some], sizes[some], outs[some])
            self._clock.add("read", reading)
            self._clock.add("decode", perf_counter_ns() - begun - reading)
            done += count
            if done < len(numbers):  # whatever is unusual about this one is found out, or borne, here
                self._decode_alone(made[done], int(numbers[done]))
                done += 1

    def _decode_alone(self, made: UInt8Array, number: int) -> None:
        """Decode one chunk, filter by filter."""
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

    @ranged("read")
    def read_run(self, offset: int, out: UInt8Array, number: int) -> None:
        """Read bytes of a chunk as they are in the file."""
        try:
            read_fully(self._descriptor, out, offset)
        except ChunkError as error:
            raise ChunkError(f"{self.where(number)}: {error}") from None

    def where(self, number: int) -> str:
        """Which chunk this is, in words."""
        layout = self._layout
        if layout.kind != "chunked":
            return f"{layout.shown or layout.file}, dataset {layout.name}"
        corner = np.unravel_index(number, grid_of(layout.shape, layout.chunk))
        box = ", ".join(
            f"{at * side}:{min((at + 1) * side, size)}"
            for at, side, size in zip(map(int, corner), layout.chunk, layout.shape, strict=True)
        )
        return f"{layout.shown or layout.file}, dataset {layout.name}, chunk {number} at [{box}]"

"""Samples of an HDF5 dataset, read into a batch's memory without the HDF5 library's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.protocols import SharedChunks
from fastpipe.read.hdf5 import kernels
from fastpipe.read.hdf5.context import ReadContext
from fastpipe.read.hdf5.errors import ChunkError
from fastpipe.read.hdf5.filters import decode_chunk
from fastpipe.read.hdf5.geometry import Geometry, Group, Runs, grid_of
from fastpipe.read.hdf5.layout import Layout, in_blocks
from fastpipe.read.hdf5.recent import RecentChunks
from fastpipe.read.hdf5.scratch import STORED, scratch

__all__ = ["ReadTask", "SampleReader"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_TASK_NBYTES = 1 << 20  # of samples that one task reads: more than it costs to hand it to a thread
_CHUNKS_NBYTES = 1 << 18  # of small chunks that one task decodes
_CHUNK_BITS = 40  # of a chunk's number among those of all datasets; above them is the dataset's
_ALONE = ReadContext()


class ReadTask(NamedTuple):
    """Some of the work for a batch.

    Attributes:
        rows: int64: the batch's rows into which it reads; those of its samples.
        run: does it.
    """

    rows: Int64Array
    run: Callable[[], None]


class SampleReader:
    """Reads samples of one dataset that is not of the kind ``"h5py"``.  For threads at once.

    Args:
        layout: of the dataset.
        sample_dims: how many of its dimensions count samples.
        descriptor: of the file, open for reading; it stays the caller's.
        context: what this reader and others have in common.
        number: of the dataset among those of all files.

    Attributes:
        geometry: of the samples and chunks.
        reads_rows: whether rows are read from the file by themselves, as nothing has to be decoded nor
            kept; else a chunk is decoded whole.
    """

    def __init__(
        self,
        layout: Layout,
        sample_dims: int,
        descriptor: int,
        context: ReadContext = _ALONE,
        number: int = 0,
    ) -> None:
        kept = None if context.keep is None else context.keep(descriptor, layout)
        self.reads_rows = not layout.filters and layout.kind != "compact" and kept is None
        if kept is not None:
            layout = in_blocks(layout)
        self.geometry = Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, sample_dims)
        self._layout, self._descriptor = layout, descriptor
        self._kept, self._recent = kept, context.recent or RecentChunks(0)
        self._shared, self._first_shared = context.shared, number << _CHUNK_BITS
        self._clock = context.clock or _NoClock()
        self._fill = np.frombuffer(layout.fill, np.uint8)
        every = [self.geometry.runs(part) for part in range(self.geometry.parts)]
        # Bytes behind a sample's beginning in a chunk that belong to it; and how many of them.
        self._reach = [int(runs.in_chunk.max(initial=0)) + runs.nbytes for runs in every]
        self._part_nbytes = max((len(runs.in_chunk) * runs.nbytes for runs in every), default=0)
        self._token = object()  # which chunks among the recent ones are this dataset's

    def tasks(self, samples: Int64Array, rows: Int64Array, out: UInt8Array) -> list[ReadTask]:
        """What is to be done for some samples; the tasks can run side by side, in any order.

        Args:
            samples: int64 (N,), each at least 0 and below ``geometry.count``.
            rows: int64 (N,): which row of the batch each is.
            out: uint8 (batch * geometry.sample_nbytes,), C-contiguous: the batch's rows.

        Returns:
            Tasks that raise

            * ChunkError: the file does not hold what it should; the message says where.
            * OSError: it cannot be read.
        """
        groups, at = self.geometry.places(samples)
        if self.reads_rows:
            return self._in_pieces(
                rows, lambda some: partial(self._from_file, groups[some], at[some], rows[some], out)
            )
        found: list[ReadTask] = []
        for part in range(self.geometry.parts):
            left: Any = slice(None)
            if self._kept is not None:
                begins = self._kept.places(self.geometry.chunk(groups, part))
                is_kept = begins >= 0
                if is_kept.any():
                    found += self._from_kept(part, begins, groups, at, rows, np.flatnonzero(is_kept), out)
                    left = ~is_kept
            found += self._from_chunks(part, groups[left], at[left], rows[left], out)
        return found

    # ---- samples of whole chunks ----------------------------------------------------------------

    def _from_chunks(
        self, part: int, groups: Int64Array, at: Int64Array, rows: Int64Array, out: UInt8Array
    ) -> list[ReadTask]:
        """Tasks for samples whose chunks are to be decoded."""
        grouped = self.geometry.grouped(groups, at, rows)
        chunk, recent, shared, token = self.geometry.chunk, self._recent, self._shared, self._token
        there: list[Group] = []
        missing: list[Group] = []
        for group in grouped:
            number = chunk(group.number, part)
            is_there = recent.expect((token, number)) if shared is None else self._is_shared(shared, number)
            (there if is_there else missing).append(group)
        if shared is not None:  # each process begins with others
            first = int(shared.turn * len(missing))
            missing = missing[first:] + missing[:first]
        # First those that are there, perhaps wanted for the last time: then there is room for the others.
        found = self._in_tasks(there, _TASK_NBYTES, lambda one: len(one.rows) * self._part_nbytes, part, out)
        return found + self._in_tasks(
            missing, _CHUNKS_NBYTES, lambda one: self.geometry.chunk_nbytes, part, out
        )

    def _in_tasks(
        self, groups: Sequence[Group], nbytes: int, weight: Callable[[Group], int], part: int, out: UInt8Array
    ) -> list[ReadTask]:
        """Tasks for some groups, each for about so many bytes."""
        found: list[ReadTask] = []
        some: list[Group] = []
        total = 0
        for group in groups:
            some.append(group)
            total += weight(group)
            if total >= nbytes:
                found.append(ReadTask(_rows_of(some), partial(self._from_groups, some, part, out)))
                some, total = [], 0
        if some:
            found.append(ReadTask(_rows_of(some), partial(self._from_groups, some, part, out)))
        return found

    def _from_groups(self, groups: Sequence[Group], part: int, out: UInt8Array) -> None:
        """Copy one part of some groups' samples from their chunks."""
        if self._shared is not None:
            groups = self._from_shared(self._shared, groups, part, out)
        chunks: list[UInt8Array] = []
        there: list[Group] = []
        for group in groups:
            number = self.geometry.chunk(group.number, part)
            if self._layout.offsets[number] < 0 and self._layout.kind != "compact":
                to = group.rows * self.geometry.sample_nbytes
                _fill(out, to, self.geometry.runs(part), self._fill)
                continue
            samples = self.geometry.samples_in(group.number)
            get = partial(self._recent.get, (self._token, number), partial(self._made, number))
            chunks.append(get(len(group.rows), samples))
            there.append(group)
        self._copy(chunks, there, part, out)

    def _copy(
        self, chunks: Sequence[UInt8Array], groups: Sequence[Group], part: int, out: UInt8Array
    ) -> None:
        """Copy one part of some groups' samples, by one call: after each a thread may have to wait for
        the others.

        Args:
            chunks: for each group its chunk.
            groups, part, out: as above.
        """
        if not groups:
            return
        begun = perf_counter_ns()
        for group, data in zip(groups, chunks, strict=True):
            if len(data) < int(group.at.max()) + self._reach[part]:
                raise AssertionError(f"{self._where(group.number)}: rows outside of the chunk")
        where = np.concatenate([
            group.at.astype(np.uint64) + np.uint64(data.ctypes.data)
            for group, data in zip(groups, chunks, strict=True)
        ])  # fmt: skip
        to = np.concatenate([group.rows for group in groups]) * self.geometry.sample_nbytes
        runs = self.geometry.runs(part)
        if not kernels.copy_runs(where, out, to, runs.in_chunk, runs.in_sample, runs.nbytes):
            raise AssertionError(f"{self._where(0)}: rows outside of the batch")
        self._clock.add("copy", perf_counter_ns() - begun)

    def _made(self, number: int) -> UInt8Array:
        """A chunk, decoded, and kept if that is wanted."""
        data = self.decoded(number)
        if self._kept is not None:
            self._kept.keep(number, data)
        return data

    # ---- chunks that processes share --------------------------------------------------------------

    def _from_shared(
        self, shared: SharedChunks, groups: Sequence[Group], part: int, out: UInt8Array
    ) -> list[Group]:
        """Copy from chunks that are shared, and share those that are not yet; the groups for which this
        does not go are returned."""
        left = []
        for group in self._from_there(shared, groups, part, out, waits=False):
            # First those that are there: meanwhile others may have made what this process would wait for.
            is_left = self._from_there(shared, [group], part, out, waits=True)
            if is_left and not self._is_put_there(shared, group, part, out):
                left.append(group)
        return left

    def _from_there(
        self, shared: SharedChunks, groups: Sequence[Group], part: int, out: UInt8Array, *, waits: bool
    ) -> list[Group]:
        found, left = [], []
        for group in groups:
            chunk = self._first_shared + self.geometry.chunk(group.number, part)
            place, version = shared.find(chunk, waits=waits)
            if place < 0:
                left.append(group)
            else:
                found.append((group, place, version))
        nbytes = self.geometry.chunk_nbytes
        chunks = [shared.memory[place : place + nbytes] for _, place, _ in found]
        self._copy(chunks, [group for group, _, _ in found], part, out)
        for group, place, version in found:
            if shared.took(place, version, len(group.rows)):
                self._recent.count(0, nbytes * len(group.rows) / self.geometry.samples_in(group.number))
            else:
                left.append(group)
        return left

    def _is_put_there(self, shared: SharedChunks, group: Group, part: int, out: UInt8Array) -> bool:
        number, nbytes = self.geometry.chunk(group.number, part), self.geometry.chunk_nbytes
        samples, taken = self.geometry.samples_in(group.number), len(group.rows)
        if self._layout.offsets[number] < 0 or taken >= samples:  # nobody else will want it
            return False
        claimed = shared.claim(self._first_shared + number, nbytes)
        if claimed is None:
            return False
        with claimed:
            self._decode_into(claimed.memory, number)
            if self._kept is not None:
                self._kept.keep(number, claimed.memory)
            self._copy([claimed.memory], [group], part, out)
            self._recent.count(nbytes, nbytes * taken / samples)
            return claimed.publish(samples - taken)

    def _is_shared(self, shared: SharedChunks, number: int) -> bool:
        return shared.find(self._first_shared + number, waits=False)[0] >= 0

    def decoded(self, number: int) -> UInt8Array:
        """A chunk that was written, decoded: uint8 (chunk_nbytes,).

        Args:
            number: in C order of the chunks' grid.

        Raises:
            ChunkError, OSError: as for ``tasks``.
        """
        if self._layout.kind == "compact":
            return np.frombuffer(self._layout.inside, np.uint8)
        made = self._recent.allocate(self.geometry.chunk_nbytes)
        self._decode_into(made, number)
        return made

    def _decode_into(self, made: UInt8Array, number: int) -> None:
        layout = self._layout
        size, offset = int(layout.sizes[number]), int(layout.offsets[number])
        if not layout.filters:
            self._read_run(offset, made[:size], number)
            made[size:] = 0  # behind the dataset's end, for it may be kept in a file
            return
        stored, begun = scratch(STORED, size), perf_counter_ns()
        self._read_run(offset, stored, number)
        read = perf_counter_ns()
        try:
            decode_chunk(stored, layout.filters, int(layout.masks[number]), made)
        except ChunkError as error:
            raise ChunkError(f"{self._where(number)}: {error}") from None
        self._clock.add("read", read - begun)
        self._clock.add("decode", perf_counter_ns() - read)

    # ---- samples that are kept --------------------------------------------------------------------

    def _from_kept(
        self, part: int, begins: Int64Array, groups: Int64Array, at: Int64Array, rows: Int64Array,
        which: Int64Array, out: UInt8Array,
    ) -> list[ReadTask]:  # fmt: skip
        """Tasks for those samples whose decoded chunks are kept."""
        begins, groups, at, rows = begins[which], groups[which], at[which], rows[which]

        def task(some: slice) -> Callable[[], None]:
            return partial(self._copy_kept, part, begins[some], groups[some], at[some], rows[some], out)

        return self._in_pieces(rows, task)

    def _copy_kept(
        self, part: int, begins: Int64Array, groups: Int64Array, at: Int64Array, rows: Int64Array,
        out: UInt8Array,
    ) -> None:  # fmt: skip
        assert self._kept is not None
        begun = perf_counter_ns()
        runs, to = self.geometry.runs(part), rows * self.geometry.sample_nbytes
        first, memory = begins + at, self._kept.memory
        if memory is not None:
            is_done = first.min() >= 0 and first.max() + self._reach[part] <= len(memory)
            if is_done:
                where = first.astype(np.uint64) + np.uint64(memory.ctypes.data)
                is_done = kernels.copy_runs(where, out, to, runs.in_chunk, runs.in_sample, runs.nbytes)
        else:
            offsets = np.add.outer(first, runs.in_chunk).ravel()
            places = np.add.outer(to, runs.in_sample).ravel()
            count = kernels.read_runs(self._kept.descriptor, offsets, out, places, runs.nbytes)
            is_done = count == len(offsets)
        self._clock.add("copy", perf_counter_ns() - begun)
        if not is_done:  # whatever became of what was kept, the dataset's file has it
            self._from_groups(self.geometry.grouped(groups, at, rows), part, out)

    # ---- samples that lie in the file as they are ---------------------------------------------------

    def _in_pieces(self, rows: Int64Array, task: Callable[[slice], Callable[[], None]]) -> list[ReadTask]:
        step = max(1, _TASK_NBYTES // max(1, self.geometry.sample_nbytes))
        pieces = (slice(first, first + step) for first in range(0, len(rows), step))
        return [ReadTask(rows[piece], task(piece)) for piece in pieces]

    def _from_file(self, groups: Int64Array, at: Int64Array, rows: Int64Array, out: UInt8Array) -> None:
        """Read some samples."""
        begun = perf_counter_ns()
        geometry = self.geometry
        to = rows * geometry.sample_nbytes
        for part in range(geometry.parts):
            runs, numbers = geometry.runs(part), geometry.chunk(groups, part)
            offsets = self._layout.offsets[numbers]
            is_there = offsets >= 0
            if not is_there.all():
                _fill(out, to[~is_there], runs, self._fill)
            begins = np.add.outer((offsets + at)[is_there], runs.in_chunk).ravel()
            places = np.add.outer(to[is_there], runs.in_sample).ravel()
            done = 0
            while done < len(begins):
                # The kernel stops at whatever is unusual: then here it is said, or was a signal only.
                count = kernels.read_runs(self._descriptor, begins[done:], out, places[done:], runs.nbytes)
                if count < 0:
                    raise AssertionError(f"{self._where(int(numbers[0]))}: rows outside of the batch")
                done += count
                if done < len(begins):
                    sample = int(np.flatnonzero(is_there)[done // len(runs.in_chunk)])
                    run = out[places[done] : places[done] + runs.nbytes]
                    self._read_run(int(begins[done]), run, int(numbers[sample]))
                    done += 1
        self._clock.add("read", perf_counter_ns() - begun)

    def _read_run(self, offset: int, out: UInt8Array, number: int) -> None:
        view: Any = out.data
        while len(view):
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise ChunkError(f"{self._where(number)}: the file ends within it")
            view, offset = view[count:], offset + count

    def _where(self, number: int) -> str:
        layout = self._layout
        if layout.kind != "chunked":
            return f"{layout.file}, dataset {layout.name}"
        corner = np.unravel_index(number, grid_of(layout.shape, layout.chunk))
        box = ", ".join(
            f"{at * side}:{min((at + 1) * side, size)}"
            for at, side, size in zip(map(int, corner), layout.chunk, layout.shape, strict=True)
        )
        return f"{layout.file}, dataset {layout.name}, chunk {number} at [{box}]"


class _NoClock:
    def add(self, stage: str, nanoseconds: int) -> None:
        """Nobody wants to know."""


def _rows_of(groups: Sequence[Group]) -> Int64Array:
    return groups[0].rows if len(groups) == 1 else np.concatenate([group.rows for group in groups])


def _fill(out: UInt8Array, to: Int64Array, runs: Runs, fill: UInt8Array) -> None:
    """Write what is read where nothing was written: rare, so without a kernel."""
    pattern = np.tile(fill, runs.nbytes // len(fill))
    for first in np.add.outer(to, runs.in_sample).ravel().tolist():
        out[first : first + runs.nbytes] = pattern

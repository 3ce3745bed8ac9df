"""Samples of an HDF5 dataset, read into a batch's memory without the HDF5 library's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.protocols import SharedChunks
from fastpipe.read.hdf5 import kernels
from fastpipe.read.hdf5.chunks import ChunkReader, NoClock
from fastpipe.read.hdf5.context import ALONE, ReadContext
from fastpipe.read.hdf5.geometry import Geometry, Groups, Runs, starts_of
from fastpipe.read.hdf5.layout import Layout, in_blocks
from fastpipe.read.hdf5.recent import Decoded, RecentChunks

__all__ = ["LEAST_SHARED", "ReadTask", "SampleReader"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

# Of samples that one task reads or copies: more than it costs to hand it to a thread, and no long time.
_LEAST_NBYTES, _MOST_NBYTES = 1 << 20, 1 << 22
_CHUNKS_NBYTES = 1 << 18  # of small chunks that one task decodes
_MOST_CHUNKS = 8  # of large ones, if there are so many that each thread has tasks enough
_SHARES = 4  # these are for each thread
_CHUNK_BITS = 40  # of a chunk's number among those of all datasets; above them is the dataset's
LEAST_SHARED = 1 << 15  # bytes of a chunk, below which sharing it takes longer than decoding it


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
        context: ReadContext = ALONE,
        number: int = 0,
    ) -> None:
        kept = None if context.keep is None else context.keep(descriptor, layout)
        self.reads_rows = not layout.filters and layout.kind != "compact" and kept is None
        if kept is not None:
            layout = in_blocks(layout)
        self.geometry = Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, sample_dims)
        self._layout, self._descriptor = layout, descriptor
        self._kept, self._recent = kept, context.recent or RecentChunks(0)
        is_large = self.geometry.chunk_nbytes >= LEAST_SHARED
        self._shared = context.shared if is_large else None
        self._first_shared = number << _CHUNK_BITS
        self._clock = context.clock or NoClock()
        self._threads, self._count_jobs = context.threads, context.count_jobs
        self._chunks = ChunkReader(layout, self.geometry.chunk_nbytes, descriptor, self._recent, self._clock)
        self._fill = np.frombuffer(layout.fill, np.uint8)
        self._has_holes = layout.kind != "compact" and bool((layout.offsets < 0).any())
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
        numbers = self.geometry.chunk(grouped.numbers, part)
        if self._shared is None:
            is_there = self._recent.expect((self._token, number) for number in numbers.tolist())
        else:
            is_there = [self._is_shared(self._shared, number) for number in numbers.tolist()]
        there, missing = np.flatnonzero(is_there), np.flatnonzero(~np.array(is_there, np.bool_))
        if self._shared is not None:  # each process begins with others
            missing = np.roll(missing, -int(self._shared.turn * len(missing)))
        # First those that are there, perhaps wanted for the last time: then there is room for the others.
        found = []
        if len(there):
            some = grouped.take(there)
            ends = np.cumsum(some.counts * self._part_nbytes)
            tasks = (ends - 1) // self._task_nbytes(int(ends[-1]))
            found += self._in_tasks(some, tasks, part, out)
        if len(missing):
            each = max(
                1,
                _CHUNKS_NBYTES // max(1, self.geometry.chunk_nbytes),
                min(_MOST_CHUNKS, len(missing) // (_SHARES * self._threads)),
            )
            found += self._in_tasks(grouped.take(missing), np.arange(len(missing)) // each, part, out)
        return found

    def _task_nbytes(self, nbytes: int) -> int:
        """How much of so many bytes is one task: as much as leaves something for each idle thread, as after
        each task a thread may have to wait for those that run Python."""
        idle = max(1, self._threads // (1 + self._count_jobs()))
        return min(_MOST_NBYTES, max(_LEAST_NBYTES, -(-nbytes // idle)))

    def _in_tasks(self, groups: Groups, tasks: Int64Array, part: int, out: UInt8Array) -> list[ReadTask]:
        """Tasks for some groups.

        Args:
            groups, part, out: as above.
            tasks: int64 (G,), not descending: which task each group is of.
        """
        firsts = starts_of(tasks).tolist()
        pieces = [groups.slice(*ends) for ends in zip(firsts, [*firsts[1:], len(tasks)], strict=True)]
        return [ReadTask(piece.rows, partial(self._from_groups, piece, part, out)) for piece in pieces]

    def _from_groups(self, groups: Groups, part: int, out: UInt8Array) -> None:
        """Copy one part of some groups' samples from their chunks."""
        if self._shared is not None:
            groups = self._from_shared(self._shared, groups, part, out)
        if self._has_holes:
            is_written = self._layout.offsets[self.geometry.chunk(groups.numbers, part)] >= 0
            empty = groups.take(np.flatnonzero(~is_written))
            _fill(out, empty.rows * self.geometry.sample_nbytes, self.geometry.runs(part), self._fill)
            groups = groups.take(np.flatnonzero(is_written))
        numbers = self.geometry.chunk(groups.numbers, part)
        keys = [(self._token, number) for number in numbers.tolist()]
        samples = self.geometry.samples_in(groups.numbers).tolist()
        chunks = self._recent.get(
            keys, groups.counts.tolist(), samples, lambda places: self._made(numbers[places])
        )
        self._copy(chunks, groups, part, out)

    @ranged("copy")
    def _copy(self, chunks: Sequence[Decoded], groups: Groups, part: int, out: UInt8Array) -> None:
        """Copy one part of some groups' samples, by one call: after each a thread may have to wait for
        the others.

        Args:
            chunks: for each group its chunk.
            groups, part, out: as above.
        """
        if not chunks:
            return
        begun = perf_counter_ns()
        if min(len(chunk.data) for chunk in chunks) < int(groups.at.max()) + self._reach[part]:
            raise AssertionError(f"{self._chunks.where(int(groups.numbers[0]))}: rows outside of the chunk")
        addresses = np.array([chunk.address for chunk in chunks], np.uint64)
        where = np.repeat(addresses, groups.counts) + groups.at.astype(np.uint64)
        runs, to = self.geometry.runs(part), groups.rows * self.geometry.sample_nbytes
        if not kernels.copy_runs(where, out, to, runs.in_chunk, runs.in_sample, runs.nbytes):
            raise AssertionError(f"{self._chunks.where(0)}: rows outside of the batch")
        self._clock.add("copy", perf_counter_ns() - begun)

    def _made(self, numbers: Int64Array) -> list[UInt8Array]:
        """Chunks, decoded, and kept if that is wanted."""
        made = self._chunks.decoded(numbers)
        if self._kept is not None:
            self._kept.keep(numbers, made)
        return made

    # ---- chunks that processes share --------------------------------------------------------------

    def _from_shared(self, shared: SharedChunks, groups: Groups, part: int, out: UInt8Array) -> Groups:
        """Copy from chunks that are shared, and share those that are not yet; the groups for which this
        does not go are returned."""
        left = []
        # First those that are there: meanwhile others may have made what this process would wait for.
        for place in self._from_there(shared, groups, part, out, waits=False):
            group = groups.slice(place, place + 1)
            is_left = self._from_there(shared, group, part, out, waits=True)
            if is_left and not self._is_put_there(shared, group, part, out):
                left.append(place)
        return groups.take(np.array(left, np.int64))

    def _from_there(
        self, shared: SharedChunks, groups: Groups, part: int, out: UInt8Array, *, waits: bool
    ) -> list[int]:
        """Copy from those chunks that are there; the places of the other groups are returned."""
        nbytes, found, left = self.geometry.chunk_nbytes, [], []
        for number, chunk in enumerate(self.geometry.chunk(groups.numbers, part).tolist()):
            place, version = shared.find(self._first_shared + chunk, waits=waits)
            if place < 0:
                left.append(number)
            else:
                found.append((number, place, version))
        some = groups.take(np.array([number for number, _, _ in found], np.int64))
        chunks = [Decoded.of(shared.memory[place : place + nbytes]) for _, place, _ in found]
        self._copy(chunks, some, part, out)
        samples = self.geometry.samples_in(some.numbers)
        for (number, place, version), taken, all_of_it in zip(
            found, some.counts.tolist(), samples.tolist(), strict=True
        ):
            if shared.took(place, version, taken):
                self._recent.count(0, nbytes * taken / all_of_it)
            else:
                left.append(number)
        return left

    def _is_put_there(self, shared: SharedChunks, group: Groups, part: int, out: UInt8Array) -> bool:
        number, nbytes = int(self.geometry.chunk(group.numbers, part)[0]), self.geometry.chunk_nbytes
        samples, taken = int(self.geometry.samples_in(group.numbers)[0]), len(group.rows)
        if self._layout.offsets[number] < 0 or taken >= samples:  # nobody else will want it
            return False
        claimed = shared.claim(self._first_shared + number, nbytes)
        if claimed is None:
            return False
        with claimed:
            self._chunks.decode_into([claimed.memory], np.array([number]))
            if self._kept is not None:
                self._kept.keep(np.array([number]), [claimed.memory])
            self._copy([Decoded.of(claimed.memory)], group, part, out)
            self._recent.count(nbytes, nbytes * taken / samples)
            return claimed.publish(samples - taken)

    def _is_shared(self, shared: SharedChunks, number: int) -> bool:
        return shared.find(self._first_shared + number, waits=False)[0] >= 0

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

    @ranged("copy")
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
            count = kernels.read_runs(
                self._kept.descriptor, first, out, to, runs.in_chunk, runs.in_sample, runs.nbytes, 0
            )
            is_done = count == len(first) * len(runs.in_chunk)
        self._clock.add("copy", perf_counter_ns() - begun)
        if not is_done:  # whatever became of what was kept, the dataset's file has it
            self._from_groups(self.geometry.grouped(groups, at, rows), part, out)

    # ---- samples that lie in the file as they are ---------------------------------------------------

    def _in_pieces(self, rows: Int64Array, task: Callable[[slice], Callable[[], None]]) -> list[ReadTask]:
        nbytes = max(1, self.geometry.sample_nbytes)
        step = max(1, self._task_nbytes(len(rows) * nbytes) // nbytes)
        pieces = (slice(first, first + step) for first in range(0, len(rows), step))
        return [ReadTask(rows[piece], task(piece)) for piece in pieces]

    @ranged("read")
    def _from_file(self, groups: Int64Array, at: Int64Array, rows: Int64Array, out: UInt8Array) -> None:
        """Read some samples."""
        begun = perf_counter_ns()
        geometry = self.geometry
        to = rows * geometry.sample_nbytes
        for part in range(geometry.parts):
            runs, numbers = geometry.runs(part), geometry.chunk(groups, part)
            offsets = self._layout.offsets[numbers]
            firsts, places = offsets + at, to
            if self._has_holes:
                is_there = offsets >= 0
                _fill(out, to[~is_there], runs, self._fill)
                firsts, places, numbers = firsts[is_there], to[is_there], numbers[is_there]
            self._read_runs(firsts, places, runs, numbers, out)
        self._clock.add("read", perf_counter_ns() - begun)

    def _read_runs(
        self, firsts: Int64Array, to: Int64Array, runs: Runs, numbers: Int64Array, out: UInt8Array
    ) -> None:
        """Read samples that begin at such places of the file, in such chunks."""
        done, count = 0, len(runs.in_chunk)
        while done < len(firsts) * count:
            # The kernel stops at whatever is unusual: then here it is said, or was a signal only.
            done = kernels.read_runs(
                self._descriptor, firsts, out, to, runs.in_chunk, runs.in_sample, runs.nbytes, done
            )
            if done < 0:
                raise AssertionError(f"{self._chunks.where(int(numbers[0]))}: rows outside of the batch")
            if done < len(firsts) * count:
                sample, run = divmod(done, count)
                place = to[sample] + runs.in_sample[run]
                offset, memory = firsts[sample] + runs.in_chunk[run], out[place : place + runs.nbytes]
                self._chunks.read_run(int(offset), memory, int(numbers[sample]))
                done += 1


def _fill(out: UInt8Array, to: Int64Array, runs: Runs, fill: UInt8Array) -> None:
    """Write what is read where nothing was written: rare, so without a kernel."""
    pattern = np.tile(fill, runs.nbytes // len(fill))
    for first in np.add.outer(to, runs.in_sample).ravel().tolist():
        out[first : first + runs.nbytes] = pattern

"""What an HDF5 dataset needs to work in one process and must not take to another."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.arrays.hdf5.keeping import ChunkKeeper, chunk_nbytes
from fastpipe.arrays.hdf5.sharing import shared_chunks
from fastpipe.arrays.hdf5.watch import AmplificationWatch
from fastpipe.arrays.process import Process
from fastpipe.cache.window import SharedWindow
from fastpipe.engine.bad import BadSampleLog, Item, is_of_machine
from fastpipe.engine.clock import StageClock
from fastpipe.engine.reads import ReadPolicy
from fastpipe.engine.slots import KEPT_SLOTS, SlotPool
from fastpipe.errors import HDF5Error
from fastpipe.options import BadSamples, Cache
from fastpipe.read.hdf5.context import ReadContext
from fastpipe.read.hdf5.errors import DamagedError
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.recent import RecentChunks

__all__ = ["Options", "Runtime"]

# Of decoded chunks for which the order has more samples to come: without a window there are few.
_RECENT_NBYTES = 1 << 22


class Options(NamedTuple):
    """A dataset's options that a runtime is made by."""

    bad_samples: BadSamples
    threads: int | str
    cache: Cache
    window_nbytes: int
    window: SharedWindow | None


class Runtime:
    """Threads, memory, open files and the cache of one dataset in one process.

    Args:
        options: the dataset's.
        files: its files.
        process: this one.
    """

    def __init__(self, options: Options, files: SampleFiles, process: Process) -> None:
        self.pid, self.options = os.getpid(), options
        self.pool = process.pool
        self.clock = StageClock()
        self.slots = [SlotPool(KEPT_SLOTS) for _ in files.layouts]
        largest = sum(chunk_nbytes(layout) for layout in files.layouts if layout.filters)
        remembered = max(_RECENT_NBYTES, 4 * largest, options.window_nbytes)
        shared = shared_chunks(options.window, process)
        room = _RECENT_NBYTES if shared else remembered
        self.recent = RecentChunks(room, _ChunkMemory(room))
        self.keeper = ChunkKeeper(options.cache, files)
        self.watch = AmplificationWatch(files, self.keeper, self.recent, remembered, process.workers)
        context = ReadContext(self.keeper.of, self.recent, shared, self.clock)
        if self.pool is not None:
            context = context._replace(threads=self.pool.threads, count_jobs=self.pool.count_jobs)
        self.open = files.open(context)
        self.policy = ReadPolicy(
            options.bad_samples.policy, BadSampleLog(options.bad_samples), _is_bad,
            lambda sample: Item(sample, files.shown_of(sample)),
        )  # fmt: skip

    def fits(self, options: Options) -> bool:
        """Whether this is the runtime of these options in this process."""
        return self.pid == os.getpid() and self.options == options


class _ChunkMemory:
    """Gives decoded chunks memory: that of ones which nobody needs any more, as new memory costs a fifth
    of decoding.

    Args:
        nbytes: the most to keep for that, of chunks of one size: at the end of a window all of its chunks
            are free, and those of the next take their places.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pools: dict[int, SlotPool] = {}

    def __call__(self, nbytes: int) -> npt.NDArray[np.uint8]:
        pool = self._pools.get(nbytes)
        if pool is None:
            pool = self._pools[nbytes] = SlotPool(max(1, self._nbytes // max(1, nbytes)))
        return pool.take((nbytes,), np.uint8)


def _is_bad(error: BaseException) -> bool:
    """Whether an error is about samples."""
    if isinstance(error, HDF5Error):
        return isinstance(error, DamagedError)
    # Where the file itself is gone, it is not about some of its samples.
    return (
        isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not is_of_machine(error)
    )

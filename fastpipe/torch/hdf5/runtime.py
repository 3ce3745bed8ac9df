"""What an HDF5 dataset needs to work in one process and must not take to another."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from fastpipe.engine.bad import BadSampleLog, Item
from fastpipe.engine.clock import StageClock
from fastpipe.engine.cpus import default_threads
from fastpipe.engine.pool import ThreadPool
from fastpipe.engine.reads import ReadPolicy
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import HDF5Error
from fastpipe.read.hdf5.errors import DamagedError
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.recent import RecentChunks
from fastpipe.torch.hdf5.keeping import ChunkKeeper, chunk_nbytes
from fastpipe.torch.hdf5.watch import AmplificationWatch
from fastpipe.torch.intraop import do_without_helpers
from fastpipe.torch.runtime import KEPT_SLOTS
from fastpipe.types import BadSamples, Cache

__all__ = ["Options", "Runtime"]

# Of decoded chunks for which the order has more samples to come: without a window there are few.
_RECENT_NBYTES = 1 << 22
# Errors of the machine, or of the whole file, which is not there any more: not of samples.
_OTHERS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOENT}


class Options(NamedTuple):
    """A dataset's options that a runtime is made by."""

    bad_samples: BadSamples
    threads: int | str
    cache: Cache
    window_nbytes: int


class Runtime:
    """Threads, memory, open files and the cache of one dataset in one process.

    Args:
        options: the dataset's.
        files: its files.
    """

    def __init__(self, options: Options, files: SampleFiles) -> None:
        self.pid, self.options = os.getpid(), options
        worker = get_worker_info()
        threads = options.threads
        if threads == "auto":
            threads = default_threads(worker.num_workers if worker else 1)
        # One thread beside an idle worker process would only add a hand-over.
        self.pool = (
            None if worker and threads == 1 else ThreadPool(int(threads), "fastpipe-hdf5", do_without_helpers)
        )
        self.clock = StageClock()
        self.slots = [SlotPool(KEPT_SLOTS) for _ in files.layouts]
        largest = sum(chunk_nbytes(layout) for layout in files.layouts if layout.filters)
        room = max(_RECENT_NBYTES, 4 * largest, options.window_nbytes)
        self.recent = RecentChunks(room, _ChunkMemory(room))
        self.keeper = ChunkKeeper(options.cache, files)
        self.watch = AmplificationWatch(files, self.keeper, self.recent)
        self.open = files.open(self.keeper.of, self.recent, self.clock)
        self.policy = ReadPolicy(
            options.bad_samples.policy, BadSampleLog(options.bad_samples), _is_bad,
            lambda sample: Item(sample, files.path_of(sample)),
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
    return isinstance(error, OSError) and error.errno not in _OTHERS

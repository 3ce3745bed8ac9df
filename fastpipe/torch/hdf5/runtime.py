"""What an HDF5 dataset needs to work in one process and must not take to another."""

from __future__ import annotations

import errno
import hashlib
import math
import os
from typing import NamedTuple

from torch.utils.data import get_worker_info

from fastpipe.cache.chunks import ChunkCache
from fastpipe.cache.identity import identify
from fastpipe.cache.places import open_store
from fastpipe.cache.store import EntryStore
from fastpipe.engine.bad import BadSampleLog, Item
from fastpipe.engine.clock import StageClock
from fastpipe.engine.cpus import default_threads
from fastpipe.engine.pool import ThreadPool
from fastpipe.engine.reads import ReadPolicy
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import HDF5Error
from fastpipe.read.hdf5.errors import DamagedError
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.layout import Layout, in_blocks
from fastpipe.read.hdf5.recent import RecentChunks
from fastpipe.torch.intraop import do_without_helpers
from fastpipe.torch.runtime import KEPT_SLOTS
from fastpipe.types import BadSamples, Cache

__all__ = ["ChunkKeeper", "Options", "Runtime", "decoded_nbytes"]

# Of decoded chunks for which the order has more samples to come: without a window there are few.
_RECENT_NBYTES = 1 << 25
# Errors of the machine, not of the file.
_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS}


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
        largest = sum(_chunk_nbytes(layout) for layout in files.layouts if layout.filters)
        self.recent = RecentChunks(max(_RECENT_NBYTES, 2 * largest, 2 * options.window_nbytes))
        self.keeper = ChunkKeeper(options.cache, files)
        self.open = files.open(self.keeper.of, self.recent)
        self.policy = ReadPolicy(
            options.bad_samples.policy, BadSampleLog(options.bad_samples), _is_bad,
            lambda sample: Item(sample, files.path_of(sample)),
        )  # fmt: skip

    def fits(self, options: Options) -> bool:
        """Whether this is the runtime of these options in this process."""
        return self.pid == os.getpid() and self.options == options


class ChunkKeeper:
    """Decides where the decoded chunks of some files are kept.

    Args:
        option: the dataset's.
        files: its files.

    Attributes:
        store: where; None for nowhere.
        note: that and why, in words.
        keeps_all: whether all of them will be there, sooner or later.
    """

    def __init__(self, option: Cache, files: SampleFiles) -> None:
        self.store: EntryStore | None = None
        self._is_auto = option.where == "auto"
        layouts = [layout for file in files.files for layout in file.layouts]
        nbytes = decoded_nbytes([layout for layout in layouts if self._may_keep(layout)])
        self.keeps_all = False
        if option.where == "off":
            self.note = "not kept (cache='off')"
        elif not nbytes:
            self.note = "none, as samples are read from the file as they are"
        else:
            store = open_store(option)
            if store is None:
                self.note = "not kept, as a cache cannot be had here"
                return
            self.keeps_all = nbytes <= store.max_bytes
            room = f"{_gigabytes(nbytes)} of up to {_gigabytes(store.max_bytes)}"
            if self._is_auto and not self.keeps_all:
                self.note = f"not kept, as they would be {room}"
                return
            self.store = store
            where = "memory" if store.is_in_memory else "files"
            when = ", from their second use on" if self._is_auto else ""
            self.note = f"kept in {where}, {room}{when}"

    def of(self, descriptor: int, layout: Layout) -> ChunkCache | None:
        """Where the decoded chunks of one dataset of an open file are kept, or None."""
        if self.store is None or not self._may_keep(layout):
            return None
        tag = hashlib.sha256(f"hdf5 1 {layout.kind} {layout.name}".encode()).digest()
        file = identify(layout.file, tag, descriptor)
        return ChunkCache(self.store, file, len(in_blocks(layout).offsets), is_second_use=self._is_auto)

    def _may_keep(self, layout: Layout) -> bool:
        """Whether there is something to gain: by itself fastpipe keeps only what has to be decoded, as the
        system keeps what it read from files."""
        if layout.kind in ("h5py", "compact"):
            return False
        return bool(layout.filters) or not self._is_auto


def decoded_nbytes(layouts: list[Layout]) -> int:
    """Bytes of all chunks, decoded."""
    return sum(len(layout.offsets) * _chunk_nbytes(layout) for layout in layouts)


def _chunk_nbytes(layout: Layout) -> int:
    return layout.dtype.itemsize * math.prod(layout.chunk)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def _is_bad(error: BaseException) -> bool:
    """Whether an error is about samples."""
    if isinstance(error, HDF5Error):
        return isinstance(error, DamagedError)
    return isinstance(error, OSError) and error.errno not in _RESOURCES

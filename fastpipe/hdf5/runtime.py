"""What an HDF5 dataset needs to work in one process and must not take to another."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any, NamedTuple

from fastpipe.core.bad_samples import BadSampleLog, Item, is_of_samples
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import Process, ProcessRuntime
from fastpipe.core.reads import ReadPolicy, ReadThreads
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.text import in_bytes, printable
from fastpipe.hdf5.errors import DamagedError
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.kept import ChunkKeeper, decoded_nbytes
from fastpipe.hdf5.memory import ChunkMemory, SharedChunks
from fastpipe.hdf5.reader import RowReader
from fastpipe.options import BadSamples, Cache

__all__ = ["Options", "Runtime"]


class Options(NamedTuple):
    """A dataset's options that a runtime is made by."""

    bad_samples: BadSamples
    threads: int | str
    cache: Cache
    window: int
    shared: SharedChunks | None


class Runtime(ProcessRuntime[Options]):
    """Threads, memory, open files and the cache of one dataset in one process.

    Args:
        options: the dataset's.
        files: its files.
        leading: the dataset whose groups of samples a window counts.
        process: this one.
    """

    def __init__(self, options: Options, files: SampleFiles, leading: int, process: Process) -> None:
        super().__init__(options, process.pool)
        self.threads = ReadThreads.of(process.pool)
        self.clock = StageClock()
        self.slots = [SlotPool(KEPT_SLOTS) for _ in files.layouts]
        self.keeper = ChunkKeeper(options.cache, files)
        # With a parent, which reads only where there are no workers, there is nothing to share.
        shared = options.shared if process.workers > 1 else None
        memory = ChunkMemory(files, leading, 0 if shared else options.window, shared)
        self.reader = RowReader(
            files, memory.of, self.keeper.of, 1 if process.pool is None else process.pool.threads,
            process.number / max(process.workers, 1),
        )  # fmt: skip
        self.watch = AmplificationWatch(files, self.keeper, memory.nbytes, process.workers)
        self.policy = ReadPolicy(
            options.bad_samples.policy, BadSampleLog(options.bad_samples),
            partial(is_of_samples, damaged=DamagedError),
            lambda sample: Item(sample, files.shown_of(sample)),
        )  # fmt: skip

    def heard(self, batch: Any) -> None:
        """Hear that the native core has read a batch."""
        for stage, nanoseconds in zip(("read", "decode", "copy"), batch.times, strict=True):
            self.clock.add(stage, nanoseconds)
        self.watch.count(*batch.counted)


class AmplificationWatch:
    """Compares what was decoded with what was used of it, and warns once.

    Compared each time that twice as much was decoded as is remembered: before that, an order that takes
    a window of chunks apart looks like one that goes all over the file.

    Args:
        files: the dataset's.
        keeper: where their decoded chunks are kept.
        remembered: bytes of decoded chunks that are, here or in memory that processes share.
        workers: processes that do the same side by side; 0 without.

    Attributes:
        decoded_nbytes: bytes of chunks that were decoded so far, in this process.
    """

    _WORTH_A_WARNING = 4.0
    _FEWEST_LOOKS = (
        8  # a batch that is half read counts otherwise than a whole one; of eight it hardly matters
    )

    def __init__(self, files: SampleFiles, keeper: ChunkKeeper, remembered: int, workers: int) -> None:
        self._files, self._keeper, self._remembered = files, keeper, remembered
        self._workers = workers
        self._lock = threading.Lock()
        self.decoded_nbytes = 0
        self._decoded, self._used, self._looks = 0, 0, 0
        is_packed = any(layout.filters for layout in files.layouts)
        self._is_over = not is_packed or (keeper.store is not None and keeper.keeps_all)

    def count(self, decoded: int, used: int) -> None:
        """Count bytes of chunks that were decoded for a batch, and the share of those that it used."""
        with self._lock:
            self.decoded_nbytes += decoded
            self._decoded, self._used = self._decoded + decoded, self._used + used

    def look(self) -> None:
        """Before each batch: warn where each chunk was decoded many times."""
        if self._is_over:
            return
        with self._lock:
            self._looks += 1
            is_early = self._looks < self._FEWEST_LOOKS or self._decoded < 2 * self._remembered
            if self._is_over or is_early:
                return
            times = self._decoded / max(1, self._used)
            self._decoded, self._used, self._looks = 0, 0, 0
            if times < self._WORTH_A_WARNING:
                return
            self._is_over = True
        warnings.warn(printable(self._message(times)), stacklevel=2)

    def _message(self, times: float) -> str:
        first = self._files.files[0]
        whole = decoded_nbytes([layout for file in self._files.files for layout in file.layouts])
        each = ""
        if self._workers:
            each = f" by each of {self._workers} worker processes, where threads share them"
        return (
            f"{first.shown}: samples are compressed together, and the order takes them apart: {times:.0f} "
            f"times as much is decoded as is used{each}.  Shuffle(unit='group') decodes each chunk once: it "
            "shuffles chunks, and then the samples of some chunks at a time; or keep what was decoded, "
            f"{in_bytes(whole)}, which is now {self._keeper.note}: cache=Cache('ram', max_bytes={whole})"
        )

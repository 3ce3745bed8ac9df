"""Rows of HDF5 files as samples: the base class of fastpipe's HDF5 datasets for every framework."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import default_file_arrays
from fastpipe.core.array_samples import EpochOrder, Form, checked_threads, drawn_substitute
from fastpipe.core.bad_samples import BadSampleLog, Item, is_of_samples
from fastpipe.core.clock import StageClock
from fastpipe.core.order import GroupedSamples
from fastpipe.core.pool import Process, ProcessRuntime
from fastpipe.core.reads import Reading, ReadPolicy, ReadThreads
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.text import counted, in_bytes, printable
from fastpipe.core.types import Key
from fastpipe.errors import OptionError
from fastpipe.hdf5.cache import ChunkCache, ChunkMemory, SharedChunks, decoded_nbytes
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.members import member_keys
from fastpipe.hdf5.opening import DamagedError, open_library, raw_name
from fastpipe.hdf5.reader import RowReader
from fastpipe.options import BadSamples, Cache, Stage
from fastpipe.stores.staged_files import staged_files


class Options(NamedTuple):
    bad_samples: BadSamples
    threads: int | str
    cache: Cache
    window: int
    shared: SharedChunks | None


class Runtime(ProcessRuntime[Options]):
    """Threads, memory, open files and the cache of one ``HDF5Samples`` in one process.

    Shuffle windows consist of groups of samples.  The samples of a group lie in the same chunks of the HDF5
    dataset with index ``leading``.
    """

    def __init__(self, options: Options, files: SampleFiles, leading: int, process: Process) -> None:
        super().__init__(options, process.pool)
        self.threads = ReadThreads.of(process.pool)
        self.clock = StageClock()
        self.slots = [SlotPool(KEPT_SLOTS) for _ in files.layouts]
        self.keeper = ChunkCache(options.cache, files)
        # Without worker processes, no other process shares the memory.
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
        for stage, nanoseconds in zip(("read", "decode", "copy"), batch.times, strict=True):
            self.clock.add(stage, nanoseconds)
        self.watch.count(*batch.counted)


class AmplificationWatch:
    """Compares decoded bytes with used bytes, and warns once if far more bytes are decoded than used.

    ``remembered`` is the size in bytes of the memory for decoded chunks.  This memory belongs to one process,
    or processes share it.  The bytes are compared each time that twice ``remembered`` bytes have been
    decoded.  After fewer bytes, an order that uses up a window of chunks looks like an order that jumps
    across the file.  ``workers`` is the number of worker processes that decode in parallel.
    """

    _WORTH_A_WARNING = 4.0
    _FEWEST_LOOKS = 8  # after this many batches, one incomplete batch changes the ratio little

    def __init__(self, files: SampleFiles, keeper: ChunkCache, remembered: int, workers: int) -> None:
        self._files, self._keeper, self._remembered = files, keeper, remembered
        self._workers = workers
        self._lock = threading.Lock()
        self.decoded_nbytes = 0
        self._decoded, self._used, self._looks = 0, 0, 0
        is_packed = any(layout.filters for layout in files.layouts)
        self._is_over = not is_packed or (keeper.store is not None and keeper.keeps_all)

    def count(self, decoded: int, used: int) -> None:
        """Add the bytes of chunks that were decoded for a batch, and the bytes that the batch used."""
        with self._lock:
            self.decoded_nbytes += decoded
            self._decoded, self._used = self._decoded + decoded, self._used + used

    def look(self) -> None:
        """Warn if far more bytes were decoded than used; call this method before each batch."""
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
        whole = decoded_nbytes([layout for file in self._files.files for layout in file.layouts])
        each = f" by each of {self._workers} worker processes, where threads share them"
        message = (
            f"{self._files.files[0].shown}: samples are compressed together, and the order takes them apart: "
            f"{times:.0f} times as much is decoded as is used{each if self._workers else ''}.  "
            "Shuffle(unit='group') decodes each chunk once: it shuffles chunks, and then the samples of some "
            f"chunks at a time; or keep what was decoded, {in_bytes(whole)}, which is now "
            f"{self._keeper.note}: cache=Cache('ram', max_bytes={whole})"
        )
        warnings.warn(printable(message), stacklevel=2)


_SPARE_GROUPS = 8  # additional groups for the batches in progress, if the window is small


class HDF5Samples(GroupedSamples):
    """Rows of HDF5 datasets, with the options and errors of :class:`fastpipe.FastHDF5Dataset`.

    ``process(threads, name)`` returns a ``core.pool.Process`` with this number of threads.  Changes of the
    attributes ``cache``, ``bad_samples``, ``threads`` and ``stage`` take effect from the next batch on.
    """

    def __init__(
        self,
        process: Callable[[int | str, str], Process],
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keys: str | Sequence[str] | Mapping[Any, str],
        *,
        sample_dims: int | None,
        cache: Cache | Literal["auto", "ram", "disk", "off"],
        bad_samples: BadSamples | Literal["raise", "replace", "skip"],
        threads: int | Literal["auto"],
        stage: Stage | str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._process, self._form = process, Form.of(keys)
        self.path, self.keys = path, keys
        if sample_dims is not None and sample_dims < 0:
            raise OptionError(f"sample_dims must be a number from 0, got {sample_dims}")
        self.cache = Cache.without_form(cache, "chunks")
        self.bad_samples = BadSamples.of(bad_samples)
        self.threads = checked_threads(threads)
        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
        self.stage = None if stage is None else Stage.of(stage)
        self._staged = staged_files(paths, storage_options, self.stage)
        local, shown = (paths, paths) if self._staged is None else (self._staged.local, self._staged.shown)
        first = [(local[0], os.fsdecode(shown[0]))] if local else []
        self._keys = [key for path, name in first for key in member_keys(path, self._form.names, name)]
        has_star = any(key.stars for key in self._keys)
        self.sample_dims = (0 if has_star else 1) if sample_dims is None else sample_dims
        self._files = self._opened(paths)
        self._window = 0
        self._shared: SharedChunks | None = None
        self._runtime: Runtime | None = None
        # Open the store of the cache in this process, which outlives its worker processes.  The workers then
        # share the store.
        ChunkCache(self.cache, self._files)

    def _opened(self, paths: Sequence[Any]) -> SampleFiles:
        # With cache="off" fastpipe stores nothing, not even the places of chunks.
        tables = None if self.cache.where == "off" else default_file_arrays()
        shown = None
        if self._staged is not None:
            paths, shown = self._staged.local, self._staged.shown
        are_separate = not self.sample_dims or any(one.stars or one.attribute for one in self._keys)
        keys = self._keys if are_separate else None
        return SampleFiles(paths, self._form.names, self.sample_dims, tables, shown, keys=keys)

    def __len__(self) -> int:
        return self._files.count

    def __getstate__(self) -> dict[str, Any]:
        # A copy creates its own threads and open files on first use.
        return {**self.__dict__, "_runtime": None}

    @property
    def kinds(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return the dtype and the shape of each value of a sample, of the first one if samples differ."""
        return [self._files.files[0].kind(number) for number in range(len(self._form.names))]

    def kinds_of(self, samples: npt.NDArray[np.int64]) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return the dtype and the shape of each value, as they are for all of ``samples``, int64 (N,).  If
        they differ between the samples, return ``object`` and ``()``."""
        kinds = self.kinds
        # A substitute for an unreadable sample may have any shape.
        is_any = self.bad_samples.policy == "replace"
        owners = [self._files.files[number] for number in set(self._files.owners(samples).tolist())]
        for number, differ in enumerate(self._files.differ):
            if differ:
                found = {file.kind(number) for file in owners}
                kinds[number] = (np.dtype(object), ()) if is_any or len(found) != 1 else found.pop()
        return kinds

    @property
    def names(self) -> list[tuple[str, str]]:
        """Return for each sample the path of its file and what ``*`` stands for in the keys.  What several
        ``*`` stand for is separated by ``/``."""
        return self._files.names()

    def close(self) -> None:
        """Close the open files, and release the stage; a later use opens them again.

        Deleting the dataset has the same effect.
        """
        self._runtime = None
        if self._staged is not None:
            self._staged.close()

    def locality_groups(self) -> npt.NDArray[np.int64]:
        """Return the group of each sample: int64 (N,).

        Samples of a group lie in the same chunks of the dataset that is most expensive to decode.  If this
        dataset has no chunks, samples of a group lie in the same megabyte.
        """
        return self._files.groups(self._leading)

    @property
    def group_nbytes(self) -> int:
        """Return how many bytes the decoded chunks of one group of samples take, in all HDF5 datasets.

        Each chunk counts with its whole size, even if it extends beyond the data.
        """
        samples, first = self._files.samples_in_group(self._leading), self._files.files[0]
        geometries = [first.geometry(number) for number in range(len(first.layouts))]
        return sum(-(-samples * each.parts * each.chunk_nbytes // each.group_size) for each in geometries)

    @property
    def plan(self) -> HDF5Plan:
        return HDF5Plan(self._form, self._files, self._running().keeper.note)

    def follow(self, batches: Callable[[], Iterator[npt.NDArray[np.int64]]], seed: int, epoch: int) -> None:
        """Do nothing: remote files are staged (copied to a local disk) before the dataset is created."""

    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]], order: EpochOrder | None = None,
    ) -> Reading:  # fmt: skip
        runtime.watch.look()
        substitute = None if key is None else partial(drawn_substitute, len(self), samples, key)
        reader = runtime.reader
        return Reading(
            lambda some, rows: reader.start(some, rows, arrays),
            lambda sample, row: reader.read_alone(sample, row, arrays),
            samples, runtime.policy, substitute, runtime.heard,
            lambda: f"{self._files.shown_of(int(samples[0]))}, sample {samples[0]}",
        )  # fmt: skip

    def _expect_window(self, groups: int) -> None:
        # When one thread begins the next window, other threads may still use the rest of the previous window.
        more = groups + min(groups, max(groups // 4, _SPARE_GROUPS))
        if more > self._window:
            self._window = more
            # The distance between worker processes is larger: one worker process may begin the next window
            # long before the others.
            more = groups + min(groups, max(groups // 2, _SPARE_GROUPS))
            self._shared = SharedChunks(self._files, self._leading, more)

    @property
    def _leading(self) -> int:
        """Return the index of the HDF5 dataset whose chunks are the most expensive to decode.

        Any compressed chunk is more expensive than an uncompressed chunk.  A larger chunk is more expensive.
        """
        costs = [
            (bool(one.filters), one.dtype.itemsize * math.prod(one.chunk)) for one in self._files.layouts
        ]
        return costs.index(max(costs))

    def _running(self) -> Runtime:
        """Return this process's threads, open files and cache; create them on first use."""
        runtime = self._runtime
        if self._staged is not None and self._staged.reopen():
            self._files, runtime = self._opened([]), None
        options = Options(self.bad_samples, self.threads, self.cache, self._window, self._shared)
        if runtime is None or not runtime.fits(options):
            process = self._process(self.threads, "fastpipe-hdf5")
            runtime = self._runtime = Runtime(options, self._files, self._leading, process)
        return runtime


class HDF5Plan:
    """A description of how an HDF5 dataset reads its files, for ``print``.

    ``lines`` has one line for each dataset, and a last line that says where decoded chunks are cached.
    """

    def __init__(self, form: Form, files: SampleFiles, kept: str) -> None:
        self.lines = [
            printable(f"{name}: {_shape(files, number)} {layout.dtype}  →  {_how(files, number)}")
            for number, (name, layout) in enumerate(zip(form.names, files.layouts, strict=True))
        ]
        self.lines.append(f"decoded chunks  →  {kept}")

    def __repr__(self) -> str:
        return "HDF5Plan(\n" + "".join(f"  {line}\n" for line in self.lines) + ")"


def _shape(files: SampleFiles, number: int) -> str:
    return "several shapes," if files.differ[number] else str(files.sample_shape(number))


def _how(files: SampleFiles, number: int) -> str:
    layouts = [file.layouts[number] for file in files.files]
    slow = [layout for layout in layouts if layout.kind == "h5py" and layout.values is None]
    if slow and slow[0].members:
        count = sum(len(layout.members) for layout in slow)
        return f"{counted(count, 'dataset')} through h5py, one thread at a time, as {slow[0].why}"
    if layouts[0].values is not None:
        return "in memory"
    if slow:
        some = f" in {len(slow)} of {len(layouts)} files" if len(slow) < len(layouts) else ""
        return f"through h5py, one thread at a time{some}, as {slow[0].why}"
    layout = layouts[0]
    if layout.members:
        names = ", ".join(dict.fromkeys(step.name for layout in layouts for step in layout.filters))
        return f"datasets of their own{names and f' ({names})'}, read in threads"
    if not layout.filters:
        return "read row by row, in threads"
    samples = math.prod(layout.chunk[: files.files[0].sample_dims])
    nbytes = layout.dtype.itemsize * math.prod(layout.chunk)
    filters = " and ".join(step.name for step in layout.filters)
    return f"chunks of {samples} samples ({in_bytes(nbytes)}; {filters}), decoded in threads"


class H5pyRows:
    """Samples that are read only through h5py."""

    def __init__(self, files: SampleFiles, form: Form) -> None:
        self._files, self._form = files, form
        self._open: tuple[int, dict[int, Any]] = os.getpid(), {}

    def __len__(self) -> int:
        return self._files.count

    def values(self, index: int) -> list[Any]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample index {index} is out of range for a dataset of {length} samples")
        position = index % length
        ((number, _, (local,)),) = self._files.located(np.array([position]))
        one = self._files.files[number]
        place = tuple(map(int, np.unravel_index(local, one.layouts[0].shape[: one.sample_dims])))
        file = self._file(number)
        if self._files.keys is None:
            return [file[raw_name(name)][place] for name in self._form.names]
        values = []
        for key, layout in zip(self._files.keys, one.layouts, strict=True):
            item = file[raw_name(layout.members[place[0]] or "/")]
            values.append(item[place[1:]] if key.attribute is None else item.attrs[key.attribute])
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}

    def _file(self, number: int) -> Any:
        if self._open[0] != os.getpid():  # a child process must not use files that its parent opened
            self._open = os.getpid(), {}
        files = self._open[1]
        if number not in files:
            files[number] = open_library(self._files.files[number].path)
        return files[number]

"""``FastHDF5Dataset``: samples of HDF5 files, read and decoded a batch at a time."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from fastpipe.cache.window import SharedWindow
from fastpipe.engine.clock import StageClock
from fastpipe.engine.reads import PendingRead
from fastpipe.errors import OptionError
from fastpipe.index.arrays import default_file_arrays
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.torch.batch_sampler import DatasetBatches
from fastpipe.torch.hdf5.batch import HDF5Batch, UserCode
from fastpipe.torch.hdf5.keeping import ChunkKeeper
from fastpipe.torch.hdf5.plan import HDF5Plan
from fastpipe.torch.hdf5.runtime import Options, Runtime
from fastpipe.torch.hdf5.samples import Form, Part, SampleRows, Value
from fastpipe.torch.hdf5.sharing import shared_window
from fastpipe.torch.hdf5.stock import H5pyDataset
from fastpipe.torch.keys import take_key
from fastpipe.torch.lane_memory import shared_flat
from fastpipe.torch.noting import note
from fastpipe.torch.runtime import KEPT_SLOTS
from fastpipe.torch.views import integers
from fastpipe.transform.keys import sample_seed, uniforms
from fastpipe.types import BadSamples, Cache, Key, Shard, Shuffle

__all__ = ["FastHDF5Dataset"]

_SPARE_GROUPS = 8  # beyond a small window, for batches on their way
# Samples tried in a bad one's place.
_MOST_REPLACEMENTS = 100
# Parts of a batch below this have memory of their own: who keeps the labels of an epoch would else keep
# slots, and who sends them from a worker a segment.
_OWN_MEMORY = 1 << 18


class FastHDF5Dataset(Dataset[Any]):
    """Rows of HDF5 datasets as samples, as ``h5py`` gives them, many times as fast.

    Where the chunks of a file lie is asked of the HDF5 library once; they are then read and
    decoded in threads, without the library's lock, and the rows of a batch are copied into
    its memory from many chunks by one call.  It works in any ``DataLoader``; in a
    :class:`fastpipe.FastLoader` the next batches are read while the current one is used.

    Args:
        path: an HDF5 file; or several, whose samples follow each other.
        keys: a dataset's path in the file, for samples that are single values; a sequence of paths, for
            tuples; or a mapping to paths, for dicts.  All must have the same first dimensions.
        sample_dims: how many of these count samples, in C order: with 2, ``dataset[i]`` is
            ``h5["x"][i // n, i % n]`` for a dataset of shape (m, n, …).
        transform: called with the sample's first value where samples are tuples; with the sample where they
            are single values or dicts.
        target_transform: called with the second value of a tuple.
        seed: makes order and augmentation a pure function of (seed, epoch) under a ``FastLoader``.  Anywhere
            else randomness comes from torch's global generator.
        cache: where decoded chunks are kept, a :class:`fastpipe.Cache` or its ``where``.  ``"auto"`` keeps
            them in memory from their second use on, if all of them fit a quarter of what is free.
        bad_samples: what happens to samples that cannot be read, a :class:`fastpipe.BadSamples` or its
            policy's name.  ``"replace"`` takes another sample, drawn from all.
        threads: reading threads; ``"auto"`` is cores ÷ (ranks on this machine × workers).
        thread_safe: promise that ``transform`` may be called from several threads at once.

    Attributes:
        path, keys, sample_dims, transform, target_transform, seed: as given.

    ``dataset[i]`` holds NumPy arrays, or scalars, exactly as ``h5["x"][i]`` gives them; a batch is
    collated to tensors.  ``print(dataset)`` says what is read how.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        KeyError: the file has no such dataset.
        HDF5Error: it is no HDF5 file, it is damaged, or somebody has it open for writing.
        OptionError: an option's value cannot work, or the datasets do not fit together.

    >>> import h5py, os, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "speech.h5")
    >>> with h5py.File(path, "w") as file:
    ...     file["mels"] = np.zeros((100, 64, 128), np.float32)
    ...     file["words"] = np.arange(100)
    >>> dataset = FastHDF5Dataset(path, ["mels", "words"])
    >>> mel, word = dataset[7]
    >>> mel.shape, int(word)
    ((64, 128), 7)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keys: str | Sequence[str] | Mapping[Any, str],
        *,
        sample_dims: int = 1,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        seed: int | None = None,
        cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
        bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
        threads: int | Literal["auto"] = "auto",
        thread_safe: bool = False,
    ) -> None:
        if threads != "auto" and (not isinstance(threads, int) or threads < 1):
            raise OptionError(f"threads must be 'auto' or a number from 1, got {threads!r}")
        self._form = Form.of(keys)
        if target_transform is not None and (self._form.kind != "tuple" or len(self._form.names) < 2):
            raise OptionError(
                "target_transform is called with the second value of a tuple: give keys=[inputs, targets], "
                f"got keys={keys!r}"
            )
        self.path, self.keys, self.sample_dims = path, keys, sample_dims
        self.transform, self.target_transform = transform, target_transform
        self.seed = seed if seed is None else operator.index(seed)
        self.cache = Cache.of(cache)
        self.bad_samples = BadSamples.of(bad_samples)
        self.threads = threads
        self.thread_safe = thread_safe
        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
        # With cache="off" nothing is written anywhere, nor where chunks are.
        tables = None if self.cache.where == "off" else default_file_arrays()
        self._files = SampleFiles(paths, self._form.names, sample_dims, tables)
        self._values = [
            Value.of(layout.dtype, self._files.sample_shape(number))
            for number, layout in enumerate(self._files.layouts)
        ]
        self._window_nbytes = 0
        self._window: SharedWindow | None = None
        self._runtime: Runtime | None = None
        # Opens the store in this process, which outlives its workers: they share it.
        ChunkKeeper(self.cache, self._files)

    def __len__(self) -> int:
        return self._files.count

    def __getitem__(self, index: int) -> Any:
        """Sample ``index``: an array, a tuple or a dict, as ``keys`` says."""
        batch = self._start_batch([operator.index(index)], threaded=False)
        samples = batch.finish()
        if not len(samples):  # not an IndexError, which would silently end a loop over the dataset
            raise batch.why_empty() or AssertionError("one sample was asked for")
        if isinstance(samples, SampleRows):  # whose own samples are of types that collate without a copy
            return self._form.sample([part.array[0] for part in batch.parts])
        return samples[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Several samples, read side by side; what ``DataLoader`` calls for a batch.

        Args:
            indices: positions in the dataset.

        Returns:
            The samples in the order of the indices.
        """
        if not self._answers_for_batches():
            return [self[index] for index in indices]
        batch = self._start_batch(indices)
        samples = batch.finish()
        error = None if len(samples) else batch.why_empty()
        if error is not None:  # nothing can be collated from no samples
            raise error
        return samples

    def locality_groups(self) -> npt.NDArray[np.int64]:
        """The group of each sample: int64 (N,).  Samples of one group lie in the same chunks, those of the
        dataset whose chunks cost most to decode; without chunks, in the same megabyte."""
        return self._files.groups(self._leading)

    @property
    def group_nbytes(self) -> int:
        """Decoded bytes of a group, in all datasets: of whole chunks, which may reach beyond the data."""
        samples, first = self._files.samples_in_group(self._leading), self._files.files[0]
        geometries = [first.geometry(number) for number in range(len(first.layouts))]
        return sum(-(-samples * each.parts * each.chunk_nbytes // each.group_size) for each in geometries)

    def batch_sampler(
        self, batch_size: int, *, shuffle: bool | Shuffle, drop_last: bool = False, shard: Shard | None = None
    ) -> DatasetBatches:
        """Batches of indices for a stock ``DataLoader``, which a :class:`fastpipe.FastLoader` makes itself.

        With the dataset's ``seed`` the order is a function of seed and epoch; without one each epoch's
        is drawn from torch's global generator.

        Args:
            batch_size: samples in a batch.
            shuffle: False, True or a :class:`fastpipe.Shuffle`.
            drop_last: leave out an incomplete last batch.
            shard: this rank's part.

        >>> import h5py, os, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "x.h5")
        >>> with h5py.File(path, "w") as file:
        ...     _ = file.create_dataset("x", data=np.arange(12), chunks=(3,), compression="lzf")
        >>> dataset = FastHDF5Dataset(path, "x", seed=0)
        >>> batches = dataset.batch_sampler(6, shuffle=Shuffle(window=2, unit="group"))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
        >>> [sorted(batch.tolist()) for batch in loader]
        [[6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5]]
        >>> folder.cleanup()
        """
        return DatasetBatches(self, batch_size, shuffle, drop_last, shard)

    @property
    def plan(self) -> HDF5Plan:
        """What is read how; ``print`` it."""
        return HDF5Plan(self._form, self._files, self._running().keeper.note)

    def __repr__(self) -> str:
        paths = self._files.files
        where = repr(paths[0].path) if len(paths) == 1 else f"{len(paths)} files from {paths[0].path!r}"
        lines = [f"Number of samples: {len(self):,}", f"File: {where}", *self.plan.lines]
        if self.transform is not None:
            lines.append(f"Transform: {self.transform!r}")
        if self.target_transform is not None:
            lines.append(f"Target transform: {self.target_transform!r}")
        if self.bad_samples != BadSamples():
            lines.append(f"Bad samples: {self.bad_samples!r}")
        if self.seed is not None:
            lines.append(f"Seed: {self.seed}")
        return "\n    ".join([f"{type(self).__name__}", *lines])

    @property
    def clock(self) -> StageClock:
        """Time spent in this process, by stage, summed over the threads."""
        return self._running().clock

    def __getstate__(self) -> dict[str, Any]:
        # Threads and open files stay here; the copy has its own when it needs them.
        return {**self.__dict__, "_runtime": None}

    # ---- how a batch is made ------------------------------------------------------------------

    def _start_batch(
        self,
        indices: Sequence[int] | npt.NDArray[np.int64],
        key: Key | None = None,
        *,
        threaded: bool = True,
    ) -> HDF5Batch:
        """Begin a batch without waiting for it."""
        samples, runtime = self._positions(indices), self._running()
        runtime.watch.look()
        is_keyed = key is not None
        if key is None and (self.transform is not None or self.bad_samples.policy == "replace"):
            key, is_keyed = take_key(len(samples))
        parts = self._memory(len(samples), runtime, threaded)
        arrays = [part.array for part in parts]
        if get_worker_info() is not None and len(samples):
            note(f"{self._files.path_of(int(samples[0]))}, sample {samples[0]} and others")
        substitute = partial(self._substitute, samples, key) if key is not None else None
        pending = PendingRead(
            runtime.pool if threaded else None, lambda some, rows: runtime.open.tasks(some, rows, arrays),
            samples, runtime.policy, substitute,
        )  # fmt: skip
        return HDF5Batch(pending, parts, runtime, self._form, self._code(), key, is_keyed, threaded)

    def _code(self) -> UserCode:
        """What the script does to samples; follows a change of ``transform``."""
        return UserCode(self._form, self.transform, self.target_transform, self.thread_safe)

    def _places_in_files(self) -> npt.NDArray[np.int64] | None:
        """The place of each sample along the first of several dimensions, else its file among several."""
        counts = [file.count for file in self._files.files]
        if self.sample_dims == 1:
            return np.repeat(np.arange(len(counts)), counts) if len(counts) > 1 else None
        cells = [file.layouts[0].shape[0] for file in self._files.files]
        sizes = [count // max(1, cell) for count, cell in zip(counts, cells, strict=True)]
        return np.repeat(np.arange(sum(cells)), np.repeat(sizes, cells))

    def _through_h5py(self) -> H5pyDataset:
        """The same samples without fastpipe."""
        return H5pyDataset(self._files, self._form, self._code())

    def _expect_window(self, groups: int) -> None:
        """Hear that samples of so many groups will come mixed."""
        # What is left of the window before, when the next begins, is used first; but not by every thread.
        more = min(groups, max(groups // 4, _SPARE_GROUPS))
        nbytes = (groups + more) * self.group_nbytes
        if nbytes > self._window_nbytes:
            self._window_nbytes = nbytes
            # Worker processes are farther apart: one begins the next window when others are in this one.
            more = min(groups, max(groups // 2, _SPARE_GROUPS))
            samples = self._files.samples_in_group(self._leading)
            self._window = shared_window(self._files, groups + more, samples)

    @property
    def _leading(self) -> int:
        """The dataset whose chunks are most worth reading once."""
        costs = [
            (bool(layout.filters), layout.dtype.itemsize * math.prod(layout.chunk))
            for layout in self._files.layouts
        ]
        return costs.index(max(costs))

    def _expect_ahead(self, batches: int) -> None:
        """Keep memory for so many batches that a loader begins ahead of the one that is due."""
        for slots in self._running().slots:
            slots.keep = max(slots.keep, KEPT_SLOTS + batches)

    def _thread_count(self) -> int:
        pool = self._running().pool
        return pool.threads if pool else 1

    def _runs_user_code(self) -> bool:
        """Whether functions of the script's are called in the consumer's thread."""
        return self._code().runs_here

    def _answers_for_batches(self) -> bool:
        """Whether no subclass says that samples are made one by one."""
        return type(self).__getitem__ is FastHDF5Dataset.__getitem__

    def _positions(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions in the dataset: int64 (N,)."""
        positions = integers(indices)
        length = len(self)
        if (positions.view(np.uint64) < length).all():  # where those below 0 are large
            return positions
        wrong = (positions < -length) | (positions >= length)
        if wrong.any():
            raise IndexError(f"sample {positions[wrong][0]} of a dataset of {length}")
        return np.where(positions < 0, positions + length, positions)

    def _large_parts(self, count: int) -> int:
        """How many of a batch's arrays are so large that they are sent in memory of their own."""
        return sum(count * value.nbytes >= _OWN_MEMORY for value in self._values)

    def _memory(self, count: int, runtime: Runtime, threaded: bool) -> list[Part]:
        """The batch's arrays."""
        found = []
        for value, slots in zip(self._values, runtime.slots, strict=True):
            shape, nbytes = (count, *value.shape), count * value.nbytes
            if not threaded or nbytes < _OWN_MEMORY or value.dtype.hasobject:
                array = np.empty(shape, value.dtype)
            elif value.torch_dtype is not None and get_worker_info() is not None:
                # Will be sent to the parent: make it where both see it.
                array = shared_flat(nbytes).numpy().view(value.dtype).reshape(shape)
            else:
                array = slots.take(shape, value.dtype)
            found.append(Part(array, None if value.torch_dtype is None else torch.from_numpy(array)))
        return found

    def _substitute(self, samples: npt.NDArray[np.int64], key: Key, row: int, attempt: int) -> int | None:
        """Another sample: the ``attempt``-th in a sequence that the key of the one it replaces draws."""
        if attempt > min(len(self) - 1, _MOST_REPLACEMENTS):
            return None
        seed = sample_seed(key.seed, key.epoch, int(key.draws[row]))
        drawn = float(uniforms(seed, 0, np.array([0]), _MOST_REPLACEMENTS)[0][attempt - 1])
        return (int(samples[row]) + 1 + int(drawn * (len(self) - 1))) % len(self)

    def _running(self) -> Runtime:
        """Threads, open files and the cache of this process, made when first needed."""
        runtime = self._runtime
        options = Options(self.bad_samples, self.threads, self.cache, self._window_nbytes, self._window)
        if runtime is None or not runtime.fits(options):
            runtime = self._runtime = Runtime(options, self._files)
        return runtime

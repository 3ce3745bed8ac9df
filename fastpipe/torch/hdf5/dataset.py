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

from fastpipe.cache.window import SharedWindow
from fastpipe.errors import OptionError
from fastpipe.index.arrays import default_file_arrays
from fastpipe.options import BadSamples, Cache, Stage
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.torch.hdf5.keeping import ChunkKeeper
from fastpipe.torch.hdf5.plan import HDF5Plan
from fastpipe.torch.hdf5.runtime import Options, Runtime
from fastpipe.torch.hdf5.sharing import shared_window
from fastpipe.torch.hdf5.stock import H5pyDataset
from fastpipe.torch.locality import GroupedSamples
from fastpipe.torch.rows.batch import UserCode
from fastpipe.torch.rows.dataset import Reading, RowsDataset, checked_threads, drawn_substitute
from fastpipe.torch.rows.samples import Form, Value
from fastpipe.torch.staged_files import staged_files
from fastpipe.types import Key

__all__ = ["FastHDF5Dataset"]

_SPARE_GROUPS = 8  # beyond a small window, for batches on their way


class FastHDF5Dataset(RowsDataset, GroupedSamples):
    """Rows of HDF5 datasets as samples, as ``h5py`` gives them, many times as fast.

    Where the chunks of a file lie is asked of the HDF5 library once; they are then read and
    decoded in threads, without the library's lock, and the rows of a batch are copied into
    its memory from many chunks by one call.  It works in any ``DataLoader``; in a
    :class:`fastpipe.FastLoader` the next batches are read while the current one is used.

    Args:
        path: an HDF5 file; or several, whose samples follow each other.  With a ``stage``, also URLs, such as
            ``"s3://bucket/mels.h5"``, or of any other file system that fsspec knows.
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
        stage: a folder on a local disk, or a :class:`fastpipe.Stage`, to which files that are URLs are copied
            whole, once for all processes of the machine, before the dataset is there.  Without any URL all
            files are copied: of a network's folder, say.  What is there already is not copied again.
        storage_options: for URLs: credentials and endpoint, as fsspec's file system for them takes them.

    Attributes:
        path, keys, sample_dims, transform, target_transform, seed: as given.

    ``dataset[i]`` holds NumPy arrays, or scalars, exactly as ``h5["x"][i]`` gives them; a batch is
    collated to tensors.  ``print(dataset)`` says what is read how.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        StageError: a file does not fit the stage, or that cannot be written to.
        StoreError: a store does not answer as it must.
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
        stage: Stage | str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
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
        self.threads = checked_threads(threads)
        self.thread_safe = thread_safe
        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
        self.stage = None if stage is None else Stage.of(stage)
        self._staged = staged_files(paths, storage_options, self.stage)
        self._files = self._opened(paths)
        self._values = [
            Value.of(layout.dtype, self._files.sample_shape(number))
            for number, layout in enumerate(self._files.layouts)
        ]
        self._window_nbytes = 0
        self._window: SharedWindow | None = None
        self._runtime: Runtime | None = None
        # Opens the store in this process, which outlives its workers: they share it.
        ChunkKeeper(self.cache, self._files)

    def _opened(self, paths: Sequence[Any]) -> SampleFiles:
        # With cache="off" nothing is written anywhere, nor where chunks are.
        tables = None if self.cache.where == "off" else default_file_arrays()
        if self._staged is None:
            return SampleFiles(paths, self._form.names, self.sample_dims, tables)
        return SampleFiles(self._staged.local, self._form.names, self.sample_dims, tables, self._staged.shown)

    def __len__(self) -> int:
        return self._files.count

    def close(self) -> None:
        """Let go of open files and of the stage, as a dataset that is dropped does by itself; who uses it
        afterwards has them again."""
        self._runtime = None
        if self._staged is not None:
            self._staged.close()

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

    @property
    def plan(self) -> HDF5Plan:
        """What is read how; ``print`` it."""
        return HDF5Plan(self._form, self._files, self._running().keeper.note)

    def __repr__(self) -> str:
        paths = [file.shown for file in self._files.files]
        where = repr(paths[0]) if len(paths) == 1 else f"{len(paths)} files from {paths[0]!r}"
        lines = [f"Number of samples: {len(self):,}", f"File: {where}", *self.plan.lines]
        if self.stage is not None:
            lines.append(f"Staged: {self.stage!r}")
        if self.transform is not None:
            lines.append(f"Transform: {self.transform!r}")
        if self.target_transform is not None:
            lines.append(f"Target transform: {self.target_transform!r}")
        if self.bad_samples != BadSamples():
            lines.append(f"Bad samples: {self.bad_samples!r}")
        if self.seed is not None:
            lines.append(f"Seed: {self.seed}")
        return "\n    ".join([f"{type(self).__name__}", *lines])

    # ---- how a batch is made ------------------------------------------------------------------

    @property
    def _wants_key(self) -> bool:
        return self.transform is not None

    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]],
    ) -> Reading:  # fmt: skip
        runtime.watch.look()
        substitute = None if key is None else partial(drawn_substitute, len(self), samples, key)
        return Reading(
            lambda some, rows: runtime.open.tasks(some, rows, arrays), samples, runtime.policy, substitute,
            lambda: f"{self._files.shown_of(int(samples[0]))}, sample {samples[0]}",
        )  # fmt: skip

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

    def _stock(self) -> H5pyDataset:
        """The same samples without fastpipe."""
        return H5pyDataset(self._files, self._form, self._code())

    def _expect_window(self, groups: int) -> None:
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

    def _running(self) -> Runtime:
        """Threads, open files and the cache of this process, made when first needed."""
        runtime = self._runtime
        if self._staged is not None and self._staged.come_back():
            self._files, runtime = self._opened([]), None
        options = Options(self.bad_samples, self.threads, self.cache, self._window_nbytes, self._window)
        if runtime is None or not runtime.fits(options):
            runtime = self._runtime = Runtime(options, self._files)
        return runtime

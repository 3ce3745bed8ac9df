"""The samples of HDF5 files: what a dataset of any framework is made of."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.arrays.arrangements import GroupedSamples
from fastpipe.arrays.form import Form
from fastpipe.arrays.hdf5.keeping import ChunkKeeper
from fastpipe.arrays.hdf5.plan import HDF5Plan
from fastpipe.arrays.hdf5.runtime import Options, Runtime
from fastpipe.arrays.hdf5.sharing import shared_window
from fastpipe.arrays.process import Process
from fastpipe.arrays.reading import Reading, checked_threads, drawn_substitute
from fastpipe.arrays.staged_files import staged_files
from fastpipe.cache.window import SharedWindow
from fastpipe.index.arrays import default_file_arrays
from fastpipe.options import BadSamples, Cache, Stage
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.types import Key

__all__ = ["HDF5Samples"]

_SPARE_GROUPS = 8  # beyond a small window, for batches on their way


class HDF5Samples(GroupedSamples):
    """Rows of HDF5 datasets.

    Args:
        process: gives this process, for a number of threads and their name.
        path, keys, sample_dims, cache, bad_samples, threads, stage, storage_options: see
            :class:`fastpipe.FastHDF5Dataset`, with whose errors.

    Attributes:
        path, keys, sample_dims: as given.
        cache, bad_samples, threads, stage: these options; what is changed counts from the next batch on.
    """

    def __init__(
        self,
        process: Callable[[int | str, str], Process],
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keys: str | Sequence[str] | Mapping[Any, str],
        *,
        sample_dims: int,
        cache: Cache | Literal["auto", "ram", "disk", "off"],
        bad_samples: BadSamples | Literal["raise", "replace", "skip"],
        threads: int | Literal["auto"],
        stage: Stage | str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._process, self._form = process, Form.of(keys)
        self.path, self.keys, self.sample_dims = path, keys, sample_dims
        self.cache = Cache.of(cache)
        self.bad_samples = BadSamples.of(bad_samples)
        self.threads = checked_threads(threads)
        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
        self.stage = None if stage is None else Stage.of(stage)
        self._staged = staged_files(paths, storage_options, self.stage)
        self._files = self._opened(paths)
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

    def __getstate__(self) -> dict[str, Any]:
        # Threads and open files stay here; the copy has its own when it needs them.
        return {**self.__dict__, "_runtime": None}

    @property
    def kinds(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """For each of a sample's values the type of its elements, and its shape."""
        found = []
        for number, layout in enumerate(self._files.layouts):
            element, inner = layout.dtype.subdtype or (layout.dtype, ())
            found.append((element, (*self._files.sample_shape(number), *inner)))
        return found

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

    def follow(self, batches: Callable[[], Iterator[npt.NDArray[np.int64]]], seed: int, epoch: int) -> None:
        """Nothing has to be fetched: files of stores are staged whole, before the dataset is there."""

    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]],
    ) -> Reading:  # fmt: skip
        """How a batch is read; as of `BatchReader`."""
        runtime.watch.look()
        substitute = None if key is None else partial(drawn_substitute, len(self), samples, key)
        return Reading(
            lambda some, rows: runtime.open.tasks(some, rows, arrays), samples, runtime.policy, substitute,
            lambda: f"{self._files.shown_of(int(samples[0]))}, sample {samples[0]}",
        )  # fmt: skip

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
            process = self._process(self.threads, "fastpipe-hdf5")
            runtime = self._runtime = Runtime(options, self._files, process)
        return runtime

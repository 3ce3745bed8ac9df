"""The samples of HDF5 files: what a dataset of any framework is made of."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.arrays.staged_files import staged_files
from fastpipe.core.array_cache import default_file_arrays
from fastpipe.core.array_samples import Form, Reading, checked_threads, drawn_substitute
from fastpipe.core.order import GroupedSamples
from fastpipe.core.pool import Process
from fastpipe.core.text import in_bytes, printable
from fastpipe.core.types import Key
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.kept import ChunkKeeper
from fastpipe.hdf5.layout import Layout
from fastpipe.hdf5.memory import SharedChunks
from fastpipe.hdf5.runtime import Options, Runtime
from fastpipe.options import BadSamples, Cache, Stage

__all__ = ["HDF5Plan", "HDF5Samples"]

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
        self._window = 0
        self._shared: SharedChunks | None = None
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
        reader = runtime.reader
        return Reading(
            lambda some, rows: reader.start(some, rows, arrays),
            lambda sample, row: reader.read_alone(sample, row, arrays),
            samples, runtime.policy, substitute, runtime.heard,
            lambda: f"{self._files.shown_of(int(samples[0]))}, sample {samples[0]}",
        )  # fmt: skip

    def _expect_window(self, groups: int) -> None:
        # What is left of the window before, when the next begins, is used first; but not by every thread.
        more = groups + min(groups, max(groups // 4, _SPARE_GROUPS))
        if more > self._window:
            self._window = more
            # Worker processes are farther apart: one begins the next window when others are in this one.
            more = groups + min(groups, max(groups // 2, _SPARE_GROUPS))
            self._shared = SharedChunks(self._files, self._leading, more)

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
        options = Options(self.bad_samples, self.threads, self.cache, self._window, self._shared)
        if runtime is None or not runtime.fits(options):
            process = self._process(self.threads, "fastpipe-hdf5")
            runtime = self._runtime = Runtime(options, self._files, self._leading, process)
        return runtime


class HDF5Plan:
    """What an HDF5 dataset does with its files.  ``print`` it.

    Attributes:
        lines: one for each dataset, and one for the decoded chunks.

    Args:
        form: what a sample is made of.
        files: where samples are.
        kept: where decoded chunks are kept, in words.
    """

    def __init__(self, form: Form, files: SampleFiles, kept: str) -> None:
        self.lines = [
            printable(f"{name}: {files.sample_shape(number)} {layout.dtype}  →  {_how(files, number)}")
            for number, (name, layout) in enumerate(zip(form.names, files.layouts, strict=True))
        ]
        self.lines.append(f"decoded chunks  →  {kept}")

    def __repr__(self) -> str:
        return "HDF5Plan(\n" + "".join(f"  {line}\n" for line in self.lines) + ")"


def _how(files: SampleFiles, number: int) -> str:
    layouts = [file.layouts[number] for file in files.files]
    slow = [layout for layout in layouts if layout.kind == "h5py"]
    if slow:
        some = f" in {len(slow)} of {len(layouts)} files" if len(slow) < len(layouts) else ""
        return f"through h5py, one thread at a time{some}, as {slow[0].why}"
    return _direct(layouts[0], files.files[0].sample_dims)


def _direct(layout: Layout, sample_dims: int) -> str:
    if not layout.filters:
        return "read row by row, in threads"
    samples = math.prod(layout.chunk[:sample_dims])
    nbytes = layout.dtype.itemsize * math.prod(layout.chunk)
    filters = " and ".join(step.name for step in layout.filters)
    return f"chunks of {samples} samples ({in_bytes(nbytes)}; {filters}), decoded in threads"

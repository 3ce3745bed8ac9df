"""Several HDF5 files as one dataset: their samples one after the other."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.protocols import ChunkTables
from fastpipe.read.hdf5.context import ALONE, ReadContext
from fastpipe.read.hdf5.file import OpenFile, SampleFile
from fastpipe.read.hdf5.layout import Layout
from fastpipe.read.hdf5.reader import ReadTask

__all__ = ["OpenFiles", "SampleFiles"]

Int64Array = npt.NDArray[np.int64]

_MOST_OPEN = 128  # descriptors, of those that a process may have: often 1,024, and 256 by default on macOS
_MANY = 16  # files of a batch that are all open while its tasks wait


class SampleFiles:
    """Files whose datasets of the same names follow each other.  Can be sent to other processes.

    Args:
        paths: at least one.
        names, sample_dims, tables: as for ``SampleFile``.
        shown: what messages call the files, where it is not by their paths.

    Attributes:
        files: in order.
        count: samples of all.
        firsts: int64 (files + 1,): the number of each file's first sample, and the end.

    Raises:
        OptionError: no path, or files whose samples are not of one kind.
        Others: as for ``SampleFile``.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: ChunkTables | None = None,
        shown: Sequence[str] | None = None,
    ) -> None:
        if not paths:
            raise OptionError("no HDF5 file was named")
        self.files = [
            SampleFile(path, names, sample_dims, tables, name)
            for path, name in zip(paths, shown or [""] * len(paths), strict=True)
        ]
        for file in self.files[1:]:
            self._check_like_first(file, names)
        self.firsts = np.cumsum([0, *(file.count for file in self.files)], dtype=np.int64)
        self.count = int(self.firsts[-1])

    @property
    def layouts(self) -> list[Layout]:
        """The first file's, for each dataset."""
        return self.files[0].layouts

    def sample_shape(self, number: int) -> tuple[int, ...]:
        """The shape of a sample of one of the datasets."""
        return self.files[0].sample_shape(number)

    def located(self, samples: Int64Array) -> list[tuple[int, Int64Array]]:
        """The files that have samples, and for each the places of its samples in the array.

        Args:
            samples: int64 (N,), each at least 0 and below ``count``.
        """
        if len(self.files) == 1:
            return [(0, np.arange(len(samples)))] if len(samples) else []
        owners = np.searchsorted(self.firsts, samples, side="right") - 1
        return [(int(number), np.flatnonzero(owners == number)) for number in np.unique(owners)]

    def groups(self, number: int) -> Int64Array:
        """The group of each sample, by the chunks of one dataset: int64 (count,)."""
        found, first = [np.zeros(0, np.int64)], 0
        for file in self.files:
            geometry = file.geometry(number)
            found.append(geometry.places(np.arange(file.count))[0] + first)
            first += geometry.groups
        return np.concatenate(found)

    def samples_in_group(self, number: int) -> int:
        """The most samples that a group of one dataset has in the first file."""
        return self.files[0].geometry(number).group_size

    def shown_of(self, sample: int) -> str:
        """What messages call the file of a sample."""
        return self.files[int(np.searchsorted(self.firsts, sample, side="right")) - 1].shown

    def open(self, context: ReadContext = ALONE) -> OpenFiles:
        """The files in this process; each is opened when it is first read.

        Args:
            context: what their readers have in common.
        """
        return OpenFiles(self, context)

    def _check_like_first(self, file: SampleFile, names: Sequence[str]) -> None:
        first = self.files[0]
        for number, name in enumerate(names):
            one, other = ((each.sample_shape(number), each.layouts[number].dtype) for each in (first, file))
            if one != other:
                raise OptionError(
                    f"the samples of {name!r} are {one[0]} {one[1]} in {first.shown} and {other[0]} "
                    f"{other[1]} in {file.shown}: files of one dataset must be alike"
                )


class OpenFiles:
    """Files in one process.  For threads at once; made by ``SampleFiles.open``."""

    def __init__(self, files: SampleFiles, context: ReadContext) -> None:
        self._files, self._context = files, context
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        is_opened_twice = any(layout.kind == "h5py" for file in files.files for layout in file.layouts)
        self._most = _MOST_OPEN // 2 if is_opened_twice else _MOST_OPEN

    def tasks(
        self, samples: Int64Array, rows: Int64Array, outs: Sequence[npt.NDArray[Any]]
    ) -> list[ReadTask]:
        """As ``OpenFile.tasks``, for samples of all files."""
        if len(self._files.files) == 1:  # as a rule, and with little to do
            return self._opened(0).tasks(samples, rows, outs)
        found: list[ReadTask] = []
        located = self._files.located(samples)
        for number, places in located:
            local = samples[places] - self._files.firsts[number]
            if len(located) > _MANY:  # each of which is opened when its turn comes
                found.append(ReadTask(rows[places], partial(self._read, number, local, rows[places], outs)))
            else:
                found += self._opened(number).tasks(local, rows[places], outs)
        return found

    def _read(
        self, number: int, samples: Int64Array, rows: Int64Array, outs: Sequence[npt.NDArray[Any]]
    ) -> None:
        for task in self._opened(number).tasks(samples, rows, outs):
            task.run()

    def _opened(self, number: int) -> OpenFile:
        with self._lock:
            file = self._open.get(number)
            if file is None:
                file = self._open[number] = self._files.files[number].open(self._context, number)
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return file

"""The datasets of one HDF5 file that make up samples together: opened, checked, and read in any process."""

from __future__ import annotations

import errno
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.read.hdf5.errors import ChunkError
from fastpipe.read.hdf5.layout import Layout, read_layout
from fastpipe.read.hdf5.reader import SampleReader

__all__ = ["SampleFile"]

Int64Array = npt.NDArray[np.int64]
_State = tuple[int, int, int, int]


class SampleFile:
    """Datasets with equally many samples.  For threads at once, in the process that made it and others.

    Args:
        path: the file.
        names: the datasets' paths in it.
        sample_dims: how many of their first dimensions count samples; these must be equal in all.

    Attributes:
        path: as given.
        layouts: of each dataset.
        count: samples.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        KeyError: there is no such dataset; the message names those that there are.
        HDF5Error: it is no HDF5 file, it is damaged, or somebody has it open for writing.
        OptionError: the datasets do not have the same samples.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str], sample_dims: int = 1) -> None:
        self.path = os.fspath(path)
        self._state = _state(os.stat(self.path))
        with _opened(self.path) as file:
            datasets = [_dataset(file, name, self.path) for name in names]
            _check_samples(datasets, names, sample_dims, self.path)
            self.layouts: list[Layout] = [read_layout(dataset) for dataset in datasets]
        self._sample_dims = sample_dims
        self.count = math.prod(self.layouts[0].shape[:sample_dims])
        self._handles: _Handles | None = None

    def sample_shape(self, number: int) -> tuple[int, ...]:
        """The shape of a sample of one of the datasets."""
        return self.layouts[number].shape[self._sample_dims :]

    def tasks(self, samples: Int64Array, outs: Sequence[npt.NDArray[Any]]) -> list[Callable[[], None]]:
        """What is to be done for some samples; the tasks can run side by side, in any order.

        Args:
            samples: int64 (N,), each at least 0 and below ``count``.
            outs: for each dataset an array (N, *sample_shape) of its dtype, C-contiguous.

        Returns:
            Functions that raise

            * HDF5Error: the file does not hold what it should, or is another one than when it was opened.
            * OSError: it cannot be read.
        """
        handles = self._opened_here()
        found: list[Callable[[], None]] = []
        for number, out in enumerate(outs):
            reader = handles.readers[number]
            if reader is None:
                found.append(partial(self._through_library, handles, number, samples, out))
            else:
                flat = out.reshape(-1).view(np.uint8)
                found += [partial(self._direct, handles, task) for task in reader.tasks(samples, flat)]
        return found

    def close(self) -> None:
        """Close what this process has open, once tasks that were begun are done; it is opened again when
        it is needed."""
        self._handles = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": None}

    def _opened_here(self) -> _Handles:
        """What this process has open: a child of a fork must not share the library's."""
        handles = self._handles
        if handles is None or handles.pid != os.getpid():
            # Of two threads that come at once each opens the file, and one of the two is kept.
            handles = self._handles = _Handles(self.path, self.layouts, self._sample_dims)
        self._check_unchanged(handles)
        return handles

    def _check_unchanged(self, handles: _Handles) -> None:
        if _state(os.fstat(handles.descriptor)) != self._state:
            raise HDF5Error(
                f"{self.path} has changed since it was opened; make the dataset anew when it is complete"
            )

    def _direct(self, handles: _Handles, task: Callable[[], None]) -> None:
        """Run a task that reads from the descriptor, which ``handles`` keeps open."""
        try:
            task()
        except ChunkError as error:
            self._check_unchanged(handles)
            raise HDF5Error(f"{error}; the file is damaged: restore it from a copy") from None

    def _through_library(
        self, handles: _Handles, number: int, samples: Int64Array, out: npt.NDArray[Any]
    ) -> None:
        dataset, layout = handles.dataset(number), self.layouts[number]
        lead = layout.shape[: self._sample_dims]
        try:
            for place, index in enumerate(zip(*np.unravel_index(samples, lead), strict=True)):
                out[place] = dataset[tuple(map(int, index))]
        except (OSError, RuntimeError) as error:
            raise HDF5Error(f"{self.path}, dataset {layout.name}: {error}") from error


class _Handles:
    """What one process has open.  It is closed when nobody refers to it any more, nor any task."""

    def __init__(self, path: str, layouts: Sequence[Layout], sample_dims: int) -> None:
        self.pid = os.getpid()
        self._path, self._layouts = path, layouts
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.readers = [
            None if layout.kind == "h5py" else SampleReader(layout, sample_dims, self.descriptor)
            for layout in layouts
        ]
        self._lock = threading.Lock()
        self._file: Any = None

    def dataset(self, number: int) -> Any:
        """A dataset that only the library can read."""
        with self._lock:
            if self._file is None:
                self._file = require("h5py", extra="hdf5").File(self._path, "r")
        return self._file[self._layouts[number].name]


def _state(status: os.stat_result) -> _State:
    # Not the time of change: a file that is renamed, or loses a name, has the same content.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """An open ``h5py.File``, or an error that says what to do."""
    h5py = require("h5py", extra="hdf5")
    with open(path, "rb"):  # its errors are clearer than the library's
        pass
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) or "lock file" in str(error):
            remedy = "close it there, or set HDF5_USE_FILE_LOCKING=FALSE if nobody writes to it any more"
            raise HDF5Error(f"{path} is open for writing elsewhere: {remedy}") from error
        if not h5py.is_hdf5(path):
            raise HDF5Error(f"{path} is no HDF5 file") from error
        raise HDF5Error(f"{path} cannot be opened, it may be cut off: {error}") from error
    with file:
        yield file


def _dataset(file: Any, name: str, path: str) -> Any:
    h5py = require("h5py", extra="hdf5")
    found = file.get(name)
    if isinstance(found, h5py.Dataset):
        if found.shape:
            return found
        raise OptionError(f"{path}: {name!r} is a single value, without samples")
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise KeyError(f"{path} has no dataset {name!r}; it has {', '.join(sorted(names)) or 'none'}")


def _check_samples(datasets: Sequence[Any], names: Sequence[str], sample_dims: int, path: str) -> None:
    if sample_dims < 1:
        raise OptionError(f"sample_dims must be a number from 1, got {sample_dims}")
    if not names:
        raise OptionError(f"{path}: no dataset was named")
    for dataset, name in zip(datasets, names, strict=True):
        if dataset.ndim < sample_dims:
            raise OptionError(
                f"{path}: {name!r} has {dataset.ndim} dimensions, and sample_dims={sample_dims} of them were "
                "to count samples"
            )
    leads = {name: tuple(dataset.shape[:sample_dims]) for name, dataset in zip(names, datasets, strict=True)}
    if len(set(leads.values())) > 1:
        shapes = ", ".join(f"{name!r} {lead}" for name, lead in leads.items())
        raise OptionError(f"{path}: the datasets have different samples along the first dimensions: {shapes}")

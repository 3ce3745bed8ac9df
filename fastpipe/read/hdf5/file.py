"""The datasets of one HDF5 file that make up samples together: opened, checked, and read in any process."""

from __future__ import annotations

import errno
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
from fastpipe.read.hdf5.geometry import Geometry
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
        self._compact: dict[int, bytes] = {}
        with _opened(self.path) as file:
            datasets = [_dataset(file, name, self.path) for name in names]
            _check_samples(datasets, names, sample_dims, self.path)
            self.layouts: list[Layout] = [read_layout(dataset) for dataset in datasets]
            for number, layout in enumerate(self.layouts):
                if layout.kind == "compact":
                    self._compact[number] = datasets[number][...].tobytes()
        self._sample_dims = sample_dims
        self.count = _geometry(self.layouts[0], sample_dims).count
        self._handles: _Handles | None = None
        self._opening = threading.Lock()

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
                found += [
                    partial(self._said, task)
                    for task in reader.tasks(samples, out.reshape(-1).view(np.uint8))
                ]
        return found

    def close(self) -> None:
        """Close what this process has open; it is opened again when it is needed."""
        with self._opening:
            handles, self._handles = self._handles, None
        if handles is not None:
            handles.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": None, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opening=threading.Lock())

    def _opened_here(self) -> _Handles:
        """Descriptors of this process: a child of a fork must not share the library's."""
        handles = self._handles
        if handles is None or handles.pid != os.getpid():
            if handles is not None:  # the parent's lock may have been held when this process began
                self._opening = threading.Lock()
            with self._opening:
                handles = self._handles
                if handles is None or handles.pid != os.getpid():
                    handles = self._handles = _Handles(self)
        if _state(os.fstat(handles.descriptor)) != self._state:
            raise HDF5Error(_changed(self.path))
        return handles

    def _said(self, task: Callable[[], None]) -> None:
        try:
            task()
        except ChunkError as error:
            if self._has_changed():
                raise HDF5Error(_changed(self.path)) from error
            raise HDF5Error(f"{error}; the file is damaged: restore it from a copy") from None

    def _has_changed(self) -> bool:
        try:
            return _state(os.stat(self.path)) != self._state
        except OSError:
            return True

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
    """What one process has open."""

    def __init__(self, owner: SampleFile) -> None:
        self.pid = os.getpid()
        self._path, self._layouts = owner.path, owner.layouts
        self.descriptor = os.open(owner.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._finalizer = weakref.finalize(self, _close_descriptor, self.descriptor, self.pid)
        self._finalizer.atexit = False
        self.readers = [
            None
            if layout.kind == "h5py"
            else SampleReader(layout, owner._sample_dims, self.descriptor, owner._compact.get(number, b""))
            for number, layout in enumerate(owner.layouts)
        ]
        self._lock = threading.Lock()
        self._file: Any = None

    def dataset(self, number: int) -> Any:
        """A dataset that only the library can read."""
        with self._lock:
            if self._file is None:
                self._file = require("h5py", extra="hdf5").File(self._path, "r")
        return self._file[self._layouts[number].name]

    def close(self) -> None:
        if self._file is not None and self.pid == os.getpid():
            self._file.close()
        self._finalizer()


def _close_descriptor(descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # a child's copy goes with the child
        os.close(descriptor)


def _geometry(layout: Layout, sample_dims: int) -> Geometry:
    return Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, sample_dims)


def _state(status: os.stat_result) -> _State:
    # Not the time of change: a file that is renamed, or loses a name, has the same content.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: str) -> str:
    return f"{path} has changed since it was opened; make the dataset anew when it is complete"


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

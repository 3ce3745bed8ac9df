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
from fastpipe.protocols import ChunkTables
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.hdf5.context import ALONE, ReadContext
from fastpipe.read.hdf5.errors import DamagedError
from fastpipe.read.hdf5.geometry import Geometry
from fastpipe.read.hdf5.layout import Layout, in_blocks, read_layout
from fastpipe.read.hdf5.library import require_filters
from fastpipe.read.hdf5.reader import ReadTask, SampleReader

__all__ = ["OpenFile", "SampleFile", "check_is_in_file", "opened"]

Int64Array = npt.NDArray[np.int64]
# The library's cache of chunks, for what only it can read; its number of slots is to be a prime.
_LIBRARY_NBYTES, _LIBRARY_SLOTS = 1 << 23, 10_007
_State = tuple[int, int, int, int]


class SampleFile:
    """Datasets with equally many samples: where their bytes are.  ``open`` reads them; this can be sent
    to other processes.

    Args:
        path: the file.
        names: the datasets' paths in it.
        sample_dims: how many of their first dimensions count samples; these must be equal in all.
        tables: where chunk tables are kept from one time to the next, or None.
        shown: what messages call the file, where it is not its path: the URL that it was copied from.

    Attributes:
        path: as given.
        shown: as given, or the path.
        layouts: of each dataset.
        count: samples.
        sample_dims: as given.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        KeyError: there is no such dataset; the message names those that there are.
        HDF5Error: it is no HDF5 file, it is damaged, or somebody has it open for writing.
        OptionError: the datasets do not have the same samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str],
        sample_dims: int = 1,
        tables: ChunkTables | None = None,
        shown: str = "",
    ) -> None:
        self.path = os.fsdecode(path)
        self.shown = shown or self.path
        status = os.stat(self.path)
        self._state = _state(status)
        with opened(self.path, self.shown) as file:
            datasets = [_dataset(file, name, self.shown) for name in names]
            _check_samples(datasets, names, sample_dims, self.shown)
            self.layouts: list[Layout] = [
                read_layout(dataset, tables, status)._replace(shown=shown) for dataset in datasets
            ]
            for dataset, layout in zip(datasets, self.layouts, strict=True):
                if layout.kind == "h5py":
                    require_filters(dataset, shown)
        self.sample_dims = sample_dims
        self.count = math.prod(self.layouts[0].shape[:sample_dims])

    def sample_shape(self, number: int) -> tuple[int, ...]:
        """The shape of a sample of one of the datasets."""
        return self.layouts[number].shape[self.sample_dims :]

    def geometry(self, number: int) -> Geometry:
        """The samples and chunks of one of the datasets; where it has none, blocks of about a megabyte."""
        layout = in_blocks(self.layouts[number])
        return Geometry(layout.shape, layout.chunk, layout.dtype.itemsize, self.sample_dims)

    def open(self, context: ReadContext = ALONE, number: int = 0) -> OpenFile:
        """Open the file in this process.

        Args:
            context: what its readers and those of other files have in common.
            number: of the file among all.

        Raises:
            OSError: as ``open`` raises them.
            HDF5Error: it is not the file that it was.
        """
        return OpenFile(self, context, number)

    def check_unchanged(self, where: int | str) -> None:
        """Raise an error if the file is not as it was when it was laid out.

        Args:
            where: a descriptor of it, or its path.

        Raises:
            HDF5Error: it has changed.
        """
        if _state(os.stat(where)) != self._state:
            raise HDF5Error(
                f"{self.shown} has changed since it was opened; make the dataset anew when it is complete"
            )


class OpenFile:
    """The samples of one file, in the process that opened it.  For threads at once; made by
    ``SampleFile.open``.

    It is closed when nobody refers to it any more, nor to a task of it.

    Attributes:
        file: what it is of.
        descriptor: of the file.
    """

    def __init__(self, file: SampleFile, context: ReadContext, number: int) -> None:
        self.file = file
        self.descriptor = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        file.check_unchanged(self.descriptor)
        first = number * len(file.layouts)
        self._readers = [
            None
            if layout.kind == "h5py"
            else SampleReader(layout, file.sample_dims, self.descriptor, context, first + place)
            for place, layout in enumerate(file.layouts)
        ]
        self._lock = threading.Lock()
        self._library: Any = None

    def tasks(
        self, samples: Int64Array, rows: Int64Array, outs: Sequence[npt.NDArray[Any]]
    ) -> list[ReadTask]:
        """What is to be done for some samples; the tasks can run side by side, in any order.

        Args:
            samples: int64 (N,), each at least 0 and below the file's ``count``.
            rows: int64 (N,): which row of the batch each is.
            outs: for each dataset an array (batch, *sample_shape) of its dtype, C-contiguous.

        Returns:
            Tasks that raise

            * DamagedError: the file does not hold what it should.
            * OSError: it cannot be read.

        Raises:
            HDF5Error: the file has changed since it was laid out.
        """
        self.file.check_unchanged(self.descriptor)
        found: list[ReadTask] = []
        for number, (reader, out) in enumerate(zip(self._readers, outs, strict=True)):
            if reader is None:
                found.append(ReadTask(rows, partial(self._through_library, number, samples, rows, out)))
            else:
                flat = out.reshape(-1).view(np.uint8)
                for task in reader.tasks(samples, rows, flat):
                    found.append(ReadTask(task.rows, partial(self._direct, task.run)))
        return found

    def _direct(self, run: Callable[[], None]) -> None:
        """Run a task that reads from the descriptor, which this object keeps open."""
        try:
            run()
        except ChunkError as error:
            self.file.check_unchanged(self.descriptor)
            raise DamagedError(str(error)) from None

    def _through_library(
        self, number: int, samples: Int64Array, rows: Int64Array, out: npt.NDArray[Any]
    ) -> None:
        dataset, layout = self._dataset(number), self.file.layouts[number]
        # In the file's order: what one of the library's chunks holds is then read at once.
        order = np.argsort(samples, kind="stable")
        lead = layout.shape[: self.file.sample_dims]
        indices = zip(*np.unravel_index(samples[order], lead), strict=True)
        try:
            for row, index in zip(rows[order].tolist(), indices, strict=True):
                out[row] = dataset[tuple(map(int, index))]
        except (OSError, RuntimeError) as error:
            raise DamagedError(f"{self.file.shown}, dataset {layout.name}: {error}") from error

    def _dataset(self, number: int) -> Any:
        """A dataset that only the library can read."""
        with self._lock:
            if self._library is None:
                # Rows come in the file's order: of each dataset one chunk at a time, and the next.
                largest = max(layout.library_chunk for layout in self.file.layouts)
                room = max(_LIBRARY_NBYTES, 2 * largest)
                library = require("h5py", extra="hdf5").File(
                    self.file.path, "r", rdcc_nbytes=room, rdcc_nslots=_LIBRARY_SLOTS, rdcc_w0=1.0
                )
                self.file.check_unchanged(self.file.path)  # by now another may be at the path
                self._library = library
            dataset = self._library[self.file.layouts[number].name]
            require_filters(dataset, self.file.shown)
        return dataset


def _state(status: os.stat_result) -> _State:
    # Not the time of change: a file that is renamed, or loses a name, has the same content.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def opened(path: str, shown: str = "") -> Iterator[Any]:
    """An open ``h5py.File``, or an error that says what to do, and calls the file ``shown`` or its path."""
    shown = shown or path
    h5py = require("h5py", extra="hdf5")
    with open(path, "rb"):  # its errors are clearer than the library's
        pass
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) or "lock file" in str(error):
            remedy = "close it there, or set HDF5_USE_FILE_LOCKING=FALSE if nobody writes to it any more"
            raise HDF5Error(f"{shown} is open for writing elsewhere: {remedy}") from error
        if not h5py.is_hdf5(path):
            raise HDF5Error(f"{shown} is no HDF5 file") from error
        raise HDF5Error(f"{shown} cannot be opened, it may be cut off: {error}") from error
    with file:
        yield file


def _dataset(file: Any, name: str, shown: str) -> Any:
    h5py = require("h5py", extra="hdf5")
    found = file.get(name)
    if isinstance(found, h5py.Dataset):
        check_is_in_file(found, file, name, shown)
        try:
            found.dtype  # noqa: B018
        except TypeError as error:
            raise OptionError(
                f"{shown}: the elements of {name!r} are of a type that NumPy has not"
            ) from error
        if found.shape:
            return found
        raise OptionError(f"{shown}: {name!r} is a single value, without samples")
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise KeyError(f"{shown} has no dataset {name!r}; it has {', '.join(sorted(names)) or 'none'}")


def check_is_in_file(dataset: Any, file: Any, name: str, shown: str) -> None:
    """Raise an error for a dataset that lies in another file: its bytes would be sought in this one.

    Args:
        dataset: as the library found it.
        file: the open file.
        name: by which it was found there.
        shown: what messages call the file.

    Raises:
        HDF5Error: a link leads out of the file.
    """
    about = require("h5py.h5o", extra="hdf5").get_info
    if about(dataset.id).fileno != about(file.id).fileno:
        raise HDF5Error(
            f"{shown}: {name!r} is a link into another file: name that, {dataset.file.filename}, and its "
            f"dataset {dataset.name!r}"
        )


def _check_samples(datasets: Sequence[Any], names: Sequence[str], sample_dims: int, shown: str) -> None:
    if sample_dims < 1:
        raise OptionError(f"sample_dims must be a number from 1, got {sample_dims}")
    if not names:
        raise OptionError(f"{shown}: no dataset was named")
    for dataset, name in zip(datasets, names, strict=True):
        if dataset.ndim < sample_dims:
            raise OptionError(
                f"{shown}: {name!r} has {dataset.ndim} dimensions, and sample_dims={sample_dims} of them "
                "were to count samples"
            )
    leads = {name: tuple(dataset.shape[:sample_dims]) for name, dataset in zip(names, datasets, strict=True)}
    if len(set(leads.values())) > 1:
        shapes = ", ".join(f"{name!r} {lead}" for name, lead in leads.items())
        raise OptionError(
            f"{shown}: the datasets have different samples along the first dimensions: {shapes}"
        )

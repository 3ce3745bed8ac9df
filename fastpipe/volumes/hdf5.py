"""Read datasets of HDF5 files as volumes."""

from __future__ import annotations

import errno
import operator
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.files import lent
from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5 import chunks
from fastpipe.hdf5.filters import described
from fastpipe.hdf5.layout import Layout, read_layout
from fastpipe.hdf5.library import OpenFiles, require_filters
from fastpipe.hdf5.opening import (
    DamagedError,
    dataset_named,
    dataset_names,
    datasets_of,
    library_errors,
    lies_in,
    name_of,
    open_library,
    opened,
    raw_name,
)
from fastpipe.volumes.raw import RawVolume, raw_unit
from fastpipe.volumes.volume import (
    DamagedUnitError,
    FileState,
    Int64Array,
    UInt8Array,
    UnitGrid,
    UnitReader,
    Volume,
    box_text,
    chunk_text,
)


def hdf5_volume(path: str, inside: str, tables: FileArrays | None = None) -> Volume:
    """Open the dataset ``inside`` of an HDF5 file; ``inside`` may be empty if the file has one dataset."""
    status = os.stat(path)
    with opened(path) as file, library_errors(path):
        dataset = _dataset(file, inside, path)
        is_alone = lies_in(dataset, file)
        layout = read_layout(dataset, tables, status, "" if is_alone else inside)
        if layout.kind == "h5py":
            require_filters(dataset, path)
        chunks = dataset.chunks
        is_written = file.swmr_mode
        is_alone = is_alone and not (is_written or dataset.is_virtual or dataset.external)
    # ``status`` was taken before the file was opened, so that later changes are detected.
    if layout.kind == "contiguous" and layout.offsets[0] >= 0:
        how = "HDF5, contiguous and not compressed"
        return RawVolume(path, layout.shape, layout.dtype, int(layout.offsets[0]), False, how, status)
    return HDF5Volume(
        path, layout, FileState.of(path, status, is_written=is_written), chunks, is_alone=is_alone
    )


def _dataset(file: Any, inside: str, path: str) -> Any:
    if inside:
        item = dataset_named(file, inside, path)
    else:
        found = datasets_of(file, path)
        item = found[0] if len(found) == 1 else None
    if item is None:
        what = f"{path} has no dataset {inside!r}" if inside else f"name a dataset of {path} behind a slash"
        raise OptionError(f"{what}; it has {dataset_names(file, path)}")
    name = name_of(item)
    try:
        item.dtype  # noqa: B018
    except TypeError as error:
        raise OptionError(f"{path}: {name} has elements of a type that NumPy does not have") from error
    if item.dtype.kind not in "biufc" or item.dtype.hasobject or not item.shape:
        raise OptionError(f"{path}: {name} is no array of numbers: {item.dtype} of shape {item.shape}")
    return item


class HDF5Volume(Volume):
    """A dataset that is read chunk by chunk.

    ``chunks`` is the dataset's chunk shape.  If the dataset has no chunks, ``chunks`` is None.  ``is_alone``
    is False if values of the dataset can change without a change of the file.
    """

    def __init__(
        self, path: str, layout: Layout, state: FileState, chunks: Sequence[int] | None, *,
        is_alone: bool = True,
    ) -> None:  # fmt: skip
        self._is_alone = is_alone
        self.name, self.path, self.layout = f"{path}{layout.name}", path, layout
        self.shape, self.dtype, self.opened = layout.shape, layout.dtype, state
        self._fill = layout.fill  # empty (unknown) if h5py reads the dataset
        if layout.kind == "h5py":
            unit = list(chunks or raw_unit(self.shape, self.dtype.itemsize))
            self.how = f"HDF5, through h5py one thread at a time, as {layout.why}"
        elif layout.kind == "contiguous":
            unit = raw_unit(self.shape, self.dtype.itemsize)
            self.how = "HDF5, contiguous and never written"
        else:
            unit = [max(1, side) for side in layout.chunk]
            filters = " and ".join(step.name for step in layout.filters) or "not compressed"
            self.how = f"HDF5, chunks of {chunk_text(unit, self.dtype, filters)}"
        self.grid = UnitGrid(self.shape, unit)

    def native_source(self) -> Any | None:
        layout = self.layout
        if layout.kind != "chunked":
            return None
        return native.volume_in_segments(
            os.fsencode(self.path), self.opened.state, self.shape, self.grid.unit, self.dtype.itemsize,
            layout.offsets, layout.sizes, layout.masks, [described(step) for step in layout.filters],
            layout.fill,
        )  # fmt: skip

    def open(self) -> UnitReader:
        # Datasets of other layouts are small, were never written, or can only be read by the library.
        return _ChunkReader(self) if self.layout.kind == "chunked" else _LibraryReader(self)

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        """Return 0 for all units, so that one call reads many units."""
        return np.zeros_like(numbers)

    def state(self) -> tuple[str, str]:
        """Return the file's path, and a text that contains the file's state and the dataset's name.

        Both strings are empty if the dataset's values can change without a change of the file.
        """
        if not self._is_alone:
            return "", ""
        return self.path, f"hdf5 2 {self.opened.state} {self.layout.name}"


class _ChunkReader(UnitReader):
    """A reader of chunks, which does not need the HDF5 library and its lock."""

    def __init__(self, volume: HDF5Volume) -> None:
        self._volume = volume
        self._file = chunks.data_file(volume.path, volume.opened.state)
        self._chunks = chunks.ChunkReader(volume.layout, volume.opened.state)
        self.check()

    def check(self) -> None:
        try:
            with lent(self._file, self._volume.path):
                pass
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise self._volume.opened.changed() from None
            raise

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        volume, layout = self._volume, self._volume.layout
        self.check()
        for place, (number, out) in enumerate(zip(numbers.tolist(), outs, strict=True)):
            if layout.offsets[number] < 0:  # the chunk was never written
                out.reshape(-1, len(layout.fill))[:] = np.frombuffer(layout.fill, np.uint8)
                continue
            try:
                self._chunks.decode(numbers[place : place + 1], out.reshape(1, -1))
            except ChunkError as error:
                self.check()
                raise DamagedUnitError(str(error)) from None
            except HDF5Error:  # the path leads to another file now
                raise volume.opened.changed() from None


class _LibraryReader(UnitReader):
    def __init__(self, volume: HDF5Volume) -> None:
        self._volume, self._lock = volume, threading.Lock()
        self._files = OpenFiles()

    def check(self) -> None:
        self._volume.opened.check()

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        volume = self._volume
        with self._lock:
            self.check()
            file = self._files.file(volume.path, self._opened)
            with library_errors(volume.name):
                dataset = file[raw_name(volume.layout.name)]
            for number, out in zip(numbers.tolist(), outs, strict=True):
                box = volume.grid.box(number)
                where = f"{volume.name}, the chunk at {box_text(box)},"
                try:
                    with library_errors(where, DamagedError, dataset):
                        part = dataset[box]
                except DamagedError as error:
                    raise DamagedUnitError(str(error)) from None
                volume.put(part, out)

    def _opened(self) -> Any:
        """Open the file, and check that this process's HDF5 library has the filters of the dataset."""
        volume = self._volume
        file = open_library(volume.path)
        self.check()  # the path may lead to another file now
        with library_errors(volume.name):
            dataset = file[raw_name(volume.layout.name)]
            require_filters(dataset, volume.path)
            if dataset.dtype != volume.dtype or any(map(operator.lt, dataset.shape, volume.shape)):
                raise volume.opened.changed()
        return file

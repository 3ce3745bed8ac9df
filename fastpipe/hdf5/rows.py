"""Rows of datasets as the file has them: read, written and compared without a change of form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.pool import NativeJob
from fastpipe.core.reads import MADE
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.library import require_filters
from fastpipe.hdf5.opening import DamagedError, library_errors, name_of
from fastpipe.hdf5.reader import RowReader

Array = npt.NDArray[Any]


def is_plain(kind: Any) -> bool:
    """Return whether elements of one of HDF5's types are nothing but their bytes."""
    h5t = require("h5py.h5t", extra="hdf5")
    return not any(
        each.get_class() in (h5t.VLEN, h5t.REFERENCE)
        or (each.get_class() == h5t.STRING and each.is_variable_str())
        for each in _types_in(kind)
    )


def has_references(kind: Any) -> bool:
    """Return whether elements of a type hold places in their file."""
    h5t = require("h5py.h5t", extra="hdf5")
    return any(each.get_class() == h5t.REFERENCE for each in _types_in(kind))


def _types_in(kind: Any) -> Iterator[Any]:
    """Yield a type and all that it is made of, however deep."""
    h5t = require("h5py.h5t", extra="hdf5")
    kinds = [kind]
    while kinds:
        kind = kinds.pop()
        yield kind
        if kind.get_class() == h5t.COMPOUND:
            kinds += map(kind.get_member_type, range(kind.get_nmembers()))
        elif kind.get_class() in (h5t.ARRAY, h5t.VLEN):
            kinds.append(kind.get_super())


def dtype_of(dataset: Any) -> np.dtype[Any] | None:
    """Return a dataset's type; None where NumPy has nothing for it."""
    try:
        found: np.dtype[Any] = dataset.dtype
    except (TypeError, ValueError):
        return None
    return found


def _has_gaps(dtype: np.dtype[Any]) -> bool:
    """Return whether some bytes of an element belong to no value."""
    if dtype.subdtype is not None:
        return _has_gaps(dtype.subdtype[0])
    if dtype.names is None:
        return False
    members = [dtype[name] for name in dtype.names]
    return sum(member.itemsize for member in members) < dtype.itemsize or any(map(_has_gaps, members))


def read_all(item: Any, shape: tuple[int, ...]) -> Array:
    """Read all of an attribute or a dataset that is a single value, by h5py's low-level object."""
    kind = item.get_type()
    if is_plain(kind):
        return _read(item, np.zeros(shape, _raw(kind)), kind)
    return _read(item, np.zeros(shape, item.dtype), None)


def _read(item: Any, out: Array, kind: Any) -> Array:
    h5s = require("h5py.h5s", extra="hdf5")
    if isinstance(item, require("h5py.h5d", extra="hdf5").DatasetID):
        item.read(h5s.ALL, h5s.ALL, out, kind)
    else:
        item.read(out, kind)
    return out


def _raw(kind: Any) -> np.dtype[Any]:
    return np.dtype((np.void, kind.get_size()))


def read_rows(dataset: Any, first: int, last: int) -> Array:
    """Read rows through h5py: bytes as the file has them, or objects where elements are not plain."""
    kind = dataset.id.get_type()
    shape = (last - first, *dataset.shape[1:])
    plain = is_plain(kind)
    # Zeros, as the library leaves gaps in compounds untouched where it fills in what was never written.
    out = np.zeros(shape, _raw(kind) if plain else dataset.dtype)
    if out.size:
        dataset.id.read(*_spaces(dataset, first, shape), out, kind if plain else None)
    return out


def write_rows(dataset: Any, first: int, rows: Array) -> None:
    """Write what ``read_rows`` read."""
    kind = dataset.id.get_type() if rows.dtype.kind == "V" and rows.dtype.names is None else None
    if rows.size:
        dataset.id.write(*_spaces(dataset, first, rows.shape), rows, kind)


def _spaces(dataset: Any, first: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    h5s = require("h5py.h5s", extra="hdf5")
    in_file = dataset.id.get_space()
    in_file.select_hyperslab((first, *(0 for _ in shape[1:])), shape)
    return h5s.create_simple(shape), in_file


def same_values(one: Any, other: Any) -> bool:
    """Return whether arrays hold the same bits; objects in them are compared by what they are."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.dtype.hasobject:
            return np.array_equal(_bytes_of(one), _bytes_of(other))
        if one.dtype.names:
            return all(same_values(one[name], other[name]) for name in one.dtype.names)
        pairs = zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
        return all(same_values(*pair) for pair in pairs)
    return type(one) is type(other) and bool(one == other)


def _bytes_of(values: Array) -> npt.NDArray[np.uint8]:
    return np.frombuffer(
        np.ascontiguousarray(values).tobytes() if values.ndim == 0 else _flat(values), np.uint8
    )


def _flat(values: Array) -> Any:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data if values.size else b""


class RowSource:
    """Rows of one dataset, read ahead by threads where fastpipe reads it itself.

    ``memory`` is bytes that chunks may take while they are decoded; one at a time in any case.
    """

    def __init__(self, dataset: Any, path: str, threads: int, memory: int) -> None:
        self._dataset, self._threads = dataset, 1
        self._reader: RowReader | None = None
        self._job: NativeJob | None = None  # of the rows that are being read
        # What is in the gaps of a compound is nobody's, but the same in each reading by the library.
        dtype = dtype_of(dataset)
        self._where = f"{path}, dataset {name_of(dataset)}"
        if dtype is None or not is_plain(dataset.id.get_type()) or not dataset.size or _has_gaps(dtype):
            require_filters(dataset, path)
            return
        files = SampleFiles([path], [name_of(dataset)])
        layout = files.layouts[0]
        if layout.kind != "h5py":
            chunk = int(np.prod(layout.chunk)) * dtype.itemsize if dataset.chunks else 1
            self._threads = max(1, min(threads, memory // max(chunk, 1)))
            self._reader = RowReader(files, threads=self._threads)

    def __enter__(self) -> RowSource:
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            self._job.cancel()

    def steps(self, first: int, step: int) -> Iterator[tuple[int, Array]]:
        """Yield where some rows begin, and these rows, from ``first`` on; the next are read meanwhile."""
        count = int(self._dataset.shape[0])
        starts = range(first, count, step)
        ahead = self._begin(first, min(first + step, count)) if starts else None
        for start in starts:
            end = min(start + step, count)
            rows = self._end(ahead) if ahead else self._through_library(start, end)
            ahead = self._begin(end, min(end + step, count)) if end < count else None
            yield start, rows

    def _through_library(self, first: int, last: int) -> Array:
        with library_errors(self._where, HDF5Error, self._dataset):
            return read_rows(self._dataset, first, last)

    def _begin(self, first: int, last: int) -> _Ahead | None:
        if self._reader is None:
            return None
        shape = (last - first, *self._dataset.shape[1:])
        out = np.empty(shape, self._dataset.dtype)
        started = self._reader.start(np.arange(first, last), np.arange(last - first), [out])
        channel = native.Channel(self._threads)
        self._job = NativeJob(started.batch, channel, self._threads, lambda: None)
        return _Ahead(first, out, started.statuses, self._job)

    def _end(self, ahead: _Ahead) -> Array:
        assert self._reader is not None
        ahead.job.wait()
        try:
            for row in np.flatnonzero(ahead.statuses[:, 0] != MADE).tolist():
                self._reader.read_alone(ahead.first + row, row, [ahead.out])
        except DamagedError as error:
            raise HDF5Error(f"{error}; the file is damaged: restore it from a copy") from None
        return ahead.out.view(np.dtype((np.void, ahead.out.dtype.itemsize)))


class _Ahead(NamedTuple):
    """Rows that are being read."""

    first: int
    out: Array
    statuses: npt.NDArray[np.uint8]
    job: NativeJob

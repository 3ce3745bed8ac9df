"""Where each row is in the files.

The structure of an HDF5 file is made by the library before there is any data, with chunks allocated at once
and not filled: chunks of whole rows then follow each other, so that the row ``r`` of a dataset lies at
``begin + r × bytes of a row``, whoever writes it and when.  Its bytes depend on nothing but the datasets,
the library and the attributes.  So rows are written without the library, and the structure is put around
them at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.core.extras import require
from fastpipe.generation.form import Column, Form, length_name
from fastpipe.hdf5.checkpoints import write_all

__all__ = [
    "Array",
    "Region",
    "arrays_of",
    "copy_between",
    "create",
    "fixed_arrays",
    "gaps",
    "rows_per_chunk",
]

_CHUNK_NBYTES = 64 << 10
_LARGEST_CHUNK = 2**32 - 1
_COPIED_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class Array:
    """A dataset of a file.

    Attributes:
        name: its.
        dtype: of its elements, also text of some width.
        shape: of a row.
        attributes: its.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * int(np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class Region:
    """Where a dataset's rows are.

    Attributes:
        begin: of the first, in bytes.
        row_nbytes: of each.
        rows: how many.
    """

    begin: int
    row_nbytes: int
    rows: int

    @property
    def end(self) -> int:
        """Behind the last row."""
        return self.begin + self.rows * self.row_nbytes


def fixed_arrays(form: Form) -> list[Array]:
    """The datasets whose rows are all of one shape."""
    return [Array(one.name, one.element, one.inner, {}) for one in form.fixed]


def arrays_of(form: Form, widths: Sequence[int]) -> list[Array]:
    """All datasets of a finished file, those of `fixed_arrays` first.

    Args:
        form: of samples.
        widths: the greatest length in each ragged column.
    """
    found = fixed_arrays(form)
    for column, width in zip(form.ragged, widths, strict=True):
        found += _ragged(column, max(width, 1))
    return found


def _ragged(column: Column, width: int) -> Iterator[Array]:
    """A ragged column: text of the greatest length; or rows of the greatest length, and lengths."""
    if column.is_text:
        h5py = require("h5py", extra="generation")
        yield Array(column.name, h5py.string_dtype("utf-8", width), (), {})
        return
    lengths = length_name(column.name)
    yield Array(column.name, column.element, (width, *column.inner), {"lengths": lengths})
    yield Array(lengths, np.dtype(np.int64), (), {})


def rows_per_chunk(row_nbytes: int, asked: int | None, rows: int) -> int:
    """Rows of a chunk: as asked, or as many as make 64 KiB."""
    wanted = _CHUNK_NBYTES // row_nbytes if asked is None else min(asked, _LARGEST_CHUNK // row_nbytes)
    return max(1, min(wanted, rows))


def create(
    path: Path, arrays: Sequence[Array], rows: int, chunk_rows: int | None, attributes: Mapping[str, Any]
) -> list[Region]:
    """Make a file with structure and without data; what holds data is not written to, and takes no room.

    Args:
        path: of the file, which is replaced.
        arrays: its datasets.
        rows: of each.
        chunk_rows: rows of a chunk; None to choose.
        attributes: the file's.

    Returns:
        Where the rows of each dataset go.
    """
    h5py = require("h5py", extra="generation")
    regions = []
    with h5py.File(_without_times(h5py, path)) as file:
        for array in arrays:
            dataset = _create_dataset(h5py, file, array, rows, chunk_rows)
            regions.append(_region(dataset, array, rows))
        for array in arrays:
            file[array.name].attrs.update(array.attributes)
        file.attrs.update(attributes)
    return regions


def _without_times(h5py: Any, path: Path) -> Any:
    """A new file in whose root nothing says when it was made: no file would be like another."""
    creation, access = (h5py.h5p.create(kind) for kind in (h5py.h5p.FILE_CREATE, h5py.h5p.FILE_ACCESS))
    creation.set_obj_track_times(False)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    return h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, creation, access)


def _create_dataset(h5py: Any, file: Any, array: Array, rows: int, chunk_rows: int | None) -> Any:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((rows_per_chunk(array.nbytes, chunk_rows, rows), *array.shape))
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple((rows, *array.shape))
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    return h5py.h5d.create(file.id, array.name.encode(), kind, space, properties)


def _region(dataset: Any, array: Array, rows: int) -> Region:
    """Where rows are; chunks of a dataset of fixed size that is allocated at once follow each other."""
    begin = dataset.get_chunk_info_by_coord((0,) * (1 + len(array.shape))).byte_offset
    region = Region(int(begin), array.nbytes, rows)
    chunk = dataset.get_create_plist().get_chunk()[0]
    last = (rows - 1) // chunk * chunk
    found = dataset.get_chunk_info_by_coord((last, *(0,) * len(array.shape))).byte_offset
    if found != region.begin + last * region.row_nbytes:
        raise RuntimeError(f"HDF5 {array.name!r}: chunks do not follow each other; please report this")
    return region


def gaps(size: int, regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """The parts of a file that are structure: first byte, and byte behind the last."""
    at = 0
    for region in sorted(regions, key=lambda one: one.begin):
        if at < region.begin:
            yield at, region.begin
        at = region.end
    if at < size:
        yield at, size


def copy_between(source: int, target: int, start: int, count: int, to: int) -> None:
    """Copy bytes from a file to another: by the system itself, where it can do that.

    Args:
        source, target: their descriptors.
        start: where in the one.
        count: of bytes.
        to: where in the other.

    Raises:
        OSError: the disk is full, for instance.
        EOFError: the source ends before.
    """
    done = 0
    while done < count:
        data = os.pread(source, min(count - done, _COPIED_AT_ONCE), start + done)
        if not data:
            raise EOFError(f"a file ends {count - done:,} bytes too early")
        write_all(target, memoryview(data), to + done)
        done += len(data)

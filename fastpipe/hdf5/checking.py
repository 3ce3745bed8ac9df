"""Whether a copy holds what its source holds, as the HDF5 library reads both."""

from __future__ import annotations

import os
from typing import Any

from fastpipe.core.extras import require
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.copying import attributes_of, objects_of, referred, replaced
from fastpipe.hdf5.library import filters_of, missing
from fastpipe.hdf5.objects import name_of, raw_name
from fastpipe.hdf5.rows import read_all, read_rows, same_values

__all__ = ["check_rows", "check_structure"]

_STEP_NBYTES = 16 << 20


def check_structure(source: Any, copy: Any, skip: set[str]) -> None:
    """Compare everything but the rows of some datasets.

    Args:
        source, copy: open ``h5py.File``.
        skip: those datasets' names; their types, shapes and attributes are compared.

    Raises:
        HDF5Error: something differs; the message names it.
    """
    h5py = require("h5py", extra="hdf5")
    ones, others = objects_of(source), objects_of(copy)
    _same("the names of its objects", {name for name, _ in ones}, {name for name, _ in others}, source)
    for name, one in ones:
        other = copy[raw_name(name)]
        _same("its kind", type(one).__name__.replace("File", "Group"), type(other).__name__, one)
        _check_attributes(one, other, source, copy)
        if isinstance(one, h5py.Group):
            links, new_links = (sorted(map(os.fsdecode, group)) for group in (one, other))
            _same("its links", links, new_links, one)
        elif isinstance(one, h5py.Dataset):
            _same("its type", one.id.get_type(), other.id.get_type(), one)
            _same("its shape", (one.shape, one.maxshape), (other.shape, other.maxshape), one)
            if name not in skip:
                _check_data(one, other, source, copy)


def check_rows(one: Any, other: Any, name: str) -> None:
    """Compare rows that ``read_rows`` read.

    Raises:
        HDF5Error: they differ.
    """
    if not same_values(one, other):
        raise HDF5Error(
            f"{name}: rows read back from the copy are not those of the source; the copy was thrown away. "
            "Is one of its filters lossy, or the disk or the memory faulty?"
        )


def _check_attributes(one: Any, other: Any, source: Any, copy: Any) -> None:
    attributes, others = dict(attributes_of(one)), dict(attributes_of(other))
    _same("the names of its attributes", list(attributes), list(others), one)
    for name, old in attributes.items():
        new = others[name]
        _same(f"the type of its attribute {name!r}", old.get_type(), new.get_type(), one)
        _same(f"the shape of its attribute {name!r}", old.shape, new.shape, one)
        if old.get_space().get_simple_extent_npoints():
            _same(f"its attribute {name!r}", _values(old, source), _values(new, copy), one)


def _check_data(one: Any, other: Any, source: Any, copy: Any) -> None:
    if one.shape is None:
        return
    if missing(filters_of(one.id.get_create_plist())):  # copied as it is stored, and compared so
        _same("its stored chunks", _chunks(one), _chunks(other), one)
    elif not one.shape:
        _same("its value", _values(one.id, source), _values(other.id, copy), one)
    else:
        row = one.id.get_type().get_size() * (one.size // max(one.shape[0], 1))
        step = max(1, _STEP_NBYTES // max(1, row))
        for first in range(0, one.shape[0], step):
            last = min(first + step, one.shape[0])
            rows, others = read_rows(one, first, last), read_rows(other, first, last)
            check_rows(_by_name(rows, source), _by_name(others, copy), _place(one))


def _chunks(dataset: Any) -> list[Any]:
    infos = [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]
    return [dataset.id.read_direct_chunk(info.chunk_offset) for info in infos]


def _values(item: Any, file: Any) -> _Values:
    return _Values(_by_name(read_all(item, item.shape), file))


class _Values:
    """Values that are equal where their bits are."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Values) and same_values(self._values, other._values)

    __hash__ = None  # type: ignore[assignment]


def _by_name(values: Any, file: Any) -> Any:
    """Values with names in the place of references, which are other numbers in each file."""
    return replaced(values, lambda reference: (type(reference).__name__, referred(reference, file)))


def _place(item: Any) -> str:
    return f"{item.file.filename}, {name_of(item)}"


def _same(what: str, one: Any, other: Any, item: Any) -> None:
    if not one == other:
        raise HDF5Error(f"{_place(item)}: {what} would not be the same in the copy, which was thrown away")

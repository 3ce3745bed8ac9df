"""Copy all of an HDF5 file but the rows of large datasets, and compare a copy with its source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastpipe.core.extras import require
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.inspect import storage_of
from fastpipe.hdf5.library import filters_of, missing
from fastpipe.hdf5.opening import library_errors, name_of, raw_name
from fastpipe.hdf5.rows import (
    dtype_of,
    has_references,
    is_plain,
    read_all,
    read_rows,
    same_values,
    write_rows,
)

# What an object is stored as is copied through its creation properties and its type as the file has it,
# so that orders of bytes, paddings, members of enumerations and names of compounds stay.

_STEP_NBYTES = 16 << 20  # that are read at once

SetFilters = Callable[[Any, Any], None]
Chunk = tuple[int, ...] | None  # of a dataset's copy; None for a contiguous one


def copy_structure(source: Any, copy: Any, chunks: Mapping[str, Chunk], set_filters: SetFilters) -> None:
    """Make everything but the rows of the targets, and references, whose objects may not be there yet.

    ``copy`` is empty, ``chunks`` are those of the targets' copies by the targets' names, and ``set_filters``
    gives creation properties a chunked target's filters; it is called with the old dataset.
    """
    # Its root, as the properties of a file are others than those of a group.
    root = source["/"]
    _copy_attributes(root, copy["/"])
    # By address: a dataset of several names may be found by another of them here.
    by_address = {_address(source[raw_name(name)]): chunk for name, chunk in chunks.items()}
    _copy_members(root, copy["/"], by_address, set_filters, {_address(root): "/"})


def _copy_members(
    source: Any, copy: Any, chunks: Mapping[int, Chunk], set_filters: SetFilters, seen: dict[int, str]
) -> None:
    groups = [(source, copy, iter(source))]
    while groups:  # and not by recursion: they may be nested some thousands deep
        source, copy, names = groups[-1]
        name = next(names, None)
        if name is None:
            groups.pop()
        elif _copy_member(source, copy, name, chunks, set_filters, seen):
            groups.append((source[name], copy[name], iter(source[name])))


def _copy_member(
    source: Any,
    copy: Any,
    name: str,
    chunks: Mapping[int, Chunk],
    set_filters: SetFilters,
    seen: dict[int, str],
) -> bool:
    """Copy a member of a group; return whether it is a group, of which the members are still to be copied."""
    h5py = require("h5py", extra="hdf5")
    own_name, properties_of_link = _raw(name), _link_properties(name)
    # h5py's own ``get`` cannot look for a name that is no UTF-8.
    if source.id.links.get_info(own_name).type != h5py.h5l.TYPE_HARD:
        try:
            copy[name] = source.get(name, getlink=True)
        except TypeError as error:
            raise OptionError(
                f"{name_of(source)}/{os.fsdecode(name)} is a link of a kind that h5py does not know"
            ) from error
        return False
    item = source[name]
    address = _address(item)
    if address in seen:
        copy.id.links.create_hard(own_name, copy.file.id, raw_name(seen[address]), properties_of_link)
        return False
    seen[address] = name_of(item)
    if isinstance(item, h5py.Group):
        h5py.h5g.create(copy.id, own_name, properties_of_link, item.id.get_create_plist())
        _copy_attributes(item, copy[name])
        return True
    if address in chunks:
        properties = _properties(item, chunks[address], set_filters)
        kind, space = item.id.get_type().copy(), _space(item)
        h5py.h5d.create(copy.id, own_name, kind, space, properties, properties_of_link)
        _copy_attributes(item, copy[name])
        return False
    if isinstance(item, h5py.Dataset):
        _check_can_be_read(item)
    del item  # with what the library remembers of it, as it may mistake chunks for others when it copies
    h5py.h5o.copy(source.id, own_name, copy.id, own_name, None, properties_of_link)
    return False


def _check_can_be_read(dataset: Any) -> None:
    """Raise an error if a dataset is damaged: the library's copying may end the process over it."""
    if not dataset.shape or missing(filters_of(dataset.id.get_create_plist())):
        return
    where = f"{dataset.file.filename}, dataset {name_of(dataset)}"
    with library_errors(where, HDF5Error, dataset):
        for first, last in _steps(dataset):
            read_rows(dataset, first, last)


def _steps(dataset: Any) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the end, of rows that are read at once."""
    row = dataset.id.get_type().get_size() * math.prod(dataset.shape[1:])
    step = max(1, _STEP_NBYTES // max(1, row))
    for first in range(0, dataset.shape[0], step):
        yield first, min(first + step, dataset.shape[0])


def _address(item: Any) -> int:
    return int(require("h5py", extra="hdf5").h5o.get_info(item.id).addr)


def _raw(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else raw_name(name)


def _link_properties(name: str | bytes) -> Any:
    h5py = require("h5py", extra="hdf5")
    properties = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    if not name.isascii():
        properties.set_char_encoding(h5py.h5t.CSET_UTF8)
    return properties


def _space(dataset: Any) -> Any:
    # Not the dataset's own: a virtual one's may be selected.
    h5s = require("h5py.h5s", extra="hdf5")
    sides = tuple(h5s.UNLIMITED if side is None else side for side in dataset.maxshape)
    return h5s.create_simple(dataset.shape, sides)


def _properties(dataset: Any, chunk: Chunk, set_filters: SetFilters) -> Any:
    """Return the creation properties of a target's copy."""
    h5py = require("h5py", extra="hdf5")
    properties = dataset.id.get_create_plist()
    if storage_of(dataset) in ("virtual", "external"):  # which cannot be taken away
        properties = _without_others(dataset, properties)
    if chunk is None:
        for _ in range(properties.get_nfilters()):
            properties.remove_filter(properties.get_filter(0)[0])
        properties.set_layout(h5py.h5d.CONTIGUOUS)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    else:
        properties.set_chunk(chunk)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
        set_filters(properties, dataset)
    return properties


def _without_others(dataset: Any, old: Any) -> Any:
    h5py = require("h5py", extra="hdf5")
    new = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    new.set_attr_creation_order(old.get_attr_creation_order())
    new.set_obj_track_times(old.get_obj_track_times())
    dtype = dtype_of(dataset)
    has_one = old.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    if has_one and dtype is not None and not dtype.hasobject:
        value = np.zeros((), dtype)
        old.get_fill_value(value)
        new.set_fill_value(value)
    return new


def attributes_of(item: Any) -> Iterator[tuple[bytes, Any]]:
    """Yield names and low-level objects of an object's attributes, in the order of making if it is kept."""
    h5a = require("h5py.h5a", extra="hdf5")
    h5 = require("h5py.h5", extra="hdf5")
    order = h5.INDEX_NAME
    # A type that has a name has no such property.
    if hasattr(item.id, "get_create_plist") and item.id.get_create_plist().get_attr_creation_order():
        order = h5.INDEX_CRT_ORDER
    for number in range(h5a.get_num_attrs(item.id)):
        attribute = h5a.open(item.id, index=number, index_type=order)
        yield attribute.name, attribute


def _copy_attributes(source: Any, copy: Any) -> None:
    h5a = require("h5py.h5a", extra="hdf5")
    for name, old in attributes_of(source):
        kind = old.get_type()
        new = h5a.create(copy.id, _raw(name), kind.copy(), old.get_space())
        if not has_references(kind):
            _write_attribute(old, new)


def _write_attribute(old: Any, new: Any, change: Callable[[Any], Any] | None = None) -> None:
    if _is_null(old):
        return
    values = read_all(old, old.shape)
    new.write(change(values) if change else values, old.get_type() if is_plain(old.get_type()) else None)


def _is_null(item: Any) -> bool:
    h5s = require("h5py.h5s", extra="hdf5")
    return bool(item.get_space().get_simple_extent_type() == h5s.NULL)


def copy_references(source: Any, copy: Any) -> int:
    """Write references, now that what they lead to has a place in the copy.

    Return how many lead to an object without a name, which no copy has; they become empty.
    """
    h5py = require("h5py", extra="hdf5")
    lost = 0

    def moved(reference: Any) -> Any:
        nonlocal lost
        where = referred(reference, source)
        if where is None:
            lost += bool(reference)
            return type(reference)()
        if isinstance(reference, h5py.RegionReference):
            space = h5py.h5r.get_region(reference, source.id)
            return h5py.h5r.create(copy.id, where, h5py.h5r.DATASET_REGION, space)
        return h5py.h5r.create(copy.id, where, h5py.h5r.OBJECT)

    for name, item in objects_of(source):
        other = copy[raw_name(name)]
        for key, old in attributes_of(item):
            if has_references(old.get_type()):
                new = h5py.h5a.open(other.id, _raw(key))
                _write_attribute(old, new, lambda values: replaced(values, moved))
        if isinstance(item, h5py.Dataset) and item.shape and has_references(item.id.get_type()):
            write_rows(other, 0, replaced(read_rows(item, 0, item.shape[0]), moved))
        elif isinstance(item, h5py.Dataset) and item.shape == () and has_references(item.id.get_type()):
            other.id.write(h5py.h5s.ALL, h5py.h5s.ALL, replaced(read_all(item.id, ()), moved))
    return lost


def referred(reference: Any, file: Any) -> bytes | None:
    """Return the name of what a reference leads to; None for nothing, and for what has no name."""
    h5r = require("h5py.h5r", extra="hdf5")
    if not reference:
        return None
    name = h5r.get_name(reference, file.id)
    return name if name and name != b"" else None


def replaced(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of an array in which references, at any depth, are others."""
    h5py = require("h5py", extra="hdf5")
    if isinstance(values, (h5py.Reference, h5py.RegionReference)):
        return change(values)
    if not isinstance(values, np.ndarray) or not values.dtype.hasobject:
        return values
    made = values.copy()
    if made.dtype.names:
        for name in made.dtype.names:
            made[name] = replaced(made[name], change)
        return made
    for place in np.ndindex(made.shape):
        made[place] = replaced(made[place], change)
    return made


def objects_of(file: Any) -> list[tuple[str, Any]]:
    """Return every object by its first name: groups, the root first, datasets and types."""
    found: list[tuple[str, Any]] = [("/", file["/"])]
    file.visititems(lambda name, item: found.append((f"/{os.fsdecode(name)}", item)))
    return found


def check_structure(source: Any, copy: Any, skip: set[str]) -> None:
    """Compare everything but the rows of the datasets ``skip``."""
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
    """Raise an ``HDF5Error`` if rows that ``read_rows`` read differ."""
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
        for first, last in _steps(one):
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
    """Return values with names instead of references, which are other numbers in each file."""
    return replaced(values, lambda reference: (type(reference).__name__, referred(reference, file)))


def _place(item: Any) -> str:
    return f"{item.file.filename}, {name_of(item)}"


def _same(what: str, one: Any, other: Any, item: Any) -> None:
    if not one == other:
        raise HDF5Error(f"{_place(item)}: {what} would not be the same in the copy, which was thrown away")

"""Copy an HDF5 file except the rows of large datasets, and compare a copy with its source."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.core.pool import NativeJob
from fastpipe.core.reads import MADE
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.library import filters_of, h5py, missing, require_filters
from fastpipe.hdf5.opening import DamagedError, dtype_of, library_errors, name_of, raw_name, storage_of
from fastpipe.hdf5.reader import RowReader

Array = npt.NDArray[Any]

# Objects are copied with their creation properties and with the types that the file stores.  The copy keeps
# byte orders, paddings, members of enumerations and names of compounds.

_STEP_NBYTES = 16 << 20  # bytes that are read at a time

SetFilters = Callable[[Any, Any], None]
Chunk = tuple[int, ...] | None  # the chunk shape of a dataset's copy; None if the copy is contiguous


def copy_structure(source: Any, copy: Any, chunks: Mapping[str, Chunk], set_filters: SetFilters) -> None:
    """Copy everything except references and the rows of the datasets that ``chunks`` names (the targets).

    References are left out because their objects may not exist in the copy yet.  ``copy`` must be empty.
    ``chunks`` maps the name of each target to the chunk shape of its copy.  ``set_filters`` is called for
    each target whose copy has chunks.  Its arguments are the creation properties of the copy and the source
    dataset, and it sets the filters in these properties.
    """
    # Use the root group, because the properties of a file differ from the properties of a group.
    root = source["/"]
    _copy_attributes(root, copy["/"])
    # Targets are found by address, because the walk may reach a dataset with several names by another name.
    by_address = {address_of(source[raw_name(name)]): chunk for name, chunk in chunks.items()}
    seen = {address_of(root): "/"}
    groups = [(root, copy["/"], iter(root))]
    while groups:  # a loop instead of recursion, because groups may be nested thousands deep
        source, copy, names = groups[-1]
        name = next(names, None)
        if name is None:
            groups.pop()
        elif _copy_member(source, copy, name, by_address, set_filters, seen):
            groups.append((source[name], copy[name], iter(source[name])))


def _copy_member(
    source: Any,
    copy: Any,
    name: str | bytes,
    chunks: Mapping[int, Chunk],
    set_filters: SetFilters,
    seen: dict[int, str],
) -> bool:
    """Copy a member of a group; return True if the member is a group with members to copy next."""
    own_name, properties_of_link = raw_name(name), h5py.h5p.create(h5py.h5p.LINK_CREATE)
    if not name.isascii():
        properties_of_link.set_char_encoding(h5py.h5t.CSET_UTF8)
    # h5py's own ``get`` does not accept names that are not UTF-8.
    if source.id.links.get_info(own_name).type != h5py.h5l.TYPE_HARD:
        try:
            copy[name] = source.get(name, getlink=True)
        except TypeError as error:
            raise OptionError(
                f"{name_of(source)}/{os.fsdecode(name)} is a link of a kind that h5py does not know"
            ) from error
        return False
    item = source[name]
    address = address_of(item)
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
    del item  # this also drops the library's cached data, with which the library may confuse chunks in a copy
    h5py.h5o.copy(source.id, own_name, copy.id, own_name, None, properties_of_link)
    return False


def _check_can_be_read(dataset: Any) -> None:
    """Raise an error if a dataset is damaged.

    The library's copy function may abort the process if a dataset is damaged.
    """
    if not dataset.shape or missing(filters_of(dataset.id.get_create_plist())):
        return
    where = f"{dataset.file.filename}, dataset {name_of(dataset)}"
    with library_errors(where, HDF5Error, dataset):
        for first, last in _steps(dataset):
            read_rows(dataset, first, last)


def _steps(dataset: Any) -> Iterator[tuple[int, int]]:
    row = dataset.id.get_type().get_size() * math.prod(dataset.shape[1:])
    step = max(1, _STEP_NBYTES // max(1, row))
    for first in range(0, dataset.shape[0], step):
        yield first, min(first + step, dataset.shape[0])


def address_of(item: Any) -> int:
    return int(h5py.h5o.get_info(item.id).addr)


def _space(dataset: Any) -> Any:
    # The dataspace is new, because the dataspace of a virtual dataset may contain a selection.
    sides = tuple(h5py.h5s.UNLIMITED if side is None else side for side in dataset.maxshape)
    return h5py.h5s.create_simple(dataset.shape, sides)


def _properties(dataset: Any, chunk: Chunk, set_filters: SetFilters) -> Any:
    properties = dataset.id.get_create_plist()
    if storage_of(dataset) in ("virtual", "external"):  # properties cannot lose this storage
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
    """Yield each attribute's name and low-level object, in creation order if the file records this order."""
    order = h5py.h5.INDEX_NAME
    # A named type has no creation properties.
    if hasattr(item.id, "get_create_plist") and item.id.get_create_plist().get_attr_creation_order():
        order = h5py.h5.INDEX_CRT_ORDER
    for number in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=number, index_type=order)
        yield attribute.name, attribute


def _copy_attributes(source: Any, copy: Any) -> None:
    for name, old in attributes_of(source):
        kind = old.get_type()
        new = h5py.h5a.create(copy.id, name, kind.copy(), old.get_space())
        if not has_references(kind):
            _write_attribute(old, new)


def _write_attribute(old: Any, new: Any, change: Callable[[Any], Any] | None = None) -> None:
    if old.get_space().get_simple_extent_type() == h5py.h5s.NULL:
        return
    values = read_all(old, old.shape)
    new.write(change(values) if change else values, old.get_type() if is_plain(old.get_type()) else None)


def copy_references(source: Any, copy: Any) -> int:
    """Write the references of the source into the copy, which must already contain all named objects.

    The copy does not contain objects without a name.  References to such objects therefore become empty, and
    their number is returned.
    """
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
                new = h5py.h5a.open(other.id, key)
                _write_attribute(old, new, lambda values: replaced(values, moved))
        if isinstance(item, h5py.Dataset) and item.shape and has_references(item.id.get_type()):
            write_rows(other, 0, replaced(read_rows(item, 0, item.shape[0]), moved))
        elif isinstance(item, h5py.Dataset) and item.shape == () and has_references(item.id.get_type()):
            other.id.write(h5py.h5s.ALL, h5py.h5s.ALL, replaced(read_all(item.id, ()), moved))
    return lost


def referred(reference: Any, file: Any) -> bytes | None:
    """Return the name of the object to which a reference refers.

    Return None if the reference is empty or the object has no name.
    """
    if not reference:
        return None
    name = h5py.h5r.get_name(reference, file.id)
    return name or None


def replaced(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``values`` in which ``change(reference)`` replaces each reference, at any depth."""
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
    """Return each group, dataset and named type once, with its first name; the root group comes first."""
    found: list[tuple[str, Any]] = [("/", file["/"])]
    file.visititems(lambda name, item: found.append((f"/{os.fsdecode(name)}", item)))
    return found


def check_structure(source: Any, copy: Any, skip: set[str]) -> None:
    """Raise an error if the copy differs from the source; ignore the rows of the datasets in ``skip``."""
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
            _same(f"its attribute {name!r}", _values(old, source), _values(new, copy), one, same_values)


def _check_data(one: Any, other: Any, source: Any, copy: Any) -> None:
    if one.shape is None:
        return
    if missing(filters_of(one.id.get_create_plist())):  # such chunks were copied without decoding
        _same("its stored chunks", _chunks(one), _chunks(other), one)
    elif not one.shape:
        _same("its value", _values(one.id, source), _values(other.id, copy), one, same_values)
    else:
        for first, last in _steps(one):
            rows, others = read_rows(one, first, last), read_rows(other, first, last)
            check_rows(_by_name(rows, source), _by_name(others, copy), _place(one))


def _chunks(dataset: Any) -> list[Any]:
    infos = [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]
    return [dataset.id.read_direct_chunk(info.chunk_offset) for info in infos]


def _values(item: Any, file: Any) -> Any:
    return _by_name(read_all(item, item.shape), file)


def _by_name(values: Any, file: Any) -> Any:
    """Return values in which names replace references, because stored references differ between files."""
    return replaced(values, lambda reference: (type(reference).__name__, referred(reference, file)))


def _place(item: Any) -> str:
    return f"{item.file.filename}, {name_of(item)}"


def _same(
    what: str, one: Any, other: Any, item: Any, are_same: Callable[[Any, Any], bool] = operator.eq
) -> None:
    if not are_same(one, other):
        raise HDF5Error(f"{_place(item)}: {what} would not be the same in the copy, which was thrown away")


def is_plain(kind: Any) -> bool:
    """Return True if an HDF5 type contains no references and no values of variable length."""
    return not any(
        each.get_class() in (h5py.h5t.VLEN, h5py.h5t.REFERENCE)
        or (each.get_class() == h5py.h5t.STRING and each.is_variable_str())
        for each in _types_in(kind)
    )


def has_references(kind: Any) -> bool:
    return any(each.get_class() == h5py.h5t.REFERENCE for each in _types_in(kind))


def _types_in(kind: Any) -> Iterator[Any]:
    """Yield a type and all types that it contains, at any depth."""
    kinds = [kind]
    while kinds:
        kind = kinds.pop()
        yield kind
        if kind.get_class() == h5py.h5t.COMPOUND:
            kinds += map(kind.get_member_type, range(kind.get_nmembers()))
        elif kind.get_class() in (h5py.h5t.ARRAY, h5py.h5t.VLEN):
            kinds.append(kind.get_super())


def _has_gaps(dtype: np.dtype[Any]) -> bool:
    """Return True if an element has bytes that belong to none of its fields."""
    if dtype.subdtype is not None:
        return _has_gaps(dtype.subdtype[0])
    if dtype.names is None:
        return False
    members = [dtype[name] for name in dtype.names]
    return sum(member.itemsize for member in members) < dtype.itemsize or any(map(_has_gaps, members))


def read_all(item: Any, shape: tuple[int, ...]) -> Array:
    """Read a complete attribute or a single-value dataset; ``item`` is h5py's low-level object."""
    kind = item.get_type() if is_plain(item.get_type()) else None
    out = np.zeros(shape, item.dtype if kind is None else (np.void, kind.get_size()))
    item.read(*((h5py.h5s.ALL, h5py.h5s.ALL) if isinstance(item, h5py.h5d.DatasetID) else ()), out, kind)
    return out


def read_rows(dataset: Any, first: int, last: int) -> Array:
    """Read the rows from ``first`` up to ``last`` (exclusive) through h5py.

    Elements of a plain type (see ``is_plain``) are returned as their stored bytes.  Elements of any other
    type are returned as h5py reads them.
    """
    kind = dataset.id.get_type()
    shape = (last - first, *dataset.shape[1:])
    plain = is_plain(kind)
    # The array starts as zeros, because the library does not write to gaps between the fields of a compound
    # when it fills in elements that were never written.
    out = np.zeros(shape, (np.void, kind.get_size()) if plain else dataset.dtype)
    if out.size:
        dataset.id.read(*_spaces(dataset, first, shape), out, kind if plain else None)
    return out


def write_rows(dataset: Any, first: int, rows: Array) -> None:
    """Write ``rows`` from row ``first`` on; ``rows`` must have the form that ``read_rows`` returns."""
    kind = dataset.id.get_type() if rows.dtype.kind == "V" and rows.dtype.names is None else None
    if rows.size:
        dataset.id.write(*_spaces(dataset, first, rows.shape), rows, kind)


def _spaces(dataset: Any, first: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    in_file = dataset.id.get_space()
    in_file.select_hyperslab((first, *(0 for _ in shape[1:])), shape)
    return h5py.h5s.create_simple(shape), in_file


def same_values(one: Any, other: Any) -> bool:
    """Return True if two values are equal: arrays by their bits, and Python objects by value."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.dtype.hasobject:
            left, right = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other))
            return np.array_equal(left, right)
        if one.dtype.names:
            return all(same_values(one[name], other[name]) for name in one.dtype.names)
        pairs = zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
        return all(same_values(*pair) for pair in pairs)
    return type(one) is type(other) and bool(one == other)


class RowSource:
    """The rows of one dataset.  Threads prefetch the rows if fastpipe can read them without the HDF5 library.

    ``memory`` is the limit in bytes for all chunks that the threads decode at the same time.  If a single
    chunk is larger than ``memory``, one thread decodes it.
    """

    def __init__(self, dataset: Any, path: str, threads: int, memory: int) -> None:
        self._dataset, self._threads = dataset, 1
        self._reader: RowReader | None = None
        self._job: NativeJob | None = None  # the job that reads the next rows
        # The bytes in the gaps of a compound are undefined, and only the library reads equal bytes each time.
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

    def steps(self, step: int) -> Iterator[tuple[int, Array]]:
        """Yield ``step`` rows at a time, together with the index of the first of these rows.

        While the caller uses these rows, threads read the next rows.
        """
        count = int(self._dataset.shape[0])
        ahead = self._begin(0, min(step, count)) if count else None
        for start in range(0, count, step):
            end = min(start + step, count)
            if ahead is not None:
                rows = self._end(ahead)
            else:
                with library_errors(self._where, HDF5Error, self._dataset):
                    rows = read_rows(self._dataset, start, end)
            ahead = self._begin(end, min(end + step, count)) if end < count else None
            yield start, rows

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
    first: int
    out: Array
    statuses: npt.NDArray[np.uint8]
    job: NativeJob

"""Samples that are HDF5 datasets of their own: which there are, and where their bytes lie."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.progress import SlowWork
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.layout import (
    MANY_CHUNKS,
    MOST_NBYTES,
    Layout,
    Places,
    chunk_places,
    layout_without_places,
    whole_place,
    with_places,
)
from fastpipe.hdf5.library import h5py
from fastpipe.hdf5.opening import (
    check_values,
    dataset_named,
    is_plain_path,
    library_errors,
    lies_in,
    object_named,
    opened,
    raw_name,
)

Int64Array = npt.NDArray[np.int64]

_KEEP_FROM_S = 0.05  # a table that takes less time is not kept
_MOST_DIMS = 32  # of the native core
_EVERY = 500  # samples between two reports of progress
_SHOWN = 10  # the most names in a message
_NO_PLACES: Places = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32))


class MemberKey(NamedTuple):
    """One of the user's ``keys=``, in parts.

    Attributes:
        text: the key.
        path: path of a dataset or a group, with ``*`` for any characters except ``/``.
        attribute: the name of an attribute of that object, or None for the dataset itself.
        stars: number of ``*`` in the path that stand for characters.

    >>> MemberKey.of("*/image@spacing").name("0007"), MemberKey.of("@max").attribute
    ('0007/image', 'max')
    """

    text: str
    path: str
    attribute: str | None
    stars: int

    @classmethod
    def of(cls, text: str) -> MemberKey:
        head, slash, last = text.rpartition("/")
        last, at, attribute = last.rpartition("@")
        path = head + slash + last if at and attribute else text
        return cls(text, path, attribute if at and attribute else None, path.count("*"))

    def name(self, match: str) -> str:
        """Return the path for a ``match``: what each ``*`` stands for, separated by ``/``."""
        if not self.stars:
            return self.path
        first, *rest = self.path.split("*")
        return first + "".join(text + part for text, part in zip(match.split("/"), rest, strict=False))


def member_keys(path: Any, texts: Sequence[str], shown: str) -> list[MemberKey]:
    """Return keys in parts.  A key that is a dataset's name in the file at ``path`` names that dataset."""
    keys = list(map(MemberKey.of, texts))
    if any(key.stars or key.attribute is not None for key in keys):
        with opened(os.fsdecode(path), shown) as file, library_errors(shown):
            for number, text in enumerate(texts):
                if dataset_named(file, text, shown) is not None:
                    keys[number] = MemberKey(text, text, None, 0)
    return keys


class Joined(NamedTuple):
    """Datasets that are stored alike, joined along a new first dimension: a layout for each key.

    ``matches`` are what the keys' ``*`` stands for.  ``samples``, int64 (N,), are the samples' positions in
    the file.
    """

    layouts: list[Layout]
    matches: list[str]
    samples: Int64Array


class _Template(NamedTuple):
    """The type, creation properties and layout that several datasets share, whose shapes may differ."""

    type: Any
    properties: Any
    layout: Layout


class _Datasets:
    """The datasets that a key matches.

    For each dataset, ``which`` is the number of its template, and ``counts`` the number of its places.
    """

    def __init__(self) -> None:
        self.templates: list[_Template] = []
        self.which, self.shapes, self.places = list[int](), list[tuple[int, ...]](), list[Places]()
        self.is_sound = True
        self._alike: dict[Any, list[int]] = {}

    def add(self, dataset: Any, name: str, shown: str, linked_as: str) -> None:
        """Add a dataset, given as ``h5py.h5d.DatasetID``."""
        if dataset.shape is None:
            check_values(h5py.Dataset(dataset), name, shown)
        shape, properties = tuple(map(int, dataset.shape)), dataset.get_create_plist()
        number = self._template(dataset, shape, properties, name, shown, linked_as)
        layout = self.templates[number].layout
        places: Places | str = _NO_PLACES
        if layout.dtype.itemsize * math.prod(max(side, 1) for side in shape) >= MOST_NBYTES:
            places = "it is declared to be larger than any file"
        elif layout.kind == "contiguous":
            places = whole_place(dataset, layout._replace(shape=shape))
        elif layout.kind == "chunked":
            places = chunk_places(h5py.Dataset(dataset), properties, layout.chunk)
        if isinstance(places, str):
            self.is_sound, template = False, self.templates[number]
            number = len(self.templates)
            self.templates.append(template._replace(layout=_only_h5py(layout, places)))
            places = _NO_PLACES
        self.which.append(number)
        self.shapes.append(shape)
        self.places.append(places)

    def _template(
        self, dataset: Any, shape: tuple[int, ...], properties: Any, name: str, shown: str, linked_as: str
    ) -> int:
        is_chunked = properties.get_layout() == h5py.h5d.CHUNKED
        about = len(shape), properties.get_chunk() if is_chunked else None, bool(linked_as)
        alike, kind = self._alike.setdefault(about, []), dataset.get_type()
        for number in alike:
            template = self.templates[number]
            if template.type == kind and template.properties.equal(properties):
                return number
        alike.append(len(self.templates))
        self.templates.append(_template_of(dataset, properties, name, shown, linked_as))
        return alike[-1]

    def arrays(self) -> list[npt.NDArray[Any]]:
        places = [np.concatenate(parts) for parts in zip(_NO_PLACES, *self.places, strict=True)]
        counts = [len(offsets) for offsets, _, _ in self.places]
        shapes = [side for shape in self.shapes for side in shape]
        return [np.array(numbers, np.int64) for numbers in (self.which, shapes, counts)] + places

    def load(self, arrays: Sequence[npt.NDArray[Any]], open_dataset: Any) -> None:
        """Set the values that ``arrays`` returned.  ``open_dataset`` returns the template of a dataset."""
        which, shapes, counts, *places = arrays
        self.which = which.tolist()
        firsts = dict[int, int]()
        for place, number in enumerate(self.which):
            firsts.setdefault(number, place)
        self.templates = [open_dataset(firsts[number]) for number in range(len(firsts))]
        sides = iter(shapes.tolist())
        dims = [len(template.layout.shape) for template in self.templates]
        self.shapes = [tuple(next(sides) for _ in range(dims[number])) for number in self.which]
        ends = np.cumsum(counts)[:-1]
        self.places = list(zip(*(np.split(array, ends) for array in places), strict=True))

    def joined(self, members: Int64Array, dims: int) -> Layout:
        """Join datasets that have the same template and shape."""
        template = self.templates[self.which[members[0]]]
        layout: Layout = template.layout
        shape, count = self.shapes[members[0]], len(members)
        layout = layout._replace(shape=(count, *shape), chunk=(1, *layout.chunk))
        if len(layout.shape) > _MOST_DIMS or layout.dtype.itemsize * _product(layout.shape) >= MOST_NBYTES:
            layout = _only_h5py(layout, "all of them together are too large to be numbered")
        if layout.kind == "compact":
            layout = _only_h5py(layout, "its bytes lie among the file's names")
        if layout.kind == "h5py":
            return layout._replace(chunk=(1, *shape))
        parts = [self.places[number] for number in members.tolist()]
        offsets, sizes, masks = (np.concatenate(column) for column in zip(*parts, strict=True))
        if layout.kind == "contiguous":
            rows = math.prod(shape[:dims])
            rows = rows if count * rows <= MANY_CHUNKS else 1
            nbytes = layout.dtype.itemsize * math.prod(shape) // max(rows, 1)
            steps = np.arange(rows) * nbytes
            offsets = np.where(offsets[:, None] < 0, -1, offsets[:, None] + steps).reshape(-1)
            sizes, masks = np.full(len(offsets), nbytes, np.int64), np.zeros(len(offsets), np.uint32)
            lead = (1,) * dims if rows > 1 else shape[:dims]
            layout = layout._replace(kind="chunked", chunk=(1, *lead, *shape[dims:]))
        return with_places(layout, template.properties, (offsets, sizes, masks))._replace(chunk=layout.chunk)


def _template_of(dataset: Any, properties: Any, name: str, shown: str, linked_as: str) -> _Template:
    found = h5py.Dataset(dataset)
    check_values(found, name, shown)
    return _Template(dataset.get_type(), properties, layout_without_places(found, properties, linked_as))


def _only_h5py(layout: Layout, why: str) -> Layout:
    return layout._replace(kind="h5py", why=why, filters=())


def _product(shape: Sequence[int]) -> int:
    return math.prod(max(side, 1) for side in shape)


# ---- what a file has ---------------------------------------------------------------------------------


class _Table:
    """The matches of keys in a file.

    Attributes:
        matches: for each sample, the text that ``*`` stands for.
        columns: for each key, its datasets, or the values of its attributes.
    """

    def __init__(self, file: Any, keys: Sequence[MemberKey], shown: str) -> None:
        self._file, self._keys, self._shown = file, keys, shown
        self.matches: list[str] = []
        self.columns: list[_Datasets | list[Any]] = [
            _Datasets() if key.attribute is None else [] for key in keys
        ]
        self._groups: dict[str, Any] = {}  # the root, and the last one

    def read(self) -> None:
        # The matches of one key are the samples: preferably of a dataset.
        leading = max(self._keys, key=lambda key: (key.stars, key.attribute is None))
        with SlowWork(f"Finding the samples of {self._shown}") as progress:
            parts = leading.path.split("/") if leading.stars else []
            for match in _matches(self._file, "", parts, self._shown):
                with library_errors(f"{self._shown}, {leading.name(match)!r}"):
                    first = self._object(leading, match)
                if first is None and leading.stars:
                    continue
                for key, column in zip(self._keys, self.columns, strict=True):
                    self._add(key, match, column, first if key is leading else None)
                self.matches.append(match)
                if not len(self.matches) % _EVERY:
                    progress(f"{len(self.matches):,} so far")
        if not self.matches:
            raise KeyError(f"{self._shown} has nothing that {leading.text!r} matches: {_listed(self._file)}")

    def _add(self, key: MemberKey, match: str, column: _Datasets | list[Any], found: Any) -> None:
        name, shown = key.name(match), self._shown
        with library_errors(f"{shown}, {name!r}"):
            found = found or self._object(key, match)
            if found is None:
                raise KeyError(
                    f"{shown} has no {'group' if key.attribute else 'dataset'} {name!r}: {self._have(name)}"
                )
            item, is_linked = found
            if isinstance(column, _Datasets):
                column.add(item, name, shown, name if is_linked else "")
                return
            attributes = h5py.AttributeManager(h5py.HLObject(item))
            if key.attribute not in attributes:
                raise KeyError(f"{shown}: {name!r} has no attribute {key.attribute!r}: {_listed(attributes)}")
            column.append(attributes[key.attribute])

    def _object(self, key: MemberKey, match: str) -> Any:
        """Return the identifier of the object that a key names, and whether it lies in another file.  Return
        None if there is no such object."""
        name = key.name(match)
        found = self._plain_object(name)
        if found is None:
            item = object_named(self._file, name or "/", self._shown)
            found = None if item is None else (item.id, not lies_in(item, self._file))
        is_dataset = found is not None and isinstance(found[0], h5py.h5d.DatasetID)
        return found if is_dataset or key.attribute is not None else None

    def _plain_object(self, name: str) -> Any:
        """Return the identifier of an object to which no link leads, and False.  Return None for any other
        object.  h5py's own objects would take several times as long."""
        above, _, last = name.rpartition("/")
        if above not in self._groups:
            group = None
            if is_plain_path(self._file, above, self._shown) and not self._file.swmr_mode:
                group = h5py.h5o.open(self._file.id, raw_name(above) or b"/")
            self._groups = {kept: self._groups[kept] for kept in self._groups if not kept} | {above: group}
        group, raw = self._groups[above], raw_name(last)
        if not raw or not isinstance(group, h5py.h5g.GroupID) or not group.links.exists(raw):
            return None
        is_plain = group.links.get_info(raw).type == h5py.h5l.TYPE_HARD
        return (h5py.h5o.open(group, raw), False) if is_plain else None

    def _have(self, name: str) -> str:
        parent = object_named(self._file, name.rpartition("/")[0] or "/", self._shown)
        return _listed(parent if isinstance(parent, h5py.Group) else self._file)

    # ---- kept in a file ----

    def arrays(self) -> list[npt.NDArray[Any]] | None:
        """Return all of it as one-dimensional arrays; None if it cannot be kept."""
        found = [_packed(self.matches)]
        for column in self.columns:
            if isinstance(column, _Datasets):
                if not column.is_sound:
                    return None
                found += column.arrays()
            elif all(type(value) is str and "\0" not in value for value in column):
                found += [_packed(column), np.array([-1], np.int64)]
            else:
                values = _stacked(column)
                if values is None or values.dtype.kind not in "biufcSU":
                    return None
                found += [values.reshape(-1), np.array(values.shape, np.int64)]
        return found

    def load(self, arrays: list[npt.NDArray[Any]]) -> None:
        rest = iter(arrays)
        self.matches = _unpacked(next(rest))
        for place, (key, column) in enumerate(zip(self._keys, self.columns, strict=True)):
            if isinstance(column, _Datasets):
                column.load(
                    [next(rest) for _ in range(6)], lambda sample, key=key: self._template(key, sample)
                )
                continue
            values, shape = next(rest), next(rest).tolist()
            self.columns[place] = _unpacked(values) if shape == [-1] else list(values.reshape(shape))

    def _template(self, key: MemberKey, sample: int) -> _Template:
        match = self.matches[sample]
        item, is_linked = self._object(key, match)
        name = key.name(match)
        return _template_of(item, item.get_create_plist(), name, self._shown, name if is_linked else "")


def _packed(texts: Sequence[str]) -> npt.NDArray[np.uint8]:
    # No name in an HDF5 file contains a zero.
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _unpacked(array: npt.NDArray[np.uint8]) -> list[str]:
    return array.tobytes().decode("utf-8", "surrogateescape").split("\0")


def _stacked(values: Sequence[Any]) -> npt.NDArray[Any] | None:
    """Return values as one array, (N, …); None if they differ in dtype or shape, or have no fixed size."""
    first = values[0]
    if not isinstance(first, (np.generic, np.ndarray)) or first.dtype.hasobject:
        return None
    about = type(first), first.dtype, first.shape
    if any(type(one) is not about[0] or (one.dtype, one.shape) != about[1:] for one in values):
        return None
    return np.array(values, first.dtype)


def _listed(names: Iterable[Any]) -> str:
    found = list(map(str, itertools.islice(names, _SHOWN + 1)))
    return f"it has {', '.join(found[:_SHOWN])}{', …' * (len(found) > _SHOWN)}" if found else "it is empty"


def _matches(file: Any, above: str, parts: Sequence[str], shown: str) -> Iterator[str]:
    """Yield what each ``*`` of a path stands for, separated by ``/``, in h5py's order of iteration."""
    place = next((number for number, part in enumerate(parts) if "*" in part), None)
    if place is None:
        yield ""
        return
    path = "/".join([above, *parts[:place]])
    with library_errors(f"{shown}, {path!r}"):
        group = object_named(file, path or "/", shown)
        names = list(group.id) if isinstance(group, h5py.Group) else []
    pattern = re.compile("(.*)".join(map(re.escape, parts[place].split("*"))), re.DOTALL)
    rest = parts[place + 1 :]
    for name in (raw.decode("utf-8", "surrogateescape") for raw in names):
        found = pattern.fullmatch(name)
        if found is None:
            continue
        match = "/".join(found.groups())
        if not any("*" in part for part in rest):
            yield match
            continue
        for more in _matches(file, f"{path}/{name}", rest, shown):
            yield f"{match}/{more}"


def _table(
    file: Any, keys: Sequence[MemberKey], shown: str, tables: FileArrays | None, status: os.stat_result
) -> _Table:
    about = f"hdf5 members 1, h5py {h5py.version.version}, {[key[1:] for key in keys]}"
    kept = None if tables is None or file.swmr_mode else tables.load(status, about)
    table = _Table(file, keys, shown)
    if kept is not None:
        table.load(kept)
        return table
    start = perf_counter()
    table.read()
    if tables is not None and not file.swmr_mode and perf_counter() - start > _KEEP_FROM_S:
        arrays = table.arrays()
        if arrays is not None:
            tables.save(status, about, arrays)
    return table


# ---- samples -----------------------------------------------------------------------------------------


def join_members(
    file: Any, keys: Sequence[MemberKey], dims: int, shown: str, tables: FileArrays | None,
    status: os.stat_result,
) -> list[Joined]:  # fmt: skip
    """Find the datasets and attributes that keys match in an open file, and join those that are alike.

    ``dims`` is the number of leading dimensions of each dataset that count samples: with 0, a dataset is a
    sample.  ``tables`` stores what was found, with the file's ``status`` as the key.
    """
    if dims and all(key.attribute is not None for key in keys):
        raise OptionError(f"sample_dims={dims} counts dimensions of datasets, and all keys name attributes")
    table = _table(file, keys, shown, tables, status)
    try:
        return _joined(table, keys, dims, shown, os.fspath(file.filename))
    except OptionError:
        raise
    except (MemoryError, OverflowError, ValueError) as error:
        raise HDF5Error(f"{shown} declares more samples than there is memory to number") from error


def _joined(table: _Table, keys: Sequence[MemberKey], dims: int, shown: str, path: str) -> list[Joined]:
    count, classes = len(table.matches), dict[Any, list[int]]()
    alike = [zip(one.which, one.shapes, strict=True) for one in table.columns if isinstance(one, _Datasets)]
    for number, about in enumerate(zip(*alike, strict=True) if alike else [()] * count):
        classes.setdefault(about, []).append(number)
    names, leads = [list(map(key.name, table.matches)) for key in keys], np.zeros(count, np.int64)
    joined = list[tuple[list[Layout], Int64Array]]()
    for numbers in classes.values():
        members = np.array(numbers)
        lead = _lead(table, keys, numbers[0], dims, shown)
        leads[members] = math.prod(lead)
        layouts = [
            (
                column.joined(members, dims)
                if isinstance(column, _Datasets)
                else _layout_of_values([column[number] for number in numbers], lead, path)
            )._replace(name=key.text, shown=shown, members=[own[number] for number in numbers])
            for key, column, own in zip(keys, table.columns, names, strict=True)
        ]
        joined.append((layouts, members))
    firsts = np.cumsum(leads) - leads
    return [
        Joined(
            layouts, [table.matches[number] for number in members.tolist()],
            (firsts[members][:, None] + np.arange(leads[members[0]])).reshape(-1),
        )
        for layouts, members in joined
    ]  # fmt: skip


def _lead(table: _Table, keys: Sequence[MemberKey], number: int, dims: int, shown: str) -> tuple[int, ...]:
    """Return the dimensions that count a match's samples, which all of its datasets must share."""
    shapes = {
        key.name(table.matches[number]): column.shapes[number]
        for key, column in zip(keys, table.columns, strict=True)
        if isinstance(column, _Datasets)
    }
    leads = {shape[:dims] for shape in shapes.values()}
    if len(leads) > 1 or any(len(lead) < dims for lead in leads):
        found = ", ".join(f"{name!r} {shape}" for name, shape in shapes.items())
        raise OptionError(
            f"{shown}: sample_dims={dims} takes datasets that are alike along their first "
            f"{'dimension' if dims == 1 else f'{dims} dimensions'}, which count samples; got {found}"
        )
    return next(iter(leads), ())


def _layout_of_values(values: list[Any], lead: tuple[int, ...], path: str) -> Layout:
    """Return a layout for attributes.  Each value is that of all samples of its dataset."""
    stacked = _stacked(values)
    if stacked is None:
        is_text = all(isinstance(value, str) for value in values)
        stacked = np.empty(len(values), h5py.string_dtype() if is_text else object)
        for number, value in enumerate(values):
            stacked[number] = value
    count, inner = len(values), stacked.shape[1:]
    spread = np.broadcast_to(stacked.reshape(count, *(1,) * len(lead), *inner), (count, *lead, *inner))
    layout = Layout(
        path, "", spread.shape, stacked.dtype, b"", "h5py", "", (1, *spread.shape[1:]), (), *_NO_PLACES
    )
    return layout._replace(values=spread.reshape(-1, *inner))

"""The objects of an HDF5 file: all of its datasets, or the one of a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fastpipe.core.extras import require
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.errors import DamagedError
from fastpipe.hdf5.opening import library_errors

__all__ = ["dataset_named", "dataset_names", "datasets_of", "lies_in", "name_of", "raw_name", "walk_datasets"]


_SHOWN = 20  # parts of a path

# Of the HDF5 library, about a name, a group on the way, and a dataset on the way.
_NOT_THERE = ("doesn't exist", "component not found", "message type not found")


def raw_name(name: str) -> bytes:
    """Return a name as the file has it, which need not be UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def name_of(item: Any) -> str:
    """Return the path of an object in its file, as text."""
    name = item.name
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def walk_datasets(file: Any, shown: str) -> Iterator[tuple[str, Any]]:
    """Yield every dataset of a file once, by its first name, in the order of ``visititems``.

    Links to other names and other files are not followed.  Unlike ``visititems``, this goes on behind an
    object that cannot be opened, and however deep groups are nested.

    Args:
        file: an open ``h5py.File``.
        shown: what messages call it.

    Yields:
        The dataset's path, and the dataset; or the path of what cannot be opened, and the ``HDF5Error``.
    """
    h5py = require("h5py", extra="hdf5")
    seen: set[int] = set()
    path: list[str] = []
    groups: list[Iterator[tuple[Any, bytes]]] = []  # what is left of each group on the way to where this is

    def enter(group: Any, where: str) -> None:
        names: list[bytes] = []
        groups.append((group, name) for name in names)
        with library_errors(where, DamagedError):
            group.id.links.iterate(names.append)  # in order; up to where it is damaged, if it is

    with suppress(HDF5Error), library_errors(shown):
        seen.add(h5py.h5o.get_info(file.id).addr)  # for links that lead back to the root
    try:
        enter(file, shown)
    except HDF5Error as error:
        yield "/", error
    while groups:
        group, raw = next(groups[-1], (None, b""))
        if group is None:
            groups.pop()
            path = path[:-1]
            continue
        path.append(raw.decode("utf-8", "surrogateescape"))
        # Not all of the path of each object: groups may be nested some thousands deep.
        where, item = f"{shown}, {'…' * (len(path) > _SHOWN)}/{'/'.join(path[-_SHOWN:])}", None
        try:
            with library_errors(where, DamagedError):
                link = group.id.links.get_info(raw)
                if link.type == h5py.h5l.TYPE_HARD and link.u not in seen:  # u: the address of the object
                    seen.add(link.u)
                    item = group[raw]
            if isinstance(item, h5py.Group):
                enter(item, where)
        except HDF5Error as error:
            yield "/" + "/".join(path), error
        if isinstance(item, h5py.Dataset):
            yield "/" + "/".join(path), item
        if not isinstance(item, h5py.Group):
            path.pop()


def lies_in(item: Any, file: Any) -> bool:
    """Return whether an object lies in a file, and not in another one into which a link leads."""
    other = item.file.filename
    return other == file.filename or os.path.samefile(other, file.filename)


def datasets_of(file: Any, shown: str) -> list[Any]:
    """Return every dataset of a file, once.

    Raises:
        HDF5Error: an object cannot be opened.
    """
    found = []
    for _, item in walk_datasets(file, shown):
        if isinstance(item, HDF5Error):
            raise item
        found.append(item)
    return found


def dataset_names(file: Any, shown: str) -> str:
    """Return the names of the datasets that can be opened, for a message."""
    names = [name[1:] for name, item in walk_datasets(file, shown) if not isinstance(item, HDF5Error)]
    return ", ".join(sorted(names)) or "none"


def dataset_named(file: Any, name: str, shown: str) -> Any | None:
    """Return the dataset of a name; None if the file has none of it.

    Args:
        file: an open ``h5py.File``.
        name: the dataset's path.
        shown: what messages call the file.

    Raises:
        HDF5Error: it cannot be opened.
    """
    h5py = require("h5py", extra="hdf5")
    raw = raw_name(name)
    _check_links(file, raw, shown)
    try:
        item = file[raw]
    except KeyError as error:
        kind = _link_kind(file, raw)
        if kind == h5py.h5l.TYPE_EXTERNAL:
            other, path = map(os.fsdecode, file.id.links.get_val(raw))
            raise HDF5Error(
                f"{shown}: {name!r} is a link into another file, {other}, in which {path!r} cannot be "
                f"opened: {error.args[0]}"
            ) from error
        if kind != h5py.h5l.TYPE_HARD:  # also None
            return None
        raise HDF5Error(f"{shown}: {name!r} cannot be opened, it may be damaged: {error.args[0]}") from error
    if not isinstance(item, h5py.Dataset):
        return None
    if file.swmr_mode and file.mode == "r":
        item.refresh()  # the library shares what this process has open, as it was then
    return item


def _link_kind(file: Any, name: bytes) -> int | None:
    """Return the kind of the link of a name; None if there is none.  h5py's own ``get`` takes UTF-8 only."""
    try:
        return int(file.id.links.get_info(name).type)
    except (KeyError, RuntimeError) as error:
        if any(words in str(error) for words in _NOT_THERE):
            return None
        raise


def _check_links(file: Any, name: bytes, shown: str, most: int = 16) -> None:
    """Raise an error for a link to what is no file: the library would wait until something writes to a fifo.

    Args:
        file: the open file.
        name: of a dataset in it.
        shown: what messages call the file.
        most: how many links may lead to each other.

    Raises:
        HDF5Error: there is one.
    """
    h5l = require("h5py.h5l", extra="hdf5")
    place, inside = b"", name.strip(b"/")
    for part in inside.split(b"/"):
        before, place = place, b"/".join([place, part])
        kind = _link_kind(file, place)
        if kind is None:
            return
        if kind == h5l.TYPE_EXTERNAL:
            other = os.fsdecode(file.id.links.get_val(place)[0])
            path = os.path.join(os.path.dirname(file.filename), other)
            if os.path.exists(path) and not os.path.isfile(path):
                raise HDF5Error(f"{shown}: {os.fsdecode(name)!r} is a link into {path}, which is no file")
            return
        if kind == h5l.TYPE_SOFT:
            target = file.id.links.get_val(place)
            start = b"" if target.startswith(b"/") else before + b"/"
            rest = (b"/" + inside)[len(place) :]
            if most:
                _check_links(file, start + target + rest, shown, most - 1)
            return

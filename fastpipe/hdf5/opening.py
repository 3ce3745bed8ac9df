"""Open HDF5 files and their datasets through h5py, and translate h5py's errors."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any

import numpy as np

from fastpipe.core.bad_samples import is_of_machine
from fastpipe.core.files import hdf5_signature, is_hdf5, open_file, retrying_open
from fastpipe.errors import FastpipeError, HDF5Error, OptionError
from fastpipe.hdf5.library import h5py, missing_filter_error, missing_filters


class DamagedError(HDF5Error):
    """An error for damaged samples of a file whose other samples may be intact."""


# The flags of a superblock of version 3; other versions have no flags.  _WRITE means that a process has the
# file open for writing.  _SWMR means that other processes may read the file at the same time.
_FLAGS_VERSION, _WRITE, _SWMR = 3, 1, 4

# The classes of errors that h5py raises about a file, including errors of NumPy and Python about values that
# h5py passes to them.
_OF_LIBRARY = (ArithmeticError, KeyError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_NO_FILTER = ("can't open directory", "can't find plugin", "plugins disabled", "is not registered")
_NO_MEMORY = ("memory allocation failed", "unable to allocate", "no space available for allocation")
_NO_OTHER_FILE = "external raw data file"


@contextmanager
def opened(path: str, shown: str = "") -> Iterator[Any]:
    with open_library(path, shown) as file:
        yield file


def open_library(path: str, shown: str = "", **options: Any) -> Any:
    """Open a file for reading with the HDF5 library, in SWMR mode if a SWMR writer has the file open.

    ``shown`` is the file's name in messages.  If it is empty, messages contain the path.  ``options`` are
    passed to ``h5py.File``.
    """
    os.close(open_file(path))  # the errors of ``open_file`` are clearer than the library's errors
    try:
        try:
            file = retrying_open(h5py.File, path, "r", **options)
        except OSError:
            if not _is_written_by_swmr(path):
                raise
            file = retrying_open(h5py.File, path, "r", swmr=True, **options)
    except _OF_LIBRARY as error:
        raise _why_not_opened(error, path, shown or path) from error
    # If this process has the file open already, the library returns the open file in its mode.
    if file.mode != "r" and not file.swmr_mode:
        file.close()
        raise HDF5Error(f"{shown or path} is open for writing in this process: close it before it is read")
    return file


def _flags(path: str) -> int:
    """Return the flags with which a writer marks an open file; 0 if the file has none."""
    at = hdf5_signature(path)
    if at is None:
        return 0
    with open(path, "rb", opener=open_file) as file:
        file.seek(at + 8)
        about = file.read(4)
    return about[3] if len(about) == 4 and about[0] == _FLAGS_VERSION else 0


def _is_written_by_swmr(path: str) -> bool:
    return _flags(path) & (_WRITE | _SWMR) == _WRITE | _SWMR


def _why_not_opened(error: Exception, path: str, shown: str) -> Exception:
    """Return the error to raise for a file that the library cannot open."""
    text, number = str(error), getattr(error, "errno", None)
    if "lock file" in text:
        if number in (errno.EAGAIN, errno.EACCES):
            return HDF5Error(
                f"{shown} is open for writing elsewhere: close it there, or set HDF5_USE_FILE_LOCKING=FALSE "
                "if no process writes to it any more"
            )
        return HDF5Error(
            f"{shown} cannot be locked ({text}): if its file system has no locks, set "
            "HDF5_USE_FILE_LOCKING=FALSE"
        )
    if number is not None or isinstance(error, FastpipeError):
        return _with_place(error, shown)
    if _flags(path):
        return HDF5Error(
            f"{shown} is marked as open for writing: wait until its writer has closed it; or, if that was "
            "killed and no process writes to it any more, remove the mark with  h5clear -s FILE"
        )
    if not is_hdf5(path):
        return HDF5Error(f"{shown} is not an HDF5 file")
    if "truncated file" in text:
        return HDF5Error(f"{shown} cannot be opened, it may be cut off: {text}")
    version = h5py.version.hdf5_version
    return HDF5Error(
        f"{shown} cannot be opened: {text}; it may be damaged, or need a newer HDF5 library than {version}"
    )


@contextmanager
def library_errors(where: str, damaged: type[HDF5Error] = HDF5Error, dataset: Any = None) -> Iterator[None]:
    """Convert h5py's errors about a file to errors that name the file as ``where``.

    ``damaged`` is the class of the error for a damaged file.  Errors that h5py did not raise stay unchanged.
    Errors of the machine, missing files and missing permissions keep their type.  If the library lacks
    filters of ``dataset``, the error names the missing filter.
    """
    try:
        yield
    except _OF_LIBRARY as error:
        if isinstance(error, FastpipeError) or not _is_raised_by_h5py(error):
            raise
        raise _meaning(error, where, damaged, dataset) from error


def _meaning(error: Exception, where: str, damaged: type[HDF5Error], dataset: Any) -> Exception:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    is_elsewhere = isinstance(error, (FileNotFoundError, PermissionError))
    if is_elsewhere or (is_of_machine(error) and isinstance(error, OSError)):
        return _with_place(error, where)
    if isinstance(error, MemoryError) or any(words in text.lower() for words in _NO_MEMORY):
        return HDF5Error(f"{where} cannot be read: it claims a size that exceeds the memory ({text})")
    if _NO_OTHER_FILE in text:
        return HDF5Error(f"{where}: its values are in another file, which cannot be opened ({text})")
    steps = missing_filters(dataset) if dataset is not None and isinstance(error, OSError) else []
    if steps or any(words in text for words in _NO_FILTER):
        return missing_filter_error(where, steps[0] if steps else None)
    return damaged(f"{where} cannot be read, it may be damaged: {text}; restore it from a copy")


def _with_place(error: Exception, where: str) -> Exception:
    """Return a system error with the file's name in its message; return any other error unchanged."""
    if not isinstance(error, OSError) or error.errno is None:
        return error
    return OSError(error.errno, f"{where}: {error.strerror}")


def _is_raised_by_h5py(error: BaseException) -> bool:
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    called = itertools.takewhile(lambda name: name.partition(".")[0] != "fastpipe", reversed(names))
    return any(name.partition(".")[0] == "h5py" for name in called)


_SHOWN = 20  # the most parts of a path in a message

# The HDF5 library's texts about a missing name, a missing group in the path, and a dataset in the path.
_NOT_THERE = ("doesn't exist", "component not found", "message type not found")


def raw_name(name: str | bytes) -> bytes:
    """Return a name as it is stored in the file.

    Names in files may be invalid as UTF-8.  h5py returns such names as bytes.
    """
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def name_of(item: Any) -> str:
    name = item.name
    return name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")


def storage_of(dataset: Any) -> str:
    if dataset.shape is None:
        return "none"
    properties = dataset.id.get_create_plist()
    kind = properties.get_layout()
    if kind == h5py.h5d.CONTIGUOUS and properties.get_external_count():
        return "external"
    words = {h5py.h5d.COMPACT: "compact", h5py.h5d.CONTIGUOUS: "contiguous", h5py.h5d.CHUNKED: "chunked"}
    return words.get(kind, "virtual")


def dtype_of(dataset: Any) -> np.dtype[Any] | None:
    """Return a dataset's dtype; None if NumPy has no equivalent dtype."""
    try:
        found: np.dtype[Any] = dataset.dtype
    except (TypeError, ValueError):
        return None
    return found


def walk_datasets(file: Any, shown: str) -> Iterator[tuple[str, Any]]:
    """Yield each dataset of a file once with its first name, in the order of h5py's ``visititems``.

    For an object that cannot be opened, the iterator yields an ``HDF5Error`` with the object's name.  Links
    to other names and files are not followed.  Unlike ``visititems``, ``walk_datasets`` continues after an
    object that cannot be opened, and supports groups at any depth.
    """
    seen: set[int] = set()
    path: list[str] = []
    groups: list[Iterator[tuple[Any, bytes]]] = []  # the remaining members of each group in ``path``

    def enter(group: Any, where: str) -> None:
        names: list[bytes] = []
        groups.append((group, name) for name in names)
        with library_errors(where, DamagedError):
            group.id.links.iterate(names.append)  # in order, up to the first damaged part of the group

    with suppress(HDF5Error), library_errors(shown):
        seen.add(h5py.h5o.get_info(file.id).addr)  # a link may lead to the root group
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
        # A message contains only the last parts of a path, because groups may be nested thousands deep.
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
    """Return True if an object is in ``file``; False if a link led to the object in another file."""
    other = item.file.filename
    return other == file.filename or os.path.samefile(other, file.filename)


def datasets_of(file: Any, shown: str) -> list[Any]:
    found = []
    for _, item in walk_datasets(file, shown):
        if isinstance(item, HDF5Error):
            raise item
        found.append(item)
    return found


def dataset_names(file: Any, shown: str) -> str:
    """Return a list, for a message, of the names of the datasets that can be opened."""
    names = [name[1:] for name, item in walk_datasets(file, shown) if not isinstance(item, HDF5Error)]
    return ", ".join(sorted(names)) or "none"


def dataset_named(file: Any, name: str, shown: str) -> Any | None:
    item = object_named(file, name, shown)
    return item if isinstance(item, h5py.Dataset) else None


def object_named(file: Any, name: str, shown: str) -> Any | None:
    """Return a file's dataset or group; None if the file has no object of this name."""
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
        if kind != h5py.h5l.TYPE_HARD:  # this includes None, for a missing link
            return None
        raise HDF5Error(f"{shown}: {name!r} cannot be opened, it may be damaged: {error.args[0]}") from error
    if isinstance(item, h5py.Dataset) and file.swmr_mode and file.mode == "r":
        item.refresh()  # if this process has the object open, the library may return an outdated state
    return item


def is_plain_path(file: Any, name: str, shown: str) -> bool:
    """Return True if a path exists and has no soft or external link."""
    return _check_links(file, raw_name(name), shown)


def check_values(dataset: Any, name: str, shown: str) -> None:
    """Raise an ``OptionError`` if a dataset has no values, or none that NumPy supports."""
    try:
        dataset.dtype  # noqa: B018
    except TypeError as error:
        raise OptionError(
            f"{shown}: the elements of {name!r} have a type that NumPy does not support"
        ) from error
    if dataset.shape is None:
        raise OptionError(f"{shown}: {name!r} is empty: it has neither values nor a shape")


def _link_kind(file: Any, name: bytes) -> int | None:
    """Return the kind of the link ``name``; None if the link does not exist.

    h5py's own ``get`` accepts only UTF-8 names.
    """
    try:
        return int(file.id.links.get_info(name).type)
    except (KeyError, RuntimeError) as error:
        if any(words in str(error) for words in _NOT_THERE):
            return None
        raise


def _check_links(file: Any, name: bytes, shown: str, most: int = 16) -> bool:
    """Raise an error if a link leads to a path that is not a regular file.

    The library would wait forever for data from a FIFO.  Return True if the path exists without a soft or
    external link.
    """
    place, inside = b"", name.strip(b"/")
    for part in inside.split(b"/") if inside else ():
        before, place = place, b"/".join([place, part])
        kind = _link_kind(file, place)
        if kind is None:
            return False
        if kind == h5py.h5l.TYPE_EXTERNAL:
            other = os.fsdecode(file.id.links.get_val(place)[0])
            path = os.path.join(os.path.dirname(file.filename), other)
            if os.path.exists(path) and not os.path.isfile(path):
                raise HDF5Error(f"{shown}: {os.fsdecode(name)!r} is a link into {path}, which is not a file")
            return False
        if kind == h5py.h5l.TYPE_SOFT:
            target = file.id.links.get_val(place)
            start = b"" if target.startswith(b"/") else before + b"/"
            rest = (b"/" + inside)[len(place) :]
            if most:
                _check_links(file, start + target + rest, shown, most - 1)
            return False
    return True

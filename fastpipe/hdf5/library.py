"""Use the HDF5 library: load and check its filters, and find properties for which h5py has no function."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import closes_idle, is_spent, is_tight, retrying_open
from fastpipe.core.native import native
from fastpipe.errors import MissingDependencyError
from fastpipe.hdf5.filters import OF_HDF5PLUGIN, FilterStep

_MOST_SOURCES = 64  # the most sources of a virtual dataset whose filters are checked; most have equal filters
_MOST_OPEN = 64  # the most open files, each of which has a cache of chunks
_USER_BLOCK = 1 << 16  # bytes, which exceeds the size of a file with one small dataset
# The functions of c-blosc2 that the native core uses (fastpipe/native/codecs.h).
_BLOSC2_CALLS = (
    "blosc2_schunk_from_buffer", "b2nd_from_schunk", "b2nd_to_cbuffer", "b2nd_free",
    "blosc2_schunk_decompress_chunk", "blosc2_schunk_free",
)  # fmt: skip


class _Lazy:
    """The package h5py, imported on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(require("h5py", extra="hdf5"), name)


h5py: Any = _Lazy()


class OpenFiles:
    """Files that the HDF5 library has open, for data that only the library can read.  Thread-safe.

    Each instance owns its files.  If the process runs low on descriptors, the least recently used files of
    all instances are closed.  A file in use stays open until its last reference is dropped.
    """

    _lock = threading.RLock()  # reentrant, because a finalizer may run in a thread that holds the lock
    _numbers = itertools.count()
    _open: ClassVar[OrderedDict[tuple[int, Hashable], Any]] = OrderedDict()

    def __init__(self) -> None:
        self._number = next(self._numbers)
        weakref.finalize(self, self._drop, self._number).atexit = False

    def file(self, key: Hashable, open_it: Callable[[], Any]) -> Any:
        """Return this instance's file for ``key``; call ``open_it`` if the file is not open."""
        with self._lock:
            where = self._number, key
            if where not in self._open:
                self._open[where] = retrying_open(open_it)
                self._make_room()
            self._open.move_to_end(where)
            return self._open[where]

    @classmethod
    def close_idle(cls) -> None:
        with cls._lock:
            cls._open.clear()

    def _make_room(self) -> None:
        while len(self._open) > 1 and (len(self._open) > _MOST_OPEN or _runs_low()):
            self._open.popitem(last=False)

    @classmethod
    def _drop(cls, number: int) -> None:
        with cls._lock:
            for where in [where for where in cls._open if where[0] == number]:
                del cls._open[where]


closes_idle(OpenFiles.close_idle)


def _runs_low() -> bool:
    """Return True if half of this process's descriptors are in use."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        if is_spent(error):
            return True
        raise
    os.close(descriptor)
    return is_tight(descriptor)


def filters_of(properties: Any) -> tuple[FilterStep, ...]:
    found = (properties.get_filter(number) for number in range(properties.get_nfilters()))
    return tuple(
        FilterStep(int(code), tuple(map(int, values)), name.decode("utf-8", "replace"))
        for code, _, values, name in found
    )


def missing(steps: Sequence[FilterStep]) -> list[FilterStep]:
    return [step for step in steps if not h5py.h5z.filter_avail(step.code)]


def load_filters(steps: Sequence[FilterStep]) -> list[FilterStep]:
    """Load hdf5plugin if filters are missing; return the filters that are missing afterwards."""
    if missing(steps):
        with contextlib.suppress(MissingDependencyError):
            load_plugins()
    return missing(steps)


def load_plugins() -> None:
    try:
        require("hdf5plugin", extra="hdf5")
    except MissingDependencyError as error:
        raise MissingDependencyError(
            "the package 'hdf5plugin' brings this filter to the HDF5 library and is not installed. "
            "Install it with:  pip install hdf5plugin"
        ) from error
    except Exception as error:  # a broken installation may raise anything on import
        raise MissingDependencyError(
            "the package 'hdf5plugin' brings this filter to the HDF5 library and cannot be imported: "
            f"{type(error).__name__}: {error}. Install it anew with:  "
            "pip install --force-reinstall hdf5plugin"
        ) from error


def missing_filters(dataset: Any) -> list[FilterStep]:
    """Return the filters that a dataset requires and the library lacks.

    Filters that were skipped for every chunk are not required.  A virtual dataset requires the filters of its
    sources.
    """
    return list(dict.fromkeys(_missing(dataset, set())))


def _missing(dataset: Any, seen: set[tuple[str, str]]) -> Iterator[FilterStep]:
    steps = filters_of(dataset.id.get_create_plist())
    if dataset.is_virtual:
        with contextlib.suppress(MissingDependencyError):  # for the sources beyond _MOST_SOURCES
            load_plugins()
        for source in _sources(dataset, seen):
            yield from _missing(source, seen)
    elif lacking := load_filters(steps):
        masks: list[int] = []
        if dataset.chunks is not None:
            dataset.id.chunk_iter(lambda chunk: masks.append(chunk.filter_mask))
        for number, step in enumerate(steps):
            if step in lacking and any(not mask >> number & 1 for mask in masks):
                yield step


def _sources(dataset: Any, seen: set[tuple[str, str]]) -> Iterator[Any]:
    """Yield the sources of a virtual dataset that are not in ``seen`` and can be opened."""
    own, properties = dataset.file, dataset.id.get_create_plist()
    for number in range(min(properties.get_virtual_count(), _MOST_SOURCES)):
        # One name with %b may stand for a series of files or datasets, which are numbered from 0.
        path, name = (
            text.replace("%b", "0").replace("%%", "%")
            for text in (properties.get_virtual_filename(number), properties.get_virtual_dsetname(number))
        )
        places = [own.filename] if path == "." else _places(path, own.filename)
        found = next(filter(os.path.isfile, places), None)
        if found is None or (os.path.realpath(found), name) in seen:
            continue
        seen.add((os.path.realpath(found), name))
        with contextlib.suppress(KeyError, OSError, RuntimeError, ValueError), h5py.File(found, "r") as file:
            if isinstance(source := file[name], h5py.Dataset):
                yield source


def _places(path: str, own: str) -> Iterator[str]:
    """Yield, in order, the paths at which the library looks for a virtual dataset's source file ``path``.

    ``own`` is the path of the file with the virtual dataset.
    """
    name = path
    if os.path.isabs(path):
        yield path
        name = os.path.basename(path)
    folder = os.path.dirname(os.path.abspath(own))
    for prefix in filter(None, os.environ.get("HDF5_VDS_PREFIX", "").split(os.pathsep)):
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
    yield from (os.path.join(each, name) for each in (folder, "", os.path.dirname(os.path.realpath(own))))


def require_filters(dataset: Any, shown: str = "") -> None:
    for step in missing_filters(dataset):
        raise missing_filter_error(f"{shown or dataset.file.filename}, dataset {dataset.name}", step)


def missing_filter_error(where: str, step: FilterStep | None) -> MissingDependencyError:
    """Return the error for a filter that the library lacks; ``step`` is None if the filter is unknown."""
    what = "a filter"
    if step is not None:
        what = f"the filter {step.code}" + (f" ({step.name})" if step.name else "")
    return MissingDependencyError(
        f"{where}: reading it takes {what}, which the HDF5 library does not have: {filter_remedy(step)}"
    )


def filter_remedy(step: FilterStep | None) -> str:
    """Return, in words, how to add a missing filter; ``step`` is None for an unknown filter."""
    if step is not None and step.code not in OF_HDF5PLUGIN:
        return (
            f"hdf5plugin does not bring it; install and import the package that brings filter {step.code}, "
            "or set HDF5_PLUGIN_PATH to the folder of its plugin before Python starts"
        )
    try:
        load_plugins()
    except MissingDependencyError as error:
        return str(error)
    return (
        "the version of hdf5plugin that is installed does not bring it: pip install --upgrade hdf5plugin, or "
        "set HDF5_PLUGIN_PATH to the folder of its plugin before Python starts"
    )


@cache
def has_blosc2() -> bool:
    """Return True if hdf5plugin contains a c-blosc2 library that decompresses Blosc2's frames.

    The functions of that library are passed to the native core.  The c-blosc2 of system packages is too old.
    """
    try:
        load_plugins()
        folder = Path(require("hdf5plugin", extra="hdf5").PLUGIN_PATH)
    except (MissingDependencyError, AttributeError):
        return False
    for path in sorted(folder.glob("libh5blosc2.*")):
        try:
            library = ctypes.CDLL(str(path))
            library.blosc2_init()
            calls = [getattr(library, name) for name in _BLOSC2_CALLS]
        except (AttributeError, OSError):
            continue
        native.use_blosc2([ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls])
        return True
    return False


def filters_edges(dataset: Any, properties: Any) -> bool:
    """Return True if a dataset's filters are applied to chunks that extend beyond the dataset's shape.

    ``H5Pset_chunk_opts`` can switch the filters off for these chunks.  Neither h5py nor the chunks' filter
    masks show the setting.  The function therefore writes one chunk to memory, with the dataset's own
    properties and a checksum as its only filter.  If the library applies the filter, the chunk is longer.
    """
    own, ones = properties.copy(), (1,) * dataset.ndim
    own.remove_filter(h5py.h5z.FILTER_ALL)
    own.set_fletcher32()
    own.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
    with _in_memory() as file:
        space = h5py.h5s.create_simple(ones, (h5py.h5s.UNLIMITED,) * len(ones))
        chunk = h5py.h5d.create(file.id, b"x", dataset.id.get_type().copy(), space, own)
        chunk.write(h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(ones, dataset.dtype))
        return bool(chunk.get_storage_size() > np.prod(own.get_chunk()) * dataset.dtype.itemsize)


@cache
def leaves_out_user_block() -> bool:
    """Return True if the library counts offsets of chunks from the end of the user block.

    Libraries older than HDF5 1.14.4 do this.
    """
    with _in_memory(userblock_size=_USER_BLOCK) as file:
        dataset = file.create_dataset("x", (1,), "u1", chunks=(1,))
        dataset[0] = 1
        return bool(dataset.id.get_chunk_info(0).byte_offset < _USER_BLOCK)


def _in_memory(**options: Any) -> Any:
    """Return a new ``h5py.File`` in memory, in the newest format."""
    name = f"fastpipe in thread {threading.get_ident()}"  # each open file needs its own name
    return h5py.File(name, "w", driver="core", backing_store=False, libver="latest", **options)

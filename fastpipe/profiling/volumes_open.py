"""Volumes that a dataset has open, arrays of tensorstore and zarr among its attributes, or that it loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fastpipe.profiling.observed import observe

__all__ = ["OpenVolume", "VolumeLoads", "volumes_of"]

_FORMATS = ("zarr", "zarr3", "n5")
_LOADERS = (("nibabel", "load"), ("tifffile", "imread"), ("zarr", "open"), ("numpy", "load"))
_LEAST_DIMENSIONS = 3
_MOST_LOADS, _MOST_VOLUMES = 512, 64  # that are looked at, and kept


class OpenVolume(NamedTuple):
    """A volume that is open, or was loaded for a sample.

    Attributes:
        path: of its file or folder, or its URL.
        shape: of the whole.
        is_loaded: whether a sample loads it.
    """

    path: str
    shape: tuple[int, ...]
    is_loaded: bool = False


class VolumeLoads:
    """Sees which volumes are loaded from files, by functions of packages that are looked up when called.

    >>> import numpy
    >>> path = str(getfixture("tmp_path") / "x.npy")
    >>> numpy.save(path, numpy.zeros((4, 5, 6)))
    >>> with VolumeLoads() as loads:
    ...     _ = numpy.load(path)
    >>> [(volume.shape, volume.is_loaded) for volume in loads.found]
    [((4, 5, 6), True)]
    """

    def __init__(self) -> None:
        self.found: list[OpenVolume] = []
        self._count = 0
        self._ends: dict[tuple[str, str], Callable[[], None]] = {}

    def begin(self) -> None:
        """Look at those packages that are loaded; or do so when this is called again."""
        for package, name in _LOADERS:
            if self._count < _MOST_LOADS and package in sys.modules and (package, name) not in self._ends:
                self._ends[package, name] = observe(sys.modules[package], name, self._see)

    def end(self) -> None:
        """Look no more."""
        while self._ends:
            self._ends.popitem()[1]()

    def __enter__(self) -> VolumeLoads:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _see(self, value: Any, file: Any = None, *_: Any, **__: Any) -> None:
        self._count += 1
        if self._count >= _MOST_LOADS:
            self.end()
        shape = tuple(getattr(value, "shape", ()))
        if not isinstance(file, (str, os.PathLike)) or len(shape) < _LEAST_DIMENSIONS:
            return
        volume = OpenVolume(os.path.abspath(os.fspath(file)), shape, True)
        if volume not in self.found and len(self.found) < _MOST_VOLUMES:
            self.found.append(volume)


def volumes_of(dataset: Any) -> list[OpenVolume]:
    """Volumes among the attributes of a dataset, in their order.

    >>> import zarr
    >>> array = zarr.create_array(getfixture("tmp_path") / "x.zarr", shape=(4, 4), dtype="u1")
    >>> class Patches:
    ...     def __init__(self):
    ...         self.image, self.size = array, 3
    >>> [(volume.path[-6:], volume.shape) for volume in volumes_of(Patches())]
    [('x.zarr', (4, 4))]
    """
    found = []
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for path in _paths(value):
            volume = OpenVolume(path, tuple(value.shape))
            if volume not in found:
                found.append(volume)
    return found


def _paths(value: Any) -> Iterator[str]:
    """Where an array lies, if it is one that fastpipe can open there."""
    package, kind = type(value).__module__.partition(".")[0], type(value).__name__
    try:
        if package == "tensorstore" and kind == "TensorStore":
            content = value.spec().to_json()
            if content.get("driver") in _FORMATS:
                yield from _tensorstore_paths(content.get("kvstore"))
        elif package == "zarr" and kind == "Array":
            text = str(value.store_path)
            if text.startswith("file://"):
                yield text.removeprefix("file://").rstrip("/")
    except Exception:  # of an array that says nothing of itself: then nothing is known of it
        return


def _tensorstore_paths(store: Any) -> Iterator[str]:
    if isinstance(store, str):
        yield store.removeprefix("file://").rstrip("/")
    elif isinstance(store, dict) and store.get("driver") == "file":
        yield str(store["path"]).rstrip("/")
    elif isinstance(store, dict) and store.get("driver") == "http":
        yield f"{store['base_url']}{store.get('path', '')}".rstrip("/")

"""Volumes of the command line, and how much of the disk they take."""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import is_hdf5, is_url, open_file
from fastpipe.errors import HDF5Error, VolumeError
from fastpipe.hdf5.objects import raw_name
from fastpipe.hdf5.opening import library_errors, opened
from fastpipe.volumes.converted import ConvertedFiles
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.volume import Volume
from fastpipe.volumes.wrappers import GroupedVolume, NativeVolume
from fastpipe.volumes.zarr import ZarrVolume

__all__ = ["Noted", "attributes_of", "chunk_of", "open_source", "state_of", "stored_nbytes"]

_MOST_FILES = 1 << 19  # of a folder, to be counted
_METADATA = ("zarr.json", ".zarray", ".zattrs", "attributes.json")
_OWN_KEYS = {"dimensions", "blockSize", "dataType", "compression", "compressionType"}  # of N5, not of users


def open_source(path: str) -> Volume:
    """Open a volume that somebody named.

    Of files that can only be read from their beginning on a copy is kept, as ``FastPatchDataset`` keeps it.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        VolumeError: it cannot be opened, or is damaged.
        OptionError: it is a file of several arrays, of which none was named.
    """
    try:
        return open_volume(path, convert=ConvertedFiles())
    except VolumeError as error:
        # Who forgot nothing but gave a wrong file is told of everything that it could have been.
        if "is no volume that fastpipe knows" in str(error) and not is_hdf5(path):
            raise VolumeError(f"{error}; it is no HDF5 file either") from None
        raise


def stored_nbytes(path: str) -> int | None:
    """Bytes on disk of a volume; None where nobody says, or where it has too many files to be counted."""
    if os.path.isfile(path):
        return os.stat(path).st_size
    if os.path.isdir(path):
        return _of_folder(path)
    file, inside = os.path.split(path.rstrip("/"))
    while file and not os.path.lexists(file):
        file, last = os.path.split(file)
        inside = f"{last}/{inside}"
    if not os.path.isfile(file) or not is_hdf5(file):
        return None
    h5py = require("h5py", extra="hdf5")
    with opened(file) as store, library_errors(file):
        dataset = store.get(raw_name(inside))
        return int(dataset.id.get_storage_size()) if isinstance(dataset, h5py.Dataset) else None


def _of_folder(path: str) -> int | None:
    total, count, folders = 0, 0, [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                total += entry.stat().st_size
                count += 1
                if count > _MOST_FILES:
                    return None
    return total


def chunk_of(volume: Volume) -> tuple[int, ...]:
    """The shape of what is stored together: of a chunk, or, where only that is known, of a part of one that
    is decoded alone."""
    if isinstance(volume, (GroupedVolume, NativeVolume)):
        return chunk_of(volume.inner)
    grid = volume.grid
    if not isinstance(volume, ZarrVolume) or not grid.count:
        return grid.unit  # of others many chunks may be read by one call
    chunk = []
    for dim, (side, count) in enumerate(zip(grid.unit, grid.counts, strict=True)):
        step = math.prod(grid.counts[dim + 1 :])
        along = volume.stored_in(np.arange(count, dtype=np.int64) * step)
        chunk.append(side * int((along == along[0]).sum()))
    return tuple(chunk)


def state_of(path: str, volume: Volume) -> list[Any]:
    """What tells whether a volume is as it was; for JSON.  Nothing of one that is elsewhere."""
    file = path
    while file and not is_url(path) and not os.path.lexists(file):
        file = os.path.dirname(file.rstrip("/"))
    if not os.path.isfile(file):
        where, what = volume.state()
        if is_url(path):
            return [where, what]
        # However the path is spelled, it is the same volume.
        return [os.path.realpath(where), what.replace(os.path.abspath(path), os.path.realpath(path))]
    # The file itself: what is read may be a copy of it.  Its device has another number when it is mounted
    # again, and its path is known besides.
    status = os.stat(file)
    return [status.st_ino, status.st_size, status.st_mtime_ns]


class Noted(NamedTuple):
    """What users have noted about an array.

    Attributes:
        attributes: as JSON has them.
        names: of the dimensions, or None.
        others: names of attributes that JSON cannot hold.
    """

    attributes: dict[str, Any]
    names: list[Any] | None = None
    others: tuple[str, ...] = ()


def attributes_of(path: str, volume: Volume) -> Noted:
    """What users have noted about an array in a folder or in an HDF5 file.

    Args:
        path: as it was given.
        volume: what was opened.
    """
    file = path
    while file and not is_url(path) and not os.path.lexists(file):
        file = os.path.dirname(file.rstrip("/"))
    if os.path.isfile(file):
        return _of_hdf5(file, volume.name.removeprefix(file)) if is_hdf5(file) else Noted({})
    found = {name: _content(os.path.join(path, name)) for name in _METADATA}
    own = found["zarr.json"]
    if own:
        names = own.get("dimension_names")
        return Noted(dict(own.get("attributes") or {}), names if isinstance(names, list) else None)
    if found[".zarray"]:
        attributes = found[".zattrs"]
        names = attributes.pop("_ARRAY_DIMENSIONS", None)
        return Noted(attributes, names if isinstance(names, list) else None)
    return Noted({key: value for key, value in found["attributes.json"].items() if key not in _OWN_KEYS})


def _of_hdf5(file: str, inside: str) -> Noted:
    found, others = {}, []
    with opened(file) as content, library_errors(file):
        attributes = content[raw_name(inside)].attrs
        for name in attributes:
            try:
                with library_errors(f"{file}, attribute {name!r}"):
                    value = attributes[name]
                found[name] = _for_json(value)
            except (TypeError, ValueError, HDF5Error):
                others.append(name)
    return Noted(found, None, tuple(others))


def _for_json(value: Any) -> Any:
    """An attribute as JSON has it.

    Raises:
        TypeError, ValueError: it has not.
    """
    plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    plain = plain.decode() if isinstance(plain, bytes) else plain
    json.dumps(plain, allow_nan=False)
    return plain


def _content(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8", opener=open_file) as file:
            data = json.load(file)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}

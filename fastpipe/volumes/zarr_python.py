"""Read Zarr arrays with zarr-python: arrays in ZIP files, and arrays that only zarr-python can decode."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import regular_status
from fastpipe.core.text import in_bytes, natural_sorted
from fastpipe.errors import VolumeError
from fastpipe.volumes.volume import (
    LARGEST_UNIT,
    UNREADABLE,
    DamagedUnitError,
    FileState,
    Int64Array,
    UInt8Array,
    UnitGrid,
    UnitReader,
    Volume,
    as_volume_error,
    box_text,
    chunk_text,
    folder_state,
    shortened,
)
from fastpipe.volumes.zarr import METADATA, NUMBERS, json_object, metadata_in

# The codecs of numbers, each with its package if numcodecs does not contain the codec.  Other codecs are
# rejected, because a codec such as "pickle" runs code from a chunk.
_CODECS = {
    "adler32": "", "astype": "", "bitround": "", "blosc": "", "bytes": "", "bz2": "", "crc32": "",
    "crc32c": "google_crc32c", "delta": "", "fixedscaleoffset": "", "fletcher32": "", "gzip": "",
    "jenkins_lookup3": "", "lz4": "", "lzma": "", "packbits": "", "pcodec": "pcodec", "quantize": "",
    "sharding_indexed": "", "shuffle": "", "transpose": "", "zfpy": "zfpy", "zlib": "", "zstd": "",
}  # fmt: skip
_PART_NBYTES = 1 << 22  # bytes of a unit that is a part of a chunk
_OVERHEAD = 1 << 16  # a member of a ZIP file has at most twice the bytes of its content plus this number


class ZarrPythonVolume(Volume):
    """An array that ``zarr.open_array`` opens."""

    def __init__(self, path: str, inside: str, metadata: dict[str, Any], why: str) -> None:
        self.path, self.inside = path, inside
        self.name = os.path.join(path, inside) if inside else path
        with as_volume_error(f"{self.name} cannot be read as Zarr"):
            is_new = metadata["zarr_format"] == 3
            kind = metadata["data_type"] if is_new else np.dtype(metadata["dtype"]).name
            if not isinstance(kind, str) or kind not in NUMBERS:
                raise ValueError(f"its elements are {shortened(kind)}, and not numbers")
            codecs = list(_codecs(metadata))
            for codec in codecs:
                if codec not in _CODECS:
                    raise ValueError(f"its codec {shortened(codec)} is not one of numbers; make a copy of it")
        for package in filter(None, map(_CODECS.get, codecs)):
            require(package, package=package.replace("_", "-"))
        # The state of a ZIP file; None for a folder.
        self.opened = FileState.of(path, regular_status(path)) if os.path.isfile(path) else None
        array = self.array_of_library()
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        if self.dtype.kind not in "biufc":
            raise VolumeError(f"{self.name} has elements of {self.dtype}, and not numbers")
        self.grid = UnitGrid(self.shape, _unit(array.chunks, self.dtype.itemsize))
        self._fill = np.array(array.fill_value or 0, self.dtype).tobytes()
        # zarr-python reads a whole shard if the array has shards, and otherwise a whole chunk.
        stored = getattr(array, "shards", None) or array.chunks
        self.stored_nbytes = math.prod(stored) * self.dtype.itemsize
        self.how = f"Zarr by zarr-python, chunks of {chunk_text(array.chunks, self.dtype)}, as {why}"

    def array_of_library(self) -> Any:
        zarr = require("zarr", extra="volume")
        with as_volume_error(f"{self.name} cannot be opened by zarr-python"):
            if self.opened is None:
                return zarr.open_array(Path(self.path), mode="r")
            store = require("zarr.storage", extra="volume").ZipStore(self.path, mode="r")
            return zarr.open_array(store, path=self.inside, mode="r")

    def open(self) -> UnitReader:
        return _Reader(self)

    def state(self) -> tuple[str, str]:
        if self.opened is not None:
            return self.path, f"zarr-python {self.opened} {self.inside}"
        return self.path, f"zarr-python {self.path} {folder_state(self.path)}"


class _Reader(UnitReader):
    def __init__(self, volume: ZarrPythonVolume) -> None:
        self._volume = volume
        self.check()
        self._array = volume.array_of_library()

    def check(self) -> None:
        if self._volume.opened is not None:
            self._volume.opened.check()

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        volume = self._volume
        self.check()
        for number, out in zip(numbers.tolist(), outs, strict=True):
            box = volume.grid.box(number)
            try:
                volume.put(self._array[box], out)
            except UNREADABLE as error:
                where = box_text(box)
                raise DamagedUnitError(f"{volume.name}, the part at {where}: {shortened(error)}") from None


def zarr_in_zip(path: str, inside: str) -> ZarrPythonVolume:
    """Open an array in a ZIP file that zarr-python's ``ZipStore`` has written.

    ``inside`` is the path of the array in the file.  If it is empty, the array is the root of the file.
    """
    inside = inside.strip("/")
    root = f"{inside}/" if inside else ""
    refused = as_volume_error(f"{path} cannot be read as a ZIP file")
    with refused, zipfile.ZipFile(path) as file:
        sizes = {member.filename: member.file_size for member in file.infolist()}
        found = [root + name for name in METADATA if root + name in sizes]
        metadata = next((about for _, about in _arrays_in(file, found)), None)
        if metadata is None:
            raise _no_array(path, file, sizes)
    volume = ZarrPythonVolume(path, inside, metadata, "it is in a ZIP file")
    most = 2 * volume.stored_nbytes + _OVERHEAD
    for name, size in sizes.items():
        is_chunk = name.startswith(root) and not os.path.basename(name).startswith((".z", "zarr"))
        if is_chunk and size > most:  # zarr-python would unpack all of it
            raise VolumeError(f"{path}: {name} unpacks to {in_bytes(size)}, more than any chunk of the array")
    return volume


def _arrays_in(file: zipfile.ZipFile, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the metadata of each array whose metadata file is in ``names``."""
    for name in names:
        where = f"{file.filename}/{name}"
        with file.open(name) as member:
            found = json_object(where, metadata_in(member, where, file.getinfo(name).file_size))
        if found.get("node_type", "array") == "array":
            yield os.path.dirname(name), found


def _no_array(path: str, file: zipfile.ZipFile, names: Iterable[str]) -> VolumeError:
    names = natural_sorted(names)
    if any(name.endswith(".npy") for name in names):
        return VolumeError(
            f"{path} holds arrays of NumPy's: save the one that is needed with "
            f"numpy.save(file, numpy.load({path!r})[name]), and give that file"
        )
    arrays = _arrays_in(file, (name for name in names if os.path.basename(name) in METADATA))
    found = ", ".join(dict.fromkeys(array for array, _ in arrays)) or "none"
    return VolumeError(f"{path} is a ZIP file; name one of its Zarr arrays behind a slash: it has {found}")


def _unit(chunk: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the shape of an array's units: a chunk, or a part of a chunk that is too large for memory.

    An array with such large chunks may be readable, because its chunks may never have been written.

    >>> _unit((64, 64), 4), _unit((10**6, 10**6), 4)
    ((64, 64), (1024, 1024))
    """
    if math.prod(chunk) * itemsize <= LARGEST_UNIT:
        return tuple(chunk)
    most = int((_PART_NBYTES / itemsize) ** (1 / len(chunk)))
    return tuple(min(side, most) for side in chunk)


def _codecs(metadata: dict[str, Any]) -> Iterator[str]:
    """Yield the names of all codecs in numcodecs' notation, including the codecs inside shards."""
    if metadata["zarr_format"] == 2:
        for one in (*(metadata.get("filters") or ()), metadata.get("compressor")):
            if one is not None:
                yield one["id"]
        return
    for one in metadata["codecs"]:
        name = one if isinstance(one, str) else one["name"]
        yield name.removeprefix("numcodecs.")
        settings = {} if isinstance(one, str) else one.get("configuration") or {}
        for inner in ("codecs", "index_codecs"):
            if inner in settings:
                yield from _codecs({"zarr_format": 3, "codecs": settings[inner]})

"""Read Zarr arrays in local folders and in object stores without another library.

If Blosc has compressed a chunk's file, the native core reads and decompresses only the blocks that a patch
needs.  A chunk in an object store is fetched and decoded completely, because fetching costs more than
decoding.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import open_file, read_file
from fastpipe.core.native import native
from fastpipe.core.reads import UNKNOWN_CODEC, ChunkError, chunk_error, read_fully
from fastpipe.core.text import in_bytes, natural_sorted
from fastpipe.core.types import ChunkObjects
from fastpipe.errors import VolumeError
from fastpipe.volumes.volume import (
    DamagedUnitError,
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

_LOOKED_AT = 64  # the most chunks that are tried to find a chunk that was written
_LEAST_UNIT = 1 << 17  # the least bytes of a unit that is a part of a chunk
_LARGEST_CHUNK = 1 << 48  # bytes; larger chunks fit into no machine's memory
_OVERHEAD = 1 << 16  # a stored chunk has at most twice the bytes of its content plus this number


class ZarrVolume(Volume, UnitReader):
    """A Zarr array with the metadata ``array``.  If its chunks are not local files, ``objects`` has them."""

    def __init__(self, path: str, array: ZarrArray, objects: ChunkObjects | None = None) -> None:
        self.name, self._array, self.objects = path, array, objects
        self.shape, self.dtype, self._fill = array.shape, array.dtype, array.fill
        self.chunks = UnitGrid(array.shape, array.chunk)
        self._chunk_nbytes = array.chunk_nbytes
        # A unit is a slab of a chunk.  Slabs divide a chunk along its first dimension with more than one
        # element.
        self._axis = next((dim for dim, side in enumerate(array.chunk) if side > 1), 0)
        unit, self._pieces = list(array.chunk), 1
        if unit:
            unit[self._axis] = self._slab()
            self._pieces = array.chunk[self._axis] // unit[self._axis]
        self.grid = UnitGrid(array.shape, unit)
        codec = "not compressed" if array.codec == "none" else array.codec
        parts = f", in {self._pieces} parts" if self._pieces > 1 else ""
        self.how = f"Zarr, chunks of {chunk_text(array.chunk, array.dtype, codec)}{parts}"
        if objects is not None:
            self.how += f", {objects.how}"

    def _metadata_file(self) -> str:
        file = os.path.join(self.name, "zarr.json")
        return file if os.path.exists(file) else os.path.join(self.name, ".zarray")

    def _slab(self) -> int:
        """Return the length, along ``_axis``, of a slab of a chunk that can be decoded on its own."""
        array = self._array
        side = array.chunk[self._axis]
        row = self._chunk_nbytes // side
        # Chunks in a store are not divided, even if staged, because the order of patches must not depend on
        # the stage.
        if self.objects is not None or self._chunk_nbytes > _LARGEST_CHUNK:
            return side
        least = row
        if array.codec == "blosc":
            header = self._some_header()
            if header is None or row % header.itemsize:
                return side
            least = header.block
        elif array.codec != "none":
            return side
        wanted = max(least, _LEAST_UNIT)
        # A slab must consist of whole blocks, because a block in two slabs would be decompressed twice.
        slabs = (slab for slab in even_parts(side) if slab * row >= wanted and slab * row % least == 0)
        return next(slabs, side)

    def _some_header(self) -> BloscHeader | None:
        """Return one chunk's Blosc header, as all have equal settings; None if no chunk with one is found."""
        step = max(1, self.chunks.count // _LOOKED_AT)
        for number in range(0, self.chunks.count, step):
            with (
                suppress(FileNotFoundError, ChunkError),
                open(self._file(number), "rb", opener=open_file) as file,
            ):
                return BloscHeader.of(file.read(BLOSC_HEADER), self._chunk_nbytes)
        return None

    def _file(self, chunk: int) -> str:
        return os.path.join(self.name, *self._array.key(self.chunks.place(chunk)).split("/"))

    def native_source(self) -> Any | None:
        array = self._array
        if self.objects is not None:
            return None
        return native.volume_in_files(
            os.fsencode(os.path.join(self.name, "")), os.fsencode(self._metadata_file()), array.prefix,
            array.separator, array.shape, array.chunk, array.dtype.itemsize, array.codec, array.fill,
        )  # fmt: skip

    def open(self) -> UnitReader:
        return self

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        return self._chunks_and_pieces(numbers)[0]

    def _chunks_and_pieces(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the number of each unit's chunk, and the index of the unit among the chunk's slabs."""
        if not self.grid.counts:
            return numbers, np.zeros_like(numbers)
        inner = math.prod(self.grid.counts[self._axis + 1 :])
        rest, last = np.divmod(numbers, inner)
        outer, at = np.divmod(rest, self.grid.counts[self._axis])
        along, piece = np.divmod(at, self._pieces)
        return (outer * self.chunks.counts[self._axis] + along) * inner + last, piece

    def state(self) -> tuple[str, str]:
        """Return the metadata's path, and the state of all files; this takes seconds for a million chunks."""
        if self.objects is not None:
            return "", f"zarr {self.objects.state}"
        return self._metadata_file(), f"zarr {os.path.abspath(self.name)} {folder_state(self.name)}"

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        chunks, pieces = self._chunks_and_pieces(numbers)
        several = np.unique(chunks).tolist()
        with nullcontext() if self.objects is None else self.objects.together(several):
            for chunk in several:
                which = np.flatnonzero(chunks == chunk).tolist()
                self._read_chunk(chunk, [(int(pieces[at]) * self.unit_nbytes, outs[at]) for at in which])

    def _read_chunk(self, chunk: int, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        """Read parts of a chunk; each of ``parts`` is a part's first byte in the chunk and its memory."""
        objects = self.objects
        path = self._file(chunk) if objects is None else objects.path(chunk)
        try:
            stored = self._stored_in(path) if objects is None else objects.read(chunk)
            if stored is None:  # the chunk was never written
                for _, out in parts:
                    out.reshape(-1, self.dtype.itemsize)[:] = np.frombuffer(self._array.fill, np.uint8)
            elif len(parts) == 1 and len(parts[0][1]) == self._chunk_nbytes:
                decode(self._array.codec, stored, parts[0][1])
            else:
                whole = np.empty(self._chunk_nbytes, np.uint8)
                decode(self._array.codec, stored, whole)
                for begin, out in parts:
                    out[:] = whole[begin : begin + len(out)]
        except ChunkError as error:
            why = str(error)
        except FileNotFoundError:
            if objects is None:  # the whole volume was removed
                raise
            why = "it was listed, and is not there any more"
        else:
            return
        raise DamagedUnitError(f"{path}, the chunk at {box_text(self.chunks.box(chunk))}: {why}")

    def _check_still_there(self) -> None:
        """Raise an error if the whole volume was removed.  If not, a missing chunk was never written."""
        os.stat(self._metadata_file())

    def _stored_in(self, path: str) -> UInt8Array | None:
        """Return the bytes of a chunk's file; None if the chunk was never written."""
        try:
            descriptor = open_file(path)
        except FileNotFoundError:
            self._check_still_there()
            return None
        try:
            size = os.fstat(descriptor).st_size
            if size > 2 * self._chunk_nbytes + _OVERHEAD:  # checked before allocating
                raise ChunkError(f"it has {size} bytes, more than any chunk of {self._chunk_nbytes}")
            stored = np.empty(size, np.uint8)
            read_fully(descriptor, stored, 0)
            return stored
        except OSError as error:
            error.filename = error.filename or path
            raise
        finally:
            os.close(descriptor)


# Metadata files: zarr.json in version 3 and .zarray in version 2 (https://zarr-specs.readthedocs.io).
METADATA = ("zarr.json", ".zarray")  # the first existing file is used

_LARGEST = 1 << 62  # the most elements along a dimension
_MOST_DIMS = 32  # the limit of NumPy 1 and tensorstore
_MOST_METADATA = 1 << 28  # the most bytes of a metadata file
# The codecs that this module decodes, with their settings that do not affect decoding.  tensorstore reads
# arrays with other codecs or settings.
_SETTINGS = {
    "blosc": {"cname", "clevel", "shuffle", "blocksize", "typesize"}, "zstd": {"level", "checksum"},
    "gzip": {"level"}, "zlib": {"level"},
}  # fmt: skip
CODECS = (*_SETTINGS, "none")
NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
}  # fmt: skip
_KNOWN = {  # the keys of version 3's metadata; an unknown key may change the meaning of the data
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value",
    "codecs", "attributes", "dimension_names", "storage_transformers", "consolidated_metadata",
}  # fmt: skip


class ZarrArray(NamedTuple):
    shape: tuple[int, ...]  # shape of the array
    chunk: tuple[int, ...]  # shape of a chunk
    dtype: np.dtype[Any]  # dtype of the stored elements
    codec: str  # one of ``CODECS``, which compresses a whole chunk
    fill: bytes  # the bytes of an element that was never written
    prefix: str
    separator: str

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    def key(self, place: tuple[int, ...]) -> str:
        name = self.separator.join(map(str, place))
        if not self.prefix:
            return name or "0"
        return f"{self.prefix}{self.separator}{name}" if place else self.prefix

    def place(self, key: str) -> tuple[int, ...] | None:
        """Return the indices of the chunk in the file ``key``; None if the file contains no chunk.

        ``key`` is the file's path relative to the array's folder.
        """
        name = key
        if self.prefix and self.shape:
            name = key.removeprefix(self.prefix + self.separator)
        try:
            place = tuple(map(int, name.split(self.separator))) if self.shape else ()
        except ValueError:
            return None
        if len(place) != len(self.shape) or self.key(place) != key:
            return None
        ends = zip(place, self.shape, self.chunk, strict=True)
        return place if all(0 <= at * side < size for at, size, side in ends) else None


def is_zarr(path: str) -> bool:
    """Return True if a folder contains a Zarr array or a Zarr group."""
    names = ("zarr.json", ".zarray", ".zgroup")
    return any(os.path.isfile(os.path.join(path, name)) for name in names)


def zarr_array(path: str) -> ZarrArray | str:
    """Return the metadata of an array in a folder, or a text: why this module cannot read the array."""
    for name in METADATA:
        file = os.path.join(path, name)
        try:
            with open(file, "rb", opener=open_file) as opened:
                content = metadata_in(opened, file, os.fstat(opened.fileno()).st_size)
        except FileNotFoundError:
            continue
        found = parsed(file, content)
        if found is None:
            break
        return found
    names = ", ".join(arrays_in(path)) or "none"
    raise VolumeError(f"{path} is a Zarr group; name one of its arrays behind a slash: it has {names}")


def parsed(file: str, content: bytes) -> ZarrArray | str | None:
    """Parse the ``content`` of a metadata file into the result of ``zarr_array``; return None for a group."""
    data = json_object(file, content)
    if data.get("node_type", "array") == "group":
        return None
    if isinstance(data.get("dtype"), list):  # a structure, whose only field tensorstore would read
        raise VolumeError(
            f"{file} says that its elements are {shortened(data['dtype'])}, where numbers are needed"
        )
    with as_volume_error(f"{file} is damaged"):
        return _version_2(data) if file.endswith(METADATA[1]) else _version_3(data)


def metadata_in(file: IO[bytes], name: str, size: int) -> bytes:
    if size > _MOST_METADATA:
        raise VolumeError(f"{name} is damaged: it has {in_bytes(size)}, more than metadata of any array")
    return file.read()


def json_object(file: str, content: bytes) -> dict[str, Any]:
    with as_volume_error(f"{file} is damaged"):
        data = json.loads(content)
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        return data


def even_parts(side: int) -> list[int]:
    """Return the divisors of a chunk's side in increasing order.

    >>> even_parts(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [part for part in range(1, math.isqrt(side) + 1) if side % part == 0]
    return low + [side // part for part in reversed(low) if part * part < side]


def is_zarr_group(path: str) -> bool:
    """Return True if a folder contains a Zarr group, and no array's metadata."""
    file = os.path.join(path, METADATA[0])
    if not os.path.isfile(file):
        return os.path.isfile(os.path.join(path, ".zgroup"))
    return json_object(file, read_file(file)).get("node_type") == "group"


def arrays_in(path: str, depth: int = 3) -> list[str]:
    """Return the names of the arrays in a Zarr group, and in groups below it, with slashes."""
    found = []
    for name in natural_sorted(os.listdir(path)):
        inside = os.path.join(path, name)
        if not os.path.isdir(inside):
            continue
        is_array, file = os.path.exists(os.path.join(inside, ".zarray")), os.path.join(inside, "zarr.json")
        with suppress(OSError):  # this includes VolumeError
            is_array = is_array or json_object(file, read_file(file)).get("node_type") == "array"
        if is_array:
            found.append(name)
        elif depth:
            found += [f"{name}/{below}" for below in arrays_in(inside, depth - 1)]
    return found


def _version_3(data: dict[str, Any]) -> ZarrArray | str:
    if data["zarr_format"] != 3 or data["node_type"] != "array":
        raise ValueError(f"it is not an array of version 3: {data['zarr_format']!r}, {data['node_type']!r}")
    for name, value in data.items():
        if name not in _KNOWN and not (isinstance(value, dict) and value.get("must_understand") is False):
            return f"its metadata have {name!r}"
    kind = data["data_type"]
    if not isinstance(kind, str) or kind not in NUMBERS:
        return f"its elements are {kind}"
    grid, encoding = data["chunk_grid"], data["chunk_key_encoding"]
    if grid["name"] != "regular" or set(grid["configuration"]) != {"chunk_shape"}:
        return f"its chunks are {grid}"
    if data.get("storage_transformers"):
        return "it has storage transformers"
    dtype = np.dtype(kind)
    found = _codecs_3(data["codecs"], dtype)
    if isinstance(found, str):
        return found
    dtype, codec = found
    settings = encoding.get("configuration", {})
    if encoding["name"] not in ("default", "v2") or not set(settings) <= {"separator"}:
        return f"its keys are {encoding}"
    separator = settings.get("separator", "/" if encoding["name"] == "default" else ".")
    shape, chunk = _sides(data["shape"]), _sides(grid["configuration"]["chunk_shape"])
    if data["fill_value"] is None:
        raise ValueError("its fill value is null")
    fill = _fill(data["fill_value"], dtype, has_bits=True)
    prefix = "c" if encoding["name"] == "default" else ""
    return _checked(ZarrArray(shape, chunk, dtype, codec, fill, prefix, separator))


def _codecs_3(codecs: list[Any], dtype: np.dtype[Any]) -> tuple[np.dtype[Any], str] | str:
    """Return the stored dtype and the chunks' codec, or a text: what this module does not support."""
    names = [codec if isinstance(codec, str) else codec["name"] for codec in codecs]
    settings = [{} if isinstance(codec, str) else codec.get("configuration") or {} for codec in codecs]
    if not names or names[0] != "bytes":
        return f"its codecs begin with {names[0] if names else 'nothing'}"
    endian = settings[0].get("endian", "little")
    if endian not in ("little", "big") or not set(settings[0]) <= {"endian"}:
        return f"its bytes are {settings[0]}"
    order: Literal[">", "<"] = ">" if endian == "big" else "<"
    rest = zip(names[1:], map(set, settings[1:]), strict=True)
    if names[2:] or not all(name != "zlib" and _is_known(name, own) for name, own in rest):
        return f"its codecs are {' and '.join(names[1:])}"
    return dtype.newbyteorder(order), [*names, "none"][1]


def _version_2(data: dict[str, Any]) -> ZarrArray | str:
    if data["zarr_format"] != 2:
        raise ValueError(f"it is not an array of version 2: {data['zarr_format']!r}")
    kind = data["dtype"]
    if not isinstance(kind, str) or np.dtype(kind).str != kind or np.dtype(kind).name not in NUMBERS:
        return f"its elements are {kind}"
    dtype = np.dtype(kind)
    if data["order"] != "C":
        return "its chunks are in Fortran's order"
    if data.get("filters"):
        return f"it has filters: {', '.join(one['id'] for one in data['filters'])}"
    compressor = data.get("compressor")
    codec = "none" if compressor is None else compressor["id"]
    if compressor is not None and not _is_known(codec, set(compressor) - {"id"}):
        return f"its compressor is {compressor}"
    fill, separator = _fill(data["fill_value"], dtype), data.get("dimension_separator", ".")
    shape, chunk = _sides(data["shape"]), _sides(data["chunks"])
    return _checked(ZarrArray(shape, chunk, dtype, codec, fill, "", separator))


def _is_known(codec: str, settings: set[str]) -> bool:
    return codec in _SETTINGS and settings <= _SETTINGS[codec]


def _sides(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(side) is int for side in given):
        raise ValueError(f"its sides are {given!r}")
    return tuple(given)


def _checked(array: ZarrArray) -> ZarrArray | str:
    if array.separator not in (".", "/"):
        raise ValueError(f"the separator of its chunks' names is {array.separator!r}")
    if len(array.shape) > _MOST_DIMS:
        raise ValueError(f"it has {len(array.shape)} dimensions")
    is_grid = len(array.shape) == len(array.chunk) and min(array.chunk, default=1) > 0
    if not is_grid or min(array.shape, default=0) < 0 or max(array.shape, default=0) > _LARGEST:
        raise ValueError(f"its chunks are {array.chunk}, of an array {array.shape}")
    if max(array.chunk, default=0) > _LARGEST:
        return "its chunks are larger than any array"
    return array


def _fill(value: Any, dtype: np.dtype[Any], *, has_bits: bool = False) -> bytes:
    """Return the bytes of an element that was never written."""
    if value is None:
        return bytes(dtype.itemsize)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}").newbyteorder(dtype.byteorder)
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"its fill value is {value!r}")
        return b"".join(_fill(one, part, has_bits=has_bits) for one in value)
    return np.array(_number(value, dtype, has_bits), dtype).tobytes()


def _number(value: Any, dtype: np.dtype[Any], has_bits: bool) -> Any:
    if dtype.kind == "f" and isinstance(value, str):
        if value in ("NaN", "Infinity", "-Infinity"):
            return float(value)
        if has_bits and re.fullmatch(f"0x[0-9a-fA-F]{{{2 * dtype.itemsize}}}", value):
            return np.array(int(value, 16), f"u{dtype.itemsize}").view(f"f{dtype.itemsize}")[()]
    elif (dtype.kind == "f" and type(value) in (int, float)) or (dtype.kind == "b" and value in (0, 1)):
        return value
    elif dtype.kind in "iu" and type(value) in (int, float, bool) and value == int(value):
        return int(value)
    raise ValueError(f"its fill value is {value!r}, of elements that are {dtype.name}")


BLOSC_HEADER = 16  # bytes
_HEADER = struct.Struct("<4B3I")


class BloscHeader(NamedTuple):
    """The header of a Blosc buffer (see c-blosc's README_CHUNK_FORMAT.rst)."""

    itemsize: int  # bytes of an element, as set for the compressor
    nbytes: int  # bytes of the content
    block: int  # content bytes in each block, which can be decoded on its own
    stored: int  # bytes of the buffer

    @classmethod
    def of(cls, data: bytes, nbytes: int) -> BloscHeader:
        if len(data) < BLOSC_HEADER:
            raise ChunkError("its header is cut off")
        _, _, _, itemsize, content, block, stored = _HEADER.unpack_from(data)
        if content != nbytes or not itemsize or not 0 < block <= content or stored < BLOSC_HEADER:
            raise ChunkError(f"its header is not that of {nbytes} bytes")
        return cls(itemsize, content, block, stored)


def decode(codec: str, stored: Any, out: UInt8Array) -> None:
    """Decode a whole chunk with ``codec``, one of ``CODECS``, into ``out``: uint8 (N,).

    The content must have exactly N bytes.
    """
    problem = native.decode_chunk(codec, stored, out)
    if problem == UNKNOWN_CODEC and codec == "blosc":
        _decode_rare(bytes(stored), out)
    elif problem and codec == "none":
        raise ChunkError(f"it has {memoryview(stored).nbytes} bytes instead of {len(out)}")
    elif problem:
        raise chunk_error(codec, problem, len(out))


def _decode_rare(stored: bytes, out: UInt8Array) -> None:
    """Decode a Blosc buffer whose compressor, such as Snappy, the native core does not support."""
    blosc = require("numcodecs.blosc", extra="volume")
    try:
        made = blosc.decompress(stored)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ChunkError(f"blosc: {error}") from None
    if len(made) != len(out):
        raise ChunkError(f"blosc: {len(made)} bytes instead of {len(out)}")
    out[:] = np.frombuffer(made, np.uint8)

"""What the metadata of a Zarr array say, of version 2 or 3 of the format.

https://zarr-specs.readthedocs.io: zarr.json of version 3, .zarray of version 2.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from fastpipe.core.files import open_file, read_file
from fastpipe.core.text import in_bytes, natural_sorted
from fastpipe.errors import VolumeError
from fastpipe.volumes.damage import as_volume_error, shortened

__all__ = [
    "CODECS",
    "METADATA",
    "NUMBERS",
    "ZarrArray",
    "is_zarr",
    "json_object",
    "metadata_in",
    "parsed",
    "zarr_array",
]

METADATA = ("zarr.json", ".zarray")  # of an array, by the version that is taken first

_LARGEST = 1 << 62  # along a dimension
_MOST_DIMS = 32  # as NumPy 1 and tensorstore have them
_MOST_METADATA = 1 << 28  # bytes
# Those that are undone here, with the settings that say nothing about how; an array with any other codec or
# setting is read by tensorstore.
_SETTINGS = {
    "blosc": {"cname", "clevel", "shuffle", "blocksize", "typesize"}, "zstd": {"level", "checksum"},
    "gzip": {"level"}, "zlib": {"level"},
}  # fmt: skip
CODECS = (*_SETTINGS, "none")
NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
}  # fmt: skip
_KNOWN = {  # of version 3; what else there is may have to be understood
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value",
    "codecs", "attributes", "dimension_names", "storage_transformers", "consolidated_metadata",
}  # fmt: skip


class ZarrArray(NamedTuple):
    """An array as its metadata say it.

    Attributes:
        shape, chunk: of the array and of a chunk.
        dtype: of the elements as they are stored.
        codec: one of ``CODECS``, by which a chunk is compressed as a whole.
        fill: the bytes of an element of which nothing was written.
        key: a chunk's file, below the array's folder: a format of its place in the grid.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: str
    fill: bytes
    prefix: str
    separator: str

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk, decoded."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def key(self, place: tuple[int, ...]) -> str:
        """The file of a chunk, below the array's folder."""
        name = self.separator.join(map(str, place))
        if not self.prefix:
            return name or "0"
        return f"{self.prefix}{self.separator}{name}" if place else self.prefix

    def place(self, key: str) -> tuple[int, ...] | None:
        """Which chunk a file below the array's folder is; None for what is no chunk of it."""
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
    """Whether a folder is a Zarr array, or a group of some."""
    names = ("zarr.json", ".zarray", ".zgroup")
    return any(os.path.isfile(os.path.join(path, name)) for name in names)


def zarr_array(path: str) -> ZarrArray | str:
    """An array in a folder.

    Returns:
        What its metadata say; or why it is not to be read here, in words.

    Raises:
        VolumeError: it is a group, or its metadata are damaged.
    """
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
    names = ", ".join(_arrays_in(path)) or "none"
    raise VolumeError(f"{path} is a Zarr group; name one of its arrays behind a slash: it has {names}")


def parsed(file: str, content: bytes) -> ZarrArray | str | None:
    """What one of ``METADATA`` says.

    Args:
        file: its path, or URL.
        content: what is in it.

    Returns:
        As of ``zarr_array``; None for a group.

    Raises:
        VolumeError: it is damaged.
    """
    data = json_object(file, content)
    if data.get("node_type", "array") == "group":
        return None
    if isinstance(data.get("dtype"), list):  # tensorstore takes a structure of one field for that field
        raise VolumeError(
            f"{file} says that its elements are {shortened(data['dtype'])}, where numbers are needed"
        )
    with as_volume_error(f"{file} is damaged"):
        return _version_2(data) if file.endswith(METADATA[1]) else _version_3(data)


def metadata_in(file: IO[bytes], name: str, size: int) -> bytes:
    """Read all of an open file of metadata.

    Args:
        file: the file.
        name: of it, for messages.
        size: bytes in it.

    Raises:
        VolumeError: it is larger than those of any array.
    """
    if size > _MOST_METADATA:
        raise VolumeError(f"{name} is damaged: it has {in_bytes(size)}, more than metadata of any array")
    return file.read()


def json_object(file: str, content: bytes) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Raises:
        VolumeError: there is none, or it is nested deeper than Python reads.
    """
    with as_volume_error(f"{file} is damaged"):
        data = json.loads(content)
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
        return data


def even_parts(side: int) -> list[int]:
    """Return the lengths of the parts into which a side of a chunk can be cut evenly, in increasing order.

    >>> even_parts(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [part for part in range(1, math.isqrt(side) + 1) if side % part == 0]
    return low + [side // part for part in reversed(low) if part * part < side]


def _arrays_in(path: str, depth: int = 3) -> list[str]:
    found = []
    for name in natural_sorted(os.listdir(path)):
        inside = os.path.join(path, name)
        if not os.path.isdir(inside):
            continue
        names = set(os.listdir(inside))
        if ".zarray" in names or ("zarr.json" in names and _is_array(inside)):
            found.append(name)
        elif depth:
            found += [f"{name}/{below}" for below in _arrays_in(inside, depth - 1)]
    return found


def _is_array(path: str) -> bool:
    file = os.path.join(path, "zarr.json")
    try:
        return json_object(file, read_file(file)).get("node_type") == "array"
    except OSError:  # a VolumeError is one
        return False


def _version_3(data: dict[str, Any]) -> ZarrArray | str:
    if data["zarr_format"] != 3 or data["node_type"] != "array":
        raise ValueError(f"it is no array of version 3: {data['zarr_format']!r}, {data['node_type']!r}")
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
    """The stored elements' type and the codec of chunks; or what is not known here."""
    steps = [
        (codec, {}) if isinstance(codec, str) else (codec["name"], codec.get("configuration") or {})
        for codec in codecs
    ]
    if not steps or steps[0][0] != "bytes":
        return f"its codecs begin with {steps[0][0] if steps else 'nothing'}"
    endian = steps[0][1].get("endian", "little")
    if endian not in ("little", "big") or not set(steps[0][1]) <= {"endian"}:
        return f"its bytes are {steps[0][1]}"
    order: Literal[">", "<"] = ">" if endian == "big" else "<"
    names = [name for name, _ in steps[1:]]
    if len(names) > 1 or (names and (names[0] == "zlib" or not _is_known(*steps[1]))):
        return f"its codecs are {' and '.join(names)}"
    return dtype.newbyteorder(order), names[0] if names else "none"


def _version_2(data: dict[str, Any]) -> ZarrArray | str:
    if data["zarr_format"] != 2:
        raise ValueError(f"it is no array of version 2: {data['zarr_format']!r}")
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
    if compressor is not None and not _is_known(
        codec, {key: compressor[key] for key in compressor if key != "id"}
    ):
        return f"its compressor is {compressor}"
    fill = _fill(data["fill_value"], dtype)
    separator = data.get("dimension_separator", ".")
    return _checked(
        ZarrArray(_sides(data["shape"]), _sides(data["chunks"]), dtype, codec, fill, "", separator)
    )


def _is_known(codec: str, settings: dict[str, Any]) -> bool:
    return codec in _SETTINGS and set(settings) <= _SETTINGS[codec]


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
    """The bytes of an element of which nothing was written.

    Args:
        value: as the metadata have it; None is not defined: zeros, as zarr-python and tensorstore have it.
        dtype: of the elements.
        has_bits: whether the bits of a float may be written as hexadecimal digits.
    """
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

"""What the metadata of a Zarr array say, of version 2 or 3 of the format.

https://zarr-specs.readthedocs.io: zarr.json of version 3, .zarray of version 2.
"""

from __future__ import annotations

import base64
import json
import math
import os
from typing import Any, Literal, NamedTuple

import numpy as np

from fastpipe._natural import natural_sorted
from fastpipe.errors import VolumeError

__all__ = ["CODECS", "METADATA", "ZarrArray", "is_zarr", "parsed", "zarr_array"]

METADATA = ("zarr.json", ".zarray")  # of an array, by the version that is taken first

_LARGEST = 1 << 62  # along a dimension
# Those that are undone here; an array with others is read by tensorstore.
CODECS = ("blosc", "zstd", "gzip", "zlib", "none")
_NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
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
            with open(file, "rb") as opened:
                content = opened.read()
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
    try:
        data = json.loads(content)
    except ValueError as error:
        raise VolumeError(f"{file} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise VolumeError(f"{file} is damaged: it holds no object")
    if data.get("node_type", "array") == "group":
        return None
    try:
        return _version_2(data) if file.endswith(METADATA[1]) else _version_3(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise VolumeError(f"{file} is damaged: {type(error).__name__} {error}") from error


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
    try:
        with open(os.path.join(path, "zarr.json"), encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("node_type") == "array"


def _version_3(data: dict[str, Any]) -> ZarrArray | str:
    kind = data["data_type"]
    if not isinstance(kind, str) or kind not in _NUMBERS:
        return f"its elements are {kind}"
    if data["chunk_grid"]["name"] != "regular":
        return f"its chunks are {data['chunk_grid']['name']}"
    if data.get("storage_transformers"):
        return "it has storage transformers"
    dtype = np.dtype(kind)
    found = _codecs_3(data["codecs"], dtype)
    if isinstance(found, str):
        return found
    dtype, codec = found
    encoding = data["chunk_key_encoding"]
    separator = encoding.get("configuration", {}).get(
        "separator", "/" if encoding["name"] == "default" else "."
    )
    if encoding["name"] not in ("default", "v2"):
        return f"its keys are {encoding['name']}"
    chunk = tuple(map(int, data["chunk_grid"]["configuration"]["chunk_shape"]))
    fill = _fill(data["fill_value"], dtype)
    prefix = "c" if encoding["name"] == "default" else ""
    return _checked(ZarrArray(tuple(map(int, data["shape"])), chunk, dtype, codec, fill, prefix, separator))


def _codecs_3(codecs: list[Any], dtype: np.dtype[Any]) -> tuple[np.dtype[Any], str] | str:
    """The stored elements' type and the codec of chunks; or what is not known here."""
    steps = [
        (codec, {}) if isinstance(codec, str) else (codec["name"], codec.get("configuration") or {})
        for codec in codecs
    ]
    if not steps or steps[0][0] != "bytes":
        return f"its codecs begin with {steps[0][0] if steps else 'nothing'}"
    order: Literal[">", "<"] = ">" if steps[0][1].get("endian") == "big" else "<"
    names = [name for name, _ in steps[1:]]
    if len(names) > 1 or (names and names[0] not in CODECS):
        return f"its codecs are {' and '.join(names)}"
    return dtype.newbyteorder(order), names[0] if names else "none"


def _version_2(data: dict[str, Any]) -> ZarrArray | str:
    if not isinstance(data["dtype"], str) or np.dtype(data["dtype"]).kind not in "biufc":
        return f"its elements are {data['dtype']}"
    dtype = np.dtype(data["dtype"])
    if data.get("order", "C") != "C":
        return "its chunks are in Fortran's order"
    if data.get("filters"):
        return "it has filters"
    compressor = data.get("compressor")
    codec = "none" if compressor is None else compressor["id"]
    if codec not in CODECS:
        return f"its compressor is {codec}"
    fill = _fill(data.get("fill_value"), dtype)
    separator = data.get("dimension_separator", ".")
    shape, chunk = tuple(map(int, data["shape"])), tuple(map(int, data["chunks"]))
    return _checked(ZarrArray(shape, chunk, dtype, codec, fill, "", separator))


def _checked(array: ZarrArray) -> ZarrArray:
    if array.separator not in (".", "/"):
        raise ValueError(f"the separator of its chunks' names is {array.separator!r}")
    is_grid = len(array.shape) == len(array.chunk) and min(array.chunk, default=1) > 0
    if not is_grid or min(array.shape, default=0) < 0 or max(*array.shape, *array.chunk, 0, 0) > _LARGEST:
        raise ValueError(f"its chunks are {array.chunk}, of an array {array.shape}")
    return array


def _fill(value: Any, dtype: np.dtype[Any]) -> bytes:
    """The bytes of an element of which nothing was written."""
    if value is None:  # not defined: zeros, as zarr-python and tensorstore have it
        return bytes(dtype.itemsize)
    if isinstance(value, list):  # a complex number
        return np.array(complex(*(_number(part, dtype) for part in value)), dtype).tobytes()
    return np.array(_number(value, dtype), dtype).tobytes()


def _number(value: Any, dtype: np.dtype[Any]) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("0x"):  # the bits of a float
        bits = int(value, 16)
        part = dtype.newbyteorder("=") if dtype.kind == "f" else np.dtype(f"f{dtype.itemsize // 2}")
        return np.array(bits, f"u{part.itemsize}").view(part)[()]
    special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    if value in special:
        return special[value]
    return np.frombuffer(base64.b64decode(value), dtype)[0]

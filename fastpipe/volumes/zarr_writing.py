"""Chunks of a Zarr array, and the file that says what the array is.

https://zarr-specs.readthedocs.io: version 3 of the format, one file for each chunk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.files import sync_folder
from fastpipe.errors import OptionError
from fastpipe.volumes.zarr_metadata import even_parts

__all__ = [
    "Codec",
    "ZarrLayout",
    "chunk_path",
    "encoder",
    "metadata",
    "remove_chunk",
    "sync_chunk",
    "write_chunk",
]

UInt8Array = npt.NDArray[np.uint8]

# Those of the format that NumPy has too.
_TYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
}  # fmt: skip
_LEVELS = {"blosc-zstd": (0, 9), "zstd": (1, 22), "none": (0, 0)}
_LARGEST_CHUNK = 1 << 30  # Blosc ends at 2 GiB
# What a reader decompresses at least: in a block for each part of a chunk, parts can be read alone.
_BLOCK_NBYTES = 1 << 17


class Codec(NamedTuple):
    """What chunks are compressed with.

    Attributes:
        name: ``"blosc-zstd"``, ``"zstd"`` or ``"none"``.
        level: of the compressor.
    """

    name: str
    level: int

    @classmethod
    def of(cls, name: str, level: int | None) -> Codec:
        """The codec of a name.

        Args:
            name: ``"keep"`` stands for the default.
            level: None for the default.

        Raises:
            OptionError: there is none, or not of this level.
        """
        name = "blosc-zstd" if name == "keep" else name
        if name not in _LEVELS:
            raise OptionError(f"--codec for Zarr must be one of {', '.join(_LEVELS)}; got {name!r}")
        least, most = _LEVELS[name]
        if name == "none":
            if level is not None:
                raise OptionError("--level goes with a codec, not with --codec none")
            return cls(name, 0)
        level = 5 if level is None else level
        if not least <= level <= most:
            raise OptionError(f"--level of {name} is from {least} to {most}, got {level}")
        return cls(name, level)


class ZarrLayout(NamedTuple):
    """How an array is to be stored.

    Attributes:
        shape: of the array.
        dtype: of its elements, as they are stored: little-endian.
        chunk: of a chunk.
        codec: of the chunks.
        fill: the bytes of an element of which nothing is written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    codec: Codec
    fill: bytes

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        chunk: Sequence[int],
        codec: Codec,
        fill: bytes | None = None,
    ) -> ZarrLayout:
        """A layout for an array.

        Args:
            shape, dtype: of the array.
            chunk: along its last dimensions; along those in front it is 1.
            codec: of the chunks.
            fill: an element in the array's dtype, of which nothing need be written; None for 0.

        Raises:
            OptionError: there can be none.
        """
        if dtype.name not in _TYPES or dtype.names:
            raise OptionError(f"its elements are {dtype}, for which Zarr has no type")
        if not shape:
            raise OptionError("it is a single value, which has no chunks")
        if len(chunk) > len(shape):
            raise OptionError(f"--chunks has {len(chunk)} numbers, and the volume {len(shape)} dimensions")
        whole = [1] * (len(shape) - len(chunk)) + list(chunk)
        # Longer than the volume, a chunk would hold nothing more.
        whole = [min(side, max(size, 1)) for side, size in zip(whole, shape, strict=True)]
        if math.prod(whole) * dtype.itemsize > _LARGEST_CHUNK:
            raise OptionError(f"--chunks {','.join(map(str, whole))} makes chunks of more than 1 GiB")
        stored = dtype.newbyteorder("<")
        element = np.frombuffer(fill or bytes(dtype.itemsize), dtype).astype(stored)
        if dtype.kind in "fc":
            # Of all that is no number only one survives all readers; chunks of the others are written.
            parts = element.view(element.real.dtype)
            parts[np.isnan(parts)] = np.nan
        return cls(tuple(shape), stored, tuple(whole), codec, element.tobytes())

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk, decoded."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def block(self) -> int:
        """Bytes of a block of Blosc's: as many whole slabs of a chunk as are worth to be read alone."""
        axis = next((dim for dim, side in enumerate(self.chunk) if side > 1), 0)
        side = self.chunk[axis]
        row = self.chunk_nbytes // side
        return row * next((slab for slab in even_parts(side) if slab * row >= _BLOCK_NBYTES), side)


def metadata(layout: ZarrLayout, attributes: dict[str, Any], dimension_names: list[Any] | None) -> bytes:
    """The content of zarr.json."""
    codec, itemsize = layout.codec, layout.dtype.itemsize
    codecs: list[dict[str, Any]] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}
    ]
    if codec.name == "blosc-zstd":
        configuration = {
            "typesize": itemsize,
            "cname": "zstd",
            "clevel": codec.level,
            "shuffle": "shuffle" if itemsize > 1 else "noshuffle",
            "blocksize": layout.block,
        }
        codecs.append({"name": "blosc", "configuration": configuration})
    elif codec.name == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": codec.level, "checksum": True}})
    content = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": layout.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _in_json(np.frombuffer(layout.fill, layout.dtype)[0]),
        "codecs": codecs,
        "attributes": attributes,
    }
    if dimension_names is not None and len(dimension_names) == len(layout.shape):
        content["dimension_names"] = dimension_names
    return json.dumps(content, indent=2).encode()


def _in_json(element: Any) -> Any:
    """A fill value as the format writes it: what JSON has no number for, as text."""
    if element.dtype.kind == "c":
        return [_in_json(element.real), _in_json(element.imag)]
    if element.dtype.kind != "f" or np.isfinite(element):
        return element.item()
    if np.isnan(element):
        return "NaN"
    return "Infinity" if element > 0 else "-Infinity"


def encoder(layout: ZarrLayout) -> Callable[[npt.NDArray[Any]], Any]:
    """What makes bytes of a chunk: the same ones each time.

    It is to be called from threads other than the main one, in which Blosc would take threads of its own,
    and these put blocks into any order.

    Raises:
        MissingDependencyError: the package with the codec is not installed.
    """
    codec = layout.codec
    if codec.name == "none":
        return lambda chunk: chunk.view(np.uint8).reshape(-1).data
    if codec.name == "zstd":
        zstd = require("numcodecs.zstd", extra="volume")
        return lambda chunk: zstd.compress(chunk, codec.level, True)
    blosc = require("numcodecs.blosc", extra="volume")
    shuffle, block = int(layout.dtype.itemsize > 1), layout.block
    return lambda chunk: blosc.compress(chunk, b"zstd", codec.level, shuffle, block)


def chunk_path(array: Path, place: Sequence[int]) -> Path:
    """A chunk's file."""
    return array.joinpath("c", *map(str, place))


def remove_chunk(array: Path, place: Sequence[int]) -> None:
    """Remove a chunk's file, if there is one: without it the chunk is full of the fill value.

    Raises:
        OSError: it cannot be removed.
    """
    chunk_path(array, place).unlink(missing_ok=True)


def write_chunk(array: Path, temporary: Path, place: Sequence[int], data: Any) -> None:
    """Write a chunk's file: it gets its name when it is whole.

    Args:
        array: the array's folder.
        temporary: a folder of the same file system.
        place: of the chunk in the grid.
        data: its bytes.

    Raises:
        OSError: it cannot be written.
    """
    path = chunk_path(array, place)
    unfinished = temporary / "-".join(map(str, place))
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def sync_chunk(array: Path, place: Sequence[int]) -> None:
    """Have a chunk's file, and its name, on the disk; or that there is none.

    Raises:
        OSError: it cannot be written.
    """
    path = chunk_path(array, place)
    with contextlib.suppress(FileNotFoundError), open(path, "rb+") as file:
        os.fsync(file.fileno())
    if path.parent.is_dir():
        sync_folder(path.parent)

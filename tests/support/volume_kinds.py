"""Volumes of every kind, and what NumPy cuts from their arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import tifffile
import zarr
from volume_files import write_blosc2, write_dicom, write_n5, write_nifti, write_npy
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec


def _zarr(path: str, array: Any, chunk: Sequence[int], is_sharded: bool = False, **options: Any) -> None:
    shards = tuple(2 * side for side in chunk) if is_sharded else None
    zarr.create_array(path, data=array, chunks=tuple(chunk), shards=shards, **options)


def _hdf5(path: str, array: Any, chunk: Sequence[int], **options: Any) -> str:
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", data=array, chunks=tuple(map(min, chunk, array.shape)), **options)
        file["other"] = np.zeros(3)
    return f"{path}/raw"


def _contiguous(path: str, array: Any, chunk: Sequence[int]) -> None:
    with h5py.File(path, "w") as file:
        file["group/raw"] = array  # the only dataset needs no name


def _tiff(path: str, array: Any, chunk: Sequence[int], **options: Any) -> None:
    if options.get("tile"):
        options["tile"] = tuple(-(-side // 16) * 16 for side in chunk[-2:])
    if options.get("rowsperstrip"):
        options["rowsperstrip"] = chunk[-2]
    tifffile.imwrite(path, array, photometric="minisblack", **options)


def _slices(path: str, array: Any, chunk: Sequence[int], end: str, **options: Any) -> None:
    os.mkdir(path)
    for number, page in enumerate(array):
        _tiff(f"{path}/{number:04}.{end}", page, chunk, **options)


_V2, _ZLIB = {"zarr_format": 2}, {"compression": "zlib"}
_BIG_ENDIAN = {"serializer": BytesCodec(endian="big"), "compressors": ZstdCodec(level=1)}
# Of each kind what its names end in, a function that writes it, and its options.
_WRITERS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "zarr3 blosc": (".zarr", _zarr, {"compressors": BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")}),
    "zarr3 bitshuffle": (".zarr", _zarr, {"compressors": BloscCodec(clevel=3, shuffle="bitshuffle")}),
    "zarr3 zstd": (".zarr", _zarr, {"compressors": ZstdCodec(level=1)}),
    "zarr3 gzip": (".zarr", _zarr, {"compressors": GzipCodec(level=1)}),
    "zarr3 none": (".zarr", _zarr, {"compressors": None}),
    "zarr3 big-endian": (".zarr", _zarr, _BIG_ENDIAN), "zarr3 sharded": (".zarr", _zarr, {"is_sharded": True}),
    "zarr2 blosc": (".zarr", _zarr, {"compressors": numcodecs.Blosc(cname="zstd", clevel=3), **_V2}),
    "zarr2 zstd": (".zarr", _zarr, {"compressors": numcodecs.Zstd(level=1), **_V2}),
    "zarr2 zlib": (".zarr", _zarr, {"compressors": numcodecs.Zlib(level=1), **_V2}),
    "zarr2 none": (".zarr", _zarr, {"compressors": None, **_V2}),
    "zarr2 fortran": (".zarr", _zarr, {"order": "F", **_V2}),
    "n5 gzip": (".n5", write_n5, {"compression": {"type": "gzip"}}),
    "n5 raw": (".n5", write_n5, {"compression": {"type": "raw"}}),
    "hdf5 gzip": (".h5", _hdf5, {"compression": "gzip", "shuffle": True}),
    "hdf5 lzf": (".h5", _hdf5, {"compression": "lzf", "fletcher32": True}), "hdf5 chunks": (".h5", _hdf5, {}),
    "hdf5 scale-offset": (".h5", _hdf5, {"scaleoffset": 0}), "hdf5 contiguous": (".h5", _contiguous, {}),
    "tiff tiles": (".tif", _tiff, {"tile": True, "predictor": True, **_ZLIB}),
    "tiff strips": (".tiff", _tiff, {"rowsperstrip": True, **_ZLIB}), "tiff raw": (".tif", _tiff, {}),
    "tiff big-endian": (".tif", _tiff, {"byteorder": ">"}),
    "tiff big-endian tiles": (".tif", _tiff, {"byteorder": ">", "tile": True, **_ZLIB}),
    "tiff raw tiles": (".tif", _tiff, {"tile": True}), "bigtiff": (".tif", _tiff, {"bigtiff": True, **_ZLIB}),
    "tiff folder": ("", _slices, {"end": "tif"}),
    "tiff folder zlib": ("", _slices, {"end": "TIF", "tile": True, **_ZLIB}),
    "nii": (".nii", write_nifti, {}), "nii.gz": (".nii.gz", write_nifti, {}), "b2nd": (".b2nd", write_blosc2, {}),
    "dicom": ("", write_dicom, {}), "npy": (".npy", write_npy, {}), "npy fortran": (".npy", write_npy, {"is_fortran": True}),
}  # fmt: skip
VOLUME_KINDS = [*_WRITERS, "array"]


def write_volume(kind: str, path: str | os.PathLike[str], array: Any, chunk: Sequence[int]) -> Any:
    """Write an array as a volume; return what a script names, where ``path`` has no suffix yet."""
    if kind == "array":
        return array.copy()
    end, write, options = _WRITERS[kind]
    place = f"{os.fspath(path)}{end}"
    named = write(Path(place) if write in (write_nifti, write_dicom) else place, array, chunk, **options)
    return named if isinstance(named, str) else place


def cut(array: Any, start: Sequence[int], size: Sequence[int], mode: Any = "error", value: float = 0) -> Any:
    """Return a patch of the last dimensions, as ``numpy.pad`` and slicing make it."""
    lead = array.ndim - len(size)
    before = [max(0, -at) for at in start]
    ends = zip(start, size, array.shape[lead:], strict=True)
    behind = [max(0, at + side - most) for at, side, most in ends]
    if any(before) or any(behind):
        assert mode != "error"
        options = {"constant_values": np.array(value).astype(array.dtype)} if mode == "constant" else {}
        array = np.pad(array, [(0, 0)] * lead + list(zip(before, behind, strict=True)), mode=mode, **options)
    box = [slice(at + more, at + more + side) for at, more, side in zip(start, before, size, strict=True)]
    return array[(..., *box)]


def equal(found: Any, expected: Any) -> bool:
    """Return whether arrays are of one shape and type, but for the order of bytes, and equal to the last bit."""
    arrays = [np.asarray(one) for one in (found, expected)]
    a, b = (one.astype(one.dtype.newbyteorder("=")) for one in arrays)
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def random_array(shape: Sequence[int], dtype: Any, seed: int = 0) -> Any:
    """Return numbers that compress."""
    random, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind == "f":
        return (random.integers(-40, 40, shape) / 4).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)


def coordinates(shape: Sequence[int]) -> Any:
    """Return a volume whose elements say where they are: int64, in C order."""
    return np.arange(int(np.prod(shape))).reshape(shape)

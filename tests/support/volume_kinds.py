"""Volumes of every kind, and what NumPy cuts from their arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import blosc2
import h5py
import nibabel
import numcodecs
import numpy as np
import tensorstore
import tifffile
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

__all__ = ["VOLUME_KINDS", "coordinates", "cut", "equal", "random_array", "write_volume"]


def _zarr(path: str, array: Any, chunk: Sequence[int], **options: Any) -> str:
    zarr.create_array(f"{path}.zarr", data=array, chunks=tuple(chunk), **options)
    return f"{path}.zarr"


def _sharded(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _zarr(path, array, chunk, shards=tuple(2 * side for side in chunk))


def _n5(path: str, array: Any, chunk: Sequence[int], compression: str) -> str:
    metadata = {
        "dimensions": list(array.shape), "blockSize": list(chunk), "dataType": array.dtype.name,
        "compression": {"type": compression},
    }  # fmt: skip
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}.n5/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(array).result()
    return f"{path}.n5"


def _within(chunk: Sequence[int], array: Any) -> tuple[int, ...]:
    return tuple(min(side, size) for side, size in zip(chunk, array.shape, strict=True))


def _hdf5(path: str, array: Any, chunk: Sequence[int], **options: Any) -> str:
    with h5py.File(f"{path}.h5", "w") as file:
        file.create_dataset("raw", data=array, chunks=_within(chunk, array), **options)
        file["other"] = np.zeros(3)
    return f"{path}.h5/raw"


def _contiguous(path: str, array: Any, chunk: Sequence[int]) -> str:
    with h5py.File(f"{path}.h5", "w") as file:
        file["group/raw"] = array
    return f"{path}.h5"  # the only dataset needs no name


def _tiff(path: str, array: Any, chunk: Sequence[int], end: str = "tif", **options: Any) -> str:
    if options.get("tile"):
        options["tile"] = tuple(-(-side // 16) * 16 for side in chunk[-2:])
    if options.get("rowsperstrip"):
        options["rowsperstrip"] = chunk[-2]
    tifffile.imwrite(f"{path}.{end}", array, photometric="minisblack", **options)
    return f"{path}.{end}"


def _slices(path: str, array: Any, chunk: Sequence[int], **options: Any) -> str:
    os.mkdir(path)
    for number, page in enumerate(array):
        _tiff(f"{path}/{number:04}", page, chunk, **options)
    return path


def _nifti(path: str, array: Any, chunk: Sequence[int], end: str) -> str:
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4), dtype=array.dtype), f"{path}.{end}")
    return f"{path}.{end}"


def _b2nd(path: str, array: Any, chunk: Sequence[int]) -> str:
    sides = _within(chunk, array)
    blocks = tuple(max(1, side // 2) for side in sides)
    blosc2.asarray(array, chunks=sides, blocks=blocks, urlpath=f"{path}.b2nd", mode="w")
    return f"{path}.b2nd"


def _npy(path: str, array: Any, chunk: Sequence[int], order: Any = "C") -> str:
    np.save(f"{path}.npy", np.asarray(array, order=order))
    return f"{path}.npy"


_V2 = {"zarr_format": 2}
# Of each kind a function that writes it, and its options.
_WRITERS: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "zarr3 blosc": (_zarr, {"compressors": BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")}),
    "zarr3 bitshuffle": (_zarr, {"compressors": BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")}),
    "zarr3 zstd": (_zarr, {"compressors": ZstdCodec(level=1)}),
    "zarr3 gzip": (_zarr, {"compressors": GzipCodec(level=1)}),
    "zarr3 none": (_zarr, {"compressors": None}),
    "zarr3 big-endian": (_zarr, {"serializer": BytesCodec(endian="big"), "compressors": ZstdCodec(level=1)}),
    "zarr3 sharded": (_sharded, {}),
    "zarr2 blosc": (_zarr, {"compressors": numcodecs.Blosc(cname="zstd", clevel=3), **_V2}),
    "zarr2 zstd": (_zarr, {"compressors": numcodecs.Zstd(level=1), **_V2}),
    "zarr2 zlib": (_zarr, {"compressors": numcodecs.Zlib(level=1), **_V2}),
    "zarr2 none": (_zarr, {"compressors": None, **_V2}),
    "zarr2 fortran": (_zarr, {"order": "F", **_V2}),
    "n5 gzip": (_n5, {"compression": "gzip"}),
    "n5 raw": (_n5, {"compression": "raw"}),
    "hdf5 gzip": (_hdf5, {"compression": "gzip", "shuffle": True}),
    "hdf5 lzf": (_hdf5, {"compression": "lzf", "fletcher32": True}),
    "hdf5 chunks": (_hdf5, {}),
    "hdf5 scale-offset": (_hdf5, {"scaleoffset": 0}),
    "hdf5 contiguous": (_contiguous, {}),
    "tiff tiles": (_tiff, {"tile": True, "compression": "zlib", "predictor": True}),
    "tiff strips": (_tiff, {"end": "tiff", "rowsperstrip": True, "compression": "zlib"}),
    "tiff raw": (_tiff, {}),
    "tiff big-endian": (_tiff, {"byteorder": ">"}),
    "tiff big-endian tiles": (_tiff, {"byteorder": ">", "tile": True, "compression": "zlib"}),
    "tiff raw tiles": (_tiff, {"tile": True}),
    "bigtiff": (_tiff, {"bigtiff": True, "compression": "zlib"}),
    "tiff folder": (_slices, {}),
    "tiff folder zlib": (_slices, {"end": "TIF", "compression": "zlib", "tile": True}),
    "nii": (_nifti, {"end": "nii"}),
    "nii.gz": (_nifti, {"end": "nii.gz"}),
    "b2nd": (_b2nd, {}),
    "npy": (_npy, {}),
    "npy fortran": (_npy, {"order": "F"}),
}  # fmt: skip
VOLUME_KINDS = [*_WRITERS, "array"]


def write_volume(kind: str, path: str | os.PathLike[str], array: Any, chunk: Sequence[int]) -> Any:
    """Write an array as a volume; return what a script names, where ``path`` has no suffix yet."""
    if kind == "array":
        return array.copy()
    made, options = _WRITERS[kind]
    return made(os.fspath(path), array, chunk, **options)


def cut(array: Any, start: Sequence[int], size: Sequence[int], mode: Any = "error", value: float = 0) -> Any:
    """Return a patch of the last dimensions, as ``numpy.pad`` and slicing make it."""
    lead = array.ndim - len(size)
    before = [max(0, -at) for at in start]
    behind = [
        max(0, at + side - most) for at, side, most in zip(start, size, array.shape[lead:], strict=True)
    ]
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

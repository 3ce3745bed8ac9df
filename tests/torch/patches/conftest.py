"""Fixtures of the tests of ``FastPatchDataset``: volumes of every kind, and what NumPy cuts from their arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

from fastpipe.core.array_cache import FileArrays, default_folder
from fastpipe.volumes import blosc2 as blosc2_volumes
from fastpipe.volumes import raw as raw_volumes
from fastpipe.volumes import samples as samples_module
from fastpipe.volumes import tensorstore as tensorstore_volumes
from fastpipe.volumes import volume as grouped_volumes
from fastpipe.volumes import zarr as zarr_volumes

Writer = Callable[[str, Any, Sequence[int]], str]
_WRITERS: dict[str, Writer] = {}


def _writer(name: str) -> Callable[[Writer], Writer]:
    def noted(write: Writer) -> Writer:
        _WRITERS[name] = write
        return write

    return noted


# ---- Zarr and N5 --------------------------------------------------------------------------------


def _zarr(path: str, array: Any, chunk: Sequence[int], **options: Any) -> str:
    zarr.create_array(f"{path}.zarr", data=array, chunks=tuple(chunk), **options)
    return f"{path}.zarr"


_V3: dict[str, Any] = {
    "blosc": BloscCodec(cname="lz4", clevel=3, shuffle="shuffle"),
    "bitshuffle": BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),
    "zstd": ZstdCodec(level=1),
    "gzip": GzipCodec(level=1),
    "none": None,
}
_V2: dict[str, Any] = {
    "blosc": numcodecs.Blosc(cname="zstd", clevel=3),
    "zstd": numcodecs.Zstd(level=1),
    "zlib": numcodecs.Zlib(level=1),
    "none": None,
}


def _add_zarr() -> None:
    for name, codec in _V3.items():
        _WRITERS[f"zarr3 {name}"] = lambda path, array, chunk, codec=codec: _zarr(
            path, array, chunk, compressors=codec
        )
    for name, codec in _V2.items():
        _WRITERS[f"zarr2 {name}"] = lambda path, array, chunk, codec=codec: _zarr(
            path, array, chunk, compressors=codec, zarr_format=2
        )


_add_zarr()


@_writer("zarr3 big-endian")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _zarr(path, array, chunk, serializer=BytesCodec(endian="big"), compressors=ZstdCodec(level=1))


@_writer("zarr3 sharded")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _zarr(path, array, chunk, shards=tuple(2 * side for side in chunk))


@_writer("zarr2 fortran")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _zarr(path, array, chunk, zarr_format=2, order="F")


def _n5(path: str, array: Any, chunk: Sequence[int], compression: dict[str, Any]) -> str:
    import tensorstore

    spec = {
        "driver": "n5",
        "kvstore": {"driver": "file", "path": f"{path}.n5/"},
        "metadata": {
            "dimensions": list(array.shape), "blockSize": list(chunk), "dataType": array.dtype.name,
            "compression": compression,
        },
    }  # fmt: skip
    tensorstore.open(spec, create=True).result().write(array).result()
    return f"{path}.n5"


@_writer("n5 gzip")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _n5(path, array, chunk, {"type": "gzip"})


@_writer("n5 raw")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _n5(path, array, chunk, {"type": "raw"})


# ---- HDF5 ---------------------------------------------------------------------------------------


def _add_hdf5() -> None:
    kinds: dict[str, dict[str, Any]] = {
        "gzip": {"compression": "gzip", "shuffle": True},
        "lzf": {"compression": "lzf", "fletcher32": True},
        "chunks": {},
        "scale-offset": {"scaleoffset": 0},
    }

    def write(path: str, array: Any, chunk: Sequence[int], options: dict[str, Any]) -> str:
        sides = tuple(min(side, size) for side, size in zip(chunk, array.shape, strict=True))
        with h5py.File(f"{path}.h5", "w") as file:
            file.create_dataset("raw", data=array, chunks=sides, **options)
            file["other"] = np.zeros(3)
        return f"{path}.h5/raw"

    for name, options in kinds.items():
        _WRITERS[f"hdf5 {name}"] = lambda path, array, chunk, options=options: write(
            path, array, chunk, options
        )


_add_hdf5()


@_writer("hdf5 contiguous")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    with h5py.File(f"{path}.h5", "w") as file:
        file["group/raw"] = array
    return f"{path}.h5"  # the only dataset needs no name


# ---- TIFF ---------------------------------------------------------------------------------------


def _tiff(path: str, array: Any, **options: Any) -> str:
    import tifffile

    tifffile.imwrite(path, array, **{"photometric": "minisblack", **options})
    return path


def _tile(chunk: Sequence[int]) -> tuple[int, int]:
    return tuple(-(-side // 16) * 16 for side in chunk[-2:])  # type: ignore[return-value]


@_writer("tiff tiles")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tif", array, tile=_tile(chunk), compression="zlib", predictor=True)


@_writer("tiff strips")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tiff", array, rowsperstrip=chunk[-2], compression="zlib")


@_writer("tiff raw")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tif", array)


@_writer("tiff big-endian")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tif", array, byteorder=">")


@_writer("tiff big-endian tiles")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tif", array, byteorder=">", tile=_tile(chunk), compression="zlib")


@_writer("tiff raw tiles")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tif", array, tile=_tile(chunk))


@_writer("bigtiff")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _tiff(f"{path}.tif", array, bigtiff=True, compression="zlib")


@_writer("tiff folder")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    os.mkdir(path)
    for number, page in enumerate(array):
        _tiff(f"{path}/{number:04}.tif", page)
    return path


@_writer("tiff folder zlib")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    os.mkdir(path)
    for number, page in enumerate(array):
        _tiff(f"{path}/{number:04}.TIF", page, compression="zlib", tile=_tile(chunk))
    return path


# ---- NIfTI, Blosc2, NumPy -----------------------------------------------------------------------


def _nifti(path: str, array: Any, chunk: Sequence[int]) -> str:
    import nibabel

    nibabel.save(nibabel.Nifti1Image(array, np.eye(4), dtype=array.dtype), path)
    return path


@_writer("nii")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _nifti(f"{path}.nii", array, chunk)


@_writer("nii.gz")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    return _nifti(f"{path}.nii.gz", array, chunk)


@_writer("b2nd")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    import blosc2

    sides = tuple(min(side, size) for side, size in zip(chunk, array.shape, strict=True))
    blocks = tuple(max(1, side // 2) for side in sides)
    blosc2.asarray(array, chunks=sides, blocks=blocks, urlpath=f"{path}.b2nd", mode="w")
    return f"{path}.b2nd"


@_writer("npy")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    np.save(f"{path}.npy", array)
    return f"{path}.npy"


@_writer("npy fortran")
def _(path: str, array: Any, chunk: Sequence[int]) -> str:
    np.save(f"{path}.npy", np.asfortranarray(array))
    return f"{path}.npy"


# ---- fixtures -----------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _libraries_have_their_threads() -> Iterator[None]:
    """zarr-python starts threads when it is first used, and keeps them: let that be before any test."""
    with zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1}):
        zarr.create_array({}, shape=(4,), chunks=(2,), dtype="u1")[:] = 1  # type: ignore[arg-type]
        yield


@pytest.fixture(scope="session")
def write_volume() -> Callable[..., Any]:
    """Writes an array as a volume: ``write_volume(kind, path, array, chunk)`` returns what a script names, where
    ``path`` has no suffix yet; an array in memory is ``"array"``."""

    def write(kind: str, path: str | os.PathLike[str], array: Any, chunk: Sequence[int]) -> Any:
        return array.copy() if kind == "array" else _WRITERS[kind](os.fspath(path), array, chunk)

    return write


@pytest.fixture(scope="session")
def kinds() -> list[str]:
    """Those that ``write_volume`` knows."""
    return [*_WRITERS, "array"]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units as small as volumes have them, so that small volumes have many."""
    monkeypatch.setattr(grouped_volumes, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(zarr_volumes, "_LEAST_UNIT", 1)
    monkeypatch.setattr(tensorstore_volumes, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(blosc2_volumes, "_LEAST_UNIT", 1)
    monkeypatch.setattr(raw_volumes, "_UNIT_NBYTES", 256)
    monkeypatch.setattr(raw_volumes, "_RUN_NBYTES", 32)


def _cut(array: Any, start: Sequence[int], size: Sequence[int], mode: str = "error", value: float = 0) -> Any:
    """A patch of the last dimensions, as ``numpy.pad`` and slicing make it."""
    lead = array.ndim - len(size)
    shape = array.shape[lead:]
    before = [max(0, -at) for at in start]
    behind = [max(0, at + side - most) for at, side, most in zip(start, size, shape, strict=True)]
    if any(before) or any(behind):
        assert mode != "error"
        options: Any = {"constant_values": np.array(value).astype(array.dtype)} if mode == "constant" else {}
        array = np.pad(array, [(0, 0)] * lead + list(zip(before, behind, strict=True)), mode=mode, **options)  # type: ignore[call-overload]
    box = [slice(at + more, at + more + side) for at, more, side in zip(start, before, size, strict=True)]
    return array[(..., *box)]


@pytest.fixture(scope="session")
def cut() -> Callable[..., Any]:
    """What a patch is: ``cut(array, start, size, mode, value)``, with ``numpy.pad`` of all of the array."""
    return _cut


def _equal(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    found, expected = (one.astype(one.dtype.newbyteorder("=")) for one in (found, expected))
    return bool(
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


@pytest.fixture(scope="session")
def equal() -> Callable[[Any, Any], bool]:
    """Whether two arrays are of one shape and type, but for the order of bytes, and equal to the last bit."""
    return _equal


@pytest.fixture(scope="session")
def random_array() -> Callable[..., Any]:
    """Numbers that compress: ``random_array(shape, dtype, seed)``."""

    def made(shape: Sequence[int], dtype: Any, seed: int = 0) -> Any:
        random, dtype = np.random.default_rng(seed), np.dtype(dtype)
        if dtype.kind == "f":
            return (random.integers(-40, 40, shape) / 4).astype(dtype)
        return random.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)

    return made


@pytest.fixture(scope="session")
def coordinates() -> Callable[[Sequence[int]], Any]:
    """A volume whose elements say where they are: int64, in C order."""
    return lambda shape: np.arange(int(np.prod(shape))).reshape(shape)


@pytest.fixture(autouse=True)
def cache_folder(own_cache_folder: Path) -> Path:
    """The user's cache folder, which is each test's own."""
    return own_cache_folder


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the clock had gone on since files were written: only then is kept what is found out about them."""

    def made() -> FileArrays | None:
        folder = default_folder()
        return None if folder is None else FileArrays(folder, now=lambda: time.time_ns() + 10**12)

    monkeypatch.setattr(samples_module, "default_file_arrays", made)

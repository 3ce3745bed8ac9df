"""Formats of volumes: files as their own libraries write and read them, for tests of every reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blosc2
import h5py
import nibabel
import numcodecs
import numpy as np
import pydicom
import tensorstore
import tifffile
import zarr
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

SHUFFLES = ["noshuffle", "shuffle", "bitshuffle"]
NUMBERS = ["i1", "<i2", ">i4", "<i8", "u1", ">u2", "<u4", ">u8", "<f2", ">f4", "<f8", "<c8", ">c16", "?"]
N5_COMPRESSIONS: list[dict[str, Any]] = [
    {"type": "raw"}, {"type": "gzip", "level": 1}, {"type": "bzip2"}, {"type": "xz"},
    {"type": "blosc", "cname": "lz4", "clevel": 3, "shuffle": 1},
]  # fmt: skip


def compressor_of(version: int, codec: tuple[Any, ...]) -> Any:
    """Returns zarr-python's codec, for ``("zstd", 1)`` or ``("blosc", "lz4", 3, "shuffle", 0)``."""
    name, *options = codec
    if name == "none":
        return None
    if name == "blosc":
        cname, level, shuffle, block = options
        if version == 2:
            return numcodecs.Blosc(cname, level, SHUFFLES.index(shuffle), block)
        return BloscCodec(cname=cname, clevel=level, shuffle=shuffle, blocksize=block)
    if version == 2:
        return {"zstd": numcodecs.Zstd, "gzip": numcodecs.GZip, "zlib": numcodecs.Zlib}[name](*options)
    return ZstdCodec(level=options[0], checksum=True) if name == "zstd" else GzipCodec(level=options[0])


def create_zarr(
    path: Path, shape: Any, chunk: Any, kind: Any, version: Any = 3, codec: Any = ("zstd", 0), fill: Any = 0,
    separator: str = ".", keys: str = "default", **more: Any,
) -> Any:  # fmt: skip
    """Creates an array with zarr-python, in which nothing is written."""
    if version == 3 and codec[0] == "zlib":  # which is version 2's only
        codec = ("gzip", 5)
    dtype = np.dtype(kind)
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": separator}} | more
    if version == 3:
        options["chunk_key_encoding"]["name"] = keys
        if dtype.itemsize > 1:
            options["serializer"] = BytesCodec(endian="big" if dtype.str[0] == ">" else "little")
        dtype = dtype.newbyteorder("=")
    return zarr.create_array(
        path, shape=shape, chunks=chunk, dtype=dtype, zarr_format=version, fill_value=fill, overwrite=True,
        compressors=compressor_of(version, codec), **options,
    )  # fmt: skip


def write_zarr(path: Path, data: Any, chunk: Any, rows: int | None = None, **options: Any) -> None:
    create_zarr(path, data.shape, chunk, data.dtype, **options)[:rows] = data[:rows]


def read_zarr(path: Path) -> Any:
    return zarr.open_array(path, mode="r")[...]


def _write_sharded(path: Path, data: Any, chunk: Any, rows: int | None = None, **options: Any) -> None:
    options |= {
        "chunks": chunk,
        "shards": tuple(2 * side for side in chunk),
        "dtype": data.dtype.newbyteorder("="),
    }
    zarr.create_array(path, shape=data.shape, **options)[:rows] = data[:rows]


def _n5_at(path: Path) -> dict[str, Any]:
    return {"driver": "n5", "kvstore": {"driver": "file", "path": f"{os.fspath(path)}/"}}


def write_n5(
    path: Path, data: Any, chunk: Any, rows: int | None = None, compression: Any = N5_COMPRESSIONS[1]
) -> Any:
    """Writes an array with tensorstore, of which only some rows are written perhaps; returns its store."""
    metadata = {
        "dataType": data.dtype.name, "dimensions": data.shape, "blockSize": chunk, "compression": compression,
    }  # fmt: skip
    store = tensorstore.open({**_n5_at(path), "metadata": metadata}, create=True).result()
    store[: len(data[:rows])].write(data[:rows]).result()
    return store


def read_n5(path: Path) -> Any:
    return np.asarray(tensorstore.open(_n5_at(path)).result().read().result())


def write_hdf5(path: Path, data: Any, chunk: Any, rows: int | None = None, **options: Any) -> None:
    """Writes ``/x`` with h5py, in no chunks if these are None."""
    if "fillvalue" in options:
        options["fillvalue"] = np.asarray(options["fillvalue"]).astype(data.dtype)[()]
    with h5py.File(path, "w") as file:
        chunk = chunk and tuple(map(min, chunk, data.shape))
        file.create_dataset("x", data.shape, data.dtype, chunks=chunk, **options)[:rows] = data[:rows]


def read_hdf5(path: Path) -> Any:
    with h5py.File(path) as file:
        return file["x"][...]


def write_nifti(path: Path, data: Any, chunk: Any = None, scale: Any = (1, 0)) -> None:
    header = nibabel.Nifti1Header(endianness=">" if data.dtype.str[0] == ">" else "<")
    header.set_data_dtype(data.dtype)
    make = nibabel.Nifti1Pair if path.suffix == ".img" else nibabel.Nifti1Image
    image = make(data, np.eye(4), header)
    image.header.set_slope_inter(*scale)
    image.to_filename(path)


def read_nifti(path: Path) -> Any:
    return np.asanyarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]


def write_tiff(path: Path, data: Any, chunk: Any = None, **options: Any) -> None:
    order = ">" if data.dtype.str[0] == ">" else "<"
    if data.dtype.kind == "f":
        options = {**options, "predictor": False}  # which would need the package imagecodecs
    tifffile.imwrite(path, data, **{"byteorder": order, "photometric": "minisblack", **options})


def write_npy(
    path: Path, data: Any, chunk: Any = None, version: Any = None, is_fortran: bool = False
) -> None:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.asfortranarray(data) if is_fortran else data, version)


def write_blosc2(path: Path, data: Any, chunk: Any) -> None:
    chunk = tuple(map(min, chunk, data.shape))
    blocks = tuple(-(-side // 2) for side in chunk)
    blosc2.asarray(data, urlpath=os.fspath(path), mode="w", chunks=chunk, blocks=blocks)


def write_dicom(
    path: Path, data: Any, chunk: Any = None, *, scale: Any = None, bits: int | None = None, series: str = "1.2.3",
    start: Any = (-10.0, 20.5, 30.0), directions: Any = (1, 0, 0, 0, 1, 0), step: float = 2.5,
    spacing: Any = (0.7, 0.9), syntax: str = pydicom.uid.ExplicitVRLittleEndian,
    change: Callable[[int, Any], None] | None = None,
) -> None:  # fmt: skip
    """Writes a series with pydicom.

    Names of files are in another order than positions.  ``change`` may change the number and the header of a slice.
    """
    os.makedirs(path, exist_ok=True)
    normal = np.cross(directions[:3], directions[3:])
    for number, plane in enumerate(data):
        header = pydicom.Dataset()
        header.file_meta = pydicom.dataset.FileMetaDataset()
        header.file_meta.TransferSyntaxUID = syntax
        header.SOPClassUID, header.SOPInstanceUID = pydicom.uid.CTImageStorage, f"{series}.{number + 1}"
        header.SeriesInstanceUID, header.Modality, header.SeriesDescription = series, "CT", "a scan"
        header.Rows, header.Columns = plane.shape
        header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
        header.BitsAllocated = 8 * plane.itemsize
        header.BitsStored = bits or header.BitsAllocated
        header.HighBit, header.PixelRepresentation = header.BitsStored - 1, int(plane.dtype.kind == "i")
        header.ImagePositionPatient = [round(float(at), 6) for at in start + normal * step * number]
        header.ImageOrientationPatient = [round(float(one), 8) for one in directions]
        header.PixelSpacing = list(spacing)
        if scale is not None:
            header.RescaleSlope, header.RescaleIntercept = scale
        header.add_new(
            "PixelData", "OB" if plane.itemsize == 1 else "OW", plane.tobytes() + b"\0" * (plane.nbytes % 2)
        )
        if change is not None:
            change(number, header)
        header.save_as(path / f"{(number * 7 + 3) % 1009}-{series}.dcm", enforce_file_format=True)


def read_dicom(path: Path) -> Any:
    """Reads a series with pydicom; the values are scaled to float64 if there are a slope and an intercept."""
    images = [pydicom.dcmread(file) for file in path.iterdir()]
    normal = np.cross(*np.reshape(images[0].ImageOrientationPatient, (2, 3)))
    images.sort(key=lambda one: np.dot(one.ImagePositionPatient, normal))
    return np.stack([pydicom.pixels.apply_rescale(one.pixel_array, one) for one in images])


class Format(NamedTuple):
    """A format, as its own library has it."""

    name: str  # of its file or folder
    write: Callable[..., Any]  # (path, data, chunk, **options); those with parts take rows, too
    read: Callable[[Path], Any]
    kinds: list[str]  # of elements
    options: dict[str, Any] = {}  # the strategies of more options
    has_parts: bool = False  # that may not be written
    is_file: bool = True
    least_dims: int = 1
    most_dims: int = 4
    inside: str = ""  # the name of the array in it
    is_url: bool = False

    def opened_by(self, path: Path) -> str:
        """Returns what ``open_volume`` takes."""
        return f"file://{path}/" if self.is_url else f"{path}{self.inside}"


_FILLS = {"fill": st.sampled_from([0, 1])}
_CODECS = st.one_of(
    st.tuples(
        st.just("blosc"), st.sampled_from(["blosclz", "lz4", "lz4hc", "zlib", "zstd"]), st.integers(0, 9),
        st.sampled_from(SHUFFLES), st.sampled_from([0, 0, 512]),
    ),
    st.sampled_from([("zstd", 3), ("zstd", 0), ("gzip", 5), ("gzip", 1), ("zlib", 5), ("none",)]),
)  # fmt: skip
_ZARR = {"codec": _CODECS, "separator": st.sampled_from("./")} | _FILLS
_PLAIN = [kind for kind in NUMBERS if kind not in ("<f2", "<c8", ">c16", "?")]
_PACKED = {"compression": st.sampled_from([None, "gzip", "lzf"]), "fillvalue": st.sampled_from([0, 1])}
_SCALES = {"scale": st.sampled_from([(1, 0), (2.5, 0), (0.1, -7)])}
FORMATS: dict[str, Format] = {
    "zarr 2": Format("x.zarr", partial(write_zarr, version=2), read_zarr, NUMBERS, _ZARR, True, False),
    "zarr 3": Format("x.zarr", write_zarr, read_zarr, NUMBERS,
                     _ZARR | {"keys": st.sampled_from(["default", "v2"])}, True, False),
    "zarr 3, sharded": Format("x.zarr", _write_sharded, read_zarr, NUMBERS,
                              {"fill_value": st.sampled_from([0, 1])}, True, False),
    "n5": Format("x.n5", write_n5, read_n5, _PLAIN, {"compression": st.sampled_from(N5_COMPRESSIONS)}, True, False),
    "n5 by its URL": Format("x.n5", write_n5, read_n5, _PLAIN, {}, True, False, is_url=True),
    "hdf5": Format("x.h5", write_hdf5, read_hdf5, NUMBERS, _PACKED, True, inside="/x"),
    "hdf5, contiguous": Format("x.h5", lambda path, data, chunk, **more: write_hdf5(path, data, None, **more),
                               read_hdf5, NUMBERS, {}, True, inside="/x"),
    "nifti": Format("x.nii", write_nifti, read_nifti, ["u1", "<i2", ">i2", "<f4", ">f4", "<f8"], _SCALES, least_dims=3),
    "nifti, packed": Format("x.nii.gz", write_nifti, read_nifti, ["u1", ">i2", "<f4"], _SCALES, least_dims=3),
    "dicom": Format("x", write_dicom, read_dicom, ["u1", "i1", "<i2", "<u2", "<i4", "<u4"],
                    {"scale": st.sampled_from([None, (2.5, 0), (0.1, -7)])}, is_file=False, least_dims=3, most_dims=3),
    "tiff": Format("x.tif", write_tiff, tifffile.imread, ["u1", "<u2", ">i2", "<f4"], {
        "compression": st.sampled_from([None, "zlib"]), "rowsperstrip": st.sampled_from([None, 1, 7])}, least_dims=2),
    "tiff, predicted": Format("x.tif", partial(write_tiff, compression="zlib", predictor=True), tifffile.imread,
                              ["u1", "<u2", ">i2"], {"tile": st.sampled_from([None, (16, 16)])}, least_dims=2),
    "numpy": Format("x.npy", write_npy, np.load, NUMBERS, {
        "version": st.sampled_from([(1, 0), (2, 0), (3, 0)]), "is_fortran": st.booleans()}),
    "blosc2": Format("x.b2nd", write_blosc2, lambda path: blosc2.open(str(path))[...], ["u1", "<i2", "<u4", "<f8", "?"]),
}  # fmt: skip

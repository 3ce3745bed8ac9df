"""Open the volume that the user gave as a path, a URL, an array or a list of files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fastpipe.core.array_cache import default_file_arrays
from fastpipe.core.files import is_hdf5, is_url, open_file, read_file
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError, VolumeError
from fastpipe.volumes.axes import Axes, viewed_array
from fastpipe.volumes.blosc2 import Blosc2Volume
from fastpipe.volumes.dicom import DicomVolume, dicom_files, dicom_folder, is_dicom, is_series_name
from fastpipe.volumes.hdf5 import hdf5_volume
from fastpipe.volumes.nifti import ScaledVolume, nifti_volume
from fastpipe.volumes.raw import MemoryVolume, RawVolume, npy_volume
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.tiff import is_tiff_name, slices_volume, tiff_volume
from fastpipe.volumes.volume import LARGEST_UNIT, NativeVolume, Volume, in_worthwhile_units
from fastpipe.volumes.zarr import METADATA, ZarrVolume, is_zarr, json_object, zarr_array
from fastpipe.volumes.zarr_python import ZarrPythonVolume, zarr_in_zip

_NUMBERS = "biufc"  # the kinds of NumPy's dtypes that are numbers
_NUMPY = b"\x93NUMPY"
_ZIP = (b"PK\3\4", b"PK\5\6")  # the first bytes of a ZIP file with members, and of an empty ZIP file
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_NIFTI_NAMES = (".nii", ".nii.gz", ".hdr.gz", ".hdr", ".img.gz", ".img")


class UnsupportedFormatError(VolumeError):
    """An error for a file whose format is not supported for volumes."""


def open_volume(
    what: Any, place: str = "volume", *, may_write: bool = False, axes: Axes | None = None
) -> Volume:
    """Open a path or a URL, a NumPy array, or a list of files: the slices of one volume, TIFF or DICOM.

    If a file or folder contains several arrays, the array's name follows the path: ``"scan.h5/raw"``,
    ``"scan.zarr/0"``, ``"ct/1.2.840.113619"`` (a series of DICOM images).  ``place`` is the name of the
    argument for messages.  With ``may_write``, fastpipe stores data in the user's cache folder: copies of
    files that can only be read sequentially, and the places of chunks.  ``axes`` selects the order and the
    direction of the dimensions.
    """
    if isinstance(what, np.ndarray):
        if what.dtype.kind not in _NUMBERS or not what.ndim:
            raise OptionError(f"{place}= must be an array of numbers, got {what.dtype} of shape {what.shape}")
        name = f"the array given as {place}="
        view = None if axes is None else axes.view(what.shape, name, None)
        return MemoryVolume(what if view is None else viewed_array(what, *view), name)
    if isinstance(what, list) and what and all(isinstance(one, (str, os.PathLike)) for one in what):
        volume = dicom_files(what) if is_dicom(os.fspath(what[0])) else slices_volume(what)
        return finished(seen(volume, axes), place)
    if not isinstance(what, (str, bytes, os.PathLike)):
        raise OptionError(f"{place}= must be a path or a NumPy array, got {type(what).__name__}: {what!r}")
    path = os.fsdecode(what)
    if is_url(path):
        return _checked(seen(TensorStoreVolume(path, {"driver": "auto", "kvstore": path}), axes), place)
    file, inside = _split(path)
    try:
        if os.path.isdir(file):
            return finished(seen(_folder(file, inside), axes), place)
        return finished(seen(_file(file, inside, may_write=may_write), axes), place)
    except (MemoryError, OverflowError) as error:  # impossible sizes in a header cause these errors
        raise VolumeError(f"{path} claims to be larger than anything that can be read: {error}") from error


def seen(volume: Volume, axes: Axes | None) -> Volume:
    """Return the volume with the order and the direction of dimensions that ``axes`` selects."""
    view = None if axes is None else axes.view(volume.shape, volume.name, volume.affine)
    if view is None:
        return volume
    if not isinstance(volume, (RawVolume, ScaledVolume, DicomVolume)):
        raise OptionError(
            f"{volume.name} is stored in parts ({volume.how}), whose dimensions channel_dim= cannot move: "
            "make a copy in which channels come first (numpy.moveaxis)"
        )
    return volume.viewed(*view)


def _checked(volume: Volume, place: str) -> Volume:
    if volume.dtype.kind not in _NUMBERS:
        raise OptionError(
            f"{place}= must be an array of numbers, which {volume.name} is not: its elements are "
            f"{volume.dtype}"
        )
    return volume


def finished(volume: Volume, place: str) -> Volume:
    """Return the volume with elements in native byte order, and with units that are worth a read call."""
    volume = in_worthwhile_units(_checked(volume, place))
    return volume if volume.dtype.isnative else NativeVolume(volume)


def _split(path: str) -> tuple[str, str]:
    file, inside = path, ""
    while not os.path.exists(file):
        file, last = os.path.split(file.rstrip("/"))
        inside = f"{last}/{inside}" if inside else last
        if not file or (os.path.isdir(file) and not is_series_name(inside)):
            raise FileNotFoundError(2, os.strerror(2), path)
    return file, inside


def _folder(path: str, series: str) -> Volume:
    if series:
        if (named := dicom_folder(path, series)) is None:
            raise FileNotFoundError(2, os.strerror(2), f"{path}/{series}")
        return named
    if is_zarr(path):
        found = zarr_array(path)
        if not isinstance(found, str):
            volume = ZarrVolume(path, found)
            if volume.unit_nbytes <= LARGEST_UNIT:
                return volume
            found = f"its chunks have {in_bytes(volume.unit_nbytes)}"
        return _other_zarr(path, found)
    if os.path.exists(os.path.join(path, "attributes.json")):
        return TensorStoreVolume(path, {"driver": "n5", "kvstore": _kvstore(path)})
    if any(map(is_tiff_name, os.listdir(path))):
        return tiff_volume(path)
    if (images := dicom_folder(path)) is not None:
        return images
    raise VolumeError(f"{path} is a folder, but neither Zarr nor N5, nor one of TIFF files or DICOM images")


def _other_zarr(path: str, why: str) -> Volume:
    file = next(filter(os.path.exists, (os.path.join(path, name) for name in METADATA)))
    driver = "zarr3" if file.endswith("zarr.json") else "zarr"
    try:
        return TensorStoreVolume(path, {"driver": driver, "kvstore": _kvstore(path)}, why)
    except VolumeError as error:
        try:
            return ZarrPythonVolume(path, "", json_object(file, read_file(file)), why)
        except VolumeError as other:
            raise VolumeError(f"{error}; {str(other).removeprefix(path).strip()}") from None


def _kvstore(path: str) -> dict[str, str]:
    return {"driver": "file", "path": os.path.abspath(path) + "/"}


def _file(path: str, inside: str, *, may_write: bool) -> Volume:
    with open(path, "rb", opener=open_file) as file:
        begin = file.read(8)
    name = path.lower()
    if begin.startswith(_ZIP):
        return zarr_in_zip(path, inside)
    is_other = begin.startswith(_NUMPY) or begin[:4] in _TIFF
    # HDF5's signature may follow other content, as in MATLAB's files.
    if name.endswith((".h5", ".hdf5")) or (not is_other and is_hdf5(path)):
        return hdf5_volume(path, inside, default_file_arrays() if may_write else None)
    if inside:
        raise VolumeError(f"{path} is not a file of several arrays, so it has no {inside!r}")
    if begin.startswith(_NUMPY):
        return npy_volume(path)
    if begin[:4] in _TIFF:
        return tiff_volume(path)
    if name.endswith(".b2nd"):
        return Blosc2Volume(path)
    if is_dicom(path):
        raise VolumeError(
            f"{path} is a DICOM file, and a volume is a series of these: name the folder, or give a list of "
            "the files of each volume, [[file, …], …]"
        )
    if name.endswith(_NIFTI_NAMES):
        return nifti_volume(path, may_write=may_write)
    raise UnsupportedFormatError(
        f"{path} is not a volume in a supported format: Zarr, N5, HDF5, TIFF, NIfTI, DICOM, Blosc2's "
        ".b2nd, NumPy's .npy"
    )

"""What a volume is said to be, to the volume."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.files import is_hdf5, is_url, open_file, read_file
from fastpipe.core.text import in_bytes
from fastpipe.core.types import ChunkObjects
from fastpipe.errors import OptionError, VolumeError
from fastpipe.volumes.blosc2 import Blosc2Volume
from fastpipe.volumes.hdf5 import hdf5_volume
from fastpipe.volumes.nifti import Converter, nifti_volume
from fastpipe.volumes.raw import MemoryVolume, npy_volume
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.tiff import is_tiff_name, slices_volume, tiff_volume
from fastpipe.volumes.volume import LARGEST_UNIT, NativeVolume, Volume, in_worthwhile_units
from fastpipe.volumes.zarr import METADATA, ZarrArray, ZarrVolume, is_zarr, json_object, zarr_array
from fastpipe.volumes.zarr_python import ZarrPythonVolume, zarr_in_zip

__all__ = ["open_volume", "zarr_of_objects"]

_NUMBERS = "biufc"  # kinds of elements, as NumPy names them
_NUMPY = b"\x93NUMPY"
_ZIP = (b"PK\3\4", b"PK\5\6")  # of a file with members, and of one without
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BLOSC2_NAMES = (".b2nd",)
_NIFTI_NAMES = (".nii", ".nii.gz", ".hdr.gz", ".hdr", ".img.gz", ".img")


def open_volume(
    what: Any, place: str = "volume", *, convert: Converter | None = None, tables: FileArrays | None = None
) -> Volume:
    """Open a volume.

    Args:
        what: a path or a URL, or a NumPy array, or a list of TIFF files that are the slices of one volume.
            Behind the path of a file or folder that holds several arrays follows the name of one:
            ``"scan.h5/raw"``, ``"scan.zarr/0"``.
        place: which argument it is, for messages.
        convert: keeps what is made of files that can only be read from their beginning on; None for nowhere.
        tables: where chunk tables are kept, or None.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        VolumeError: it cannot be opened, or is damaged.
        OptionError: it is nothing that is known.
    """
    if isinstance(what, np.ndarray):
        if what.dtype.kind not in _NUMBERS or not what.ndim:
            raise OptionError(f"{place}= must be an array of numbers, got {what.dtype} of shape {what.shape}")
        return MemoryVolume(what, f"the array given as {place}=")
    if isinstance(what, list) and what and all(isinstance(one, (str, os.PathLike)) for one in what):
        return _finished(slices_volume(what), place)
    if not isinstance(what, (str, bytes, os.PathLike)):
        raise OptionError(f"{place}= must be a path or a NumPy array, got {type(what).__name__}: {what!r}")
    path = os.fsdecode(what)
    if is_url(path):
        return _checked(TensorStoreVolume(path, {"driver": "auto", "kvstore": path}), place)
    file, inside = _split(path)
    try:
        if os.path.isdir(file):
            return _finished(_folder(os.path.join(file, inside) if inside else file), place)
        return _finished(_file(file, inside, convert, tables), place)
    except (MemoryError, OverflowError) as error:  # of sizes that a header says
        raise VolumeError(f"{path} says that it is larger than anything that can be read: {error}") from error


def zarr_of_objects(name: str, array: ZarrArray, objects: ChunkObjects, place: str = "volume") -> Volume:
    """The volume whose chunks are objects of a store.

    Raises:
        OptionError: it is not of numbers.
    """
    return _finished(ZarrVolume(name, array, objects), place)


def _checked(volume: Volume, place: str) -> Volume:
    """The volume, if it is of numbers."""
    if volume.dtype.kind not in _NUMBERS:
        raise OptionError(
            f"{place}= must be an array of numbers, which {volume.name} is not: its elements are "
            f"{volume.dtype}"
        )
    return volume


def _finished(volume: Volume, place: str) -> Volume:
    """The volume in units that are worth it, with elements as the machine has them."""
    volume = in_worthwhile_units(_checked(volume, place))
    return volume if volume.dtype.isnative else NativeVolume(volume)


def _split(path: str) -> tuple[str, str]:
    """A file, or folder, that there is, and what is named within it."""
    file, inside = path, ""
    while not os.path.exists(file):
        file, last = os.path.split(file.rstrip("/"))
        inside = f"{last}/{inside}" if inside else last
        if not file or os.path.isdir(file):
            raise FileNotFoundError(2, os.strerror(2), path)
    return file, inside


def _folder(path: str) -> Volume:
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
    raise VolumeError(f"{path} is a folder, but neither Zarr nor N5, nor one of TIFF files")


def _other_zarr(path: str, why: str) -> Volume:
    """An array that is read by tensorstore, or, where that cannot, by zarr-python."""
    version = next(name for name in METADATA if os.path.exists(os.path.join(path, name)))
    driver = "zarr3" if version == "zarr.json" else "zarr"
    try:
        return TensorStoreVolume(path, {"driver": driver, "kvstore": _kvstore(path)}, why)
    except VolumeError as error:
        file = os.path.join(path, version)
        try:
            return ZarrPythonVolume(path, "", json_object(file, read_file(file)), why)
        except VolumeError as other:
            raise VolumeError(f"{error}; {str(other).removeprefix(path).strip()}") from None


def _kvstore(path: str) -> dict[str, str]:
    return {"driver": "file", "path": os.path.abspath(path) + "/"}


def _file(path: str, inside: str, convert: Converter | None, tables: FileArrays | None) -> Volume:
    with open(path, "rb", opener=open_file) as file:
        begin = file.read(8)
    name = path.lower()
    if begin.startswith(_ZIP):
        return zarr_in_zip(path, inside)
    is_other = begin.startswith(_NUMPY) or begin[:4] in _TIFF
    # Anything may stand in front of HDF5's signature, as in MATLAB's files.
    if name.endswith((".h5", ".hdf5")) or (not is_other and is_hdf5(path)):
        return hdf5_volume(path, inside, tables)
    if inside:
        raise VolumeError(f"{path} is no file of several arrays, so there is no {inside!r} in it")
    if begin.startswith(_NUMPY):
        return npy_volume(path)
    if begin[:4] in _TIFF:
        return tiff_volume(path)
    if name.endswith(_BLOSC2_NAMES):
        return Blosc2Volume(path)
    if name.endswith(_NIFTI_NAMES):
        return nifti_volume(path, convert)
    raise VolumeError(
        f"{path} is no volume that fastpipe knows: Zarr, N5, HDF5, TIFF, NIfTI, Blosc2's .b2nd, NumPy's .npy"
    )

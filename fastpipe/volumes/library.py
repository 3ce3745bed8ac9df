"""Volumes as the formats' own libraries open them: for comparing, and for scripts without fastpipe."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.volumes.blosc2 import Blosc2Volume
from fastpipe.volumes.files import RawVolume
from fastpipe.volumes.grouped import GroupedVolume
from fastpipe.volumes.hdf5 import HDF5Volume
from fastpipe.volumes.nifti import ScaledVolume
from fastpipe.volumes.swapped import NativeVolume
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.tiff import TiffVolume
from fastpipe.volumes.volume import Volume
from fastpipe.volumes.zarr import ZarrVolume

__all__ = ["library_array"]


def library_array(volume: Volume) -> Any:
    """An array that slices as NumPy's does.

    Args:
        volume: what fastpipe reads it as.
    """
    if volume.array is not None:
        return volume.array
    if isinstance(volume, ZarrVolume):
        return require("zarr", extra="peers").open_array(volume.name, mode="r")
    if isinstance(volume, RawVolume):
        order: Any = "F" if volume.is_fortran else "C"
        return np.memmap(volume.path, volume.dtype, "r", volume.offset, volume.shape, order)
    if isinstance(volume, TensorStoreVolume):
        return _Sliced(volume.store())
    if isinstance(volume, (GroupedVolume, NativeVolume)):
        return library_array(volume.inner)
    if isinstance(volume, HDF5Volume):
        return require("h5py", extra="volume").File(volume.path, "r")[volume.layout.name]
    if isinstance(volume, Blosc2Volume):
        return require("blosc2", extra="volume").open(volume.name, mode="r")
    if isinstance(volume, TiffVolume):
        read = require("tifffile", extra="volume").imread
        return read(volume.files if volume.segments is None else volume.name)
    if isinstance(volume, ScaledVolume):
        return _Scaled(library_array(volume.inner), volume)
    raise TypeError(f"{type(volume).__name__} has no library of its own")


class _Scaled:
    """An image whose elements stand for others."""

    def __init__(self, stored: Any, volume: ScaledVolume) -> None:
        self._stored, self._volume = stored, volume

    def __getitem__(self, box: Any) -> Any:
        return self._volume.scaled(np.asarray(self._stored[box]))


class _Sliced:
    """An array of tensorstore's, which only reads when it is asked to."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getitem__(self, box: Any) -> Any:
        return np.asarray(self._store[box].read().result())

"""What a script without fastpipe does: it slices what a library opens.  For comparing, and going back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.errors import BadSampleError
from fastpipe.hdf5.opening import open_library, raw_name
from fastpipe.volumes.blosc2 import Blosc2Volume
from fastpipe.volumes.hdf5 import HDF5Volume
from fastpipe.volumes.nifti import ScaledVolume
from fastpipe.volumes.places import PatchPlaces
from fastpipe.volumes.raw import RawVolume
from fastpipe.volumes.reader import Padding
from fastpipe.volumes.sources import Role
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.tiff import TiffVolume
from fastpipe.volumes.volume import GroupedVolume, NativeVolume, Volume
from fastpipe.volumes.zarr import ZarrVolume
from fastpipe.volumes.zarr_python import ZarrPythonVolume


def library_array(volume: Volume) -> Any:
    if volume.array is not None:
        return volume.array
    if isinstance(volume, ZarrVolume):
        return require("zarr", extra="volume").open_array(volume.name, mode="r")
    if isinstance(volume, ZarrPythonVolume):
        return volume.array_of_library()
    if isinstance(volume, RawVolume):
        order: Any = "F" if volume.is_fortran else "C"
        return np.memmap(volume.path, volume.dtype, "r", volume.offset, volume.shape, order)
    if isinstance(volume, TensorStoreVolume):
        store = volume.store()
        return _Sliced(lambda box: np.asarray(store[box].read().result()))
    if isinstance(volume, (GroupedVolume, NativeVolume)):
        return library_array(volume.inner)
    if isinstance(volume, HDF5Volume):
        return open_library(volume.path)[raw_name(volume.layout.name)]
    if isinstance(volume, Blosc2Volume):
        return require("blosc2", extra="volume").open(volume.name, mode="r")
    if isinstance(volume, TiffVolume):
        return require("tifffile", extra="volume").imread(volume.files)
    if isinstance(volume, ScaledVolume):
        stored, scaled = library_array(volume.inner), volume.scaled
        return _Sliced(lambda box: scaled(np.asarray(stored[box])))
    raise TypeError(f"{type(volume).__name__} has no library of its own")


class _Sliced:
    """What a function reads."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __getitem__(self, box: Any) -> Any:
        return self._read(box)


class SlicedPatches:
    """Patches, cut by slicing what the formats' own libraries open."""

    def __init__(
        self,
        roles: Sequence[Role],
        places: PatchPlaces,
        padding: Padding,
        nan: str | float,
        patch_size: Sequence[int],
    ) -> None:
        self._roles, self._places, self._padding, self._nan = roles, places, padding, nan
        self._size = tuple(patch_size)
        self._open: tuple[int, dict[tuple[int, int], Any]] = os.getpid(), {}

    def __len__(self) -> int:
        return self._places.count

    @property
    def is_random(self) -> bool:
        return self._places.is_random

    def values(self, index: int, seed: int, epoch: int) -> list[npt.NDArray[Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        volumes, starts = self._places.places(seed, epoch, np.array([index % len(self)]))
        return [
            self._patch(number, int(volumes[0]), starts[0].tolist()) for number in range(len(self._roles))
        ]

    def _patch(self, number: int, volume: int, start: Sequence[int]) -> npt.NDArray[Any]:
        role, array = self._roles[number], self._array(number, volume)
        sides = list(zip(start, self._size, role.spatial(volume), strict=True))
        ends = [(max(0, -at), max(0, at + size - most)) for at, size, most in sides]
        if any(map(any, ends)):  # all of it, as ``numpy.pad`` needs it
            array = self._padded(role, array[...], ends)
        box = [slice(max(0, at), max(0, at) + size) for at, size, _ in sides]
        patch = np.array(array[(*[slice(None)] * len(role.lead), *box)], role.dtype)
        if number == 0 and self._nan != "keep" and patch.dtype.kind in "fc" and np.isnan(patch).any():
            if self._nan == "error":
                raise BadSampleError(f"{role.volumes[volume].name} has a NaN in the patch at {tuple(start)}")
            patch[np.isnan(patch)] = self._nan
        return patch

    def _padded(self, role: Role, whole: Any, ends: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
        options = {}
        if self._padding.mode == "constant":
            options["constant_values"] = np.array(self._padding.constant(role.name)).astype(role.dtype)
        mode: Any = self._padding.mode
        padded: npt.NDArray[Any] = np.pad(whole, [(0, 0)] * len(role.lead) + list(ends), mode, **options)
        return padded

    def _array(self, number: int, volume: int) -> Any:
        if self._open[0] != os.getpid():
            self._open = os.getpid(), {}
        arrays, key = self._open[1], (number, volume)
        if key not in arrays:
            arrays[key] = library_array(self._roles[number].volumes[volume])
        return arrays[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}

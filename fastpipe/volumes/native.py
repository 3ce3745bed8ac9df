"""Batches of patches, described once by arrays for the native core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.core.reads import MADE
from fastpipe.volumes.padding import Padding
from fastpipe.volumes.places import Places
from fastpipe.volumes.sources import Role

__all__ = ["NativePatches"]

_PADDING = ("error", "constant", "edge", "reflect", "symmetric", "wrap")  # of fastpipe/native/patches.h
_KEEP, _DECLINE, _REPLACE = 0, 1, 2  # what is done about NaN
_MOST_DESCRIBED = 4096  # volumes
_MOST_DECLINED = 8  # patches of one volume: then Python's threads read it from the start


class NativePatches:
    """Describes batches of patches of one dataset in one process.

    Args:
        roles: the arrays.
        units: of all volumes of each role, the ``native.UnitMemory`` of its units, or None, and the number
            there of its first.
        size: of the patches.
        padding, nan: the dataset's options.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        units: Sequence[tuple[Any, int]],
        size: Sequence[int],
        padding: Padding,
        nan: str | float,
    ) -> None:
        self._roles, self._units = roles, units
        self._firsts = np.cumsum([0, *(len(role.volumes) for role in roles)]).tolist()
        self._kinds = [
            _kind(role, size, padding, "keep" if number else nan) for number, role in enumerate(roles)
        ]
        self._volumes: dict[tuple[int, int], Any] = {}
        self._declined: dict[int, int] = {}  # patches, by the numbers of volumes

    def batch(
        self,
        places: Places,
        rows: npt.NDArray[np.int64],
        arrays: Sequence[npt.NDArray[Any]],
        statuses: npt.NDArray[np.uint8],
    ) -> tuple[Any, list[tuple[int, int]]]:
        """Describe a batch.

        Args:
            places: of its patches.
            rows: int64 (N,): their rows.
            arrays: for each role the batch's memory, (M, *lead, *patch).
            statuses: uint8 (M, 8): what becomes of each row.

        Returns:
            A ``native.PatchBatch``, or None where the core reads nothing of it; and what is left to Python,
            as numbers of patches and roles.
        """
        count = len(self._roles)
        volumes = [self._volume(role, volume) for volume in places.volumes.tolist() for role in range(count)]
        left = [divmod(item, count) for item, volume in enumerate(volumes) if volume is None]
        if len(left) == len(volumes):
            return None, left
        outs: list[Any] = [array.reshape(len(array), -1).view(np.uint8) for array in arrays]
        starts = np.ascontiguousarray(places.starts, np.int64)
        return native.patch_batch(self._kinds, outs, volumes, starts, rows, statuses), left

    def heard(self, places: Places, rows: npt.NDArray[np.int64], statuses: npt.NDArray[np.uint8]) -> None:
        """Look at what became of a batch: of a volume that the core declines, no more is left to it."""
        declined = statuses[rows, 0] != MADE
        if not declined.any():
            return
        for number in places.volumes[declined].tolist():
            self._declined[number] = self._declined.get(number, 0) + 1
            if self._declined[number] == _MOST_DECLINED:
                self._volumes.update({(role, number): None for role in range(len(self._roles))})

    def _volume(self, role: int, number: int) -> Any:
        """A volume as the core reads it; None where it does not."""
        try:
            return self._volumes[role, number]
        except KeyError:
            pass
        if len(self._volumes) >= _MOST_DESCRIBED:
            self._volumes.clear()
        volume, made = self._roles[role].volumes[number], None
        units, first = self._units[self._firsts[role] + number]
        try:
            source = None if self._kinds[role] is None else volume.native_source()
            if source is not None:
                made = native.Volume(
                    volume.shape, volume.grid.unit, volume.dtype.itemsize, source, units, first
                )
        except ValueError:  # of sizes that are not read there
            pass
        self._volumes[role, number] = made
        return made


def _kind(role: Role, size: Sequence[int], padding: Padding, nan: str | float) -> Any:
    """A role as the core knows it; None of elements that it does not know."""
    dtype, constant, number = role.dtype, np.zeros((), role.dtype), np.zeros((), role.dtype)
    if padding.mode == "constant":
        constant[...] = padding.constant(role.name)
    done = _KEEP
    if nan != "keep" and dtype.kind in "fc":
        done = _DECLINE if nan == "error" else _REPLACE
        number[...] = 0 if nan == "error" else nan
    word = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    try:
        return native.PatchKind(
            (*role.lead, *size), len(size), dtype.itemsize, _PADDING.index(padding.mode), constant.tobytes(),
            done, word, number.tobytes(),
        )  # fmt: skip
    except ValueError:
        return None

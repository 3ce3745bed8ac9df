"""Patches of Zarr arrays as scripts cut them, at places that are a function of the patch's number.

Used by peers' processes too, so it needs nothing but numpy before a patch is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ZarrPatches", "box_at", "start_of"]

_SEED = 7


def start_of(shape: Sequence[int], patch: Sequence[int], index: int) -> npt.NDArray[np.int64]:
    """Where a patch begins: int64 (D,), any place at which it fits being as likely as any other.

    Args:
        shape: of the volume.
        patch: voxels along each dimension.
        index: the patch's number.

    >>> start_of((5, 5), (5, 5), 3).tolist()
    [0, 0]
    """
    rng = np.random.default_rng((_SEED, index))
    last = np.asarray(shape) - np.asarray(patch)
    return np.asarray(rng.integers(0, last, endpoint=True), np.int64)


def box_at(start: Sequence[int] | npt.NDArray[np.int64], patch: Sequence[int]) -> tuple[slice, ...]:
    """The slices of a patch.

    >>> box_at((1, 0), (2, 2))
    (slice(1, 3, None), slice(0, 2, None))
    """
    return tuple(slice(int(one), int(one) + side) for one, side in zip(start, patch, strict=True))


class ZarrPatches:
    """The dataset that the case replaces: each process opens the arrays when it first reads, and a sample is
    the same slice of each of them.

    Args:
        paths: the arrays' folders.
        shape: of the arrays.
        patch: voxels along each dimension.
        count: how many samples there are.
    """

    def __init__(self, paths: Sequence[str], shape: Sequence[int], patch: Sequence[int], count: int) -> None:
        self._paths, self._shape, self._patch, self._count = list(paths), shape, patch, count
        self._arrays: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        if not self._arrays:
            import zarr

            self._arrays = [zarr.open_array(path, mode="r") for path in self._paths]
        box = box_at(start_of(self._shape, self._patch, index), self._patch)
        return tuple(array[box] for array in self._arrays)

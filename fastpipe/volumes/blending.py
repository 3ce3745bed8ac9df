"""Blend overlapping patches into one array, part by part, in bounded memory.

The sums for a part of the array are kept until the last patch that overlaps with the part has been added.
Sums that do not fit into memory are written to a temporary file.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

_SIGMA = 0.125  # standard deviation as a fraction of the patch's side, as in nnU-Net and MONAI
_LEAST_WEIGHT = 1e-3  # the least weight, so that no voxel of a patch has the weight 0


def gaussian_weights(patch: Sequence[int], sigma: float = _SIGMA) -> Float32Array:
    """Return the weights of a patch's voxels, which are largest in the middle: float32, of the patch's shape.

    A weight is the product of exp(-(x - c)² / 2 s²) over the dimensions.  Here c is the middle of the patch
    and s is ``sigma`` times the patch's side.  Weights are at most 1 and at least 0.001, as in MONAI's
    ``compute_importance_map(mode="gaussian")``.

    >>> gaussian_weights((3,), 0.5).round(3)
    array([0.801, 1.   , 0.801], dtype=float32)
    """
    weights = np.ones((), np.float64)
    for side in patch:
        at = np.arange(side) - (side - 1) / 2
        weights = np.multiply.outer(weights, np.exp(-0.5 * (at / (sigma * side)) ** 2))
    return np.maximum(weights, _LEAST_WEIGHT).astype(np.float32)


class Blender:
    """A context manager that blends patches of one array, and removes its temporary file at the end.

    ``starts`` contains the first voxel of each patch, int64 (N, D); patches may extend beyond the array.
    ``weights`` has the shape of a patch: float32.  ``part`` is the shape of the parts in which the array is
    written.  For each part, ``write`` is called with the part's start, int (D,), and its values, float32
    (*lead, …).  Sums of up to ``max_bytes`` bytes stay in memory, and always the sums of at least one part.
    Further sums are written to a file in ``folder``.
    """

    def __init__(
        self,
        shape: Sequence[int],
        starts: Int64Array,
        weights: Float32Array,
        part: Sequence[int],
        write: Callable[[Sequence[int], Float32Array], None],
        max_bytes: int,
        folder: str | os.PathLike[str],
    ) -> None:
        self._shape, self._part = tuple(shape), tuple(part)
        self._weights, self._write, self._max_bytes = weights, write, max_bytes
        self._counts = tuple(-(-size // side) for size, side in zip(self._shape, self._part, strict=True))
        self._left = np.zeros(self._counts, np.int64)
        for start in starts.tolist():
            self._left[tuple(slice(low, high) for low, high in self._touched(start))] += 1
        self._lead: tuple[int, ...] | None = None
        self._sums: OrderedDict[tuple[int, ...], Float32Array] = OrderedDict()
        self._nbytes = 0
        self._folder = folder
        self._file: Any = None
        self._places: dict[tuple[int, ...], int] = {}  # the offset of each part's sums in the file
        self._free: list[int] = []
        self._end = 0

    def __enter__(self) -> Blender:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def _touched(self, start: Sequence[int]) -> list[tuple[int, int]]:
        """Return, for each dimension, the range (first, last + 1) of the parts that a patch overlaps."""
        found = []
        for at, side, size, step in zip(start, self._weights.shape, self._shape, self._part, strict=True):
            low, high = max(at, 0), min(at + side, size)
            found.append((low // step, (high - 1) // step + 1))
        return found

    def add(self, start: Sequence[int], values: Float32Array) -> None:
        """Add a patch, float32 (*lead, *patch), and write the parts that are complete with this patch.

        All patches must have the same leading dimensions, ``lead``.
        """
        lead = values.shape[: values.ndim - len(self._shape)]
        if values.shape[len(lead) :] != self._weights.shape or self._lead not in (None, lead):
            wanted = (*(self._lead or ("…",)), *self._weights.shape)
            raise OptionError(f"a prediction has shape {values.shape}, where {wanted} was expected")
        self._lead = lead
        for part in itertools.product(*(range(*ends) for ends in self._touched(start))):
            sums = self._sums_of(part)
            self._add_to(part, sums, start, values)
            self._left[part] -= 1
            if not self._left[part]:
                del self._sums[part]
                self._nbytes -= sums.nbytes
                begin = [at * side for at, side in zip(part, self._part, strict=True)]
                blended, weights = sums[:-1], sums[-1]
                weights[weights == 0] = 1  # voxels without any patch become 0
                blended /= weights
                self._write(begin, blended.reshape(*lead, *weights.shape))

    def _add_to(
        self, part: tuple[int, ...], sums: Float32Array, start: Sequence[int], values: Float32Array
    ) -> None:
        inside: list[Any] = []
        outside: list[Any] = []
        for at, step, begin, size, side in zip(
            part, self._part, start, sums.shape[1:], self._weights.shape, strict=True
        ):
            low, high = max(at * step, begin), min(at * step + size, begin + side)
            inside.append(slice(low - at * step, high - at * step))
            outside.append(slice(low - begin, high - begin))
        weights = self._weights[tuple(outside)]
        flat = values.reshape(-1, *self._weights.shape)
        sums[(slice(0, -1), *inside)] += flat[(slice(None), *outside)] * weights
        sums[(-1, *inside)] += weights

    def _sums_of(self, part: tuple[int, ...]) -> Float32Array:
        """Return a part's sums: the weighted sums of the values, and as last row the sum of the weights."""
        sums = self._sums.get(part)
        if sums is not None:
            self._sums.move_to_end(part)
            return sums
        sizes = [
            min(side, size - at * side) for at, side, size in zip(part, self._part, self._shape, strict=True)
        ]
        shape = (1 + math.prod(self._lead or ()), *sizes)
        nbytes = math.prod(shape) * 4
        while self._sums and self._nbytes + nbytes > self._max_bytes:
            self._put_away(*self._sums.popitem(last=False))
        sums = np.zeros(shape, np.float32)
        place = self._places.pop(part, None)
        if place is not None:
            self._file.seek(place)
            self._file.readinto(sums.reshape(-1).view(np.uint8).data)
            self._free.append(place)
        self._sums[part] = sums
        self._nbytes += sums.nbytes
        return sums

    def _put_away(self, part: tuple[int, ...], sums: Float32Array) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed on the way out
        if self._free:
            place = self._free.pop()
        else:  # reserve the size of the largest part
            place = self._end
            self._end += sums.shape[0] * math.prod(self._part) * sums.itemsize
        self._file.seek(place)
        self._file.write(sums.reshape(-1).view(np.uint8).data)
        self._places[part] = place
        self._nbytes -= sums.nbytes

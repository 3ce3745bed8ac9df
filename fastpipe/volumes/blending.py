"""Overlapping patches, blended into one array a part at a time, in bounded memory.

The sums of a part are kept until the last patch that touches it has been added.  Sums that do not fit into
memory are swapped to a file.
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

_SIGMA = 0.125  # fraction of the patch's side, as in nnU-Net and MONAI
_LEAST_WEIGHT = 1e-3  # fraction of the largest weight, so that no voxel has weight 0


def gaussian_weights(patch: Sequence[int], sigma: float = _SIGMA) -> Float32Array:
    """Return the weights of a patch's voxels, largest in the middle: float32, of its shape, at most 1.

    A weight is the product along the dimensions of exp(-(x - c)² / 2 s²), with the middle c and ``sigma``
    times the side as s, but at least 0.001, as in MONAI's ``compute_importance_map(mode="gaussian")``.

    >>> gaussian_weights((3,), 0.5).round(3)
    array([0.801, 1.   , 0.801], dtype=float32)
    """
    weights = np.ones((), np.float64)
    for side in patch:
        at = np.arange(side) - (side - 1) / 2
        weights = np.multiply.outer(weights, np.exp(-0.5 * (at / (sigma * side)) ** 2))
    return np.maximum(weights, _LEAST_WEIGHT).astype(np.float32)


class Blender:
    """A context manager that blends patches of one array; its file is removed at the end.

    ``starts``: int64 (N, D), the starts of all patches, possibly beyond the array.  ``weights``: float32, of
    a patch's shape.  ``part``: the shape that is finished at once.  ``write`` is called with a place, int
    (D,), and the blended part that starts there, float32 (*lead, …).  Sums of up to ``max_bytes``, or those
    of one part, stay in memory; the others go to a file in ``folder``.
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
        self._places: dict[tuple[int, ...], int] = {}  # places of sums in the file
        self._free: list[int] = []
        self._end = 0

    def __enter__(self) -> Blender:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def _touched(self, start: Sequence[int]) -> list[tuple[int, int]]:
        """Return, along each dimension, the first part that a patch touches, and the index after the last."""
        found = []
        for at, side, size, step in zip(start, self._weights.shape, self._shape, self._part, strict=True):
            low, high = max(at, 0), min(at + side, size)
            found.append((low // step, (high - 1) // step + 1))
        return found

    def add(self, start: Sequence[int], values: Float32Array) -> None:
        """Add a patch, float32 (*lead, *patch), with the same ``lead`` for all; write the parts that it
        completes."""
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
        """Return the sums of a part: of its values, and last of the weights."""
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
        else:  # use the slot size of the largest
            place = self._end
            self._end += sums.shape[0] * math.prod(self._part) * sums.itemsize
        self._file.seek(place)
        self._file.write(sums.reshape(-1).view(np.uint8).data)
        self._places[part] = place
        self._nbytes -= sums.nbytes

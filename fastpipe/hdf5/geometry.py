"""Which chunks hold which samples, and where in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Geometry", "grid_of"]

Int64Array = npt.NDArray[np.int64]


class Geometry:
    """A dataset's samples and its chunks: as of SampleGrid in fastpipe/native/chunks.h.

    Samples are the dataset's elements along its first dimensions, counted in C order; a *group* is
    the samples that share their chunks, and a *part* one of the chunks that hold a sample.

    Args:
        shape, chunk: of the dataset.
        itemsize: bytes of an element.
        sample_dims: how many dimensions count samples; the others are those of a sample.

    Attributes:
        count: samples.
        sample_nbytes, chunk_nbytes: bytes of each.
        groups, parts: how many there are.
        group_size: samples in a group that is not at an edge.
        runs: pieces in which a sample lies in one of its chunks, each without a gap.

    >>> geometry = Geometry((100, 64, 128), (16, 64, 64), 4, 1)
    >>> geometry.groups, geometry.parts, geometry.group_size
    (7, 2, 16)
    """

    def __init__(self, shape: Sequence[int], chunk: Sequence[int], itemsize: int, sample_dims: int) -> None:
        self._lead, sample_shape = tuple(shape[:sample_dims]), tuple(shape[sample_dims:])
        # Without elements there is nothing to divide by; a chunk of one stands for none.
        self._lead_chunk, inner_chunk = (
            tuple(max(side, 1) for side in sides) for sides in (chunk[:sample_dims], chunk[sample_dims:])
        )
        self._lead_grid = grid_of(self._lead, self._lead_chunk)
        self.count = math.prod(self._lead)
        self.sample_nbytes = itemsize * math.prod(sample_shape)
        self.chunk_nbytes = math.prod(self._lead_chunk) * math.prod(inner_chunk) * itemsize
        self.group_size = math.prod(map(min, self._lead_chunk, (max(size, 1) for size in self._lead)))
        whole = len(sample_shape)
        while whole and inner_chunk[whole - 1] == sample_shape[whole - 1]:
            whole -= 1
        self.runs = math.prod(map(min, sample_shape[: max(whole - 1, 0)], inner_chunk))
        self.groups, self.parts = math.prod(self._lead_grid), math.prod(grid_of(sample_shape, inner_chunk))

    def groups_of(self, samples: Int64Array) -> Int64Array:
        """The groups of samples.

        Args:
            samples: int64 (N,), each at least 0 and below ``count``.
        """
        if len(self._lead) == 1:  # as a rule, and several times as fast
            return samples // self._lead_chunk[0]
        index = np.unravel_index(samples, self._lead)
        grid = tuple(at // side for at, side in zip(index, self._lead_chunk, strict=True))
        return np.ravel_multi_index(grid, self._lead_grid).astype(np.int64)


def grid_of(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """How many chunks there are along each dimension."""
    return tuple(-(-size // side) for size, side in zip(shape, chunk, strict=True))

"""Which chunks hold which samples, and where in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Geometry", "Groups", "Runs", "grid_of", "starts_of"]

Int64Array = npt.NDArray[np.int64]


class Groups(NamedTuple):
    """The samples of a batch, those of a group one after the other.

    Attributes:
        numbers: int64 (G,): of the groups.
        starts: int64 (G + 1,): where the samples of each begin in the arrays that follow, and the end.
        rows: int64 (N,): the rows of the batch that they are.
        at: int64 (N,): where they begin in a chunk, in bytes.
    """

    numbers: Int64Array
    starts: Int64Array
    rows: Int64Array
    at: Int64Array

    @property
    def counts(self) -> Int64Array:
        """Samples of each group: int64 (G,)."""
        counts: Int64Array = self.starts[1:] - self.starts[:-1]
        return counts

    def slice(self, first: int, stop: int) -> Groups:
        """Some that follow each other."""
        start, end = int(self.starts[first]), int(self.starts[stop])
        starts = self.starts[first : stop + 1] - start
        return Groups(self.numbers[first:stop], starts, self.rows[start:end], self.at[start:end])

    def take(self, places: Int64Array) -> Groups:
        """Some, in another order.

        Args:
            places: int64 (g,), of the groups among all.
        """
        if len(places) == len(self.numbers) and (places == np.arange(len(places))).all():  # often
            return self
        counts = self.counts[places]
        starts = np.concatenate([[0], np.cumsum(counts)])
        samples = np.arange(starts[-1]) + np.repeat(self.starts[places] - starts[:-1], counts)
        return Groups(self.numbers[places], starts, self.rows[samples], self.at[samples])


class Runs(NamedTuple):
    """The part of a sample that is in one of its chunks: runs of bytes of equal length.

    Attributes:
        in_chunk: int64 (runs,): where they begin behind the sample's beginning in the chunk.
        in_sample: int64 (runs,): where they begin in the sample.
        nbytes: length of each.
    """

    in_chunk: Int64Array
    in_sample: Int64Array
    nbytes: int


class Geometry:
    """A dataset's samples and its chunks.

    Samples are the dataset's elements along its first dimensions, counted in C order; a *group* is
    the samples that share their chunks, and a *part* one of the chunks that hold a sample.

    Args:
        shape, chunk: of the dataset.
        itemsize: bytes of an element.
        sample_dims: how many dimensions count samples; the others are those of a sample.

    Attributes:
        count: samples.
        sample_shape, sample_nbytes: of each.
        chunk_nbytes: of a chunk.
        groups, parts: how many there are.
        group_size: samples in a group that is not at an edge.

    >>> geometry = Geometry((100, 64, 128), (16, 64, 64), 4, 1)
    >>> geometry.groups, geometry.parts, geometry.sample_nbytes
    (7, 2, 32768)
    """

    def __init__(self, shape: Sequence[int], chunk: Sequence[int], itemsize: int, sample_dims: int) -> None:
        self._itemsize = itemsize
        self._runs: dict[int, Runs] = {}
        self._lead, self.sample_shape = tuple(shape[:sample_dims]), tuple(shape[sample_dims:])
        # Without elements there is nothing to divide by; a chunk of one stands for none.
        self._lead_chunk, self._chunk = (
            tuple(max(side, 1) for side in sides) for sides in (chunk[:sample_dims], chunk[sample_dims:])
        )
        self._lead_grid = grid_of(self._lead, self._lead_chunk)
        self._grid = grid_of(self.sample_shape, self._chunk)
        self.count = math.prod(self._lead)
        self.sample_nbytes = itemsize * math.prod(self.sample_shape)
        self._row_nbytes = itemsize * math.prod(self._chunk)
        self.chunk_nbytes = math.prod(self._lead_chunk) * self._row_nbytes
        self.group_size = math.prod(map(min, self._lead_chunk, (max(size, 1) for size in self._lead)))
        sides = zip(self._lead, self._lead_chunk, strict=True)
        self._has_no_edges = all(size % side == 0 for size, side in sides)
        self.groups, self.parts = math.prod(self._lead_grid), math.prod(self._grid)

    def places(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where samples are.

        Args:
            samples: int64 (N,), each at least 0 and below ``count``.

        Returns:
            int64 (N,): their groups; and where they begin in a chunk, in bytes.
        """
        if len(self._lead) == 1:  # as a rule, and several times as fast
            groups, inside_1 = np.divmod(samples, self._lead_chunk[0])
            return groups, inside_1 * self._row_nbytes
        index = np.unravel_index(samples, self._lead)
        sides = self._lead_chunk
        grid = tuple(at // side for at, side in zip(index, sides, strict=True))
        inside = tuple(at % side for at, side in zip(index, sides, strict=True))
        groups = np.ravel_multi_index(grid, self._lead_grid).astype(np.int64)
        return groups, np.ravel_multi_index(inside, sides).astype(np.int64) * self._row_nbytes

    def grouped(self, groups: Int64Array, at: Int64Array, rows: Int64Array) -> Groups:
        """A batch's samples, sorted into groups.

        Args:
            groups, at: int64 (N,), what ``places`` gave.
            rows: int64 (N,): which row of the batch each sample is.
        """
        order = np.argsort(groups, kind="stable")
        groups = groups[order]
        starts = starts_of(groups)
        return Groups(groups[starts], np.append(starts, len(groups)), rows[order], at[order])

    def samples_in(self, groups: Int64Array) -> Int64Array:
        """How many samples groups have: at the dataset's edges fewer than elsewhere."""
        if self._has_no_edges:  # as a rule
            return np.full_like(groups, self.group_size)
        found, left = np.ones_like(groups), groups
        for size, side, chunks in reversed(
            list(zip(self._lead, self._lead_chunk, self._lead_grid, strict=True))
        ):
            left, number = np.divmod(left, chunks)
            found *= np.minimum(side, size - number * side)
        return found

    def chunk(self, group: Any, part: int) -> Any:
        """The numbers of groups' chunks, in C order of the chunks' grid."""
        return group * self.parts + part

    def runs(self, part: int) -> Runs:
        """The runs of bytes of one part of a sample."""
        found = self._runs.get(part)
        if found is None:
            found = self._runs[part] = self._make_runs(part)
        return found

    def _make_runs(self, part: int) -> Runs:
        place = map(int, np.unravel_index(part, self._grid))
        corner = [at * side for at, side in zip(place, self._chunk, strict=True)]
        extent = [
            min(side, size - first)
            for first, side, size in zip(corner, self._chunk, self.sample_shape, strict=True)
        ]
        # The last dimensions that are whole in both are one run, and so is what the one before has of them.
        whole = len(extent)
        while whole and extent[whole - 1] == self._chunk[whole - 1] == self.sample_shape[whole - 1]:
            whole -= 1
        outer = max(whole - 1, 0)
        sample_steps, chunk_steps = _steps(self.sample_shape), _steps(self._chunk)
        first = sum(at * step for at, step in zip(corner, sample_steps, strict=True))
        places = list(itertools.product(*map(range, extent[:outer])))
        in_chunk = [sum(a * b for a, b in zip(place, chunk_steps)) for place in places]  # noqa: B905
        in_sample = [first + sum(a * b for a, b in zip(place, sample_steps)) for place in places]  # noqa: B905
        size = self._itemsize
        nbytes = size * math.prod(extent[outer:])
        return Runs(np.array(in_chunk, np.int64) * size, np.array(in_sample, np.int64) * size, nbytes)


def starts_of(numbers: Int64Array) -> Int64Array:
    """Where runs of the same number begin."""
    is_start = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def grid_of(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """How many chunks there are along each dimension."""
    return tuple(-(-size // side) for size, side in zip(shape, chunk, strict=True))


def _steps(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next, along each dimension."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

"""Compute the places of an epoch's patches from the seed, the epoch and the index."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.core.machine import free_memory
from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError
from fastpipe.volumes.volume import Int64Array

_LIST_NBYTES = 3 * 8  # bytes of each number in a list of places, including temporary memory
# A function of (seed, epoch, indices, count) that returns uniform random numbers in [0, 1): float64 (N,
# count).
Draw = Callable[[int, int, Int64Array, int], npt.NDArray[np.float64]]


class Places(NamedTuple):
    volumes: Int64Array  # int64 (N,): the index of each patch's volume
    starts: Int64Array  # int64 (N, D): each patch's start in its volume; with padding it may be negative


class PatchSpace:
    """The possible places of patches of one size in V volumes with D dimensions.

    The start of a patch is its first voxel.  ``lows`` has the lowest start in each volume, int64 (V, D).
    ``counts`` has the number of possible starts along each dimension, int64 (V, D).
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], patch: Sequence[int], names: Sequence[str], pads: bool
    ) -> None:
        self.shapes, self.patch = np.array(shapes, np.int64), np.array(patch, np.int64)
        self.names = names
        over = np.maximum(self.patch - self.shapes, 0)
        if not pads and over.any():
            volume = int(np.flatnonzero(over.any(axis=1))[0])
            raise OptionError(
                f"a patch of {tuple(patch)} does not fit into {names[volume]}, which has "
                f"{tuple(self.shapes[volume].tolist())}: choose a smaller patch_size, or padding='constant' "
                "or another mode of numpy.pad"
            )
        self.lows = -(over // 2)
        self.counts = np.maximum(self.shapes - self.patch, 0) + 1


class PatchPlaces(Protocol):
    count: int  # number of patches in an epoch
    is_random: bool  # True if the places differ between epochs

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        """Return the places of the patches ``indices``; each place depends only on its own index."""


class FixedPatches:
    is_random = False

    def __init__(self, found: Places) -> None:
        self._found, self.count = found, len(found.volumes)

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        return Places(self._found.volumes[indices], self._found.starts[indices])


class UniformPatches:
    is_random = True

    def __init__(self, space: PatchSpace, count: int, by_size: bool, draw: Draw) -> None:
        self._space, self.count, self._draw = space, count, draw
        sizes = [math.prod(counts) if by_size else 1 for counts in space.counts.tolist()]
        # The sums are exact integers, because a float cannot distinguish so many places.
        ends = list(itertools.accumulate(sizes))
        self._ends = np.array([end / ends[-1] for end in ends])

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        drawn = self._draw(seed, epoch, indices, 1 + len(self._space.patch))
        volumes = np.searchsorted(self._ends[:-1], drawn[:, 0], side="right")
        counts = self._space.counts[volumes]
        steps = np.minimum((drawn[:, 1:] * counts).astype(np.int64), counts - 1)
        return Places(volumes, self._space.lows[volumes] + steps)


class ForegroundPatches:
    """The patches of ``elsewhere``; about ``fraction`` of them are moved to surround a foreground voxel.

    For each volume and each of its classes, ``voxels`` has the flat indices of the class's voxels in C order:
    int64 (M,), and ``weights`` the class's relative probability, above 0.  ``draw`` must not return the
    random numbers that ``elsewhere`` uses.
    """

    is_random = True

    def __init__(
        self,
        space: PatchSpace,
        elsewhere: PatchPlaces,
        fraction: float,
        voxels: Sequence[Sequence[Int64Array]],
        weights: Sequence[Sequence[float]],
        draw: Draw,
    ) -> None:
        self._space, self._elsewhere, self.count = space, elsewhere, elsewhere.count
        self._fraction, self._draw = fraction, draw
        self._voxels = [np.concatenate([np.zeros(0, np.int64), *classes]) for classes in voxels]
        # The classes of each volume: the ends of their voxels, and of their parts of the probability.
        self._ends = [np.cumsum([0, *map(len, classes)], dtype=np.int64) for classes in voxels]
        self._parts = [np.cumsum(some) / sum(some) if some else np.zeros(0) for some in weights]
        self._has_classes = np.array([bool(some) for some in weights])

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        volumes, starts = self._elsewhere.places(seed, epoch, indices)
        drawn = self._draw(seed, epoch, indices, 3)
        rows = np.flatnonzero((drawn[:, 0] < self._fraction) & self._has_classes[volumes])
        if len(rows):
            starts = starts.copy()
        for volume in np.unique(volumes[rows]).tolist():
            some = rows[volumes[rows] == volume]
            chosen = np.searchsorted(self._parts[volume][:-1], drawn[some, 1], side="right")
            begins, counts = self._ends[volume][chosen], np.diff(self._ends[volume])[chosen]
            steps = np.minimum((drawn[some, 2] * counts).astype(np.int64), counts - 1)
            shape = tuple(self._space.shapes[volume].tolist())
            centre = np.stack(np.unravel_index(self._voxels[volume][begins + steps], shape), axis=1)
            lows = self._space.lows[volume]
            highs = lows + self._space.counts[volume] - 1
            starts[some] = np.clip(centre - self._space.patch // 2, lows, highs)
        return Places(volumes, starts)


def grid_places(space: PatchSpace, stride: int | Sequence[int] | None) -> Places:
    """Return the places of all patches at regular distances, volume by volume, in C order.

    If ``stride`` is None, the patches lie side by side.
    """
    patch: list[int] = space.patch.tolist()
    stride = patch if stride is None else [stride] * len(patch) if isinstance(stride, int) else stride
    if len(stride) != len(patch):
        raise OptionError(f"Grid(stride=…) must have {len(patch)} numbers, got {stride!r}")
    numbers = [
        math.prod(-(-(count - 1) // step) + 1 for count, step in zip(counts, stride, strict=True))
        for counts in space.counts.tolist()
    ]
    largest = max(range(len(numbers)), key=numbers.__getitem__)
    check_room(
        _LIST_NBYTES * (1 + len(stride)) * sum(numbers),
        f"the list of the patches of a grid ({numbers[largest]:,} in {space.names[largest]})",
        "take a larger stride, or Uniform(…)",
    )
    volumes, starts = [], []
    for volume, (lows, counts) in enumerate(zip(space.lows.tolist(), space.counts.tolist(), strict=True)):
        along = [
            np.append(np.arange(low, low + count - 1, step), low + count - 1)
            for low, count, step in zip(lows, counts, stride, strict=True)
        ]
        made = np.stack(np.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, len(stride))
        starts.append(made)
        volumes.append(np.full(len(made), volume))
    return Places(np.concatenate(volumes), np.concatenate(starts))


def check_room(nbytes: int, what: str, remedy: str) -> None:
    free = free_memory()
    if nbytes > (sys.maxsize if free is None else free):
        raise OptionError(f"{what} takes {in_bytes(nbytes)}, which is more memory than is free: {remedy}")


def given_places(space: PatchSpace, array: Int64Array, pads: bool) -> Places:
    """Return the places in ``array``: starts, int64 (N, D), or (N, 1 + D) with the volume's index first."""
    dims = len(space.patch)
    if array.shape[1] == dims and len(space.shapes) == 1:
        array = np.concatenate([np.zeros((len(array), 1), np.int64), array], axis=1)
    if array.shape[1] != dims + 1:
        some = f"{dims} numbers, or with that of the volume in front {dims + 1}"
        what = some if len(space.shapes) == 1 else f"{dims + 1} numbers, the volume's in front"
        raise OptionError(f"Positions(array) must have {what} for each patch, got {array.shape[1]}")
    volumes, starts = array[:, 0], array[:, 1:]
    unknown = (volumes < 0) | (volumes >= len(space.shapes))
    if unknown.any():
        raise OptionError(
            f"Positions(array) names volume {volumes[unknown][0]} of {len(space.shapes)}, counted from 0"
        )
    shapes = space.shapes[volumes]
    outside = (starts < 0) | (starts > shapes - space.patch)
    if pads:  # a patch must contain at least one element of the volume along each dimension
        outside = (starts >= shapes) | (starts <= -space.patch)
    if outside.any():
        which = int(np.flatnonzero(outside.any(axis=1))[0])
        raise OptionError(
            f"Positions(array): patch {which}, of {tuple(space.patch.tolist())} at "
            f"{tuple(starts[which].tolist())}, is not within {space.names[int(volumes[which])]}, which has "
            f"{tuple(shapes[which].tolist())}" + ("" if pads else "; padding= lets patches reach beyond it")
        )
    return Places(volumes, starts)


class KeyedIndex(int):
    """A sample's index that carries the seed and the epoch."""

    seed: int
    epoch: int

    def __new__(cls, index: int, seed: int, epoch: int) -> KeyedIndex:
        made = super().__new__(cls, index)
        made.seed, made.epoch = seed, epoch
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedIndex, (int(self), self.seed, self.epoch)


def keys_of(indices: Sequence[int] | Int64Array) -> dict[tuple[int, int], Int64Array]:
    """Map each (seed, epoch) to the positions in ``indices`` of the indices that carry it.

    If any index is not a ``KeyedIndex``, the result is empty.
    """
    if isinstance(indices, np.ndarray):
        return {}
    found: dict[tuple[int, int], list[int]] = {}
    for row, index in enumerate(indices):
        if not isinstance(index, KeyedIndex):
            return {}
        found.setdefault((index.seed, index.epoch), []).append(row)
    return {key: np.array(rows) for key, rows in found.items()}

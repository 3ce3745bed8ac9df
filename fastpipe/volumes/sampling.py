"""The places of a dataset's patches, by its sampling; labels and masks are read completely for it."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.clock import StageClock
from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.core.machine import default_threads
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Positions, Sampling, Uniform
from fastpipe.volumes.places import (
    FixedPatches,
    ForegroundPatches,
    PatchPlaces,
    PatchSpace,
    Places,
    UniformPatches,
    check_room,
    given_places,
    grid_places,
)
from fastpipe.volumes.reader import Counts, PatchReader
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import Int64Array, UnitGrid, Volume, grown_unit

# ---- labels: some voxels of each, drawn from all in one pass, in any order --------------------

UInt64Array = npt.NDArray[np.uint64]

# Labels that are not whole numbers, as in soft segmentations, are separate classes up to this many.
_MOST_FRACTIONS = 1000
_TOGETHER = math.nan  # the label of their common class; compared by identity

_GOLDEN, _MIX_1, _MIX_2 = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


class LabelVoxels(NamedTuple):
    """A sample of the voxels of each class of a volume."""

    # (C,), ascending, as the volume's kind: int64, uint64 or float64.  NaN, at the end, is the class of all
    # that are not whole numbers, if there are too many of them.
    labels: npt.NDArray[Any]
    ends: Int64Array  # int64 (C,): end of each class in ``voxels``, and start of the next
    voxels: Int64Array  # int64 (M,): places of the voxels in the volume in C order

    def each(self) -> list[Int64Array]:
        return np.split(self.voxels, self.ends)[:-1]


class VoxelSketch:
    """A sampler of voxels of each label: those whose places have the smallest hashes.  So the parts of a
    volume may come in any order, and each set of voxels is equally likely.

    ``labels`` are compared with the volume's values as NumPy compares numbers; None takes all above 0.  More
    than 1,000 of these that are not whole numbers form one class together.
    """

    def __init__(self, shape: Sequence[int], most: int, labels: Sequence[float] | None = None) -> None:
        self._shape, self._most = tuple(shape), most
        self._labels = None if labels is None else list(dict.fromkeys(labels))
        self._kind: np.dtype[Any] = np.dtype(np.int64)
        self._kept: dict[float, tuple[UInt64Array, Int64Array]] = {}
        self._fractions: set[float] = set()

    def add(self, part: npt.NDArray[Any], start: Sequence[int]) -> None:
        flat = np.ascontiguousarray(part).reshape(-1)
        flat = flat.view(np.uint8) if flat.dtype.kind == "b" else flat
        self._kind = np.dtype({"u": np.uint64, "f": np.float64}.get(flat.dtype.kind, np.int64))
        for label, inside in self._classes_in(flat):
            at = np.unravel_index(inside, part.shape)
            moved = tuple(axis + first for axis, first in zip(at, start, strict=True))
            places = np.ravel_multi_index(moved, self._shape).astype(np.int64)
            self._keep(label, _hashes(places), places)

    def _classes_in(self, flat: npt.NDArray[Any]) -> Iterator[tuple[float, npt.NDArray[np.intp]]]:
        """Yield the classes of some voxels, each with the indices of its voxels."""
        if self._labels is not None:
            for label in self._labels:
                with np.errstate(over="ignore"):  # a small float may not represent the labels
                    inside = np.flatnonzero(flat == label)
                if len(inside):
                    yield label, inside
            return
        if flat.dtype.kind == "u" and flat.dtype.itemsize <= 2:  # much faster than sorting
            for label in np.flatnonzero(np.bincount(flat.astype(np.intp, copy=False))).tolist():
                if label:
                    yield label, np.flatnonzero(flat == label)
            return
        above = np.flatnonzero(flat > 0)
        above = above[np.argsort(flat[above], kind="stable")]
        values = flat[above]
        is_whole = values == np.floor(values) if values.dtype.kind == "f" else np.ones(len(values), np.bool_)
        yield from _grouped(values[is_whole], above[is_whole])
        values, above = values[~is_whole], above[~is_whole]
        if not len(above):
            return
        yield _TOGETHER, above
        if len(self._fractions) <= _MOST_FRACTIONS:
            self._fractions.update(np.unique(values).tolist())
            if len(self._fractions) <= _MOST_FRACTIONS:
                yield from _grouped(values, above)

    def _keep(self, label: float, hashes: UInt64Array, places: Int64Array) -> None:
        if label in self._kept:
            known, at = self._kept[label]
            if len(known) == self._most:  # most later voxels are not among the smallest
                less = hashes < known.max()
                hashes, places = hashes[less], places[less]
            hashes, places = np.concatenate([known, hashes]), np.concatenate([at, places])
        if len(hashes) > self._most:
            least = np.argpartition(hashes, self._most - 1)[: self._most]
            hashes, places = hashes[least], places[least]
        self._kept[label] = hashes, places

    def found(self) -> LabelVoxels:
        is_many = len(self._fractions) > _MOST_FRACTIONS
        left_out = self._fractions if is_many else set()
        labels = sorted(label for label in self._kept if label is not _TOGETHER and label not in left_out)
        labels += [_TOGETHER] if is_many else []
        voxels = [np.sort(self._kept[label][1]) for label in labels]
        return LabelVoxels(
            np.array(labels, self._kind),
            np.cumsum([len(some) for some in voxels], dtype=np.int64),
            np.concatenate([np.zeros(0, np.int64), *voxels]),
        )


def _grouped(
    values: npt.NDArray[Any], places: npt.NDArray[np.intp]
) -> Iterator[tuple[float, npt.NDArray[np.intp]]]:
    """Yield each of the sorted values with its places."""
    if len(values):
        ends = np.flatnonzero(values[1:] != values[:-1]) + 1
        yield from zip(values[[0, *ends]].tolist(), np.split(places, ends), strict=True)


def _hashes(places: Int64Array) -> UInt64Array:
    """Return SplitMix64's finaliser of each place (D. Stafford's variant 13), which is one to one."""
    values = places.astype(np.uint64)
    values += np.uint64(1)
    values *= np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


# ---- masks: patches that contain enough of the mask, by voxel counts of blocks ----------------

# From (number, seed, epoch, indices, count) to [0, 1): float64 (N, count), different for each number.
Draws = Callable[[int, int, int, Int64Array, int], npt.NDArray[np.float64]]

_MOST_BLOCKS = 1 << 22
_MOST_SIDE = 4  # if the number of blocks allows it
_MOST_CELLS, _CELLS_AT_ONCE = 1 << 18, 1 << 14
_TRIED, _ROUNDS = 4096, 4  # patches tried when a dataset is created
_DRAWS, _AT_ONCE = 4, 16  # rounds of attempts to find a patch, and attempts in each


def _doubled(sides: Sequence[int], shape: Sequence[int], patch: Sequence[int], most: int) -> list[int]:
    """Return the sides of boxes, doubled until few enough: first along the patch's most divided dimension."""
    found = list(sides)
    while math.prod(-(-size // side) for size, side in zip(shape, found, strict=True)) > most:
        dims = [dim for dim, size in enumerate(shape) if found[dim] < size]
        found[max(dims, key=lambda dim: patch[dim] / found[dim])] *= 2
    return [min(side, max(1, size)) for side, size in zip(found, shape, strict=True)]


def block_sides(shape: Sequence[int], patch: Sequence[int]) -> list[int]:
    """Return the sides of blocks: a quarter of a patch's, at most 4, but larger if there are too many."""
    return _doubled([min(_MOST_SIDE, max(1, side // 4)) for side in patch], shape, patch, _MOST_BLOCKS)


class BlockCounts:
    """Counters of a mask's voxels that are not 0, block by block.  Parts may come in any order."""

    def __init__(self, shape: Sequence[int], patch: Sequence[int]) -> None:
        self.shape, self.sides = tuple(shape), block_sides(shape, patch)
        blocks = [-(-size // side) for size, side in zip(self.shape, self.sides, strict=True)]
        self.counts = np.zeros(blocks, np.int64)

    def add(self, part: npt.NDArray[Any], start: Sequence[int]) -> None:
        sums = (part != 0).astype(np.int64)
        box = []
        for dim, (first, side) in enumerate(zip(start, self.sides, strict=True)):
            last = first + part.shape[dim]
            cuts = np.arange(first // side * side, last, side) - first
            cuts[0] = 0
            sums = np.add.reduceat(sums, cuts, axis=dim)
            box.append(slice(first // side, first // side + len(cuts)))
        self.counts[tuple(box)] += sums


class MaskDensity:
    """Bounds for how much of a box is in a mask, from the counts of blocks.

    A box contains all voxels of the blocks within it, and its share of blocks that are completely in the
    mask.  It is unknown which voxels of other blocks at its surface it contains.
    """

    def __init__(self, counts: Int64Array, sides: Sequence[int], shape: Sequence[int]) -> None:
        self._sides, self._shape = np.array(sides, np.int64), np.array(shape, np.int64)
        self._blocks = np.array(counts.shape, np.int64)
        sizes = np.ones((), np.int64)
        for side, size in zip(sides, shape, strict=True):
            sizes = np.multiply.outer(sizes, np.diff(np.append(np.arange(0, size, side), size)))
        is_full = counts == sizes
        self._full, self._others = _summed(counts, is_full), _summed(counts, ~is_full)

    def fractions(self, starts: Int64Array, patch: Int64Array) -> npt.NDArray[np.float64]:
        """Return the least fraction of boxes in the mask, possibly beyond its ends: float64 (N,)."""
        ends = np.clip(starts + patch, 0, self._shape)
        starts = np.clip(starts, 0, self._shape)
        lows = -(-starts // self._sides)
        highs = np.where(ends == self._shape, self._blocks, ends // self._sides)
        voxels = self._voxels(starts, ends, lows, np.maximum(lows, highs))
        return np.asarray(voxels / math.prod(patch.tolist()), np.float64)

    def most(self, starts: Int64Array, size: Int64Array) -> npt.NDArray[np.float64]:
        """Return the most voxels of boxes in the mask, possibly beyond its ends: float64 (N,)."""
        ends = np.clip(starts + size, 0, self._shape)
        starts = np.clip(starts, 0, self._shape)
        lows, highs = starts // self._sides, -(-ends // self._sides)
        return self._voxels(starts, ends, np.minimum(lows, highs), highs)

    def _voxels(
        self, starts: Int64Array, ends: Int64Array, lows: Int64Array, highs: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Return voxels of full blocks within boxes, and all of other blocks from ``lows`` to ``highs``."""
        total = np.zeros(len(starts))
        for corner in itertools.product((False, True), repeat=starts.shape[1]):
            is_end = np.array(corner)
            sign = -1.0 if (len(corner) - sum(corner)) % 2 else 1.0
            others = self._others[tuple(np.where(is_end, highs, lows).T)]
            total += sign * (others + self._full_before(np.where(is_end, ends, starts)))
        counts: npt.NDArray[np.float64] = np.rint(total)  # they are integers
        return counts

    def _full_before(self, at: Int64Array) -> npt.NDArray[np.float64]:
        """Return the voxels of full blocks before corners; a cut block counts in proportion to its sides."""
        low = np.minimum(at // self._sides, self._blocks - 1)
        begins = low * self._sides
        part = (at - begins) / np.minimum(self._sides, self._shape - begins)
        found = np.zeros(len(at))
        for corner in itertools.product((0, 1), repeat=at.shape[1]):
            weight = np.ones(len(at))
            for dim, side in enumerate(corner):
                weight *= part[:, dim] if side else 1.0 - part[:, dim]
            found += weight * self._full[tuple((low + np.array(corner)).T)]
        return found


def _summed(counts: Int64Array, where: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Return the sums of the selected blocks before each corner."""
    total = int(counts.sum())
    sums = np.where(where, counts, 0).astype(np.int32 if total <= np.iinfo(np.int32).max else np.int64)
    for dim in range(sums.ndim):
        sums = np.cumsum(sums, axis=dim, dtype=sums.dtype)
    return np.pad(sums, [(1, 0)] * sums.ndim)


class PatchCells:
    """A sampler of patches near a mask; each place that can contain enough of it is equally likely.

    Places are examined in cells, which are boxes of them; cells in which no place can have enough are
    dropped.  If none remains, no patch has enough.
    """

    def __init__(
        self, space: PatchSpace, by_size: bool, least: float, densities: Sequence[MaskDensity]
    ) -> None:
        self._space, patch = space, space.patch.tolist()
        wanted = max(1.0, least * math.prod(patch))
        most = max(1, _MOST_CELLS // len(densities))
        volumes, cells, weights, sides = [], [], [], []
        for volume, (density, counts) in enumerate(zip(densities, space.counts.tolist(), strict=True)):
            side = np.array(_doubled([max(1, side // 8) for side in patch], counts, patch, most), np.int64)
            grid = -(-space.counts[volume] // side)
            begins = np.indices(tuple(grid.tolist())).reshape(len(patch), -1).T * side
            starts = np.array_split(space.lows[volume] + begins, 1 + len(begins) // _CELLS_AT_ONCE)
            held = np.concatenate([density.most(some, side + space.patch - 1) for some in starts])
            # The box that contains all patches of a cell; slightly less is enough, as both are rounded.
            begins = begins[held >= wanted * (1 - 1e-9)]
            places = np.minimum(side, space.counts[volume] - begins).prod(axis=1, dtype=np.float64)
            volumes.append(np.full(len(begins), volume))
            cells.append(begins)
            weights.append(places / (1 if by_size else math.prod(counts)))
            sides.append(side)
        self._volumes, self._cells = np.concatenate(volumes), np.concatenate(cells)
        self._sides = np.array(sides)
        self.count, self.numbers = len(self._volumes), 1 + len(patch)
        self._ends = np.cumsum(np.concatenate(weights))

    def places(self, drawn: npt.NDArray[np.float64]) -> Places:
        """Return the places of patches for numbers in [0, 1): float64 (N, 1 + D)."""
        cells = np.searchsorted(self._ends[:-1], drawn[:, 0] * self._ends[-1], side="right")
        volumes, begins = self._volumes[cells], self._cells[cells]
        sides = np.minimum(self._sides[volumes], self._space.counts[volumes] - begins)
        steps = np.minimum((drawn[:, 1:] * sides).astype(np.int64), sides - 1)
        return Places(volumes, self._space.lows[volumes] + begins + steps)


class MaskedPatches:
    """Patches with enough of a mask; others are replaced by patches near the mask, drawn with other random
    numbers than those of ``base``."""

    is_random = True

    def __init__(
        self,
        base: PatchPlaces,
        cells: PatchCells,
        least: float,
        fractions: Callable[[Places], npt.NDArray[np.float64]],
        draws: Draws,
    ) -> None:
        self._base, self._cells, self._least = base, cells, least
        self._fractions, self._draws, self.count = fractions, draws, base.count
        # Used if many attempts have failed.
        tried = np.arange(_TRIED)
        found = [
            self._near(_DRAWS + 1, 0, number, tried, 1) if cells.count else base.places(0, number, tried)
            for number in range(_ROUNDS)
        ]
        places = Places(*(np.concatenate(some) for some in zip(*found, strict=True)))
        shares = fractions(places)
        good = np.flatnonzero(shares >= least)
        if not len(good):
            raise OptionError(
                f"mask_fraction={least}: of {len(shares):,} patches that were tried none has so much of the "
                f"mask; the most is {shares.max():.3f}"
            )
        self._good = Places(places.volumes[good], places.starts[good])

    def places(self, seed: int, epoch: int, indices: Int64Array) -> Places:
        volumes, starts = (part.copy() for part in self._base.places(seed, epoch, indices))
        left = np.flatnonzero(self._fractions(Places(volumes, starts)) < self._least)
        for number in range(1, _DRAWS + 1):
            if not len(left):
                break
            again = self._near(number, seed, epoch, indices[left], _AT_ONCE)
            is_good = (self._fractions(again) >= self._least).reshape(-1, _AT_ONCE)
            # The first good one, or any.
            some = np.arange(len(left)) * _AT_ONCE + is_good.argmax(axis=1)
            volumes[left], starts[left] = again.volumes[some], again.starts[some]
            left = left[~is_good.any(axis=1)]
        if len(left):
            count = len(self._good.volumes)
            drawn = self._draws(_DRAWS + 2, seed, epoch, indices[left], 1)[:, 0]
            some = np.minimum((drawn * count).astype(np.int64), count - 1)
            volumes[left], starts[left] = self._good.volumes[some], self._good.starts[some]
        return Places(volumes, starts)

    def _near(self, number: int, seed: int, epoch: int, indices: Int64Array, count: int) -> Places:
        """Return ``count`` patches near the mask for each index, those of an index in a row."""
        each = self._cells.numbers
        drawn = self._draws(number, seed, epoch, indices, count * each)
        return self._cells.places(drawn.reshape(-1, each))


# ---- the patches of a dataset -----------------------------------------------------------------

_log = logging.getLogger("fastpipe.patches")

_PIECE_NBYTES = 1 << 24  # of a volume that a thread reads at a time
# Replaces the state of a file if the identity of the object suffices.
_NO_FILE = os.stat_result([0] * 19)
_MOST_LOOKED_AT = 1 << 18  # voxels at a time
_MOST_SHOWN = 10  # labels in a message
# The start of a seed's numbers for places, far from those for the transforms of samples.  Attempts to find
# a place near a mask use others, and so do patches around the foreground.
_PLACES, _FOREGROUND = 1 << 62, 1 << 20


def label_voxels(
    role: Role, number: int, most: int, labels: Sequence[float] | None, kept: FileArrays | None
) -> LabelVoxels:
    """Return a sample of the voxels of each label of a volume; of ``labels``, or of all above 0."""
    shape = role.spatial(number)
    sketch = VoxelSketch(shape, most, labels)

    def look(part: npt.NDArray[Any], start: Sequence[int]) -> None:
        for channel in part.reshape(-1, *part.shape[len(role.lead) :]):
            sketch.add(channel, start)

    def find() -> list[npt.NDArray[Any]]:
        _scan(role, number, look)
        return list(sketch.found())

    # A table of another version, which searched labels differently, is ignored.
    about = f"label voxels of version 3, {most} {labels} in {shape}"
    return LabelVoxels(*_kept(role.volumes[number], about, find, kept))


def mask_density(role: Role, number: int, patch: Sequence[int], kept: FileArrays | None) -> MaskDensity:
    """Return how much of a volume's patches is in its mask: where any channel is not 0."""
    blocks, axes = BlockCounts(role.spatial(number), patch), tuple(range(len(role.lead)))

    def look(part: npt.NDArray[Any], start: Sequence[int]) -> None:
        blocks.add((part != 0).any(axis=axes), start)

    def find() -> list[npt.NDArray[Any]]:
        _scan(role, number, look)
        return [blocks.counts.reshape(-1)]

    about = f"mask counts of {blocks.sides} in {blocks.shape}"
    (counts,) = _kept(role.volumes[number], about, find, kept)
    return MaskDensity(counts.reshape(blocks.counts.shape), blocks.sides, blocks.shape)


def _kept(
    volume: Volume, about: str, find: Callable[[], list[npt.NDArray[Any]]], kept: FileArrays | None
) -> Sequence[npt.NDArray[Any]]:
    path, identity = volume.state()
    if kept is None or not identity:
        return find()
    status = os.stat(path) if path else _NO_FILE
    about = f"{about} of {identity}"
    found = kept.load(status, about)
    if found is None:
        found = find()
        kept.save(status, about, found)
    return found


def _scan(role: Role, number: int, look: Callable[[npt.NDArray[Any], Sequence[int]], None]) -> None:
    """Pass a whole volume to ``look``, box by box along the dimensions of patches, in bounded memory; threads
    read it."""
    volume, shape, lead = role.volumes[number], role.spatial(number), len(role.lead)
    what = f"the list of the {volume.grid.count:,} parts of {volume.name}, all of which are to be read,"
    check_room(8 * volume.grid.count, what, "use another sampling")
    voxel_nbytes = math.prod(role.lead) * volume.dtype.itemsize
    boxes = UnitGrid(shape, grown_unit(volume.grid.unit[lead:], shape, voxel_nbytes, _PIECE_NBYTES))
    reader = PatchReader(volume, StageClock(), Counts())

    def read(number: int) -> tuple[npt.NDArray[Any], list[int]]:
        box = boxes.box(number)
        start = [side.start for side in box]
        part = np.empty((*role.lead, *(side.stop - side.start for side in box)), volume.dtype)
        reader.read([*[0] * lead, *start], part)
        return part, start

    threads, coming = default_threads(1), deque[Future[tuple[npt.NDArray[Any], list[int]]]]()
    with ThreadPoolExecutor(threads, "fastpipe-scan") as pool:
        for number in range(boxes.count + threads):
            if number < boxes.count:
                coming.append(pool.submit(read, number))
            if number >= threads and coming:
                _look(*coming.popleft().result(), lead, look)


def _look(
    part: npt.NDArray[Any], start: Sequence[int], lead: int,
    look: Callable[[npt.NDArray[Any], Sequence[int]], None],
) -> None:  # fmt: skip
    """Pass a box to ``look`` in small pieces: examining one costs many times its own memory."""
    shape = part.shape[lead:]
    sides, left = [], max(1, _MOST_LOOKED_AT // max(1, math.prod(part.shape[:lead])))
    for dim, size in enumerate(shape):  # whole rows, as long as they are small enough
        sides.append(min(size, max(1, left // math.prod(shape[dim + 1 :]))))
        left = max(1, left // sides[-1])
    for begins in itertools.product(*map(range, [0] * len(shape), shape, sides)):
        box: list[Any] = [slice(at, at + side) for at, side in zip(begins, sides, strict=True)]
        look(part[(..., *box)], [a + b for a, b in zip(start, begins, strict=True)])


def drawn(number: int, seed: int, epoch: int, indices: Int64Array, count: int) -> npt.NDArray[np.float64]:
    """Return random numbers for the places of patches, different from those for their transforms."""
    return uniforms(sample_seed(seed, number, _PLACES), epoch, indices, count)


def _shares(space: PatchSpace, densities: Sequence[MaskDensity], places: Places) -> npt.NDArray[np.float64]:
    """Return the least fraction of each patch in the mask of its volume: float64 (N,)."""
    found = np.zeros(len(places.volumes))
    for volume in np.unique(places.volumes).tolist():
        rows = np.flatnonzero(places.volumes == volume)
        found[rows] = densities[volume].fractions(places.starts[rows], space.patch)
    return found


def places_of(
    sampling: Sampling, space: PatchSpace, roles: Sequence[Role], pads: bool, kept: FileArrays | None
) -> PatchPlaces:
    if isinstance(sampling, Uniform):
        return _anywhere(sampling, space, roles, kept)
    if isinstance(sampling, Grid):
        return FixedPatches(grid_places(space, sampling.stride))
    if isinstance(sampling, Positions):
        return FixedPatches(given_places(space, sampling.array, pads))
    if isinstance(sampling, Foreground):
        labels = _role(roles, "labels", "Foreground draws patches around labels")
        if labels.dtype.kind == "c":
            raise OptionError(f"Foreground needs labels that are real numbers, and these are {labels.dtype}")
        found = [
            label_voxels(labels, number, sampling.voxels, sampling.classes, kept)
            for number in range(len(labels.volumes))
        ]
        voxels = [one.each() for one in found]
        if sampling.fraction and not any(voxels):
            which = "above 0" if sampling.classes is None else f"of {list(sampling.classes)}"
            there = [] if sampling.classes is None else label_voxels(labels, 0, 1, None, kept).labels.tolist()
            more = f"; above 0 it has {', '.join(map(repr, there[:_MOST_SHOWN]))}" if there else ""
            raise OptionError(
                f"{labels.volumes[0].name} has no label {which}, around which to draw patches{more}"
            )
        known = np.concatenate([one.labels for one in found])
        missing = [one for one in sampling.classes or () if not (known == one).any()]
        if missing:
            _log.warning("No volume has the labels %s that are in Foreground(classes=…)", missing)
        elsewhere = _anywhere(sampling, space, roles, kept)
        return ForegroundPatches(space, elsewhere, sampling.fraction, voxels, partial(drawn, _FOREGROUND))
    raise OptionError(
        "sampling must be one of fastpipe.sampling: Uniform(n), Foreground(n), Grid() or Positions(array); "
        f"got {sampling!r}"
    )


def _anywhere(
    sampling: Uniform | Foreground, space: PatchSpace, roles: Sequence[Role], kept: FileArrays | None
) -> PatchPlaces:
    by_size = sampling.volumes == "size"
    base = UniformPatches(space, sampling.samples_per_epoch, by_size, partial(drawn, 0))
    least = sampling.mask_fraction
    if not least:
        return base
    mask = _role(roles, "mask", "mask_fraction= is a part of the mask")
    found = [mask_density(mask, number, space.patch.tolist(), kept) for number in range(len(mask.volumes))]
    return MaskedPatches(
        base, PatchCells(space, by_size, least, found), least, partial(_shares, space, found), drawn
    )


def _role(roles: Sequence[Role], name: str, why: str) -> Role:
    for role in roles:
        if role.name == name:
            return role
    raise OptionError(f"{why}: give {name}=")

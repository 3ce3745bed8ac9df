"""Choose the places of a dataset's patches; labels and masks that this needs are read completely."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Positions, Sampling, Uniform, labels_of
from fastpipe.volumes.places import (
    FixedPatches,
    ForegroundPatches,
    PatchPlaces,
    PatchSpace,
    Places,
    UniformPatches,
    given_places,
    grid_places,
)
from fastpipe.volumes.scans import kept_arrays, scan
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import Int64Array

# ---- labels: a random sample of each label's voxels, from one pass over the parts in any order ----

UInt64Array = npt.NDArray[np.uint64]
Classes = Sequence[float | tuple[float, ...]]  # labels, and groups of labels

# Up to this many labels that are not whole numbers, as in soft segmentations, each label is its own class.
_MOST_FRACTIONS = 1000
_TOGETHER = math.nan  # with more such labels, the label of their common class, which is compared by identity

_GOLDEN, _MIX_1, _MIX_2 = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


class LabelVoxels(NamedTuple):
    """A random selection of voxels of each class (label) of a volume."""

    # (C,), ascending.  The dtype is int64, uint64 or float64, by the kind of the volume's dtype.  If too many
    # labels are not whole numbers, NaN at the end stands for all of them.  For given classes, these are the
    # numbers of the classes that the volume has, int64.
    labels: npt.NDArray[Any]
    ends: Int64Array  # int64 (C,): the end of each class in ``voxels``, where the next class begins
    voxels: Int64Array  # int64 (M,): flat indices of the voxels in the volume, in C order

    def each(self) -> list[Int64Array]:
        return np.split(self.voxels, self.ends)[:-1]


class VoxelSketch:
    """A sampler that keeps, for each label, the ``most`` voxels whose places have the smallest hashes.

    The result does not depend on the order in which parts of the volume are added.  Each set of voxels is
    equally likely.  NumPy compares the labels of ``classes`` with the volume's values.  If ``classes`` is
    None, all values above 0 are labels, and each is a class.  More than 1,000 of these values that are not
    whole numbers form one common class.
    """

    def __init__(self, shape: Sequence[int], most: int, classes: Classes | None = None) -> None:
        self._shape, self._most, self._classes = tuple(shape), most, classes
        self._kind: np.dtype[Any] = np.dtype(np.int64)
        self._kept: dict[float, tuple[UInt64Array, Int64Array]] = {}
        self._fractions: set[float] = set()

    def add(
        self, part: npt.NDArray[Any], start: Sequence[int], shown: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Add a part of the volume that begins at ``start``.

        Where ``shown`` is False, the label 0 is left out.
        """
        flat = np.ascontiguousarray(part).reshape(-1)
        flat = flat.view(np.uint8) if flat.dtype.kind == "b" else flat
        if self._classes is None:
            self._kind = np.dtype({"u": np.uint64, "f": np.float64}.get(flat.dtype.kind, np.int64))
        for label, inside in self._classes_in(flat, None if shown is None else shown.reshape(-1)):
            at = np.unravel_index(inside, part.shape)
            moved = tuple(axis + first for axis, first in zip(at, start, strict=True))
            places = np.ravel_multi_index(moved, self._shape).astype(np.int64)
            self._keep(label, _hashes(places), places)

    def _classes_in(
        self, flat: npt.NDArray[Any], shown: npt.NDArray[np.bool_] | None
    ) -> Iterator[tuple[float, npt.NDArray[np.intp]]]:
        """Yield each class that occurs in ``flat``, and the indices of the class's voxels."""
        if self._classes is not None:
            for number, one in enumerate(self._classes):
                is_there = np.zeros(len(flat), np.bool_)
                for label in labels_of(one):
                    with np.errstate(over="ignore"):  # a float type of few bits may not represent the label
                        found = flat == label
                    is_there |= found if label != 0 or shown is None else found & shown
                if is_there.any():
                    yield number, np.flatnonzero(is_there)
            return
        if flat.dtype.kind == "u" and flat.dtype.itemsize <= 2:  # counting is much faster than sorting
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
            if len(known) == self._most:  # most further hashes are not among the smallest
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
    """Yield each distinct value of the sorted ``values`` with its places."""
    if len(values):
        ends = np.flatnonzero(values[1:] != values[:-1]) + 1
        yield from zip(values[[0, *ends]].tolist(), np.split(places, ends), strict=True)


def _hashes(places: Int64Array) -> UInt64Array:
    """Hash each place with the finaliser of SplitMix64 (D. Stafford's variant 13), which is one to one."""
    values = places.astype(np.uint64)
    values += np.uint64(1)
    values *= np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


# ---- masks: find patches that contain enough of the mask, from the mask's voxel counts in blocks ----

# A function of (number, seed, epoch, indices, count) that returns random numbers in [0, 1): float64 (N,
# count).  The random numbers differ for each ``number``.
Draws = Callable[[int, int, int, Int64Array, int], npt.NDArray[np.float64]]

_MOST_BLOCKS = 1 << 22
_MOST_SIDE = 4  # the longest side of a block, unless this makes too many blocks
_MOST_CELLS, _CELLS_AT_ONCE = 1 << 18, 1 << 14
_TRIED, _ROUNDS = 4096, 4  # patches in each round, and rounds, that are tried when a dataset is created
_DRAWS, _AT_ONCE = 4, 16  # rounds of attempts to find a patch, and the attempts in each round


def _doubled(sides: Sequence[int], shape: Sequence[int], patch: Sequence[int], most: int) -> list[int]:
    """Double the ``sides`` of the boxes that divide ``shape``, until there are at most ``most`` boxes.

    The next side to double is the side along which a patch has the most boxes.
    """
    found = list(sides)
    while math.prod(-(-size // side) for size, side in zip(shape, found, strict=True)) > most:
        dims = [dim for dim, size in enumerate(shape) if found[dim] < size]
        found[max(dims, key=lambda dim: patch[dim] / found[dim])] *= 2
    return [min(side, max(1, size)) for side, size in zip(found, shape, strict=True)]


def block_sides(shape: Sequence[int], patch: Sequence[int]) -> list[int]:
    """Return a block's sides: a quarter of the patch's, at most 4; longer if there are too many blocks."""
    return _doubled([min(_MOST_SIDE, max(1, side // 4)) for side in patch], shape, patch, _MOST_BLOCKS)


class BlockCounts:
    """Counts a mask's nonzero voxels in each block of voxels.  The mask's parts may come in any order."""

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
    """Lower and upper bounds for the number of mask voxels in a box.

    The bounds are computed from the number of mask voxels in each block (a small box of a fixed size).
    Blocks inside the box, and blocks that are completely in the mask, count exactly.  For any other block at
    the box's surface, it is unknown which of its mask voxels are inside the box.
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
        """Return, for each box, a lower bound for the fraction of its voxels in the mask: float64 (N,).

        Boxes may extend beyond the mask's ends.
        """
        ends = np.clip(starts + patch, 0, self._shape)
        starts = np.clip(starts, 0, self._shape)
        lows = -(-starts // self._sides)
        highs = np.where(ends == self._shape, self._blocks, ends // self._sides)
        voxels = self._voxels(starts, ends, lows, np.maximum(lows, highs))
        return np.asarray(voxels / math.prod(patch.tolist()), np.float64)

    def most(self, starts: Int64Array, size: Int64Array) -> npt.NDArray[np.float64]:
        """Return, for each box, an upper bound for the number of its mask voxels: float64 (N,).

        Boxes may extend beyond the mask's ends.
        """
        ends = np.clip(starts + size, 0, self._shape)
        starts = np.clip(starts, 0, self._shape)
        lows, highs = starts // self._sides, -(-ends // self._sides)
        return self._voxels(starts, ends, np.minimum(lows, highs), highs)

    def _voxels(
        self, starts: Int64Array, ends: Int64Array, lows: Int64Array, highs: Int64Array
    ) -> npt.NDArray[np.float64]:
        """Count the mask voxels in each box: those of full blocks from voxel ``starts`` to ``ends``, and
        those of all other blocks from block ``lows`` to block ``highs``."""
        total = np.zeros(len(starts))
        for corner in itertools.product((False, True), repeat=starts.shape[1]):
            is_end = np.array(corner)
            sign = -1.0 if (len(corner) - sum(corner)) % 2 else 1.0
            others = self._others[tuple(np.where(is_end, highs, lows).T)]
            total += sign * (others + self._full_before(np.where(is_end, ends, starts)))
        counts: npt.NDArray[np.float64] = np.rint(total)  # exact results are integers
        return counts

    def _full_before(self, at: Int64Array) -> npt.NDArray[np.float64]:
        """Count the voxels of full blocks (completely in the mask) from the origin to each corner in ``at``.

        If a corner cuts a block, only the voxels on the origin's side count.
        """
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
    """Return, for each corner of the grid of blocks, the sum of selected counts up to the corner."""
    total = int(counts.sum())
    sums = np.where(where, counts, 0).astype(np.int32 if total <= np.iinfo(np.int32).max else np.int64)
    for dim in range(sums.ndim):
        sums = np.cumsum(sums, axis=dim, dtype=sums.dtype)
    return np.pad(sums, [(1, 0)] * sums.ndim)


class PatchCells:
    """A sampler of patches near a mask.

    The possible places of patches are divided into cells, which are boxes of places.  A cell is dropped if no
    patch that starts in it can contain enough of the mask.  All places of a volume in the remaining cells are
    equally likely.  If no cell remains, no patch contains enough of the mask.
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
            # ``held`` is for the box that contains all patches of a cell.  The tolerance is for rounding.
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
        """Convert the random numbers ``drawn``, float64 (N, 1 + D) in [0, 1), to places of N patches."""
        cells = np.searchsorted(self._ends[:-1], drawn[:, 0] * self._ends[-1], side="right")
        volumes, begins = self._volumes[cells], self._cells[cells]
        sides = np.minimum(self._sides[volumes], self._space.counts[volumes] - begins)
        steps = np.minimum((drawn[:, 1:] * sides).astype(np.int64), sides - 1)
        return Places(volumes, self._space.lows[volumes] + begins + steps)


class MaskedPatches:
    """Patches in which at least the fraction ``least`` of the voxels is in the mask.

    Patches of ``base`` that contain less of the mask are replaced by random patches near the mask.
    """

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
        # Find good patches as a fallback for samples for which all attempts fail.
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
            # Take the first good patch, or any patch if none is good.
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
        """Return ``count`` random patches near the mask for each index, grouped by index."""
        each = self._cells.numbers
        drawn = self._draws(number, seed, epoch, indices, count * each)
        return self._cells.places(drawn.reshape(-1, each))


# ---- the patches of a dataset -----------------------------------------------------------------

_log = logging.getLogger("fastpipe.patches")

_MOST_SHOWN = 10  # the most labels in a message
# The offset of the numbers from which random numbers for places are derived.  The offset is far from the
# numbers for the transforms of samples.  _FOREGROUND is the number for patches around the foreground.
_PLACES, _FOREGROUND = 1 << 62, 1 << 20


class Shown(NamedTuple):
    """The voxels of the label 0 around which patches may be: where the volume is above a threshold."""

    role: Role  # the volumes
    threshold: float
    values: Sequence[Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]  # makes values of a volume's elements
    about: str  # the options on which ``values`` depend

    def where(self, number: int, part: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        is_above = self.values[number](part) > self.threshold
        return np.asarray(is_above.any(axis=tuple(range(len(self.role.lead)))))


def label_voxels(
    role: Role, number: int, most: int, classes: Classes | None, kept: FileArrays | None,
    shown: Shown | None = None,
) -> LabelVoxels:  # fmt: skip
    """Return random voxels of each class of a volume; if ``classes`` is None, of all values above 0."""
    shape = role.spatial(number)
    sketch = VoxelSketch(shape, most, classes)

    def look(start: Sequence[int], part: npt.NDArray[Any], *image: npt.NDArray[Any]) -> None:
        where = None if shown is None else shown.where(number, *image)
        for channel in part.reshape(-1, *part.shape[len(role.lead) :]):
            sketch.add(channel, start, where)

    def find() -> list[npt.NDArray[Any]]:
        scan([role] if shown is None else [role, shown.role], number, look)
        return list(sketch.found())

    # The version in the key makes fastpipe ignore tables of versions that searched labels in another way.
    about = f"label voxels of version 4, {most} {classes} in {shape}"
    if shown is not None:
        state = shown.role.volumes[number].state()
        about, kept = f"{about}, {shown.threshold} {shown.about} {state}", kept if state[1] else None
    return LabelVoxels(*kept_arrays(role.volumes[number], about, find, kept))


def mask_density(role: Role, number: int, patch: Sequence[int], kept: FileArrays | None) -> MaskDensity:
    """Return a mask's ``MaskDensity``.  A voxel is in the mask if any of its channels is not 0."""
    blocks, axes = BlockCounts(role.spatial(number), patch), tuple(range(len(role.lead)))

    def look(start: Sequence[int], part: npt.NDArray[Any]) -> None:
        blocks.add((part != 0).any(axis=axes), start)

    def find() -> list[npt.NDArray[Any]]:
        scan([role], number, look)
        return [blocks.counts.reshape(-1)]

    about = f"mask counts of {blocks.sides} in {blocks.shape}"
    (counts,) = kept_arrays(role.volumes[number], about, find, kept)
    return MaskDensity(counts.reshape(blocks.counts.shape), blocks.sides, blocks.shape)


def drawn(number: int, seed: int, epoch: int, indices: Int64Array, count: int) -> npt.NDArray[np.float64]:
    """Return random numbers for the places of patches; transforms use other random numbers."""
    return uniforms(sample_seed(seed, number, _PLACES), epoch, indices, count)


def _shares(space: PatchSpace, densities: Sequence[MaskDensity], places: Places) -> npt.NDArray[np.float64]:
    """Return, for each patch, a lower bound for the fraction of its voxels in the mask: float64 (N,)."""
    found = np.zeros(len(places.volumes))
    for volume in np.unique(places.volumes).tolist():
        rows = np.flatnonzero(places.volumes == volume)
        found[rows] = densities[volume].fractions(places.starts[rows], space.patch)
    return found


def places_of(
    sampling: Sampling, space: PatchSpace, roles: Sequence[Role], pads: bool, kept: FileArrays | None,
    values: Sequence[Callable[[npt.NDArray[Any]], npt.NDArray[Any]]], about_values: str,
) -> PatchPlaces:  # fmt: skip
    """Return the places of a dataset's patches.

    For each volume, ``values`` makes the values of patches of stored elements.  ``about_values`` describes
    the options on which this depends.
    """
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
        threshold, classes = sampling.image_threshold, sampling.classes
        shown = None if threshold is None else Shown(roles[0], threshold, values, about_values)
        found = [
            label_voxels(labels, number, sampling.voxels, classes, kept, shown)
            for number in range(len(labels.volumes))
        ]
        # A class whose ratio is 0 is as if it were not there.
        ratios = [[1.0] * len(one.labels) for one in found]
        if sampling.ratios is not None:
            ratios = [[sampling.ratios[number] for number in one.labels] for one in found]
        voxels = [
            [some for some, ratio in zip(one.each(), each, strict=True) if ratio]
            for one, each in zip(found, ratios, strict=True)
        ]
        if sampling.fraction and not any(voxels):
            which = "above 0" if classes is None else f"of {list(classes)}"
            there = [] if classes is None else label_voxels(labels, 0, 1, None, kept).labels.tolist()
            more = f"; above 0 it has {', '.join(map(repr, there[:_MOST_SHOWN]))}" if there else ""
            raise OptionError(
                f"{labels.volumes[0].name} has no label {which}, around which to draw patches{more}"
            )
        known = np.concatenate([one.labels for one in found])
        missing = [one for number, one in enumerate(classes or ()) if number not in known]
        if missing:
            _log.warning("No volume has the labels %s that are in Foreground(classes=…)", missing)
        elsewhere = _anywhere(sampling, space, roles, kept)
        weights = [[ratio for ratio in each if ratio] for each in ratios]
        draws = partial(drawn, _FOREGROUND)
        return ForegroundPatches(space, elsewhere, sampling.fraction, voxels, weights, draws)
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

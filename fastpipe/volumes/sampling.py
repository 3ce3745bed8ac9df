"""Where the patches of a dataset are, by its sampling; for which some volumes are looked at as a whole."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.keys import sample_seed, uniforms
from fastpipe.core.machine import default_threads
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Positions, Sampling, Uniform
from fastpipe.volumes.foreground import LabelVoxels, VoxelSketch
from fastpipe.volumes.masks import BlockCounts, MaskDensity, MaskedPatches, PatchCells
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
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import Volume

__all__ = ["label_voxels", "mask_density", "places_of"]

_log = logging.getLogger("fastpipe.patches")

_PIECE_NBYTES = 1 << 24  # of a volume that a thread reads at a time
# In the place of the state of a file, where the identity of what is looked at says it all.
_NO_FILE = os.stat_result([0] * 19)
_MOST_LOOKED_AT = 1 << 18  # voxels at a time
_MOST_SHOWN = 10  # labels in a message
# Where a seed's numbers for places begin, far from those for the transforms of any sample; attempts to find
# a place near to a mask have others, and so have patches around the foreground.
_PLACES, _FOREGROUND = 1 << 62, 1 << 20


def label_voxels(
    role: Role, number: int, most: int, labels: Sequence[float] | None, kept: FileArrays | None
) -> LabelVoxels:
    """Some voxels of each label of a volume, drawn from all.

    Args:
        role: the labels.
        number: of the volume.
        most: voxels of each label.
        labels: which; None takes all above 0.
        kept: where they are kept from one time to the next.
    """
    shape = role.spatial(number)
    sketch = VoxelSketch(shape, most, labels)

    def look(parts: list[npt.NDArray[Any]], start: Sequence[int]) -> None:
        for part in parts:
            for channel in part.reshape(-1, *part.shape[len(role.lead) :]):
                sketch.add(channel, start)

    def find() -> list[npt.NDArray[Any]]:
        _scan(role, number, look)
        return list(sketch.found())

    # A table of another version, which looked for labels otherwise, is not used.
    about = f"label voxels of version 2, {most} {labels} in {shape}"
    return LabelVoxels(*_kept(role.volumes[number], about, find, kept))


def mask_density(role: Role, number: int, patch: Sequence[int], kept: FileArrays | None) -> MaskDensity:
    """How much of patches of a volume is in its mask: where any of its channels is not 0.

    Args:
        role: the mask.
        number: of the volume.
        patch: the patches' size.
        kept: where counts are kept from one time to the next.
    """
    blocks, axes = BlockCounts(role.spatial(number), patch), tuple(range(len(role.lead)))

    def look(parts: list[npt.NDArray[Any]], start: Sequence[int]) -> None:
        blocks.add(np.logical_or.reduce([(part != 0).any(axis=axes) for part in parts]), start)

    def find() -> list[npt.NDArray[Any]]:
        _scan(role, number, look)
        return [blocks.counts.reshape(-1)]

    about = f"mask counts of {blocks.sides} in {blocks.shape}"
    (counts,) = _kept(role.volumes[number], about, find, kept)
    return MaskDensity(counts.reshape(blocks.counts.shape), blocks.sides, blocks.shape)


def _kept(
    volume: Volume, about: str, find: Callable[[], list[npt.NDArray[Any]]], kept: FileArrays | None
) -> Sequence[npt.NDArray[Any]]:
    """Arrays about a volume, found now or some time before."""
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


def _scan(role: Role, number: int, look: Callable[[list[npt.NDArray[Any]], Sequence[int]], None]) -> None:
    """Show all of a volume, box by box along the dimensions of patches, in bounded memory.

    Reads in threads, and looks in this one.

    Args:
        role: the array.
        number: of the volume.
        look: is given a box, in parts along the dimensions in front of these, and where it begins.
    """
    volume, lead = role.volumes[number], len(role.lead)
    if volume.array is not None:
        _look([volume.array], lead, [0] * len(role.spatial(number)), look)
        return
    reader, grid = volume.open(), volume.grid
    what = f"the list of the {grid.count:,} parts of {volume.name}, all of which are to be read,"
    check_room(8 * grid.count, what, "use another sampling")
    # The units of one box are those of all channels.
    numbers = np.arange(grid.count).reshape(math.prod(grid.counts[:lead]), -1).T
    count = max(1, _PIECE_NBYTES // max(1, volume.unit_nbytes * numbers.shape[1]))
    pieces = [numbers[first : first + count] for first in range(0, len(numbers), count)]

    def read(boxes: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        outs = [np.empty(volume.unit_nbytes, np.uint8) for _ in range(boxes.size)]
        reader.read(boxes.reshape(-1), outs)
        return outs

    threads = default_threads(1)
    with ThreadPoolExecutor(threads, "fastpipe-scan") as pool:
        coming = []
        for piece in [*pieces, *[None] * threads]:
            if piece is not None:
                coming.append((piece, pool.submit(read, piece)))
            if (piece is None or len(coming) > threads) and coming:
                boxes, read_parts = coming.pop(0)
                outs = iter(read_parts.result())
                for units in boxes.tolist():
                    parts = [_inside(volume, unit, next(outs)) for unit in units]
                    _look(parts, lead, [side.start for side in grid.box(units[0])[lead:]], look)


def _inside(volume: Volume, number: int, read: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """What of a unit is within the volume."""
    unit = read.view(volume.dtype).reshape(volume.grid.unit)
    return unit[tuple(slice(side.stop - side.start) for side in volume.grid.box(number))]


def _look(
    parts: list[npt.NDArray[Any]],
    lead: int,
    start: Sequence[int],
    look: Callable[[list[npt.NDArray[Any]], Sequence[int]], None],
) -> None:
    """Show a box as many small ones: what is looked at costs many times its own memory."""
    shape = parts[0].shape[lead:]
    sides, left = [], max(1, _MOST_LOOKED_AT // max(1, math.prod(parts[0].shape[:lead])))
    for dim, size in enumerate(shape):  # whole rows, as long as they are not too many
        sides.append(min(size, max(1, left // math.prod(shape[dim + 1 :]))))
        left = max(1, left // sides[-1])
    for begins in itertools.product(*map(range, [0] * len(shape), shape, sides)):
        box: list[Any] = [slice(at, at + side) for at, side in zip(begins, sides, strict=True)]
        look([part[(..., *box)] for part in parts], [a + b for a, b in zip(start, begins, strict=True)])


def drawn(
    number: int, seed: int, epoch: int, indices: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float64]:
    """Random numbers for the places of patches: others than those for their transforms."""
    return uniforms(sample_seed(seed, number, _PLACES), epoch, indices, count)


class Shares:
    """The part of patches that is in the masks of their volumes at least."""

    def __init__(self, space: PatchSpace, densities: Sequence[MaskDensity]) -> None:
        self._space, self._densities = space, densities

    def __call__(self, places: Places) -> npt.NDArray[np.float64]:
        """Of patches at places: float64 (N,)."""
        found = np.zeros(len(places.volumes))
        for volume in np.unique(places.volumes).tolist():
            rows = np.flatnonzero(places.volumes == volume)
            found[rows] = self._densities[volume].fractions(places.starts[rows], self._space.patch)
        return found


def places_of(
    sampling: Sampling, space: PatchSpace, roles: Sequence[Role], pads: bool, kept: FileArrays | None
) -> PatchPlaces:
    """The patches of epochs.

    Args:
        sampling: the dataset's option.
        space: where patches can be.
        roles: the arrays.
        pads: whether patches may reach beyond volumes.
        kept: where what is found out about labels and masks is kept from one time to the next.

    Raises:
        OptionError: the sampling does not fit the volumes.
    """
    if isinstance(sampling, Uniform):
        return _anywhere(sampling, space, roles, kept)
    if isinstance(sampling, Grid):
        return FixedPatches(grid_places(space, _stride(sampling, space)))
    if isinstance(sampling, Positions):
        return FixedPatches(given_places(space, sampling.array, pads))
    if isinstance(sampling, Foreground):
        labels = _role(roles, "labels", "Foreground draws patches around labels")
        if labels.dtype.kind == "c":
            raise OptionError(
                f"Foreground needs labels that are above 0 or not, and these are {labels.dtype}"
            )
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
        missing = [
            one for one in sampling.classes or () if not any((some.labels == one).any() for some in found)
        ]
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
    """Patches anywhere, or where there is enough of the mask."""
    by_size = sampling.volumes == "size"
    base = UniformPatches(space, sampling.samples_per_epoch, by_size, partial(drawn, 0))
    least = sampling.mask_fraction
    if not least:
        return base
    mask = _role(roles, "mask", "mask_fraction= is a part of the mask")
    found = [mask_density(mask, number, space.patch.tolist(), kept) for number in range(len(mask.volumes))]
    return MaskedPatches(base, PatchCells(space, by_size, least, found), least, Shares(space, found), drawn)


def _role(roles: Sequence[Role], name: str, why: str) -> Role:
    for role in roles:
        if role.name == name:
            return role
    raise OptionError(f"{why}: give {name}=")


def _stride(sampling: Grid, space: PatchSpace) -> Sequence[int]:
    patch: list[int] = space.patch.tolist()
    if sampling.stride is None:
        return patch
    if isinstance(sampling.stride, int):
        return [sampling.stride] * len(patch)
    if len(sampling.stride) != len(patch):
        raise OptionError(f"Grid(stride=…) must have {len(patch)} numbers, got {sampling.stride!r}")
    return sampling.stride

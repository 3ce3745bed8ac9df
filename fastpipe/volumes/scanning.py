"""What has to be known of all of a volume before patches are drawn: found in one pass, and kept."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._machine import default_threads
from fastpipe.index.arrays import FileArrays
from fastpipe.volumes.foreground import LabelVoxels, VoxelSketch
from fastpipe.volumes.masks import BlockCounts, MaskDensity
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import Volume

__all__ = ["label_voxels", "mask_density"]

_PIECE_NBYTES = 1 << 24  # of a volume that a thread reads at a time
# In the place of the state of a file, where the identity of what is looked at says it all.
_NO_FILE = os.stat_result([0] * 19)
_MOST_LOOKED_AT = 1 << 18  # voxels at a time


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

"""What has to be known of all of a volume before patches are drawn: found in one pass, and kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.engine.cpus import default_threads
from fastpipe.index.arrays import FileArrays
from fastpipe.index.foreground import LabelVoxels, VoxelSketch
from fastpipe.index.masks import BlockCounts, MaskDensity
from fastpipe.read.volumes.volume import Volume
from fastpipe.torch.patches.sources import Role

__all__ = ["label_voxels", "mask_density"]

_PIECE_NBYTES = 1 << 24  # of a volume that a thread looks at, at a time


def label_voxels(
    role: Role, number: int, most: int, labels: Sequence[int] | None, kept: FileArrays | None
) -> LabelVoxels:
    """Some voxels of each label of a volume, drawn from all.

    Args:
        role: the labels.
        number: of the volume.
        most: voxels of each label.
        labels: which; None takes all above 0.
        kept: where they are kept from one time to the next.
    """
    volume, lead = role.volumes[number], len(role.lead)
    sketch = VoxelSketch(role.spatial(number), most, labels)

    def add(part: npt.NDArray[Any], start: Sequence[int]) -> None:
        for channel in part.reshape(-1, *part.shape[lead:]):
            sketch.add(channel, start[lead:])

    def find() -> list[npt.NDArray[Any]]:
        _scan(volume, add)
        return list(sketch.found())

    return LabelVoxels(*_kept(volume, f"label voxels {most} {labels}", find, kept))


def mask_density(role: Role, number: int, kept: FileArrays | None) -> MaskDensity:
    """How much of patches of a volume is in its mask.

    Args:
        role: the mask.
        number: of the volume.
        kept: where counts are kept from one time to the next.
    """
    volume, lead = role.volumes[number], len(role.lead)
    blocks = BlockCounts(role.spatial(number))

    def add(part: npt.NDArray[Any], start: Sequence[int]) -> None:
        blocks.add((part != 0).any(axis=tuple(range(lead))) if lead else part, start[lead:])

    def find() -> list[npt.NDArray[Any]]:
        _scan(volume, add)
        return [blocks.counts.reshape(-1)]

    (counts,) = _kept(volume, "mask counts", find, kept)
    return MaskDensity(counts.reshape(blocks.counts.shape), blocks.sides, blocks.shape)


def _kept(
    volume: Volume, about: str, find: Callable[[], list[npt.NDArray[Any]]], kept: FileArrays | None
) -> Sequence[npt.NDArray[Any]]:
    """Arrays about a volume, found now or some time before."""
    path, identity = volume.state()
    if kept is None or not path:
        return find()
    status = os.stat(path)
    about = f"{about} of {identity}"
    found = kept.load(status, about)
    if found is None:
        found = find()
        kept.save(status, about, found)
    return found


def _scan(volume: Volume, look: Callable[[npt.NDArray[Any], Sequence[int]], None]) -> None:
    """Show all of a volume, part by part, in bounded memory; reading in threads, looking in this one."""
    if volume.array is not None:
        look(volume.array, [0] * len(volume.shape))
        return
    reader, grid = volume.open(), volume.grid
    count = max(1, _PIECE_NBYTES // max(1, volume.unit_nbytes))
    pieces = [np.arange(first, min(first + count, grid.count)) for first in range(0, grid.count, count)]

    def read(numbers: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        outs = [np.empty(volume.unit_nbytes, np.uint8) for _ in numbers]
        reader.read(numbers, outs)
        return outs

    threads = default_threads(1)
    with ThreadPoolExecutor(threads, "fastpipe-scan") as pool:
        coming = []
        for piece in [*pieces, *[None] * threads]:
            if piece is not None:
                coming.append((piece, pool.submit(read, piece)))
            if (piece is None or len(coming) > threads) and coming:
                numbers, read_parts = coming.pop(0)
                for number, out in zip(numbers.tolist(), read_parts.result(), strict=True):
                    box = grid.box(number)
                    unit = out.view(volume.dtype).reshape(grid.unit)
                    part = unit[tuple(slice(side.stop - side.start) for side in box)]
                    look(part, [side.start for side in box])

"""Passes through whole volumes in bounded memory, and what such passes have found, kept on disk."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.core.clock import StageClock
from fastpipe.core.machine import default_threads
from fastpipe.volumes.places import check_room
from fastpipe.volumes.reader import Counts, PatchReader
from fastpipe.volumes.sources import Role
from fastpipe.volumes.volume import UnitGrid, Volume, grown_unit

_PIECE_NBYTES = 1 << 24  # bytes of a volume that a thread reads at a time
# The file state for volumes that have no file; the description of the volume is then the whole key.
_NO_FILE = os.stat_result([0] * 19)
_MOST_LOOKED_AT = 1 << 18  # the most voxels that are examined at a time


def kept_arrays(
    volume: Volume, about: str, find: Callable[[], list[npt.NDArray[Any]]], kept: FileArrays | None
) -> Sequence[npt.NDArray[Any]]:
    """Return the arrays that ``find`` computes from a volume, one-dimensional ones.

    ``kept`` keeps them under the name ``about`` until the volume changes.  If ``kept`` is None, or if the
    volume's state is unknown, they are computed each time.
    """
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


def scan(roles: Sequence[Role], number: int, look: Callable[..., None]) -> None:
    """Pass the whole volume ``number`` to ``look``, box by box, in bounded memory; threads read the boxes.

    ``look`` gets a box's first voxel, and its part of the array of each role.  Only the dimensions along
    which patches are cut are divided into boxes.
    """
    first, shape, lead = roles[0].volumes[number], roles[0].spatial(number), len(roles[0].lead)
    what = f"the list of the {first.grid.count:,} parts of {first.name}, all of which are to be read,"
    check_room(8 * first.grid.count, what, "use another sampling")
    voxel_nbytes = sum(math.prod(role.lead) * role.dtype.itemsize for role in roles)
    boxes = UnitGrid(shape, grown_unit(first.grid.unit[lead:], shape, voxel_nbytes, _PIECE_NBYTES))
    readers = [PatchReader(role.volumes[number], StageClock(), Counts()) for role in roles]

    def read(number: int) -> tuple[list[int], list[npt.NDArray[Any]]]:
        box, parts = boxes.box(number), []
        start = [side.start for side in box]
        for role, reader in zip(roles, readers, strict=True):
            part = np.empty((*role.lead, *(side.stop - side.start for side in box)), role.dtype)
            reader.read([*[0] * len(role.lead), *start], part)
            parts.append(part)
        return start, parts

    threads, coming = default_threads(1), deque[Future[tuple[list[int], list[npt.NDArray[Any]]]]]()
    with ThreadPoolExecutor(threads, "fastpipe-scan") as pool:
        for number in range(boxes.count + threads):
            if number < boxes.count:
                coming.append(pool.submit(read, number))
            if number >= threads and coming:
                _look(*coming.popleft().result(), len(shape), look)


def _look(
    start: Sequence[int], parts: Sequence[npt.NDArray[Any]], dims: int, look: Callable[..., None]
) -> None:
    """Pass a box to ``look`` in small pieces, because ``look`` needs many times the memory of a piece."""
    shape = parts[0].shape[parts[0].ndim - dims :]
    most = max(part.size for part in parts) // max(1, math.prod(shape))
    sides, left = [], max(1, _MOST_LOOKED_AT // max(1, most))
    for dim, size in enumerate(shape):  # the pieces have whole rows if the rows are small enough
        sides.append(min(size, max(1, left // math.prod(shape[dim + 1 :]))))
        left = max(1, left // sides[-1])
    for begins in itertools.product(*map(range, [0] * len(shape), shape, sides)):
        box: list[Any] = [slice(at, at + side) for at, side in zip(begins, sides, strict=True)]
        look([a + b for a, b in zip(start, begins, strict=True)], *(part[(..., *box)] for part in parts))

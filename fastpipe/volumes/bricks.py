"""Boxes of a volume that are read at once: large enough to decode little twice, small enough for memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.text import in_bytes
from fastpipe.errors import OptionError
from fastpipe.volumes.opened import chunk_of
from fastpipe.volumes.volume import UnitReader, Volume
from fastpipe.volumes.zarr_writing import ZarrLayout

__all__ = ["Bricks", "aligned", "finish_all", "planned_bricks", "read_box", "read_together"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_ALIGNMENT = 16
_AUTO_NBYTES = 256 << 20
_TOGETHER_NBYTES = 8 << 20  # that a thread decodes at once, if units are no larger
_WORTH_NBYTES = 16 << 20  # of a brick: larger ones gain nothing but fewer units that are decoded twice


class Bricks(NamedTuple):
    """How a volume is gone through.

    Attributes:
        shape: of a brick: whole chunks of the copy.
        threads: that work on one.
        amplification: bytes that are decoded for each of the volume.
    """

    shape: tuple[int, ...]
    threads: int
    amplification: float

    def boxes(self, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """The bricks of an array, in C order."""
        sides = (
            [slice(at, min(at + side, size)) for at in range(0, size, side)]
            for size, side in zip(shape, self.shape, strict=True)
        )
        return itertools.product(*sides)


def planned_bricks(volume: Volume, layout: ZarrLayout, threads: int, memory: int | None) -> Bricks:
    """The bricks in which the least is decoded.

    Args:
        volume: to be read.
        layout: of the copy.
        threads: at most.
        memory: bytes for all that is done; None takes some, or what is needed at least.

    Raises:
        OptionError: that is too little.
    """
    # A thread decodes all of a stored chunk, or compresses a chunk of the copy.
    stored = math.prod(chunk_of(volume)) * volume.dtype.itemsize
    each = 2 * max(stored, volume.unit_nbytes, layout.chunk_nbytes)
    least = each + 2 * layout.chunk_nbytes
    if memory is None:
        memory = max(_AUTO_NBYTES, least)
    if memory < least:
        raise OptionError(
            f"--memory of {in_bytes(memory)} is too little: chunks of {in_bytes(stored)} to ones of "
            f"{in_bytes(layout.chunk_nbytes)} take at least {in_bytes(least)}"
        )
    threads = max(1, min(threads, (memory - 2 * layout.chunk_nbytes) // each))
    # A brick of the volume, and in the end the same one of the copy.
    room = (memory - threads * each) // 2
    # In many dimensions there are many combinations.
    growth = 1.34 if len(layout.shape) <= 3 else 2.0
    options = [
        [
            (side * times, _decoded(size, unit, side * times))
            for times in _some_numbers(-(-size // side), growth)
        ]
        for size, side, unit in zip(layout.shape, layout.chunk, volume.grid.unit, strict=True)
    ]
    best: tuple[tuple[float, ...], tuple[int, ...], float] | None = None
    for combination in itertools.product(*options):
        shape = tuple(side for side, _ in combination)
        nbytes = math.prod(shape) * layout.dtype.itemsize
        if nbytes > room and best is not None:
            continue
        times = math.prod(factor for _, factor in combination)
        rank = (float(nbytes > room), round(times, 2), -min(nbytes, _WORTH_NBYTES), nbytes)
        if best is None or rank < best[0]:
            best = rank, shape, times
    assert best is not None
    return Bricks(best[1], threads, best[2])


def _some_numbers(most: int, growth: float) -> list[int]:
    """Numbers up to one, the larger the farther apart."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * growth))))
    return found


def _decoded(size: int, unit: int, side: int) -> float:
    """Along one dimension, how much is decoded for each element."""
    begins = np.arange(0, max(size, 1), side)
    ends = np.minimum(begins + side, max(size, 1))
    return float((((ends - 1) // unit - begins // unit + 1) * unit).sum() / max(size, 1))


def aligned(nbytes: int, count: int) -> list[UInt8Array]:
    """Memory for some units: each uint8 (nbytes,), as ``UnitReader.read`` wants it."""
    step = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = np.empty(step * count + _ALIGNMENT, np.uint8)
    skipped = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return [memory[skipped + step * number :][:nbytes] for number in range(count)]


def read_box(
    volume: Volume, reader: UnitReader, box: tuple[slice, ...], dtype: np.dtype[Any], pool: Executor
) -> npt.NDArray[Any]:
    """Read a box, each of its units once, by all threads.

    Args:
        volume, reader: of it.
        box: within it.
        dtype: of the result, which may have another order of bytes than the volume.
        pool: the threads.

    Returns:
        An array (…) of the box's shape.

    Raises:
        DamagedUnitError: the volume does not hold what it should.
        OSError: it cannot be read.
    """
    out = np.empty([side.stop - side.start for side in box], dtype)
    starts = [side.start for side in box]
    numbers = volume.grid.touched(starts, [side.stop for side in box]).numbers

    def read(some: Int64Array) -> None:
        parts = aligned(volume.unit_nbytes, len(some))
        reader.read(some, parts)
        for number, part in zip(some.tolist(), parts, strict=True):
            _copy(volume, number, part, box, out)

    finish_all([pool.submit(read, some) for some in read_together(volume, numbers)])
    return out


def read_together(volume: Volume, numbers: Int64Array) -> list[Int64Array]:
    """Units in groups of those that are stored together, none of which takes much memory."""
    chunks = volume.stored_in(numbers)
    order = np.argsort(chunks, kind="stable")
    ends = np.flatnonzero(np.diff(chunks[order])) + 1
    most = max(1, _TOGETHER_NBYTES // max(1, volume.unit_nbytes))
    groups = np.split(numbers[order], ends)
    return [group[at : at + most] for group in groups for at in range(0, len(group), most)]


def _copy(
    volume: Volume, number: int, part: UInt8Array, box: tuple[slice, ...], out: npt.NDArray[Any]
) -> None:
    """Copy of a unit what is in the box."""
    unit = part.view(volume.dtype).reshape(volume.grid.unit)
    to, of = [], []
    for wanted, side in zip(box, volume.grid.box(number), strict=True):
        begin, end = max(wanted.start, side.start), min(wanted.stop, side.stop)
        to.append(slice(begin - wanted.start, end - wanted.start))
        of.append(slice(begin - side.start, end - side.start))
    out[tuple(to)] = unit[tuple(of)]


def finish_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """The results of tasks, in their order; none of them runs when this returns, or raises an error."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()

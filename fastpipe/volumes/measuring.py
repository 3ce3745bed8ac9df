"""How fast a volume is decoded on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastpipe.core.clock import StageClock
from fastpipe.volumes.bricks import aligned, finish_all, read_together
from fastpipe.volumes.reader import Counts, PatchReader
from fastpipe.volumes.volume import Volume

__all__ = ["Speed", "copy_seconds", "decode_speed"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Speed:
    """What was decoded.

    Attributes:
        threads: that decoded.
        units: that were decoded.
        nbytes: of them.
        seconds: that it took.
    """

    threads: int
    units: int
    nbytes: int
    seconds: float

    @property
    def units_per_s(self) -> float:
        """Units in a second."""
        return self.units / self.seconds

    @property
    def nbytes_per_s(self) -> float:
        """Bytes in a second."""
        return self.nbytes / self.seconds


def decode_speed(
    volume: Volume,
    patch: Sequence[int] | None,
    threads: int,
    seconds: float,
    within: tuple[slice, ...] | None = None,
) -> Speed:
    """Read units for some time, as patches at random places need them; each thread reads some at least.

    Another number of threads reads at other places, not what the system has in memory since the one before.

    Args:
        volume: to be read; it has units.
        patch: the patches' size, along the last dimensions; None reads any units.
        threads: that read.
        seconds: after which none begins to read more.
        within: the part of the volume where patches begin; None for all of it.

    Raises:
        DamagedUnitError: the volume does not hold what it should.
        OSError: it cannot be read.
    """
    reader, groups, lock = volume.open(), _groups(volume, patch, within, threads), threading.Lock()
    begun = time.perf_counter()
    deadline = begun + seconds

    def work() -> int:
        count, parts = 0, aligned(volume.unit_nbytes, 1)
        while True:
            with lock:
                group = next(groups)
            if len(parts) < len(group):  # else the memory is used again, as that of a batch is
                parts = aligned(volume.unit_nbytes, len(group))
            reader.read(group, parts[: len(group)])
            count += len(group)
            if time.perf_counter() >= deadline:
                return count

    with ThreadPoolExecutor(threads, "fastpipe-inspect") as pool:
        count = sum(finish_all([pool.submit(work) for _ in range(threads)]))
    taken = max(time.perf_counter() - begun, 1e-9)
    return Speed(threads, count, count * volume.unit_nbytes, taken)


def _groups(
    volume: Volume, patch: Sequence[int] | None, within: tuple[slice, ...] | None, seed: int
) -> Iterator[Int64Array]:
    """Units that are stored together and needed together, without end."""
    rng = np.random.default_rng(seed)
    while True:
        if patch is None:
            yield rng.integers(0, volume.grid.count, 1)
            continue
        start, whole = _place(volume, patch, rng, within)
        stop = [at + side for at, side in zip(start, whole, strict=True)]
        groups = read_together(volume, volume.grid.touched(start, stop).numbers)
        for number in rng.permutation(len(groups)).tolist():
            yield groups[number]


def _place(
    volume: Volume,
    patch: Sequence[int],
    rng: np.random.Generator,
    within: tuple[slice, ...] | None = None,
) -> tuple[list[int], tuple[int, ...]]:
    """Where a patch begins, and its size in all dimensions."""
    whole = (*volume.shape[: len(volume.shape) - len(patch)], *patch)
    start = []
    for size, side, part in zip(volume.shape, whole, within or [None] * len(whole), strict=True):
        first, end = (0, size) if part is None else (min(part.start, size - side), min(part.stop, size))
        start.append(int(rng.integers(first, max(first, end - side) + 1)))
    return start, whole


def copy_seconds(volume: Volume, patch: Sequence[int]) -> float:
    """How long it takes to copy a patch from decoded units, by one thread.

    Raises:
        DamagedUnitError, OSError: as for ``decode_speed``.
        OptionError: patches of so many dimensions cannot be read.
    """
    clock = StageClock()
    start, whole = _place(volume, patch, np.random.default_rng(1))
    reader = PatchReader(volume, clock, Counts())
    out = np.zeros(whole, volume.dtype)  # touched once before, as memory is that is used again
    out.fill(0)
    reader.read(start, out)
    return clock.totals().get("copy", 0.0)

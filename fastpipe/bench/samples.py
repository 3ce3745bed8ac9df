"""Samples that other processes make or read: patches of arrays, and rows of functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# ---- Positions of patches --------------------------------------------------------------------------

_SEED = 7


def start_of(shape: Sequence[int], patch: Sequence[int], index: int) -> npt.NDArray[np.int64]:
    """Return the random start of patch ``index``, int64 (D,), uniform over all positions inside ``shape``.

    >>> start_of((5, 5), (5, 5), 3).tolist()
    [0, 0]
    """
    rng = np.random.default_rng((_SEED, index))
    last = np.asarray(shape) - np.asarray(patch)
    return np.asarray(rng.integers(0, last, endpoint=True), np.int64)


def box_at(start: Sequence[int] | npt.NDArray[np.int64], patch: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of the patch that begins at ``start``.

    >>> box_at((1, 0), (2, 2))
    (slice(1, 3, None), slice(0, 2, None))
    """
    return tuple(slice(int(one), int(one) + side) for one, side in zip(start, patch, strict=True))


class ZarrPatches:
    """The dataset that ``FastPatchDataset`` replaces: a sample has the same slice of several Zarr arrays.

    Each process opens the arrays on its first read.
    """

    def __init__(self, paths: Sequence[str], shape: Sequence[int], patch: Sequence[int], count: int) -> None:
        self._paths, self._shape, self._patch, self._count = list(paths), shape, patch, count
        self._arrays: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        if not self._arrays:
            import zarr

            self._arrays = [zarr.open_array(path, mode="r") for path in self._paths]
        box = box_at(start_of(self._shape, self._patch, index), self._patch)
        return tuple(array[box] for array in self._arrays)


# ---- Functions that make rows -----------------------------------------------------------------------
#
# Worker processes import this module, so the module imports only NumPy.  Row ``i`` is
# ``function(i, np.random.default_rng([SEED, i]))``.

SEED = 7
BATCH_ROWS = 256  # number of rows in a call of ``batch`` by `fastpipe.generate`, if rows are small

Row = dict[str, Any]
Function = Callable[[int, np.random.Generator], Row]

_POINTS, _SINES = np.arange(256) / 256, 8


def slow(index: int, rng: np.random.Generator) -> Row:
    """Return a row of 4 kB after 5 ms of work."""
    return busy(rng, 5e-3, 1 << 10)


def quick(index: int, rng: np.random.Generator) -> Row:
    """Return a row of 4 kB after 100 µs of work."""
    return busy(rng, 1e-4, 1 << 10)


def waves(index: int, rng: np.random.Generator) -> Row:
    """Return a row with a sum of sines; ``waves.batch`` makes many rows at once."""
    return {"wave": _waves(rng)}


def waves_alone(index: int, rng: np.random.Generator) -> Row:
    """Return the same row as ``waves``; this function has no attribute ``batch``."""
    return {"wave": _waves(rng)}


def made(function: Function, index: int) -> Row:
    return function(index, generator(index))


def generator(index: int) -> np.random.Generator:
    return np.random.default_rng([SEED, index])


def rows_of(function: Function, count: int) -> Row:
    """Return the first ``count`` rows of a function, stacked: an array (count, …) for each name."""
    rows = [made(function, index) for index in range(count)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def busy(rng: np.random.Generator, seconds: float, numbers: int) -> Row:
    """Return a row with random numbers, after ``seconds`` of work in all.

    The processor time of the thread counts instead of wall time.  Otherwise two threads that share a core
    would finish as early as a thread with its own core.
    """
    begun = time.thread_time()
    values, number = rng.random(numbers, np.float32), rng.integers(1000)
    while time.thread_time() - begun < seconds:
        pass
    return {"x": values, "y": number}


def _waves(rng: Any) -> npt.NDArray[np.float32]:
    """Return one wave, (256,); if ``rng`` has the generators of B rows, return B waves, (B, 256)."""
    rates, phases = rng.uniform(1, 50, size=_SINES), rng.uniform(0, 2 * np.pi, size=_SINES)
    found = np.zeros((*rates.shape[:-1], len(_POINTS)))
    for sine in range(_SINES):
        found += np.sin(rates[..., sine, None] * _POINTS + phases[..., sine, None])
    return found.astype(np.float32)


def _many_waves(indices: npt.NDArray[np.int64], rng: Any) -> Row:
    return {"wave": _waves(rng)}


waves.batch = _many_waves  # type: ignore[attr-defined]

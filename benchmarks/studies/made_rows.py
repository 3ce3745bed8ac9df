"""Rows for other libraries' processes, and for ``fn.batch`` alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.bench.samples import Function, Row, busy, generator, made

_TIMES = np.arange(250) / 25  # seconds, of a sequence of 10 s
_JOINTS, _HARMONICS = 25, 2


def wide(index: int, rng: np.random.Generator) -> Row:
    """A row that takes 100 µs, 16 kB."""
    return busy(rng, 1e-4, 1 << 12)


def counted(index: int, rng: np.random.Generator) -> Row:
    """Eight bytes; ``counted.batch`` makes many at once."""
    return {"number": rng.random()}


def _many_counted(indices: npt.NDArray[np.int64], rng: Any) -> Row:
    return {"number": rng.random()}


counted.batch = _many_counted  # type: ignore[attr-defined]


def motion(index: int, rng: np.random.Generator) -> Row:
    """A sequence of places of joints, 75 kB, by large operations of NumPy: about 1 ms."""
    size = (_HARMONICS, 1, _JOINTS, 3)
    rates, phases = rng.uniform(0.2, 4, size=size), rng.uniform(0, 2 * np.pi, size=size)
    far = rng.normal(size=size)
    places = (far * np.sin(rates * _TIMES[:, None, None] + phases)).sum(0)
    return {"motion": places.astype(np.float32), "theme": rng.integers(5)}


def made_of(function: Function, shards: Iterable[Iterable[int]]) -> Iterator[Row]:
    """The rows of some shards, one after the other."""
    for shard in shards:
        for index in shard:
            yield made(function, index)


class Generators:
    """Generators of rows; each method draws for all of them, as that which `fastpipe.generate` gives a batch.

    Args:
        indices: the rows'.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._rows = [generator(index) for index in indices]

    def uniform(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
        """Numbers of each row's own generator, (B, …)."""
        return np.stack([row.uniform(*args, **kwargs) for row in self._rows])

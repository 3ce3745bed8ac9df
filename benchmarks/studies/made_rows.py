"""Rows for other libraries' processes, and for ``fn.batch`` alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.bench.samples import Function, Row, generator, made

__all__ = ["Generators", "made_of"]


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

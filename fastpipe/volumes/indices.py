"""Indices that carry the seed and epoch of their patches through a stock loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KeyedIndex", "keys_of"]


class KeyedIndex(int):
    """A sample's number in the epoch of a seed.

    Attributes:
        seed, epoch: of the epoch.
    """

    seed: int
    epoch: int

    def __new__(cls, index: int, seed: int, epoch: int) -> KeyedIndex:
        made = super().__new__(cls, index)
        made.seed, made.epoch = seed, epoch
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedIndex, (int(self), self.seed, self.epoch)


def keys_of(indices: Sequence[int] | npt.NDArray[np.int64]) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
    """By seed and epoch the places among indices that carry these; empty where one carries none."""
    if isinstance(indices, np.ndarray):
        return {}
    found: dict[tuple[int, int], list[int]] = {}
    for row, index in enumerate(indices):
        if not isinstance(index, KeyedIndex):
            return {}
        found.setdefault((index.seed, index.epoch), []).append(row)
    return {key: np.array(rows) for key, rows in found.items()}
